//! Tests of `list`, `show`, `compare` and `diff`.

use std::fs;
use std::time::Duration;

use accelerator_track::Capture;
use accelerator_track::internal::SystemSampler;
use serde_json::json;

use super::{builder, finished, resumed};
use crate::support::Folder;

#[test]
fn list_shows_runs_and_what_is_wrong_with_others() {
    let folder = Folder::new();
    finished(&folder, "first", 0.1);
    resumed(&folder, "a/b");
    let running = builder(&folder, "third").start().unwrap();
    folder.write("runs/notes/readme", "");
    folder.write("runs/empty/journal.jsonl", "");
    let newer = fs::read_to_string(folder.path().join("runs/first/journal.jsonl")).unwrap();
    let text = newer.replacen("\"version\":1", "\"version\":2", 1);
    folder.write("runs/edited/journal.jsonl", &text);

    let ended = folder.launch("runs list").expect(0);
    // Age and duration may be a second or two.
    let times = |line: &String| line.replace(" 1 s", " 0 s").replace(" 2 s", " 0 s");
    let shown: Vec<_> = ended.lines().iter().map(times).collect();
    assert_eq!(
        shown[0],
        "name status age duration attempts ranks step train/loss test/accuracy train/odd"
    );
    assert_eq!(shown[1], "third running 0 s 0 s 1 1 - - - -");
    assert_eq!(shown[2], "a%2Fb failed 0 s 0 s 2 1 3 0.25 - -");
    assert_eq!(shown[3], "first finished 0 s 0 s 1 2 3 0.0333333 0.9 NaN");
    assert_eq!(shown[4..6], ["edited damaged", "empty damaged"]);
    assert!(
        shown[6].starts_with("damaged: the line at byte 0 of "),
        "{ended:?}"
    );
    assert!(shown[7].contains("its journal is empty"), "{ended:?}");

    let names = |options: &str| {
        let list = folder.json(&format!("runs list --json {options}"));
        let runs = list["runs"].as_array().unwrap().iter();
        runs.map(|x| x["name"].as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(names("--sort name"), ["a/b", "first", "third"]);
    assert_eq!(names("--sort train/loss"), ["first", "a/b", "third"]);
    assert_eq!(names("--sort lr --reverse")[2], "first");
    assert_eq!(names("--status failed --status running"), ["third", "a/b"]);
    assert_eq!(names("--tag group=a"), ["first"]);
    assert_eq!(names("--tag group"), ["first"]);
    assert!(names("--tag group=b").is_empty());
    let text = folder.launch("runs list --runs runs/notes");
    assert!(
        text.expect(0)
            .text()
            .starts_with("there are no runs in the folder `runs/notes`")
    );
    folder
        .launch("runs list --sort nonsense")
        .expect(2)
        .says("nothing of the runs is called \"nonsense\"")
        .says("age, name, status, duration, step, lr, model.layers, train/loss, train/odd, test/accuracy");
    drop(running);
    assert_eq!(names("--status interrupted"), ["third"]);

    let list = folder.json("runs list --json");
    assert_eq!(list["runs"][2]["series"][1]["last"], "NaN");
    assert_eq!(list["damaged"][1]["folder"], "runs/empty");
}

#[test]
fn show_tells_everything_about_a_run() {
    let folder = Folder::new();
    finished(&folder, "first", 0.1);
    let path = resumed(&folder, "second");
    let of_first = folder.path().join("runs/first");
    drop(SystemSampler::start(&of_first, 0, Duration::from_secs(60)).unwrap());
    let mut ended = folder.launch("runs show first").expect(0);
    let is_memory = |line: &String| line.starts_with("0 memory ") && line.ends_with("iB");
    assert!(ended.lines().iter().any(is_memory), "{ended:?}");
    for line in [
        "rank what last max",
        "run runs/first",
        "status finished",
        "ranks 2",
        "step 3",
        "texts 1",
        "tag group a",
        "lr 0.1",
        "model.layers [32,64]",
        "train/loss 3 1 to 3 0.0333333 0.0333333 0.1",
        "train/odd 3 1 to 3 NaN NaN NaN",
    ] {
        ended = ended.shows(line);
    }

    // The run is named by a path, and by the beginning of its id.
    let id = accelerator_track::RunHistory::read(&path)
        .unwrap()
        .id
        .to_string();
    for run in ["runs/second", "second", &id, &id[..30]] {
        let ended = folder.launch(&format!("runs show {run}")).expect(0);
        let ended = ended
            .shows("status failed")
            .shows("checkpoints 1, the last after the metrics of step 2")
            .prints("memory");
        for (number, end) in [
            ("0 ", " the start interrupted"),
            ("1 ", " 1 step 2 failed: "),
        ] {
            let is_start = |line: &String| line.starts_with(number) && line.contains(end);
            assert!(ended.lines().iter().any(is_start), "{ended:?}");
        }
        assert!(!ended.text().contains('\u{1b}'), "{ended:?}");
    }
    // The points that the resume superseded are not shown.
    let points = folder.ok("runs show second --metric train/loss");
    let values = points.lines().skip(1).map(|x| x.split(' ').next().unwrap());
    assert_eq!(values.collect::<Vec<_>>(), ["1", "0.5", "0.25"]);
    folder.refuses("runs show second --metric loss", "it has train/loss");

    let line = "runs show second --metric train/loss --json";
    let details = folder.json(line);
    assert_eq!(details["points"][0]["points"][2]["value"], 0.25);
    assert_eq!(details["starts"][1]["resumed"], 2);
    assert_eq!(details["status"], "failed");
}

#[test]
fn show_leaves_out_the_variables_of_launchers_unless_it_is_asked() {
    let folder = Folder::new();
    let provenance = json!({ "environment": {
        "RANK": "0",
        "ACCEL_PORT": "1",
        "ACCEL_OVERLAP": "off",
        "ACCEL_PRECISION": "bf16",
        "ACCEL_SET_BY_LAUNCHER": "ACCEL_PORT,ACCEL_OVERLAP",
        "RAYON_NUM_THREADS": "2",
    } });
    let run = builder(&folder, "a").provenance(provenance).start();
    run.unwrap().finish().unwrap();
    let variables = |line: &str| {
        let shown = folder.launch(line).expect(0).lines().into_iter();
        let of_environment = shown.filter_map(|x| Some(x.strip_prefix("environment.")?.to_owned()));
        of_environment.collect::<Vec<_>>()
    };
    let own = ["ACCEL_PRECISION bf16", "RAYON_NUM_THREADS 2"];
    assert_eq!(variables("runs show a"), own);
    assert_eq!(variables("runs show a --all").len(), 6);
}

#[test]
fn compare_marks_what_differs() {
    let folder = Folder::new();
    finished(&folder, "a", 0.1);
    finished(&folder, "b", 0.2);
    let ended = folder.launch("runs compare a b").expect(0);
    let ended = ended.shows("train/odd last NaN NaN");
    assert_eq!(
        ended.lines()[..5],
        [
            "a b",
            "status finished finished",
            "* lr 0.1 0.2",
            "model.layers [32,64] [32,64]",
            "* train/loss last 0.0333333 0.0666667",
        ]
    );

    let line = "runs compare a b --changed --metric test/accuracy";
    let changed = folder.launch(line).expect(0).lines();
    assert_eq!(changed[2..], ["* lr 0.1 0.2"]);
    let comparison = folder.json("runs compare a b --json");
    assert_eq!(
        comparison["rows"][0],
        json!({ "name": "lr", "differs": true, "values": [0.1, 0.2] })
    );
    folder.launch("runs compare a").expect(2);
}

#[test]
fn diff_names_the_inputs_that_differ() {
    let folder = Folder::new();
    let captured = |name: &str, lr: f64, seed: u64| {
        let run = builder(&folder, name)
            .hyperparameters(&json!({ "lr": lr }))
            .unwrap()
            .capture(Capture::new().seed("model", seed))
            .start()
            .unwrap();
        run.finish().unwrap();
    };
    captured("a", 0.1, 1);
    captured("same", 0.1, 1);
    captured("b", 0.2, 2);
    let same = folder.launch("runs diff a same --exit-code").expect(0);
    assert_eq!(same.text(), "the same inputs\n");
    assert_eq!(
        folder.launch("runs diff a b").expect(0).lines(),
        ["input a b", "seed model 1 2", "hyperparameter lr 0.1 0.2"]
    );
    let line = "runs diff a b --exit-code --json";
    let diff = folder.launch(line).expect(1).json();
    assert_eq!(diff["differences"][1]["what"], "hyperparameter lr");

    finished(&folder, "bare", 0.1);
    folder
        .launch("runs diff bare bare")
        .expect(0)
        .says("the run bare does not record where it came from");
}

#[test]
fn wrong_places_are_told() {
    let folder = Folder::new();
    folder.write("notes/readme", "");
    folder.write("file", "");
    for place in ["missing", "file"] {
        folder
            .launch(&format!("runs list --runs {place}"))
            .expect(2)
            .says("expected the folder of all runs at")
            .says(place);
    }
    let listed = folder.launch("runs list --runs notes").expect(0);
    assert!(
        listed
            .text()
            .starts_with("there are no runs in the folder `notes`")
    );
    folder.launch("runs").expect(2);
    folder.refuses("runs show x", "the folder of all runs at runs");
    folder.refuses("runs show ./notes", "there is no run in ./notes");
    finished(&folder, "a", 0.1);
    folder
        .launch("runs show x")
        .expect(2)
        .says("no run \"x\" in runs")
        .says("accel-launch runs list");

    // A truncated journal is read as far as possible, but one that was changed in the middle is not.
    let journal = folder.path().join("runs/a/journal.jsonl");
    let good = fs::read_to_string(&journal).unwrap();
    fs::write(&journal, &good[..good.len() - 20]).unwrap();
    let shown = folder.launch("runs show a").expect(0);
    shown.shows("status interrupted");
    fs::write(&journal, good.replacen("\"s\":2", "\"s\":7", 1)).unwrap();
    folder.launch("runs show a").expect(1).says("at byte");

    // The head is of a later version and has a good checksum.
    let head = good.lines().next().unwrap();
    let covered =
        head[..head.rfind(",\"c\"").unwrap()].replacen("\"version\":1", "\"version\":2", 1);
    let line = format!("{covered},\"c\":\"{:08x}\"}}\n", crc32c(covered.as_bytes()));
    fs::write(&journal, line).unwrap();
    folder
        .launch("runs show a")
        .expect(1)
        .says("is of format 2");
    let shown = folder.launch("runs list").expect(0).lines();
    assert_eq!(shown[1], "a newer");
    assert!(shown[2].starts_with("newer: the run in runs/a is of format 2"));
    assert!(!shown.join("\n").contains("damaged"), "{shown:?}");
    let list = folder.json("runs list --json");
    assert_eq!(list["newer"][0]["folder"], "runs/a");
    assert_eq!(list["damaged"], json!([]));
}

/// Computes CRC-32C, bit by bit.
fn crc32c(bytes: &[u8]) -> u32 {
    let mut sum = !0_u32;
    for byte in bytes {
        sum ^= u32::from(*byte);
        for _ in 0..8 {
            sum = (sum >> 1) ^ (0x82f6_3b78 & (sum & 1).wrapping_neg());
        }
    }
    !sum
}
