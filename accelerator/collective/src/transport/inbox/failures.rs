//! The known failures of ranks, and their consequences for an operation. Nothing here changes the state.

use std::time::{Duration, Instant};

use super::peer_queue::PeerState;
use super::state::InboxState;
use crate::{
    error::{Certainty, Culprit, Error, Result},
    liveness::SUSPEND_THRESHOLD,
    transport::{OpDeadline, Peer},
};

impl InboxState {
    /// See [`Inbox::active`](super::Inbox::active).
    pub(super) fn active(&self, rank: usize) -> Option<Instant> {
        self.queues().get(rank)?.active
    }

    /// See [`Inbox::roots`](super::Inbox::roots). Ranks that wait in a circle, or for this one, are taken as they are.
    pub(super) fn roots(&self, missing: Vec<usize>, deadline: &OpDeadline) -> Vec<usize> {
        let awaited = |rank: usize| {
            let (awaited, told) = self.queues().get(rank)?.awaited?;
            (told >= deadline.since()).then_some(awaited)
        };
        let root = |rank: usize| {
            let mut last = rank;
            for _ in self.queues() {
                match awaited(last) {
                    None => return last,
                    Some(next) if next == deadline.rank => return rank,
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
    pub(super) fn cause(&self, me: usize) -> Option<&ObservedFailure> {
        let about_me = |blame: &&ObservedFailure| match &blame.cause {
            FailureCause::Reported(_, error) => error.culprit().is_some_and(|x| x.rank() == me),
            _ => false,
        };
        let failures = || self.failures().iter();
        let spoken = || failures().find(|blame| !blame.is_guessed());
        failures()
            .find(about_me)
            .or_else(spoken)
            .or(self.failures().first())
    }

    /// The cause of a rank's loss, from those who know best.
    pub(super) fn settled(&self, rank: usize) -> Option<&Culprit> {
        let mut told = self
            .failures()
            .iter()
            .filter_map(|blame| match &blame.cause {
                FailureCause::Reported(_, error) => error.culprit(),
                _ => None,
            });
        told.find(|x| x.rank() == rank && x.certainty == Certainty::Settled)
    }

    pub(super) fn error(
        &self,
        cause: &FailureCause,
        peers: &[Peer],
        deadline: &OpDeadline,
    ) -> Error {
        let me = &peers[deadline.rank];
        match cause {
            FailureCause::Lost(rank, cause, certainty) => match self.settled(*rank) {
                Some(culprit) if *certainty == Certainty::Guessed => {
                    deadline.lost(&peers[*rank], culprit.cause(), Certainty::Settled)
                }
                _ => deadline.lost(&peers[*rank], cause, *certainty),
            },
            FailureCause::OwnFailure(why) => deadline.lost(me, why, Certainty::Settled),
            FailureCause::Suspended(slept, rank, seen) => {
                let seen = format!("rank {rank} gave it up ({seen})");
                deadline.suspended(me, *slept, &seen)
            }
            FailureCause::BrokeProtocol(rank, what) => deadline.protocol(&peers[*rank], what),
            FailureCause::Reported(by, error) => match error.culprit() {
                Some(culprit) if culprit.rank() == deadline.rank && error.is_peer_lost() => {
                    deadline.given_up(me, *by, culprit.cause())
                }
                // Who tells it was in an operation of its own; this rank says in which one it was itself.
                Some(culprit) if error.is_peer_lost() => match peers.get(culprit.rank()) {
                    Some(peer) if error.is_peer_left() => deadline.left(peer),
                    Some(peer) => deadline.lost(peer, culprit.cause(), culprit.certainty),
                    None => error.clone(),
                },
                _ => error.clone(),
            },
        }
    }

    /// The same in words, where no operation asks.
    pub(super) fn describe(&self, cause: &FailureCause, peers: &[Peer], me: usize) -> String {
        match cause {
            FailureCause::BrokeProtocol(rank, what) => {
                format!("{} broke the protocol: {what}", peers[*rank])
            }
            FailureCause::Lost(rank, why, certainty) => {
                let settled = self.settled(*rank);
                let settled = settled.filter(|_| *certainty == Certainty::Guessed);
                let why = settled.map_or(&**why, Culprit::cause);
                format!("{} is lost: {why}", peers[*rank])
            }
            FailureCause::OwnFailure(why) => format!("{} is lost: {why}", peers[me]),
            FailureCause::Suspended(_, rank, seen) => {
                format!("{} is gone, or gave this one up: {seen}", peers[*rank])
            }
            FailureCause::Reported(_, error) => error.to_string(),
        }
    }

    /// Fails where a peer gave up this operation, or an earlier one, even if its data are here:
    /// a rank that comes too late must not take the operation for done.
    pub(super) fn check_abort(&self, peers: &[Peer], deadline: &OpDeadline) -> Result<()> {
        match self.cause(deadline.rank) {
            Some(ObservedFailure {
                sequence: Some(at),
                cause,
                ..
            }) if *at <= deadline.sequence => Err(self.error(cause, peers, deadline)),
            _ if self.is_closed() => Err(deadline.interrupted()),
            _ => Ok(()),
        }
    }

    /// Fails where nothing can come from `from` any more, or where a failure elsewhere dooms the
    /// operation. A failure elsewhere gets a moment of grace, since a peer that has done its part
    /// of this operation may be gone already while the others complete it. So does the suspicion
    /// that this rank was given up, since those who did so may say why, and the end of a connection,
    /// since a rank that failed because of another may end before the other is heard.
    pub(super) fn check(&self, from: usize, peers: &[Peer], deadline: &OpDeadline) -> Result<()> {
        self.check_abort(peers, deadline)?;
        let state = self.queues()[from].state;
        match self.cause(deadline.rank) {
            Some(blame) => {
                let suspected =
                    blame.is_guessed() || matches!(blame.cause, FailureCause::Suspended(..));
                if blame.since.elapsed() >= GRACE || state != PeerState::Present && !suspected {
                    return Err(self.error(&blame.cause, peers, deadline));
                }
                Ok(())
            }
            None => match state {
                PeerState::Left => Err(deadline.left(&peers[from])),
                PeerState::Dropped => Err(deadline.lost(&peers[from], DROPPED, Certainty::Partial)),
                PeerState::Broken | PeerState::Aborted | PeerState::Lost | PeerState::Present => {
                    Ok(())
                }
            },
        }
    }

    /// Shortens a pause: a process that was stopped notices it by waking late, and where a moment
    /// of grace runs its end matters.
    pub(super) fn pause(&self, pause: Duration) -> Duration {
        match self.failures().is_empty() {
            false => pause.min(GRACE / 4),
            true => pause.min(SUSPEND_THRESHOLD),
        }
    }
}

#[derive(Debug)]
pub(super) struct ObservedFailure {
    /// The operation in which a peer gave up.
    pub(super) sequence: Option<u64>,
    pub(super) cause: FailureCause,
    pub(super) since: Instant,
}

impl ObservedFailure {
    /// Returns `true` if nobody has reported the failure: a connection ended.
    fn is_guessed(&self) -> bool {
        matches!(self.cause, FailureCause::Lost(_, _, Certainty::Guessed))
    }
}

#[derive(Debug)]
pub(super) enum FailureCause {
    /// This rank sends what is not allowed.
    BrokeProtocol(usize, String),
    /// This rank is gone, by its own word or without one.
    Lost(usize, String, Certainty),
    /// This rank itself cannot continue.
    OwnFailure(String),
    /// This process did not run for so long, and then found that this rank was gone.
    Suspended(Duration, usize, String),
    /// This rank says that another one failed, or that all disagree.
    Reported(usize, Error),
}

pub(super) const GRACE: Duration = Duration::from_millis(100);

pub(super) const DROPPED: &str =
    "it dropped its group without closing it: its program returned early or failed";
