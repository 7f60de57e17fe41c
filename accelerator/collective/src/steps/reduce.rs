//! Reductions: each rank owns one part of the buffer, or of each chunk.

use std::ops::Range;

use super::{Placement, Steps};
use crate::{
    buffer::{Buffer, LINE},
    element::DType,
    error::Result,
    partition::{self, Partition},
    reduce::{ReduceOp, SHORT},
    shared::CHUNK,
};

impl Steps<'_> {
    /// Reduces `bytes` over all ranks, in place, through the slots.
    pub(crate) fn all_reduce(mut self, dtype: DType, op: ReduceOp, bytes: &mut [u8]) -> Result<()> {
        if bytes.len() <= SHORT {
            return self.short(dtype, op, bytes);
        }
        self.open(None, &bytes[chunk(bytes.len(), 0)])?;
        if self.placement()? == Placement::Some {
            // Who declared a buffer has sent nothing yet.
            self.put(0, &bytes[chunk(bytes.len(), 0)]);
            self.advance()?;
        }
        self.staged(dtype, op, bytes)
    }

    /// Reduces a buffer over all ranks, in place: where it lies, if all ranks can reach it. After
    /// an error its contents are unspecified.
    pub(crate) fn all_reduce_buffer(mut self, op: ReduceOp, buffer: &mut Buffer) -> Result<()> {
        let (dtype, len) = (buffer.dtype(), buffer.bytes().len());
        if len <= SHORT {
            return self.short(dtype, op, buffer.bytes_mut());
        }
        let Some(loan) = buffer.lend(self.arena()) else {
            return self.all_reduce(dtype, op, buffer.bytes_mut());
        };
        self.open(Some(loan.offset()), &[])?;
        if self.placement()? == Placement::All {
            let part = lines(len, self.size(), self.rank());
            // SAFETY: every rank declared its buffer, as this one has lent its own, and touches
            // its own part of it until all have taken the next step. The loan ends after that; an
            // error before leaves the memory to the others.
            unsafe { self.fold_in_place(dtype, op, len, part)? };
            self.advance()?;
            loan.end();
            return Ok(());
        }
        // Nobody writes to the buffers then.
        loan.end();
        let bytes = buffer.bytes_mut();
        self.put(0, &bytes[chunk(len, 0)]);
        self.advance()?;
        self.staged(dtype, op, bytes)
    }

    /// One step: everyone reads everything.
    fn short(&mut self, dtype: DType, op: ReduceOp, bytes: &mut [u8]) -> Result<()> {
        self.open(None, bytes)?;
        self.fold(dtype, op, 0, bytes);
        Ok(())
    }

    /// Chunk by chunk, where the first one is in the slots. In one step a rank puts a chunk, reduces
    /// its part of the one before, and takes the results of the one before that.
    fn staged(&mut self, dtype: DType, op: ReduceOp, bytes: &mut [u8]) -> Result<()> {
        let (len, size, rank) = (bytes.len(), self.size(), self.rank());
        let part = |index: usize, rank: usize| {
            let chunk = chunk(len, index);
            let part = lines(chunk.len(), size, rank);
            (
                part.clone(),
                chunk.start + part.start..chunk.start + part.end,
            )
        };
        let chunks = len.div_ceil(CHUNK);
        for index in 0..=chunks {
            if index < chunks {
                self.put(0, &bytes[chunk(len, index + 1)]);
                let (place, own) = part(index, rank);
                self.fold(dtype, op, place.start, &mut bytes[own.clone()]);
                self.put(CHUNK, &bytes[own]);
            }
            if let Some(behind) = index.checked_sub(1) {
                for peer in self.others() {
                    let (_, range) = part(behind, peer);
                    let result = self.view(peer, CHUNK..CHUNK + range.len());
                    bytes[range].copy_from_slice(result);
                }
            }
            if index < chunks {
                self.advance()?;
            }
        }
        Ok(())
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
        let partition = Partition::new(bytes.len() / dtype.size(), self.size());
        // What a rank gets in one step; a whole number of lines.
        let most = CHUNK / self.size() / LINE * LINE;
        let piece = |peer: usize, index: usize| {
            let part = partition.range(peer);
            let (start, end) = (part.start * dtype.size(), part.end * dtype.size());
            let from = end.min(start + index * most);
            from..end.min(from + most)
        };
        let put = |steps: &Self, index: usize| {
            for peer in steps.others() {
                steps.put(peer * most, &bytes[piece(peer, index)]);
            }
        };
        let rounds = (partition.largest() * dtype.size()).div_ceil(most);
        let rank = self.rank();
        let offset = piece(rank, 0).start;
        put(&self, 0);
        self.open(None, &[])?;
        for index in 0..rounds {
            if index + 1 < rounds {
                put(&self, index + 1);
            }
            let range = piece(rank, index);
            let own = &mut own[range.start - offset..range.end - offset];
            self.fold(dtype, op, rank * most, own);
            if index + 1 < rounds {
                self.advance()?;
            }
        }
        Ok(())
    }
}

/// A rank's part of `len` bytes: whole cache lines, so that no two ranks write to the same one.
fn lines(len: usize, world_size: usize, rank: usize) -> Range<usize> {
    let range = Partition::new(len.div_ceil(LINE), world_size).range(rank);
    len.min(range.start * LINE)..len.min(range.end * LINE)
}

/// A chunk of `len` bytes; empty behind the last one.
pub(super) fn chunk(len: usize, index: usize) -> Range<usize> {
    partition::chunk(len, index, CHUNK)
}
