//! What is known of the senders, and what follows for an operation.

use std::time::{Duration, Instant};

use super::queue::{Parcel, Position, Queue, Standing};
use crate::{
    error::{Certainty, Culprit, Error, Result},
    transport::{Peer, Watch, watch::LATE},
};

#[derive(Debug)]
pub(super) struct State {
    pub(super) queues: Vec<Queue>,
    /// The failures that became known, in that order: the later ones are mostly collateral of
    /// the first.
    pub(super) blames: Vec<Blame>,
    /// Who dropped its group without a word of why, and when.
    pub(super) dropped: Option<(usize, Instant)>,
    pub(super) closed: bool,
    /// Grows with everything that happens.
    pub(super) version: u64,
    /// How many threads wait for an arrival.
    pub(super) sleepers: usize,
    /// How many threads wait for room.
    pub(super) blocked: usize,
    /// Whether the engine sleeps until its bell rings.
    pub(super) dozing: bool,
    /// When this process last said that it runs, and after how long without that the others may
    /// give it up.
    pub(super) awake: Option<(Instant, Duration)>,
    /// When it ran again after it had not for too long, and for how long.
    pub(super) slept: Option<(Instant, Duration)>,
}

impl State {
    pub(super) fn blame(&mut self, sequence: Option<u64>, cause: Cause) {
        if self.blames.len() < BLAMES {
            self.blames.push(Blame {
                sequence,
                cause,
                since: Instant::now(),
            });
        }
    }

    pub(super) fn attend(&mut self, now: Instant) {
        if let Some((last, limit)) = self.awake {
            let slept = now.saturating_duration_since(last);
            if slept > limit {
                self.slept = Some((now, slept));
                self.awake = Some((now, limit));
            }
        }
    }

    /// See [`Inbox::active`](super::Inbox::active).
    pub(super) fn active(&self, rank: usize) -> Option<Instant> {
        self.queues.get(rank)?.active
    }

