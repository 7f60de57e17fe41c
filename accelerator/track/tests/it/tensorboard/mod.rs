//! The real TensorBoard returns the written values with both of its loaders.

pub(crate) mod server;

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use accelerator_manifest::ContentHash;
use accelerator_track::{
    EndStatus, Entry, Number, Origin, Record, RunId, RunInfo, Sink, TensorBoard,
};
use serde_json::{Value, json};

use self::server::{Loader, Server, until, until_equal};
use crate::records::{end, metrics, series};
use crate::venv;

/// The beginning of a JPEG picture, enough to be recognised as one.
const JPEG: &[u8] =
    b"\xff\xd8\xff\xc0\0\x0b\x08\0\x01\0\x01\x01\x01\x11\0\xff\xda\0\x08\x01\x01\0\0\x3f\0\xff\xd9";

/// The creation time of runs in milliseconds.
const CREATED: u64 = 1_700_000_000_000;

#[test]
fn every_value_is_returned_by_value() {
    let Some(venv) = venv::find("tensorboard") else {
        return;
    };
    let temporary = tempfile::tempdir().unwrap();
    let logs = temporary.path().join("logs");

    let (png, jpeg) = (png(), JPEG.to_vec());
    let mut run = TestRun::new(
        &temporary.path().join("runs/a"),
        TensorBoard::new(logs.join("a")),
    );
    let hashes = [&png, &jpeg].map(|bytes| {
        let hash = ContentHash::of(bytes).to_string();
        fs::create_dir_all(run.info.folder.join("blobs")).unwrap();
        fs::write(run.info.folder.join("blobs").join(&hash), bytes).unwrap();
        hash
    });
    run.open();
    run.write(param([
        ("lr", json!(0.1)),
        ("optim.name", json!("adam")),
        ("nesterov", json!(true)),
        ("depth", json!(3)),
        ("betas", json!([0.9, 0.999])),
        ("weight_decay", Value::Null),
        ("größe %/", json!("½")),
    ]));
    let long = format!("train/{}", "x".repeat(294));
    let keys = [
        "train/loss",
        "test/accuracy",
        "a//b",
        "../x",
        "é%&?#+ ",
        &long,
    ];
    for (i, key) in (0..).zip(keys) {
        run.write(series(i, key));
    }
    let special = [
        0.4,
        f64::NAN,
        f64::INFINITY,
        f64::NEG_INFINITY,
        -0.0,
        1e-40,
        1e300,
        16_777_217.0,
    ];
    for step in 1..=900 {
        run.write(metrics(step, None, [(0, loss(step))]));
        if let Some(value) = special.get(step as usize - 1) {
            run.write(metrics(step, None, (1..6).map(|series| (series, *value))));
        }
    }
    for step in [10, 20] {
        run.write(text(
            "notes",
            step,
            &format!("**bold** of {step}: žluťoučký & <b>"),
        ));
    }
    let edges = [[-1.5, 0.0, 3.0], [0.0, 0.25, 0.0], [0.25, 1e300, 7e15]];
    let bins = edges.map(|bin| bin.map(Number)).to_vec();
    for (key, step) in [
        ("params/conv.weight", 5),
        ("params/conv.weight", 6),
        ("train/loss", 6),
    ] {
        let bins = bins.clone();
        let key = key.to_owned();
        run.write(Record::Histogram { key, step, bins });
    }
    for (step, (hash, mime)) in (7..).zip(hashes.iter().zip(["image/png", "image/jpeg"])) {
        run.write(Record::Image {
            key: "samples/digit".to_owned(),
            step,
            hash: hash.clone(),
            mime: mime.to_owned(),
            width: 3,
            height: 2,
        });
    }
    run.write(Record::Plot {
        key: "test/roc".to_owned(),
        step: 9,
        x_label: "false|positive".to_owned(),
        y_label: "true positive".to_owned(),
        points: vec![
            [Number(0.125), Number(f64::NAN)],
            [Number(1.0), Number(0.75)],
        ],
    });
    for rank in 0..2 {
        let values = [("cpu", 0.5), ("memory", 3e9 + rank as f64 * 1e9)];
        let values = values.map(|(name, value)| (name.to_owned(), Number(value)));
        run.ms = CREATED + 65_500;
        run.write_as(
            Origin::Rank(rank),
            Record::System {
                values: values.into(),
            },
        );
    }
    run.write(end(EndStatus::Finished));
    run.sink.flush().unwrap();

    // Another run has the same logs in its own folder, with other keys.
    let mut other = TestRun::new(&logs.join("b"), TensorBoard::in_run());
    other.open();
    other.write(param([("lr", json!(0.2)), ("dropout", json!(0.5))]));
    other.write(series(7, "train/loss"));
    other.write(metrics(1, None, [(7, 9.0)]));
    other.write(end(EndStatus::Failed));
    other.sink.flush().unwrap();

    for loader in Loader::ALL {
        let server = Server::start(&venv, &logs, loader);
        until("both runs", || {
            server.session("a")?;
            server.session("b/tensorboard")
        });
        assert_eq!(server.ask("runs", &[]), json!(["a", "b/tensorboard"]));

        let expected: Vec<_> = (1..=900)
            .map(|step| json!([seconds(&run, step), step, loss(step) as f32]))
            .collect();
        assert_eq!(server.scalars("a", "train/loss").unwrap(), json!(expected));
        let shown = [
            json!(0.4_f32),
            json!("NaN"),
            json!("Infinity"),
            json!("-Infinity"),
            json!(-0.0),
            json!(1e-40_f32),
            // These values exceed 32 bits.
            json!("Infinity"),
            json!(16_777_216.0),
        ];
        for tag in &keys[1..] {
            let found = server.scalars("a", tag).unwrap();
            let found: Vec<_> = found
                .as_array()
                .unwrap()
                .iter()
                .map(|point| &point[2])
                .collect();
            assert_eq!(found, shown.iter().collect::<Vec<_>>(), "{loader:?} {tag}");
        }
        let mut tags: Vec<_> = keys.iter().map(|key| (*key).to_owned()).collect();
        for rank in 0..2 {
            for (name, value) in [("cpu", 0.5), ("memory", 3e9 + f64::from(rank) * 1e9)] {
                let tag = format!("system/rank-{rank}/{name}");
                let expected = json!([[1_700_000_065.5, 65, value]]);
                assert_eq!(server.scalars("a", &tag).unwrap(), expected);
                tags.push(tag);
            }
        }
        assert_eq!(sorted(server.tags("scalars", "a")), sorted(tags));

        let texts = server.ask("plugin/text/text", &[("run", "a"), ("tag", "notes")]);
        assert_eq!(texts.as_array().unwrap().len(), 2);
        for (text, step) in texts.as_array().unwrap().iter().zip([10, 20]) {
            assert_eq!(text["step"], step);
            let html = text["text"].as_str().unwrap();
            let expected = format!("<strong>bold</strong> of {step}: žluťoučký &amp; ");
            assert!(html.contains(&expected), "{html}");
        }
        let plot = server.ask("plugin/text/text", &[("run", "a"), ("tag", "test/roc")]);
        let html = plot[0]["text"].as_str().unwrap();
        for cell in [
            "false|positive",
            "true positive",
            "0.125",
            "NaN",
            "1",
            "0.75",
        ] {
            let found = ["td", "th"]
                .iter()
                .any(|tag| html.contains(&format!("<{tag}>{cell}</{tag}>")));
            assert!(found, "{cell} in {html}");
        }
        assert_eq!(sorted(server.tags("text", "a")), ["notes", "test/roc"]);

        for (tag, steps) in [
            ("params/conv.weight", vec![5, 6]),
            ("train/loss/histogram", vec![6]),
        ] {
            let found = server.ask(
                "plugin/histograms/histograms",
                &[("run", "a"), ("tag", tag)],
            );
            let found = found.as_array().unwrap();
            assert_eq!(found.len(), steps.len());
            for (histogram, step) in found.iter().zip(steps) {
                assert_eq!(histogram[1], step);
                assert_eq!(histogram[2], json!(edges), "{loader:?} {tag}");
            }
        }

        let query = [("run", "a"), ("tag", "samples/digit"), ("sample", "0")];
        let images = server.ask("plugin/images/images", &query);
        let images = images.as_array().unwrap();
        let expected = [(7, &png, "image/png"), (8, &jpeg, "image/jpeg")];
        assert_eq!(images.len(), expected.len());
        for (image, (step, bytes, media_type)) in images.iter().zip(expected) {
            assert_eq!(image["step"], step);
            let found = server.image(image["query"].as_str().unwrap());
            assert_eq!(found, (bytes.clone(), media_type.to_owned()), "{loader:?}");
        }

        let session = server.session("a").unwrap();
        let expected = json!({
            "lr": 0.1,
            "optim.name": "adam",
            "nesterov": true,
            "depth": 3.0,
            "betas": "[0.9,0.999]",
            "größe %/": "½",
        });
        assert_eq!(session["hparams"], expected, "{loader:?}");
        let last = &session["sessions"][0];
        assert_eq!(last["status"], "STATUS_SUCCESS");
        assert_eq!(last["startTimeSecs"], 1_700_000_000.0);
        assert_eq!(last["endTimeSecs"], run.ms as f64 / 1000.0);
        let metric = last["metricValues"].as_array().unwrap().iter();
        let loss_of_session = metric
            .clone()
            .find(|metric| metric["name"]["tag"] == "train/loss")
            .unwrap();
        assert_eq!(loss_of_session["trainingStep"], 900);
        assert_eq!(loss_of_session["value"], json!(loss(900) as f32));

        let session = server.session("b/tensorboard").unwrap();
        assert_eq!(session["hparams"], json!({ "lr": 0.2, "dropout": 0.5 }));
        assert_eq!(session["sessions"][0]["status"], "STATUS_FAILURE");
    }
}

