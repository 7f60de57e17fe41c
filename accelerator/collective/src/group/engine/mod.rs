//! The algorithms over connections: `reduce` and `gather` hold them, `hosts` that over several
//! hosts, here is what they share. Where all ranks share memory, operations go to `steps/`.

mod chunks;
mod gather;
mod hosts;
mod reduce;

#[cfg(test)]
mod tests;

use std::ops::Range;

use accelerator_fault::{Effect, Point, fail_point};

use crate::{
    buffer::Storage,
    error::{Error, Result},
    fingerprint::{CollectiveFingerprint, mismatch},
    shared::Hosts,
    steps::{self, Steps},
    transport::{OutgoingChunk, Parcel, Position, Stage, Tag, Transport, Watch},
};
use chunks::chunk;
use hosts::Stages;

pub(crate) use chunks::Output;
pub(crate) use reduce::Reduction;

/// Memory that the operations of one rank use again and again.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    /// What has arrived from each rank in the current round.
    parcels: Vec<Option<Parcel>>,
    /// What each rank has declared.
    sides: Vec<Option<CollectiveFingerprint>>,
    /// What operations in shared memory use.
    shared: steps::Scratch,
    /// What reductions over hosts use.
    stages: Stages,
    /// What lies here and there in a buffer and travels as one.
    packed: Storage,
}

impl Scratch {
    pub(crate) fn clear(&mut self, world_size: usize) {
        self.parcels.clear();
        self.parcels.resize_with(world_size, || None);
        self.sides.clear();
        self.sides.resize(world_size, None);
    }
}

/// How far an operation came.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) enum Progress {
    Done,
    /// It waits for parts from the first of these ranks, then from the others.
    Waiting(Range<usize>),
}

/// One operation of one rank.
#[derive(Debug)]
pub(crate) struct Exchange<'a> {
    transport: &'a dyn Transport,
    watch: &'a mut Watch,
    position: Option<Position>,
    rank: usize,
    world_size: usize,
    parcels: &'a mut Vec<Option<Parcel>>,
    sides: &'a mut Vec<Option<CollectiveFingerprint>>,
    scratch: &'a mut steps::Scratch,
    stages: &'a mut Stages,
    packed: &'a mut Storage,
}

impl<'a> Exchange<'a> {
    /// An operation that runs from its beginning to its end.
    pub(crate) fn new(
        transport: &'a dyn Transport,
        watch: &'a mut Watch,
        scratch: &'a mut Scratch,
    ) -> Self {
        if transport.shared().is_none() {
            scratch.clear(transport.peers().len());
        }
        Self::view(transport, watch, scratch, None)
    }

    /// An operation that goes on as far as it can; its memory was cleared before the first time.
    pub(crate) fn resumed(
        transport: &'a dyn Transport,
        watch: &'a mut Watch,
        scratch: &'a mut Scratch,
        position: Position,
    ) -> Self {
        Self::view(transport, watch, scratch, Some(position))
    }

    fn view(
        transport: &'a dyn Transport,
        watch: &'a mut Watch,
        scratch: &'a mut Scratch,
        position: Option<Position>,
    ) -> Self {
        Self {
            transport,
            rank: watch.rank,
            world_size: transport.peers().len(),
            watch,
            position,
            parcels: &mut scratch.parcels,
            sides: &mut scratch.sides,
            scratch: &mut scratch.shared,
            stages: &mut scratch.stages,
            packed: &mut scratch.packed,
        }
    }

    /// Returns when every rank has called.
    pub(crate) fn barrier(mut self) -> Result<()> {
        if let Some(steps) = self.steps() {
            return steps.barrier();
        }
        self.begin(|_| &[])?;
        self.meet(|_, _| 0)
    }

