//! The ranks of the self-test's jobs.
//!
//! The last line on standard output is the result; a failure goes to standard error and the exit code.
//!
//! Collectives are compared with results that are known beforehand. At each index all ranks hold the same small number
//! `b`, except one rank, which holds `b + W`. So the sum is `W (b + 1)`, the mean `b + 1`, the maximum `b + W` and the
//! minimum `b`: exact in every type, and wrong as soon as any rank is missing, counted twice, or in another's place.

use std::fmt::Debug;
use std::io::Write;
use std::num::NonZeroUsize;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::Duration;

use accelerator_collective::internal::ShardLayout;
use accelerator_collective::{Element, GroupOptions, Launch, Partition, ProcessGroup, ReduceOp};
use clap::{Args, ValueEnum};
use half::{bf16, f16};
use rustix::process::Pid;
use serde::{Deserialize, Serialize};

use crate::error::{BoxResult as Result, chain};
use crate::text::print;

/// Arguments of a rank of the self-test.
#[derive(Args, Clone, Debug)]
pub(crate) struct RankArgs {
    /// Its part of the stage.
    task: Task,

    /// Threads that are ranks.
    #[arg(long, default_value = "2")]
    threads: NonZeroUsize,

    /// The seconds that it may wait for others.
    #[arg(long, default_value = "60", value_parser = limit)]
    limit: Duration,
}

/// The part of a rank in a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Task {
    /// Connect with the other ranks.
    Rendezvous,
    /// All collectives, among threads of this process.
    Threads,
    /// All collectives, with other processes.
    Collectives,
    /// All-reduces without end, and a report of the error that ends them.
    Reduce,
    /// One all-reduce.
    First,
}

/// A line of a rank that reduces.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) enum RankLine {
    /// The first all-reduce is done.
    Ready { rank: usize, pid: i32 },
    /// An all-reduce has failed.
    Lost {
        ranks: Vec<usize>,
        text: String,
        is_peer_lost: bool,
    },
}

impl RankLine {
    /// Returns `true` if it names this rank, and its process, as lost.
    pub(super) fn names(&self, rank: usize, pid: Pid) -> bool {
        let process = format!("rank {rank} (process {} on ", pid.as_raw_pid());
        match self {
            Self::Ready { .. } => false,
            Self::Lost {
                ranks,
                text,
                is_peer_lost,
            } => *is_peer_lost && *ranks == [rank] && text.contains(&process),
        }
    }
}

/// Runs a rank of the test; the exit code is its result.
pub(crate) fn run(arguments: &RankArgs) -> ExitCode {
    match perform(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "{}", chain(&*error));
            ExitCode::FAILURE
        }
    }
}

fn perform(arguments: &RankArgs) -> Result<()> {
    let options = GroupOptions::new()
        .with_connect_timeout(arguments.limit)
        .with_progress_timeout(arguments.limit);
    if arguments.task == Task::Threads {
        let groups = ProcessGroup::threads(arguments.threads.get(), &options)?;
        return threads(groups);
    }
    let group = ProcessGroup::connect(&Launch::from_env()?, &options)?;
    match arguments.task {
        Task::Rendezvous => rendezvous(&group)?,
        Task::Reduce => return reduce(&group),
        Task::First => {
            group.all_reduce(&mut [1.0_f32], ReduceOp::Sum)?;
            print_on_rank_0(&group, "the first all-reduce is done")?;
        }
        Task::Threads | Task::Collectives => collectives(&group)?,
    }
    Ok(group.close()?)
}

fn rendezvous(group: &ProcessGroup) -> Result<()> {
    let all = group.all_gather_object(&(group.rank(), std::process::id()))?;
    if let Some((rank, (said, _))) = (0..).zip(&all).find(|(rank, (said, _))| rank != said) {
        return Err(format!("who should be rank {rank} says that it is rank {said}").into());
    }
    let mut pids: Vec<u32> = all.iter().map(|(_, pid)| *pid).collect();
    pids.sort_unstable();
    pids.dedup();
    if pids.len() != group.world_size() {
        return Err(format!("expected one process per rank, found the processes {pids:?}").into());
    }
    print_on_rank_0(group, &format!("{} processes met", pids.len()))
}

fn threads(groups: Vec<ProcessGroup>) -> Result<()> {
    let rank = |group: ProcessGroup| {
        move || -> Result<()> {
            collectives(&group)?;
            Ok(group.close()?)
        }
    };
    let ranks: Vec<_> = groups
        .into_iter()
        .map(|group| thread::spawn(rank(group)))
        .collect();
    let outcomes = ranks.into_iter().map(|rank| match rank.join() {
        Ok(outcome) => outcome,
        Err(_) => Err("a rank panicked".into()),
    });
    // All of them have ended before the first error counts.
    outcomes.collect::<Vec<_>>().into_iter().collect()
}

