use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::json;
use tempfile::TempDir;

use super::fake::{FakeServer, Fault};
use super::*;
use crate::artifact::Artifact;
use crate::record::{EndStatus, Record, RunId};
use crate::run::Run;
use crate::tests::{assert_says, end, run_info};

struct Delivered {
    server: FakeServer,
    sink: MlflowSink,
    info: RunInfo,
    _folder: TempDir,
}

impl Delivered {
    fn new() -> Self {
        let server = FakeServer::start();
        let folder = tempfile::tempdir().unwrap();
        let client = MlflowServer::new(&server.address).unwrap();
        Self {
            sink: MlflowSink::new(client, "e").live(),
            info: run_info(folder.path()),
            server,
            _folder: folder,
        }
    }

    /// Opens and delivers once, as the feeder does.
    fn deliver(&mut self, entries: &[Entry]) -> Result<()> {
        let position = self.sink.open(&self.info)?;
        for entry in entries {
            if entry.n >= position.next || matches!(entry.record, Record::Series { .. }) {
                self.sink.write(Origin::Run, entry)?;
            }
        }
        self.sink.flush()
    }

    /// Delivers until it succeeds, and returns the number of failures.
    fn deliver_at_last(&mut self, entries: &[Entry]) -> usize {
        for failures in 0..10 {
            match self.deliver(entries) {
                Ok(()) => return failures,
                Err(error) => assert!(error.is_remote(), "{error}"),
            }
        }
        panic!("it never succeeds");
    }
}

fn entries(records: Vec<Record>) -> Vec<Entry> {
    let entries = (0..).zip(records).map(|(n, record)| Entry {
        n,
        ms: 1_700_000_000_000 + n,
        record,
    });
    entries.collect()
}

fn series(i: u32, key: &str) -> Record {
    let key = key.to_owned();
    Record::Series { i, key }
}

fn metrics(step: u64, values: impl IntoIterator<Item = f64>) -> Record {
    crate::tests::metrics(step, None, values)
}

fn set_tag(key: &str, value: &str) -> Record {
    let set = [(key.to_owned(), value.to_owned())].into();
    Record::Tag { set }
}

fn set_param(key: &str, value: serde_json::Value) -> Record {
    let set = [(key.to_owned(), value)].into();
    Record::Param { set }
}

/// Returns three points of a series, a parameter, a tag and an end.
fn small_run() -> Vec<Entry> {
    entries(vec![
        series(0, "train/loss"),
        set_param("lr", json!(0.1)),
        metrics(1, [1.5]),
        metrics(2, [0.5]),
        set_tag("note", "x"),
        metrics(3, [f64::NAN]),
        end(EndStatus::Finished),
    ])
}

fn assert_small_run(server: &FakeServer) {
    let state = server.state();
    let [run] = state.active()[..] else {
        panic!("{} runs", state.active().len());
    };
    let points: Vec<_> = run
        .metrics
        .iter()
        .map(|(key, ms, step, value)| (key.as_str(), *ms, *step, value.as_str()))
        .collect();
    assert_eq!(
        points,
        [
            ("train/loss", 1_700_000_000_002, 1, "1.5"),
            ("train/loss", 1_700_000_000_003, 2, "0.5"),
            ("train/loss", 1_700_000_000_005, 3, "\"NaN\""),
        ]
    );
    assert_eq!(run.params["lr"], "0.1");
    assert_eq!(run.tags["note"], "x");
    assert_eq!(run.status, "FINISHED");
}

#[test]
fn a_run_is_delivered_once_over_each_fault() {
    let paths = [
        "experiments/get-by-name",
        "experiments/create",
        "runs/search",
        "runs/create",
        "runs/get",
        "runs/log-batch",
        "runs/update",
    ];
    let faults = [
        Fault::LostAnswer,
        Fault::LostRequest,
        Fault::Says(
            500,
            "{\"error_code\": \"INTERNAL_ERROR\", \"message\": \"\"}",
        ),
        Fault::Says(503, "<html>busy"),
        Fault::Says(429, ""),
        Fault::Says(200, "<html>log in"),
        Fault::Says(404, "<html>nothing"),
        Fault::Says(200, "[]"),
    ];
    for path in paths {
        for fault in faults {
            let mut run = Delivered::new();
            run.server.fail(path, fault);
            let failures = run.deliver_at_last(&small_run());
            let is_sent_again = !matches!(fault, Fault::Says(200 | 404, _));
            assert_eq!(failures, usize::from(!is_sent_again), "{path} {fault:?}");
            assert_small_run(&run.server);
            assert_eq!(run.server.state().runs.len(), 1, "{path} {fault:?}");
        }
    }
}

