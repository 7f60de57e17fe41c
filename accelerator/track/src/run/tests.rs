use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::builder::changes;
use super::settings::flatten;
use super::worker::Journal;
use super::*;
use crate::history::{RunHistory, RunStatus};
use crate::journal::RunLock;
use crate::record::{EndStatus, Entry};
use crate::runs::RunSummary;
use crate::sink::{CsvFile, Origin, RunInfo, Sink, SinkPosition};
use crate::system::SystemSampler;
use crate::tensorboard::TensorBoard;
use crate::tests::{assert_says, start};

/// Returns the settings of a run that is called `a`.
fn builder(runs: &tempfile::TempDir) -> RunBuilder {
    Run::builder("a").runs_folder(runs.path())
}

fn losses(folder: &Path) -> Vec<(u64, f64)> {
    let history = RunHistory::read(folder).unwrap();
    let series = history.series("train/loss").unwrap();
    series.points.iter().map(|x| (x.step, x.value)).collect()
}

#[test]
fn what_was_logged_comes_back() {
    let runs = tempfile::tempdir().unwrap();
    let run = Run::builder("mnist")
        .runs_folder(runs.path())
        .hyperparameters(&serde_json::json!({ "lr": 0.1, "model": { "width": 3 } }))
        .unwrap()
        .tag("a", "b")
        .start()
        .unwrap();
    run.log(
        "train",
        [("loss", 0.1 + 0.2), ("accuracy", f64::NAN)],
        1,
        0.5,
    );
    run.log_means("test", [("loss", f64::NEG_INFINITY, 7)], 1, None);
    run.log_text("note/a", "text", 1);
    run.set_hyperparameters(&serde_json::json!({ "lr": 0.2 }))
        .unwrap();
    let folder = run.folder().to_owned();
    let status = RunHistory::read(&folder).unwrap().status();
    assert_eq!(status, RunStatus::Running);
    run.finish().unwrap();

    let history = RunHistory::read(&folder).unwrap();
    assert_eq!(history.status(), RunStatus::Finished);
    assert_eq!(history.name, "mnist");
    let keys: Vec<_> = history.series.iter().map(|x| x.key.as_str()).collect();
    assert_eq!(keys, ["train/loss", "train/accuracy", "test/loss"]);
    let point = history.series[0].points[0];
    assert_eq!(
        (point.value, point.step, point.epoch),
        (0.1 + 0.2, 1, Some(0.5))
    );
    assert!(history.series[1].points[0].value.is_nan());
    let point = history.series[2].points[0];
    assert_eq!((point.value, point.count), (f64::NEG_INFINITY, Some(7)));
    assert_eq!(history.tags["a"], "b");
    assert_eq!(history.hyperparameters["model.width"].value, 3);
    let lr = &history.hyperparameters["lr"];
    assert_eq!(
        (&lr.value, &lr.earlier[..]),
        (&0.2.into(), &[0.1.into()][..])
    );
}

#[test]
fn hyperparameters_that_changed_are_named() {
    let of = |value| flatten(&value).unwrap();
    let had = of(serde_json::json!({ "lr": 0.1, "model": { "width": 3 }, "seed": 1 }));
    let set = of(serde_json::json!({ "lr": 0.01, "model": { "width": 3 }, "epochs": 2 }));
    assert_eq!(changes(&had, &set), ["lr changed from 0.1 to 0.01"]);
}

#[test]
fn a_resumed_run_is_compared_with_its_last_attempt_that_logged() {
    let runs = tempfile::tempdir().unwrap();
    let of = |lr: f64| {
        let builder = builder(&runs);
        builder
            .hyperparameters(&serde_json::json!({ "lr": lr }))
            .unwrap()
    };
    let begun_with = |folder: &Path| {
        let lock = RunLock::take(folder).unwrap();
        let (journal, _) = Journal::reopen(folder.to_owned(), lock).unwrap();
        journal.hyperparameters["lr"].as_f64().unwrap()
    };
    let run = of(0.1).start().unwrap();
    let folder = run.folder().to_owned();
    run.log("train", [("loss", 1.0)], 1, None);
    let mark = run.mark().unwrap();
    run.set_hyperparameters(&serde_json::json!({ "lr": 0.2 }))
        .unwrap();
    drop(run);
    assert_eq!(begun_with(&folder), 0.1);
    drop(of(0.3).resume(&mark).start().unwrap());
    assert_eq!(begun_with(&folder), 0.1, "nothing was trained with 0.3");
    let run = of(0.3).resume(&mark).start().unwrap();
    run.log("train", [("loss", 0.5)], 2, None);
    drop(run);
    assert_eq!(begun_with(&folder), 0.3);
}

