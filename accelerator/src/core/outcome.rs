//! The outcome of what rank 0 did for all ranks, as the others get it.

use accelerator_collective::ProcessGroup;
use serde::{Deserialize, Serialize};

use crate::core::error::{Error, Kind, Result};

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
    let told: Option<Failure> = group.for_purpose(PURPOSE).broadcast_object(None, 0)?;
    match told {
        Some(failure) => Err(failure.into_error(0, action)),
        None => Ok(()),
    }
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

/// The purpose of this exchange between ranks.
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

    /// Returns the error that `rank` failed to do `action`.
    pub(crate) fn into_error(self, rank: usize, action: &str) -> Error {
        let message = format!("rank {rank} failed to {action}: {}", self.message);
        match self.misuse {
            true => Error::misuse_in(self.kind, message),
            false => Error::new(self.kind, message),
        }
    }
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
