//! Tests of `reproduce`.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::Command;

use accelerator_track::{Artifact, Capture, Run, Runs};
use serde_json::json;

use crate::copies::copy_program;
use crate::support::Folder;

/// The arguments that make this test executable run as the program below.
const PROGRAM: [&str; 3] = [
    "runs::reproduce::a_program_that_trains",
    "--exact",
    "--ignored",
];

/// Runs as the program of the other tests, which trains with the rate in the file `rate`. It continues the run of the file
/// `mark`, if there is one.
#[test]
#[ignore = "the program of other tests"]
fn a_program_that_trains() {
    let rate: f64 = fs::read_to_string("rate").unwrap().parse().unwrap();
    let mut builder = Run::builder("a")
        .hyperparameters(&json!({ "rate": rate }))
        .unwrap()
        .capture(Capture::new());
    if let Ok(mark) = fs::read("mark") {
        builder = builder.resume(&serde_json::from_slice(&mark).unwrap());
    }
    let run = builder.start().unwrap();
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
    let mark = run.mark().unwrap();
    fs::write("mark-of-checkpoint", serde_json::to_vec(&mark).unwrap()).unwrap();
    run.checkpoint_saved(&mark);
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
    let ended = folder.launch("runs reproduce a --ignore time/*").expect(0);
    let ended = ended.shows("a was run again as a-2");
    let last = ended.lines().pop().unwrap();
    assert!(
        last.starts_with(
            "the same bits: weights after step 20, 40 points of 2 metrics, the artifacts weights"
        ),
        "{ended:?}"
    );
    let runs = Runs::open(folder.path().join("runs")).unwrap();
    let [first, again] = ["a", "a-2"]
        .map(|name| accelerator_track::RunSummary::read(runs.find(name).unwrap()).unwrap());
    assert_eq!(again.tags["reproduces"], first.id.to_string());
    folder.launch("runs diff a a-2 --exit-code").expect(0);
}

#[test]
fn the_same_bits_by_another_binary_are_told() {
    let folder = Folder::new();
    let program = folder.path().join("program");
    copy_program(&std::env::current_exe().unwrap(), &program);
    trained_by(&folder, &program);
    // Bytes after an executable's end do not change what it does.
    let mut file = fs::OpenOptions::new().append(true).open(&program).unwrap();
    file.write_all(b"rebuilt").unwrap();
    drop(file);
    let ended = folder.launch("runs reproduce a --ignore time/*").expect(0);
    let last = ended.lines().pop().unwrap();
    assert!(last.starts_with("the same bits: "), "{ended:?}");
    assert!(last.ends_with(", by another binary"), "{ended:?}");
}

#[test]
fn the_first_step_that_differs_is_named() {
    let folder = Folder::new();
    trained(&folder);
    folder.write("rate", "0.2");
    let ended = folder
        .launch("runs reproduce a --ignore time/now")
        .expect(1);
    let ended = ended.shows("another input: hyperparameter rate: 0.1, 0.2");
    let mut different = ended.lines();
    different.retain(|line| line.starts_with("different: "));
    assert_eq!(different.len(), 4, "{ended:?}");
    for (line, beginning) in different.iter().zip([
        "different: weights after step 20 were ",
        "different: artifact weights was ",
        "different: metric train/loss at step 11 was ",
    ]) {
        assert!(line.starts_with(beginning), "{ended:?}");
    }
}

#[test]
fn a_program_that_continues_the_run_is_told() {
    let folder = Folder::new();
    trained(&folder);
    let [checkpoint, mark] = ["mark-of-checkpoint", "mark"].map(|name| folder.path().join(name));
    fs::rename(checkpoint, mark).unwrap();
    folder.refuses("runs reproduce a", "move the checkpoints away");
}

#[test]
fn what_cannot_be_run_again_is_told() {
    let folder = Folder::new();
    trained(&folder);
    let shown = folder.launch("runs reproduce a --dry-run").expect(0);
    shown.prints(PROGRAM[0]);
    fs::remove_file(folder.path().join("rate")).unwrap();
    folder.refuses("runs reproduce a", "the program could not be run again");
    let run = super::builder(&folder, "b").start().unwrap();
    folder.refuses("runs reproduce b", "is still being written");
    run.finish().unwrap();
    folder
        .launch("runs reproduce b")
        .expect(2)
        .says("b cannot be run again")
        .says("the command line of the run is not recorded");
}
