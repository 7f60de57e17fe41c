//! Every collective, compared with results that are known beforehand.
//!
//! At each index all ranks hold the same small number `b`, but for one rank, which holds `b + W`.
//! So the sum is `W (b + 1)`, the mean `b + 1`, the largest `b + W` and the smallest `b`: exact in
//! every type, and wrong as soon as any rank is missing, twice there, or at another place.

use std::{fmt::Debug, sync::Arc};

use accelerator_collective::{Element, Partition, ProcessGroup, ReduceOp, ShardLayout};
use half::{bf16, f16};

use super::{Contribution, Result};
use crate::number::Small;

/// Runs all collectives on this rank; returns how many results were compared.
pub(super) fn check(group: &ProcessGroup, contribution: Contribution) -> Result<String> {
    let mut check = Check {
        group,
        contribution,
        results: 0,
    };
    check.reduced::<f32>()?;
    check.reduced::<f64>()?;
    check.reduced::<f16>()?;
    check.reduced::<bf16>()?;
    check.reduced::<i8>()?;
    check.reduced::<i16>()?;
    check.reduced::<i32>()?;
    check.reduced::<i64>()?;
    check.reduced::<u8>()?;
    check.reduced::<u16>()?;
    check.reduced::<u32>()?;
    check.reduced::<u64>()?;
    check.large()?;
    check.started()?;
    check.kept()?;
    check.broadcast()?;
    check.gathered()?;
    check.objects()?;
    group.barrier()?;
    Ok(format!(
        "{} results on {} ranks over {}",
        check.results,
        group.world_size(),
        group.transport()
    ))
}

const OPS: [ReduceOp; 4] = [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max, ReduceOp::Min];

/// In bytes.
const LARGE: usize = 1024 * 1024;

struct Check<'a> {
    group: &'a ProcessGroup,
    contribution: Contribution,
    results: usize,
}

impl Check<'_> {
    /// All reductions of one type, short.
    fn reduced<T: Small>(&mut self) -> Result<()> {
        for len in [1, 1000] {
            for op in OPS {
                self.all_reduce::<T>(op, len)?;
            }
            let own = self
                .group
                .reduce_scatter(&self.values::<T>(len), ReduceOp::Sum)?;
            let part = Partition::new(len, self.world()).range(self.group.rank());
            let expected = self.expected::<T>(ReduceOp::Sum, len);
            self.same(&own, &expected[part], "reduce-scatter")?;
        }
        Ok(())
    }

    /// Several chunks a part.
    fn large(&mut self) -> Result<()> {
        for op in OPS {
            self.all_reduce::<f32>(op, LARGE / 4)?;
        }
        self.all_reduce::<f64>(ReduceOp::Sum, LARGE / 8)?;
        self.all_reduce::<bf16>(ReduceOp::Sum, LARGE / 2)?;
        self.all_reduce::<i8>(ReduceOp::Sum, LARGE)
    }

    fn all_reduce<T: Small>(&mut self, op: ReduceOp, len: usize) -> Result<()> {
        let mut values = self.values::<T>(len);
        self.group.all_reduce(&mut values, op)?;
        let what = format!("all-reduce {op} {} x {len}", T::DTYPE);
        self.same(&values, &self.expected::<T>(op, len), &what)
    }

    /// Two at a time, waited for in the other order.
    fn started(&mut self) -> Result<()> {
        let mut pending = Vec::new();
        for len in [1000, 70_000] {
            let mut buffer = self.group.buffer(f32::DTYPE, len);
            buffer
                .as_mut_slice::<f32>()?
                .copy_from_slice(&self.values::<f32>(len));
            pending.push(self.group.start_all_reduce(buffer, ReduceOp::Mean)?);
        }
        for pending in pending.into_iter().rev() {
            let buffer = pending.wait()?;
            let expected = self.expected::<f32>(ReduceOp::Mean, buffer.len());
            self.same(buffer.as_slice::<f32>()?, &expected, "started all-reduce")?;
        }
        Ok(())
    }

    /// By a layout: ranks keep elements in turns, and no rank keeps the second half.
    fn kept(&mut self) -> Result<()> {
        for len in [1000, 70_000] {
            let of = |rank: usize| (rank..len / 2).step_by(self.world()).map(|at| at..at + 1);
            let parts = (0..self.world()).map(|rank| of(rank).collect());
            let cut = Arc::new(ShardLayout::new(len, parts.collect())?);
            let mut buffer = self.group.buffer(f32::DTYPE, len);
            let values = self.values::<f32>(len);
            buffer.as_mut_slice::<f32>()?.copy_from_slice(&values);
            self.group
                .reduce_scatter_buffer(&mut buffer, ReduceOp::Sum, &cut)?;
            let kept = |values: &[f32]| -> Vec<f32> {
                let own = cut.of(self.group.rank()).iter().cloned();
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
            let of = |rank: usize| vec![u64::small(rank as u8 + 1); 40_000];
            let mut values = of(self.group.rank());
            self.group.broadcast(&mut values, root)?;
            self.same(&values, &of(root), &format!("broadcast from rank {root}"))?;
        }
        Ok(())
    }

    /// All equally many, and each one more than the rank before.
    fn gathered(&mut self) -> Result<()> {
        let of = |rank: usize, len: usize| vec![i32::small(rank as u8 + 1); len];
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
        let rank = self.group.rank();
        let all: Vec<_> = (0..self.world()).map(of).collect();
        let found = self.group.all_gather_object(&of(rank))?;
        self.same(&found, &all, "all-gather of objects")?;
        let root = self.world() - 1;
        let found = self.group.gather_object(&of(rank), root)?;
        let expected = (rank == root).then_some(all);
        self.same(&[found], &[expected], "gather of objects")?;
        let own = of(rank);
        let found = self
            .group
            .broadcast_object((rank == root).then_some(&own), root)?;
        self.same(&[found], &[of(root)], "broadcast of an object")
    }

    fn values<T: Small>(&self, len: usize) -> Vec<T> {
        let (rank, world) = (self.group.rank(), self.world());
        let mut values: Vec<T> = (0..len)
            .map(|index| {
                let odd = if index % world == rank { world } else { 0 };
                T::small(base(index) + odd as u8)
            })
            .collect();
        if self.contribution.is_wrong() {
            values[len / 2] = T::small(0);
        }
        values
    }

    fn expected<T: Small>(&self, op: ReduceOp, len: usize) -> Vec<T> {
        let world = self.world() as u8;
        let at = |index| {
            let base = base(index);
            T::small(match op {
                ReduceOp::Sum => world * (base + 1),
                ReduceOp::Mean => base + 1,
                ReduceOp::Max => base + world,
                // The only one that is left.
                _ => base,
            })
        };
        (0..len).map(at).collect()
    }

    fn same<T: PartialEq + Debug>(
        &mut self,
        found: &[T],
        expected: &[T],
        what: &str,
    ) -> Result<()> {
        self.results += 1;
        if found == expected {
            return Ok(());
        }
        let rank = self.group.rank();
        if found.len() != expected.len() {
            let (found, expected) = (found.len(), expected.len());
            return Err(format!(
                "{what}: expected {expected} values on rank {rank}, found {found}"
            )
            .into());
        }
        let mut pairs = found.iter().zip(expected).enumerate();
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

/// From 1 to 4.
fn base(index: usize) -> u8 {
    (index % 4) as u8 + 1
}
