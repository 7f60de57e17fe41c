//! Operations through memory that ranks share, step by step; see the README of [`shared`](crate::shared).
#![expect(
    unsafe_code,
    reason = "memory that other ranks write to has no references; see the README of `shared`"
)]

mod gather;
mod reduce;

#[cfg(test)]
mod tests;

use std::{
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

use accelerator_fault::{Effect, Point, fail_point};

use crate::{
    element::DType,
    error::{Error, Result},
    fingerprint::{CollectiveFingerprint, mismatch},
    kernel::fold,
    reduce::ReduceOp,
    shared::{Arena, Brief, Place, Spin, World},
    transport::{Peer, Transport, TransportKind, Watch},
};

/// The way of one operation through steps that all ranks take together.
///
/// A rank writes what belongs to the next step, raises its signal, and waits until all have. What
/// the others wrote can then be read until the next raise: that is what the borrows say, since
/// [`advance`](Self::advance) needs the whole.
#[derive(Debug)]
pub(crate) struct Steps<'a> {
    world: &'a World,
    transport: &'a dyn Transport,
    watch: &'a mut Watch,
    scratch: &'a mut Scratch,
    /// The last step that this rank has taken.
    step: u32,
    /// The step of the declaration.
    opened: u32,
}

impl<'a> Steps<'a> {
    pub(crate) fn new(
        world: &'a World,
        transport: &'a dyn Transport,
        watch: &'a mut Watch,
        scratch: &'a mut Scratch,
    ) -> Self {
        let step = world.own().signal().count();
        Self {
            world,
            transport,
            watch,
            scratch,
            step,
            opened: step,
        }
    }

    fn rank(&self) -> usize {
        self.world.rank()
    }

    fn size(&self) -> usize {
        self.world.size()
    }