/// A finished program that is started with other flags resumes its last checkpoint and trains nothing by them.
#[test]
fn an_attempt_that_logs_nothing_leaves_the_run_as_it_was() {
    let runs = tempfile::tempdir().unwrap();
    let of = |lr: f64, ranks: usize| {
        let builder = builder(&runs).world(ranks).provenance(lr.into());
        builder
            .hyperparameters(&serde_json::json!({ "lr": lr }))
            .unwrap()
    };
    let run = of(0.1, 2).start().unwrap();
    run.log("train", [("loss", 1.0)], 1, None);
    let (folder, mark) = (run.folder().to_owned(), run.mark().unwrap());
    run.finish().unwrap();
    let shown = || {
        let history = RunHistory::read(&folder).unwrap();
        let summary = RunSummary::of(&history);
        assert_eq!(summary.attempts, history.attempts.len());
        let lr = &summary.hyperparameters["lr"];
        let last = history.last_attempt().unwrap();
        assert_eq!(summary.world, last.world);
        (lr.value.clone(), lr.earlier.len(), last.attempt)
    };
    std::thread::sleep(std::time::Duration::from_millis(30));
    of(0.3, 4).resume(&mark).start().unwrap().finish().unwrap();
    assert_eq!(shown(), (0.1.into(), 0, 0));
    let history = RunHistory::read(&folder).unwrap();
    let between = history.attempts[1].started_ms - history.attempts[0].end.as_ref().unwrap().ms;
    assert!(
        between >= 30 && history.duration_ms() <= history.last_ms - history.created_ms - between
    );

    let run = of(0.3, 4).resume(&mark).start().unwrap();
    assert_eq!(shown(), (0.1.into(), 0, 0));
    run.log("train", [("loss", 0.5)], 2, None);
    run.finish().unwrap();
    assert_eq!(shown(), (0.3.into(), 1, 2));
}

#[test]
fn one_process_writes_a_run() {
    let runs = tempfile::tempdir().unwrap();
    let run = start(runs.path(), "a");
    let mark = run.mark().unwrap();
    let error = builder(&runs).resume(&mark).start().unwrap_err();
    assert!(error.is_conflict());
    assert_says(&error, &format!("process {} ", std::process::id()));
}

#[test]
fn a_run_continues_where_its_checkpoint_was() {
    let runs = tempfile::tempdir().unwrap();
    let run = start(runs.path(), "a");
    let (id, folder) = (run.id(), run.folder().to_owned());
    for step in 1..=3 {
        run.log("train", [("loss", 1.0)], step, None);
    }
    let mark = run.mark().unwrap();
    assert_eq!(mark.step, Some(3));
    run.checkpoint_saved(&mark);
    for step in 4..=6 {
        run.log("train", [("loss", 1.0)], step, None);
    }
    drop(run);
    let status = RunHistory::read(&folder).unwrap().status();
    assert_eq!(status, RunStatus::Interrupted);

    let run = builder(&runs).resume(&mark).start().unwrap();
    assert_eq!((run.id(), run.attempt), (id, 1));
    for step in 4..=5 {
        run.log("train", [("loss", 2.0)], step, None);
    }
    run.finish().unwrap();
    assert_eq!(
        losses(&folder),
        [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0)]
    );
    let history = RunHistory::read(&folder).unwrap();
    let ends = history.attempts.iter().map(|attempt| attempt.end.as_ref());
    let ends: Vec<_> = ends.map(|end| end.map(|end| end.status)).collect();
    assert_eq!(ends, [None, Some(EndStatus::Finished)]);
    assert_eq!(history.attempts.len(), 2);
    assert_eq!(history.attempts[1].resumed, Some(Some(3)));
}

#[test]
fn texts_count_as_steps_too() {
    let runs = tempfile::tempdir().unwrap();
    let run = start(runs.path(), "a");
    run.log_text("note/a", "kept", 3);
    let mark = run.mark().unwrap();
    assert_eq!(mark.step, Some(3));
    run.log_text("note/a", "superseded", 4);
    let folder = run.folder().to_owned();
    let run = run.resume(&mark).unwrap();
    run.log_text("note/b", "later", 5);
    run.finish().unwrap();
    let media = RunHistory::read(folder).unwrap().media;
    assert_eq!(media.iter().map(|x| x.step).collect::<Vec<_>>(), [3, 5]);
}

