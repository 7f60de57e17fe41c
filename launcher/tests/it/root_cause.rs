//! The rank that failed first is named, whatever it died of: on the screen, in `failure.json`, by the exit code, and to
//! the other ranks. The test program acts as the ranks.

use std::io::Write;

use crate::support::{DEADLINE, Ended, Folder, join_group, test_as_program};
use accelerator_collective::ReduceOp;
use rustix::process::{Signal, getpid, kill_process};
use serde_json::{Value, json};

/// The variable with the failure of rank 1.
const FAILURE: &str = "LAUNCHER_TEST_FAILURE";

/// The number of steps that all ranks do before rank 1 fails.
const STEPS: usize = 3;

/// Works as a rank and ends the process, if this process is a rank.
fn work_as_rank() {
    let Ok(failure) = std::env::var(FAILURE) else {
        return;
    };
    let code = match work(&failure) {
        Ok(()) => 0,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "lost: {error}");
            4
        }
    };
    std::process::exit(code);
}

fn work(failure: &str) -> accelerator_collective::Result<()> {
    let is_rank_1 = std::env::var("RANK").is_ok_and(|rank| rank == "1");
    if failure == "absent" && is_rank_1 {
        std::process::exit(0);
    }
    let group = join_group()?;
    for step in 0..1000 {
        if step == STEPS && is_rank_1 {
            fail(failure);
        }
        let mut values = [1.0_f64];
        group.all_reduce(&mut values, ReduceOp::Sum)?;
    }
    group.close()
}

fn fail(failure: &str) {
    match failure {
        "killed" => kill_process(getpid(), Signal::KILL).unwrap(),
        "crashed" => std::process::abort(),
        "stopped" => {
            kill_process(getpid(), Signal::STOP).unwrap();
            // The signal may reach another thread first, and this one would do its last steps in the meantime.
            std::thread::sleep(DEADLINE);
        }
        "exited" => {
            let _ = writeln!(std::io::stderr(), "the reason");
            std::process::exit(3);
        }
        "complains" => {
            let _ = writeln!(std::io::stderr(), "the first of its lines\n{}", complaint());
            std::process::exit(3);
        }
        "left" => std::process::exit(0),
        _ => panic!("the answer is wrong"),
    }
}

/// Returns an error with the remedy at its end.
fn complaint() -> String {
    format!("no such file: {}; pass --data", "x".repeat(3000))
}

/// Launches three ranks that run only the test `name`, and returns the end and the report.
fn launch(folder: &Folder, name: &str, failure: &str) -> (Ended, Value) {
    let program = test_as_program(&format!("root_cause::{name}"));
    let line = format!("-n 3 --log-dir logs {program}");
    // Only a rank that is stopped is found by its silence. On a busy machine the others can be silent for a second, too.
    let timeout = if failure == "stopped" { "1" } else { "5" };
    let variables = [(FAILURE, failure), ("ACCEL_LIVENESS_TIMEOUT", timeout)];
    let ended = folder.launch_with(&line, variables);
    (ended, folder.failure())
}

/// Asserts that rank 1 was found to be the cause, and that both others knew it.
#[track_caller]
fn check(folder: &Folder, ended: &Ended, report: &Value, words: &str) {
    assert_eq!(report["first"]["rank"], 1, "{ended:?} {report:#}");
    assert_eq!(report["exit_code"], ended.code(), "{report:#}");
    assert!(ended.stderr.contains("rank 1 (pid "), "{ended:?}");
    for rank in [0, 2] {
        let log = folder.read(&format!("logs/latest/rank-{rank}.log"));
        let says = |word: &str| log.contains(word);
        assert!(
            says("lost: ") && says("rank 1") && says(words),
            "{log}: {ended:?}"
        );
        assert!(
            report["first"]["reported_by"]
                .as_array()
                .unwrap()
                .contains(&json!(rank)),
            "{report:#}"
        );
    }
    for other in report["collateral"].as_array().unwrap() {
        assert_eq!(other["by_itself"], true, "{report:#}");
        assert_eq!(other["exit_code"], 4, "{report:#}");
    }
}

