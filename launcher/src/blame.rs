//! Which rank failed first, by what is known of all.
//!
//! A pure function of the evidence: how ranks ended, and whom they accuse. The order in which it
//! arrived only breaks ties, since a dying process's sockets are closed before its end can be
//! observed, and a rank that fails because of another can therefore be seen first.
//! `README.md` beside this file has the rules as a table.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use signal_hook::consts::signal;

use crate::job::End;

/// The exit code of a Rust program whose `main` returned an error: what a rank ends with that
/// lost another.
const ERROR: i32 = 1;

/// What is known of the ranks' failures, before the launcher signalled any of them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Evidence {
    ranks: BTreeMap<usize, Known>,
    heard: usize,
}

/// The rank that is held to have failed first, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Verdict {
    /// The rank.
    pub(crate) rank: usize,
    /// What speaks against it.
    pub(crate) charge: Charge,
    end: Option<End>,
    is_accused: bool,
}

/// What speaks against a rank; the weightiest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Charge {
    /// A signal killed it, and it had accused nobody before.
    Killed,
    /// It said itself that it failed, as one does that panics.
    Confessed,
    /// Others accuse it, and it failed.
    Failed,
    /// Others accuse it; it runs still, or has left with exit code 0.
    Silent,
    /// Others accuse it, but it accuses others too.
    Mutual,
    /// It ended with a failing exit code of its own choice.
    Code,
    /// It ended with exit code 1, or said that it failed and not why.
    Error,
    /// It accuses others, and nobody accuses it.
    Collateral,
}

impl Evidence {
    /// A rank ended.
    pub(crate) fn ended(&mut self, rank: usize, end: End) {
        self.known(rank).end = Some(end);
    }

    /// `rank` said that `accused` are at fault: itself where it panicked, nobody where it does
    /// not know. What a rank says first counts, the rest follows from it.
    pub(crate) fn accused(&mut self, rank: usize, accused: &[usize]) {
        let known = self.known(rank);
        if known.accuses.is_some() {
            return;
        }
        known.accuses = Some(accused.iter().copied().collect());
        for &other in accused.iter().filter(|&&other| other != rank) {
            self.known(other).accused_by.insert(rank);
        }
    }

    /// Whether others wait in vain for `rank`, which ended well without having joined them.
    pub(crate) fn missed(&mut self, rank: usize, is_missed: bool) {
        self.known(rank).is_missed = is_missed;
    }

    /// Whether `rank` joined the others, and ended well without taking leave of them. That alone
    /// is no failure, but where there is one it is the cause.
    pub(crate) fn deserted(&mut self, rank: usize, has_deserted: bool) {
        self.known(rank).has_deserted = has_deserted;
    }

    /// The rank that failed first, as far as is known; `None` where none has failed.
    pub(crate) fn verdict(&self) -> Option<Verdict> {
        let mut charged: Vec<_> = self
            .ranks
            .iter()
            .filter_map(|(&rank, known)| Some((rank, known, known.charge(rank)?)))
            .collect();
        if !charged.is_empty() {
            let deserters = self.ranks.iter().filter(|(_, known)| {
                known.has_deserted && !known.is_missed && known.accused_by.is_empty()
            });
            charged.extend(deserters.map(|(&rank, known)| (rank, known, Charge::Silent)));
        }
        let first = charged.into_iter().min_by_key(|(_, known, charge)| {
            (*charge, usize::MAX - known.accused_by.len(), known.order)
        });
        first.map(|(rank, known, charge)| Verdict {
            rank,
            charge,
            end: known.end,
            is_accused: !known.accused_by.is_empty(),
        })
    }

    fn known(&mut self, rank: usize) -> &mut Known {
        let order = self.heard;
        self.heard += 1;
        self.ranks.entry(rank).or_insert_with(|| Known {
            order,
            ..Known::default()
        })
    }
}

