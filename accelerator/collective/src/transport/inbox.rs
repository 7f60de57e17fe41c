//! Where the parts for one rank wait for its engine.

use std::{
    collections::VecDeque,
    ops::Range,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use super::{
    Abort, Parting, Peer, Tag, Watch,
    pool::{Chunk, Pool},
    watch::LATE,
};
use crate::{
    contract::Contract,
    error::{Certainty, Culprit, Error, Result},
    reduce::Share,
};

/// The parts for one rank, one queue for each sender, and what is known of the senders.
#[derive(Debug)]
pub(crate) struct Inbox {
    state: Mutex<State>,
    /// Something happened that the engine may wait for.
    arrival: Condvar,
    /// A queue has become shorter.
    room: Condvar,
    pool: Arc<Pool>,
    /// Whether there is anything that could end an operation whose data are here.
    troubled: AtomicBool,
    /// The rank for which this one waits, and one; zero while it waits for nobody.
    awaited: AtomicUsize,
}

impl Inbox {
    pub(crate) fn new(world_size: usize) -> Self {
        Self {
            state: Mutex::new(State {
                queues: (0..world_size).map(|_| Queue::default()).collect(),
                blames: Vec::new(),
                closed: false,
                version: 0,
                awake: None,
                slept: None,
            }),
            arrival: Condvar::new(),
            room: Condvar::new(),
            pool: Arc::new(Pool::default()),
            troubled: AtomicBool::new(false),
            awaited: AtomicUsize::new(0),
        }
    }

    /// Memory for a part that is about to arrive.
    pub(crate) fn chunk(&self, len: usize) -> Chunk {
        self.pool.chunk(len)
    }

    /// Puts a part into the queue of its sender; after [`close`](Self::close) it is dropped.
    pub(crate) fn deposit(&self, from: usize, parcel: Parcel) {
        let mut state = self.lock();
        if state.closed {
            return;
        }
        let queue = &mut state.queues[from];
        queue.bytes += parcel.weight();
        queue.parcels.push_back(parcel);
        self.tell(state);
    }

    /// Waits a while for room in the queue of a sender, and says whether there is some.
    pub(crate) fn has_room(&self, from: usize, pause: Duration) -> bool {
        let full = |state: &mut State| !state.closed && state.queues[from].bytes >= QUEUE_BYTES;
        let state = self.lock();
        let (mut state, _) = self
            .room
            .wait_timeout_while(state, pause, |state| full(state))
            .unwrap_or_else(PoisonError::into_inner);
        !full(&mut state)
    }

    /// Notes that a peer said goodbye.
    pub(crate) fn left(&self, rank: usize, parting: Parting) {
        let mut state = self.lock();
        state.queues[rank].standing = match parting {
            Parting::Closed => Standing::Left,
            Parting::Dropped => Standing::Dropped,
        };
        self.tell(state);
    }

    /// Notes that a peer is gone without a word, unless it has said its last word before.
    pub(crate) fn lost(&self, rank: usize, cause: impl Into<String>, certainty: Certainty) {
        let mut state = self.lock();
        if state.queues[rank].standing != Standing::Present {
            return;
        }
        state.queues[rank].standing = Standing::Lost;
        let cause = cause.into();
        state.attend(Instant::now());
        let cause = match state.slept {
            // Who ended a connection meanwhile has given this rank up.
            Some((woke, slept))
                if certainty == Certainty::Guessed && woke.elapsed() < AFTERMATH =>
            {
                Cause::Overslept(slept, rank, cause)
            }
            _ => Cause::Lost(rank, cause, certainty),
        };
        state.blame(None, cause);
        self.troubled.store(true, Ordering::Release);
        self.tell(state);
    }

    /// Notes that a peer sends what the protocol does not allow.
    pub(crate) fn broke(&self, rank: usize, what: String) {
        let mut state = self.lock();
        state.queues[rank].standing = Standing::Lost;
        state.blame(Some(0), Cause::Broke(rank, what));
        self.troubled.store(true, Ordering::Release);
        self.tell(state);
    }

    /// Notes that a peer has given up.
    pub(crate) fn aborted(&self, rank: usize, abort: Abort) {
        let mut state = self.lock();
        let cause = match abort.error.culprit() {
            // It tells its own end; who hears it says in which operation that was.
            Some(culprit) if culprit.rank() == rank && abort.error.is_peer_lost() => {
                state.queues[rank].standing = Standing::Lost;
                Cause::Lost(rank, culprit.cause().to_owned(), culprit.certainty)
            }
            culprit => {
                let accused = culprit.and_then(|x| state.queues.get_mut(x.rank()));
                if let Some(queue) = accused {
                    queue.accused = true;
                }
                state.queues[rank].standing = Standing::GaveUp;
                Cause::Told(rank, abort.error)
            }
        };
        state.blame(Some(abort.sequence), cause);
        self.troubled.store(true, Ordering::Release);
        self.tell(state);
    }

    /// Notes for which rank this one waits, so that others do not take it for the cause.
    pub(crate) fn await_rank(&self, rank: Option<usize>) {
        let code = rank.map_or(0, |rank| rank + 1);
        self.awaited.store(code, Ordering::Relaxed);
    }

    /// The rank for which this one waits.
    pub(crate) fn awaited(&self) -> Option<usize> {
        self.awaited.load(Ordering::Relaxed).checked_sub(1)
    }

    /// Notes for which rank a peer waits.
    pub(crate) fn waits(&self, rank: usize, awaited: Option<usize>) {
        let mut state = self.lock();
        let world_size = state.queues.len();
        state.queues[rank].awaited = awaited.filter(|rank| *rank < world_size);
    }

    /// Those for whom `missing` wait in the end, and who wait for nobody themselves.
    pub(crate) fn roots(&self, me: usize, missing: Vec<usize>) -> Vec<usize> {
        self.lock().roots(me, missing)
    }

    /// Whether a peer has neither said its last word nor been given up.
    pub(crate) fn is_present(&self, rank: usize) -> bool {
        self.lock().queues[rank].standing == Standing::Present
    }

    /// Waits a while until each peer has said its last word or is gone, and gives those that are
    /// neither.
    pub(crate) fn last_words(&self, me: usize, patience: Duration) -> Vec<usize> {
        let until = Instant::now() + patience;
        let mut state = self.lock();
        loop {
            let queues = state.queues.iter().enumerate();
            let present: Vec<usize> = queues
                .filter(|(rank, queue)| *rank != me && queue.standing == Standing::Present)
                .map(|(rank, _)| rank)
                .collect();
            let now = Instant::now();
            if present.is_empty() || now >= until {
                return present;
            }
            // Another thread may take the notice, so this one looks by itself, too.
            state = self.wait(state, until.min(now + GRACE / 4));
        }
    }

    /// The ranks that are gone, by their own word or without one, or by the word of others.
    pub(crate) fn gone(&self) -> Vec<usize> {
        let state = self.lock();
        let queues = state.queues.iter().enumerate();
        queues
            .filter(|(_, queue)| queue.is_gone())
            .map(|(rank, _)| rank)
            .collect()
    }

    /// Notes that this process runs, and will say so again soon. Where it did not for `limit`,
    /// the others have reason to give it up.
    pub(crate) fn awake(&self, limit: Duration) {
        let now = Instant::now();
        let mut state = self.lock();
        state.attend(now);
        state.awake = Some((now, limit));
    }

    /// Drops what is there and whatever still comes.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        self.troubled.store(true, Ordering::Release);
        state.version += 1;
        for queue in &mut state.queues {
            queue.parcels.clear();
            queue.bytes = 0;
        }
        drop(state);
        self.room.notify_all();
        self.arrival.notify_all();
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.lock().closed
    }

    /// The next part from a peer. `awaited` are the ranks from which the engine wants a part
    /// now, in this order; a timeout names those that have sent none.
    pub(crate) fn take(
        &self,
        from: usize,
        awaited: Range<usize>,
        peers: &[Peer],
        watch: &mut Watch,
    ) -> Result<Parcel> {
        let mut state = self.lock();
        loop {
            if let Some(parcel) = state.attempt(from, Position::First, peers, watch)? {
                self.taken(state, watch);
                return Ok(parcel);
            }
            state = self.pause(state, awaited.clone(), watch)?;
        }
    }

    /// The next part of an operation from a peer, where it has come.
    pub(crate) fn poll(
        &self,
        from: usize,
        place: Position,
        peers: &[Peer],
        watch: &mut Watch,
    ) -> Result<Option<Parcel>> {
        let mut state = self.lock();
        let parcel = state.attempt(from, place, peers, watch)?;
        if parcel.is_some() {
            self.taken(state, watch);
        }
        Ok(parcel)
    }

    /// Counts what happened here.
    pub(crate) fn version(&self) -> u64 {
        self.lock().version
    }

    /// Waits until something happens that was not counted in `version`, or it is time to ask
    /// again. `awaited` as for [`take`](Self::take).
    pub(crate) fn wait_for_news(
        &self,
        version: u64,
        awaited: Range<usize>,
        watch: &mut Watch,
    ) -> Result<()> {
        let state = self.lock();
        if state.version == version {
            drop(self.pause(state, awaited, watch)?);
        }
        Ok(())
    }

    /// Ends the wait of [`wait_for_news`](Self::wait_for_news).
    pub(crate) fn nudge(&self) {
        self.tell(self.lock());
    }

    /// Waits until something may have happened.
    fn pause<'a>(
        &self,
        state: MutexGuard<'a, State>,
        awaited: Range<usize>,
        watch: &mut Watch,
    ) -> Result<MutexGuard<'a, State>> {
        let (rank, sequence) = (watch.rank, watch.sequence);
        let missing = awaited.filter(|peer| *peer != rank && !state.queues[*peer].holds(sequence));
        self.await_rank(missing.clone().next());
        let pause = watch.tick(|| state.roots(rank, missing.clone().collect()))?;
        let due = Instant::now() + state.pause(pause);
        let state = self.wait(state, due);
        watch.woke(due, Instant::now());
        Ok(state)
    }

    fn taken(&self, state: MutexGuard<'_, State>, watch: &mut Watch) {
        drop(state);
        self.await_rank(None);
        self.room.notify_all();
        watch.moved(Instant::now());
    }

    fn tell(&self, mut state: MutexGuard<'_, State>) {
        state.version += 1;
        drop(state);
        self.arrival.notify_one();
    }

    /// Whether a sender should go on: `Ok` while nothing speaks against it.
    pub(crate) fn check(&self, to: usize, peers: &[Peer], watch: &Watch) -> Result<()> {
        self.lock().check(to, peers, watch)
    }

    /// Whether nothing is known that could end an operation whose data are here.
    pub(crate) fn is_calm(&self) -> bool {
        !self.troubled.load(Ordering::Acquire)
    }

    /// Fails where a peer gave up this operation, or an earlier one, or this rank has left.
    pub(crate) fn check_abort(&self, peers: &[Peer], watch: &Watch) -> Result<()> {
        self.lock().check_abort(peers, watch)
    }

    /// Waits a while for news about a peer to which nothing can be sent any more.
    pub(crate) fn verdict(&self, to: usize, peers: &[Peer], watch: &Watch) -> Result<()> {
        let until = Instant::now() + VERDICT;
        let mut state = self.lock();
        loop {
            state.check(to, peers, watch)?;
            if Instant::now() >= until {
                return Ok(());
            }
            state = self.wait(state, until);
        }
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>, until: Instant) -> MutexGuard<'a, State> {
        let pause = until.saturating_duration_since(Instant::now());
        let waited = self.arrival.wait_timeout(state, pause);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every change leaves the state whole, so a panic elsewhere does not spoil it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where an operation stands among those of its rank that are under way.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Position {
    /// All before it are done.
    First,
    Later,
}

