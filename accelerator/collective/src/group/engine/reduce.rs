//! Reductions: each rank owns one part of the buffer.

use super::{AHEAD, Exchange, Progress, parts::Parts};
use crate::{
    buffer::Buffer,
    element::DType,
    error::Result,
    kernel::combine,
    reduce::{ReduceOp, SHORT},
    transport::Stage,
};

/// An all-reduce that can stop wherever it waits for others, and go on later.
///
/// Each rank owns one part: it receives that part from everyone, reduces it in rank order and
/// sends the result to everyone. Chunks are pipelined: while one is reduced, the next [`AHEAD`]
/// are on their way. A short buffer goes to everyone at once, and every rank reduces all of it, in
/// the same order and so to the same bits.
#[derive(Debug)]
pub(crate) struct Reduction {
    dtype: DType,
    op: ReduceOp,
    parts: Parts,
    step: Step,
}

/// What is to be done next.
#[derive(Clone, Copy, Debug)]
enum Step {
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
    /// The reduction of a buffer of `len` bytes.
    pub(crate) fn new(dtype: DType, op: ReduceOp, len: usize, world_size: usize) -> Self {
        Self {
            dtype,
            op,
            parts: Parts::new(len / dtype.size(), dtype.size(), world_size),
            step: Step::Begin,
        }
    }

    /// Goes on, as far as that is possible, with the same buffer every time.
    pub(crate) fn advance(
        &mut self,
        exchange: &mut Exchange<'_>,
        bytes: &mut [u8],
    ) -> Result<Progress> {
        let (parts, rank, world_size) = (&self.parts, exchange.rank, exchange.world_size);
        let rounds = parts.rounds();
        let is_short = bytes.len() <= SHORT;
        loop {
            self.step = match self.step {
                Step::Begin if world_size == 1 => {
                    exchange.begin(|_| &[])?;
                    Step::Done
                }
                Step::Begin => {
                    match is_short {
                        true => exchange.begin(|_| bytes)?,
                        false => exchange.begin(|peer| &bytes[parts.chunk(peer, 0)])?,
                    }
                    for round in 1..AHEAD {
                        exchange.contribute(parts, round, bytes)?;
                    }
                    Step::Meet
                }
                Step::Meet => {
                    let progress = match is_short {
                        true => exchange.try_meet(|_, contract| contract.bytes())?,
                        false => exchange.try_meet(|_, _| parts.chunk(rank, 0).len())?,
                    };
                    if progress != Progress::Done {
                        return Ok(progress);
                    }
                    if is_short {
                        combine(self.dtype, self.op, exchange.parcels, bytes);
                        Step::Done
                    } else {
                        exchange.contribute(parts, AHEAD, bytes)?;
                        Step::Collect { round: 0, peer: 0 }
                    }
                }
                Step::Collect { round, mut peer } => {
                    let own = parts.chunk(rank, round);
                    if !own.is_empty() {
                        // That of round 0 came at the beginning.
                        while round > 0 && peer < world_size {
                            if peer != rank {
                                let awaited = peer..world_size;
                                let part = exchange.try_receive(
                                    peer,
                                    awaited.clone(),
                                    Stage::Inward,
                                    round,
                                    own.len(),
                                )?;
                                if part.is_none() {
                                    self.step = Step::Collect { round, peer };
                                    return Ok(Progress::Waiting(awaited));
                                }
                                exchange.parcels[peer] = part;
                            }
                            peer += 1;
                        }
                        combine(
                            self.dtype,
                            self.op,
                            exchange.parcels,
                            &mut bytes[own.clone()],
                        );
                        exchange.announce(round, &bytes[own])?;
                    }
                    Step::Results { round, peer: 0 }
                }
                Step::Results { round, mut peer } => {
                    if let Some(behind) = round.checked_sub(AHEAD) {
                        while peer < world_size {
                            let chunk = parts.chunk(peer, behind);
                            if peer != rank && !chunk.is_empty() {
                                let awaited = peer..world_size;
                                let part = exchange.try_receive(
                                    peer,
                                    awaited.clone(),
                                    Stage::Outward,
                                    behind,
                                    chunk.len(),
                                )?;
                                let Some(part) = part else {
                                    self.step = Step::Results { round, peer };
                                    return Ok(Progress::Waiting(awaited));
                                };
                                bytes[chunk].copy_from_slice(part.chunk.bytes());
                            }
                            peer += 1;
                        }
                    }
                    let round = round + 1;
                    if round == rounds + AHEAD {
                        Step::Done
                    } else {
                        exchange.contribute(parts, round + AHEAD, bytes)?;
                        Step::Collect { round, peer: 0 }
                    }
                }
                Step::Done => return Ok(Progress::Done),
            }
        }
    }
}

