//! Gathers, broadcasts and barriers: each rank sends what it has.

use super::{ShmOp, reduce::chunk};
use crate::{
    buffer::{Buffer, GatherLayout, Loan, gather_layouts_differ},
    error::Result,
    shm::{MemoryRange, SHM_CHUNK},
};

impl ShmOp<'_> {
    /// Returns when every rank has called.
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
}

impl ShmOp<'_> {
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
            return Err(gather_layouts_differ(self.deadline.sequence));
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

/// The offset of a buffer that lies in no arena: no region begins there.
const NOWHERE: u64 = u64::MAX;
