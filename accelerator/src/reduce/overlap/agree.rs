use accelerator_collective::ProcessGroup;

use super::ready_order::ReadyOrder;
use crate::core::error::Result;

/// The number of windows that ranks wait for one that had no samples in any of them.
const MAX_WINDOWS: u32 = 32;

/// The knowledge of a rank about when gradients are ready, from windows whose last micro-step had samples
/// for it. An idle rank may compute anything, which teaches nothing.
#[derive(Debug, Eq, PartialEq)]
pub(in crate::reduce) enum WindowObservation {
    /// The depth of the loss is to be found.
    Depth,
    /// The loss is this deep: it is to be found where each gradient is ready.
    Places(usize),
    /// The depth at which each parameter's gradient is ready, if that is before the end.
    Learnt(Vec<Option<usize>>),
}

/// The calibration of a model's ranks in the first windows. Each rank learns by itself, and all of them end
/// this together.
#[derive(Debug)]
pub(super) struct RankCalibration {
    pub(super) observation: WindowObservation,
    /// The number of windows that passed.
    windows: u32,
}

/// The result of all ranks, which is the same on each of them.
#[derive(Debug, Eq, PartialEq)]
pub(super) enum CalibrationOutcome {
    /// Some rank is still calibrating.
    NotYet,
    /// No gradient is ready before the end on any rank.
    NothingEarly,
    /// This is the order of one rank.
    Order(ReadyOrder),
}

impl RankCalibration {
    pub(super) fn new() -> Self {
        Self {
            observation: WindowObservation::Depth,
            windows: 0,
        }
    }

    /// Returns the depth at which each parameter's gradient is ready on this rank.
    pub(super) fn ready(&self, parameters: usize) -> Vec<Option<usize>> {
        match &self.observation {
            WindowObservation::Learnt(ready) => ready.clone(),
            WindowObservation::Depth | WindowObservation::Places(_) => vec![None; parameters],
        }
    }

    /// A window was reduced. All ranks call it, for a model with so many parameters.
    ///
    /// The order is that of the first rank on which anything is ready early. It is there when every
    /// rank has learnt, or when one has been waited for in vain: that one will send everything in
    /// the end.
    #[track_caller]
    pub(super) fn agree(
        &mut self,
        parameters: usize,
        group: &ProcessGroup,
    ) -> Result<CalibrationOutcome> {
        self.windows += 1;
        let mine = CalibrationProgress::of(&self.observation);
        let all = group.all_gather(&[mine as u8])?;
        if all.contains(&(CalibrationProgress::Learning as u8)) && self.windows < MAX_WINDOWS {
            return Ok(CalibrationOutcome::NotYet);
        }
        let teacher = all
            .iter()
            .position(|&progress| progress == CalibrationProgress::Early as u8);
        let Some(teacher) = teacher else {
            return Ok(CalibrationOutcome::NothingEarly);
        };
        // 0 is what is ready in the end.
        let mut depths: Vec<u64> = self
            .ready(parameters)
            .iter()
            .map(|depth| depth.map_or(0, |depth| depth as u64))
            .collect();
        group.broadcast(&mut depths, teacher)?;
        let depths: Vec<Option<usize>> = depths
            .iter()
            .map(|&depth| (depth > 0).then_some(depth as usize))
            .collect();
        Ok(CalibrationOutcome::Order(ReadyOrder::of(&depths)))
    }
}

/// The progress of a rank, as it is sent to the others.
#[derive(Clone, Copy, Debug)]
#[repr(u8)]
enum CalibrationProgress {
    Learning,
    /// Nothing is ready early.
    Late,
    /// Something is.
    Early,
}

impl CalibrationProgress {
    fn of(observation: &WindowObservation) -> Self {
        match observation {
            WindowObservation::Depth | WindowObservation::Places(_) => Self::Learning,
            WindowObservation::Learnt(ready) if ready.iter().any(Option::is_some) => Self::Early,
            WindowObservation::Learnt(_) => Self::Late,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the result of two ranks that know `observations` after this many windows.
    fn agreement(observations: [fn() -> WindowObservation; 2], windows: u32) -> CalibrationOutcome {
        let both = crate::launch(2, |accelerator| {
            let mut calibration = RankCalibration {
                observation: observations[accelerator.rank()](),
                windows: windows - 1,
            };
            calibration.agree(3, accelerator.group())
        });
        let [one, other] = <[CalibrationOutcome; 2]>::try_from(both.unwrap()).unwrap();
        assert_eq!(one, other);
        one
    }

    fn late() -> WindowObservation {
        WindowObservation::Learnt(vec![None; 3])
    }

    fn early() -> WindowObservation {
        WindowObservation::Learnt(vec![Some(2), None, Some(5)])
    }

    fn earlier() -> WindowObservation {
        WindowObservation::Learnt(vec![Some(7), Some(3), None])
    }

    #[test]
    fn the_first_rank_that_knows_of_anything_early_teaches_all() {
        let order = |observation: WindowObservation| match observation {
            WindowObservation::Learnt(ready) => CalibrationOutcome::Order(ReadyOrder::of(&ready)),
            WindowObservation::Depth | WindowObservation::Places(_) => CalibrationOutcome::NotYet,
        };
        assert_eq!(agreement([early, earlier], 2), order(early()));
        assert_eq!(agreement([earlier, early], 2), order(earlier()));
        assert_eq!(agreement([late, earlier], 2), order(earlier()));
        assert_eq!(agreement([late, late], 2), CalibrationOutcome::NothingEarly);
    }

    #[test]
    fn a_rank_that_had_no_samples_is_waited_for_but_not_for_ever() {
        for idle in [
            (|| WindowObservation::Depth) as fn() -> WindowObservation,
            || WindowObservation::Places(9),
        ] {
            for observations in [[idle, early], [early, idle]] {
                assert_eq!(
                    agreement(observations, MAX_WINDOWS - 1),
                    CalibrationOutcome::NotYet
                );
                let outcome = agreement(observations, MAX_WINDOWS);
                assert!(
                    matches!(outcome, CalibrationOutcome::Order(_)),
                    "{outcome:?}"
                );
            }
            assert_eq!(
                agreement([idle, idle], MAX_WINDOWS),
                CalibrationOutcome::NothingEarly
            );
        }
    }
}