#[test]
fn a_server_that_stays_busy_is_said_after_a_few_requests() {
    let mut run = Delivered::new();
    for _ in 0..4 {
        run.server.fail("runs/log-batch", Fault::Says(503, "busy"));
    }
    let error = run.deliver(&small_run()).unwrap_err();
    assert!(error.is_remote());
    assert_says(&error, "503: busy");
    run.deliver(&small_run()).unwrap();
    assert_small_run(&run.server);
}

#[test]
fn a_slow_answer_makes_no_ghost_run() {
    for fault in [
        Fault::SlowAnswer(Duration::from_secs(3)),
        Fault::SlowAct(Duration::from_secs(3)),
    ] {
        let mut run = Delivered::new();
        let client = MlflowServer::new(&run.server.address).unwrap();
        let client = client.with_timeout(Duration::from_millis(500));
        run.sink = MlflowSink::new(client, "e").live();
        run.server.fail("runs/create", fault);
        let begun = Instant::now();
        let mut all = small_run();
        let last = all.pop().unwrap();
        let error = run.deliver(&all).unwrap_err();
        assert_says(&error, "no answer within 0.5 s");
        assert!(begun.elapsed() < Duration::from_secs(2));
        // The timeout is the usual one, since other answers may take half a second on a busy machine.
        let client = MlflowServer::new(&run.server.address).unwrap();
        run.sink = MlflowSink::new(client, "e").live();
        run.deliver(&all).unwrap();
        // The first request has acted by now.
        std::thread::sleep(Duration::from_secs(4).saturating_sub(begun.elapsed()));
        run.sink.write(Origin::Run, &last).unwrap();
        run.sink.flush().unwrap();
        assert_small_run(&run.server);
        let runs = 1 + usize::from(matches!(fault, Fault::SlowAct(_)));
        assert_eq!(run.server.state().runs.len(), runs);
    }
}

#[test]
fn large_entries_are_split() {
    let mut run = Delivered::new();
    let mut records: Vec<_> = (0..1001)
        .map(|i| series(i, &format!("train/{i}")))
        .collect();
    records.push(metrics(1, (0..1001).map(f64::from)));
    records.push(set_tag("a", "b"));
    // A request of 1000 metrics has no room for a tag.
    records.push(metrics(2, (0..999).map(f64::from)));
    records.push(set_tag("c", "d"));
    run.deliver(&entries(records)).unwrap();
    {
        let state = run.server.state();
        assert_eq!(state.active()[0].metrics.len(), 2000);
        assert_eq!(state.active()[0].tags["c"], "d");
        assert_eq!(state.count("log-batch"), 3);
    }
    // The connection breaks between the parts of an entry.
    let mut run = Delivered::new();
    let mut records: Vec<_> = (0..1500)
        .map(|i| series(i, &format!("train/{i}")))
        .collect();
    records.push(metrics(1, (0..1500).map(f64::from)));
    let all = entries(records);
    run.sink.open(&run.info).unwrap();
    for entry in &all {
        run.sink.write(Origin::Run, entry).unwrap();
    }
    let open = run.sink.open.as_mut().unwrap();
    open.send_front(usize::MAX).unwrap();
    assert_eq!(run.server.state().active()[0].metrics.len(), 1000);
    run.deliver(&all).unwrap();
    assert_eq!(run.server.state().active()[0].metrics.len(), 1500);
}

#[test]
fn a_lost_cursor_changes_nothing_on_the_server() {
    let mut run = Delivered::new();
    run.deliver(&small_run()).unwrap();
    let cursor = run.info.folder.join("mlflow.json");
    let requests = run.server.state().count("log-batch");
    run.deliver(&small_run()).unwrap();
    assert_eq!(run.server.state().count("log-batch"), requests);
    for torn in [None, Some("{\"server\":")] {
        match torn {
            None => fs::remove_file(&cursor).unwrap(),
            Some(text) => fs::write(&cursor, text).unwrap(),
        }
        run.deliver(&small_run()).unwrap();
        assert_small_run(&run.server);
    }
    assert!(run.server.state().count("log-batch") > requests);
    assert_eq!(run.server.state().runs.len(), 1);
}

#[test]
fn a_server_that_lost_the_run_gets_all_of_it() {
    let mut run = Delivered::new();
    run.deliver(&small_run()).unwrap();
    run.server.state().runs.clear();
    run.deliver(&small_run()).unwrap();
    assert_small_run(&run.server);
}

