//! The algorithms over connections: `reduce` and `gather`, `hierarchical` over several hosts, and here what they
//! share. If all ranks share memory, operations go through `shm_ops`.

mod buffer_op;
mod chunks;
mod dissemination;
mod gather;
mod hierarchical;
mod reduce;

#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;

use std::{fmt, ops::Range};

use accelerator_fault::{Effect, Point, fail_point};

use crate::{
    buffer::Storage,
    error::{Error, Result},
    fingerprint::{CollectiveFingerprint, mismatch},
    shm::Hosts,
    shm_ops::{self, ShmOp},
    transport::{OpDeadline, OpPhase, OpPosition, OutgoingChunk, RecvChunk, Tag, Transport},
};

pub(crate) use buffer_op::{BufferOp, ResumableOp};
pub(crate) use gather::scatter_len;

/// Memory that the operations of one rank use again and again.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    /// The chunk that has arrived from each rank in the current round.
    received: Vec<Option<RecvChunk>>,
    headers: Vec<Option<CollectiveFingerprint>>,
    exchange: HeaderExchange,
    /// The headers that are sent in one round.
    blocks: Vec<u8>,
    /// The memory of operations in shared memory.
    shared: shm_ops::ShmScratch,
    /// The memory of reductions over hosts.
    staging: HierarchicalScratch,
    /// Scattered pieces of a buffer, packed to travel as one.
    packed: Storage,
}

/// Memory that reductions over hosts use again and again.
#[derive(Default)]
struct HierarchicalScratch {
    /// This rank's values of a chunk as they are added up, if they are held otherwise.
    widened: Storage,
    /// The combined values of this host's ranks, for this rank's lane.
    partial: Storage,
    /// The chunks under way: this host's share of each, then the results.
    owned: Vec<Storage>,
    results: Vec<Storage>,
}

impl fmt::Debug for HierarchicalScratch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HierarchicalScratch")
            .finish_non_exhaustive()
    }
}

impl Scratch {
    pub(crate) fn clear(&mut self, world_size: usize) {
        self.received.clear();
        self.received.resize_with(world_size, || None);
        self.headers.clear();
        self.headers.resize(world_size, None);
        self.exchange = HeaderExchange::Direct;
    }
}

/// The way in which the ranks exchange the headers of an operation.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
enum HeaderExchange {
    /// Every rank sends its header to every other one.
    #[default]
    Direct,
    /// Every rank has sent this round, and takes it next.
    Round(u32),
}

/// The progress of an operation.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) enum OpProgress {
    Done,
    /// It waits for parts from the first of these ranks, then from the others.
    Waiting(Range<usize>),
}

/// One operation of one rank.
#[derive(Debug)]
pub(crate) struct OpContext<'a> {
    transport: &'a Transport,
    deadline: &'a mut OpDeadline,
    position: Option<OpPosition>,
    rank: usize,
    world_size: usize,
    received: &'a mut Vec<Option<RecvChunk>>,
    headers: &'a mut Vec<Option<CollectiveFingerprint>>,
    exchange: &'a mut HeaderExchange,
    blocks: &'a mut Vec<u8>,
    scratch: &'a mut shm_ops::ShmScratch,
    staging: &'a mut HierarchicalScratch,
    packed: &'a mut Storage,
}

impl<'a> OpContext<'a> {
    /// An operation that runs from its beginning to its end.
    pub(crate) fn new(
        transport: &'a Transport,
        deadline: &'a mut OpDeadline,
        scratch: &'a mut Scratch,
    ) -> Self {
        if transport.shared().is_none() {
            scratch.clear(transport.size());
        }
        Self::view(transport, deadline, scratch, None)
    }

    /// An operation that continues as far as it can; its memory was cleared before the first time.
    pub(crate) fn resumed(
        transport: &'a Transport,
        deadline: &'a mut OpDeadline,
        scratch: &'a mut Scratch,
        position: OpPosition,
    ) -> Self {
        Self::view(transport, deadline, scratch, Some(position))
    }

    fn view(
        transport: &'a Transport,
        deadline: &'a mut OpDeadline,
        scratch: &'a mut Scratch,
        position: Option<OpPosition>,
    ) -> Self {
        Self {
            transport,
            // A rank runs operations of its own groups only.
            rank: transport.number_of(deadline.rank).unwrap_or_default(),
            world_size: transport.size(),
            deadline,
            position,
            received: &mut scratch.received,
            headers: &mut scratch.headers,
            exchange: &mut scratch.exchange,
            blocks: &mut scratch.blocks,
            scratch: &mut scratch.shared,
            staging: &mut scratch.staging,
            packed: &mut scratch.packed,
        }
    }

