//! Faults within a collective, after the rank has declared it and sent its first data.

use crate::processes::{EndedRank, LARGE, ProcessJob, assert_named};

const LIMIT: u64 = 4_000;

#[test]
fn deaths_within_a_collective_are_named() {
    for (action, cause) in [
        ("kill", "its connection ended"),
        ("segv", "its connection ended"),
        ("exit 9", "its connection ended"),
        (
            "panic",
            "it panicked: injected fault: rank=1 op=2 panic (at ",
        ),
        ("stop", "it has been silent for 1."),
    ] {
        strike(action, "lost", cause);
    }
}

#[test]
fn a_rank_that_loses_its_connections_is_named_and_knows_it() {
    let ranks = strike("drop-connection", "lost", "its connection");
    let error = ranks[1].error.as_ref().unwrap();
    assert_eq!(
        (error.rank, error.cause.as_str()),
        (1, "its connections were cut")
    );
    assert!(
        error.text.contains("rank 1 was in collective #2"),
        "{error:?}"
    );
}

#[test]
fn a_rank_that_sends_a_corrupt_frame_is_named() {
    let cause = "it broke the protocol: it sent a wrong checksum";
    let ranks = strike("corrupt-frame", "protocol", cause);
    assert_eq!(ranks[1].error.as_ref().unwrap().rank, 1);
}

#[test]
fn a_slow_rank_is_waited_for() {
    // The delay exceeds the liveness timeout of a second. The next collective fails on purpose.
    run(
        "rank=2 op=1 slow 2500ms; rank=1 op=2 exit 3",
        "lost",
        "its connection ended",
    );
}

fn strike(action: &str, kind: &str, cause: &str) -> Vec<EndedRank> {
    run(&format!("rank=1 op=2 {action}"), kind, cause)
}

/// Runs the plan over each transport and returns the ranks of the last run.
fn run(plan: &str, kind: &str, cause: &str) -> Vec<EndedRank> {
    let over = |transport| {
        let job = ProcessJob {
            // No rank can finish the collective before the fault is noticed.
            call: LARGE,
            victim: 1,
            deed: "plan",
            variables: &[("ACCEL_FAULTS", plan), ("ACCEL_TRANSPORT", transport)],
        };
        let ranks = job.run();
        assert_named(job, &ranks, kind, cause, LIMIT);
        ranks
    };
    over("tcp");
    over("shm")
}
