//! The last operations of ranks, of a running job and of one that has failed by a timeout. The test program acts as the
//! ranks.

use std::time::Duration;

use accelerator_collective::{GroupOptions, Launch, ProcessGroup, ReduceOp};
use serde_json::Value;

use crate::support::{DEADLINE, Folder, Run, test_as_program, wait_until};

/// The variable with the seconds that ranks wait for one another.
const TIMEOUT: &str = "LAUNCHER_TEST_TIMEOUT";

/// Works as a rank and ends the process, if this process is a rank: rank 1 hangs before the last sum.
fn work_as_rank() {
    let Ok(timeout) = std::env::var(TIMEOUT) else {
        return;
    };
    let options = GroupOptions::new()
        .with_connect_timeout(DEADLINE / 2)
        .with_progress_timeout(Duration::from_secs(timeout.parse().unwrap()));
    let group = ProcessGroup::connect(&Launch::from_env().unwrap(), &options).unwrap();
    for _ in 0..3 {
        group.barrier().unwrap();
    }
    if group.rank() == 1 {
        // The launcher asks this rank for its operations and, a moment later, sends it SIGTERM.
        let ignored = std::sync::Arc::default();
        let _signal = signal_hook::flag::register(signal_hook::consts::SIGTERM, ignored);
        std::thread::sleep(DEADLINE);
    }
    let failed = group.all_reduce(&mut [1.0_f32; 8], ReduceOp::Sum);
    std::process::exit(if failed.is_err() { 4 } else { 0 });
}

fn last(ranks: &Value, rank: usize) -> &Value {
    let operations = ranks[rank]["operations"].as_array();
    operations
        .and_then(|all| all.last())
        .unwrap_or(&Value::Null)
}

#[test]
fn the_rank_that_the_others_wait_for_is_named() {
    work_as_rank();
    let folder = Folder::new();
    let name = "inspect::the_rank_that_the_others_wait_for_is_named";
    let mut command = folder.command(&format!("-n 3 {}", test_as_program(name)));
    let run = Run::start({
        command.env(TIMEOUT, "600");
        command
    });
    let pid = run.pid().as_raw_pid();
    let inspect = |options: &str| folder.launch(&format!("inspect {pid}{options}"));
    let seen = wait_until("two ranks in the sum", || {
        let seen = inspect(" --json");
        let ranks = (seen.code() == 0).then(|| seen.json())?;
        let in_sum = |rank| {
            let last = last(&ranks["ranks"], rank);
            last["kind"] == "all_reduce" && last["ended"].is_null()
        };
        let idle = last(&ranks["ranks"], 1);
        let is_idle = idle["sequence"] == 2 && idle["ended"].is_string();
        (in_sum(0) && in_sum(2) && is_idle).then_some(ranks)
    });
    assert_eq!(seen["world_size"], 3);
    let (first, second) = (last(&seen["ranks"], 0), last(&seen["ranks"], 1));
    assert_eq!(first["bytes"], 32);
    assert_eq!(first["call"], "all_reduce sum f32 x 8");
    assert!(first["site"].as_str().unwrap().contains("inspect.rs:"));
    assert_eq!(
        (&second["kind"], &second["failed"]),
        (&"barrier".into(), &false.into())
    );
    let number = first["sequence"].as_u64().unwrap();
    assert_eq!(second["sequence"], number - 1);
    assert_eq!(seen["ranks"][1]["state"], "answered");
    inspect(" --last 2")
        .expect(0)
        .prints(" at 127.0.0.1:")
        .prints("3 of 3 ranks have joined")
        .prints(&format!("in #{number} all_reduce sum f32 x 8 at "))
        .prints("not in an operation for ")
        .prints(&format!(
            "ranks 0, 2 wait in #{number} for rank 1, which has not started it"
        ))
        .prints("in progress");
    let unknown = folder.launch("inspect 1999999999");
    assert!(unknown.code() != 0 && unknown.stderr.contains("process 1999999999 is not a rank"));
}

#[test]
fn the_report_of_a_hang_shows_where_each_rank_was() {
    work_as_rank();
    let folder = Folder::new();
    let name = "inspect::the_report_of_a_hang_shows_where_each_rank_was";
    let line = format!("-n 3 --log-dir logs --grace 3 {}", test_as_program(name));
    folder.launch_with(&line, [(TIMEOUT, "8")]).expect(4);
    let report = folder.failure();
    let ranks = &report["operations"];
    for rank in [0, 2] {
        let last = last(ranks, rank);
        assert_eq!(last["call"], "all_reduce sum f32 x 8", "{report:#}");
    }
    assert_eq!(last(ranks, 1)["kind"], "barrier", "{report:#}");
    assert!(last(ranks, 1)["ended"].is_string(), "{report:#}");
    assert!(report["attempts"][0]["operations"].is_null());
}
