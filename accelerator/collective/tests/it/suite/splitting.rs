//! Cases that every transport must pass: groups of some of the ranks.

use std::{sync::Arc, thread, time::Duration};

use accelerator_collective::internal::ShardLayout;
use accelerator_collective::{Element, Partition, Pending, ProcessGroup, ReduceOp};

use super::{
    sample::{assert_same, buffer, reduced},
    world::{Means, run},
};

/// Groups are numbered by their keys, have the bits of a world of their size, and can be divided again.
pub(crate) fn groups_are_worlds(means: Means, world_size: usize) {
    let flat = means.per_host(world_size) == world_size;
    run(means, world_size, move |world| {
        let rank = world.rank();
        // The ranks of even and of odd number, from the last one to the first.
        let group = world.split(rank % 2, world_size - rank).unwrap();
        let members: Vec<usize> = (0..world_size)
            .rev()
            .filter(|member| member % 2 == rank % 2)
            .collect();
        assert_eq!(group.world_size(), members.len());
        assert_eq!(members[group.rank()], rank);
        assert_eq!(group.all_gather(&[rank as u32]).unwrap(), {
            let members = members.iter().map(|member| *member as u32);
            members.collect::<Vec<_>>()
        });
        for len in [5, 5_000, 300_000] {
            let mut values = buffer::<i32>(group.rank(), len);
            group.all_reduce(&mut values, ReduceOp::Sum).unwrap();
            let wanted = reduced::<i32>(members.len(), members.len(), len, ReduceOp::Sum);
            assert_same(&values, &wanted, format!("{means:?}, {len}"));
            if flat {
                let mut values = buffer::<f32>(group.rank(), len);
                group.all_reduce(&mut values, ReduceOp::Sum).unwrap();
                let wanted = reduced::<f32>(members.len(), members.len(), len, ReduceOp::Sum);
                assert_same(&values, &wanted, format!("{means:?}, {len}"));
            }
        }
        let names = group.gather_object(&format!("rank {rank}"), 0).unwrap();
        assert_eq!(names.is_some(), group.rank() == 0);
        assert_eq!(
            names.map_or(members.len(), |names| names.len()),
            members.len()
        );
        // Each of them alone, and all again.
        let alone = group.split(group.rank(), 0).unwrap();
        assert_eq!(alone.world_size(), 1);
        assert_eq!(alone.all_gather_object(&rank).unwrap(), [rank]);
        let again = group.split(7, group.rank()).unwrap();
        assert_eq!(again.rank(), group.rank());
        let sum: usize = again.all_gather_object(&rank).unwrap().iter().sum();
        assert_eq!(sum, members.iter().sum::<usize>());
        drop(group);
        again.barrier().unwrap();
        world.barrier().unwrap();
    });
}

/// Operations of several groups are in flight at the same time, and are waited for in any order.
pub(crate) fn groups_cross(means: Means, world_size: usize) {
    run(means, world_size, move |world| {
        let rank = world.rank();
        let halves = world.split(rank % 2, rank).unwrap();
        let pairs = world.split(rank / 2, rank).unwrap();
        let groups = [&world, &halves, &pairs];
        let sum = |group: &ProcessGroup, len: usize, mark: f32| {
            let mut marks = group.buffer(f32::DTYPE, len);
            marks.as_mut_slice::<f32>().unwrap().fill(mark);
            group.start_all_reduce(marks, ReduceOp::Sum).unwrap()
        };
        let gather = |group: &ProcessGroup, len: usize, mark: f32| {
            let partition = Partition::new(len, group.world_size());
            let parts = (0..group.world_size()).map(|rank| vec![partition.range(rank)]);
            let layout = Arc::new(ShardLayout::new(len, parts.collect()).unwrap());
            let mut values = group.buffer(f32::DTYPE, len);
            let own = partition.range(group.rank());
            values.as_mut_slice::<f32>().unwrap()[own].fill(mark);
            group.start_all_gather(values, &layout).unwrap()
        };
        for round in 0..12 {
            let mut pending: Vec<(f32, Pending)> = Vec::new();
            for (number, group) in groups.iter().enumerate() {
                // No other group and round has these values.
                let mark = (100 * round + number + 1) as f32;
                let total = mark * group.world_size() as f32;
                // Lengths differ, so that operations end in another order than they began.
                let turn = (number + round) % 3;
                pending.push((total, sum(group, [90_000, 10, 700_000][turn], mark)));
                pending.push((mark, gather(group, [200_000, 3, 40_000][turn], mark)));
            }
            // Ranks wait for them in different orders, and call others meanwhile.
            pending.rotate_left(rank % 6);
            assert_eq!(
                halves.all_gather(&[1_u8]).unwrap().len(),
                halves.world_size()
            );
            for (wanted, pending) in pending {
                let values = pending.wait().unwrap();
                let values = values.as_slice::<f32>().unwrap();
                assert!(
                    values.iter().all(|x| *x == wanted),
                    "{means:?}, round {round}"
                );
            }
            if round == 5 {
                // A group that comes and goes.
                let short = pairs.split(0, 0).unwrap();
                let sum = sum(&short, 30_000, 2.0).wait().unwrap();
                let wanted = 2.0 * short.world_size() as f32;
                assert!(sum.as_slice::<f32>().unwrap().iter().all(|x| *x == wanted));
            }
        }
        world.barrier().unwrap();
    });
}

