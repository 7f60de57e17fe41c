//! The algorithms, once for every transport.

use std::ops::Range;

use accelerator_fault::{Effect, Point, strike};

use crate::{
    contract::{Contract, mismatch},
    element::DType,
    error::{Error, Result},
    partition::Partition,
    reduce::{ReduceOp, combine},
    transport::{CHUNK, Parcel, Part, Stage, Tag, Transport, TransportKind, Watch},
};

/// Memory that the operations of one rank use again and again.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    /// What has arrived from each rank in the current round.
    parcels: Vec<Option<Parcel>>,
    /// What each rank has declared.
    sides: Vec<Option<Contract>>,
}

/// One operation of one rank.
#[derive(Debug)]
pub(crate) struct Exchange<'a> {
    transport: &'a dyn Transport,
    contract: &'a Contract,
    watch: Watch<'a>,
    rank: usize,
    world_size: usize,
    parcels: &'a mut Vec<Option<Parcel>>,
    sides: &'a mut Vec<Option<Contract>>,
}

impl<'a> Exchange<'a> {
    pub(crate) fn new(
        transport: &'a dyn Transport,
        contract: &'a Contract,
        watch: Watch<'a>,
        scratch: &'a mut Scratch,
    ) -> Self {
        let world_size = transport.peers().len();
        scratch.parcels.clear();
        scratch.parcels.resize_with(world_size, || None);
        scratch.sides.clear();
        scratch.sides.resize(world_size, None);
        Self {
            transport,
            contract,
            rank: watch.rank,
            watch,
            world_size,
            parcels: &mut scratch.parcels,
            sides: &mut scratch.sides,
        }
    }

    /// Returns when every rank has called.
    pub(crate) fn barrier(mut self) -> Result<()> {
        self.begin(|_| &[])?;
        self.meet(|_, _| 0)
    }

