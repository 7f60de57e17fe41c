//! Reductions: each rank owns one part of the buffer.

use std::sync::Arc;

use super::{
    OpContext, OpProgress, PREFETCH,
    chunks::{ChunkLayout, ChunkRange, EvenShards},
};
use crate::{
    element::{DType, ONE_EXCHANGE_BYTES, ReduceOp},
    error::Result,
    kernel::combine,
    shard_layout::{Digest, ShardLayout, shard_layouts_differ},
    transport::OpPhase,
};

/// A reduction of a buffer that can stop wherever it waits for others, and continue later.
///
/// Each rank owns one part: it receives that part from everyone, reduces it in rank order and, if
/// all keep everything, sends the result to everyone. Chunks are pipelined: while one is reduced, the
/// next [`PREFETCH`] are on their way. A short buffer that all keep goes to everyone at once, and every
/// rank reduces all of it, in the same order and so to the same bits.
#[derive(Debug)]
pub(crate) struct Reduction {
    dtype: DType,
    op: ReduceOp,
    layout: ChunkLayout,
    step: ReductionStep,
}

/// The next step of a reduction.
#[derive(Clone, Copy, Debug)]
enum ReductionStep {
    Begin,
    Meet,
    /// Takes this rank's part of a round from this peer and the next ones, and reduces it.
    Collect {
        round: usize,
        peer: usize,
    },
    /// Takes the results of a round from this peer and the next ones.
    Results {
        round: usize,
        peer: usize,
    },
    Done,
}

impl Reduction {
    pub(crate) fn new(
        dtype: DType,
        op: ReduceOp,
        shards: Option<&Arc<ShardLayout>>,
        len: usize,
        world_size: usize,
    ) -> Self {
        let size = dtype.size();
        Self {
            dtype,
            op,
            layout: match shards {
                None => ChunkLayout::Even(EvenShards::new(len / size, size, world_size)),
                Some(shards) => ChunkLayout::Sharded(Arc::clone(shards), size),
            },
            step: ReductionStep::Begin,
        }
    }

    /// Advances as far as possible. Every call must pass the same buffer.
    pub(crate) fn advance(
        &mut self,
        ctx: &mut OpContext<'_>,
        bytes: &mut [u8],
    ) -> Result<OpProgress> {
        let (layout, rank, world_size) = (&self.layout, ctx.rank, ctx.world_size);
        let is_short = matches!(layout, ChunkLayout::Even(_)) && bytes.len() <= ONE_EXCHANGE_BYTES;
        let rounds = match layout {
            ChunkLayout::Even(_) => layout.rounds() + PREFETCH,
            // No results come back.
            ChunkLayout::Sharded(..) => layout.rounds(),
        };
        loop {
            self.step = match self.step {
                ReductionStep::Begin if world_size == 1 => {
                    ctx.send_header(|_| &[])?;
                    ReductionStep::Done
                }
                ReductionStep::Begin => {
                    match layout {
                        ChunkLayout::Even(_) if is_short => {
                            ctx.announce(bytes)?;
                        }
                        ChunkLayout::Even(parts) => {
                            ctx.send_header(|peer| &bytes[parts.chunk(peer, 0)])?
                        }
                        ChunkLayout::Sharded(shards, _) => ctx.send_header(|_| shards.digest())?,
                    }
                    for round in 0..PREFETCH {
                        ctx.contribute(layout, round, bytes)?;
                    }
                    ReductionStep::Meet
                }
                ReductionStep::Meet => {
                    let progress = ctx.try_exchange_headers(|_, fingerprint| match layout {
                        ChunkLayout::Even(_) if is_short => fingerprint.bytes(),
                        ChunkLayout::Even(parts) => parts.chunk(rank, 0).len(),
                        ChunkLayout::Sharded(..) => size_of::<Digest>(),
                    })?;
                    if progress != OpProgress::Done {
                        return Ok(progress);
                    }
                    if let ChunkLayout::Sharded(shards, _) = layout
                        && !ctx.agree_on(shards.digest())
                    {
                        return Err(shard_layouts_differ(&ctx.deadline.number));
                    }
                    if is_short {
                        combine(self.dtype, self.op, ctx.received, bytes);
                        ReductionStep::Done
                    } else if rounds == 0 {
                        ReductionStep::Done
                    } else {
                        ctx.contribute(layout, PREFETCH, bytes)?;
                        ReductionStep::Collect { round: 0, peer: 0 }
                    }
                }
                ReductionStep::Collect { round, mut peer } => {
                    let own = layout.chunk(rank, round);
                    if layout.sends(&own, round) {
                        while peer < world_size {
                            if peer != rank {
                                let awaited = peer..world_size;
                                let part = ctx.try_receive(
                                    peer,
                                    awaited.clone(),
                                    OpPhase::Reduce,
                                    round,
                                    own.len(),
                                )?;
                                if part.is_none() {
                                    self.step = ReductionStep::Collect { round, peer };
                                    return Ok(OpProgress::Waiting(awaited));
                                }
                                ctx.received[peer] = part;
                            }
                            peer += 1;
                        }
                    }
                    if !own.is_empty() {
                        ctx.combine(self.dtype, self.op, &own, bytes);
                    }
                    if let (ChunkLayout::Even(_), ChunkRange::One(own)) = (layout, own) {
                        ctx.broadcast_chunk(round, &bytes[own])?;
                    }
                    ReductionStep::Results { round, peer: 0 }
                }
                ReductionStep::Results { round, mut peer } => {
                    if let ChunkLayout::Even(parts) = layout
                        && let Some(behind) = round.checked_sub(PREFETCH)
                    {
                        while peer < world_size {
                            let chunk = parts.chunk(peer, behind);
                            if peer != rank && !chunk.is_empty() {
                                let awaited = peer..world_size;
                                let part = ctx.try_receive(
                                    peer,
                                    awaited.clone(),
                                    OpPhase::Gather,
                                    behind,
                                    chunk.len(),
                                )?;
                                let Some(part) = part else {
                                    self.step = ReductionStep::Results { round, peer };
                                    return Ok(OpProgress::Waiting(awaited));
                                };
                                bytes[chunk].copy_from_slice(part.payload.bytes());
                            }
                            peer += 1;
                        }
                    }
                    let round = round + 1;
                    if round == rounds {
                        ReductionStep::Done
                    } else {
                        ctx.contribute(layout, round + PREFETCH, bytes)?;
                        ReductionStep::Collect { round, peer: 0 }
                    }
                }
                ReductionStep::Done => return Ok(OpProgress::Done),
            }
        }
    }
}

