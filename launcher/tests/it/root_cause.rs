//! The rank that failed first is named, whatever it died of: on the screen, in `failure.json`, by the exit code, and to
//! the other ranks. The test program acts as the ranks.

use std::io::Write;

use crate::support::{DEADLINE, Ended, Folder, Run};
use accelerator_collective::{GroupOptions, Launch, ProcessGroup, ReduceOp};
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
    let launch = Launch::from_env()?;
    let rank = launch.topology.rank();
    if failure == "absent" && rank == 1 {
        std::process::exit(0);
    }
    let options = GroupOptions::new().with_connect_timeout(DEADLINE / 2);
    let group = ProcessGroup::connect(&launch, &options)?;
    for step in 0..1000 {
        if step == STEPS && rank == 1 {
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
    let mut command = folder.launcher();
    command
        .args(["-n", "3", "--log-dir", "logs"])
        .arg(std::env::current_exe().unwrap())
        .args([
            "--exact",
            &format!("root_cause::{name}"),
            "--test-threads",
            "1",
            "--nocapture",
        ])
        .env(FAILURE, failure)
        .env("ACCEL_LIVENESS_TIMEOUT", "1");
    let ended = Run::start(command).end();
    let report = folder.read("logs/latest/failure.json");
    let report = serde_json::from_str(&report).unwrap_or_else(|_| panic!("{report}: {ended:?}"));
    (ended, report)
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
    assert!(line.starts_with("ACCEL_LIVENESS_TIMEOUT=1 "), "{line}");
    ended.says(&format!("to run it again: {line}"));
}

#[test]
fn a_crashed_rank() {
    work_as_rank();
    let folder = Folder::new();
    let (ended, report) = launch(&folder, "a_crashed_rank", "crashed");
    check(&folder, &ended, &report, "killed by SIGABRT");
    assert_eq!(ended.code(), 134);
}

#[test]
fn a_rank_that_exits_with_a_code() {
    work_as_rank();
    let folder = Folder::new();
    let (ended, report) = launch(&folder, "a_rank_that_exits_with_a_code", "exited");
    check(&folder, &ended, &report, "exit code 3");
    assert_eq!(ended.code(), 3);
    assert_eq!(report["first"]["last_words"], json!(["the reason"]));
    ended
        .says("failed first: exit code 3")
        .says("    | the reason");
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
fn a_rank_that_leaves_with_success() {
    work_as_rank();
    let folder = Folder::new();
    let (ended, report) = launch(&folder, "a_rank_that_leaves_with_success", "left");
    check(&folder, &ended, &report, "exit code 0");
    // The root cause has no failing code, but a rank that lost it has.
    assert_eq!(ended.code(), 4);
    assert_eq!(report["first"]["exit_code"], 0);
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

#[test]
fn a_rank_that_panics() {
    work_as_rank();
    let folder = Folder::new();
    let (ended, report) = launch(&folder, "a_rank_that_panics", "panics");
    check(&folder, &ended, &report, "the answer is wrong");
    assert_eq!(ended.code(), 101);
    let cause = report["first"]["cause"].as_str().unwrap();
    assert!(cause.contains("the answer is wrong"), "{report:#}");
}

#[test]
fn a_stopped_rank() {
    work_as_rank();
    let folder = Folder::new();
    let (ended, report) = launch(&folder, "a_stopped_rank", "stopped");
    check(&folder, &ended, &report, "rank 1");
    // Only the launcher ended it, so the code is that of a rank that lost it.
    assert_eq!(ended.code(), 4);
    let first = &report["first"];
    assert_eq!(
        (&first["exit_code"], &first["signal"]),
        (&Value::Null, &Value::Null)
    );
    ended.says("stopped responding");
}