fn reduce(group: &ProcessGroup) -> Result<()> {
    // The launcher sends it as soon as a rank is lost; this one first prints its own view.
    signal_hook::flag::register(signal_hook::consts::SIGTERM, Arc::<AtomicBool>::default())?;
    let mut values = vec![1.0_f32; 65_536];
    group.all_reduce(&mut values, ReduceOp::Mean)?;
    print_line(&serde_json::to_string(&RankLine::Ready {
        rank: group.rank(),
        pid: std::process::id().cast_signed(),
    })?)?;
    loop {
        if let Err(error) = group.all_reduce(&mut values, ReduceOp::Mean) {
            return print_line(&serde_json::to_string(&RankLine::Lost {
                ranks: error.ranks().to_vec(),
                text: chain(&error),
                is_peer_lost: error.is_peer_lost(),
            })?);
        }
    }
}

fn print_on_rank_0(group: &ProcessGroup, text: &str) -> Result<()> {
    match group.rank() {
        0 => print_line(text),
        _ => Ok(()),
    }
}

/// Prints a line in one piece, so that lines of ranks do not mix.
fn print_line(text: &str) -> Result<()> {
    print(&format!("{text}\n"))?;
    Ok(())
}

/// Runs all collectives on this rank; rank 0 prints the number of results that were compared.
fn collectives(group: &ProcessGroup) -> Result<()> {
    let mut check = Check { group, results: 0 };
    check.reduced::<f32>(1000)?;
    check.reduced::<f64>(1000)?;
    check.reduced::<f16>(1000)?;
    check.reduced::<bf16>(1000)?;
    check.reduced::<i16>(1000)?;
    check.reduced::<i32>(1000)?;
    check.reduced::<i64>(1000)?;
    check.reduced::<u8>(1000)?;
    check.reduced::<u16>(1000)?;
    check.reduced::<u32>(1000)?;
    check.reduced::<u64>(1000)?;
    check.reduced::<f32>(1)?;
    // Several chunks per part.
    check.reduced::<f32>(250_000)?;
    check.started()?;
    check.kept()?;
    check.broadcast()?;
    check.gathered()?;
    check.objects()?;
    group.barrier()?;
    let (results, ranks, transport) = (check.results, group.world_size(), group.transport());
    print_on_rank_0(
        group,
        &format!("{results} results on {ranks} ranks over {transport}"),
    )
}

/// Reads a time limit in seconds.
pub(super) fn limit(text: &str) -> std::result::Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.1..=86_400.0).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err("expected a number of seconds between 0.1 and 86400".into()),
    }
}

/// Adds up to 80 on 16 ranks, which every type holds.
trait Small: Element + PartialEq + Debug + From<u8> {}

impl<T: Element + PartialEq + Debug + From<u8>> Small for T {}

struct Check<'a> {
    group: &'a ProcessGroup,
    results: usize,
}

