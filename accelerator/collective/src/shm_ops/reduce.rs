//! Reductions: each rank owns one part of the buffer, or of each chunk.

use std::ops::Range;

use super::{Placement, ShmOp, ShmScratch};
use crate::{
    buffer::{Buffer, LINE, Loan},
    element::{DType, ONE_EXCHANGE_BYTES, ReduceOp},
    error::Result,
    kernel::fold,
    shard_layout::{self, Partition, ShardLayout, shard_layouts_differ},
    shm::SHM_CHUNK,
};

impl ShmOp<'_> {
    /// Reduces `bytes` over all ranks, in place, through the slots.
    pub(crate) fn all_reduce(mut self, dtype: DType, op: ReduceOp, bytes: &mut [u8]) -> Result<()> {
        if bytes.len() <= ONE_EXCHANGE_BYTES {
            return self.short(dtype, op, bytes);
        }
        self.publish_header(None, &bytes[chunk(bytes.len(), 0)])?;
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
        if len <= ONE_EXCHANGE_BYTES {
            return self.short(dtype, op, buffer.bytes_mut());
        }
        let Some(loan) = buffer.lend(self.arena()) else {
            return self.all_reduce(dtype, op, buffer.bytes_mut());
        };
        self.publish_header(Some(loan.offset()), &[])?;
        if self.placement()? == Placement::All {
            let part = cache_lines(len, self.size(), self.rank());
            self.locate(len)?;
            // SAFETY: every rank declared its buffer, as this one has lent its own, and touches
            // its own part of them until all have taken the next step. The loan ends after that; an
            // error before leaves the memory to the others.
            unsafe { self.fold_in_place(dtype, op, part, Targets::All) };
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

    /// Reduces the elements of a buffer that this rank keeps over all ranks, in place: where they
    /// lie, if all ranks can reach the buffers. Afterwards the others are unspecified, after an error
    /// all.
    pub(crate) fn reduce_scatter_buffer(
        mut self,
        op: ReduceOp,
        buffer: &mut Buffer,
        layout: &ShardLayout,
    ) -> Result<()> {
        let (dtype, len) = (buffer.dtype(), buffer.bytes().len());
        let parts = layout.of(self.rank()).iter();
        let parts = parts.map(|part| part.start * dtype.size()..part.end * dtype.size());
        if len <= ONE_EXCHANGE_BYTES {
            let bytes = buffer.bytes_mut();
            self.put(LINE, bytes);
            self.publish_header(None, layout.digest())?;
            self.check_layout(layout)?;
            for part in parts {
                self.fold(dtype, op, LINE + part.start, &mut bytes[part]);
            }
            return Ok(());
        }
        let loan = buffer.lend(self.arena());
        self.publish_header(loan.as_ref().map(Loan::offset), layout.digest())?;
        self.check_layout(layout)?;
        let in_place = self.placement()? == Placement::All;
        if in_place {
            self.locate(len)?;
            for part in parts {
                // SAFETY: every rank declared its buffer, as this one has lent its own, and no two
                // ranks keep the same element of the layout, which is the same on all. So nobody else
                // reads or writes these parts of any buffer until all have taken the next step. The
                // loan ends after that; an error before leaves the memory to the others.
                unsafe { self.fold_in_place(dtype, op, part, Targets::Own) };
            }
            self.advance()?;
        }
        // Nobody reads it any more, or nobody does at all.
        loan.into_iter().for_each(Loan::end);
        if in_place {
            return Ok(());
        }
        let bytes = buffer.bytes_mut();
        self.put(0, &bytes[chunk(len, 0)]);
        self.advance()?;
        self.staged(dtype, op, bytes)
    }

    /// Fails on every rank alike if the slots of this step do not begin with the digest of one
    /// layout.
    fn check_layout(&self, layout: &ShardLayout) -> Result<()> {
        match self.agree_on(layout.digest()) {
            true => Ok(()),
            false => Err(shard_layouts_differ(self.deadline.sequence)),
        }
    }

    /// One step: everyone reads everything.
    fn short(&mut self, dtype: DType, op: ReduceOp, bytes: &mut [u8]) -> Result<()> {
        self.publish_header(None, bytes)?;
        self.fold(dtype, op, 0, bytes);
        Ok(())
    }

    /// Reduces chunk by chunk through the slots, which hold the first chunk already. In one step a rank puts a chunk,
    /// reduces its part of the one before, and takes the results of the one before that.
    fn staged(&mut self, dtype: DType, op: ReduceOp, bytes: &mut [u8]) -> Result<()> {
        let (len, size, rank) = (bytes.len(), self.size(), self.rank());
        let part = |index: usize, rank: usize| {
            let chunk = chunk(len, index);
            let part = cache_lines(chunk.len(), size, rank);
            (
                part.clone(),
                chunk.start + part.start..chunk.start + part.end,
            )
        };
        let chunks = len.div_ceil(SHM_CHUNK);
        for index in 0..=chunks {
            if index < chunks {
                self.put(0, &bytes[chunk(len, index + 1)]);
                let (place, own) = part(index, rank);
                self.fold(dtype, op, place.start, &mut bytes[own.clone()]);
                self.put(SHM_CHUNK, &bytes[own]);
            }
            if let Some(behind) = index.checked_sub(1) {
                for peer in self.others() {
                    let (_, range) = part(behind, peer);
                    let result = self.view(peer, SHM_CHUNK..SHM_CHUNK + range.len());
                    bytes[range].copy_from_slice(result);
                }
            }
            if index < chunks {
                self.advance()?;
            }
        }
        Ok(())
    }

    /// Notes where the buffers lie that all ranks declared. `len` is their length in bytes.
    fn locate(&mut self, len: usize) -> Result<()> {
        self.scratch.places.clear();
        for peer in 0..self.peers.size() {
            let offset = self.digest(peer)?.data;
            let place = offset.and_then(|offset| self.peers.arena(peer).buffer(offset, len));
            let Some(place) = place else {
                let peer = self.peer(peer);
                let what = "it declared a buffer where it can have none";
                return Err(self.deadline.protocol(peer, what));
            };
            self.scratch.places.push(place);
        }
        Ok(())
    }

    /// Combines the same part of the [located](Self::locate) buffers, in rank order, and writes the
    /// result to all of them, or to this rank's own.
    ///
    /// # Safety
    ///
    /// The buffers were located in this step. Nobody else reads or writes this part of any rank's
    /// buffer between the header and the next step, and there is no reference to this rank's
    /// own.
    unsafe fn fold_in_place(
        &mut self,
        dtype: DType,
        op: ReduceOp,
        part: Range<usize>,
        into: Targets,
    ) {
        self.scratch.clear();
        let ShmScratch {
            places,
            sources,
            targets,
            ..
        } = &mut *self.scratch;
        for (peer, place) in places.iter().enumerate() {
            let start = place.part(part.start, part.len()).start();
            sources.push(start.cast_const());
            if into == Targets::All || peer == self.peers.rank() {
                targets.push(start);
            }
        }
        // SAFETY: in bounds and aligned; by the caller's promise nobody else is there.
        unsafe { fold(dtype, op, sources, targets, part.len() / dtype.size()) };
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
        // What a rank gets in one step; a whole number of cache lines.
        let most = SHM_CHUNK / self.size() / LINE * LINE;
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
        self.publish_header(None, &[])?;
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

/// The buffers that get a result.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Targets {
    All,
    Own,
}

/// A rank's part of `len` bytes: whole cache lines, so that no two ranks write to the same one.
fn cache_lines(len: usize, world_size: usize, rank: usize) -> Range<usize> {
    let range = Partition::new(len.div_ceil(LINE), world_size).range(rank);
    len.min(range.start * LINE)..len.min(range.end * LINE)
}

/// A chunk of `len` bytes; empty behind the last one.
pub(super) fn chunk(len: usize, index: usize) -> Range<usize> {
    shard_layout::chunk(len, index, SHM_CHUNK)
}