#[test]
fn a_killed_rank() {
    work_as_rank();
    let folder = Folder::new();
    let (ended, report) = launch(&folder, "a_killed_rank", "killed");
    check(&folder, &ended, &report, "killed by SIGKILL");
    assert_eq!(ended.code(), 137);
    let first = &report["first"];
    assert_eq!(first["cause"], "it was killed by SIGKILL");
    assert_eq!(first["exit_code"], Value::Null);
    assert_eq!(first["signal"], 9);
    assert_eq!(first["signal_name"], "SIGKILL");
    assert!(first["host"].is_string() && first["pid"].is_number());
    assert_eq!(report["world_size"], 3);
    assert_eq!(report["restarts"], 0);
    assert_eq!(report["log_files"].as_array().unwrap().len(), 3);
    assert_eq!(report["command"][1], "-n");
    let line = report["command_line"].as_str().unwrap();
    assert!(line.starts_with("ACCEL_LIVENESS_TIMEOUT=5 "), "{line}");
    ended.says(&format!("to run it again: {line}"));
}

#[test]
fn a_rank_that_fails_otherwise() {
    work_as_rank();
    // The exit code is that of the rank if it has a failing one of its own, else that of a rank that lost it.
    for (failure, told, code, own, says) in [
        (
            "crashed",
            "killed by SIGABRT",
            134,
            Value::Null,
            "killed by SIGABRT",
        ),
        (
            "exited",
            "exit code 3",
            3,
            json!(3),
            "failed first: exit code 3",
        ),
        ("left", "exit code 0", 4, json!(0), "exit code 0"),
        (
            "panics",
            "the answer is wrong",
            101,
            json!(101),
            "the answer is wrong",
        ),
        ("stopped", "rank 1", 4, Value::Null, "stopped responding"),
    ] {
        let folder = Folder::new();
        let (ended, report) = launch(&folder, "a_rank_that_fails_otherwise", failure);
        check(&folder, &ended, &report, told);
        assert_eq!(ended.code(), code, "{failure}");
        let first = &report["first"];
        assert_eq!(first["exit_code"], own, "{report:#}");
        match failure {
            "exited" => assert_eq!(first["last_words"], json!(["the reason"])),
            "panics" => assert!(
                first["cause"].as_str().unwrap().contains(told),
                "{report:#}"
            ),
            "stopped" => assert_eq!(first["signal"], Value::Null),
            _ => {}
        }
        ended.says(says);
    }
}

#[test]
fn a_long_error_is_whole_in_the_report_and_one_line_to_the_others() {
    work_as_rank();
    let folder = Folder::new();
    let name = "a_long_error_is_whole_in_the_report_and_one_line_to_the_others";
    let (ended, report) = launch(&folder, name, "complains");
    check(&folder, &ended, &report, "xx…xx");
    let complaint = complaint();
    let lines = json!(["the first of its lines", complaint]);
    assert_eq!(report["first"]["last_words"], lines);
    let (_, block) = ended.stderr.split_once("failed first").unwrap();
    assert!(block.contains(&format!("    | {complaint}\n")), "{block}");
    assert_eq!(block.matches("pass --data").count(), 1, "{block}");
    for rank in [0, 2] {
        let log = folder.read(&format!("logs/latest/rank-{rank}.log"));
        let told =
            log.contains("its last words: no such file: xx") && log.contains("xx; pass --data");
        assert!(told && !log.contains("the first of its lines"), "{log}");
    }
}

#[test]
fn a_rank_that_never_joins() {
    work_as_rank();
    let folder = Folder::new();
    let (ended, report) = launch(&folder, "a_rank_that_never_joins", "absent");
    assert_eq!(report["first"]["rank"], 1, "{ended:?} {report:#}");
    assert_eq!(report["first"]["exit_code"], 0);
    // At least one of the others had reached the rendezvous and learnt why it failed.
    assert_eq!(ended.code(), 4);
    ended.says(
        "rank 1 ended with exit code 0 before it joined: does its program call Accelerator::new?",
    );
}
