//! The first promise: every other rank names a dead rank in time and with its cause. Ranks are processes without a
//! launcher.

use crate::processes::{FOR_EVER, ProcessJob, SCATTERS_FOR_EVER, WATCHING, assert_named};

const CALLS: [&str; 3] = ["all_reduce", "barrier", "broadcast"];

const TRANSPORTS: [&[(&str, &str)]; 2] =
    [&[("ACCEL_TRANSPORT", "shm")], &[("ACCEL_TRANSPORT", "tcp")]];

/// The limit in milliseconds. On an idle machine, a death is reported within a second.
const DEATH: u64 = 3_000;

/// The limit in milliseconds. Silence is reported after the liveness timeout of a second.
const SILENCE: u64 = 3_000;

#[test]
fn a_dead_rank_is_named_when_it_is_killed() {
    named("kill", "its connection ended", DEATH);
}

#[test]
fn a_dead_rank_is_named_though_it_said_that_it_works() {
    named("kill while busy", "its connection ended", DEATH);
}

#[test]
fn a_dead_rank_is_named_when_it_crashes() {
    named("segv", "its connection ended", DEATH);
}

#[test]
fn a_dead_rank_is_named_when_it_exits() {
    named("exit", "its connection ended", DEATH);
}

#[test]
fn a_dead_rank_is_named_with_its_panic() {
    let cause = "it panicked: a panic that the test wants (at ";
    named("panic", cause, DEATH);
}

#[test]
fn a_dead_rank_is_named_when_it_drops_its_group() {
    named("drop", "it dropped its group without closing it", DEATH);
}

#[test]
fn a_dead_rank_is_named_with_the_reason_that_it_gives() {
    named("abort", "its data set is empty", DEATH);
}

#[test]
fn a_dead_rank_is_named_though_it_hosts_the_store() {
    for deed in ["kill", "panic"] {
        let job = job("all_reduce", 0, deed);
        let cause = match deed {
            "kill" => "its connection ended",
            _ => "it panicked: a panic that the test wants",
        };
        assert_named(job, &job.run(), "lost", cause, DEATH);
    }
}

/// The rank may be anywhere in an operation, over each transport.
#[test]
fn a_dead_rank_is_named_when_it_is_struck_in_the_middle() {
    for transport in TRANSPORTS {
        for (deed, cause, limit) in [
            ("kill in the middle", "its connection ended", DEATH),
            ("stop in the middle", "it has been silent for 1.", SILENCE),
        ] {
            for call in [FOR_EVER, SCATTERS_FOR_EVER] {
                let job = ProcessJob {
                    variables: transport,
                    ..job(call, 1, deed)
                };
                assert_named(job, &job.run(), "lost", cause, limit);
            }
        }
    }
}

/// The stopped rank learns it when it runs again.
#[test]
fn a_dead_rank_is_named_when_it_is_stopped() {
    for (call, variables) in CALLS.into_iter().zip(TRANSPORTS.into_iter().cycle()) {
        let job = ProcessJob {
            variables,
            ..job(call, 1, "stop")
        };
        let ranks = job.run();
        assert_named(job, &ranks, "lost", "it has been silent for 1.", SILENCE);
        let stopped = &ranks[1];
        assert!(stopped.status.success(), "{}", stopped.output);
        let error = stopped.error.as_ref().unwrap();
        assert_eq!((error.rank, error.pid), (1, stopped.pid), "{error:?}");
        let me = format!("rank 1 (process {} on {}) ", error.pid, error.host);
        let declared = error
            .text
            .strip_prefix(&format!("{me}was declared lost by rank "));
        match declared {
            Some(rest) => assert!(rest.contains(": it has been silent for 1."), "{error:?}"),
            // The others could not report it, since their connections were full of data.
            None => {
                let slept = format!("{me}is lost: it did not run for 1.");
                assert!(
                    call != "barrier" && error.text.starts_with(&slept),
                    "{error:?}"
                );
            }
        }
        assert!(
            error.text.contains("rank 1 was in collective #2"),
            "{error:?}"
        );
    }
}

/// A rank that waits for a GPU depends on this.
#[test]
fn a_dead_rank_is_known_without_a_collective() {
    for transport in ["shm", "tcp"] {
        for (deed, cause, limit) in [
            ("kill", "its connection ended", DEATH),
            ("abort", "its data set is empty", DEATH),
            ("drop", "it dropped its group without closing it", DEATH),
            ("panic", "it panicked: a panic that the test wants", DEATH),
            ("stop", "it has been silent for 1.", SILENCE),
        ] {
            let job = ProcessJob {
                variables: &[("ACCEL_TRANSPORT", transport), WATCHING],
                ..job("barrier", 1, deed)
            };
            let ranks = job.run();
            for survivor in [&ranks[0], &ranks[2]] {
                let (time, text) = survivor.failure.as_ref().unwrap();
                assert!(text.contains("rank 1") && text.contains(cause), "{text}");
                let waited = time.saturating_sub(ranks[1].deed.unwrap());
                assert!(
                    waited <= limit,
                    "{waited} ms, {deed} over {transport}: {text}"
                );
            }
            assert_named(job, &ranks, "lost", cause, limit);
        }
    }
}

fn named(deed: &str, cause: &str, limit: u64) {
    for call in CALLS {
        for transport in TRANSPORTS {
            let job = ProcessJob {
                variables: transport,
                ..job(call, 1, deed)
            };
            assert_named(job, &job.run(), "lost", cause, limit);
        }
    }
}

fn job<'a>(call: &'a str, victim: usize, deed: &'a str) -> ProcessJob<'a> {
    ProcessJob {
        call,
        victim,
        deed,
        variables: &[],
    }
}