impl Check<'_> {
    /// Checks all reductions of one type.
    fn reduced<T: Small>(&mut self, len: usize) -> Result<()> {
        for op in [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max, ReduceOp::Min] {
            let mut values = self.values::<T>(len);
            self.group.all_reduce(&mut values, op)?;
            let what = format!("all-reduce {op} {} x {len}", T::DTYPE);
            self.same(&values, &self.expected::<T>(op, len), &what)?;
        }
        let values = self.values::<T>(len);
        let own = self.group.reduce_scatter(&values, ReduceOp::Sum)?;
        let part = Partition::new(len, self.world()).range(self.group.rank());
        let expected = self.expected::<T>(ReduceOp::Sum, len);
        self.same(&own, &expected[part], "reduce-scatter")
    }

    /// Starts two operations, and waits for them in reverse order.
    fn started(&mut self) -> Result<()> {
        let mut pending = Vec::new();
        for len in [1000, 70_000] {
            let mut buffer = self.group.buffer(f32::DTYPE, len);
            let values = self.values::<f32>(len);
            buffer.as_mut_slice::<f32>()?.copy_from_slice(&values);
            pending.push(self.group.start_all_reduce(buffer, ReduceOp::Mean)?);
        }
        for pending in pending.into_iter().rev() {
            let buffer = pending.wait()?;
            let expected = self.expected::<f32>(ReduceOp::Mean, buffer.len());
            self.same(buffer.as_slice::<f32>()?, &expected, "started all-reduce")?;
        }
        Ok(())
    }

    /// Reduces by a layout: ranks keep elements in turns, and no rank keeps the second half.
    fn kept(&mut self) -> Result<()> {
        for len in [1000, 70_000] {
            let of = |rank: usize| (rank..len / 2).step_by(self.world()).map(|at| at..at + 1);
            let parts = (0..self.world()).map(|rank| of(rank).collect());
            let layout = Arc::new(ShardLayout::new(len, parts.collect())?);
            let mut buffer = self.group.buffer(f32::DTYPE, len);
            let values = self.values::<f32>(len);
            buffer.as_mut_slice::<f32>()?.copy_from_slice(&values);
            self.group
                .reduce_scatter_buffer(&mut buffer, ReduceOp::Sum, &layout)?;
            let kept = |values: &[f32]| -> Vec<f32> {
                let own = layout.of(self.group.rank()).iter().cloned();
                own.flatten().map(|at| values[at]).collect()
            };
            let found = kept(buffer.as_slice::<f32>()?);
            let expected = kept(&self.expected::<f32>(ReduceOp::Sum, len));
            self.same(&found, &expected, "reduce-scatter of a buffer")?;
        }
        Ok(())
    }

    fn broadcast(&mut self) -> Result<()> {
        for root in 0..self.world() {
            let of = |rank: usize| vec![rank as u64; 40_000];
            let mut values = of(self.group.rank());
            self.group.broadcast(&mut values, root)?;
            self.same(&values, &of(root), &format!("broadcast from rank {root}"))?;
        }
        Ok(())
    }

    /// Gathers equally many values of each rank, and one more than of the rank before.
    fn gathered(&mut self) -> Result<()> {
        let of = |rank: usize, len: usize| vec![rank as i32; len];
        let rank = self.group.rank();
        let all = self.group.all_gather(&of(rank, 100))?;
        let expected: Vec<i32> = (0..self.world()).flat_map(|rank| of(rank, 100)).collect();
        self.same(&all, &expected, "all-gather")?;
        let all = self.group.all_gather_varied(&of(rank, rank))?;
        let expected: Vec<Vec<i32>> = (0..self.world()).map(|rank| of(rank, rank)).collect();
        self.same(&all, &expected, "all-gather of different lengths")
    }

    fn objects(&mut self) -> Result<()> {
        let of = |rank: usize| (format!("rank {rank}"), vec![rank; rank]);
        let (rank, root) = (self.group.rank(), self.world() - 1);
        let own = of(rank);
        let all: Vec<_> = (0..self.world()).map(of).collect();
        let found = self.group.all_gather_object(&own)?;
        self.same(&found, &all, "all-gather of objects")?;
        let found = self.group.gather_object(&own, root)?;
        self.same(
            &[found],
            &[(rank == root).then_some(all)],
            "gather of objects",
        )?;
        let own = (rank == root).then_some(&own);
        let found = self.group.broadcast_object(own, root)?;
        self.same(&[found], &[of(root)], "broadcast of an object")
    }

    fn values<T: Small>(&self, len: usize) -> Vec<T> {
        let (rank, world) = (self.group.rank(), self.world());
        let odd = |index: usize| if index % world == rank { world } else { 0 };
        let values = (0..len).map(|index| T::from(base(index) + odd(index) as u8));
        values.collect()
    }

    fn expected<T: Small>(&self, op: ReduceOp, len: usize) -> Vec<T> {
        let world = self.world() as u8;
        let bases = (0..len).map(base);
        let results = bases.map(|base| match op {
            ReduceOp::Sum => world * (base + 1),
            ReduceOp::Mean => base + 1,
            ReduceOp::Max => base + world,
            // The only other one that is asked for is the minimum.
            _ => base,
        });
        results.map(T::from).collect()
    }

    fn same<T: PartialEq + Debug>(
        &mut self,
        found: &[T],
        expected: &[T],
        what: &str,
    ) -> Result<()> {
        self.results += 1;
        let rank = self.group.rank();
        if found.len() != expected.len() {
            let (found, expected) = (found.len(), expected.len());
            return Err(format!(
                "{what}: expected {expected} values on rank {rank}, found {found}"
            )
            .into());
        }
        let mut pairs = (0..).zip(found.iter().zip(expected));
        match pairs.find(|(_, (found, expected))| found != expected) {
            Some((index, (found, expected))) => Err(format!(
                "{what}: expected {expected:?} at index {index} on rank {rank}, found {found:?}"
            )
            .into()),
            None => Ok(()),
        }
    }

    fn world(&self) -> usize {
        self.group.world_size()
    }
}

/// Returns a number from 1 to 4.
fn base(index: usize) -> u8 {
    (index % 4) as u8 + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_that_contributes_something_wrong_is_noticed() {
        let mut groups = ProcessGroup::threads(2, &GroupOptions::new()).unwrap();
        let (wrong, correct) = (groups.pop().unwrap(), groups.pop().unwrap());
        let rank = thread::spawn(move || {
            let mut values = vec![0.0_f32; 1000];
            wrong.all_reduce(&mut values, ReduceOp::Sum).unwrap();
        });
        let error = collectives(&correct).unwrap_err().to_string();
        assert!(
            error.contains("all-reduce sum f32 x 1000: expected"),
            "{error}"
        );
        rank.join().unwrap();
    }

    #[test]
    fn a_loss_names_rank_and_process() {
        let lost = |is_peer_lost| RankLine::Lost {
            ranks: vec![1],
            text: "rank 1 (process 17 on a) is lost".into(),
            is_peer_lost,
        };
        let [pid, other] = [17, 1].map(|pid| Pid::from_raw(pid).unwrap());
        assert!(lost(true).names(1, pid));
        assert!(!lost(true).names(1, other));
        assert!(!lost(true).names(0, pid));
        assert!(!lost(false).names(1, pid), "a timeout names a rank too");
    }
}