    /// The same operation through shared memory, where there is some.
    fn steps(&mut self) -> Option<Steps<'_>> {
        let world = self.transport.shared()?;
        Some(Steps::new(world, self.transport, self.watch, self.scratch))
    }

    /// The steps of the ranks of this host.
    fn local<'b>(&'b mut self, hosts: &'b Hosts) -> Steps<'b> {
        Steps::new(hosts.world(), self.transport, self.watch, self.scratch)
    }

    /// Declares the operation to every rank, with the first data for it.
    fn begin<'b>(&mut self, payload: impl Fn(usize) -> &'b [u8]) -> Result<()> {
        let fingerprint = self.watch.fingerprint;
        let tag = self.tag(Stage::Begin, 0);
        for peer in self.ring() {
            let part = OutgoingChunk {
                tag,
                fingerprint: Some(&fingerprint),
                payload: payload(peer),
            };
            self.transport.send(peer, part, self.watch)?;
        }
        self.risk(Point::Operation(self.watch.sequence))
    }

    /// Waits for everyone's declaration, and fails on every rank alike where they disagree. The
    /// data that came with them is kept; `expected` says how much it should be.
    fn meet(&mut self, expected: impl Fn(usize, &CollectiveFingerprint) -> usize) -> Result<()> {
        match self.try_meet(expected)? {
            Progress::Done => Ok(()),
            // Only an operation that is resumed is ever in between.
            Progress::Waiting(_) => Err(self.watch.interrupted()),
        }
    }

    /// Takes everyone's declaration; see [`meet`](Self::meet).
    fn try_meet(
        &mut self,
        expected: impl Fn(usize, &CollectiveFingerprint) -> usize,
    ) -> Result<Progress> {
        self.sides[self.rank] = Some(self.watch.fingerprint);
        for peer in self.others() {
            if self.sides[peer].is_some() {
                continue;
            }
            let parcel = match self.fetch(peer, peer..self.world_size) {
                Ok(Some(parcel)) => parcel,
                Ok(None) => return Ok(Progress::Waiting(peer..self.world_size)),
                Err(error) => return Err(self.disagreement(error)),
            };
            let wanted = self.tag(Stage::Begin, 0);
            let (true, Some(side)) = (parcel.tag == wanted, parcel.fingerprint) else {
                return Err(self.unexpected(peer, &parcel, wanted));
            };
            self.sides[peer] = Some(side);
            self.parcels[peer] = Some(parcel);
            if !side.agrees_with(&self.watch.fingerprint) {
                self.watch.hurry();
            }
        }
        if !self.do_agree() {
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
        Ok(Progress::Done)
    }

    /// Whether every other rank sent these bytes, and nothing else, with its declaration. They are
    /// not kept.
    fn agree_on(&mut self, head: &[u8]) -> bool {
        let mut agree = true;
        for parcel in self.parcels.iter_mut().filter_map(Option::take) {
            agree &= parcel.chunk.bytes() == head;
        }
        agree
    }

    /// What an error is where the ranks disagree: the disagreement is the cause; who comes late to
    /// it adds nothing.
    pub(crate) fn disagreement(&self, error: Error) -> Error {
        match self.do_agree() || error.is_mismatch() {
            true => error,
            false => mismatch(self.watch.sequence, self.sides),
        }
    }

    /// Whether the declarations that are here agree.
    fn do_agree(&self) -> bool {
        let mut sides = self.sides.iter().flatten();
        sides.all(|side| side.agrees_with(&self.watch.fingerprint))
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
        chunk(
            self.sides[peer]
                .as_ref()
                .map_or(0, CollectiveFingerprint::bytes),
            round,
        )
    }

    fn send(&mut self, to: usize, stage: Stage, round: usize, payload: &[u8]) -> Result<()> {
        let part = OutgoingChunk {
            tag: self.tag(stage, round),
            fingerprint: None,
            payload,
        };
        self.risk(Point::Within(self.watch.sequence))?;
        self.transport.send(to, part, self.watch)
    }

    /// Carries out the fault that is planned for a place.
    fn risk(&self, point: Point) -> Result<()> {
        match fail_point(self.rank, point) {
            Some(Effect::DropConnection) if self.world_size > 1 => {
                self.transport.cut();
                return Err(self.watch.cut(&self.transport.peers()[self.rank]));
            }
            Some(Effect::CorruptFrame) => self.transport.spoil(),
            // The others have no place here.
            _ => {}
        }
        Ok(())
    }

    fn receive(
        &mut self,
        from: usize,
        awaited: Range<usize>,
        stage: Stage,
        round: usize,
        len: usize,
    ) -> Result<Parcel> {
        match self.try_receive(from, awaited, stage, round, len)? {
            Some(parcel) => Ok(parcel),
            // Only an operation that is resumed is ever in between.
            None => Err(self.watch.interrupted()),
        }
    }

    /// The part that comes next from a peer; none where an operation that is resumed has to wait.
    fn try_receive(
        &mut self,
        from: usize,
        awaited: Range<usize>,
        stage: Stage,
        round: usize,
        len: usize,
    ) -> Result<Option<Parcel>> {
        let Some(parcel) = self.fetch(from, awaited)? else {
            return Ok(None);
        };
        let wanted = self.tag(stage, round);
        if parcel.tag != wanted {
            return Err(self.unexpected(from, &parcel, wanted));
        }
        let found = parcel.chunk.bytes().len();
        if found != len {
            return Err(self.wrong_size(from, found, len));
        }
        Ok(Some(parcel))
    }

    fn fetch(&mut self, from: usize, awaited: Range<usize>) -> Result<Option<Parcel>> {
        let (inbox, peers) = (self.transport.inbox(), self.transport.peers());
        match self.position {
            None => inbox
                .take(from, awaited, self.transport, self.watch)
                .map(Some),
            Some(position) => inbox.poll(from, position, peers, self.watch),
        }
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

/// How many chunks a rank sends ahead of the one it reduces.
const AHEAD: usize = 4;
