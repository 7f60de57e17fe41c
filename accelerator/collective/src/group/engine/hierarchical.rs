//! Reductions over several hosts: shared memory within each, connections between them.

use std::ops::Range;

use super::{HierarchicalScratch, OpContext};
use crate::buffer::Storage;
use crate::element::{DType, ReduceOp};
use crate::error::Result;
use crate::kernel::{combine, divide, narrow, wide, widen};
use crate::shard_layout::{self, Partition, ShardLayout, shard_layouts_differ};
use crate::shm::{Hosts, SHM_CHUNK};
use crate::transport::OpPhase;

impl OpContext<'_> {
    /// Returns `true` if a reduction can be computed host by host. A mean of integers cannot: it is rounded once, from
    /// a sum that no element can hold.
    pub(super) fn is_hierarchical(dtype: DType, op: ReduceOp) -> bool {
        op != ReduceOp::Mean || wide(dtype) == DType::F32 || dtype == DType::F64
    }

    /// Reduces `bytes` over all ranks, in place: within each host in rank order, then host by host.
    /// See "Several hosts" in `group/README.md`. Every rank gets the whole result, with a shard
    /// layout, too: it is only compared.
    pub(super) fn all_reduce_hierarchical(
        &mut self,
        hosts: &Hosts,
        dtype: DType,
        op: ReduceOp,
        bytes: &mut [u8],
        shards: Option<&ShardLayout>,
    ) -> Result<()> {
        let head = shards.map_or(&[][..], |shards| shards.digest());
        self.announce(head)?;
        self.exchange_headers(|_, _| head.len())?;
        if !self.agree_on(head) {
            return Err(shard_layouts_differ(&self.deadline.number));
        }
        let plan = HierarchicalPlan::new(hosts, dtype, bytes.len() / dtype.size());
        // Divided once, at the end.
        let join = match op {
            ReduceOp::Mean => ReduceOp::Sum,
            other => other,
        };
        let mut staging = std::mem::take(self.staging);
        let outcome = self.run_hierarchical(hosts, &plan, (join, op), bytes, &mut staging);
        *self.staging = staging;
        outcome
    }

    /// Runs the steps of the plan. In each, a rank puts a chunk into its slot; a lane then sends its part of what its
    /// host has, combines its share of an earlier chunk, takes the results of a still earlier one, and puts them into
    /// the slot with the next step.
    fn run_hierarchical(
        &mut self,
        hosts: &Hosts,
        plan: &HierarchicalPlan,
        (join, op): (ReduceOp, ReduceOp),
        bytes: &mut [u8],
        staging: &mut HierarchicalScratch,
    ) -> Result<()> {
        let (depth, lane) = (plan.depth, hosts.lane());
        staging.owned.resize_with(depth + 1, Storage::default);
        staging.results.resize_with(depth + 1, Storage::default);
        self.put_chunk(hosts, plan, 0, bytes, staging);
        for step in 0..plan.steps() {
            self.local(hosts).advance()?;
            if let Some(lane) = lane {
                if step < plan.chunks {
                    self.fold_lane(hosts, plan, lane, step, join, bytes, staging)?;
                }
                let near = plan.chunk_before(step, depth);
                if let Some(index) = near {
                    self.reduce_share(hosts, plan, lane, index, (join, op), staging)?;
                }
                if let Some(index) = plan.chunk_before(step, 2 * depth) {
                    self.take_results(hosts, plan, lane, index, staging)?;
                }
            }
            if let Some(index) = plan.chunk_before(step, 2 * depth + 1) {
                let chunk = plan.chunk(index);
                for lane in 0..hosts.lanes() {
                    let part = plan.part(index, lane).bytes(plan.dtype);
                    let target = &mut bytes[chunk.start * plan.dtype.size()..][part.clone()];
                    let steps = self.local(hosts);
                    target.copy_from_slice(steps.view(lane, SHM_CHUNK..SHM_CHUNK + part.len()));
                }
            }
            self.put_chunk(hosts, plan, step + 1, bytes, staging);
        }
        Ok(())
    }

    /// Puts this rank's values of a chunk into its slot of the next step.
    fn put_chunk(
        &mut self,
        hosts: &Hosts,
        plan: &HierarchicalPlan,
        index: usize,
        bytes: &[u8],
        staging: &mut HierarchicalScratch,
    ) {
        if index >= plan.chunks {
            return;
        }
        let own = &bytes[plan.chunk(index).bytes(plan.dtype)];
        let len = plan.chunk(index).len() * plan.wide.size();
        let own = match plan.wide == plan.dtype {
            true => own,
            false => {
                staging.widened.grow(len);
                let widened = &mut staging.widened.bytes_mut()[..len];
                widen(plan.dtype, own, widened);
                widened
            }
        };
        self.local(hosts).put(0, own);
    }

    /// Combines what the ranks of this host have of this lane's part, and sends every other host
    /// its share.
    #[expect(clippy::too_many_arguments, reason = "they are the state of one loop")]
    fn fold_lane(
        &mut self,
        hosts: &Hosts,
        plan: &HierarchicalPlan,
        lane: usize,
        index: usize,
        join: ReduceOp,
        bytes: &[u8],
        staging: &mut HierarchicalScratch,
    ) -> Result<()> {
        let (chunk, part) = (plan.chunk(index), plan.part(index, lane));
        let place = part.bytes(plan.wide);
        staging.partial.grow(place.len());
        let partial = &mut staging.partial.bytes_mut()[..place.len()];
        let own = &bytes[chunk.start * plan.dtype.size()..][part.bytes(plan.dtype)];
        match plan.wide == plan.dtype {
            true => partial.copy_from_slice(own),
            false => widen(plan.dtype, own, partial),
        }
        self.local(hosts)
            .fold(plan.wide, join, place.start, partial);
        for host in hosts.ring() {
            let share = &partial[plan.share(part.len(), host).bytes(plan.wide)];
            if !share.is_empty() {
                self.send(hosts.rank(host, lane), OpPhase::Reduce, index, share)?;
            }
        }
        let share = &partial[plan.share(part.len(), hosts.host()).bytes(plan.wide)];
        let owned = &mut staging.owned[index % (plan.depth + 1)];
        owned.grow(share.len());
        owned.bytes_mut()[..share.len()].copy_from_slice(share);
        Ok(())
    }

    /// Combines this host's share of a chunk, host by host, and sends the result to every other
    /// host.
    fn reduce_share(
        &mut self,
        hosts: &Hosts,
        plan: &HierarchicalPlan,
        lane: usize,
        index: usize,
        (join, op): (ReduceOp, ReduceOp),
        staging: &mut HierarchicalScratch,
    ) -> Result<()> {
        let part = plan.part(index, lane);
        let share = plan.share(part.len(), hosts.host());
        if share.is_empty() {
            return Ok(());
        }
        let len = share.len() * plan.wide.size();
        for host in hosts.ring() {
            let peer = hosts.rank(host, lane);
            let chunk = self.receive(peer, peer..peer + 1, OpPhase::Reduce, index, len)?;
            self.received[host] = Some(chunk);
        }
        self.received[hosts.host()] = None;
        let ring = index % (plan.depth + 1);
        let owned = &mut staging.owned[ring].bytes_mut()[..len];
        combine(plan.wide, join, &self.received[..hosts.len()], owned);
        let result = &mut staging.results[ring];
        result.grow(part.len() * plan.dtype.size());
        let result = &mut result.bytes_mut()[share.bytes(plan.dtype)];
        if op == ReduceOp::Mean {
            divide(plan.dtype, owned, self.world_size);
        }
        narrow(plan.dtype, owned, result);
        for host in hosts.ring() {
            self.send(hosts.rank(host, lane), OpPhase::Gather, index, result)?;
        }
        Ok(())
    }

    /// Takes the results of the other hosts, and puts those of the whole part into this rank's slot
    /// of the next step.
    fn take_results(
        &mut self,
        hosts: &Hosts,
        plan: &HierarchicalPlan,
        lane: usize,
        index: usize,
        staging: &mut HierarchicalScratch,
    ) -> Result<()> {
        let part = plan.part(index, lane);
        let result = &mut staging.results[index % (plan.depth + 1)];
        result.grow(part.len() * plan.dtype.size());
        let result = &mut result.bytes_mut()[..part.len() * plan.dtype.size()];
        for host in hosts.ring() {
            let share = plan.share(part.len(), host).bytes(plan.dtype);
            if !share.is_empty() {
                let peer = hosts.rank(host, lane);
                let chunk =
                    self.receive(peer, peer..peer + 1, OpPhase::Gather, index, share.len())?;
                result[share].copy_from_slice(chunk.payload.bytes());
            }
        }
        self.local(hosts).put(SHM_CHUNK, result);
        Ok(())
    }
}

