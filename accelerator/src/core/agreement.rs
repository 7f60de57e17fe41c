//! Compares values that must be the same on every rank, and reports an error of one rank to all. Errors name the
//! ranks.

use core::fmt;

use accelerator_collective::ProcessGroup;
use serde::{Deserialize, Serialize};

use crate::core::error::{Error, Kind, Result};

/// Compares `mine`, a text that says everything about `what`, with that of every other rank. All
/// ranks get the same error.
#[track_caller]
pub(crate) fn check(group: &ProcessGroup, what: &str, mine: &str) -> Result<()> {
    check_all(group, &[Term::new(what, mine)])
}

pub(crate) struct Term {
    what: String,
    value: String,
    shown: String,
    hint: &'static str,
    origin: Option<&'static str>,
    sides: Sides,
}

/// The ranks that an error names.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Sides {
    All,
    /// Rank 0 and the first that differs.
    Two,
}

impl Term {
    pub(crate) fn new(what: impl Into<String>, value: impl ToString) -> Self {
        let value = value.to_string();
        Self {
            what: what.into(),
            shown: value.clone(),
            value,
            hint: "",
            origin: None,
            sides: Sides::Two,
        }
    }

    /// Errors show this in place of what is compared.
    pub(crate) fn shown_as(self, shown: String) -> Self {
        Self { shown, ..self }
    }

    /// Errors add this, which says what to do.
    pub(crate) fn with_hint(self, hint: &'static str) -> Self {
        Self { hint, ..self }
    }

    /// Errors show what every rank has.
    pub(crate) fn shown_of_all(self) -> Self {
        Self {
            sides: Sides::All,
            ..self
        }
    }

    pub(crate) fn set_by(self, origin: &'static str) -> Self {
        let origin = Some(origin);
        Self { origin, ..self }
    }
}

/// Lists the value of each rank, in rank order, ranks with the same value together:
/// `ranks 0, 2: a; rank 1: b`.
pub(crate) fn sides<T: fmt::Display>(all: impl IntoIterator<Item = T>) -> String {
    let mut sides: Vec<(String, Vec<String>)> = Vec::new();
    for (rank, one) in all.into_iter().enumerate() {
        let (one, rank) = (one.to_string(), rank.to_string());
        match sides.iter_mut().find(|(side, _)| *side == one) {
            Some((_, ranks)) => ranks.push(rank),
            None => sides.push((one, vec![rank])),
        }
    }
    let sides = sides.into_iter().map(|(side, ranks)| {
        let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
        format!("{noun} {}: {side}", ranks.join(", "))
    });
    sides.collect::<Vec<_>>().join("; ")
}

/// Compares several things at once. The error is about those that differ from rank 0's; of several terms of one name in a
/// row, about the first.
#[track_caller]
pub(crate) fn check_all(group: &ProcessGroup, mine: &[Term]) -> Result<()> {
    if group.world_size() == 1 {
        return Ok(());
    }
    let told = mine.iter();
    let told = told.map(|term| (term.value.clone(), term.shown.clone()));
    let agreeing = group.for_purpose("what must be the same on every rank");
    let all = agreeing.all_gather_object(&told.collect::<Vec<_>>())?;
    // One that has fewer, of a smaller data set, differs in another term. All ranks find the same.
    let common = all.iter().map(Vec::len).min().unwrap_or_default();
    let differ = mine.iter().take(common).enumerate();
    let differ = differ.filter_map(|(index, term)| {
        let of = |rank: usize| all[rank].get(index);
        let rank = (1..all.len()).find(|rank| of(*rank).map(|x| &x.0) != of(0).map(|x| &x.0))?;
        let shown = |rank| of(rank).map_or("none", |(_, shown)| shown);
        let origin = term.origin.map(|origin| format!(" (set by {origin})"));
        let found = match term.sides {
            Sides::All => sides((0..all.len()).map(shown)),
            Sides::Two => format!(
                "rank 0 has {}, and rank {rank} has {}",
                shown(0),
                shown(rank)
            ),
        };
        let text = format!(
            "{}{} differs between ranks: {found}{}",
            term.what,
            origin.unwrap_or_default(),
            term.hint,
        );
        Some((&term.what, text))
    });
    let mut differ: Vec<_> = differ.collect();
    differ.dedup_by_key(|(what, _)| *what);
    let differ: Vec<_> = differ.into_iter().map(|(_, text)| text).collect();
    match differ.is_empty() {
        true => Ok(()),
        false => Err(Error::config(format!(
            "{}; every rank must have the same values, whether they come from the code, arguments or environment variables",
            differ.join("; ")
        ))),
    }
}