/// A part that has arrived.
#[derive(Debug)]
pub(crate) struct Parcel {
    pub(crate) tag: Tag,
    pub(crate) contract: Option<Contract>,
    pub(crate) chunk: Chunk,
}

impl Parcel {
    /// How much of its queue it takes: its content, and what it costs to keep it. A peer that
    /// sends parts without content fills its queue too.
    fn weight(&self) -> usize {
        const KEPT: usize = 512;
        self.chunk.bytes().len() + KEPT
    }
}

/// In a reduction, what has arrived from each rank; nothing for the rank itself.
impl Share for Option<Parcel> {
    fn bytes(&self) -> Option<&[u8]> {
        self.as_ref().map(|parcel| parcel.chunk.bytes())
    }
}

#[derive(Debug)]
struct State {
    queues: Vec<Queue>,
    /// The failures that became known, in that order: the later ones are mostly collateral of
    /// the first.
    blames: Vec<Blame>,
    closed: bool,
    /// Grows with everything that happens.
    version: u64,
    /// When this process last said that it runs, and after how long without that the others may
    /// give it up.
    awake: Option<(Instant, Duration)>,
    /// When it ran again after it had not for too long, and for how long.
    slept: Option<(Instant, Duration)>,
}

impl State {
    fn blame(&mut self, sequence: Option<u64>, cause: Cause) {
        if self.blames.len() < BLAMES {
            self.blames.push(Blame {
                sequence,
                cause,
                since: Instant::now(),
            });
        }
    }