    pub(crate) fn barrier(mut self) -> Result<()> {
        if let Some(shm) = self.shm_op() {
            return shm.barrier();
        }
        self.announce(&[])?;
        self.exchange_headers(|_, _| 0)
    }

    /// The same operation through shared memory, if there is some.
    fn shm_op(&mut self) -> Option<ShmOp<'_>> {
        let world = self.transport.shared()?;
        Some(ShmOp::new(
            world,
            self.transport,
            self.deadline,
            self.scratch,
        ))
    }

    /// The steps of the ranks of this host.
    fn local<'b>(&'b mut self, hosts: &'b Hosts) -> ShmOp<'b> {
        ShmOp::new(hosts.peers(), self.transport, self.deadline, self.scratch)
    }

    /// Declares the operation to every rank directly, with the first data for it.
    fn send_header<'b>(&mut self, payload: impl Fn(usize) -> &'b [u8]) -> Result<()> {
        let fingerprint = self.deadline.fingerprint;
        let tag = self.tag(OpPhase::Header, 0);
        for peer in self.ring() {
            let part = OutgoingChunk {
                tag,
                fingerprint: Some(&fingerprint),
                payload: payload(peer),
            };
            self.transport.send(peer, part, self.deadline)?;
        }
        self.inject_fault(Point::Operation(self.deadline.number.sequence))
    }

    /// Waits for everyone's header, and fails on every rank alike if they disagree. The
    /// data that came with them is kept; `expected` says how much it should be.
    fn exchange_headers(
        &mut self,
        expected: impl Fn(usize, &CollectiveFingerprint) -> usize,
    ) -> Result<()> {
        let progress = self.try_exchange_headers(expected)?;
        self.completed(progress)
    }

    /// Ends an operation that runs from its beginning to its end: only one that is resumed is ever in between.
    fn completed(&self, progress: OpProgress) -> Result<()> {
        match progress {
            OpProgress::Done => Ok(()),
            OpProgress::Waiting(_) => Err(self.deadline.interrupted()),
        }
    }

    /// Takes everyone's header; see [`exchange_headers`](Self::exchange_headers).
    fn try_exchange_headers(
        &mut self,
        expected: impl Fn(usize, &CollectiveFingerprint) -> usize,
    ) -> Result<OpProgress> {
        match self.try_take_headers() {
            Ok(OpProgress::Done) => {}
            Ok(waiting) => return Ok(waiting),
            Err(error) => return Err(self.disagreement(error)),
        }
        if !self.do_agree() {
            return Err(self.mismatch());
        }
        for peer in self.others() {
            if let (Some(header), Some(chunk)) = (&self.headers[peer], &self.received[peer]) {
                let (found, expected) = (chunk.payload.bytes().len(), expected(peer, header));
                if found != expected {
                    return Err(self.wrong_size(peer, found, expected));
                }
            }
        }
        Ok(OpProgress::Done)
    }

    fn try_take_headers(&mut self) -> Result<OpProgress> {
        let progress = self.try_exchange_rounds()?;
        if progress != OpProgress::Done {
            return Ok(progress);
        }
        self.headers[self.rank] = Some(self.deadline.fingerprint);
        for peer in self.others() {
            if self.headers[peer].is_some() {
                continue;
            }
            match self.fetch(peer, peer..self.world_size)? {
                Some(chunk) => self.take_header(peer, chunk)?,
                None => return Ok(OpProgress::Waiting(peer..self.world_size)),
            }
            // Without its header, this rank would combine its own data in place of the peer's.
            if self.headers[peer].is_none() {
                return Err(self.unreadable(peer));
            }
        }
        Ok(OpProgress::Done)
    }

    /// Keeps the header that a rank has sent, alone or with those that it has from others.
    fn take_header(&mut self, from: usize, chunk: RecvChunk) -> Result<()> {
        let wanted = self.tag(OpPhase::Header, 0);
        let Some(header) = chunk.fingerprint else {
            return Err(self.unexpected(from, &chunk, wanted));
        };
        if chunk.tag == wanted {
            self.note_header(from, header);
            self.received[from] = Some(chunk);
            return Ok(());
        }
        match (Tag {
            index: 0,
            ..chunk.tag
        }) == wanted
        {
            true => self.take_blocks(from, &chunk).map(drop),
            false => Err(self.unexpected(from, &chunk, wanted)),
        }
    }

    fn note_header(&mut self, from: usize, header: CollectiveFingerprint) {
        self.headers[from] = Some(header);
        if !header.agrees_with(&self.deadline.fingerprint) {
            self.deadline.shorten();
        }
    }

    /// Returns `true` if every other rank sent exactly these bytes with its header. They are not kept.
    fn agree_on(&mut self, head: &[u8]) -> bool {
        let mut agree = true;
        for chunk in self.received.iter_mut().filter_map(Option::take) {
            agree &= chunk.payload.bytes() == head;
        }
        agree
    }

    /// Replaces `error` with a mismatch if the ranks disagree: that is the cause, and later failures add nothing to it.
    pub(crate) fn disagreement(&self, error: Error) -> Error {
        match self.do_agree() || error.is_mismatch() {
            true => error,
            false => self.mismatch(),
        }
    }

    fn mismatch(&self) -> Error {
        let member = |number| self.transport.member(number);
        mismatch(&self.deadline.number, self.headers, member)
    }

    /// Returns `true` if the headers that have arrived agree with this rank's.
    fn do_agree(&self) -> bool {
        let mut headers = self.headers.iter().flatten();
        headers.all(|header| header.agrees_with(&self.deadline.fingerprint))
    }

    /// Sends a chunk to every rank; an empty one is not sent.
    fn broadcast_chunk(&mut self, round: usize, bytes: &[u8]) -> Result<()> {
        if !bytes.is_empty() {
            for peer in self.ring() {
                self.send(peer, OpPhase::Gather, round, bytes)?;
            }
        }
        Ok(())
    }

    fn send(&mut self, to: usize, phase: OpPhase, round: usize, payload: &[u8]) -> Result<()> {
        let part = OutgoingChunk {
            tag: self.tag(phase, round),
            fingerprint: None,
            payload,
        };
        self.inject_fault(Point::Within(self.deadline.number.sequence))?;
        self.transport.send(to, part, self.deadline)
    }

    fn inject_fault(&self, point: Point) -> Result<()> {
        // Plans count the operations of the world.
        if self.transport.subset().is_some() {
            return Ok(());
        }
        match fail_point(self.deadline.rank, point) {
            Some(Effect::DropConnection) if self.world_size > 1 => {
                self.transport.control().inject_disconnect();
                return Err(self.deadline.disconnected(self.transport.peer(self.rank)));
            }
            Some(Effect::CorruptFrame) => self.transport.inject_corruption(),
            // The others have no place here.
            _ => {}
        }
        Ok(())
    }

    fn receive(
        &mut self,
        from: usize,
        awaited: Range<usize>,
        phase: OpPhase,
        round: usize,
        len: usize,
    ) -> Result<RecvChunk> {
        match self.try_receive(from, awaited, phase, round, len)? {
            Some(chunk) => Ok(chunk),
            // Only an operation that is resumed is ever in between.
            None => Err(self.deadline.interrupted()),
        }
    }

    /// The part that comes next from a peer; none if an operation that is resumed has to wait.
    fn try_receive(
        &mut self,
        from: usize,
        awaited: Range<usize>,
        phase: OpPhase,
        round: usize,
        len: usize,
    ) -> Result<Option<RecvChunk>> {
        let Some(chunk) = self.fetch(from, awaited)? else {
            return Ok(None);
        };
        let wanted = self.tag(phase, round);
        if chunk.tag != wanted {
            return Err(self.unexpected(from, &chunk, wanted));
        }
        let found = chunk.payload.bytes().len();
        if found != len {
            return Err(self.wrong_size(from, found, len));
        }
        Ok(Some(chunk))
    }

    fn fetch(&mut self, from: usize, awaited: Range<usize>) -> Result<Option<RecvChunk>> {
        let inbox = self.transport.inbox();
        match self.position {
            None => inbox
                .take(from, awaited, self.transport, self.deadline)
                .map(Some),
            Some(position) => {
                let (from, peers) = (self.transport.member(from), self.transport.peers());
                inbox.poll(from, position, peers, self.deadline)
            }
        }
    }

    fn tag(&self, phase: OpPhase, round: usize) -> Tag {
        Tag {
            group: self.deadline.number.group,
            sequence: self.deadline.number.sequence,
            phase,
            // Chunks are numbered within 32 bits up to an exabyte.
            index: round as u32,
        }
    }

    fn unexpected(&self, from: usize, chunk: &RecvChunk, wanted: Tag) -> Error {
        self.deadline.protocol(
            self.transport.peer(from),
            format_args!("it sent {:?}, expected {wanted:?}", chunk.tag),
        )
    }

    fn wrong_size(&self, from: usize, found: usize, expected: usize) -> Error {
        self.deadline.protocol(
            self.transport.peer(from),
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

/// The number of chunks that a rank sends ahead of the one it reduces.
const PREFETCH: usize = 4;