#[test]
fn what_was_deleted_is_said_and_not_made_again() {
    let mut run = Delivered::new();
    run.deliver(&small_run()).unwrap();
    run.server.state().runs[0].deleted = true;
    let error = run.deliver(&small_run()).unwrap_err();
    assert!(error.is_remote());
    assert_says(&error, "mlflow runs restore --run-id r0");
    run.server.state().runs[0].deleted = false;

    // The run is deleted during delivery.
    run.sink.open(&run.info).unwrap();
    run.server.state().runs[0].deleted = true;
    let later = Entry {
        n: 7,
        ms: 0,
        record: set_tag("k", "v"),
    };
    run.sink.write(Origin::Run, &later).unwrap();
    assert_says(&run.sink.flush().unwrap_err(), "was deleted");

    run.server.state().experiments.insert("e".to_owned(), true);
    let error = run.deliver(&small_run()).unwrap_err();
    assert_says(&error, "experiments restore");
}

#[test]
fn parameters_that_somebody_else_changed_become_tags() {
    let mut run = Delivered::new();
    run.sink.open(&run.info).unwrap();
    let other = ("lr".to_owned(), "7".to_owned());
    run.server.state().runs[0].params.extend([other]);
    for entry in entries(vec![
        set_param("lr", json!(0.1)),
        set_param("lr", json!(0.2)),
    ]) {
        run.sink.write(Origin::Run, &entry).unwrap();
    }
    run.sink.flush().unwrap();
    let state = run.server.state();
    assert_eq!(state.runs[0].params["lr"], "7");
    assert_eq!(state.runs[0].tags["param.changed.lr"], "0.2");
}

#[test]
fn what_a_server_refuses_does_not_hold_the_rest_up() {
    let mut run = Delivered::new();
    run.server.state().longest_tag = 200;
    let long = "x".repeat(201);
    let mut records = vec![
        series(0, "train/loss"),
        set_tag("a", "1"),
        set_tag("b", &long),
    ];
    records.extend((0..50).map(|step| metrics(step, [0.5])));
    records.push(set_tag("c", "3"));
    run.deliver(&entries(records)).unwrap();
    let state = run.server.state();
    assert_eq!(state.runs[0].metrics.len(), 50);
    assert_eq!(state.runs[0].tags["c"], "3");
    assert!(!state.runs[0].tags.contains_key("b"));
}

#[test]
fn a_journal_that_is_shorter_than_what_was_delivered_is_delivered_again() {
    let runs = tempfile::tempdir().unwrap();
    let run = Run::builder("mnist").runs_folder(runs.path()).launch("x");
    let run = run.start().unwrap();
    run.log("train", [("loss", 0.5)], 1, None);
    let folder = run.folder().to_owned();
    run.flush().unwrap();
    let journal = folder.join("journal.jsonl");
    let before = fs::read(&journal).unwrap();
    run.finish().unwrap();
    let server = FakeServer::start();
    let deliver = || {
        let client = MlflowServer::new(&server.address).unwrap();
        crate::internal::deliver(&folder, &mut MlflowSink::new(client, "e").live()).unwrap();
    };
    deliver();
    assert_eq!(server.state().runs[0].metrics.len(), 1);
    // An older copy replaces the journal, and the program continues with it.
    fs::write(&journal, before).unwrap();
    deliver();
    let run = Run::builder("mnist").runs_folder(runs.path()).launch("x");
    let run = run.start().unwrap();
    assert_eq!(run.folder(), folder);
    run.log("train", [("loss", 0.25)], 2, None);
    run.finish().unwrap();
    deliver();
    let state = server.state();
    let steps: Vec<_> = state.runs[0].metrics.iter().map(|x| x.2).collect();
    assert_eq!((state.runs.len(), steps), (1, vec![1, 2]));
}

#[test]
fn an_artifact_survives_faults_and_what_is_not_taken() {
    let runs = tempfile::tempdir().unwrap();
    let at = |name: &str| runs.path().join(name);
    for name in ["a", "b", "c"] {
        fs::write(at(name), name).unwrap();
    }
    let run = Run::builder("mnist").runs_folder(runs.path());
    let run = run.start().unwrap();
    let mut made = Artifact::create("m");
    for name in ["a", "b", "c"] {
        made = made.add_file(at(name)).unwrap();
    }
    run.mark_output(made).unwrap();
    let folder = run.folder().to_owned();
    run.finish().unwrap();

    let server = FakeServer::start();
    let deliver = || {
        let client = MlflowServer::new(&server.address).unwrap();
        crate::internal::deliver(&folder, &mut MlflowSink::new(client, "e"))
    };
    server.fail("mlflow-artifacts", Fault::LostAnswer);
    // The connection breaks in the middle.
    for _ in 0..4 {
        server.fail(
            "mlflow-artifacts/artifacts/1/r0/artifacts/artifacts/m/v1/b",
            Fault::LostRequest,
        );
    }
    server.fail(
        "mlflow-artifacts/artifacts/1/r0/artifacts/artifacts/m/v1/c",
        Fault::Says(413, "<html>"),
    );
    assert!(deliver().unwrap_err().is_remote());
    deliver().unwrap();
    let state = server.state();
    let root = "1/r0/artifacts/artifacts/m";
    let files: Vec<_> = state
        .files
        .keys()
        .filter_map(|path| path.strip_prefix(root))
        .collect();
    assert_eq!(files, ["/v1.json", "/v1/a", "/v1/b"]);
    // The first file was sent once with a lost answer, and once more.
    assert_eq!(state.count("artifacts/m/v1/a"), 2);
    assert_eq!(state.runs[0].status, "FINISHED");
}