    fn attend(&mut self, now: Instant) {
        if let Some((last, limit)) = self.awake {
            let slept = now.saturating_duration_since(last);
            if slept > limit {
                self.slept = Some((now, slept));
                self.awake = Some((now, limit));
            }
        }
    }

    /// See [`Inbox::roots`]. Ranks that wait in a circle, or for this one, are taken as they are.
    fn roots(&self, me: usize, missing: Vec<usize>) -> Vec<usize> {
        let root = |rank: usize| {
            let mut last = rank;
            for _ in &self.queues {
                match self.queues.get(last).and_then(|queue| queue.awaited) {
                    None => return last,
                    Some(next) if next == me => return rank,
                    Some(next) => last = next,
                }
            }
            rank
        };
        let mut roots: Vec<usize> = missing.into_iter().map(root).collect();
        roots.sort_unstable();
        roots.dedup();
        roots
    }

    /// The failure that is told: what others say about this rank itself, else the first.
    fn cause(&self, me: usize) -> Option<&Blame> {
        let about_me = |blame: &&Blame| match &blame.cause {
            Cause::Told(_, error) => error.culprit().is_some_and(|x| x.rank() == me),
            _ => false,
        };
        self.blames.iter().find(about_me).or(self.blames.first())
    }

    /// Why a rank is lost, from those who know best.
    fn settled(&self, rank: usize) -> Option<&Culprit> {
        let mut told = self.blames.iter().filter_map(|blame| match &blame.cause {
            Cause::Told(_, error) => error.culprit(),
            _ => None,
        });
        told.find(|x| x.rank() == rank && x.certainty == Certainty::Settled)
    }

