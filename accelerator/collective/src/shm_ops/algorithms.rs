//! The operations: reductions, of which each rank owns one part of the buffer or of each chunk, and gathers.

use std::ops::Range;

use super::{Placement, ShmOp, ShmScratch};
use crate::buffer::{Buffer, GatherLayout, LINE, Loan, gather_layouts_differ};
use crate::element::{DType, ONE_EXCHANGE_BYTES, ReduceOp};
use crate::error::Result;
use crate::kernel::fold;
use crate::shard_layout::{self, Partition, ShardLayout, shard_layouts_differ};
use crate::shm::{MemoryRange, SHM_CHUNK};

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

    /// Gives every rank the elements that each rank keeps: from where they lie, if all ranks can reach the buffers.
    pub(crate) fn all_gather_buffer(
        mut self,
        buffer: &mut Buffer,
        layout: &ShardLayout,
    ) -> Result<()> {
        let (size, len) = (buffer.dtype().size(), buffer.bytes().len());
        let loan = buffer.lend(self.arena());
        self.publish_header(loan.as_ref().map(Loan::offset), layout.digest())?;
        self.check_layout(layout)?;
        if self.placement()? == Placement::All {
            self.locate(len)?;
            let own = self.scratch.places[self.rank()];
            for peer in self.others() {
                let place = self.scratch.places[peer];
                for range in layout.of(peer) {
                    let (at, len) = (range.start * size, range.len() * size);
                    let (from, to) = (place.part(at, len).start(), own.part(at, len).start());
                    // SAFETY: in bounds, and of two ranks' memory. Every rank declared its buffer, as this one has
                    // lent its own, and writes to its own alone, where it keeps nothing of the layout, which is the
                    // same on all: nobody writes what this rank reads, or reads what it writes, until all have taken
                    // the next step. The loan ends after that; an error before leaves the memory to the others.
                    unsafe { std::ptr::copy_nonoverlapping(from.cast_const(), to, len) };
                }
            }
            self.advance()?;
            loan.into_iter().for_each(Loan::end);
            return Ok(());
        }
        // Nobody reads it where it lies.
        loan.into_iter().for_each(Loan::end);
        let bytes = buffer.bytes_mut();
        let most = SHM_CHUNK / size;
        for start in (0..layout.largest()).step_by(most) {
            let mut at = 0;
            for run in layout.runs(self.rank(), start..start + most) {
                let piece = &bytes[run.start * size..run.end * size];
                self.put(at, piece);
                at += piece.len();
            }
            self.advance()?;
            for peer in self.others() {
                let mut at = 0;
                for run in layout.runs(peer, start..start + most) {
                    let place = &mut bytes[run.start * size..run.end * size];
                    place.copy_from_slice(self.view(peer, at..at + place.len()));
                    at += place.len();
                }
            }
        }
        Ok(())
    }

    /// Fails on every rank alike if the slots of this step do not begin with the digest of one
    /// layout.
    fn check_layout(&self, layout: &ShardLayout) -> Result<()> {
        match self.agree_on(layout.digest()) {
            true => Ok(()),
            false => Err(shard_layouts_differ(&self.deadline.number)),
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

/// Gathers and barriers: each rank sends what it has.
impl ShmOp<'_> {
    pub(crate) fn barrier(mut self) -> Result<()> {
        self.publish_header(None, &[])
    }

    /// Shows `own` to all ranks, chunk by chunk, and gives what the ranks that are `wanted` show to `sink`, in
    /// order for each rank. All ranks take as many steps as the longest declared data have chunks.
    pub(crate) fn gather(
        mut self,
        own: &[u8],
        wanted: impl Fn(usize) -> bool,
        mut sink: impl FnMut(usize, &[u8]),
    ) -> Result<()> {
        self.publish_header(None, &own[chunk(own.len(), 0)])?;
        let chunks = self.measure()?.div_ceil(SHM_CHUNK);
        for index in 0..chunks {
            let last = index + 1 == chunks;
            if !last {
                self.put(0, &own[chunk(own.len(), index + 1)]);
            }
            for peer in self.others().filter(|peer| wanted(*peer)) {
                let len = chunk(self.declared(peer), index).len();
                if len > 0 {
                    sink(peer, self.view(peer, 0..len));
                }
            }
            if !last {
                self.advance()?;
            }
        }
        Ok(())
    }

    /// Shows this rank the layout of all: where they lie, if it can reach all buffers, or else in its
    /// own, once everything has come.
    pub(crate) fn all_gather_parts(
        mut self,
        buffers: &mut [&mut Buffer],
        layout: &GatherLayout<'_>,
        mut sink: impl FnMut(usize, usize, &[u8]),
    ) -> Result<()> {
        let lens: Vec<usize> = buffers.iter().map(|buffer| buffer.bytes().len()).collect();
        let mut loans = Vec::with_capacity(buffers.len());
        let mut notice = layout.checksum().to_vec();
        for buffer in buffers.iter_mut() {
            let loan = buffer.lend(self.arena());
            let offset = loan.as_ref().map_or(NOWHERE, |loan| loan.offset() as u64);
            notice.extend_from_slice(&offset.to_le_bytes());
            loans.extend(loan);
        }
        self.publish_header(None, &notice)?;
        // Lengths and parts are the same where checksums are.
        if !self.agree_on(&layout.checksum()) {
            return Err(gather_layouts_differ(&self.deadline.number));
        }
        let mut places = Vec::with_capacity(self.size() * lens.len());
        for peer in 0..self.size() {
            let offsets = match peer == self.rank() {
                true => &notice[size_of::<u64>()..],
                false => &self.view(peer, 0..notice.len())[size_of::<u64>()..],
            };
            for (offset, len) in offsets.chunks_exact(size_of::<u64>()).zip(&lens) {
                let mut bytes = [0; size_of::<u64>()];
                bytes.copy_from_slice(offset);
                let offset = u64::from_le_bytes(bytes);
                places.push(self.peers.arena(peer).buffer(offset, *len));
            }
        }
        let Some(places) = places.into_iter().collect::<Option<Vec<MemoryRange>>>() else {
            // Nobody reads the buffers of others then: all see the same offsets.
            loans.into_iter().for_each(Loan::end);
            return self.gather_staged(buffers, layout, sink);
        };
        for rank in 0..self.size() {
            for (number, part) in layout.of(rank).iter().enumerate() {
                let place = places[rank * lens.len() + part.buffer];
                let place = place.part(part.bytes.start, part.bytes.len());
                // SAFETY: in bounds. Every rank has lent its buffers, and writes to none of them until
                // all have taken the next step; where a rank fails before, it never uses the
                // memory again.
                sink(rank, number, unsafe { place.bytes() });
            }
        }
        self.advance()?;
        loans.into_iter().for_each(Loan::end);
        Ok(())
    }

    /// Gathers through the slots, chunk by chunk, into the buffers.
    fn gather_staged(
        mut self,
        buffers: &mut [&mut Buffer],
        layout: &GatherLayout<'_>,
        sink: impl FnMut(usize, usize, &[u8]),
    ) -> Result<()> {
        let own = layout.collect(self.rank(), buffers);
        for index in 0..layout.longest().div_ceil(SHM_CHUNK) {
            self.put(0, &own[chunk(own.len(), index)]);
            self.advance()?;
            for peer in self.others() {
                let range = chunk(layout.len(peer), index);
                layout.put(peer, range.start, self.view(peer, 0..range.len()), buffers);
            }
        }
        layout.show(buffers, sink);
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
fn chunk(len: usize, index: usize) -> Range<usize> {
    shard_layout::chunk(len, index, SHM_CHUNK)
}

/// The offset of a buffer that lies in no arena: no region begins there.
const NOWHERE: u64 = u64::MAX;