    /// See [`Inbox::roots`]. Ranks that wait in a circle, or for this one, are taken as they are.
    pub(super) fn roots(&self, missing: Vec<usize>, watch: &Watch) -> Vec<usize> {
        let awaited = |rank: usize| {
            let (awaited, told) = self.queues.get(rank)?.awaited?;
            (told >= watch.since()).then_some(awaited)
        };
        let root = |rank: usize| {
            let mut last = rank;
            for _ in &self.queues {
                match awaited(last) {
                    None => return last,
                    Some(next) if next == watch.rank => return rank,
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

    /// The failure that is told: what others say about this rank itself, else the first that anyone
    /// spoke of. A connection that ended without a word may have ended because of that.
    pub(super) fn cause(&self, me: usize) -> Option<&Blame> {
        let about_me = |blame: &&Blame| match &blame.cause {
            Cause::Told(_, error) => error.culprit().is_some_and(|x| x.rank() == me),
            _ => false,
        };
        let blames = || self.blames.iter();
        let spoken = || blames().find(|blame| !blame.is_guessed());
        blames()
            .find(about_me)
            .or_else(spoken)
            .or(self.blames.first())
    }

    /// Why a rank is lost, from those who know best.
    pub(super) fn settled(&self, rank: usize) -> Option<&Culprit> {
        let mut told = self.blames.iter().filter_map(|blame| match &blame.cause {
            Cause::Told(_, error) => error.culprit(),
            _ => None,
        });
        told.find(|x| x.rank() == rank && x.certainty == Certainty::Settled)
    }

    pub(super) fn error(&self, cause: &Cause, peers: &[Peer], watch: &Watch) -> Error {
        let me = &peers[watch.rank];
        match cause {
            Cause::Lost(rank, cause, certainty) => match self.settled(*rank) {
                Some(culprit) if *certainty == Certainty::Guessed => {
                    watch.lost(&peers[*rank], culprit.cause(), Certainty::Settled)
                }
                _ => watch.lost(&peers[*rank], cause, *certainty),
            },
            Cause::Own(why) => watch.lost(me, why, Certainty::Settled),
            Cause::Overslept(slept, rank, seen) => {
                let seen = format!("rank {rank} gave it up ({seen})");
                watch.overslept(me, *slept, &seen)
            }
            Cause::Broke(rank, what) => watch.protocol(&peers[*rank], what),
            Cause::Told(by, error) => match error.culprit() {
                Some(culprit) if culprit.rank() == watch.rank && error.is_peer_lost() => {
                    watch.given_up(me, *by, culprit.cause())
                }
                // Who tells it was in an operation of its own; this rank says in which one it was itself.
                Some(culprit) if error.is_peer_lost() => match peers.get(culprit.rank()) {
                    Some(peer) => watch.lost(peer, culprit.cause(), culprit.certainty),
                    None => error.clone(),
                },
                _ => error.clone(),
            },
        }
    }

    /// The same in words, where no operation asks.
    pub(super) fn told(&self, cause: &Cause, peers: &[Peer], me: usize) -> String {
        match cause {
            Cause::Broke(rank, what) => format!("{} broke the protocol: {what}", peers[*rank]),
            Cause::Lost(rank, why, certainty) => {
                let settled = self.settled(*rank);
                let settled = settled.filter(|_| *certainty == Certainty::Guessed);
                let why = settled.map_or(&**why, Culprit::cause);
                format!("{} is lost: {why}", peers[*rank])
            }
            Cause::Own(why) => format!("{} is lost: {why}", peers[me]),
            Cause::Overslept(_, rank, seen) => {
                format!("{} is gone, or gave this one up: {seen}", peers[*rank])
            }
            Cause::Told(_, error) => error.to_string(),
        }
    }

    /// The next part from a peer, unless something speaks against going on.
    pub(super) fn attempt(
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
    pub(super) fn check_abort(&self, peers: &[Peer], watch: &Watch) -> Result<()> {
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
    /// of this operation may be gone already while the others complete it. So does the suspicion
    /// that this rank was given up, since those who did so may say why, and the end of a connection,
    /// since a rank that failed because of another may end before the other is heard.
    pub(super) fn check(&self, from: usize, peers: &[Peer], watch: &Watch) -> Result<()> {
        self.check_abort(peers, watch)?;
        let standing = self.queues[from].standing;
        match self.cause(watch.rank) {
            Some(blame) => {
                let suspected = blame.is_guessed() || matches!(blame.cause, Cause::Overslept(..));
                if blame.since.elapsed() >= GRACE || standing != Standing::Present && !suspected {
                    return Err(self.error(&blame.cause, peers, watch));
                }
                Ok(())
            }
            None => match standing {
                Standing::Left => Err(watch.left(&peers[from])),
                Standing::Dropped => Err(watch.lost(&peers[from], DROPPED, Certainty::Partial)),
                Standing::Broken | Standing::GaveUp | Standing::Lost | Standing::Present => Ok(()),
            },
        }
    }

    /// Shortens a pause: a process that was stopped notices it by waking late, and where a moment
    /// of grace runs its end matters.
    pub(super) fn pause(&self, pause: Duration) -> Duration {
        match self.blames.is_empty() {
            false => pause.min(GRACE / 4),
            true => pause.min(LATE),
        }
    }
}

#[derive(Debug)]
pub(super) struct Blame {
    /// The operation in which a peer gave up.
    pub(super) sequence: Option<u64>,
    pub(super) cause: Cause,
    pub(super) since: Instant,
}

impl Blame {
    /// Whether nobody has said it: a connection ended.
    fn is_guessed(&self) -> bool {
        matches!(self.cause, Cause::Lost(_, _, Certainty::Guessed))
    }
}

#[derive(Debug)]
pub(super) enum Cause {
    /// This rank sends what is not allowed.
    Broke(usize, String),
    /// This rank is gone, by its own word or without one.
    Lost(usize, String, Certainty),
    /// This rank itself cannot go on.
    Own(String),
    /// This process did not run for so long, and then found that this rank was gone.
    Overslept(Duration, usize, String),
    /// This rank says that another one failed, or that all disagree.
    Told(usize, Error),
}

pub(super) const GRACE: Duration = Duration::from_millis(100);

/// How many failures are kept.
const BLAMES: usize = 64;

pub(super) const DROPPED: &str =
    "it dropped its group without closing it: its program returned early or failed";
