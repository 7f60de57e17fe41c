//! Cases that every transport must pass: ranks that end, fail and disagree. `computing` has the results of operations.

use std::{
    sync::{
        Arc, Barrier,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use accelerator_collective::internal::ShardLayout;
use accelerator_collective::{Element, ProcessGroup, ReduceOp};

use super::world::{Means, long_timeouts, run, run_with};
pub(crate) use super::{computing::*, scattering::*, splitting::*};

/// A rank that gets an error keeps its buffer, and no other rank writes to it any more.
pub(crate) fn a_buffer_outlives_a_failure(means: Means, world_size: usize) {
    run(means, world_size, |group| {
        // Without this, ranks that still connect would get the error there.
        group.barrier().unwrap();
        let mut values = group.buffer(f32::DTYPE, 100_000);
        let len = values.len();
        values.as_mut_slice::<f32>().unwrap().fill(1.0);
        if group.rank() == 0 {
            group.abort("its data set is empty");
            return;
        }
        let error = group.all_reduce_buffer(&mut values, ReduceOp::Sum);
        assert!(error.unwrap_err().is_peer_lost());
        assert_eq!(values.len(), len);
        values.as_mut_slice::<f32>().unwrap().fill(2.0);
        drop(group);
        assert!(values.as_slice::<f32>().unwrap().iter().all(|x| *x == 2.0));
    });
}

/// Each disagreement gives the same error on every rank and ends the group.
pub(crate) fn disagreements(means: Means, world_size: usize) {
    type Act = fn(&ProcessGroup) -> accelerator_collective::Result<()>;
    let usual: Act = |group| group.all_reduce(&mut [0.0_f32; 10], ReduceOp::Sum);
    let large: Act = |group| group.all_reduce(&mut [0.0_f32; 90_000], ReduceOp::Sum);
    let scattered: Act = |group| {
        let mut buffer = group.buffer(f32::DTYPE, 90_000);
        let parts = vec![Vec::new(); group.world_size()];
        let layout = Arc::new(ShardLayout::new(buffer.len(), parts)?);
        group.reduce_scatter_buffer(&mut buffer, ReduceOp::Sum, &layout)
    };
    let rooted: Act = |group| group.broadcast(&mut [0_u8; 4], 0);
    let counted: Act = |group| {
        let votes = group.for_purpose("the count of the votes");
        votes.all_gather_object(&1).map(drop)
    };
    let cases: [(Act, Act, &str, &str); 13] = [
        (
            counted,
            |group| group.all_gather_object(&1).map(drop),
            "the count of the votes (all_gather_object u8 x 1 at ",
            ": all_gather_object u8 x 1 at ",
        ),
        (
            counted,
            |group| {
                let vote = group.for_purpose("the vote");
                vote.all_gather_object(&1).map(drop)
            },
            "the count of the votes (",
            "the vote (",
        ),
        (
            usual,
            |group| group.barrier(),
            "all_reduce sum f32 x 10",
            "barrier",
        ),
        (
            usual,
            |group| group.all_reduce(&mut [0.0_f32; 11], ReduceOp::Sum),
            "x 10",
            "x 11",
        ),
        (
            usual,
            |group| group.all_reduce(&mut [0_i32; 10], ReduceOp::Sum),
            "f32",
            "i32",
        ),
        (
            usual,
            |group| group.all_reduce(&mut [0.0_f32; 10], ReduceOp::Max),
            "sum",
            "max",
        ),
        (
            rooted,
            |group| group.broadcast(&mut [0_u8; 4], 1),
            "from rank 0",
            "from rank 1",
        ),
        (
            large,
            |group| group.all_reduce(&mut [0.0_f32; 80_000], ReduceOp::Sum),
            "x 90000",
            "x 80000",
        ),
        (
            large,
            |group| group.broadcast(&mut [0.0_f32; 90_000], 0),
            "all_reduce",
            "broadcast",
        ),
        (
            usual,
            |group| group.all_gather_object(&1).map(drop),
            "all_reduce",
            "all_gather_object",
        ),
        (
            usual,
            |group| {
                group
                    .scatter_object::<u8, u8>(Some(&vec![1; group.world_size()]), 1)
                    .map(drop)
            },
            "all_reduce",
            "scatter_object",
        ),
        (
            large,
            scattered,
            "all_reduce",
            "reduce_scatter_buffer sum f32",
        ),
        (
            scattered,
            large,
            "reduce_scatter_buffer sum f32",
            "all_reduce",
        ),
    ];
    for (usual, odd, usual_text, odd_text) in cases {
        let errors = run(means, world_size, move |group| {
            group.barrier().unwrap();
            let act = if group.rank() == 1 { odd } else { usual };
            let error = act(&group).unwrap_err();
            assert!(error.is_mismatch(), "{error}");
            let later = group.barrier().unwrap_err();
            assert_eq!(later.to_string(), error.to_string());
            assert!(
                group
                    .start_all_reduce(group.buffer(f32::DTYPE, 1), ReduceOp::Sum)
                    .is_err()
            );
            error.to_string()
        });
        for error in &errors {
            assert_eq!(error, &errors[0], "all ranks tell the same");
            assert!(error.contains("collective #1"), "{error}");
            assert!(error.contains("cases.rs:"), "{error}");
            let sides: Vec<&str> = error.split("; ").collect();
            let odd = sides.iter().find(|side| side.contains("rank 1: ")).unwrap();
            assert!(odd.contains(odd_text), "{error}");
            let usual = sides
                .iter()
                .find(|side| side.contains("0: ") || side.contains("ranks 0"))
                .unwrap();
            assert!(usual.contains(usual_text), "{error}");
        }
    }
}

/// All the others name a rank that does not come in time, and it learns so when it comes.
pub(crate) fn a_rank_that_does_not_come(means: Means, world_size: usize) {
    let options = long_timeouts().with_progress_timeout(Duration::from_millis(700));
    let late = world_size - 1;
    // The last rank may connect later than that.
    let connected = Arc::new(Barrier::new(world_size));
    let given_up = Arc::new(Barrier::new(world_size));
    let errors = run_with(means, world_size, &options, move |group| {
        connected.wait();
        group.barrier().unwrap();
        if group.rank() == late {
            given_up.wait();
            wait_for_failure(&group);
        }
        let reduced = group.all_reduce(&mut [1.0_f32; 10], ReduceOp::Sum);
        if group.rank() != late {
            given_up.wait();
        }
        reduced.unwrap_err()
    });
    for error in errors {
        assert!(error.is_timeout(), "{error}");
        assert_eq!(error.ranks(), [late], "{error}");
        let text = error.to_string();
        assert!(
            text.contains(&format!("for rank {late} in collective #1")),
            "{error}"
        );
        assert!(text.contains("all_reduce sum f32 x 10"), "{error}");
    }
}

/// Waits until this rank knows that others gave up. They may have left the complete data of an operation in shared
/// memory.
fn wait_for_failure(group: &ProcessGroup) {
    while group.failure().is_none() {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The others wait beyond the progress timeout for a rank that shows that it works or says that it is busy.
pub(crate) fn a_rank_that_works_is_waited_for(means: Means, world_size: usize) {
    let timeout = Duration::from_secs(2);
    let options = long_timeouts()
        .with_liveness_timeout(timeout)
        .with_progress_timeout(timeout);
    run_with(means, world_size, &options, move |group| {
        group.barrier().unwrap();
        let activity = group.activity();
        if group.rank() == 0 {
            for _ in 0..12 {
                std::thread::sleep(timeout / 10);
                activity.keep_alive();
            }
            let _busy = activity.busy();
            std::thread::sleep(timeout * 6 / 5);
        }
        let mut values = vec![1.0_f32; 100_000];
        group.all_reduce(&mut values, ReduceOp::Sum).unwrap();
        assert_eq!(values, vec![world_size as f32; 100_000]);
    });
}

/// A rank that stops showing that it works is named, and so is one that is busy for too long. Other ranks that work are
/// not.
pub(crate) fn a_rank_that_works_no_more(means: Means, world_size: usize) {
    let options = long_timeouts()
        .with_liveness_timeout(Duration::from_secs(2))
        .with_busy_timeout(Duration::from_millis(500))
        .with_progress_timeout(Duration::from_secs(2));
    let hung = world_size - 1;
    let works = move |rank| rank == 0 && world_size > 2;
    let connected = Arc::new(Barrier::new(world_size));
    let given_up = Arc::new(AtomicUsize::new(0));
    let waiting = (0..hung).filter(|rank| !works(*rank)).count();
    let errors = run_with(means, world_size, &options, move |group| {
        connected.wait();
        group.barrier().unwrap();
        let activity = group.activity();
        let is_hung = group.rank() == hung;
        let busy = is_hung.then(|| activity.busy());
        if is_hung || works(group.rank()) {
            while given_up.load(Ordering::Acquire) < waiting {
                std::thread::sleep(Duration::from_millis(100));
                if !is_hung {
                    activity.keep_alive();
                }
            }
            wait_for_failure(&group);
        }
        let error = group.barrier().unwrap_err();
        given_up.fetch_add(1, Ordering::Release);
        drop(busy);
        error
    });
    for error in errors {
        assert!(error.is_timeout(), "{error}");
        assert_eq!(error.ranks(), [hung], "{error}");
        let text = error.to_string();
        assert!(text.contains("without a sign of work"), "{text}");
    }
}

/// A rank that closes its group while others continue is named as one that left early.
pub(crate) fn a_rank_that_finishes_early(means: Means, world_size: usize) {
    let errors = run(means, world_size, |group| {
        group.barrier().unwrap();
        if group.rank() == 1 {
            group.close().unwrap();
            group.close().unwrap();
            return group.barrier().unwrap_err();
        }
        group.barrier().unwrap_err()
    });
    for (rank, error) in errors.iter().enumerate() {
        if rank == 1 {
            assert!(error.is_closed(), "{error}");
        } else {
            assert!(error.is_peer_left() && error.is_peer_lost(), "{error}");
            assert_eq!(error.ranks(), [1], "{error}");
            assert!(error.to_string().contains("left early"), "{error}");
        }
    }
}

/// Ranks may leave at different times if every rank has what it needs.
pub(crate) fn orderly_ends(means: Means, world_size: usize) {
    for _ in 0..10 {
        run(means, world_size, |group| {
            let mut values = vec![1.0_f32; 10_000];
            group.all_reduce(&mut values, ReduceOp::Sum).unwrap();
            drop(group);
        });
    }
}

/// Every survivor names a rank that panics.
pub(crate) fn a_rank_that_panics(means: Means, world_size: usize) {
    let errors = run(means, world_size, |group| {
        group.barrier().unwrap();
        if group.rank() == 1 {
            let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
                let _group = group;
                panic!("a panic that the test wants");
            }));
            assert!(panicked.is_err());
            return None;
        }
        Some(
            group
                .all_reduce(&mut [1.0_f32; 100], ReduceOp::Sum)
                .unwrap_err(),
        )
    });
    for error in errors.iter().flatten() {
        assert!(error.is_peer_lost() && !error.is_peer_left(), "{error}");
        assert_eq!(error.ranks(), [1], "{error}");
        let text = error.to_string();
        assert!(
            text.contains("it panicked: a panic that the test wants (at "),
            "{text}"
        );
        assert!(text.contains("cases.rs:"), "{text}");
        assert!(text.contains("was in collective #1, all_reduce"), "{text}");
        assert_eq!(error.culprit().unwrap().rank(), 1, "{error}");
    }
}

/// Every survivor names a rank whose program returns without closing its group.
pub(crate) fn a_rank_that_returns_early(means: Means, world_size: usize) {
    let errors = run(means, world_size, |group| {
        group.barrier().unwrap();
        (group.rank() != 1).then(|| group.barrier().unwrap_err())
    });
    for error in errors.iter().flatten() {
        assert!(error.is_peer_lost() && !error.is_peer_left(), "{error}");
        assert_eq!(error.ranks(), [1], "{error}");
        let cause = error.culprit().unwrap().cause();
        assert!(
            cause.starts_with("it dropped its group without closing it"),
            "{error}"
        );
        assert!(error.to_string().contains(cause), "{error}");
        assert!(error.to_string().contains("in collective #1"), "{error}");
    }
}

/// A rank that aborts tells all others why, whether they wait already or come later.
pub(crate) fn a_rank_that_aborts(means: Means, world_size: usize) {
    // Rank 1 and the later ranks meet here, without which nothing that rank 1 starts can end.
    let aborted = Arc::new(Barrier::new(world_size - 1));
    let errors = run(means, world_size, move |group| {
        group.barrier().unwrap();
        if group.rank() == 1 {
            let pending = (world_size > 2).then(|| {
                let buffer = group.buffer(f32::DTYPE, 10);
                group.start_all_reduce(buffer, ReduceOp::Sum).unwrap()
            });
            group.abort("its data set is empty");
            group.abort("a second reason changes nothing");
            aborted.wait();
            assert!(pending.is_none_or(|pending| pending.wait().is_err()));
            return group.barrier().unwrap_err();
        }
        if group.rank() > 1 {
            aborted.wait();
        }
        group
            .all_reduce(&mut [1.0_f32; 10], ReduceOp::Sum)
            .and_then(|()| group.barrier())
            .unwrap_err()
    });
    for (rank, error) in errors.iter().enumerate() {
        assert!(error.is_peer_lost() && !error.is_peer_left(), "{error}");
        assert_eq!(error.ranks(), [1], "{error}");
        assert_eq!(error.culprit().unwrap().cause(), "its data set is empty");
        assert!(
            error
                .to_string()
                .contains(") is lost: its data set is empty; "),
            "{error}"
        );
        if rank != 1 {
            assert!(
                error.to_string().contains(" was in collective #"),
                "{error}"
            );
        }
    }
}

/// A rank that is slow but alive is waited for beyond the liveness timeout.
pub(crate) fn a_slow_rank_is_not_lost(means: Means, world_size: usize) {
    let options = long_timeouts().with_liveness_timeout(Duration::from_secs(1));
    run_with(means, world_size, &options, |group| {
        if group.rank() == 1 {
            std::thread::sleep(Duration::from_millis(2500));
        }
        group.barrier().unwrap();
    });
}

/// Started operations fail with their group, so their ranks do not wait in vain.
pub(crate) fn started_operations_fail_too(means: Means, world_size: usize) {
    run(means, world_size, |group| {
        if group.rank() == 1 {
            assert!(group.barrier().unwrap_err().is_mismatch());
            return;
        }
        let start = || group.start_all_reduce(group.buffer(f32::DTYPE, 4), ReduceOp::Sum);
        let pending: Vec<_> = (0..3).map_while(|_| start().ok()).collect();
        for pending in pending {
            let error = pending.wait().unwrap_err();
            assert!(error.is_mismatch(), "{error}");
        }
    });
}

/// Operations end in the order in which they started. One that is done while an earlier one fails reports that failure.
pub(crate) fn nothing_succeeds_after_a_failure(means: Means, world_size: usize) {
    run(means, world_size, |group| {
        group.barrier().unwrap();
        // If several run at once, the small ones are done long before the large one.
        let started = [8 << 20, 4, 4].map(|len| {
            let buffer = group.buffer(f32::DTYPE, len);
            group.start_all_reduce(buffer, ReduceOp::Sum)
        });
        if group.rank() == 1 {
            std::thread::sleep(Duration::from_millis(10));
            group.abort("its data set is empty");
        }
        let outcomes = started.map(|started| started.and_then(|pending| pending.wait()));
        let failed = outcomes.iter().skip_while(|outcome| outcome.is_ok());
        for outcome in failed {
            let error = outcome.as_ref().unwrap_err();
            let cause = error.culprit().map(accelerator_collective::Culprit::cause);
            assert_eq!(cause, Some("its data set is empty"), "{error}");
        }
    });
}

/// A misuse is refused at once and leaves the group intact.
pub(crate) fn misuse(means: Means, world_size: usize) {
    run(means, world_size, |group| {
        let error = group
            .broadcast(&mut [0_u8], group.world_size())
            .unwrap_err();
        assert!(error.is_misuse(), "{error}");
        {
            let outer = group.forbid("outer");
            let inner = group.forbid(String::from("inside a main-only closure"));
            let error = group.clone().barrier().unwrap_err();
            assert!(error.is_misuse(), "{error}");
            assert!(
                error.to_string().contains("inside a main-only closure"),
                "{error}"
            );
            assert!(
                group
                    .start_all_reduce(group.buffer(f32::DTYPE, 1), ReduceOp::Sum)
                    .is_err()
            );
            drop(inner);
            assert!(group.barrier().unwrap_err().to_string().contains("outer"));
            drop(outer);
        }
        let error = group
            .broadcast_object::<u8>(None, group.rank())
            .unwrap_err();
        assert!(error.is_misuse(), "{error}");
        group.barrier().unwrap();
    });
}