impl Verdict {
    /// How long to wait, from the first evidence on, for some that could change the verdict or
    /// complete it: a rank that panics says so a while before its process ends.
    pub(crate) fn patience(&self) -> Duration {
        Duration::from_millis(match (self.charge, self.end) {
            // A program that lost a rank may abort; its accusation can come just behind its end.
            (Charge::Killed, Some(End::Signal(signal::SIGABRT))) => 50,
            (Charge::Killed, _) => 0,
            // That it has joined after all, or taken leave, can still be on its way.
            (Charge::Silent, Some(_)) if !self.is_accused => 500,
            (Charge::Confessed | Charge::Failed | Charge::Silent, Some(_)) => 0,
            (Charge::Confessed, None) => 1000,
            (Charge::Failed | Charge::Silent, None) => 500,
            (Charge::Mutual, _) => 250,
            (Charge::Code, _) => 50,
            (Charge::Error | Charge::Collateral, _) => 250,
        })
    }
}

#[derive(Clone, Debug, Default)]
struct Known {
    /// When it was first heard of.
    order: usize,
    end: Option<End>,
    accuses: Option<BTreeSet<usize>>,
    accused_by: BTreeSet<usize>,
    is_missed: bool,
    has_deserted: bool,
}

impl Known {
    fn charge(&self, rank: usize) -> Option<Charge> {
        let accuses_others = self
            .accuses
            .as_ref()
            .is_some_and(|accused| accused.iter().any(|&other| other != rank));
        let is_accused = !self.accused_by.is_empty() || self.is_missed;
        let confessed = self
            .accuses
            .as_ref()
            .is_some_and(|accused| accused.contains(&rank));
        match (self.end, accuses_others, is_accused) {
            (_, true, true) => Some(Charge::Mutual),
            (_, true, false) => Some(Charge::Collateral),
            (Some(End::Signal(_)), false, _) => Some(Charge::Killed),
            _ if confessed => Some(Charge::Confessed),
            (Some(End::Code(code)), false, true) if code != 0 => Some(Charge::Failed),
            (_, false, true) => Some(Charge::Silent),
            (Some(End::Code(0)), false, false) => None,
            (Some(End::Code(code)), false, false) if code != ERROR => Some(Charge::Code),
            (Some(End::Code(_)), false, false) => Some(Charge::Error),
            (None, false, false) => self.accuses.as_ref().map(|_| Charge::Error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Copy, Debug)]
    enum Fact {
        Ended(usize, End),
        Accused(usize, &'static [usize]),
    }
    use End::{Code, Signal};
    use Fact::{Accused, Ended};

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

    fn verdict(facts: &[Fact]) -> Verdict {
        let mut evidence = Evidence::default();
        for &fact in facts {
            match fact {
                Ended(rank, end) => evidence.ended(rank, end),
                Accused(rank, accused) => evidence.accused(rank, accused),
            }
        }
        evidence.verdict().unwrap()
    }

    #[track_caller]
    fn check(facts: &[Fact], culprit: usize, charge: Charge) {
        for order in orders(facts) {
            let found = verdict(&order);
            assert_eq!((found.rank, found.charge), (culprit, charge), "{order:?}");
        }
    }

    #[test]
    fn the_first_is_the_same_in_every_order() {
        use Charge::{Confessed, Failed, Killed, Silent};
        // Killed; the others lose it, one over another.
        check(
            &[
                Ended(1, KILL),
                Accused(0, &[1]),
                Ended(0, Code(1)),
                Accused(2, &[0]),
                Ended(2, Code(1)),
            ],
            1,
            Killed,
        );
        // Killed, and nobody had joined.
        check(
            &[Ended(1, KILL), Ended(0, Code(1)), Ended(2, Code(3))],
            1,
            Killed,
        );
        // Panicked; a neighbour aborts over it.
        check(
            &[
                Accused(1, &[1]),
                Ended(1, Code(101)),
                Accused(0, &[1]),
                Ended(0, ABORT),
            ],
            1,
            Confessed,
        );
        // Ended with a code, without a word.
        check(
            &[
                Ended(2, Code(3)),
                Accused(0, &[2]),
                Accused(1, &[0]),
                Ended(0, Code(101)),
                Ended(1, Code(101)),
            ],
            2,
            Failed,
        );
        // Stopped: it says and does nothing.
        check(
            &[
                Accused(0, &[1]),
                Accused(2, &[0, 1]),
                Ended(0, Code(1)),
                Ended(2, Code(1)),
            ],
            1,
            Silent,
        );
        // Left early with exit code 0.
        check(
            &[
                Ended(1, Code(0)),
                Accused(0, &[1]),
                Ended(0, Code(1)),
                Ended(2, Code(1)),
            ],
            1,
            Silent,
        );
    }

    #[test]
    fn what_a_rank_says_first_counts() {
        let mut evidence = Evidence::default();
        // It lost rank 1, and panicked over that.
        evidence.accused(0, &[1]);
        evidence.accused(0, &[0]);
        evidence.ended(0, Code(101));
        assert_eq!(evidence.verdict().unwrap().rank, 1);
    }

    #[test]
    fn where_all_accuse_each_other_the_most_accused_is_first() {
        check(
            &[Accused(0, &[1]), Accused(1, &[0]), Accused(2, &[1])],
            1,
            Charge::Mutual,
        );
        // One to one, the clock decides.
        assert_eq!(verdict(&[Accused(0, &[1]), Accused(1, &[0])]).rank, 0);
        assert_eq!(verdict(&[Accused(1, &[0]), Accused(0, &[1])]).rank, 1);
    }

    #[test]
    fn without_accusations_a_code_of_its_own_beats_an_error_and_the_first_wins() {
        check(&[Ended(0, Code(1)), Ended(1, Code(101))], 1, Charge::Code);
        assert_eq!(verdict(&[Ended(2, Code(4)), Ended(1, Code(5))]).rank, 2);
        assert_eq!(verdict(&[Ended(2, KILL), Ended(1, KILL)]).rank, 2);
        assert_eq!(verdict(&[Accused(2, &[]), Ended(1, Code(1))]).rank, 2);
    }

    #[test]
    fn success_is_no_charge_unless_others_wait_in_vain() {
        let mut evidence = Evidence::default();
        evidence.ended(0, Code(0));
        assert_eq!(evidence.verdict(), None);
        evidence.missed(0, true);
        evidence.ended(1, Code(1));
        let verdict = evidence.verdict().unwrap();
        assert_eq!((verdict.rank, verdict.charge), (0, Charge::Silent));
        assert_eq!(verdict.patience(), Duration::from_millis(500));
        evidence.missed(0, false);
        assert_eq!(evidence.verdict().unwrap().rank, 1);
    }

    #[test]
    fn a_deserter_is_first_where_others_fail_and_innocent_where_none_does() {
        let mut evidence = Evidence::default();
        evidence.ended(1, Code(0));
        evidence.deserted(1, true);
        assert_eq!(evidence.verdict(), None);
        evidence.ended(0, Code(4));
        assert_eq!(evidence.verdict().unwrap().rank, 1);
        // Killed is killed.
        evidence.ended(2, KILL);
        assert_eq!(evidence.verdict().unwrap().rank, 2);
    }

    #[test]
    fn what_is_certain_needs_no_patience() {
        for (facts, patience) in [
            (&[Ended(1, KILL)][..], 0),
            (&[Ended(1, ABORT)], 50),
            (&[Ended(1, Code(3)), Accused(0, &[1])], 0),
            (&[Ended(1, Code(0)), Accused(0, &[1])], 0),
            (&[Accused(1, &[1])], 1000),
            (&[Accused(0, &[1])], 500),
            (&[Ended(0, Code(1))], 250),
            (&[Ended(0, Code(7))], 50),
        ] {
            assert_eq!(
                verdict(facts).patience(),
                Duration::from_millis(patience),
                "{facts:?}"
            );
        }
    }
}