#[test]
fn the_mark_of_a_run_that_is_gone_starts_a_new_one() {
    let runs = tempfile::tempdir().unwrap();
    let run = start(runs.path(), "a");
    let mark = run.mark().unwrap();
    let (id, folder) = (run.id(), run.folder().to_owned());
    drop(run);
    fs::remove_dir_all(folder).unwrap();
    let run = builder(&runs).resume(&mark).start().unwrap();
    assert_ne!(run.id(), id);
}

#[test]
fn a_run_that_learns_of_its_checkpoint_late_continues_with_its_sinks() {
    let runs = tempfile::tempdir().unwrap();
    let first = start(runs.path(), "a");
    first.log("train", [("loss", 1.0)], 1, None);
    let (id, mark) = (first.id(), first.mark().unwrap());
    drop(first);
    let run = builder(&runs).sink(CsvFile::in_run()).start().unwrap();
    let fresh = run.folder().to_owned();
    let run = run.resume(&mark).unwrap();
    assert_eq!(run.id(), id);
    assert!(!fresh.exists());
    run.log("train", [("loss", 2.0)], 2, None);
    let folder = run.folder().to_owned();
    run.finish().unwrap();
    assert_eq!(losses(&folder), [(1, 1.0), (2, 2.0)]);
    let table = fs::read_to_string(folder.join("metrics.csv")).unwrap();
    assert_eq!(table.lines().count(), 3, "{table}");

    // A run with metrics stays.
    let run = start(runs.path(), "b");
    run.log("train", [("loss", 1.0)], 1, None);
    let id = run.id();
    assert_eq!(run.resume(&mark).unwrap().id(), id);
}

#[test]
fn a_restart_of_the_same_launch_starts_the_run_over() {
    let runs = tempfile::tempdir().unwrap();
    let start = |launch: &str| builder(&runs).launch(launch).start().unwrap();
    let run = start("x");
    run.log("train", [("loss", 1.0)], 1, None);
    let id = run.id();
    drop(run);
    let run = start("x");
    assert_eq!((run.id(), run.attempt), (id, 1));
    run.log("train", [("loss", 2.0)], 1, None);
    let folder = run.folder().to_owned();
    drop(run);
    assert_eq!(losses(&folder), [(1, 2.0)]);
    assert_ne!(start("y").id(), id);

    // The next run of that name does not start a finished one over, and an unreadable run blocks no other.
    start("z").finish().unwrap();
    fs::write(runs.path().join("a/journal.jsonl"), "?\n?\n").unwrap();
    assert_eq!(start("z").attempt, 0);
}

#[test]
fn threads_share_a_run() {
    fn shared<T: Send + Sync>() {}
    shared::<Run>();
}

#[test]
fn a_restart_that_finds_its_checkpoint_late_keeps_what_was_logged_before() {
    let runs = tempfile::tempdir().unwrap();
    let start = || {
        let builder = builder(&runs).launch("x");
        builder.sink(CsvFile::in_run()).start().unwrap()
    };
    let run = start();
    run.log("train", [("loss", 1.0)], 1, None);
    let mark = run.mark().unwrap();
    run.log("train", [("loss", 2.0)], 2, None);
    let folder = run.folder().to_owned();
    drop(run);
    for value in [3.0, 4.0] {
        let run = start().resume(&mark).unwrap();
        run.log("train", [("loss", value)], 2, None);
        drop(run);
        assert_eq!(losses(&folder), [(1, 1.0), (2, value)]);
    }
    let table = fs::read_to_string(folder.join("metrics.csv")).unwrap();
    assert_eq!(table.lines().count(), 3, "{table}");
    // A program that dies before it finds its checkpoint takes nothing back.
    drop(start());
    assert_eq!(losses(&folder), [(1, 1.0), (2, 4.0)]);
}

