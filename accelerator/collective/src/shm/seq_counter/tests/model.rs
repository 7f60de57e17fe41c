//! The steps of [`publish`] and [`wait`] in loom, which runs them in the orders that the memory model
//! allows (with few preemptions where there are many orders; of three ranks, as many as fit into a
//! minute), and which finds a rank that sleeps for ever and memory that is written while it is read.
//!
//! The operations are those of `shm_ops/mod.rs`: a rank writes what belongs to a step into its slot of
//! the step's parity, publishes its counter, and waits until all have taken the step.
#![expect(unsafe_code, reason = "cells that loom checks")]
#![expect(
    clippy::arc_with_non_send_sync,
    reason = "loom runs its threads one at a time"
)]

use std::sync::Arc;

use loom::{
    cell::UnsafeCell,
    model::Builder,
    sync::{Condvar, Mutex, atomic},
    thread,
};

use crate::shm::seq_counter::*;

#[test]
fn no_wake_up_is_lost() {
    for (preemptions, targets) in [(None, &[2][..]), (Some(2), &[1, 2])] {
        model(preemptions, move || {
            let owner = Arc::new(SharedLine::new());
            let waiters = targets.iter().map(|target| {
                let owner = Arc::clone(&owner);
                thread::spawn(move || assert!(owner.wait(*target, &mut SleepUntilWoken)))
            });
            let waiters: Vec<_> = waiters.collect();
            owner.publish(1);
            owner.publish(2);
            for waiter in waiters {
                waiter.join().expect("a waiter");
            }
        });
    }
}

#[test]
fn what_was_written_before_a_count_is_read_after_it() {
    // Also through a word in which somebody else has set the bit since.
    model(None, || {
        let owner = Arc::new((SharedLine::new(), UnsafeCell::new(0)));
        let waiters: Vec<_> = (0..2)
            .map(|_| {
                let owner = Arc::clone(&owner);
                thread::spawn(move || {
                    if owner.0.wait(1, &mut NoTimeLeft) {
                        // SAFETY: loom checks that nobody writes meanwhile.
                        assert_eq!(owner.1.with(|value| unsafe { *value }), 7);
                    }
                })
            })
            .collect();
        // SAFETY: loom checks that nobody reads meanwhile.
        owner.1.with_mut(|value| unsafe { *value = 7 });
        owner.0.publish(1);
        for waiter in waiters {
            waiter.join().expect("a waiter");
        }
    });
}

#[test]
fn two_ranks_never_write_what_is_read() {
    use ModelOp::{Long, Short};
    for operations in [
        &[Short, Short, Short][..],
        &[Long, Long],
        &[Short, Long, Short],
        &[Long, Short],
    ] {
        model(Some(2), move || {
            ModelWorld::new(2).run(operations, Death::None)
        });
    }
}

#[test]
#[ignore = "takes minutes"]
fn three_ranks_never_write_what_is_read() {
    use ModelOp::{Long, Short};
    for operations in [&[Short, Short, Short][..], &[Long], &[Short, Long]] {
        sample(move || ModelWorld::new(3).run(operations, Death::None));
    }
}

#[test]
fn a_rank_that_dies_blocks_nobody() {
    use ModelOp::{Long, Short};
    for operations in [&[Short, Short, Short][..], &[Long, Short]] {
        for points in 0..8 {
            let death = Death::After { rank: 0, points };
            model(Some(2), move || ModelWorld::new(2).run(operations, death));
        }
    }
}

#[test]
#[ignore = "takes minutes"]
fn one_of_three_ranks_that_dies_blocks_nobody() {
    use ModelOp::{Long, Short};
    for operations in [&[Short, Short][..], &[Long]] {
        for points in 0..6 {
            let death = Death::After { rank: 1, points };
            sample(move || ModelWorld::new(3).run(operations, death));
        }
    }
}

fn model(preemptions: Option<usize>, ranks: impl Fn() + Send + Sync + 'static) {
    explore(preemptions, None, ranks);
}

/// Tries as many orders as fit into a minute.
fn sample(ranks: impl Fn() + Send + Sync + 'static) {
    explore(Some(2), Some(Duration::from_secs(60)), ranks);
}

fn explore(
    preemptions: Option<usize>,
    limit: Option<Duration>,
    ranks: impl Fn() + Send + Sync + 'static,
) {
    let mut builder = Builder::new();
    builder.preemption_bound = preemptions;
    builder.max_duration = limit;
    builder.check(ranks);
}

#[derive(Clone, Copy)]
enum ModelOp {
    /// One step: everyone reads what all have put into their slots.
    Short,
    /// Two steps: everyone also reduces its part of all buffers, and writes it to all of them.
    Long,
}

#[derive(Clone, Copy, Eq, PartialEq)]
enum Death {
    None,
    /// The rank ends after it has passed so many points, and the others do not wait for ever.
    After {
        rank: usize,
        points: usize,
    },
}

struct ModelWorld {
    members: Vec<ModelRank>,
}

/// The memory that one rank shares.
struct ModelRank {
    counter: SharedLine,
    /// The slots, by parity of the step.
    slots: [UnsafeCell<u32>; 2],
    /// One word for the part of each rank.
    buffer: Vec<UnsafeCell<u32>>,
}