/// The cuts of a buffer: into chunks, each into a part per lane, each into a share per host. All counts are of
/// elements.
struct HierarchicalPlan {
    dtype: DType,
    /// The type in which values are added up.
    wide: DType,
    len: usize,
    /// The elements of a chunk.
    size: usize,
    chunks: usize,
    lanes: usize,
    hosts: usize,
    /// The steps that a chunk takes to its owners, and as many back.
    depth: usize,
}

impl HierarchicalPlan {
    fn new(hosts: &Hosts, dtype: DType, len: usize) -> Self {
        let wide = wide(dtype);
        // A slot has half a chunk's room for a lane's results (`SLOT`), and a single lane's results are a whole chunk.
        let size = match hosts.lanes() {
            1 => SHM_CHUNK / 2 / wide.size(),
            _ => SHM_CHUNK / wide.size(),
        };
        let chunks = len.div_ceil(size);
        Self {
            dtype,
            wide,
            len,
            size,
            chunks,
            lanes: hosts.lanes(),
            hosts: hosts.len(),
            depth: DEPTH.min(chunks.saturating_sub(1)),
        }
    }

    /// A chunk is put, folded, sent, reduced and returned, and read a step later.
    fn steps(&self) -> usize {
        match self.chunks {
            0 => 0,
            chunks => chunks + 2 * self.depth + 1,
        }
    }

    /// The chunk that was put so many steps before, if there is one.
    fn chunk_before(&self, step: usize, steps: usize) -> Option<usize> {
        step.checked_sub(steps).filter(|index| *index < self.chunks)
    }

    fn chunk(&self, index: usize) -> Range<usize> {
        shard_layout::chunk(self.len, index, self.size)
    }

    /// A lane's part of a chunk, within it.
    fn part(&self, index: usize, lane: usize) -> Range<usize> {
        Partition::new(self.chunk(index).len(), self.lanes).range(lane)
    }

    /// A host's share of a part of so many elements, within it.
    fn share(&self, part: usize, host: usize) -> Range<usize> {
        Partition::new(part, self.hosts).range(host)
    }
}

/// A range of elements as one of bytes.
trait ByteRange {
    fn bytes(&self, dtype: DType) -> Range<usize>;
}

impl ByteRange for Range<usize> {
    fn bytes(&self, dtype: DType) -> Range<usize> {
        self.start * dtype.size()..self.end * dtype.size()
    }
}

/// The most steps that a chunk takes between hosts, each way: what a link carries meanwhile covers its delay.
const DEPTH: usize = 4;