#[test]
fn sinks_get_what_counts_though_they_fail_at_first() {
    let runs = tempfile::tempdir().unwrap();
    let taken = Arc::new(Mutex::new(Vec::new()));
    let flaky = Flaky {
        failures: 2,
        taken: Arc::clone(&taken),
    };
    let builder = builder(&runs).sink(CsvFile::in_run());
    let run = builder.sink(flaky).start().unwrap();
    let folder = run.folder().to_owned();
    run.log("train", [("loss", 1.0)], 1, None);
    let mark = run.mark().unwrap();
    run.log("train", [("loss", 1.0)], 2, None);
    wait_until(|| {
        fs::read_to_string(folder.join("metrics.csv")).is_ok_and(|x| x.lines().count() == 3)
    });
    let run = run.resume(&mark).unwrap();
    run.log("train", [("loss", 2.0)], 2, None);
    run.finish().unwrap();
    let table = fs::read_to_string(folder.join("metrics.csv")).unwrap();
    let rows: Vec<_> = table
        .lines()
        .skip(1)
        .map(|row| row.splitn(3, ',').nth(2).unwrap())
        .collect();
    assert_eq!(rows, ["1,,train/loss,1,", "2,,train/loss,2,"]);
    assert_eq!(*taken.lock().unwrap(), [1, 2]);
}

#[test]
fn a_million_points_wait_for_no_one() {
    let runs = tempfile::tempdir().unwrap();
    let run = start(runs.path(), "a");
    let names: Vec<_> = (0..20).map(|x| format!("m{x}")).collect();
    for step in 0..50_000 {
        run.log(
            "train",
            names.iter().map(|name| (name.as_str(), step as f64)),
            step,
            None,
        );
    }
    let folder = run.folder().to_owned();
    let ended = run.finish();
    let history = RunHistory::read(folder).unwrap();
    assert_eq!(ended.is_err(), history.lost_entries > 0);
    let points: usize = history.series.iter().map(|x| x.points.len()).sum();
    // Metrics that did not fit into the queue are counted.
    assert_eq!(points as u64 + 20 * history.lost_entries, 1_000_000);
}

/// A sink that fails some times, and records the steps that it got since it was last opened.
struct Flaky {
    failures: usize,
    taken: Arc<Mutex<Vec<u64>>>,
}

impl Sink for Flaky {
    fn name(&self) -> String {
        "flaky".to_owned()
    }

    fn open(&mut self, _: &RunInfo) -> crate::Result<SinkPosition> {
        self.taken.lock().unwrap().clear();
        let Some(left) = self.failures.checked_sub(1) else {
            return Ok(SinkPosition::default());
        };
        self.failures = left;
        Err(crate::Error::new(crate::error::Kind::Remote, "not now"))
    }

    fn write(&mut self, _: Origin, entry: &Entry) -> crate::Result<()> {
        if let Record::Metrics(metrics) = &entry.record {
            self.taken.lock().unwrap().push(metrics.step);
        }
        Ok(())
    }

    fn flush(&mut self) -> crate::Result<()> {
        Ok(())
    }
}

