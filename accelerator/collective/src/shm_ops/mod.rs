//! Operations through memory that ranks share, step by step; see the README of [`shm`](crate::shm).
#![expect(
    unsafe_code,
    reason = "memory that other ranks write to has no references; see the README of `shm`"
)]

mod algorithms;

#[cfg(test)]
mod tests;

use std::{
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

use accelerator_fault::{Effect, Point, fail_point};

use crate::{
    element::{DType, ReduceOp},
    error::{Error, Result},
    fingerprint::{CollectiveFingerprint, mismatch},
    kernel::fold,
    shm::{Arena, HeaderDigest, MemoryRange, ShmPeers, Spin},
    topology::TransportKind,
    transport::{LastOp, OpDeadline, Peer, Transport},
};

/// The way of one operation through steps that all ranks take together.
///
/// A rank writes what belongs to the next step, publishes its counter, and waits until all have. What
/// the others wrote can then be read until the next step: that is what the borrows say, since
/// [`advance`](Self::advance) needs the whole.
#[derive(Debug)]
pub(crate) struct ShmOp<'a> {
    peers: &'a ShmPeers,
    transport: &'a Transport,
    deadline: &'a mut OpDeadline,
    scratch: &'a mut ShmScratch,
    step: u32,
    header_step: u32,
}

impl<'a> ShmOp<'a> {
    pub(crate) fn new(
        peers: &'a ShmPeers,
        transport: &'a Transport,
        deadline: &'a mut OpDeadline,
        scratch: &'a mut ShmScratch,
    ) -> Self {
        let step = peers.own().counter().count();
        Self {
            peers,
            transport,
            deadline,
            scratch,
            step,
            header_step: step,
        }
    }

    fn rank(&self) -> usize {
        self.peers.rank()
    }

    fn size(&self) -> usize {
        self.peers.size()
    }

