//! Data delivered to MLflow, as a real server shows it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use accelerator_track::{
    Artifact, ArtifactRole, EndStatus, Entry, MlflowServer, MlflowSink, Number, Origin, Record,
    Run, RunId, RunInfo, Sink,
};
use serde_json::{Value, json};
use server::Server;

use crate::kills;
use crate::records::{metrics, series};

mod server;

#[test]
fn a_run_is_on_the_server_by_value() {
    let Some(server) = Server::start() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let info = run_in(folder.path());
    let client = MlflowServer::new(&server.address).unwrap();
    let mut sink = MlflowSink::new(client, "digits 模型");
    let all = whole_run(folder.path());
    let rank = Entry {
        n: 0,
        ms: 1_700_000_001_000,
        record: Record::System {
            values: [("cpu".to_owned(), Number(0.25))].into(),
        },
    };
    // The second pass does not know of the first.
    for _ in 0..2 {
        sink.open(&info).unwrap();
        sink.write(Origin::Rank(1), &rank).unwrap();
        for entry in &all {
            sink.write(Origin::Run, entry).unwrap();
        }
        sink.flush().unwrap();
        assert_is_whole_run(&server, &only_run(&server));
        fs::remove_file(folder.path().join("mlflow.json")).unwrap();
    }

    let run = only_run(&server);
    let id = |name: &str| run["info"][name].as_str().unwrap().to_owned();
    server.post("runs/delete", &json!({ "run_id": id("run_id") }));
    let error = sink.open(&info).unwrap_err();
    assert!(error.to_string().contains("runs restore"), "{error}");
    server.post(
        "experiments/delete",
        &json!({ "experiment_id": id("experiment_id") }),
    );
    let error = sink.open(&info).unwrap_err();
    assert!(error.to_string().contains("experiments restore"), "{error}");
}

#[test]
fn fifty_kills_of_program_and_sync_and_some_of_the_server_leave_each_step_once() {
    let Some(mut server) = Server::start() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join(ADDRESS), &server.address).unwrap();
    let run = folder.path().join("runs/killed");
    let mut had = 0;
    let steps = kills::run_with_kills(folder.path(), |kill| match kill % 10 {
        // Each time, the server is killed with more data than the time before.
        4 => {
            let begun = Instant::now();
            while delivered(&run) <= had {
                assert!(
                    begun.elapsed() < Duration::from_secs(60),
                    "nothing is delivered"
                );
                thread::sleep(Duration::from_millis(2));
            }
            server.kill();
            had = delivered(&run);
        }
        5 => server.restart_soon(),
        0 => server.wait(),
        _ => {}
    });
    kills::assert_has_each_step_once(folder.path(), steps);
    let expected: Vec<_> = (1..=steps).map(|step| (step, kills::loss(step))).collect();
    let search = json!({ "experiment_ids": server.experiments(), "run_view_type": "ACTIVE_ONLY" });
    let found = server.post("runs/search", &search);
    assert_eq!(
        found["runs"].as_array().unwrap().len(),
        1,
        "no ghost run: {found}"
    );
    let run = &found["runs"][0]["info"];
    assert_eq!(run["status"], "FINISHED");
    let id = run["run_id"].as_str().unwrap();
    let points = server.points(id, "train/loss");
    assert!(points == expected, "{} points of {steps}", points.len());
    // Each call of `log` has the epoch.
    let epochs = server.points(id, "epoch");
    let expected: Vec<_> = (1..=steps).map(|step| (step, kills::epoch(step))).collect();
    assert!(epochs == expected, "{} epochs of {steps}", epochs.len());
}

