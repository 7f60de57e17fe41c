//! What every transport must do.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use accelerator_collective::{Buffer, Element, Partition, ProcessGroup, ReduceOp};
use half::{bf16, f16};
use serde::{Deserialize, Serialize};

use super::{
    sample::{Sample, assert_same, buffer, reduced},
    world::{Means, patient, run, run_with},
};

const OPS: [ReduceOp; 4] = [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max, ReduceOp::Min];

/// Lengths around the world size, and some that are cut into several chunks.
fn lengths(world_size: usize) -> [usize; 7] {
    [0, 1, world_size - 1, world_size, world_size + 1, 1000, 9001]
}

pub(crate) fn every_type_and_reduction(means: Means, world_size: usize) {
    fn all_ops<T: Sample>(means: Means, group: &ProcessGroup) {
        let (rank, world_size) = (group.rank(), group.world_size());
        let per_host = means.per_host(world_size);
        for len in lengths(world_size) {
            for op in OPS {
                let what = format!("{op} {} x {len}, W = {world_size}", T::DTYPE);
                let expected = reduced::<T>(world_size, per_host, len, op);
                let mut values = buffer::<T>(rank, len);
                group.all_reduce(&mut values, op).unwrap();
                assert_same(&values, &expected, &what);

                let own = group.reduce_scatter(&buffer::<T>(rank, len), op).unwrap();
                let expected = reduced::<T>(world_size, world_size, len, op);
                let part = Partition::new(len, world_size).range(rank);
                assert_same(&own, &expected[part], format_args!("scattered {what}"));
            }
        }
    }
    run(means, world_size, move |group| {
        all_ops::<f32>(means, &group);
        all_ops::<f64>(means, &group);
        all_ops::<f16>(means, &group);
        all_ops::<bf16>(means, &group);
        all_ops::<i8>(means, &group);
        all_ops::<i16>(means, &group);
        all_ops::<i32>(means, &group);
        all_ops::<i64>(means, &group);
        all_ops::<u8>(means, &group);
        all_ops::<u16>(means, &group);
        all_ops::<u32>(means, &group);
        all_ops::<u64>(means, &group);
    });
}

/// More chunks a part than are sent ahead, a last chunk that is not full, parts of different
/// sizes.
pub(crate) fn many_chunks(means: Means, world_size: usize) {
    for len in [world_size * 65_536 + 1, world_size * 330_000 - 1] {
        let reduced = |per_host| Arc::new(reduced::<f32>(world_size, per_host, len, ReduceOp::Sum));
        let (expected, scattered) = (reduced(means.per_host(world_size)), reduced(world_size));
        run(means, world_size, move |group| {
            let (rank, world_size) = (group.rank(), group.world_size());
            let own = buffer::<f32>(rank, len);
            let mut values = own.clone();
            group.all_reduce(&mut values, ReduceOp::Sum).unwrap();
            assert_same(&values, &expected, len);
            let own = group.reduce_scatter(&own, ReduceOp::Sum).unwrap();
            let part = Partition::new(len, world_size).range(rank);
            assert_same(&own, &scattered[part], len);
        });
    }
}

/// More than the 25 MB of a gradient bucket.
pub(crate) fn beyond_a_bucket(means: Means, world_size: usize) {
    run(means, world_size, |group| {
        let len = 7_000_001;
        let mut values: Vec<f32> = (0..len).map(|i| (i % 1000 + group.rank()) as f32).collect();
        group.all_reduce(&mut values, ReduceOp::Mean).unwrap();
        let shift = (group.world_size() - 1) as f32 / 2.0;
        let wrong = values
            .iter()
            .enumerate()
            .find(|(i, x)| **x != (*i % 1000) as f32 + shift);
        assert_eq!(wrong, None);
    });
}