    fn error(&self, cause: &Cause, peers: &[Peer], watch: &Watch) -> Error {
        let me = &peers[watch.rank];
        match cause {
            Cause::Lost(rank, cause, certainty) => match self.settled(*rank) {
                Some(culprit) if *certainty == Certainty::Guessed => {
                    watch.lost(&peers[*rank], culprit.cause(), Certainty::Settled)
                }
                _ => watch.lost(&peers[*rank], cause, *certainty),
            },
            Cause::Overslept(slept, rank, seen) => {
                let seen = format!("rank {rank} gave it up ({seen})");
                watch.overslept(me, *slept, &seen)
            }
            Cause::Broke(rank, what) => watch.protocol(&peers[*rank], what),
            Cause::Told(by, error) => match error.culprit() {
                Some(culprit) if culprit.rank() == watch.rank && error.is_peer_lost() => {
                    watch.given_up(me, *by, culprit.cause())
                }
                _ => error.clone(),
            },
        }
    }

    /// The next part from a peer, unless something speaks against going on.
    fn attempt(
        &mut self,
        from: usize,
        place: Position,
        peers: &[Peer],
        watch: &Watch,
    ) -> Result<Option<Parcel>> {
        self.check_abort(peers, watch)?;
        let parcel = self.queues[from].pop(place, watch.sequence);
        if parcel.is_none() {
            self.check(from, peers, watch)?;
        }
        Ok(parcel)
    }

    /// Fails where a peer gave up this operation, or an earlier one, even if its data are here:
    /// a rank that comes too late must not take the operation for done.
    fn check_abort(&self, peers: &[Peer], watch: &Watch) -> Result<()> {
        match self.cause(watch.rank) {
            Some(Blame {
                sequence: Some(at),
                cause,
                ..
            }) if *at <= watch.sequence => Err(self.error(cause, peers, watch)),
            _ if self.closed => Err(watch.interrupted()),
            _ => Ok(()),
        }
    }

