//! Finds the rank that failed first.
//!
//! A pure function of how ranks ended and whom they blame. The order of arrival only breaks ties: the kernel closes the
//! sockets of a dying process before its end can be observed, so a rank that failed because of another can be seen
//! first.
//! `README.md` beside this file has the rules as a table.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use signal_hook::consts::signal;

use crate::process::End;

/// The exit code of a Rust program whose `main` returned an error, as after losing another rank.
const ERROR_EXIT: i32 = 1;

/// The evidence of failures before the launcher signalled any rank.
#[derive(Clone, Debug, Default)]
pub(super) struct Evidence {
    ranks: BTreeMap<usize, RankEvidence>,
    next_order: usize,
}

/// The rank that failed first, and why it is taken for that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RootCause {
    pub(super) rank: usize,
    pub(super) class: FailureClass,
    end: Option<End>,
    is_blamed: bool,
}

/// Classes of failures; the strongest evidence first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum FailureClass {
    /// Its host was lost, and it with it.
    HostLost,
    /// A signal killed it, and it had blamed no rank before.
    Killed,
    /// It reported its own failure: a panic.
    SelfReported,
    /// Others blame it, and it failed.
    BlamedFailed,
    /// Others blame it; it still runs, or ended with exit code 0.
    BlamedSilent,
    /// Others blame it, but it blames others too.
    MutuallyBlamed,
    /// It ended with an exit code other than 0 and 1.
    ExitCode,
    /// It ended with exit code 1, or reported a failure without a cause.
    ErrorExit,
    /// It blames others, and no rank blames it.
    Secondary,
    /// It ended with the exit code of a preempted rank, as all others are about to.
    Preempted,
}

impl Evidence {
    pub(super) fn ended(&mut self, rank: usize, end: End) {
        self.known(rank).end = Some(end);
    }

    /// `rank` reported a failure and blames `blamed`: itself after a panic, no rank if it does not know. Only its
    /// first report counts.
    pub(super) fn blamed(&mut self, rank: usize, blamed: &[usize]) {
        let known = self.known(rank);
        if known.blames.is_some() {
            return;
        }
        known.blames = Some(blamed.iter().copied().collect());
        for &other in blamed.iter().filter(|&&other| other != rank) {
            self.known(other).blamed_by.insert(rank);
        }
    }

    /// Records whether others wait for `rank`, which ended with code 0 and never joined.
    pub(super) fn awaited(&mut self, rank: usize, is_awaited: bool) {
        self.known(rank).is_awaited = is_awaited;
    }

    /// Records whether `rank` joined and ended with code 0 without closing its group. That alone is no failure, but if
    /// another rank fails, it is the cause.
    pub(super) fn left_unclosed(&mut self, rank: usize, left_unclosed: bool) {
        self.known(rank).left_unclosed = left_unclosed;
    }

    /// The rank that failed first, as far as is known; `None` where none has failed.
    pub(super) fn root_cause(&self) -> Option<RootCause> {
        let mut candidates: Vec<_> = self
            .ranks
            .iter()
            .filter_map(|(&rank, known)| Some((rank, known, known.class(rank)?)))
            .collect();
        if !candidates.is_empty() {
            let unclosed = self.ranks.iter().filter(|(_, known)| {
                known.left_unclosed && !known.is_awaited && known.blamed_by.is_empty()
            });
            candidates
                .extend(unclosed.map(|(&rank, known)| (rank, known, FailureClass::BlamedSilent)));
        }
        let first = candidates.into_iter().min_by_key(|(_, known, class)| {
            (*class, usize::MAX - known.blamed_by.len(), known.order)
        });
        first.map(|(rank, known, class)| RootCause {
            rank,
            class,
            end: known.end,
            is_blamed: !known.blamed_by.is_empty(),
        })
    }

    fn known(&mut self, rank: usize) -> &mut RankEvidence {
        let order = self.next_order;
        self.next_order += 1;
        self.ranks.entry(rank).or_insert_with(|| RankEvidence {
            order,
            ..RankEvidence::default()
        })
    }
}

impl RootCause {
    /// Returns the time to wait, from the first evidence on, for more that could change the result: a rank that panics
    /// reports it a while before its process ends.
    pub(super) fn max_wait(&self) -> Duration {
        Duration::from_millis(match (self.class, self.end) {
            (FailureClass::HostLost, _) => 0,
            // A program that lost a rank may abort; its report can arrive just after its end.
            (FailureClass::Killed, Some(End::Signal(signal::SIGABRT))) => 50,
            (FailureClass::Killed, _) => 0,
            // The report that it has joined after all, or closed its group, can still be on its way.
            (FailureClass::BlamedSilent, Some(_)) if !self.is_blamed => 500,
            (
                FailureClass::SelfReported
                | FailureClass::BlamedFailed
                | FailureClass::BlamedSilent,
                Some(_),
            ) => 0,
            (FailureClass::SelfReported, None) => 1000,
            (FailureClass::BlamedFailed | FailureClass::BlamedSilent, None) => 500,
            (FailureClass::MutuallyBlamed, _) => 250,
            (FailureClass::ExitCode, _) => 50,
            (FailureClass::ErrorExit | FailureClass::Secondary, _) => 250,
            // The others have saved as well, and have memory and devices to give back.
            (FailureClass::Preempted, _) => 1000,
        })
    }
}