#[test]
fn artifacts_are_on_the_server_with_their_files() {
    let Some(server) = Server::start() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    // The file is longer than the server takes at once.
    let large: Vec<u8> = (0_u32..6 << 20)
        .flat_map(|x| (x.wrapping_mul(2_654_435_761) as u16).to_le_bytes())
        .collect();
    fs::write(at("large.bin"), &large).unwrap();
    fs::write(at("empty"), "").unwrap();
    // The server would decode this name.
    fs::write(at("%41#"), "decoded").unwrap();
    let run = Run::builder("mnist")
        .runs_folder(at("runs"))
        .start()
        .unwrap();
    let model = Artifact::create("model")
        .add_file_as(at("large.bin"), "weights/é=1.bin")
        .unwrap()
        .add_file(at("empty"))
        .unwrap()
        .add_file(at("%41#"))
        .unwrap()
        .add_reference("s3://bucket/data")
        .unwrap();
    let model = run.mark_output(model).unwrap();
    let lost = run
        .mark_output(Artifact::create("lost").add_file(at("empty")).unwrap())
        .unwrap();
    run.use_input("model:v1").unwrap();
    let (run_folder, id) = (run.folder().to_owned(), run.id());
    run.finish().unwrap();
    fs::remove_file(at("runs/.artifacts/names/lost/v1.json")).unwrap();

    let client = MlflowServer::new(&format!("{}/", server.address)).unwrap();
    // The second pass does not know of the first.
    for _ in 0..2 {
        let mut sink = MlflowSink::new(client.clone(), "digits");
        accelerator_track::internal::deliver(&run_folder, &mut sink).unwrap();
        let run = only_run(&server);
        let on_server = run["info"]["run_id"].as_str().unwrap();
        assert_eq!(run["info"]["status"], "FINISHED");
        let file = |path: &str| server.file(on_server, &format!("artifacts/model/{path}"));
        assert!(file("v1/weights/é=1.bin") == large);
        assert_eq!(file("v1/empty"), b"");
        let query = [("run_id", on_server), ("path", "artifacts/model/v1")];
        let files = server.get("artifacts/list", &query)["files"].clone();
        let named = |file: &&Value| file["path"].as_str().unwrap().ends_with(" _41_");
        let decoded = files.as_array().unwrap().iter().find(named).unwrap();
        assert_eq!(
            server.file(on_server, decoded["path"].as_str().unwrap()),
            b"decoded"
        );
        let manifest: Value = serde_json::from_slice(&file("v1.json")).unwrap();
        assert_eq!(manifest["references"][0]["url"], "s3://bucket/data");
        assert_eq!(manifest["run"], id.to_string());
        assert_eq!(manifest["digest"], model.digest().to_string());
        let inputs = &run["inputs"]["dataset_inputs"];
        assert_eq!(inputs[0]["dataset"]["name"], "model", "{inputs}");
        assert_eq!(
            pairs(&run, "tags")["accel.output.lost"],
            format!("v1 {}", lost.digest())
        );
        fs::remove_file(run_folder.join("mlflow.json")).unwrap();
    }
}

/// Returns the sink of a test that has a server.
pub(crate) fn sink_of(folder: &Path) -> Option<Box<dyn Sink>> {
    let address = fs::read_to_string(folder.join(ADDRESS)).ok()?;
    let server = MlflowServer::new(&address).unwrap();
    Some(Box::new(MlflowSink::new(server, "kills")))
}

const ADDRESS: &str = "mlflow-address";

/// Returns how many entries the server has, according to the run's folder.
fn delivered(folder: &Path) -> u64 {
    let text = fs::read(folder.join("mlflow.json")).unwrap_or_default();
    let cursor: Value = serde_json::from_slice(&text).unwrap_or_default();
    cursor["position"]["next"].as_u64().unwrap_or(0)
}