#[test]
fn what_a_resume_takes_back_is_gone_while_the_server_runs() {
    let Some(venv) = venv::find("tensorboard") else {
        return;
    };
    for loader in Loader::ALL {
        let temporary = tempfile::tempdir().unwrap();
        let logs = temporary.path().join("logs");
        let folder = logs.join("a");
        let mut first = TestRun::new(temporary.path(), TensorBoard::new(&folder));
        first.open();
        first.write(param([("lr", json!(0.1))]));
        first.write(series(0, "a"));
        first.write(series(1, "old"));
        for step in 1..=6 {
            first.write(metrics(step, None, [(0, step as f64), (1, 1.0)]));
        }
        first.write(series(2, "late"));
        first.write(metrics(6, None, [(2, 1.0)]));
        first.write(text("note", 5, "first"));
        first.write(end(EndStatus::Failed));
        first.sink.flush().unwrap();
        let foreign = folder.join("events.out.tfevents.0000000001.host.7.0");
        fs::write(&foreign, b"\x18").unwrap();

        let server = Server::start(&venv, &logs, loader);
        until_equal(&json!([1, 2, 3, 4, 5, 6]), || steps(&server, "a"));
        assert_eq!(
            server.session("a").unwrap()["sessions"][0]["status"],
            "STATUS_FAILURE"
        );

        // The run resumes from step 3, as after kill -9: the first sink never ends.
        let info = first.info.clone();
        let mut second = TestRun::new(temporary.path(), TensorBoard::new(&folder));
        second.info = info;
        let replay = |run: &mut TestRun, last: u64| {
            run.open();
            run.write(param([("lr", json!(0.1))]));
            run.write(series(0, "a"));
            run.write(series(1, "old"));
            for step in 1..=3 {
                run.write(metrics(step, None, [(0, step as f64), (1, 1.0)]));
            }
            run.write(end(EndStatus::Failed));
            run.write(Record::Attempt {
                attempt: 1,
                world: 1,
                launch: None,
                provenance: Value::Null,
            });
            for step in 4..=last {
                run.write(metrics(step, None, [(0, step as f64 * 10.0)]));
            }
        };
        replay(&mut second, 5);
        assert_eq!(
            event_files(&folder).len(),
            2,
            "nothing is taken away before the new is there"
        );
        second.sink.flush().unwrap();
        let files = event_files(&folder);
        assert_eq!(files.len(), 2, "{files:?}");
        assert!(files.contains(&foreign));

        let values = json!([[1, 1.0], [2, 2.0], [3, 3.0], [4, 40.0], [5, 50.0]]);
        until_equal(&values, || points(&server, "a", "a"));
        until_equal(&json!([1, 2, 3]), || steps(&server, "old"));

        // The file grows. Half a record is no error, and the rest is read when it arrives.
        second.write(metrics(6, None, [(0, 60.0)]));
        second.sink.flush().unwrap();
        until_equal(&json!([1, 2, 3, 4, 5, 6]), || steps(&server, "a"));
        let file = files.iter().find(|file| **file != foreign).unwrap();
        let record = b"\x18\0\0\0\0\0\0\0\xa3\x7f\x4b\x22";
        OpenOptions::new()
            .append(true)
            .open(file)
            .unwrap()
            .write_all(record)
            .unwrap();
        let fresh = Server::start(&venv, &logs, loader);
        until_equal(&json!([1, 2, 3, 4, 5, 6]), || steps(&fresh, "a"));
        drop(fresh);

        // A third attempt has another value of a hyperparameter, a late one, and an end.
        let mut third = TestRun::new(temporary.path(), TensorBoard::new(&folder));
        third.info = second.info.clone();
        replay(&mut third, 7);
        third.sink.flush().unwrap();
        third.write(param([("lr", json!(0.2)), ("late", json!("x"))]));
        third.write(metrics(8, None, [(0, 80.0)]));
        third.sink.flush().unwrap();
        third.write(end(EndStatus::Preempted));
        third.sink.flush().unwrap();
        third.write(end(EndStatus::Finished));
        third.sink.flush().unwrap();
        until_equal(&json!([1, 2, 3, 4, 5, 6, 7, 8]), || steps(&server, "a"));
        drop(server);

        let fresh = Server::start(&venv, &logs, loader);
        until_equal(&json!([1, 2, 3, 4, 5, 6, 7, 8]), || steps(&fresh, "a"));
        assert_eq!(steps(&fresh, "old"), json!([1, 2, 3]));
        assert_eq!(sorted(fresh.tags("scalars", "a")), ["a", "old"]);
        assert!(fresh.tags("text", "a").is_empty());
        let session = until("hyperparameters", || fresh.session("a"));
        assert_eq!(session["hparams"], json!({ "lr": 0.2, "late": "x" }));
        assert_eq!(session["sessions"][0]["status"], "STATUS_SUCCESS");
        drop(fresh);
        assert_eq!(
            accumulated(&venv, &folder, "a"),
            json!([1, 2, 3, 4, 5, 6, 7, 8])
        );
        assert_eq!(accumulated(&venv, &folder, "old"), json!([1, 2, 3]));
    }
}