    fn arena(&self) -> &'a Arc<Arena> {
        self.peers.own()
    }

    /// The other ranks, in rank order.
    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let rank = self.rank();
        (0..self.size()).filter(move |peer| *peer != rank)
    }

    /// The first step: publishes the header, with the offset of a buffer in this rank's arena or
    /// with the first data, and waits for everyone's header. Ranks that disagree all fail
    /// alike.
    fn publish_header(&mut self, data: Option<usize>, first: &[u8]) -> Result<()> {
        let (own, next) = (self.peers.own(), self.step.wrapping_add(1));
        self.header_step = next;
        let header = own.header(next);
        let sequence = self.deadline.number.sequence;
        let mine = header.write(sequence, &self.deadline.fingerprint, data);
        self.put(0, first);
        let kind = self.transport.kind();
        match self.fault(Point::Operation(sequence)) {
            // Neither can happen to threads; the others have no place here.
            _ if kind == TransportKind::Threads => {}
            Some(Effect::DropConnection) => {
                self.transport.control().inject_disconnect();
                return Err(self.deadline.disconnected(self.peer(self.rank())));
            }
            Some(Effect::CorruptFrame) => header.inject_corruption(),
            _ => {}
        }
        self.publish();
        for peer in self.others() {
            self.wait(peer)?;
            let side = self.digest(peer)?;
            let agreed = side.kind == mine.kind
                && side.purpose == mine.purpose
                && side.sequence == mine.sequence
                && (side.len == mine.len || !self.deadline.fingerprint.kind.fixes_len());
            if !agreed {
                return Err(self.disagreement(peer));
            }
        }
        Ok(())
    }

    /// Writes into this rank's slot of the next step.
    pub(crate) fn put(&self, at: usize, bytes: &[u8]) {
        let slot = self.peers.own().slot(self.step.wrapping_add(1));
        let place = slot.part(at, bytes.len());
        // SAFETY: in bounds. This rank alone writes to its slots, and nobody reads this one: it was
        // read last before this step was published, for which this rank has waited.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), place.start(), bytes.len());
        }
    }

    /// Returns what a rank wrote into its slot of this step.
    pub(crate) fn view(&self, peer: usize, range: Range<usize>) -> &[u8] {
        let slot = self.peers.arena(peer).slot(self.step);
        // SAFETY: the peer writes to this slot again after this rank has published the next step,
        // which needs `&mut self`.
        unsafe { slot.part(range.start, range.len()).bytes() }
    }

    /// Combines what the ranks wrote to the same place in their slots of this step, in rank order,
    /// into `out`, which holds this rank's own values.
    pub(crate) fn fold(&mut self, dtype: DType, op: ReduceOp, at: usize, out: &mut [u8]) {
        let pointers = &mut *self.scratch;
        pointers.clear();
        for peer in 0..self.peers.size() {
            pointers.sources.push(match peer == self.peers.rank() {
                true => out.as_ptr(),
                false => {
                    let slot = self.peers.arena(peer).slot(self.step);
                    slot.part(at, out.len()).start().cast_const()
                }
            });
        }
        let len = out.len() / dtype.size();
        // SAFETY: the slots of this step are read until this rank publishes the next one, and `out` is
        // borrowed mutably. Slots and chunks start at whole elements.
        unsafe { fold(dtype, op, &pointers.sources, &[out.as_mut_ptr()], len) };
    }

    /// Returns `true` if all other ranks' slots of this step begin with the bytes of `head`.
    fn agree_on(&self, head: &[u8]) -> bool {
        let same = |peer: usize| self.view(peer, 0..head.len()) == head;
        self.others().all(same)
    }

    /// Finds out if all ranks declared a buffer, some, or none.
    fn placement(&self) -> Result<Placement> {
        let mut placed = 0;
        for peer in 0..self.size() {
            placed += usize::from(self.digest(peer)?.data.is_some());
        }
        Ok(match placed {
            0 => Placement::None,
            _ if placed == self.size() => Placement::All,
            _ => Placement::Some,
        })
    }

    /// Notes how many bytes each rank declared, for [`declared`](Self::declared), and gives the
    /// most.
    fn measure(&mut self) -> Result<usize> {
        let size = self.deadline.fingerprint.dtype.map_or(1, DType::size);
        self.scratch.lens.clear();
        let mut most = 0;
        for peer in 0..self.size() {
            let len = usize::try_from(self.digest(peer)?.len).ok();
            let len = len.and_then(|len| len.checked_mul(size));
            let len = len.ok_or_else(|| self.bad_header(peer))?;
            self.scratch.lens.push(len);
            most = most.max(len);
        }
        Ok(most)
    }

    /// The number of bytes that a rank declared.
    fn declared(&self, peer: usize) -> usize {
        self.scratch.lens[peer]
    }

    /// The next step: whatever was put becomes readable, for everyone.
    pub(crate) fn advance(&mut self) -> Result<()> {
        let point = Point::Within(self.deadline.number.sequence);
        if let Some(effect) = self.fault(point) {
            self.apply_fault(effect)?;
        }
        self.publish();
        for peer in self.others() {
            self.wait(peer)?;
        }
        Ok(())
    }

    /// The fault that is planned for here. Plans count the operations of the world.
    fn fault(&self, point: Point) -> Option<Effect> {
        match self.transport.subset() {
            None => fail_point(self.deadline.rank, point),
            Some(_) => None,
        }
    }

    #[cold]
    fn apply_fault(&self, effect: Effect) -> Result<()> {
        match (effect, self.transport.kind()) {
            // Neither can happen to threads.
            (_, TransportKind::Threads) => Ok(()),
            (Effect::DropConnection, _) => {
                self.transport.control().inject_disconnect();
                Err(self.deadline.disconnected(self.peer(self.rank())))
            }
            // The next part that leaves the host; steps have no checksums.
            (Effect::CorruptFrame, TransportKind::Hierarchical) => {
                self.transport.inject_corruption();
                Ok(())
            }
            // The others have no place here.
            _ => Ok(()),
        }
    }

    fn publish(&mut self) {
        self.step = self.step.wrapping_add(1);
        self.peers.own().counter().publish(self.step);
    }

    /// Waits until a peer has taken this step.
    fn wait(&mut self, peer: usize) -> Result<()> {
        let counter = self.peers.counter(peer);
        let spin = self.peers.spin();
        if !counter.reached(self.step) && !counter.wait(self.step, spin, Duration::ZERO) {
            return self.wait_slow(peer);
        }
        match self.transport.inbox().has_no_failures() {
            true => Ok(()),
            false => self.check_abort(),
        }
    }

    /// Waits as long as there is hope.
    #[cold]
    fn wait_slow(&mut self, peer: usize) -> Result<()> {
        let inbox = self.transport.inbox();
        let group = self.deadline.number.group;
        inbox.await_rank(group, Some(self.peer(peer).rank));
        let outcome = self.wait_until_lost(peer);
        inbox.await_rank(group, None);
        outcome
    }

    fn wait_until_lost(&mut self, peer: usize) -> Result<()> {
        let (step, counter) = (self.step, self.peers.counter(peer));
        let inbox = self.transport.inbox();
        let peer_rank = self.peer(peer).rank;
        // The others' clocks begin when this rank has done its part, as with queues.
        self.deadline.on_progress(Instant::now());
        loop {
            self.check_abort()?;
            if counter.reached(step) {
                return Ok(());
            }
            if let Err(error) = inbox.check(peer_rank, self.transport.peers(), self.deadline) {
                // What ended the peer was heard after its last step, which it may have taken since.
                return match counter.reached(step) {
                    true => self.check_abort(),
                    false => Err(error),
                };
            }
            let (peers, transport) = (self.peers, self.transport);
            let is_alone = transport.hosts().is_none();
            let missing = |deadline: &OpDeadline| {
                let missing = (peer..peers.size()).filter(|x| !peers.counter(*x).reached(step));
                let missing = missing.map(|x| transport.member(peers.group_rank(x)));
                let missing = missing.collect();
                match is_alone {
                    // Everyone has taken the step before, so nobody waits for others in this one.
                    true => missing,
                    false => inbox.roots(missing, deadline),
                }
            };
            let active = |rank| self.transport.control().last_activity(rank);
            let all = self.transport.peers();
            let place = |rank| peers.place(transport.number_of(rank)?);
            let group = self.deadline.number.group;
            let last = |rank| match place(rank) {
                Some(place) => peers
                    .arena(place)
                    .last_op()
                    .map(|(sequence, fingerprint)| LastOp {
                        group,
                        sequence,
                        fingerprint,
                        at: None,
                    }),
                None => inbox.last_op(rank),
            };
            let due = self.deadline.tick(SLICE, missing, active, all, last)?;
            let slice = due.saturating_duration_since(Instant::now());
            counter.wait(step, Spin::NONE, slice);
        }
    }

    fn check_abort(&self) -> Result<()> {
        let inbox = self.transport.inbox();
        inbox.check_abort(self.transport.peers(), self.deadline)
    }

    /// A rank's header, in the step of the headers: in a later one a rank that is done may publish
    /// the header of its next operation.
    fn digest(&self, peer: usize) -> Result<HeaderDigest> {
        debug_assert_eq!(
            self.step, self.header_step,
            "headers are read in their step"
        );
        let header = self.peers.arena(peer).header(self.header_step);
        header.read().ok_or_else(|| self.bad_header(peer))
    }

    /// Waits a while for what the others declared, and tells all of it.
    #[cold]
    fn disagreement(&mut self, first: usize) -> Error {
        self.deadline.shorten();
        let mut sides: Vec<Option<CollectiveFingerprint>> = vec![None; self.transport.size()];
        for peer in 0..self.size() {
            if peer > first && peer != self.rank() {
                match self.wait(peer) {
                    Ok(()) => {}
                    Err(error) if error.is_mismatch() => return error,
                    // The disagreement is the cause; a rank that comes late to it adds nothing.
                    Err(_) => break,
                }
            }
            match self
                .peers
                .arena(peer)
                .header(self.header_step)
                .fingerprint()
            {
                Some(side) => sides[self.peers.group_rank(peer)] = Some(side),
                None => return self.bad_header(peer),
            }
        }
        let member = |number| self.transport.member(number);
        mismatch(&self.deadline.number, &sides, member)
    }

    fn bad_header(&self, peer: usize) -> Error {
        let what = "it sent a wrong checksum with its header";
        self.deadline.protocol(self.peer(peer), what)
    }

    fn peer(&self, peer: usize) -> &'a Peer {
        self.transport.peer(self.peers.group_rank(peer))
    }
}

/// The placement of an operation's data in the ranks' memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Placement {
    /// Each rank's data lie in a buffer that all can reach.
    All,
    /// Some ranks' data lie in such a buffer.
    Some,
    /// No rank's data lie in such a buffer.
    None,
}

/// Lists that operations use again.
#[derive(Debug, Default)]
pub(crate) struct ShmScratch {
    places: Vec<MemoryRange>,
    sources: Vec<*const u8>,
    targets: Vec<*mut u8>,
    lens: Vec<usize>,
}

// SAFETY: between operations the pointers mean nothing; within one, who uses them proves that it
// may.
unsafe impl Send for ShmScratch {}

impl ShmScratch {
    fn clear(&mut self) {
        self.sources.clear();
        self.targets.clear();
    }
}

/// The time that a waiting rank sleeps before it asks if the others still live.
const SLICE: Duration = Duration::from_millis(10);