fn run_in(folder: &Path) -> RunInfo {
    RunInfo {
        id: RunId::new(),
        name: "mnist é".to_owned(),
        folder: folder.to_owned(),
        created_ms: 1_700_000_000_000,
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

fn params(params: Value) -> Record {
    let Value::Object(params) = params else {
        panic!("no map");
    };
    Record::Param {
        set: params.into_iter().collect(),
    }
}

fn tags<const N: usize>(tags: [(&str, &str); N]) -> Record {
    let tags = tags.map(|(key, value)| (key.to_owned(), value.to_owned()));
    Record::Tag { set: tags.into() }
}

/// Writes an entry of every kind, and names that MLflow refuses.
fn whole_run(folder: &Path) -> Vec<Entry> {
    fs::create_dir(folder.join("blobs")).unwrap();
    fs::write(folder.join("blobs").join("ab".repeat(32)), b"an image").unwrap();
    let mut records = vec![
        Record::Head {
            version: 1,
            run: RunId::new(),
            name: "mnist é".to_owned(),
        },
        Record::Attempt {
            attempt: 0,
            launch: None,
            world: 2,
            provenance: json!({
                "arguments": ["target/mnist", "--lr", "0.1"],
                "commit": { "hash": "c0ffee", "branch": "main", "remote": "https://x/y", "changed": { "a": "deleted" } },
                "binary": { "path": "/x/target/mnist", "hash": "ff", "bytes": 3 },
                "host": { "user": "ada", "name": "h1" },
                "data": { "mnist": { "path": "/data", "hash": "ab".repeat(32), "files": 4, "bytes": 5 } },
            }),
        },
        params(json!({
            "lr": 0.1, "optimizer.name": "adam", "layers": [32, 64], "é%": true, "long": "é".repeat(7000),
            "empty": "", "none": null,
        })),
        tags([
            ("mlflow.source.git.repoURL", "https://x/y"),
            ("mlflow.source.git.dirty", "true"),
            ("accel.host", "h1"),
            ("mlflow.note.content", "# A note"),
            ("long", &"x".repeat(9000)),
            ("a//b", "c"),
        ]),
    ];
    records.extend((0..).zip(KEYS).map(|(i, key)| series(i, key)));
    // The last metric is logged at an earlier step, as an evaluation is.
    let special = [
        f64::NAN,
        f64::INFINITY,
        f64::NEG_INFINITY,
        -1.5,
        5e-324,
        0.1,
        1e300,
    ];
    records.extend([
        metrics(1, Some(0.5), (0..).zip(special)),
        metrics(3, None, (0..).zip(KEYS.map(|key| key.len() as f64))),
        metrics(2, Some(1.0), [(0, 0.25)]),
        params(
            (0..250)
                .map(|i| (format!("many.{i}"), json!(i)))
                .collect::<serde_json::Map<_, _>>()
                .into(),
        ),
        Record::Text {
            key: "test/sample".to_owned(),
            step: 3,
            text: "**é** _b_".to_owned(),
        },
        Record::Histogram {
            key: "grad/w:0".to_owned(),
            step: 3,
            bins: vec![[Number(-1.0), Number(0.5), Number(3.0)]],
        },
        Record::Image {
            key: "test/digit".to_owned(),
            step: 3,
            hash: "ab".repeat(32),
            mime: "image/png".to_owned(),
            width: 1,
            height: 1,
        },
        Record::Image {
            key: "test/lost".to_owned(),
            step: 3,
            hash: "cd".repeat(32),
            mime: "image/png".to_owned(),
            width: 1,
            height: 1,
        },
        Record::Plot {
            key: "test/roc".to_owned(),
            step: 3,
            x_label: "recall".to_owned(),
            y_label: "precision".to_owned(),
            points: vec![[Number(0.0), Number(f64::NAN)]],
        },
        Record::Artifact {
            role: ArtifactRole::Input,
            name: "mnist-data".to_owned(),
            version: 3,
            digest: "0123456789abcdef".repeat(4),
        },
        Record::Artifact {
            role: ArtifactRole::Output,
            name: "weights".to_owned(),
            version: 1,
            digest: "fedcba9876543210".repeat(4),
        },
        Record::Checkpoint {
            step: Some(3),
            covers: 5,
        },
        Record::Attempt {
            attempt: 1,
            launch: None,
            world: 4,
            provenance: Value::Null,
        },
        params(json!({ "lr": 0.2, "layers": [32, 64] })),
        Record::End {
            status: EndStatus::Failed,
            failure: Some(json!({ "rank": 1 })),
        },
    ]);
    entries(records)
}

fn assert_is_whole_run(server: &Server, run: &Value) {
    let id = run["info"]["run_id"].as_str().unwrap();
    assert_eq!(run["info"]["run_name"], "mnist é");
    assert_eq!(run["info"]["status"], "FAILED");
    assert_eq!(run["info"]["start_time"], 1_700_000_000_000_u64);
    let ended = run["info"]["end_time"].as_u64().unwrap();
    assert!(
        (1_700_000_000_020..1_700_000_000_040).contains(&ended),
        "{ended}"
    );

    let tags = pairs(run, "tags");
    for (key, value) in [
        ("mlflow.runName", "mnist é"),
        ("mlflow.user", "ada"),
        ("mlflow.source.name", "/x/target/mnist"),
        ("mlflow.source.type", "LOCAL"),
        ("mlflow.source.git.commit", "c0ffee"),
        ("mlflow.source.git.branch", "main"),
        ("mlflow.source.git.repoURL", "https://x/y"),
        ("mlflow.source.git.dirty", "true"),
        ("accel.host", "h1"),
        ("mlflow.note.content", "# A note"),
        ("param.changed.lr", "0.2"),
        ("accel.attempts", "2"),
        ("accel.world_size", "4"),
        ("accel.command", "target/mnist --lr 0.1"),
        ("accel.failure", "{\"rank\":1}"),
        (
            "accel.output.weights",
            &format!("v1 {}", "fedcba9876543210".repeat(4)),
        ),
    ] {
        assert_eq!(tags[key], value, "{key}");
    }
    assert_eq!(tags["long"].chars().count(), 5000);
    assert!(tags["long"].ends_with("x… (cut from 9000 characters)"));
    assert!(!tags.contains_key("param.changed.layers"));
    let name_of = |key: &str| match tags
        .iter()
        .find(|(name, value)| name.starts_with("accel.name.") && *value == key)
    {
        Some((name, _)) => name.trim_start_matches("accel.name.").to_owned(),
        None => key.to_owned(),
    };
    assert_eq!(tags[&name_of("a//b")], "c");

    let params = pairs(run, "params");
    assert_eq!(params.len(), 7 + 250);
    for (key, value) in [
        ("lr", "0.1"),
        ("optimizer.name", "adam"),
        ("layers", "[32,64]"),
        ("é%", "true"),
        ("empty", ""),
        ("none", "null"),
        ("many.249", "249"),
    ] {
        assert_eq!(params[&name_of(key)], value, "{key}");
    }
    assert_eq!(params["long"].chars().count(), 6000);

    let largest = f64::MAX;
    let special = [f64::NAN, largest, -largest, -1.5, 5e-324, 0.1, 1e300];
    for (at, key) in KEYS.iter().enumerate() {
        let mut expected = Vec::from([(3, key.len() as f64)]);
        if let Some(value) = special.get(at) {
            expected.insert(0, (1, *value));
        }
        if at == 0 {
            expected.insert(1, (2, 0.25));
        }
        let found = server.points(id, &name_of(key));
        assert_eq!(format!("{found:?}"), format!("{expected:?}"), "{key}");
    }
    assert_eq!(server.points(id, "epoch"), [(1, 0.5), (2, 1.0)]);
    assert_eq!(server.points(id, "system/rank-1/cpu"), [(0, 0.25)]);

    assert_eq!(
        server.file(id, "text/test/sample/3.md"),
        "**é** _b_".as_bytes()
    );
    assert_eq!(server.file(id, "images/test/digit/3.png"), b"an image");
    let json = |path: &str| -> Value { serde_json::from_slice(&server.file(id, path)).unwrap() };
    assert_eq!(
        json("plots/test/roc/3.json"),
        json!({ "x_label": "recall", "y_label": "precision", "points": [[0.0, "NaN"]] })
    );
    let query = [("run_id", id), ("path", "histograms/grad")];
    let folder = server.get("artifacts/list", &query);
    let folder = folder["files"][0]["path"].as_str().unwrap();
    assert_eq!(
        json(&format!("{folder}/3.json")),
        json!({ "bins": [[-1.0, 0.5, 3.0]] })
    );
    assert_eq!(json("provenance/attempt-0.json")["host"]["name"], "h1");

    let inputs = run["inputs"]["dataset_inputs"].as_array().unwrap();
    let shown = inputs.iter().map(|input| {
        let text = |pointer: &str| input.pointer(pointer).unwrap().as_str().unwrap().to_owned();
        let found = [
            text("/dataset/name"),
            text("/dataset/digest"),
            text("/tags/0/value"),
        ];
        found.join(" ")
    });
    let shown: BTreeSet<_> = shown.collect();
    let expected = [
        format!("mnist {} training", "ab".repeat(16)),
        format!("mnist-data {} training", "0123456789abcdef".repeat(2)),
    ];
    assert_eq!((inputs.len(), shown), (2, expected.into()));
}

fn pairs(run: &Value, key: &str) -> BTreeMap<String, String> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let pairs = run["data"][key].as_array().unwrap().iter();
    pairs
        .map(|pair| (text(&pair["key"]), text(&pair["value"])))
        .collect()
}

/// Returns the only run of all experiments, with all of its data.
fn only_run(server: &Server) -> Value {
    let search = json!({ "experiment_ids": server.experiments(), "run_view_type": "ALL" });
    let found = server.post("runs/search", &search);
    let [run] = &found["runs"].as_array().unwrap()[..] else {
        panic!("not one run: {found}");
    };
    let id = run["info"]["run_id"].as_str().unwrap();
    server.get("runs/get", &[("run_id", id)])["run"].clone()
}

const LONG: &str = "123456789/123456789/123456789/123456789/123456789/123456789/123456789/123456789/123456789/123456789/\
                    123456789/123456789/123456789/123456789/123456789/123456789/123456789/123456789/123456789/123456789/\
                    123456789/123456789/123456789/123456789/123456789/123456789/123456789/123456789/123456789/123456789/";

const KEYS: [&str; 14] = [
    "train/loss",
    "test/accuracy",
    "a//b",
    "../x",
    "é%",
    "é$",
    LONG,
    "/a",
    "a/",
    "x:y",
    "",
    "epoch",
    "模型/損失",
    "ÀßɏΑωЀԯぁヺ一\u{9fa5}가힣",
];
