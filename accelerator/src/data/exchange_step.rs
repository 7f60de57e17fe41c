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

/// The models that step with the batches of a loader, and how often: between the steps of two models with one batch,
/// there is no place in the data from which both continue.
///
/// Windows are counted, not batches: a place that the first of them moves on to is one.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub(crate) struct Steppers {
    /// The epoch of the last place.
    epoch: u64,
    models: Vec<Stepper>,
    /// The number of places so far.
    places: u64,
}

#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
struct Stepper {
    interval: Interval,
    /// The number of the place at which it stepped last; `None` if it says nothing of when it steps next.
    last: Option<u64>,
    /// The first id of all that it holds.
    model: u64,
}

/// The number of places per step of a model.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
enum Interval {
    Steady(u64),
    /// The model has stepped once.
    Unknown,
    Varying,
}

/// The effect of a step on the place in the data.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum AdvancesCursor {
    No,
    /// The place moves to one in that epoch.
    To(u64),
}

impl Steppers {
    /// A model has stepped.
    pub(super) fn step(&mut self, model: u64, moves: AdvancesCursor) {
        if let AdvancesCursor::To(epoch) = moves {
            self.places += 1;
            if epoch != self.epoch {
                self.epoch = epoch;
                self.models.iter_mut().for_each(Stepper::begin_epoch);
            }
        }
        let known = self.models.iter().position(|known| known.model == model);
        let at = known.unwrap_or(self.models.len());
        if known.is_none() {
            self.models.push(Stepper {
                interval: Interval::Unknown,
                last: None,
                model,
            });
        }
        self.models[at].step(self.places);
    }

    /// A model that steps at places such as this one and has not done so yet, while another one has.
    pub(crate) fn missing(&self) -> Option<u64> {
        let missing = self
            .models
            .iter()
            .find(|stepper| stepper.is_due(self.places));
        missing.map(|stepper| stepper.model)
    }
}

impl Stepper {
    fn step(&mut self, place: u64) {
        let last = self.last.replace(place);
        let Some(gap) = last.map(|last| place - last).filter(|gap| *gap > 0) else {
            return;
        };
        self.interval = match self.interval {
            Interval::Unknown => Interval::Steady(gap),
            Interval::Steady(known) if known == gap => self.interval,
            Interval::Steady(_) | Interval::Varying => Interval::Varying,
        };
    }

    /// Begins an epoch: a model that steps now and then may count its batches from the start of each.
    fn begin_epoch(&mut self) {
        if !matches!(self.interval, Interval::Steady(1) | Interval::Unknown) {
            self.last = None;
        }
    }

    fn is_due(&self, place: u64) -> bool {
        match (self.interval, self.last) {
            (Interval::Steady(gap), Some(last)) => last + gap == place,
            _ => false,
        }
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;

    const POSITION: ReadPosition = ReadPosition {
        epoch: 1,
        loader: 0,
        step: 7,
    };

    #[test]
    fn another_place_is_named_on_every_rank_also_beside_a_failure() {
        let errors = crate::launch(3, |accelerator| {
            let rank = accelerator.rank();
            let position = [
                POSITION,
                ReadPosition {
                    loader: 2,
                    ..POSITION
                },
                POSITION,
            ][rank];
            let failed = Error::new(Kind::Data, "no disk");
            let mine = if rank == 2 { Err(&failed) } else { Ok(rank) };
            let error = exchange_step(
                accelerator.group(),
                position,
                mine,
                "read",
                Location::caller(),
            );
            let error = error.unwrap_err();
            // The group lives.
            accelerator.wait_for_everyone()?;
            Ok(error)
        })
        .unwrap();
        for error in errors {
            assert!(error.is_misuse(), "{error:?}");
            let text = error.to_string();
            for side in [
                "ranks 0, 2: step 7 of epoch 1 of loader 0",
                "rank 1: step 7 of epoch 1 of loader 2",
            ] {
                assert!(text.contains(side), "{text}");
            }
        }
    }

    /// Words of different kinds are not read before it is known that they are of one place.
    #[test]
    fn words_of_another_kind_are_of_another_place() {
        let errors = crate::launch(2, |accelerator| {
            let group = accelerator.group();
            let error = match accelerator.rank() {
                0 => exchange_step(
                    group,
                    POSITION,
                    Ok("aaa".to_owned()),
                    "read",
                    Location::caller(),
                )
                .unwrap_err(),
                _ => {
                    let position = ReadPosition {
                        epoch: 2,
                        ..POSITION
                    };
                    exchange_step(group, position, Ok(5_u8), "read", Location::caller())
                        .unwrap_err()
                }
            };
            Ok(error)
        });
        for error in errors.unwrap() {
            assert!(error.is_misuse() && !error.is_collective(), "{error:?}");
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

    const FIRST: u64 = 11;
    const SECOND: u64 = 22;

    /// Steps both at a place in that epoch, or the first alone.
    fn place(steppers: &mut Steppers, epoch: u64, with_second: bool) -> bool {
        steppers.step(FIRST, AdvancesCursor::To(epoch));
        let is_missing = steppers.missing() == Some(SECOND);
        assert!(is_missing || steppers.missing().is_none());
        if with_second {
            steppers.step(SECOND, AdvancesCursor::No);
            assert_eq!(steppers.missing(), None);
        }
        is_missing
    }

    #[test]
    fn a_model_that_steps_with_each_batch_is_missed_from_the_third_on() {
        let mut steppers = Steppers::default();
        let missed = [0, 0, 0, 1, 2].map(|epoch| place(&mut steppers, epoch, true));
        assert_eq!(missed, [false, false, true, true, true]);
        // It no longer steps, which is not known in the first batch.
        let missed = [2, 2, 3].map(|epoch| place(&mut steppers, epoch, false));
        assert_eq!(missed, [true, false, false]);
    }

    #[test]
    fn a_model_that_steps_with_each_third_batch_is_missed_at_those() {
        let mut steppers = Steppers::default();
        let missed: Vec<_> = (1..=12)
            .filter(|at| place(&mut steppers, 0, at % 3 == 0))
            .collect();
        assert_eq!(missed, [9, 12]);
        // An epoch of four batches, in each of which it begins to count anew.
        for epoch in 1..4 {
            let missed = (1..=4).filter(|at| place(&mut steppers, epoch, at % 3 == 0));
            assert_eq!(missed.count(), 0);
        }
    }

    #[test]
    fn a_model_that_steps_as_it_likes_is_not_missed() {
        let mut steppers = Steppers::default();
        for steps in [true, true, false, true] {
            place(&mut steppers, 0, steps);
        }
        for steps in [false, true, true, false, false, true] {
            assert!(!place(&mut steppers, 0, steps));
        }
    }

    #[test]
    fn one_model_is_never_missed() {
        let mut steppers = Steppers::default();
        for epoch in 0..9 {
            steppers.step(FIRST, AdvancesCursor::To(epoch));
            // Twice with one batch.
            steppers.step(FIRST, AdvancesCursor::No);
            assert_eq!(steppers.missing(), None);
        }
    }
}