    /// This rank's arena.
    fn arena(&self) -> &'a Arc<Arena> {
        self.world.own()
    }

    /// The other ranks, in rank order.
    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let rank = self.rank();
        (0..self.size()).filter(move |peer| *peer != rank)
    }

    /// The first step: declares the operation, with the offset of a buffer in this rank's arena or
    /// with the first data, and waits for everyone's declaration. Ranks that disagree all fail
    /// alike.
    fn open(&mut self, data: Option<usize>, first: &[u8]) -> Result<()> {
        let (own, next) = (self.world.own(), self.step.wrapping_add(1));
        self.opened = next;
        let card = own.card(next);
        let mine = card.write(self.watch.sequence, &self.watch.fingerprint, data);
        self.put(0, first);
        let kind = self.transport.kind();
        match fail_point(self.watch.rank, Point::Operation(self.watch.sequence)) {
            // Neither can happen to threads; the others have no place here.
            _ if kind == TransportKind::Threads => {}
            Some(Effect::DropConnection) => {
                self.transport.cut();
                return Err(self.watch.cut(self.peer(self.rank())));
            }
            Some(Effect::CorruptFrame) => card.spoil(),
            _ => {}
        }
        self.raise();
        for peer in self.others() {
            self.wait(peer)?;
            let side = self.brief(peer)?;
            let agreed = side.kind == mine.kind
                && side.purpose == mine.purpose
                && side.sequence == mine.sequence
                && (side.len == mine.len || !self.watch.fingerprint.kind.fixes_len());
            if !agreed {
                return Err(self.disagreement(peer));
            }
        }
        Ok(())
    }

    /// Writes into this rank's slot of the next step.
    pub(crate) fn put(&self, at: usize, bytes: &[u8]) {
        let slot = self.world.own().slot(self.step.wrapping_add(1));
        let place = slot.part(at, bytes.len());
        // SAFETY: in bounds. This rank alone writes to its slots, and nobody reads this one: it was
        // read last before the raise of this step, for which this rank has waited.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), place.start(), bytes.len());
        }
    }

    /// What a rank wrote into its slot of this step.
    pub(crate) fn view(&self, peer: usize, range: Range<usize>) -> &[u8] {
        let slot = self.world.arena(peer).slot(self.step);
        // SAFETY: the peer writes to this slot again after this rank has raised the next step,
        // which needs `&mut self`.
        unsafe { slot.part(range.start, range.len()).bytes() }
    }

    /// Combines what the ranks wrote to the same place in their slots of this step, in rank order,
    /// into `out`, which holds this rank's own values.
    pub(crate) fn fold(&mut self, dtype: DType, op: ReduceOp, at: usize, out: &mut [u8]) {
        let pointers = &mut *self.scratch;
        pointers.clear();
        for peer in 0..self.world.size() {
            pointers.sources.push(match peer == self.world.rank() {
                true => out.as_ptr(),
                false => {
                    let slot = self.world.arena(peer).slot(self.step);
                    slot.part(at, out.len()).start().cast_const()
                }
            });
        }
        let len = out.len() / dtype.size();
        // SAFETY: the slots of this step are read until this rank raises the next one, and `out` is
        // borrowed mutably. Slots and chunks start at whole elements.
        unsafe { fold(dtype, op, &pointers.sources, &[out.as_mut_ptr()], len) };
    }

    /// Whether all other ranks' slots of this step begin with the same bytes.
    fn agree_on(&self, head: &[u8]) -> bool {
        let same = |peer: usize| self.view(peer, 0..head.len()) == head;
        self.others().all(same)
    }

    /// Whether all ranks declared a buffer, some, or none.
    fn placement(&self) -> Result<Placement> {
        let mut placed = 0;
        for peer in 0..self.size() {
            placed += usize::from(self.brief(peer)?.data.is_some());
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
        let size = self.watch.fingerprint.dtype.map_or(1, DType::size);
        self.scratch.lens.clear();
        let mut most = 0;
        for peer in 0..self.size() {
            let len = usize::try_from(self.brief(peer)?.len).ok();
            let len = len.and_then(|len| len.checked_mul(size));
            let len = len.ok_or_else(|| self.spoilt(peer))?;
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
        if let Some(effect) = fail_point(self.watch.rank, Point::Within(self.watch.sequence)) {
            self.suffer(effect)?;
        }
        self.raise();
        for peer in self.others() {
            self.wait(peer)?;
        }
        Ok(())
    }

    #[cold]
    fn suffer(&self, effect: Effect) -> Result<()> {
        match (effect, self.transport.kind()) {
            // Neither can happen to threads.
            (_, TransportKind::Threads) => Ok(()),
            (Effect::DropConnection, _) => {
                self.transport.cut();
                Err(self.watch.cut(self.peer(self.rank())))
            }
            // The next part that leaves the host; steps have no checksums.
            (Effect::CorruptFrame, TransportKind::Hierarchical) => {
                self.transport.spoil();
                Ok(())
            }
            // The others have no place here.
            _ => Ok(()),
        }
    }

    fn raise(&mut self) {
        self.step = self.step.wrapping_add(1);
        self.world.own().signal().raise(self.step);
    }

    /// Waits until a peer has taken this step.
    fn wait(&mut self, peer: usize) -> Result<()> {
        let signal = self.world.signal(peer);
        let spin = self.world.spin();
        if !signal.reached(self.step) && !signal.wait(self.step, spin, Duration::ZERO) {
            return self.linger(peer);
        }
        match self.transport.inbox().is_calm() {
            true => Ok(()),
            false => self.check_abort(),
        }
    }

    /// Waits as long as there is hope.
    #[cold]
    fn linger(&mut self, peer: usize) -> Result<()> {
        let inbox = self.transport.inbox();
        inbox.await_rank(Some(self.world.member(peer)));
        let outcome = self.endure(peer);
        inbox.await_rank(None);
        outcome
    }

    fn endure(&mut self, peer: usize) -> Result<()> {
        let (step, signal) = (self.step, self.world.signal(peer));
        let inbox = self.transport.inbox();
        let who = self.world.member(peer);
        // The others' clocks begin when this rank has done its part, as with queues.
        self.watch.moved(Instant::now());
        loop {
            self.check_abort()?;
            if signal.reached(step) {
                return Ok(());
            }
            if let Err(error) = inbox.check(who, self.transport.peers(), self.watch) {
                // What ended the peer was heard after its last step, which it may have taken since.
                return match signal.reached(step) {
                    true => self.check_abort(),
                    false => Err(error),
                };
            }
            let (world, is_alone) = (self.world, self.transport.hosts().is_none());
            let missing = |watch: &Watch| {
                let missing = (peer..world.size()).filter(|x| !world.signal(*x).reached(step));
                let missing = missing.map(|x| world.member(x)).collect();
                match is_alone {
                    // Everyone has taken the step before, so nobody waits for others in this one.
                    true => missing,
                    false => inbox.roots(missing, watch),
                }
            };
            let active = |rank| self.transport.active(rank);
            let slice = self.watch.tick(missing, active)?.min(SLICE);
            let due = Instant::now() + slice;
            signal.wait(step, Spin::NONE, slice);
            self.watch.woke(due, Instant::now());
        }
    }

    fn check_abort(&self) -> Result<()> {
        let inbox = self.transport.inbox();
        inbox.check_abort(self.transport.peers(), self.watch)
    }

    /// A rank's declaration, in the step of the declarations: in a later one a rank that is done
    /// may declare its next operation.
    fn brief(&self, peer: usize) -> Result<Brief> {
        debug_assert_eq!(
            self.step, self.opened,
            "declarations are read in their step"
        );
        let card = self.world.arena(peer).card(self.opened);
        card.read().ok_or_else(|| self.spoilt(peer))
    }

    /// Waits a while for what the others declared, and tells all of it.
    #[cold]
    fn disagreement(&mut self, first: usize) -> Error {
        self.watch.hurry();
        let mut sides: Vec<Option<CollectiveFingerprint>> =
            vec![None; self.transport.peers().len()];
        for peer in 0..self.size() {
            if peer > first && peer != self.rank() {
                match self.wait(peer) {
                    Ok(()) => {}
                    Err(error) if error.is_mismatch() => return error,
                    // The disagreement is the cause; who comes late to it adds nothing.
                    Err(_) => break,
                }
            }
            match self.world.arena(peer).card(self.opened).fingerprint() {
                Some(side) => sides[self.world.member(peer)] = Some(side),
                None => return self.spoilt(peer),
            }
        }
        mismatch(self.watch.sequence, &sides)
    }

    fn spoilt(&self, peer: usize) -> Error {
        let what = "it sent a wrong checksum with its declaration";
        self.watch.protocol(self.peer(peer), what)
    }

    fn peer(&self, peer: usize) -> &'a Peer {
        &self.transport.peers()[self.world.member(peer)]
    }
}

/// Where the data of an operation lie.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Placement {
    /// Each rank's in a buffer that all can reach.
    All,
    /// Some ranks' in such a buffer.
    Some,
    /// Nobody's.
    None,
}

/// Lists that operations use again.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    places: Vec<Place>,
    sources: Vec<*const u8>,
    targets: Vec<*mut u8>,
    lens: Vec<usize>,
}

// SAFETY: between operations the pointers mean nothing; within one, who uses them proves that it
// may.
unsafe impl Send for Scratch {}

impl Scratch {
    fn clear(&mut self) {
        self.sources.clear();
        self.targets.clear();
    }
}

/// How long a waiting rank sleeps before it asks whether the others still live.
const SLICE: Duration = Duration::from_millis(10);