    /// Reduces `bytes` over all ranks, in place.
    ///
    /// Each rank owns one part: it receives that part from everyone, reduces it in rank order
    /// and sends the result to everyone. Chunks are pipelined: while one is reduced, the next
    /// [`AHEAD`] are on their way. A short buffer goes to everyone at once, and every rank
    /// reduces all of it, in the same order and so to the same bits.
    pub(crate) fn all_reduce(mut self, dtype: DType, op: ReduceOp, bytes: &mut [u8]) -> Result<()> {
        if self.world_size == 1 {
            return self.begin(|_| &[]);
        }
        if bytes.len() <= SHORT {
            self.begin(|_| bytes)?;
            self.meet(|_, contract| contract.bytes())?;
            combine(dtype, op, self.parcels, bytes);
            return Ok(());
        }
        let parts = Parts::new(bytes.len() / dtype.size(), dtype.size(), self.world_size);
        let (rank, rounds) = (self.rank, parts.rounds());
        self.begin(|peer| &bytes[parts.chunk(peer, 0)])?;
        self.meet(|_, _| parts.chunk(rank, 0).len())?;
        for round in 1..AHEAD {
            self.contribute(&parts, round, bytes)?;
        }
        for round in 0..rounds + AHEAD {
            self.contribute(&parts, round + AHEAD, bytes)?;
            let own = parts.chunk(rank, round);
            if !own.is_empty() {
                self.collect(round, own.len())?;
                combine(dtype, op, self.parcels, &mut bytes[own.clone()]);
                self.announce(round, &bytes[own])?;
            }
            let Some(behind) = round.checked_sub(AHEAD) else {
                continue;
            };
            for peer in self.others() {
                let chunk = parts.chunk(peer, behind);
                if !chunk.is_empty() {
                    let awaited = peer..self.world_size;
                    let parcel =
                        self.receive(peer, awaited, Stage::Outward, behind, chunk.len())?;
                    bytes[chunk].copy_from_slice(parcel.chunk.bytes());
                }
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
        if self.world_size == 1 {
            return self.begin(|_| &[]);
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

    /// Sends `own` to every rank and gives what the others sent to `sink`, in order for each
    /// rank.
    pub(crate) fn all_gather(
        mut self,
        own: &[u8],
        mut sink: impl FnMut(usize, &[u8]),
    ) -> Result<()> {
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
        self.begin(|_| &bytes[chunk(bytes.len(), 0)])?;
        self.meet(|_, _| 0)?;
        for round in 1..bytes.len().div_ceil(CHUNK) {
            self.announce(round, &bytes[chunk(bytes.len(), round)])?;
        }
        Ok(())
    }

    /// Every other rank's side of a broadcast: gives what the root sent to `sink`, in order.
    pub(crate) fn broadcast_to(mut self, root: usize, mut sink: impl FnMut(&[u8])) -> Result<()> {
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

    /// Declares the operation to every rank, with the first data for it.
    fn begin<'b>(&mut self, payload: impl Fn(usize) -> &'b [u8]) -> Result<()> {
        let contract = self.contract;
        let tag = self.tag(Stage::Begin, 0);
        for peer in self.ring() {
            let part = Part {
                tag,
                contract: Some(contract),
                payload: payload(peer),
            };
            self.transport.send(peer, part, &mut self.watch)?;
        }
        match strike(self.rank, Point::Operation(self.watch.sequence)) {
            Some(Effect::DropConnection) if self.transport.kind() != TransportKind::Threads => {
                self.transport.cut();
                return Err(self.watch.cut(&self.transport.peers()[self.rank]));
            }
            Some(Effect::CorruptFrame) => self.transport.spoil(),
            // The others have no place here, or cannot happen to threads.
            _ => {}
        }
        Ok(())
    }

    /// Waits for everyone's declaration, and fails on every rank alike where they disagree. The
    /// data that came with them is kept; `expected` says how much it should be.
    fn meet(&mut self, expected: impl Fn(usize, &Contract) -> usize) -> Result<()> {
        self.sides[self.rank] = Some(*self.contract);
        let mut agreed = true;
        for peer in self.others() {
            let peers = self.transport.peers();
            let awaited = peer..self.world_size;
            let taken = self
                .transport
                .inbox()
                .take(peer, awaited, peers, &mut self.watch);
            let parcel = match taken {
                Ok(parcel) => parcel,
                // The disagreement is the cause; who comes late to it adds nothing.
                Err(error) if agreed || error.is_mismatch() => return Err(error),
                Err(_) => break,
            };
            let wanted = self.tag(Stage::Begin, 0);
            let (true, Some(side)) = (parcel.tag == wanted, parcel.contract) else {
                return Err(self.unexpected(peer, &parcel, wanted));
            };
            self.sides[peer] = Some(side);
            self.parcels[peer] = Some(parcel);
            if agreed && !side.agrees_with(self.contract) {
                agreed = false;
                self.watch.hurry();
            }
        }
        if !agreed {
            return Err(mismatch(self.watch.sequence, self.sides));
        }
        for peer in self.others() {
            if let (Some(side), Some(parcel)) = (&self.sides[peer], &self.parcels[peer]) {
                let (found, expected) = (parcel.chunk.bytes().len(), expected(peer, side));
                if found != expected {
                    return Err(self.wrong_size(peer, found, expected));
                }
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

    /// Sends a chunk to every rank; an empty one is not sent.
    fn announce(&mut self, round: usize, bytes: &[u8]) -> Result<()> {
        if !bytes.is_empty() {
            for peer in self.ring() {
                self.send(peer, Stage::Outward, round, bytes)?;
            }
        }
        Ok(())
    }

    /// The chunk of a round from one peer, where that of round 0 came at the beginning.
    fn round(&mut self, peer: usize, stage: Stage, round: usize, len: usize) -> Result<Parcel> {
        match self.parcels[peer].take() {
            Some(parcel) => Ok(parcel),
            None => self.receive(peer, peer..peer + 1, stage, round, len),
        }
    }

    /// The chunk of a round that a peer has to send, going by the length that it declared.
    fn declared_chunk(&self, peer: usize, round: usize) -> Range<usize> {
        chunk(self.sides[peer].as_ref().map_or(0, Contract::bytes), round)
    }

    fn send(&mut self, to: usize, stage: Stage, round: usize, payload: &[u8]) -> Result<()> {
        let part = Part {
            tag: self.tag(stage, round),
            contract: None,
            payload,
        };
        self.transport.send(to, part, &mut self.watch)
    }

    fn receive(
        &mut self,
        from: usize,
        awaited: Range<usize>,
        stage: Stage,
        round: usize,
        len: usize,
    ) -> Result<Parcel> {
        let peers = self.transport.peers();
        let parcel = self
            .transport
            .inbox()
            .take(from, awaited, peers, &mut self.watch)?;
        let wanted = self.tag(stage, round);
        if parcel.tag != wanted {
            return Err(self.unexpected(from, &parcel, wanted));
        }
        let found = parcel.chunk.bytes().len();
        if found != len {
            return Err(self.wrong_size(from, found, len));
        }
        Ok(parcel)
    }

    fn tag(&self, stage: Stage, round: usize) -> Tag {
        Tag {
            sequence: self.watch.sequence,
            stage,
            // Chunks are numbered within 32 bits up to an exabyte.
            index: round as u32,
        }
    }

    fn unexpected(&self, from: usize, parcel: &Parcel, wanted: Tag) -> Error {
        self.watch.protocol(
            &self.transport.peers()[from],
            format_args!("it sent {:?}, expected {wanted:?}", parcel.tag),
        )
    }

    fn wrong_size(&self, from: usize, found: usize, expected: usize) -> Error {
        self.watch.protocol(
            &self.transport.peers()[from],
            format_args!("it sent {found} bytes, expected {expected}"),
        )
    }

    /// The other ranks, in rank order.
    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let rank = self.rank;
        (0..self.world_size).filter(move |peer| *peer != rank)
    }

    /// The other ranks, from the next one round, so that not all ranks send to rank 0 first.
    fn ring(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, world_size) = (self.rank, self.world_size);
        (1..world_size).map(move |step| (rank + step) % world_size)
    }
}

/// A buffer cut into one part for each rank, and each part into chunks, in bytes.
#[derive(Debug)]
struct Parts {
    partition: Partition,
    size: usize,
}

impl Parts {
    fn new(len: usize, size: usize, world_size: usize) -> Self {
        Self {
            partition: Partition::new(len, world_size),
            size,
        }
    }

    fn part(&self, rank: usize) -> Range<usize> {
        let range = self.partition.range(rank);
        range.start * self.size..range.end * self.size
    }

    /// A chunk of a part; empty behind the last one.
    fn chunk(&self, rank: usize, round: usize) -> Range<usize> {
        let part = self.part(rank);
        let chunk = chunk(part.len(), round);
        part.start + chunk.start..part.start + chunk.end
    }

    /// The number of chunks of the largest part.
    fn rounds(&self) -> usize {
        (self.partition.largest() * self.size).div_ceil(CHUNK)
    }
}

/// A chunk of `len` bytes; empty behind the last one.
fn chunk(len: usize, round: usize) -> Range<usize> {
    let start = len.min(round * CHUNK);
    start..len.min(start + CHUNK)
}

/// Up to this many bytes a buffer is reduced by every rank for itself: one exchange, not two.
const SHORT: usize = 16 * 1024;

/// How many chunks a rank sends ahead of the one it reduces.
const AHEAD: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_parts() {
        let len = 3 * CHUNK + 5;
        let parts = Parts::new(len, 2, 3);
        let mut next = 0;
        for rank in 0..3 {
            for round in 0..parts.rounds() {
                let chunk = parts.chunk(rank, round);
                assert_eq!(chunk.start, next);
                assert!(chunk.len() <= CHUNK);
                next = chunk.end;
            }
            assert!(parts.chunk(rank, parts.rounds()).is_empty());
        }
        assert_eq!(next, 2 * len);
    }
}