    /// Fails where nothing can come from `from` any more, or where a failure elsewhere dooms the
    /// operation. A failure elsewhere gets a moment of grace, since a peer that has done its part
    /// of this operation may be gone already while the others complete it; so does the suspicion
    /// that this rank was given up, since those who did so may say why.
    fn check(&self, from: usize, peers: &[Peer], watch: &Watch) -> Result<()> {
        self.check_abort(peers, watch)?;
        let standing = self.queues[from].standing;
        match self.cause(watch.rank) {
            Some(blame) => {
                let suspected = matches!(blame.cause, Cause::Overslept(..));
                if blame.since.elapsed() >= GRACE || standing != Standing::Present && !suspected {
                    return Err(self.error(&blame.cause, peers, watch));
                }
                Ok(())
            }
            None => match standing {
                Standing::Left => Err(watch.left(&peers[from])),
                Standing::Dropped => Err(watch.lost(&peers[from], DROPPED, Certainty::Partial)),
                Standing::GaveUp | Standing::Lost | Standing::Present => Ok(()),
            },
        }
    }

    /// Shortens a pause: a process that was stopped notices it by waking late, and where a moment
    /// of grace runs its end matters.
    fn pause(&self, pause: Duration) -> Duration {
        match self.blames.is_empty() {
            false => pause.min(GRACE / 4),
            true => pause.min(LATE),
        }
    }
}

#[derive(Debug, Default)]
struct Queue {
    parcels: VecDeque<Parcel>,
    bytes: usize,
    standing: Standing,
    /// For whom this rank waits, as it said last.
    awaited: Option<usize>,
    /// Whether another rank says that this one is to blame.
    accused: bool,
}

impl Queue {
    fn is_gone(&self) -> bool {
        let by_itself = match self.standing {
            Standing::Dropped | Standing::Left | Standing::Lost => true,
            Standing::GaveUp | Standing::Present => false,
        };
        by_itself || self.accused
    }

    /// The next part of an operation. A part that has no place there is given too, for an error
    /// to be made of it: that of an operation which is over, and that of one which the peer
    /// begins only when it is done with this one.
    fn pop(&mut self, place: Position, sequence: u64) -> Option<Parcel> {
        let belongs = |parcel: &Parcel| {
            let found = parcel.tag.sequence;
            match place {
                Position::First => found <= sequence || found >= sequence + FLIGHTS as u64,
                Position::Later => found == sequence,
            }
        };
        let index = self.parcels.iter().position(belongs)?;
        let parcel = self.parcels.remove(index)?;
        self.bytes -= parcel.weight();
        Some(parcel)
    }

    fn holds(&self, sequence: u64) -> bool {
        self.parcels
            .iter()
            .any(|parcel| parcel.tag.sequence == sequence)
    }
}

#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
enum Standing {
    Dropped,
    /// It said that its group failed, and not by its own fault: it may still run.
    GaveUp,
    Left,
    Lost,
    #[default]
    Present,
}

#[derive(Debug)]
struct Blame {
    /// The operation in which a peer gave up.
    sequence: Option<u64>,
    cause: Cause,
    since: Instant,
}

#[derive(Debug)]
enum Cause {
    /// This rank sends what is not allowed.
    Broke(usize, String),
    /// This rank is gone, by its own word or without one.
    Lost(usize, String, Certainty),
    /// This process did not run for so long, and then found that this rank was gone.
    Overslept(Duration, usize, String),
    /// This rank says that another one failed, or that all disagree.
    Told(usize, Error),
}

/// How many operations of one rank are under way at most.
pub(crate) const FLIGHTS: usize = 4;

/// At this many bytes the queue of one sender is full. The parts of a reduction that a peer sends
/// before this rank has taken them are at most 16 chunks, for each operation under way, so only a
/// broadcast to a slow rank ever gets there: a part that is needed never waits behind a full queue
/// of parts that are not.
const QUEUE_BYTES: usize = 128 * super::CHUNK;

const GRACE: Duration = Duration::from_millis(100);