impl Exchange<'_> {
    /// Reduces `bytes` over all ranks, in place; see [`Reduction`].
    pub(crate) fn all_reduce(mut self, dtype: DType, op: ReduceOp, bytes: &mut [u8]) -> Result<()> {
        if let Some(steps) = self.steps() {
            return steps.all_reduce(dtype, op, bytes);
        }
        if let Some(hosts) = self.transport.hosts()
            && Self::can_go_by_hosts(dtype, op)
        {
            return self.all_reduce_by_hosts(hosts, dtype, op, bytes);
        }
        let mut reduction = Reduction::new(dtype, op, bytes.len(), self.world_size);
        match reduction.advance(&mut self, bytes)? {
            Progress::Done => Ok(()),
            // Only an operation that is resumed is ever in between.
            Progress::Waiting(_) => Err(self.watch.interrupted()),
        }
    }

    /// Reduces a buffer over all ranks, in place and where it lies if the ranks share memory.
    pub(crate) fn all_reduce_buffer(mut self, op: ReduceOp, buffer: &mut Buffer) -> Result<()> {
        if let Some(steps) = self.steps() {
            return steps.all_reduce_buffer(op, buffer);
        }
        self.all_reduce(buffer.dtype(), op, buffer.bytes_mut())
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
            return self.begin(|_| &[]);
        }
        if let Some(steps) = self.steps() {
            return steps.reduce_scatter(dtype, op, bytes, own);
        }
        let parts = Parts::new(bytes.len() / dtype.size(), dtype.size(), self.world_size);
        let (rank, offset) = (self.rank, parts.part(self.rank).start);
        self.begin(|peer| &bytes[parts.chunk(peer, 0)])?;
        self.meet(|_, _| parts.chunk(rank, 0).len())?;
        for round in 1..AHEAD {
            self.contribute(&parts, round, bytes)?;
        }
        for round in 0..parts.rounds() {
            self.contribute(&parts, round + AHEAD, bytes)?;
            let chunk = parts.chunk(rank, round);
            if !chunk.is_empty() {
                self.collect(round, chunk.len())?;
                let chunk = chunk.start - offset..chunk.end - offset;
                combine(dtype, op, self.parcels, &mut own[chunk]);
            }
        }
        Ok(())
    }

    /// Sends each owner its chunk of this round.
    fn contribute(&mut self, parts: &Parts, round: usize, bytes: &[u8]) -> Result<()> {
        for peer in self.ring() {
            let chunk = parts.chunk(peer, round);
            if !chunk.is_empty() {
                self.send(peer, Stage::Inward, round, &bytes[chunk])?;
            }
        }
        Ok(())
    }

    /// Waits for everyone's chunk of this rank's part; that of round 0 came at the beginning.
    fn collect(&mut self, round: usize, len: usize) -> Result<()> {
        if round > 0 {
            for peer in self.others() {
                let awaited = peer..self.world_size;
                let parcel = self.receive(peer, awaited, Stage::Inward, round, len)?;
                self.parcels[peer] = Some(parcel);
            }
        }
        Ok(())
    }
}