/// Buffers of the group, of another group and slices, in one operation; lengths around those at
/// which the way changes.
pub(crate) fn buffers(means: Means, world_size: usize) {
    fn check<T: Sample>(means: Means, group: &ProcessGroup, stranger: &ProcessGroup, op: ReduceOp) {
        let (rank, world_size) = (group.rank(), group.world_size());
        let short = 16 * 1024 / size_of::<T>();
        let chunk = 128 * 1024 / size_of::<T>();
        for len in [
            0,
            1,
            17,
            short,
            short + 1,
            chunk - 1,
            chunk + 33,
            3 * chunk + 5,
        ] {
            let expected = reduced::<T>(world_size, means.per_host(world_size), len, op);
            let own = buffer::<T>(rank, len);
            // Everyone in place; nobody; those of odd rank.
            for placed in [true, false, rank % 2 == 1] {
                let home = if placed { group } else { stranger };
                let mut values = home.buffer(T::DTYPE, len);
                values.as_mut_slice::<T>().unwrap().copy_from_slice(&own);
                let what = format!("{op} {} x {len}, W = {world_size}", T::DTYPE);
                group.all_reduce_buffer(&mut values, op).unwrap();
                assert_same(values.as_slice::<T>().unwrap(), &expected, what);
            }
        }
    }
    run(means, world_size, move |group| {
        let stranger = ProcessGroup::single();
        check::<f32>(means, &group, &stranger, ReduceOp::Sum);
        check::<f64>(means, &group, &stranger, ReduceOp::Mean);
        check::<bf16>(means, &group, &stranger, ReduceOp::Sum);
        check::<f16>(means, &group, &stranger, ReduceOp::Max);
        check::<i8>(means, &group, &stranger, ReduceOp::Mean);
        check::<u32>(means, &group, &stranger, ReduceOp::Min);
        assert_eq!((group.buffer_bytes(), stranger.buffer_bytes()), (0, 0));
        // One that was reduced before is reduced again, and one may lie beside it.
        let mut first = group.buffer(f32::DTYPE, 50_000);
        let mut second = group.buffer(f32::DTYPE, 70_000);
        assert!(group.buffer_bytes() >= 4 * 120_000);
        for round in 0..4 {
            first.as_mut_slice::<f32>().unwrap().fill(round as f32);
            group.all_reduce_buffer(&mut first, ReduceOp::Sum).unwrap();
            second.as_mut_slice::<f32>().unwrap().fill(1.0);
            group.all_reduce_buffer(&mut second, ReduceOp::Sum).unwrap();
            let sum = (round * group.world_size()) as f32;
            assert!(first.as_slice::<f32>().unwrap().iter().all(|x| *x == sum));
            let sum = group.world_size() as f32;
            assert!(second.as_slice::<f32>().unwrap().iter().all(|x| *x == sum));
        }
    });
}