impl ModelWorld {
    fn new(ranks: usize) -> Self {
        let member = || ModelRank {
            counter: SharedLine::new(),
            slots: [UnsafeCell::new(0), UnsafeCell::new(0)],
            buffer: (0..ranks).map(|_| UnsafeCell::new(0)).collect(),
        };
        Self {
            members: (0..ranks).map(|_| member()).collect(),
        }
    }

    fn run(self, operations: &'static [ModelOp], death: Death) {
        let world = Arc::new(self);
        let others: Vec<_> = (1..world.members.len())
            .map(|rank| {
                let world = Arc::clone(&world);
                thread::spawn(move || world.rank(rank, operations, death))
            })
            .collect();
        let first = world.rank(0, operations, death);
        let mut ends = vec![first];
        ends.extend(others.into_iter().map(|rank| rank.join().expect("a rank")));
        if death == Death::None {
            assert!(ends.iter().all(Option::is_some));
        }
    }

    /// `None` if the rank died, or gave up waiting.
    fn rank(&self, rank: usize, operations: &[ModelOp], death: Death) -> Option<()> {
        let mut left = match death {
            Death::After {
                rank: dying,
                points,
            } if dying == rank => points,
            _ => usize::MAX,
        };
        let mut live = || {
            left = left.checked_sub(1)?;
            Some(())
        };
        let all = |step| {
            let others = self.members.iter().enumerate();
            let mut others = others.filter(|(peer, _)| *peer != rank);
            let all = others.all(|(_, member)| match death {
                Death::None => member.counter.wait(step, &mut SleepUntilWoken),
                Death::After { .. } => member.counter.wait(step, &mut NoTimeLeft),
            });
            all.then_some(())
        };
        let own = &self.members[rank];
        let mut step = 0;
        for operation in operations {
            step += 1;
            let value = |rank: usize| 10 * step + u32::try_from(rank).expect("a small number");
            let sum: u32 = (0..self.members.len()).map(value).sum();
            let slot = step as usize % 2;
            live()?;
            write(&own.slots[slot], value(rank));
            if matches!(operation, ModelOp::Long) {
                for part in &own.buffer {
                    write(part, value(rank));
                }
            }
            live()?;
            own.counter.publish(step);
            live()?;
            all(step)?;
            let slots = self.members.iter().map(|member| read(&member.slots[slot]));
            assert_eq!(slots.sum::<u32>(), sum);
            if matches!(operation, ModelOp::Long) {
                live()?;
                let parts = self.members.iter().map(|member| &member.buffer[rank]);
                let total = parts.clone().map(read).sum();
                assert_eq!(total, sum);
                parts.for_each(|part| write(part, total));
                live()?;
                step += 1;
                own.counter.publish(step);
                live()?;
                all(step)?;
                assert!(own.buffer.iter().all(|part| read(part) == sum));
            }
        }
        Some(())
    }
}

fn read(cell: &UnsafeCell<u32>) -> u32 {
    // SAFETY: loom checks that nobody writes meanwhile.
    cell.with(|value| unsafe { *value })
}

fn write(cell: &UnsafeCell<u32>, value: u32) {
    // SAFETY: loom checks that nobody reads or writes meanwhile.
    cell.with_mut(|place| unsafe { *place = value });
}

word!(atomic::AtomicU32, atomic::Ordering);

/// A word, with the system's part in sleeping on it.
struct SharedLine {
    word: atomic::AtomicU32,
    bed: Mutex<()>,
    wakeup: Condvar,
}

impl SharedLine {
    fn new() -> Self {
        Self {
            word: atomic::AtomicU32::new(0),
            bed: Mutex::new(()),
            wakeup: Condvar::new(),
        }
    }

    fn publish(&self, to: u32) {
        publish(self, to, |line: &Self| {
            drop(line.bed.lock().expect("the system's lock"));
            line.wakeup.notify_all();
        });
    }

    fn wait(&self, target: u32, strategy: &mut impl WaitStrategy<Self>) -> bool {
        wait(self, target, strategy)
    }
}

impl SharedWord for SharedLine {
    fn load(&self) -> u32 {
        SharedWord::load(&self.word)
    }

    fn swap(&self, value: u32) -> u32 {
        SharedWord::swap(&self.word, value)
    }

    fn replace(&self, from: u32, to: u32) -> bool {
        SharedWord::replace(&self.word, from, to)
    }
}

/// Sleeps until it is woken.
struct SleepUntilWoken;

impl WaitStrategy<SharedLine> for SleepUntilWoken {
    fn spin(&mut self) -> bool {
        false
    }

    fn sleep(&mut self, line: &SharedLine, value: u32) -> bool {
        let bed = line.bed.lock().expect("the system's lock");
        // The system looks at the word once more before it lets a thread sleep.
        if line.word.load(atomic::Ordering::Relaxed) == value {
            drop(line.wakeup.wait(bed).expect("the system's lock"));
        }
        true
    }
}

/// A strategy without time left to sleep.
struct NoTimeLeft;

impl WaitStrategy<SharedLine> for NoTimeLeft {
    fn spin(&mut self) -> bool {
        false
    }

    fn sleep(&mut self, _line: &SharedLine, _value: u32) -> bool {
        false
    }
}