/// Tells the other ranks, which [`receive`] it, how this rank's work for all went; to be called on rank
/// 0, which gets its outcome back.
#[track_caller]
pub(crate) fn send<T>(group: &ProcessGroup, mine: Result<T>) -> Result<T> {
    let failure = mine.as_ref().err().map(Failure::of);
    let told = group
        .for_purpose(PURPOSE)
        .broadcast_object(Some(&failure), 0);
    let value = mine?;
    told?;
    Ok(value)
}

/// Receives what rank 0 [`send`]s. When it failed, the error answers to predicates as rank 0's
/// does, and says that rank 0 failed to do `action`, and why.
#[track_caller]
pub(crate) fn receive(group: &ProcessGroup, action: &str) -> Result<()> {
    take_turn(group, 0, None, action)
}

/// Ends the turn of the rank of that number, which tells the others whether it failed to do `action`.
#[track_caller]
pub(crate) fn take_turn(
    group: &ProcessGroup,
    turn: usize,
    mine: Option<&Error>,
    action: &str,
) -> Result<()> {
    let mine = mine.map(Failure::of);
    let told = (turn == group.rank()).then_some(&mine);
    match group.for_purpose(PURPOSE).broadcast_object(told, turn)? {
        Some(failure) => Err(failure.into_error(turn, action)),
        None => Ok(()),
    }
}

/// Returns what this rank did by itself. If it failed on one rank, it fails on all of them, each with its own error if it has
/// one.
#[track_caller]
pub(crate) fn together<T>(group: &ProcessGroup, mine: Result<T>, action: &str) -> Result<T> {
    if group.world_size() == 1 {
        return mine;
    }
    let told = exchange(group, mine.as_ref().err(), action);
    let mine = mine?;
    told.map(|()| mine)
}

/// Tells all ranks of what failed on some of them, and hears of it. The error is that of the lowest
/// rank that failed, which did so while it had to do `action`.
#[track_caller]
pub(crate) fn exchange(group: &ProcessGroup, mine: Option<&Error>, action: &str) -> Result<()> {
    let all = group
        .for_purpose(PURPOSE)
        .all_gather_object(&mine.map(Failure::of))?;
    let mut failures = all.into_iter().enumerate();
    match failures.find_map(|(rank, failure)| Some((rank, failure?))) {
        Some((rank, failure)) => Err(failure.into_error(rank, action)),
        None => Ok(()),
    }
}

const PURPOSE: &str = "how the work of a rank went";

/// The part of an error that can be sent to other ranks.
#[derive(Clone, Deserialize, Serialize)]
pub(crate) struct Failure {
    kind: Kind,
    misuse: bool,
    message: String,
}

impl Failure {
    pub(crate) fn of(error: &Error) -> Self {
        Self {
            kind: error.kind(),
            misuse: error.is_misuse(),
            message: format!("{error:?}"),
        }
    }

    pub(crate) fn into_error(self, rank: usize, action: &str) -> Error {
        let message = format!("rank {rank} failed to {action}: {}", self.message);
        match self.misuse {
            true => Error::misuse_in(self.kind, message),
            false => Error::new(self.kind, message),
        }
    }
}

/// The first eight bytes of a hash: enough to tell two values apart that nobody made alike on purpose.
pub(crate) fn short(hash: &blake3::Hash) -> u64 {
    let start = hash.as_bytes().iter().take(8);
    start.fold(0, |number, &byte| number << 8 | u64::from(byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns what two ranks get for one outcome of rank 0.
    fn ranks(work: impl Fn(&ProcessGroup) -> Result<()> + Send + Sync) -> Vec<Result<()>> {
        crate::launch(2, |accelerator| {
            let group = accelerator.group();
            Ok(match accelerator.on_main_process(|| work(group)) {
                Some(mine) => send(group, mine),
                None => receive(group, "save"),
            })
        })
        .unwrap()
    }

    #[test]
    fn every_rank_gets_the_kind_and_the_message() {
        let full = || std::io::Error::new(std::io::ErrorKind::StorageFull, "disk full");
        let outcomes = ranks(|_| Err(Error::io("write", "x".as_ref(), full())));
        for (rank, outcome) in outcomes.into_iter().enumerate() {
            let error = outcome.unwrap_err();
            assert!(error.is_io() && !error.is_misuse(), "{error:?}");
            let text = format!("{error:?}");
            assert!(text.contains("disk full"), "{text}");
            assert_eq!(text.contains("rank 0 failed to save"), rank == 1, "{text}");
        }
    }

    #[test]
    fn a_misuse_that_a_collective_found_stays_both() {
        for outcome in ranks(|group| Ok(group.barrier()?)) {
            let error = outcome.unwrap_err();
            assert!(error.is_misuse() && error.is_collective(), "{error:?}");
        }
    }

    #[test]
    fn success_is_success() {
        assert!(ranks(|_| Ok(())).iter().all(Result::is_ok));
    }
}
