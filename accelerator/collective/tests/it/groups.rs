//! Random groups of up to 16 ranks: their operations cross in time, and some ranks end in the middle.

use std::{sync::Arc, thread, time::Duration};

use accelerator_collective::internal::ShardLayout;
use accelerator_collective::{Element, Pending, ProcessGroup, ReduceOp};

use crate::suite::{
    sample::{assert_same, buffer, reduced},
    world::{Means, run},
};

#[test]
fn threads() {
    (0..120).for_each(|seed| check(Means::Threads, seed, 16));
}

#[test]
fn tcp() {
    (1000..1050).for_each(|seed| check(Means::Tcp, seed, 7));
}

#[test]
#[cfg(target_os = "linux")]
fn shm() {
    (2000..2050).for_each(|seed| check(Means::Shm, seed, 7));
}

/// Chunks that a rank does not take yet, in the queue and in the connection, stop no other group.
#[test]
fn a_full_queue_stops_no_other_group() {
    // The connections of the more ranks are found by epoll.
    full_queues(2);
    full_queues(10);
}

fn full_queues(ranks: usize) {
    run(Means::Tcp, ranks, move |world| {
        let (rank, len) = (world.rank(), 5 << 20);
        // Rank 0 sends the first chunks of all gathers ahead: more than a queue and a connection hold.
        let layout = Arc::new(ShardLayout::new(len, vec![vec![0..len], vec![]]).unwrap());
        let pair = rank / 2;
        let groups: Vec<ProcessGroup> = (0..24).map(|_| world.split(pair, rank).unwrap()).collect();
        let start = || -> Vec<Pending> {
            let four = groups.iter().flat_map(|group| [group; 4]);
            four.map(|group| {
                let buffer = group.buffer(u8::DTYPE, len);
                group.start_all_gather(buffer, &layout).unwrap()
            })
            .collect()
        };
        let mut started = Vec::new();
        if rank == 0 {
            started = start();
            thread::sleep(Duration::from_millis(700));
        }
        for _ in 0..10 {
            let mut values = vec![1_u32; 100_000];
            world.all_reduce(&mut values, ReduceOp::Sum).unwrap();
            assert!(values.iter().all(|x| *x == ranks as u32));
        }
        if rank == 1 {
            started = start();
        }
        for pending in started {
            pending.wait().unwrap();
        }
        world.barrier().unwrap();
    });
}

/// Divides a world several times, and reduces in all of its groups at the same time: with the bits of worlds of these
/// sizes, or, in two cases of five, until a rank ends, which all others name.
fn check(means: Means, seed: u64, most: u64) {
    let world_size = 2 + draw(&[seed, 0]) % (most - 1);
    let victim = match seed % 5 {
        0 | 1 => Some(draw(&[seed, 1]) % world_size),
        _ => None,
    };
    let ends = run(means, world_size as usize, move |world| {
        match victim == Some(world.rank() as u64) {
            true => train(&world, seed, Some(draw(&[seed, 2]) % STEPS)),
            false => train(&world, seed, None),
        }
    });
    for (rank, end) in ends.into_iter().enumerate() {
        match (victim, end) {
            (None, end) => assert!(end.is_ok(), "seed {seed}, rank {rank}: {end:?}"),
            (Some(victim), _) if victim == rank as u64 => {}
            (Some(victim), end) => {
                let text = end.expect_err("every step needs all ranks").to_string();
                let named = text.contains(&format!("rank {victim} "));
                assert!(named, "seed {seed}, rank {rank}: {text}");
            }
        }
    }
}

/// One rank's steps; it ends before the step of this number.
fn train(world: &ProcessGroup, seed: u64, ends: Option<u64>) -> accelerator_collective::Result<()> {
    let rank = world.rank() as u64;
    let mut groups = vec![world.clone()];
    for split in 0..1 + draw(&[seed, 3]) % 3 {
        let parent = draw(&[seed, 4, split]) as usize % groups.len();
        let color = draw(&[seed, 5, split, rank]) % 3;
        let key = draw(&[seed, 6, split, rank]) % 4;
        groups.push(groups[parent].split(color as usize, key as usize)?);
    }
    for step in 0..STEPS {
        if ends == Some(step) {
            if draw(&[seed, 7]).is_multiple_of(2) {
                world.abort("it ends as planned");
            }
            return Ok(());
        }
        let lens = [3, 700, 5_000, 40_000, 90_000];
        let len = |group: usize| lens[draw(&[seed, 8, step, group as u64]) as usize % lens.len()];
        let mut pending: Vec<(usize, Pending)> = Vec::new();
        for (index, group) in groups.iter().enumerate() {
            let mut values = group.buffer(f32::DTYPE, len(index));
            let own = buffer::<f32>(group.rank(), len(index));
            values.as_mut_slice::<f32>()?.copy_from_slice(&own);
            pending.push((index, group.start_all_reduce(values, ReduceOp::Sum)?));
        }
        let turn = draw(&[seed, 9, step, rank]) as usize % pending.len();
        pending.rotate_left(turn);
        for (index, pending) in pending {
            let (size, values) = (groups[index].world_size(), pending.wait()?);
            let wanted = reduced::<f32>(size, size, len(index), ReduceOp::Sum);
            let what = format!("seed {seed}, step {step}, group {index}");
            assert_same(values.as_slice::<f32>()?, &wanted, what);
        }
    }
    world.barrier()
}

/// A pseudorandom number that depends on these.
fn draw(numbers: &[u64]) -> u64 {
    numbers.iter().fold(0x9e37_79b9, |state, number| {
        let x = (state ^ number).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (x ^ (x >> 29)).wrapping_mul(0x94d0_49bb_1331_11eb) >> 3
    })
}

const STEPS: u64 = 5;