impl OpContext<'_> {
    /// Reduces `bytes` over all ranks, in place; see [`Reduction`].
    pub(crate) fn all_reduce(mut self, dtype: DType, op: ReduceOp, bytes: &mut [u8]) -> Result<()> {
        if let Some(shm) = self.shm_op() {
            return shm.all_reduce(dtype, op, bytes);
        }
        if let Some(hosts) = self.transport.hosts()
            && Self::is_hierarchical(dtype, op)
        {
            return self.all_reduce_hierarchical(hosts, dtype, op, bytes, None);
        }
        let mut reduction = Reduction::new(dtype, op, None, bytes.len(), self.world_size);
        let progress = reduction.advance(&mut self, bytes)?;
        self.completed(progress)
    }

    /// Reduces this rank's part of `bytes` over all ranks into `own`, which holds this rank's
    /// values of it.
    pub(crate) fn reduce_scatter(
        mut self,
        dtype: DType,
        op: ReduceOp,
        bytes: &[u8],
        own: &mut [u8],
    ) -> Result<()> {
        if self.world_size == 1 {
            return self.send_header(|_| &[]);
        }
        if let Some(shm) = self.shm_op() {
            return shm.reduce_scatter(dtype, op, bytes, own);
        }
        let parts = EvenShards::new(bytes.len() / dtype.size(), dtype.size(), self.world_size);
        let (rank, offset) = (self.rank, parts.part(self.rank).start);
        self.send_header(|peer| &bytes[parts.chunk(peer, 0)])?;
        self.exchange_headers(|_, _| parts.chunk(rank, 0).len())?;
        let layout = ChunkLayout::Even(parts);
        for round in 0..PREFETCH {
            self.contribute(&layout, round, bytes)?;
        }
        for round in 0..parts.rounds() {
            self.contribute(&layout, round + PREFETCH, bytes)?;
            let chunk = parts.chunk(rank, round);
            if !chunk.is_empty() {
                self.collect(round, chunk.len())?;
                let chunk = chunk.start - offset..chunk.end - offset;
                combine(dtype, op, self.received, &mut own[chunk]);
            }
        }
        Ok(())
    }

    /// Sends each owner its chunk of this round, unless it travels with the header ([`ChunkLayout::sends`]) or there is
    /// none.
    fn contribute(&mut self, layout: &ChunkLayout, round: usize, bytes: &[u8]) -> Result<()> {
        for peer in self.ring() {
            let chunk = layout.chunk(peer, round);
            if !layout.sends(&chunk, round) {
                continue;
            }
            match chunk {
                ChunkRange::One(range) => self.send(peer, OpPhase::Reduce, round, &bytes[range])?,
                ChunkRange::Many(pieces) => {
                    let mut packed = std::mem::take(self.packed);
                    let sent = self.send(
                        peer,
                        OpPhase::Reduce,
                        round,
                        pieces.pack(bytes, &mut packed),
                    );
                    *self.packed = packed;
                    sent?;
                }
            }
        }
        Ok(())
    }

    /// Combines everyone's chunk of this rank's part, in place.
    fn combine(&mut self, dtype: DType, op: ReduceOp, own: &ChunkRange<'_>, bytes: &mut [u8]) {
        match own {
            ChunkRange::One(range) => combine(dtype, op, self.received, &mut bytes[range.clone()]),
            ChunkRange::Many(pieces) => {
                let packed = pieces.pack(bytes, self.packed);
                combine(dtype, op, self.received, packed);
                pieces.unpack(packed, bytes);
            }
        }
    }

    /// Waits for everyone's chunk of this rank's part; that of round 0 came at the beginning.
    fn collect(&mut self, round: usize, len: usize) -> Result<()> {
        if round > 0 {
            for peer in self.others() {
                let awaited = peer..self.world_size;
                let chunk = self.receive(peer, awaited, OpPhase::Reduce, round, len)?;
                self.received[peer] = Some(chunk);
            }
        }
        Ok(())
    }
}