#[derive(Clone, Debug, Default)]
struct RankEvidence {
    /// The order in which evidence about it first arrived.
    order: usize,
    end: Option<End>,
    blames: Option<BTreeSet<usize>>,
    blamed_by: BTreeSet<usize>,
    is_awaited: bool,
    left_unclosed: bool,
}

impl RankEvidence {
    fn class(&self, rank: usize) -> Option<FailureClass> {
        if self.end == Some(End::Lost) {
            return Some(FailureClass::HostLost);
        }
        let blames_others = self
            .blames
            .as_ref()
            .is_some_and(|blamed| blamed.iter().any(|&other| other != rank));
        let is_blamed = !self.blamed_by.is_empty() || self.is_awaited;
        let self_reported = self
            .blames
            .as_ref()
            .is_some_and(|blamed| blamed.contains(&rank));
        match (self.end, blames_others, is_blamed) {
            (_, true, true) => Some(FailureClass::MutuallyBlamed),
            (_, true, false) => Some(FailureClass::Secondary),
            (Some(End::Signal(_)), false, _) => Some(FailureClass::Killed),
            _ if self_reported => Some(FailureClass::SelfReported),
            (Some(End::Code(code)), false, true) if code != 0 => Some(FailureClass::BlamedFailed),
            (_, false, true) => Some(FailureClass::BlamedSilent),
            (Some(End::Code(0)), false, false) => None,
            (Some(End::PREEMPTED), false, false) => Some(FailureClass::Preempted),
            (Some(End::Code(code)), false, false) if code != ERROR_EXIT => {
                Some(FailureClass::ExitCode)
            }
            (Some(End::Code(_)), false, false) => Some(FailureClass::ErrorExit),
            (None | Some(End::Lost), false, false) => {
                self.blames.as_ref().map(|_| FailureClass::ErrorExit)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Copy, Debug)]
    enum Fact {
        Ended(usize, End),
        FailureReported(usize, &'static [usize]),
    }
    use End::{Code, Signal};
    use Fact::{Ended, FailureReported};

    const KILL: End = Signal(signal::SIGKILL);
    const ABORT: End = Signal(signal::SIGABRT);

    /// All orders of `facts`.
    fn orders(facts: &[Fact]) -> Vec<Vec<Fact>> {
        if facts.is_empty() {
            return vec![Vec::new()];
        }
        (0..facts.len())
            .flat_map(|first| {
                let mut rest = facts.to_vec();
                let fact = rest.remove(first);
                orders(&rest).into_iter().map(move |mut order| {
                    order.insert(0, fact);
                    order
                })
            })
            .collect()
    }

    fn root_cause(facts: &[Fact]) -> RootCause {
        let mut evidence = Evidence::default();
        for &fact in facts {
            match fact {
                Ended(rank, end) => evidence.ended(rank, end),
                FailureReported(rank, blamed) => evidence.blamed(rank, blamed),
            }
        }
        evidence.root_cause().unwrap()
    }

    #[track_caller]
    fn check(facts: &[Fact], failed_rank: usize, class: FailureClass) {
        for order in orders(facts) {
            let found = root_cause(&order);
            assert_eq!((found.rank, found.class), (failed_rank, class), "{order:?}");
        }
    }

    #[test]
    fn the_first_is_the_same_in_every_order() {
        use FailureClass::{BlamedFailed, BlamedSilent, Killed, SelfReported};
        // Killed; the others lose it, one over another.
        check(
            &[
                Ended(1, KILL),
                FailureReported(0, &[1]),
                Ended(0, Code(1)),
                FailureReported(2, &[0]),
                Ended(2, Code(1)),
            ],
            1,
            Killed,
        );
        // Killed, and no rank had joined.
        check(
            &[Ended(1, KILL), Ended(0, Code(1)), Ended(2, Code(3))],
            1,
            Killed,
        );
        // Panicked; another rank aborts because of it.
        check(
            &[
                FailureReported(1, &[1]),
                Ended(1, Code(101)),
                FailureReported(0, &[1]),
                Ended(0, ABORT),
            ],
            1,
            SelfReported,
        );
        // Ended with a code, without a report.
        check(
            &[
                Ended(2, Code(3)),
                FailureReported(0, &[2]),
                FailureReported(1, &[0]),
                Ended(0, Code(101)),
                Ended(1, Code(101)),
            ],
            2,
            BlamedFailed,
        );
        // Stopped by SIGSTOP.
        check(
            &[
                FailureReported(0, &[1]),
                FailureReported(2, &[0, 1]),
                Ended(0, Code(1)),
                Ended(2, Code(1)),
            ],
            1,
            BlamedSilent,
        );
        // Left early with exit code 0.
        check(
            &[
                Ended(1, Code(0)),
                FailureReported(0, &[1]),
                Ended(0, Code(1)),
                Ended(2, Code(1)),
            ],
            1,
            BlamedSilent,
        );
    }

    #[test]
    fn a_lost_host_stands_above_what_its_loss_does_to_ranks() {
        check(
            &[
                Ended(2, End::Lost),
                FailureReported(0, &[1]),
                FailureReported(2, &[0]),
                Ended(0, ABORT),
                Ended(1, Code(3)),
            ],
            2,
            FailureClass::HostLost,
        );
        assert_eq!(
            root_cause(&[Ended(3, End::Lost)]).max_wait(),
            Duration::ZERO
        );
    }

    #[test]
    fn the_first_report_of_a_rank_counts() {
        let mut evidence = Evidence::default();
        // It lost rank 1, and panicked over that.
        evidence.blamed(0, &[1]);
        evidence.blamed(0, &[0]);
        evidence.ended(0, Code(101));
        assert_eq!(evidence.root_cause().unwrap().rank, 1);
    }

    #[test]
    fn where_all_blame_each_other_the_most_blamed_is_first() {
        check(
            &[
                FailureReported(0, &[1]),
                FailureReported(1, &[0]),
                FailureReported(2, &[1]),
            ],
            1,
            FailureClass::MutuallyBlamed,
        );
        // One to one, the clock decides.
        assert_eq!(
            root_cause(&[FailureReported(0, &[1]), FailureReported(1, &[0])]).rank,
            0
        );
        assert_eq!(
            root_cause(&[FailureReported(1, &[0]), FailureReported(0, &[1])]).rank,
            1
        );
    }

    #[test]
    fn without_blame_an_own_exit_code_beats_an_error_and_the_first_wins() {
        check(
            &[Ended(0, Code(1)), Ended(1, Code(101))],
            1,
            FailureClass::ExitCode,
        );
        assert_eq!(root_cause(&[Ended(2, Code(4)), Ended(1, Code(5))]).rank, 2);
        assert_eq!(root_cause(&[Ended(2, KILL), Ended(1, KILL)]).rank, 2);
        assert_eq!(
            root_cause(&[FailureReported(2, &[]), Ended(1, Code(1))]).rank,
            2
        );
    }

    #[test]
    fn success_is_a_failure_only_where_others_wait_for_the_rank() {
        let mut evidence = Evidence::default();
        evidence.ended(0, Code(0));
        assert_eq!(evidence.root_cause(), None);
        evidence.awaited(0, true);
        evidence.ended(1, Code(1));
        let root_cause = evidence.root_cause().unwrap();
        assert_eq!(
            (root_cause.rank, root_cause.class),
            (0, FailureClass::BlamedSilent)
        );
        assert_eq!(root_cause.max_wait(), Duration::from_millis(500));
        evidence.awaited(0, false);
        assert_eq!(evidence.root_cause().unwrap().rank, 1);
    }

    #[test]
    fn a_rank_that_ends_without_closing_is_first_only_where_others_fail() {
        let mut evidence = Evidence::default();
        evidence.ended(1, Code(0));
        evidence.left_unclosed(1, true);
        assert_eq!(evidence.root_cause(), None);
        evidence.ended(0, Code(4));
        assert_eq!(evidence.root_cause().unwrap().rank, 1);
        // Killed is killed.
        evidence.ended(2, KILL);
        assert_eq!(evidence.root_cause().unwrap().rank, 2);
    }

    #[test]
    fn whatever_else_fails_precedes_a_rank_that_was_preempted() {
        use FailureClass::{BlamedFailed, ErrorExit, Killed, Preempted, Secondary};
        check(&[Ended(0, End::PREEMPTED)], 0, Preempted);
        check(&[Ended(0, End::PREEMPTED), Ended(1, KILL)], 1, Killed);
        check(&[Ended(0, End::PREEMPTED), Ended(1, Code(1))], 1, ErrorExit);
        check(
            &[Ended(0, End::PREEMPTED), FailureReported(1, &[2])],
            2,
            FailureClass::BlamedSilent,
        );
        // It left while another one still needed it.
        check(
            &[Ended(0, End::PREEMPTED), FailureReported(1, &[0])],
            0,
            BlamedFailed,
        );
        assert!(Secondary < Preempted);
    }

    #[test]
    fn certain_evidence_needs_no_wait() {
        for (facts, max_wait) in [
            (&[Ended(1, KILL)][..], 0),
            (&[Ended(1, ABORT)], 50),
            (&[Ended(1, Code(3)), FailureReported(0, &[1])], 0),
            (&[Ended(1, Code(0)), FailureReported(0, &[1])], 0),
            (&[FailureReported(1, &[1])], 1000),
            (&[FailureReported(0, &[1])], 500),
            (&[Ended(0, Code(1))], 250),
            (&[Ended(0, Code(7))], 50),
            (&[Ended(0, End::PREEMPTED)], 1000),
        ] {
            assert_eq!(
                root_cause(facts).max_wait(),
                Duration::from_millis(max_wait),
                "{facts:?}"
            );
        }
    }
}