/// A failure in a group ends all groups of all ranks, and names a rank of the world.
pub(crate) fn groups_fail_together(means: Means, world_size: usize) {
    type Act = fn(&ProcessGroup) -> accelerator_collective::Result<()>;
    let acts: [(Act, &str); 3] = [
        (
            |group| {
                group.abort("its data set is empty");
                group.barrier()
            },
            "is lost: its data set is empty",
        ),
        (
            |group| group.all_gather(&[1_u8]).map(drop),
            "the ranks disagree in collective #",
        ),
        (
            |group| {
                group.close()?;
                thread::sleep(Duration::from_millis(300));
                group.barrier()
            },
            "left early: it closed its group",
        ),
    ];
    let last = world_size - 1;
    for (act, wanted) in acts {
        let errors = run(means, world_size, move |world| {
            // The last rank, with those of its parity.
            let group = world.split(world.rank() % 2, world.rank()).unwrap();
            world.barrier().unwrap();
            let part = match world.rank() == last {
                true => act(&group),
                false => group.barrier(),
            };
            // Those of the other group hear of it there, or when they need the others.
            let all = world.barrier().unwrap_err();
            assert!(part.is_err() || world.rank() % 2 != last % 2, "{part:?}");
            if let Err(error) = &part
                && world.rank() != last
            {
                assert_eq!(error.to_string(), all.to_string());
            }
            assert!(group.barrier().is_err());
            (
                world.rank(),
                part.err().map(|error| error.to_string()),
                all.to_string(),
            )
        });
        for (rank, part, all) in errors {
            if rank % 2 == last % 2 && rank != last {
                let part = part.unwrap();
                assert!(part.contains(wanted), "{means:?}: {part}");
                assert!(
                    part.contains(&format!("rank {last}")) || wanted.starts_with("the ranks"),
                    "{part}"
                );
                assert!(part.contains(" of ranks "), "{part}");
            }
            assert!(
                all.contains(&format!("rank {last}")) || all.contains("the ranks disagree"),
                "{means:?}, rank {rank}: {all}"
            );
        }
    }
}

/// A group keeps the world open, and is closed by itself.
pub(crate) fn groups_outlive_the_handle_of_the_world(means: Means, world_size: usize) {
    run(means, world_size, move |world| {
        let group = world.split(0, world.rank()).unwrap();
        drop(world);
        for _ in 0..3 {
            assert_eq!(group.all_gather(&[1_u8]).unwrap().len(), world_size);
        }
        group.close().unwrap();
        assert!(group.barrier().unwrap_err().is_closed());
    });
}

/// Threads of each rank divide two groups at the same time; the groups get different numbers.
pub(crate) fn groups_are_divided_at_the_same_time(means: Means, world_size: usize) {
    run(means, world_size, move |world| {
        let parents = [0, 0, 0].map(|color| world.split(color, world.rank()).unwrap());
        for _ in 0..6 {
            thread::scope(|scope| {
                for (number, parent) in parents.iter().enumerate() {
                    scope.spawn(move || {
                        let group = parent.split(0, parent.rank()).unwrap();
                        let mut values = vec![number as u32; 30_000];
                        group.all_reduce(&mut values, ReduceOp::Sum).unwrap();
                        let wanted = (number * group.world_size()) as u32;
                        assert!(values.iter().all(|x| *x == wanted));
                    });
                }
            });
        }
        world.barrier().unwrap();
    });
}

/// A world that is closed waits for what its groups have started; a group that is closed aborts nothing.
pub(crate) fn groups_end_in_order(means: Means, world_size: usize) {
    run(means, world_size, move |world| {
        let group = world.split(0, world.rank()).unwrap();
        let closed = world.split(0, world.rank()).unwrap();
        closed.close().unwrap();
        closed.abort("it is closed already");
        drop(closed);
        world.barrier().unwrap();
        let started: Vec<Pending> = (0..3)
            .map(|_| {
                let values = group.buffer(f32::DTYPE, 500_000);
                group.start_all_reduce(values, ReduceOp::Sum).unwrap()
            })
            .collect();
        if world.rank() == 0 {
            // Others need it for a while.
            thread::sleep(Duration::from_millis(50));
        }
        world.close().unwrap();
        for pending in started {
            pending.wait().unwrap();
        }
        assert!(group.barrier().unwrap_err().is_closed());
    });
}