/// Asserts that TensorBoard shows these steps and values of a run, and no other, if it is installed.
pub(crate) fn assert_shows(folder: &Path, tag: &str, expected: &[(u64, f64)]) {
    let Some(venv) = venv::find("tensorboard") else {
        return;
    };
    let expected: Value = expected
        .iter()
        .map(|(step, value)| json!([step, *value as f32]))
        .collect();
    for loader in Loader::ALL {
        let server = Server::start(&venv, folder, loader);
        until_equal(&expected, || points(&server, ".", tag));
    }
}

/// A run, and a sink that gets its entries.
struct TestRun {
    info: RunInfo,
    sink: TensorBoard,
    n: u64,
    ms: u64,
}

impl TestRun {
    fn new(folder: &Path, sink: TensorBoard) -> Self {
        let info = RunInfo {
            id: RunId::new(),
            name: "test".to_owned(),
            folder: folder.to_owned(),
            created_ms: CREATED,
        };
        Self {
            info,
            sink,
            n: 0,
            ms: CREATED,
        }
    }

    fn open(&mut self) {
        self.sink.open(&self.info).unwrap();
    }

    fn write(&mut self, record: Record) {
        self.write_as(Origin::Run, record);
    }

    fn write_as(&mut self, origin: Origin, record: Record) {
        // The metrics of each step have their own time, so that times can be compared.
        if let Record::Metrics(metrics) = &record {
            self.ms = CREATED + metrics.step * 250;
        }
        let (n, ms) = (self.n, self.ms);
        self.sink.write(origin, &Entry { n, ms, record }).unwrap();
        self.n += 1;
    }
}

