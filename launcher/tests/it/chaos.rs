//! `accel-launch test --chaos`: schedules of faults pass, and what is broken is noticed.

use std::fs;

use crate::support::{Ended, Folder, Run, wait_until};
use rustix::process::Signal;
use serde_json::Value;

/// Runs schedules whose temporary files lie in the test's own folder.
fn start(folder: &Folder, line: &str) -> Run {
    let mut command = folder.launcher();
    command.args(["test", "--chaos", "--json"]);
    command.args(line.split_whitespace());
    command.env("TMPDIR", folder.path());
    Run::start(command)
}

fn stages(ended: &Ended) -> Vec<Value> {
    let report: Value = serde_json::from_str(&ended.text()).unwrap();
    report["stages"].as_array().unwrap().clone()
}

fn detail(stage: &Value) -> &str {
    stage["detail"].as_str().unwrap()
}

#[track_caller]
fn assert_nothing_is_left(folder: &Folder) {
    let names = fs::read_dir(folder.path()).unwrap().flatten();
    let names: Vec<_> = names.map(|entry| entry.file_name()).collect();
    assert!(names.is_empty(), "left in the folder: {names:?}");
    let path = folder.path().as_os_str().as_encoded_bytes();
    for process in fs::read_dir("/proc").unwrap().flatten() {
        let line = fs::read(process.path().join("cmdline")).unwrap_or_default();
        let mentions = line.windows(path.len()).any(|window| window == path);
        assert!(!mentions, "{:?} is left", process.file_name());
    }
}

/// In parts, so that each keeps its deadline on a loaded machine.
fn schedules_pass(seed: u64) {
    let folder = Folder::new();
    let ended = start(&folder, &format!("--seed {seed} --schedules 5"))
        .end()
        .expect(0);
    let stages = stages(&ended);
    assert_eq!(stages.len(), 6, "the undisturbed run, and five others");
    let disturbed = |stage: &&Value| {
        let detail = detail(stage);
        detail.ends_with("restarts") && !detail.ends_with(" 0 restarts")
    };
    assert!(stages.iter().filter(disturbed).count() > 0, "{stages:?}");
    assert_nothing_is_left(&folder);
}

#[test]
fn schedules_1_to_5_pass() {
    schedules_pass(1);
}

#[test]
fn schedules_6_to_10_pass() {
    schedules_pass(6);
}

#[test]
fn schedules_11_to_15_pass() {
    schedules_pass(11);
}

#[test]
fn schedules_16_to_20_pass() {
    schedules_pass(16);
}

#[test]
fn one_wrong_bit_after_a_restart_is_noticed_and_can_be_replayed() {
    let folder = Folder::new();
    let ended = start(&folder, "--seed 7 --schedules 2 --break-chaos wrong");
    let stages = stages(&ended.end().expect(1));
    let failed = &stages[2];
    assert_eq!(failed["name"], "seed 8");
    assert_eq!(failed["verdict"], "failed", "{failed}");
    let text = detail(failed);
    assert!(text.contains("the weights differ"), "{text}");
    assert!(text.contains("faults: rank=1 step=10 kill"), "{text}");
    let (_, replay) = text
        .split_once("replay: accel-launch test --chaos ")
        .unwrap();
    let again = start(&folder, &format!("{replay} --break-chaos wrong"));
    let again = self::stages(&again.end().expect(1));
    assert_eq!(again[1]["name"], failed["name"]);
    assert_eq!(detail(&again[1]), text);
}

#[test]
fn a_job_that_hangs_or_fails_is_given_up_and_ended() {
    for (how, expected) in [("hang", "did not end within"), ("crash", "ended with")] {
        let folder = Folder::new();
        let line = format!("--seed 8 --schedules 1 --limit 4 --break-chaos {how}");
        let ended = start(&folder, &line).end().expect(1);
        let stages = stages(&ended);
        let last = stages.last().unwrap();
        assert!(detail(last).contains(expected), "{how}: {last}");
        wait_until("the processes to be gone", || {
            std::panic::catch_unwind(|| assert_nothing_is_left(&folder)).ok()
        });
    }
}

#[test]
fn a_signal_ends_it_and_leaves_nothing() {
    let folder = Folder::new();
    let run = start(&folder, "--minutes 10");
    wait_until("a job", || {
        fs::read_dir(folder.path()).unwrap().next().map(drop)
    });
    run.signal(Signal::INT);
    run.end().expect(128 + 2);
    wait_until("the processes to be gone", || {
        std::panic::catch_unwind(|| assert_nothing_is_left(&folder)).ok()
    });
}