fn wait_until(condition: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !condition() {
        assert!(Instant::now() < deadline, "it does not happen");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_sink_that_can_never_be_opened_does_not_hold_up_the_end() {
    let runs = tempfile::tempdir().unwrap();
    let file = runs.path().join("file");
    fs::write(&file, "").unwrap();
    let builder = builder(&runs).sink(TensorBoard::new(&file));
    let run = builder.start().unwrap();
    let begun = Instant::now();
    run.finish().unwrap();
    assert!(begun.elapsed() < Duration::from_secs(10));
}

#[test]
fn the_advice_is_a_whole_command() {
    let advice = |folder: &str, sink: &dyn Sink| feeder::advice(Path::new(folder), sink);
    assert_eq!(
        advice("runs/a", &CsvFile::in_run()),
        "`accel-launch runs sync runs/a --to csv` delivers the rest"
    );
    assert_eq!(
        advice("a", &TensorBoard::below("my logs")),
        "`accel-launch runs sync ./a --to 'tensorboard:my logs'` delivers the rest"
    );
    assert_eq!(
        advice("runs/a", &CsvFile::at("a.csv")),
        "the journal in runs/a has the rest"
    );
}

#[test]
fn an_export_writes_nothing_to_the_folder_of_the_run() {
    let runs = tempfile::tempdir().unwrap();
    let run = start(runs.path(), "a");
    let folder = run.folder().to_owned();
    run.finish().unwrap();
    let names = || {
        let files = fs::read_dir(&folder).unwrap();
        files.map(|x| x.unwrap().file_name()).collect::<Vec<_>>()
    };
    let before = names();
    export(&folder, &mut CsvFile::at(runs.path().join("a.csv"))).unwrap();
    export(&folder, &mut TensorBoard::new(runs.path().join("logs"))).unwrap();
    assert_eq!(names(), before);
}

#[test]
fn a_damaged_journal_of_a_rank_stops_nothing_else() {
    let runs = tempfile::tempdir().unwrap();
    let run = start(runs.path(), "a");
    run.log("train", [("loss", 1.0)], 1, None);
    let folder = run.folder().to_owned();
    for rank in [0, 1] {
        drop(SystemSampler::start(&folder, rank, Duration::from_secs(60)).unwrap());
    }
    run.finish().unwrap();
    let path = folder.join("system/rank-0.jsonl");
    let mut bytes = fs::read(&path).unwrap();
    bytes[20] ^= 1;
    fs::write(&path, bytes).unwrap();

    deliver(&folder, &mut CsvFile::in_run()).unwrap();
    let table = fs::read_to_string(folder.join("metrics.csv")).unwrap();
    assert_eq!(table.lines().count(), 2, "{table}");
    assert_eq!(losses(&folder), [(1, 1.0)]);
    let history = RunHistory::read(&folder).unwrap();
    assert_eq!(history.system.keys().collect::<Vec<_>>(), [&1]);
}

#[test]
fn a_run_with_tags_or_artifacts_stays_when_another_one_continues() {
    let runs = tempfile::tempdir().unwrap();
    let first = start(runs.path(), "a");
    let (id, mark) = (first.id(), first.mark().unwrap());
    drop(first);
    let run = start(runs.path(), "a");
    run.set_tag("data", "digits");
    let folder = run.folder().to_owned();
    assert_eq!(run.resume(&mark).unwrap().id(), id);
    assert_eq!(RunHistory::read(&folder).unwrap().tags["data"], "digits");
}

#[test]
fn a_run_that_cannot_be_begun_says_why_and_leaves_no_folder() {
    let temporary = tempfile::tempdir().unwrap();
    let file = temporary.path().join("runs");
    std::fs::write(&file, "no folder").unwrap();
    let error = Run::builder("a").runs_folder(&file).start().unwrap_err();
    assert!(error.is_io(), "{error}");
    for text in [file.to_str().unwrap(), "it is a file", "`runs_folder`"] {
        assert_says(&error, text);
    }
}

/// A path has at most 4095 bytes. That of the run's folder fits, and that of its journal does not.
#[test]
#[cfg(target_os = "linux")]
fn a_run_whose_journal_cannot_be_written_leaves_no_folder() {
    let temporary = tempfile::tempdir().unwrap();
    let mut runs = temporary.path().to_owned();
    while let left = 4084 - runs.as_os_str().len()
        && left > 1
    {
        // The rest is empty, or a separator and a name.
        let name = match left - 1 {
            all @ ..=200 => all,
            _ => 100,
        };
        runs.push("d".repeat(name));
    }
    let error = Run::builder("a").runs_folder(&runs).start().unwrap_err();
    assert!(error.is_io(), "{error}");
    assert_says(&error, "journal.jsonl");
    assert_eq!(runs.read_dir().unwrap().count(), 0);
}

#[test]
fn the_size_of_images_is_read_from_their_headers() {
    let mut png = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR".to_vec();
    png.extend([0, 0, 0, 28, 0, 0, 1, 0]);
    assert_eq!(image_size(&png), Some(("image/png", 28, 256)));
    assert_eq!(image_size(&png[..20]), None);
    let jpeg = [
        0xff, 0xd8, 0xff, 0xe0, 0, 4, 1, 2, 0xff, 0xc0, 0, 17, 8, 0, 20, 0, 30, 3,
    ];
    assert_eq!(image_size(&jpeg), Some(("image/jpeg", 30, 20)));
    assert_eq!(image_size(b"GIF89a"), None);
    assert_eq!(image_size(b""), None);
}

#[test]
fn histograms_of_odd_values() {
    assert!(Histogram::of([f64::NAN].into_iter(), 3).bins().is_empty());
    assert_eq!(
        Histogram::of([2.0, 2.0].into_iter(), 3).bins(),
        [[2.0, 2.0, 2.0]]
    );
    let histogram = Histogram::of([1.0, f64::INFINITY, 3.0].into_iter(), 2);
    assert_eq!(histogram.bins(), [[1.0, 2.0, 1.0], [2.0, 3.0, 1.0]]);
}
