//! The models that step with the batches of a loader.

use serde::{Deserialize, Serialize};

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
    /// Moves the place to one in that epoch.
    To(u64),
}

impl Steppers {
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

#[cfg(test)]
mod tests {
    use super::*;

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
