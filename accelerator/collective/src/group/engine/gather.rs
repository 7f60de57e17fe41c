//! Gathers and broadcasts: each rank sends what it has.

use super::{AHEAD, Exchange, parts::chunk};
use crate::{
    contract::Contract,
    error::Result,
    transport::{CHUNK, Stage},
};

impl Exchange<'_> {
    /// Sends `own` to every rank and gives what the others sent to `sink`, in order for each
    /// rank.
    pub(crate) fn all_gather(
        mut self,
        own: &[u8],
        mut sink: impl FnMut(usize, &[u8]),
    ) -> Result<()> {
        if let Some(steps) = self.steps() {
            return steps.all_gather(own, sink);
        }
        self.begin(|_| &own[chunk(own.len(), 0)])?;
        self.meet(|_, contract| chunk(contract.bytes(), 0).len())?;
        let longest = self.sides.iter().flatten().map(Contract::bytes).max();
        let rounds = longest.unwrap_or(0).div_ceil(CHUNK);
        for round in 1..AHEAD {
            self.announce(round, &own[chunk(own.len(), round)])?;
        }
        for round in 0..rounds {
            let next = chunk(own.len(), round + AHEAD);
            self.announce(round + AHEAD, &own[next])?;
            for peer in self.others() {
                let len = self.declared_chunk(peer, round).len();
                if len > 0 {
                    let parcel = self.round(peer, Stage::Outward, round, len)?;
                    sink(peer, parcel.chunk.bytes());
                }
            }
        }
        Ok(())
    }

    /// Sends `own` to the root, and there gives what the others sent to `sink`, in order for
    /// each rank.
    pub(crate) fn gather(
        mut self,
        root: usize,
        own: &[u8],
        mut sink: impl FnMut(usize, &[u8]),
    ) -> Result<()> {
        if let Some(steps) = self.steps() {
            return steps.gather(root, own, sink);
        }
        let rank = self.rank;
        self.begin(|peer| match peer == root {
            true => &own[chunk(own.len(), 0)],
            false => &[],
        })?;
        self.meet(|_, contract| match rank == root {
            true => chunk(contract.bytes(), 0).len(),
            false => 0,
        })?;
        if rank != root {
            for round in 1..own.len().div_ceil(CHUNK) {
                self.send(root, Stage::Inward, round, &own[chunk(own.len(), round)])?;
            }
            return Ok(());
        }
        for peer in self.others() {
            let mut round = 0;
            loop {
                let len = self.declared_chunk(peer, round).len();
                if len == 0 {
                    break;
                }
                let parcel = self.round(peer, Stage::Inward, round, len)?;
                sink(peer, parcel.chunk.bytes());
                round += 1;
            }
        }
        Ok(())
    }

    /// Sends the root's `bytes` to every rank.
    pub(crate) fn broadcast(self, root: usize, bytes: &mut [u8]) -> Result<()> {
        if self.rank == root {
            return self.broadcast_from(root, bytes);
        }
        let mut filled = 0;
        self.broadcast_to(root, |piece| {
            bytes[filled..filled + piece.len()].copy_from_slice(piece);
            filled += piece.len();
        })
    }

    /// The root's side of a broadcast.
    pub(crate) fn broadcast_from(mut self, root: usize, bytes: &[u8]) -> Result<()> {
        debug_assert_eq!(self.rank, root, "only the root has something to say");
        if let Some(steps) = self.steps() {
            return steps.broadcast_from(bytes);
        }
        self.begin(|_| &bytes[chunk(bytes.len(), 0)])?;
        self.meet(|_, _| 0)?;
        for round in 1..bytes.len().div_ceil(CHUNK) {
            self.announce(round, &bytes[chunk(bytes.len(), round)])?;
        }
        Ok(())
    }

    /// Every other rank's side of a broadcast: gives what the root sent to `sink`, in order.
    pub(crate) fn broadcast_to(mut self, root: usize, mut sink: impl FnMut(&[u8])) -> Result<()> {
        if let Some(steps) = self.steps() {
            return steps.broadcast_to(root, sink);
        }
        self.begin(|_| &[])?;
        self.meet(|peer, contract| match peer == root {
            true => chunk(contract.bytes(), 0).len(),
            false => 0,
        })?;
        let mut round = 0;
        loop {
            let len = self.declared_chunk(root, round).len();
            if len == 0 {
                return Ok(());
            }
            let parcel = self.round(root, Stage::Outward, round, len)?;
            sink(parcel.chunk.bytes());
            round += 1;
        }
    }
}
