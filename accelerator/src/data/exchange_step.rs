use core::fmt;
use core::panic::Location;

use accelerator_collective::ProcessGroup;
use ciborium::Value;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::core::agreement::{Failure, sides};
use crate::core::error::{Error, Kind, Result};

/// The position at which a rank reads. It goes with everything that ranks tell each other about data, so that
/// nothing of one loader or epoch is taken for a part of another.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(crate) struct ReadPosition {
    pub(super) epoch: u64,
    /// Its number among the loaders of the program.
    pub(super) loader: u64,
    pub(super) step: u64,
}

impl ReadPosition {
    pub(crate) fn numbers(self) -> [u64; 3] {
        [self.loader, self.epoch, self.step]
    }
}

impl fmt::Display for ReadPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            epoch,
            loader,
            step,
        } = self;
        write!(f, "step {step} of epoch {epoch} of loader {loader}")
    }
}

/// Sends this rank's step to all ranks, and receives theirs, in rank order.
///
/// If a rank has failed to do `action`, all fail: this one with its own error, if it has one. If ranks
/// are at different places, all fail alike. Errors of the communication name the line of `caller`.
pub(super) fn exchange_step<T: Serialize + DeserializeOwned>(
    group: &ProcessGroup,
    position: ReadPosition,
    mine: Result<T, &Error>,
    action: &str,
    caller: &'static Location<'static>,
) -> Result<Vec<T>> {
    let word = match &mine {
        Ok(word) => Ok(Value::serialized(word).map_err(unreadable)?),
        Err(error) => Err(Failure::of(error)),
    };
    let group = group.for_purpose(PURPOSE).for_caller(caller);
    let told = group.all_gather_object(&(position, word));
    let told: Vec<(ReadPosition, Result<Value, Failure>)> = match (told, mine.err()) {
        (Ok(told), own) => {
            same_place(&told, own)?;
            if let Some(own) = own {
                return Err(own.clone());
            }
            told
        }
        // What went wrong here is the cause.
        (Err(_), Some(own)) => return Err(own.clone()),
        (Err(error), None) => return Err(error.into()),
    };
    let words = told.into_iter().enumerate();
    words
        .map(|(rank, (_, word))| {
            let word = word.map_err(|failure| failure.into_error(rank, action))?;
            word.deserialized().map_err(unreadable)
        })
        .collect()
}

/// The purpose of everything that ranks tell each other about data, whatever they read: [`ReadPosition`] names a
/// rank that reads other data than the others, and this text one that reads none.
pub(super) const PURPOSE: &str = "the next batch of a loader";

fn same_place<T>(told: &[(ReadPosition, T)], own: Option<&Error>) -> Result<()> {
    if told.iter().all(|(position, _)| *position == told[0].0) {
        return Ok(());
    }
    let message = format!(
        "the ranks read different data at the same time ({}): ask for batches of the same loader and epoch, \
         in the same order, on every rank; loaders are numbered from 0, in the order in which they were prepared",
        sides(told.iter().map(|(position, _)| position))
    );
    Err(match own {
        Some(own) => Error::new(Kind::Misuse, message).with_source(own.clone()),
        None => Error::misuse(message),
    })
}

fn unreadable(error: ciborium::value::Error) -> Error {
    let message =
        "what ranks tell each other of a loader cannot be read: start the same program on all";
    Error::new(Kind::Data, message).with_source(error)
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;

    const POSITION: ReadPosition = ReadPosition {
        epoch: 1,
        loader: 0,
        step: 7,
    };

    /// Words of different kinds are not read before it is known that they are of one place.
    #[test]
    fn another_place_is_named_on_every_rank_also_beside_a_failure_and_words_of_another_kind() {
        let errors = crate::launch(3, |accelerator| {
            let group = accelerator.group();
            let caller = Location::caller();
            let failed = Error::new(Kind::Data, "no disk");
            let elsewhere = ReadPosition {
                loader: 2,
                ..POSITION
            };
            let error = match accelerator.rank() {
                0 => exchange_step(group, POSITION, Ok(5_u8), "read", caller).unwrap_err(),
                1 => {
                    let word = Ok("aaa".to_owned());
                    exchange_step(group, elsewhere, word, "read", caller).unwrap_err()
                }
                _ => {
                    exchange_step::<u8>(group, POSITION, Err(&failed), "read", caller).unwrap_err()
                }
            };
            // The group lives.
            accelerator.wait_for_everyone()?;
            Ok(error)
        })
        .unwrap();
        for error in errors {
            assert!(error.is_misuse() && !error.is_collective(), "{error:?}");
            let text = error.to_string();
            for side in [
                "ranks 0, 2: step 7 of epoch 1 of loader 0",
                "rank 1: step 7 of epoch 1 of loader 2",
            ] {
                assert!(text.contains(side), "{text}");
            }
        }
    }

    #[test]
    fn what_failed_here_is_told_before_the_loss_of_another_rank() {
        let errors = crate::launch(2, |accelerator| {
            let group = accelerator.group();
            group.abort("this rank gives up".to_owned());
            let failed = Error::new(Kind::Data, "no disk");
            let caller = Location::caller();
            Ok(exchange_step::<u8>(group, POSITION, Err(&failed), "read", caller).unwrap_err())
        });
        for error in errors.unwrap() {
            assert!(error.is_data(), "{error:?}");
        }
    }
}
