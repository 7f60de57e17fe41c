//! The decision about a failed job: if it is started again, when, and with which number of ranks.
//!
//! A pure state machine, as `supervisor::group_machine`; `supervisor/README.md` has the rules.

use std::collections::BTreeSet;
use std::time::Duration;

/// The longest wait before a restart.
const MAX_DELAY: Duration = Duration::from_secs(60);

/// An attempt that follows a preemption and is preempted sooner than this has met the same notice again: a deadline that
/// has passed, a file that is still there.
const SAME_NOTICE_WITHIN: Duration = Duration::from_secs(600);

/// The restarts that a job has left, and the slots that its ranks run in.
///
/// A slot is a place for one rank. Ranks are numbered without gaps, so when a slot is given up, the
/// ranks behind it move up.
#[derive(Clone, Debug)]
pub(super) struct Restarts {
    most: u64,
    done: u64,
    /// Restarts that do not count, since ranks were preempted.
    uncounted: u64,
    /// Set if the last attempt was preempted.
    is_preempted: bool,
    delay: Duration,
    least: usize,
    slots: Vec<usize>,
    /// Set if slots can be given up at all.
    is_elastic: bool,
    /// The slot of the rank that failed first in the last attempt.
    failed_rank: Option<usize>,
    /// Slots that have been given up once.
    dropped: BTreeSet<usize>,
    /// The number of times that slots have been given up.
    drops: u32,
}

