//! Tests of `reproduce`.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::Command;

use accelerator_track::{Artifact, Capture, Run, Runs};
use serde_json::json;

use super::lines;
use crate::support::Folder;

/// The arguments that make this test executable run as the program below.
const PROGRAM: [&str; 3] = [
    "runs::reproduce::a_program_that_trains",
    "--exact",
    "--ignored",
];

/// Runs as the program of the other tests, which trains with the rate in the file `rate`.
#[test]
#[ignore = "the program of other tests"]
fn a_program_that_trains() {
    let rate: f64 = fs::read_to_string("rate").unwrap().parse().unwrap();
    let provenance = Capture::new().take(".");
    let run = Run::builder("a")
        .hyperparameters(&json!({ "rate": rate }))
        .unwrap()
        .provenance(serde_json::to_value(provenance).unwrap())
        .start()
        .unwrap();
    let mut weight = 1.0_f64;
    for step in 1..=20 {
        // The rate matters from step 11 on.
        weight -= weight.sin() * if step > 10 { rate } else { 0.1 };
        run.log(
            "train",
            [("weight", weight), ("loss", 1.0 - weight.cos())],
            step,
            None,
        );
        let time = std::time::UNIX_EPOCH.elapsed().unwrap();
        run.log("time", [("now", time.as_secs_f64())], step, None);
    }
    run.log_weights(&format!("{:016x}", weight.to_bits()), 20);
    fs::write("weights.bin", weight.to_le_bytes()).unwrap();
    let weights = Artifact::create("weights").add_file("weights.bin").unwrap();
    run.mark_output(weights).unwrap();
    run.finish().unwrap();
}

fn trained(folder: &Folder) {
    trained_by(folder, &std::env::current_exe().unwrap());
}

fn trained_by(folder: &Folder, program: &Path) {
    folder.write("rate", "0.1");
    let mut command = folder.prepared(Command::new(program));
    command.args(PROGRAM);
    assert!(command.output().unwrap().status.success());
}

#[test]
fn the_same_bits_are_told() {
    let folder = Folder::new();
    trained(&folder);
    let line = ["runs", "reproduce", "a", "--ignore", "time/*"];
    let text = folder.launch(line).expect(0).text();
    let shown = lines(&text);
    assert!(
        shown.contains(&"a was run again as a-2".to_owned()),
        "{text}"
    );
    let last = shown.last().unwrap();
    assert!(
        last.starts_with(
            "the same bits: weights after step 20, 40 points of 2 metrics, the artifacts weights"
        ),
        "{text}"
    );
    let runs = Runs::open(folder.path().join("runs")).unwrap();
    let [first, again] = ["a", "a-2"]
        .map(|name| accelerator_track::RunSummary::read(runs.find(name).unwrap()).unwrap());
    assert_eq!(again.tags["reproduces"], first.id.to_string());
    let line = ["runs", "diff", "a", "a-2", "--exit-code"];
    folder.launch(line).expect(0);
}

#[test]
fn the_same_bits_by_another_binary_are_told() {
    let folder = Folder::new();
    let program = folder.path().join("program");
    fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    trained_by(&folder, &program);
    // Bytes after an executable's end do not change what it does.
    let mut file = fs::OpenOptions::new().append(true).open(&program).unwrap();
    file.write_all(b"rebuilt").unwrap();
    drop(file);
    let line = ["runs", "reproduce", "a", "--ignore", "time/*"];
    let text = folder.launch(line).expect(0).text();
    let last = lines(&text).pop().unwrap();
    assert!(last.starts_with("the same bits: "), "{text}");
    assert!(last.ends_with(", by another binary"), "{text}");
}

#[test]
fn the_first_step_that_differs_is_named() {
    let folder = Folder::new();
    trained(&folder);
    folder.write("rate", "0.2");
    let line = ["runs", "reproduce", "a", "--ignore", "time/now"];
    let text = folder.launch(line).expect(1).text();
    let shown = lines(&text);
    let different: Vec<_> = shown
        .iter()
        .filter(|x| x.starts_with("different: "))
        .collect();
    assert_eq!(different.len(), 4, "{text}");
    assert!(
        different[0].starts_with("different: weights after step 20 were "),
        "{text}"
    );
    assert!(
        different[1].starts_with("different: artifact weights was "),
        "{text}"
    );
    assert!(
        different[2].starts_with("different: metric train/loss at step 11 was "),
        "{text}"
    );
    assert!(
        shown.contains(&"another input: hyperparameter rate: 0.1, 0.2".to_owned()),
        "{text}"
    );
}

#[test]
fn what_cannot_be_run_again_is_told() {
    let folder = Folder::new();
    trained(&folder);
    let text = folder
        .launch(["runs", "reproduce", "a", "--dry-run"])
        .expect(0)
        .text();
    assert!(text.contains(PROGRAM[0]), "{text}");
    fs::remove_file(folder.path().join("rate")).unwrap();
    folder
        .launch(["runs", "reproduce", "a"])
        .expect(2)
        .says("the program could not be run again");
    let run = super::builder(&folder, "b").start().unwrap();
    folder
        .launch(["runs", "reproduce", "b"])
        .expect(2)
        .says("is still being written");
    run.finish().unwrap();
    folder
        .launch(["runs", "reproduce", "b"])
        .expect(2)
        .says("b cannot be run again")
        .says("the command line of the run is not recorded");
}