/// How long a rank whose connection broke waits for the reason.
const VERDICT: Duration = Duration::from_millis(500);

/// How long after this process ran again the end of a connection is taken for the answer to its
/// silence.
const AFTERMATH: Duration = Duration::from_secs(2);

/// How many failures are kept.
const BLAMES: usize = 64;

const DROPPED: &str =
    "it dropped its group without closing it: its program returned early or failed";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        contract::{Call, Site},
        error::Kind,
        transport::{Patience, Place, Stage},
    };

    #[test]
    fn who_is_accused_is_gone_and_who_accuses_is_not() {
        let inbox = Inbox::new(5);
        let abort = |rank: usize| {
            let peer = Peer {
                rank,
                place: Place::Thread,
            };
            let culprit = peer.culprit("it died", Certainty::Settled);
            Abort {
                sequence: 3,
                error: Error::blaming(Kind::PeerLost, culprit, "it died"),
            }
        };
        assert!(inbox.gone().is_empty());
        inbox.aborted(1, abort(2));
        assert_eq!(inbox.gone(), [2]);
        // This rank, 0, is accused, and an error may name a rank that is none.
        inbox.aborted(1, abort(0));
        inbox.aborted(1, abort(9));
        inbox.aborted(3, abort(3));
        assert_eq!(inbox.gone(), [0, 2, 3]);
        // Its connection ends after its last word.
        inbox.lost(1, "its connection ended", Certainty::Guessed);
        assert_eq!(inbox.gone(), [0, 2, 3]);
        assert_eq!(inbox.last_words(0, Duration::ZERO), [2, 4]);
        inbox.left(4, Parting::Dropped);
        assert_eq!(inbox.gone(), [0, 2, 3, 4]);
    }

    #[test]
    fn who_waits_for_another_is_not_the_one_that_is_missing() {
        let inbox = Inbox::new(5);
        assert_eq!(inbox.roots(0, vec![1, 2]), [1, 2]);
        inbox.waits(1, Some(2));
        inbox.waits(2, Some(3));
        assert_eq!(inbox.roots(0, vec![1, 2, 4]), [3, 4]);
        inbox.waits(2, None);
        assert_eq!(inbox.roots(0, vec![1]), [2]);
        // A circle, one through this rank, and a rank that is none.
        inbox.waits(2, Some(1));
        inbox.waits(4, Some(0));
        inbox.waits(3, Some(9));
        assert_eq!(inbox.roots(0, vec![1, 4]), [1, 4]);
        assert_eq!(inbox.roots(0, vec![3]), [3]);
    }

    #[test]
    fn each_operation_finds_its_own_parts() {
        let inbox = Inbox::new(2);
        let peers = [0, 1].map(|rank| Peer {
            rank,
            place: Place::Thread,
        });
        let contract = Contract::new(Call::Barrier, Site::new("here.rs", 1));
        let patience = Patience {
            timeout: Duration::from_secs(50),
            warn_after: Duration::from_secs(50),
        };
        let part = |sequence, index| Parcel {
            tag: Tag {
                sequence,
                stage: Stage::Inward,
                index,
            },
            contract: None,
            chunk: Chunk::default(),
        };
        for (sequence, index) in [(6, 0), (5, 0), (6, 1), (5, 1), (9, 0)] {
            inbox.deposit(1, part(sequence, index));
        }
        let poll = |sequence, position| {
            let mut watch = Watch::new(0, sequence, contract, patience);
            let parcel = inbox.poll(1, position, &peers, &mut watch).unwrap();
            parcel.map(|parcel| (parcel.tag.sequence, parcel.tag.index))
        };
        assert_eq!(poll(5, Position::First), Some((5, 0)));
        assert_eq!(poll(6, Position::Later), Some((6, 0)));
        assert_eq!(poll(7, Position::Later), None);
        assert_eq!(poll(5, Position::First), Some((5, 1)));
        // The peer is done with 5, or it would not have begun 9.
        assert_eq!(poll(5, Position::First), Some((9, 0)));
        // One of an operation that is over.
        assert_eq!(poll(7, Position::Later), None);
        assert_eq!(poll(7, Position::First), Some((6, 1)));
        assert_eq!(poll(7, Position::First), None);
    }
}
