//! Compares what must be the same on every rank; an error names the ranks that differ.

use core::fmt;

use accelerator_collective::ProcessGroup;

use crate::core::error::{Error, Result};

/// Compares `mine`, a text that says everything about `what`, with that of every other rank. All
/// ranks get the same error.
#[track_caller]
pub(crate) fn check(group: &ProcessGroup, what: &str, mine: &str) -> Result<()> {
    check_all(group, &[Term::new(what, mine)])
}

/// One thing that must be the same.
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

    /// Names the place where it is set.
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
            "{}; start every rank with the same",
            differ.join("; ")
        ))),
    }
}
