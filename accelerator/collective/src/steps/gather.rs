//! Gathers, broadcasts and barriers: each rank sends what it has.

use super::{Steps, reduce::chunk};
use crate::{error::Result, shared::CHUNK};

impl Steps<'_> {
    /// Returns when every rank has called.
    pub(crate) fn barrier(mut self) -> Result<()> {
        self.open(None, &[])
    }

    /// Sends `own` to every rank and gives what the others sent to `sink`, in order for each
    /// rank.
    pub(crate) fn all_gather(self, own: &[u8], sink: impl FnMut(usize, &[u8])) -> Result<()> {
        self.spread(own, |_| true, sink)
    }

    /// Sends `own` to the root, and there gives what the others sent to `sink`, in order for
    /// each rank.
    pub(crate) fn gather(
        self,
        root: usize,
        own: &[u8],
        sink: impl FnMut(usize, &[u8]),
    ) -> Result<()> {
        let is_root = self.rank() == root;
        self.spread(own, |_| is_root, sink)
    }

    /// The root's side of a broadcast.
    pub(crate) fn broadcast_from(self, bytes: &[u8]) -> Result<()> {
        self.spread(bytes, |_| false, |_, _| {})
    }

    /// Every other rank's side of a broadcast: gives what the root sent to `sink`, in order.
    pub(crate) fn broadcast_to(self, root: usize, mut sink: impl FnMut(&[u8])) -> Result<()> {
        self.spread(&[], |peer| peer == root, |_, piece| sink(piece))
    }

    /// The root's side of a scatter: `bytes` is all that it has for others, one after the other.
    pub(crate) fn scatter_from(self, bytes: &[u8]) -> Result<()> {
        self.spread(bytes, |_| false, |_, _| {})
    }

    /// Every other rank's side of a scatter: gives what the root has for all to `sink`, in order. It
    /// lies in memory that is shared: who leaves a part alone copies nothing of it.
    pub(crate) fn scatter_to(self, root: usize, mut sink: impl FnMut(&[u8])) -> Result<()> {
        self.spread(&[], |peer| peer == root, |_, piece| sink(piece))
    }

    /// Puts what this rank has, chunk by chunk, and takes what it wants. All ranks take as many
    /// steps as the longest declared data have chunks.
    fn spread(
        mut self,
        own: &[u8],
        wanted: impl Fn(usize) -> bool,
        mut sink: impl FnMut(usize, &[u8]),
    ) -> Result<()> {
        self.open(None, &own[chunk(own.len(), 0)])?;
        let chunks = self.measure()?.div_ceil(CHUNK);
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