#[test]
fn who_is_not_let_in_reads_which_variables_to_set() {
    for (status, said) in [
        (401, "You are not authenticated."),
        (
            403,
            "{\"error_code\": \"PERMISSION_DENIED\", \"message\": \"no\"}",
        ),
    ] {
        let mut run = Delivered::new();
        run.server
            .fail("experiments/get-by-name", Fault::Says(status, said));
        let error = run.deliver(&small_run()).unwrap_err();
        assert!(error.is_remote() && !error.is_temporary(), "{error}");
        for expected in ["MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_TOKEN"] {
            assert_says(&error, expected);
        }
    }
}

#[test]
fn credentials_are_sent() {
    let server = FakeServer::start();
    let run = Delivered::new();
    let address = server.address.replace("http://", "http://me:a%3Ab@");
    let client = MlflowServer::new(&address).unwrap();
    client.open_run("e", &run.info, None).unwrap();
    let sent = server.state().authorization.take();
    assert_eq!(sent.as_deref(), Some("Basic bWU6YTpi"));
    let client = client.with_token("t");
    client.open_run("e", &run.info, None).unwrap();
    let sent = server.state().authorization.take();
    assert_eq!(sent.as_deref(), Some("Bearer t"));
}

#[test]
fn no_proxy_is_asked_for_a_server_on_this_host() {
    let mut test = Command::new(std::env::current_exe().unwrap());
    test.args(["--exact", "mlflow::tests::credentials_are_sent"]);
    test.env("HTTP_PROXY", "http://127.0.0.1:1")
        .env("NO_PROXY", "");
    let ran = test.output().unwrap();
    let printed = String::from_utf8_lossy(&ran.stdout);
    assert!(
        ran.status.success() && printed.contains("1 passed"),
        "{printed}"
    );
}

#[test]
fn files_are_sent_once() {
    let run = Delivered::new();
    let client = MlflowServer::new(&run.server.address).unwrap();
    let path = run.info.folder.join("model.bin");
    let sent = || {
        let state = run.server.state();
        state.files["1/r0/artifacts/m/model.bin"].clone()
    };
    fs::write(&path, "weights").unwrap();
    let mut opened = client.open_run("e", &run.info, None).unwrap();
    run.server.fail("mlflow-artifacts", Fault::LostAnswer);
    opened.send_file("m/model.bin", &path).unwrap();
    assert_eq!(sent(), b"weights");
    fs::write(&path, "WEIGHTS").unwrap();
    let mut opened = client.open_run("e", &run.info, None).unwrap();
    opened.send_file("m/model.bin", &path).unwrap();
    assert_eq!(sent(), b"weights", "the size is the same");
    fs::write(&path, "other weights").unwrap();
    opened.send_file("m/model.bin", &path).unwrap();
    assert_eq!(sent(), b"other weights");
}

#[test]
fn a_server_that_is_not_there_is_said() {
    // A program cannot listen on the near end of a connection, and no other gets the port while it is open.
    let far = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let near = std::net::TcpStream::connect(far.local_addr().unwrap()).unwrap();
    let address = format!("http://{}", near.local_addr().unwrap());
    let mut run = Delivered::new();
    run.sink = MlflowSink::new(MlflowServer::new(&address).unwrap(), "e");
    let error = run.deliver(&small_run()).unwrap_err();
    assert!(error.is_remote());
    assert_says(&error, &address);
}

#[test]
fn an_experiment_is_found_by_its_id() {
    let by = |name: &str, id: &str| {
        Experiment::by(|variable| match variable {
            "MLFLOW_EXPERIMENT_NAME" => Some(name.to_owned()),
            "MLFLOW_EXPERIMENT_ID" => Some(id.to_owned()),
            _ => None,
        })
    };
    assert_eq!(by("e", "1"), Experiment::Name("e".to_owned()));
    assert_eq!(by("", ""), Experiment::Name("Default".to_owned()));

    let mut run = Delivered::new();
    run.deliver(&small_run()).unwrap();
    run.sink.experiment = by("", "1");
    run.info.id = RunId::new();
    run.deliver(&small_run()).unwrap();
    assert_eq!(run.server.state().active().len(), 2);
    assert_eq!(run.server.state().experiments.len(), 1);

    run.sink.experiment = by("", "7");
    let error = run.deliver(&small_run()).unwrap_err();
    assert_says(&error, "no experiment 7");
}