fn seconds(run: &TestRun, step: u64) -> f64 {
    (run.info.created_ms + step * 250) as f64 / 1000.0
}

fn loss(step: u64) -> f64 {
    1.0 / (step as f64 + 0.1)
}

fn text(key: &str, step: u64, text: &str) -> Record {
    let (key, text) = (key.to_owned(), text.to_owned());
    Record::Text { key, step, text }
}

fn param<const N: usize>(set: [(&str, Value); N]) -> Record {
    let set = set.map(|(key, value)| (key.to_owned(), value));
    Record::Param {
        set: BTreeMap::from(set),
    }
}

/// Returns the step and value of each point that the server shows.
fn points(server: &Server, run: &str, tag: &str) -> Value {
    let points = server.scalars(run, tag).unwrap_or_default();
    let points = points.as_array().cloned().unwrap_or_default();
    points
        .iter()
        .map(|point| json!([point[1], point[2]]))
        .collect()
}

fn steps(server: &Server, tag: &str) -> Value {
    let points = points(server, "a", tag);
    points
        .as_array()
        .unwrap()
        .iter()
        .map(|point| point[0].clone())
        .collect()
}

/// Returns the steps that Python programs read.
fn accumulated(venv: &Path, folder: &Path, tag: &str) -> Value {
    let program = "
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1], size_guidance={'tensors': 0}).Reload()
print(json.dumps([point.step for point in events.Scalars(sys.argv[2])]))";
    let output = Command::new(venv.join("bin/python"))
        .args(["-c", program])
        .arg(folder)
        .arg(tag)
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn event_files(folder: &Path) -> Vec<PathBuf> {
    let paths = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let has_events = |path: &PathBuf| {
        path.to_string_lossy().contains("tfevents") && path.metadata().unwrap().len() > 0
    };
    paths.filter(has_events).collect()
}

fn sorted(mut names: Vec<String>) -> Vec<String> {
    names.sort();
    names
}

/// Returns a picture of a white pixel.
fn png() -> Vec<u8> {
    let mut png = b"\x89PNG\r\n\x1a\n".to_vec();
    png.extend(b"\0\0\0\x0dIHDR\0\0\0\x01\0\0\0\x01\x08\0\0\0\0\x3a\x7e\x9b\x55");
    png.extend(b"\0\0\0\x0aIDAT\x78\x9c\x63\xf8\x0f\0\x01\x01\x01\0\x1b\xb6\xee\x56");
    png.extend(b"\0\0\0\0IEND\xae\x42\x60\x82");
    png
}