/// Who gets an error keeps a buffer of its own: nobody writes to it any more.
pub(crate) fn a_buffer_outlives_a_failure(means: Means, world_size: usize) {
    run(means, world_size, |group| {
        // Else those that still connect learn it there.
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

pub(crate) fn broadcasts(means: Means, world_size: usize) {
    run(means, world_size, |group| {
        let world_size = group.world_size();
        for root in [0, world_size / 2, world_size - 1] {
            for len in [0, 1, 1000, 65_536, 300_001] {
                let mut values = buffer::<f32>(group.rank(), len);
                group.broadcast(&mut values, root).unwrap();
                assert_same(
                    &values,
                    &buffer::<f32>(root, len),
                    format_args!("{len} from {root}"),
                );
            }
        }
        // More than the queue of a slow rank holds.
        let mut values = vec![group.rank() as u8; 20_000_000];
        if group.rank() == world_size - 1 {
            std::thread::sleep(Duration::from_millis(200));
        }
        group.broadcast(&mut values, 0).unwrap();
        assert!(values.iter().all(|x| *x == 0));
    });
}

pub(crate) fn gathers(means: Means, world_size: usize) {
    run(means, world_size, |group| {
        let (rank, world_size) = (group.rank(), group.world_size());
        for len in [0, 1, 1000, 400_000] {
            let all = group.all_gather(&buffer::<f32>(rank, len)).unwrap();
            let expected: Vec<f32> = (0..world_size).flat_map(|r| buffer(r, len)).collect();
            assert_same(&all, &expected, len);
        }
        for unit in [0, 1, 100_000] {
            // Rank 0 has nothing to give, the last one the most.
            let all = group
                .all_gather_varied(&buffer::<bf16>(rank, rank * unit))
                .unwrap();
            assert_eq!(all.len(), world_size);
            for (rank, values) in all.iter().enumerate() {
                assert_same(values, &buffer::<bf16>(rank, rank * unit), rank);
            }
        }
    });
}

#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
struct Report {
    rank: usize,
    loss: f64,
    counts: BTreeMap<u32, String>,
    note: Option<String>,
    blob: String,
}

impl Report {
    fn of(rank: usize) -> Self {
        Self {
            rank,
            loss: f64::INFINITY,
            counts: BTreeMap::from([(rank as u32, "é".to_owned())]),
            note: (rank % 2 == 1).then(|| "odd".to_owned()),
            // The last ones take several chunks.
            blob: "x".repeat(rank * 270_000),
        }
    }
}

pub(crate) fn objects(means: Means, world_size: usize) {
    run(means, world_size, |group| {
        let (rank, world_size) = (group.rank(), group.world_size());
        let expected: Vec<Report> = (0..world_size).map(Report::of).collect();
        assert_eq!(
            group.all_gather_object(&Report::of(rank)).unwrap(),
            expected
        );
        for root in 0..world_size {
            let gathered = group.gather_object(&Report::of(rank), root).unwrap();
            assert_eq!(gathered, (rank == root).then(|| expected.clone()));
            let mine = Report::of(rank);
            let value = (rank == root).then_some(&mine);
            assert_eq!(group.broadcast_object(value, root).unwrap(), expected[root]);
        }
        let losses = group.all_gather_object(&f64::NAN).unwrap();
        assert!(losses.iter().all(|x| x.is_nan()));
    });
}

pub(crate) fn barriers(means: Means, world_size: usize) {
    let arrived = Arc::new(AtomicUsize::new(0));
    run(means, world_size, move |group| {
        for round in 1..50 {
            arrived.fetch_add(1, Ordering::SeqCst);
            group.barrier().unwrap();
            let seen = arrived.load(Ordering::SeqCst);
            assert!(
                seen >= round * group.world_size(),
                "{seen} in round {round}"
            );
            group.barrier().unwrap();
        }
    });
}

pub(crate) fn started_beside_blocking(means: Means, world_size: usize) {
    fn fill(group: &ProcessGroup, index: usize, len: usize) -> Buffer {
        let mut buffer = group.buffer(f32::DTYPE, len);
        buffer
            .as_mut_slice()
            .unwrap()
            .fill((group.rank() + index) as f32);
        buffer
    }
    run(means, world_size, |group| {
        let world_size = group.world_size();
        let ranks = (world_size * (world_size - 1) / 2) as f32;
        for len in [0, 10, 200_000] {
            let mut pending = Vec::new();
            for index in 0..6 {
                let started = group
                    .start_all_reduce(fill(&group, index, len), ReduceOp::Sum)
                    .unwrap();
                pending.push((index, started));
                if index == 3 {
                    let mut values = [1_i64];
                    group.all_reduce(&mut values, ReduceOp::Sum).unwrap();
                    assert_eq!(values, [world_size as i64]);
                    assert!(pending.iter().all(|(_, pending)| pending.is_ready()));
                }
            }
            // Waiting in another order than starting.
            pending.reverse();
            for (index, pending) in pending {
                let buffer = pending.wait().unwrap();
                let expected = ranks + (index * world_size) as f32;
                assert_eq!(buffer.len(), len);
                assert!(
                    buffer
                        .as_slice::<f32>()
                        .unwrap()
                        .iter()
                        .all(|x| *x == expected)
                );
            }
        }
    });
}

/// One rank starts many operations at once, others have one at a time under way.
pub(crate) fn ranks_start_as_they_like(means: Means, world_size: usize) {
    run(means, world_size, |group| {
        let (rank, world_size) = (group.rank(), group.world_size());
        let sum = |index: usize| (world_size * (world_size - 1) / 2 + index * world_size) as f32;
        let mut pending = Vec::new();
        for (index, len) in [300_000, 10, 0, 70_000, 1_000_000, 5, 5, 200_000, 1, 4_200]
            .into_iter()
            .enumerate()
        {
            let mut buffer = group.buffer(f32::DTYPE, len);
            let values = buffer.as_mut_slice::<f32>().unwrap();
            values.fill((rank + index) as f32);
            let check = move |values: &[f32]| {
                assert_eq!(values.len(), len);
                assert!(values.iter().all(|x| *x == sum(index)));
            };
            match rank % 3 {
                0 => {
                    let started = group.start_all_reduce(buffer, ReduceOp::Sum).unwrap();
                    pending.push((started, check));
                }
                1 => {
                    group.all_reduce(values, ReduceOp::Sum).unwrap();
                    check(values);
                }
                _ => {
                    let started = group.start_all_reduce(buffer, ReduceOp::Sum).unwrap();
                    check(started.wait().unwrap().as_slice().unwrap());
                }
            }
        }
        for (pending, check) in pending {
            check(pending.wait().unwrap().as_slice().unwrap());
        }
        group.barrier().unwrap();
    });
}

pub(crate) fn several_threads_share_a_handle(means: Means, world_size: usize) {
    run(means, world_size, |group| {
        // Calls of different threads have no order of their own, so all are alike.
        std::thread::scope(|scope| {
            for _ in 0..4 {
                let group = group.clone();
                scope.spawn(move || {
                    for _ in 0..20 {
                        let mut values = [1.0_f64; 5];
                        group.all_reduce(&mut values, ReduceOp::Sum).unwrap();
                        assert_eq!(values, [group.world_size() as f64; 5]);
                    }
                });
            }
        });
    });
}

/// Each disagreement is told in the same words on every rank, and ends the group.
pub(crate) fn disagreements(means: Means, world_size: usize) {
    type Act = fn(&ProcessGroup) -> accelerator_collective::Result<()>;
    let usual: Act = |group| group.all_reduce(&mut [0.0_f32; 10], ReduceOp::Sum);
    let large: Act = |group| group.all_reduce(&mut [0.0_f32; 90_000], ReduceOp::Sum);
    let rooted: Act = |group| group.broadcast(&mut [0_u8; 4], 0);
    let cases: [(Act, Act, &str, &str); 8] = [
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

/// A rank that does not come in time is named by all the others, and told when it comes.
pub(crate) fn a_rank_that_does_not_come(means: Means, world_size: usize) {
    let options = patient().with_progress_timeout(Duration::from_millis(700));
    let late = world_size - 1;
    let errors = run_with(means, world_size, &options, move |group| {
        group.barrier().unwrap();
        if group.rank() == late {
            std::thread::sleep(Duration::from_secs(3));
        }
        group
            .all_reduce(&mut [1.0_f32; 10], ReduceOp::Sum)
            .unwrap_err()
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

/// A rank that closes its group while others go on is named, as one that left early.
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

/// Leaving at different times is fine where every rank has had what it needs.
pub(crate) fn orderly_ends(means: Means, world_size: usize) {
    for _ in 0..10 {
        run(means, world_size, |group| {
            let mut values = vec![1.0_f32; 10_000];
            group.all_reduce(&mut values, ReduceOp::Sum).unwrap();
            drop(group);
        });
    }
}

/// A rank that panics is named by every survivor.
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

/// So is one whose program returns without closing its group.
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

/// A rank that fails for its own reasons says so to all, whether they are waiting or come later.
pub(crate) fn a_rank_that_aborts(means: Means, world_size: usize) {
    let errors = run(means, world_size, |group| {
        group.barrier().unwrap();
        if group.rank() == 1 {
            let pending = group
                .start_all_reduce(group.buffer(f32::DTYPE, 10), ReduceOp::Sum)
                .unwrap();
            group.abort("its data set is empty");
            group.abort("a second reason changes nothing");
            assert!(pending.wait().is_err());
            return group.barrier().unwrap_err();
        }
        if group.rank() > 1 {
            std::thread::sleep(Duration::from_millis(300));
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

/// A rank that is slow, but lives, is waited for beyond the liveness deadline.
pub(crate) fn a_slow_rank_is_not_lost(means: Means, world_size: usize) {
    let options = patient().with_liveness_timeout(Duration::from_secs(1));
    run_with(means, world_size, &options, |group| {
        if group.rank() == 1 {
            std::thread::sleep(Duration::from_millis(2500));
        }
        group.barrier().unwrap();
    });
}

/// Operations that were started fail with their group, and nobody waits for them in vain.
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

/// What is refused at once costs the group nothing.
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