/// The decision after a failed attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Decision {
    Restart {
        restart: u64,
        /// The time to wait before it.
        wait: Duration,
        dropped_slot: Option<usize>,
    },
    /// Do not restart: restarts were not asked for.
    NoRestarts,
    /// Do not restart, for this reason.
    GiveUp(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AttemptFailure {
    /// This rank failed first.
    Rank(usize),
    /// The process of this rank could not be started.
    NotStarted(usize),
    /// A rank of a host failed first that was taken in while the job ran.
    Newcomer,
    /// It is unknown which rank failed first.
    Unknown,
}

impl Restarts {
    /// A job of `ranks` ranks, and no fewer than `least`, that is started again `most` times, after
    /// `delay` the first time and twice as long each time.
    pub(super) fn new(ranks: usize, least: usize, most: u64, delay: Duration) -> Self {
        Self {
            most,
            done: 0,
            uncounted: 0,
            is_preempted: false,
            delay,
            least,
            slots: (0..ranks).collect(),
            is_elastic: least < ranks,
            failed_rank: None,
            dropped: BTreeSet::new(),
            drops: 0,
        }
    }

    /// Returns the number of times that slots have been given up: the job waits longer before it tries them again.
    pub(super) fn drops(&self) -> u32 {
        self.drops
    }

    /// Returns the largest number of restarts, including those that do not count.
    pub(super) fn most(&self) -> u64 {
        self.most + self.uncounted
    }

    pub(super) fn ranks(&self) -> usize {
        self.slots.len()
    }

    /// Decides after a failed attempt.
    ///
    /// A slot is dropped for good when its process cannot be started, or when its rank was the first
    /// to fail in two attempts in a row.
    pub(super) fn failed(&mut self, failure: AttemptFailure) -> Decision {
        let rank = match failure {
            AttemptFailure::Rank(rank) | AttemptFailure::NotStarted(rank) => Some(rank),
            AttemptFailure::Newcomer | AttemptFailure::Unknown => None,
        };
        let slot = rank.and_then(|rank| self.slots.get(rank).copied());
        let is_gone = matches!(failure, AttemptFailure::NotStarted(_))
            || (slot.is_some() && slot == self.failed_rank);
        let is_regained = slot.is_some_and(|slot| self.dropped.contains(&slot));
        self.is_preempted = false;
        if self.most == 0 {
            return Decision::NoRestarts;
        }
        if failure == AttemptFailure::Newcomer || is_regained && self.slots.len() > self.least {
            // Such a trial does not count as a restart.
            self.uncounted += 1;
            self.failed_rank = None;
            let dropped_slot = rank
                .filter(|_| is_regained)
                .map(|rank| self.slots.remove(rank));
            self.drops += u32::from(is_regained);
            return Decision::Restart {
                restart: self.done + self.uncounted,
                wait: self.delay,
                dropped_slot,
            };
        }
        if self.done == self.most {
            return Decision::GiveUp(match self.most {
                1 => "it was restarted once, as --max-restarts allows".to_owned(),
                most => format!("it was restarted {most} times, as --max-restarts allows"),
            });
        }
        self.failed_rank = slot;
        let mut dropped_slot = None;
        if let (true, Some(rank)) = (self.is_elastic && is_gone, rank) {
            if self.slots.len() == self.least {
                return Decision::GiveUp(format!(
                    "the place of rank {rank} is gone for good, and --num-processes allows no \
                     fewer than {}",
                    self.least
                ));
            }
            self.dropped.extend(slot);
            self.drops += 1;
            self.slots.remove(rank);
            self.failed_rank = None;
            dropped_slot = slot;
        }
        let doublings = u32::try_from(self.done).unwrap_or(u32::MAX).min(16);
        self.done += 1;
        Decision::Restart {
            restart: self.done + self.uncounted,
            wait: self.delay.saturating_mul(1 << doublings).min(MAX_DELAY),
            dropped_slot,
        }
    }

    /// The running job has so many ranks on this host now.
    pub(super) fn regrown(&mut self, ranks: usize) {
        let free = (0..).filter(|slot| !self.slots.contains(slot));
        let regained: Vec<usize> = free.take(ranks.saturating_sub(self.slots.len())).collect();
        if !regained.is_empty() {
            self.failed_rank = None;
        }
        self.slots.extend(regained);
    }

    /// Decides after an attempt whose ranks have saved to continue with another number of ranks, of which `ranks` on this host.
    ///
    /// The restart is immediate, and none of the failed job's. It takes restarts that were asked for at all.
    pub(super) fn resized(&mut self, ranks: usize) -> Decision {
        if self.most == 0 {
            return Decision::NoRestarts;
        }
        self.regrown(ranks);
        self.is_preempted = false;
        self.uncounted_restart()
    }

    /// Decides after an attempt whose ranks were preempted, and the launcher was not; it ran for `lasted`.
    ///
    /// The restart is immediate, and none of the failed job's. It takes restarts that were asked for at all, and a
    /// notice that is not the one before.
    pub(super) fn preempted(&mut self, lasted: Duration) -> Decision {
        if self.most == 0 {
            return Decision::NoRestarts;
        }
        if std::mem::replace(&mut self.is_preempted, true) && lasted < SAME_NOTICE_WITHIN {
            return Decision::GiveUp(format!(
                "it was preempted again within {} minutes of its restart",
                SAME_NOTICE_WITHIN.as_secs() / 60
            ));
        }
        self.failed_rank = None;
        self.uncounted_restart()
    }

    /// A restart at once that is none of the failed job's.
    fn uncounted_restart(&mut self) -> Decision {
        self.uncounted += 1;
        Decision::Restart {
            restart: self.done + self.uncounted,
            wait: Duration::ZERO,
            dropped_slot: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use AttemptFailure::{NotStarted, Rank};

    const SECOND: Duration = Duration::from_secs(1);

    fn again(restart: u64, seconds: u64, dropped_slot: Option<usize>) -> Decision {
        Decision::Restart {
            restart,
            wait: Duration::from_secs(seconds),
            dropped_slot,
        }
    }

    #[test]
    fn waits_double_up_to_a_minute_and_then_it_gives_up() {
        let mut restarts = Restarts::new(2, 2, 8, SECOND);
        for (done, wait) in [1, 2, 4, 8, 16, 32, 60, 60].into_iter().enumerate() {
            let restart = done as u64 + 1;
            assert_eq!(restarts.failed(Rank(1)), again(restart, wait, None));
        }
        assert!(matches!(restarts.failed(Rank(1)), Decision::GiveUp(_)));
        assert_eq!((restarts.done, restarts.ranks()), (8, 2));
    }

    #[test]
    fn an_error_that_all_ranks_share_costs_no_slot() {
        let mut restarts = Restarts::new(3, 1, 9, Duration::ZERO);
        assert_eq!(restarts.failed(Rank(1)), again(1, 0, None));
        assert_eq!(restarts.failed(AttemptFailure::Unknown), again(2, 0, None));
        // Not twice in a row.
        assert_eq!(restarts.failed(Rank(1)), again(3, 0, None));
        assert_eq!(restarts.failed(Rank(1)), again(4, 0, Some(1)));
    }

    #[test]
    fn without_restarts_there_is_nothing_to_say() {
        let mut restarts = Restarts::new(2, 2, 0, SECOND);
        assert_eq!(restarts.failed(Rank(0)), Decision::NoRestarts);
    }

    #[test]
    fn no_delay_stays_none() {
        let mut restarts = Restarts::new(1, 1, 100, Duration::ZERO);
        for restart in 1..=100 {
            assert_eq!(restarts.failed(Rank(0)), again(restart, 0, None));
        }
    }

    #[test]
    fn a_slot_that_fails_twice_in_a_row_is_given_up() {
        let mut restarts = Restarts::new(3, 1, 9, Duration::ZERO);
        assert_eq!(restarts.failed(Rank(1)), again(1, 0, None));
        assert_eq!(restarts.failed(Rank(2)), again(2, 0, None));
        assert_eq!(restarts.failed(Rank(1)), again(3, 0, None));
        assert_eq!(restarts.failed(Rank(1)), again(4, 0, Some(1)));
        // Rank 1 is now in slot 2, and has a clean record.
        assert_eq!(restarts.ranks(), 2);
        assert_eq!(restarts.failed(Rank(1)), again(5, 0, None));
        assert_eq!(restarts.failed(Rank(1)), again(6, 0, Some(2)));
        // One is left, and no fewer are allowed.
        assert_eq!(restarts.failed(Rank(0)), again(7, 0, None));
        assert!(matches!(restarts.failed(Rank(0)), Decision::GiveUp(_)));
    }

    #[test]
    fn a_process_that_cannot_be_started_gives_its_slot_up_at_once() {
        let mut restarts = Restarts::new(2, 1, 3, Duration::ZERO);
        assert_eq!(restarts.failed(NotStarted(0)), again(1, 0, Some(0)));
        assert_eq!(restarts.ranks(), 1);
    }

    #[test]
    fn a_preempted_job_is_restarted_at_once_and_the_restart_does_not_count() {
        let mut restarts = Restarts::new(2, 1, 2, SECOND);
        assert_eq!(restarts.failed(Rank(1)), again(1, 1, None));
        assert_eq!(restarts.preempted(SECOND), again(2, 0, None));
        assert_eq!(restarts.most(), 3);
        // The slot that failed before has not failed twice in a row.
        assert_eq!(restarts.failed(Rank(1)), again(3, 2, None));
        assert!(matches!(restarts.failed(Rank(0)), Decision::GiveUp(_)));
    }

    #[test]
    fn a_notice_that_stands_ends_the_job() {
        let mut restarts = Restarts::new(2, 2, 3, SECOND);
        assert_eq!(restarts.preempted(Duration::ZERO), again(1, 0, None));
        assert_eq!(restarts.preempted(SAME_NOTICE_WITHIN), again(2, 0, None));
        assert!(matches!(restarts.preempted(SECOND), Decision::GiveUp(_)));
        let mut none = Restarts::new(2, 2, 0, SECOND);
        assert_eq!(none.preempted(SECOND), Decision::NoRestarts);
    }

    #[test]
    fn a_fixed_number_of_ranks_stays() {
        let mut restarts = Restarts::new(2, 2, 3, Duration::ZERO);
        for restart in 1..=3 {
            assert_eq!(restarts.failed(Rank(0)), again(restart, 0, None));
        }
    }
}
