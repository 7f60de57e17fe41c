use std::collections::BTreeMap;
use std::fs;

use serde_json::Value;

use super::watched::WatchedRuns;
use crate::run::Run;

fn changes(runs: &WatchedRuns, since: u64) -> Value {
    serde_json::to_value(runs.changes(since)).unwrap()
}

#[test]
fn a_page_gets_what_has_changed_since_it_asked() {
    let folder = tempfile::tempdir().unwrap();
    let start = |name| {
        Run::builder(name)
            .runs_folder(folder.path())
            .start()
            .unwrap()
    };
    start("old").finish().unwrap();
    let run = start("new");
    run.log("train", [("loss", 0.5)], 1, None);
    run.flush().unwrap();
    let runs = WatchedRuns::new(folder.path().to_owned());
    assert_eq!(changes(&runs, 0)["runs"], Value::Array(Vec::new()));

    let mut seen = BTreeMap::new();
    runs.look(&mut seen);
    let first = changes(&runs, 0);
    assert_eq!(first["ids"], serde_json::json!([0, 1]));
    assert_eq!(first["runs"].as_array().unwrap().len(), 2);
    assert_eq!(first["reading"], 0);
    let version = first["version"].as_u64().unwrap();
    runs.look(&mut seen);
    assert_eq!(changes(&runs, version)["runs"], Value::Array(Vec::new()));

    run.log("train", [("loss", f64::NAN)], 2, None);
    run.flush().unwrap();
    runs.look(&mut seen);
    let second = changes(&runs, version);
    let [changed] = second["runs"].as_array().unwrap().as_slice() else {
        panic!("one run has changed: {second}");
    };
    assert_eq!(changed["name"], "new");
    assert_eq!(changed["status"], "running");
    assert_eq!(
        changed["series"][0]["last"],
        serde_json::json!({ "v": "NaN", "s": 2 })
    );
    assert_eq!(
        changed["series"][0]["max"],
        serde_json::json!({ "v": 0.5, "s": 1 })
    );
    let i = changed["i"].as_u64().unwrap() as usize;
    let columns = serde_json::to_value(runs.get(i).unwrap().columns("train/loss")).unwrap();
    assert_eq!(columns["s"], serde_json::json!([1, 2]));

    run.finish().unwrap();
    runs.look(&mut seen);
    let third = changes(&runs, second["version"].as_u64().unwrap());
    assert_eq!(third["runs"][0]["status"], "finished");
}

#[test]
fn runs_that_are_damaged_or_gone() {
    let folder = tempfile::tempdir().unwrap();
    let run = Run::builder("gone")
        .runs_folder(folder.path())
        .start()
        .unwrap();
    run.finish().unwrap();
    let damaged = folder.path().join("damaged");
    fs::create_dir(&damaged).unwrap();
    fs::write(damaged.join("journal.jsonl"), "no journal\n").unwrap();
    fs::create_dir(folder.path().join(".artifacts")).unwrap();

    let runs = WatchedRuns::new(folder.path().to_owned());
    let mut seen = BTreeMap::new();
    runs.look(&mut seen);
    let both = changes(&runs, 0);
    assert_eq!(both["runs"].as_array().unwrap().len(), 1);
    let refused = both["refused"][0].as_str().unwrap();
    assert!(refused.contains("damaged"), "{refused}");

    fs::remove_dir_all(folder.path().join("gone")).unwrap();
    runs.look(&mut seen);
    assert_eq!(changes(&runs, 0)["ids"], Value::Array(Vec::new()));
}

#[test]
fn the_folder_of_one_run_is_enough() {
    let folder = tempfile::tempdir().unwrap();
    let run = Run::builder("only")
        .runs_folder(folder.path())
        .start()
        .unwrap();
    let runs = WatchedRuns::new(run.folder().to_owned());
    runs.look(&mut BTreeMap::new());
    assert_eq!(changes(&runs, 0)["runs"][0]["name"], "only");
    assert_eq!(runs.title(), "only");
}
