//! The order of buckets, and the points of backward where each is complete, from where each gradient is ready.

use accelerator_collective::ProcessGroup;

use crate::core::error::Result;

/// Parameters in the order in which they enter buckets, and how many of them are ready before the
/// end of backward. Those that are not go last, and share no bucket with the others.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(in crate::reduce) struct ReadyOrder {
    pub(in crate::reduce) parameters: Vec<usize>,
    pub(in crate::reduce) early: usize,
    /// Set at a place in `parameters` if that gradient is ready later than the one in front of it.
    later: Vec<bool>,
}

impl ReadyOrder {
    /// Orders from the last visited to the first, which is about the order in which backward makes gradients.
    pub(in crate::reduce) fn reversed(parameters: usize) -> Self {
        Self::of(&vec![None; parameters])
    }

    /// The deepest first. `ready` has, for each parameter, the depth at which its gradient is
    /// ready, if that is before the end.
    pub(in crate::reduce) fn of(ready: &[Option<usize>]) -> Self {
        let mut parameters: Vec<usize> = (0..ready.len()).rev().collect();
        // `None` is less than every depth. The sort keeps the order of equals.
        parameters.sort_by_key(|&parameter| core::cmp::Reverse(ready[parameter]));
        let pairs = parameters.windows(2);
        let later = pairs.map(|pair| ready[pair[0]] != ready[pair[1]]);
        let later = core::iter::once(false).chain(later).collect();
        Self {
            parameters,
            early: ready.iter().flatten().count(),
            later,
        }
    }

    /// Returns `true` if the gradient at that place is ready later than the one in front of it.
    pub(in crate::reduce) fn is_later(&self, place: usize) -> bool {
        self.later[place]
    }
}

/// A point of backward, and the buckets that are complete there.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(in crate::reduce) struct FlushPoint {
    pub(in crate::reduce) depth: usize,
    pub(in crate::reduce) buckets: Vec<usize>,
}

/// The points of backward on a rank where gradients are ready at these depths: from the deepest to the
/// shallowest. `buckets` has the parameters of each bucket.
///
/// Buckets are sent in their order, so that none is watched after one that is only complete in the
/// end.
pub(in crate::reduce) fn flush_points(
    buckets: &[Vec<usize>],
    ready: &[Option<usize>],
) -> Vec<FlushPoint> {
    let depth = |bucket: &Vec<usize>| {
        bucket
            .iter()
            .map(|&parameter| ready[parameter])
            .min()
            .flatten()
    };
    let mut depths: Vec<(usize, usize)> = buckets
        .iter()
        .map_while(depth)
        .enumerate()
        .map(|(bucket, depth)| (depth, bucket))
        .collect();
    depths.sort_by_key(|&(depth, bucket)| (core::cmp::Reverse(depth), bucket));
    depths
        .chunk_by(|(one, _), (next, _)| one == next)
        .map(|together| FlushPoint {
            depth: together[0].0,
            buckets: together.iter().map(|&(_, bucket)| bucket).collect(),
        })
        .collect()
}

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

    /// Agrees on the order after a window was reduced, for a model with this many parameters. All ranks call it.
    ///
    /// The order is that of the first rank on which anything is ready early. The ranks agree when every rank has
    /// learnt, or after `MAX_WINDOWS`: a rank that has not learnt by then sends everything in the end.
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
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_is_ready_first_goes_first_and_what_is_late_goes_last() {
        let order = ReadyOrder::of(&[Some(3), None, Some(9), Some(3), None]);
        assert_eq!(order.parameters, [2, 3, 0, 4, 1]);
        assert_eq!(order.early, 3);
        let later: Vec<bool> = (0..5).map(|place| order.is_later(place)).collect();
        assert_eq!(later, [false, true, false, true, false]);
        assert_eq!(ReadyOrder::reversed(3).parameters, [2, 1, 0]);
    }

    #[test]
    fn a_bucket_is_watched_where_its_last_gradient_is_ready() {
        let buckets = [vec![0, 1], vec![2], vec![3], vec![4]];
        let ready = [Some(9), Some(5), Some(7), None, Some(2)];
        let expected = [
            FlushPoint {
                depth: 7,
                buckets: vec![1],
            },
            FlushPoint {
                depth: 5,
                buckets: vec![0],
            },
        ];
        assert_eq!(flush_points(&buckets, &ready), expected);
        // A bucket without parameters has nothing to wait for, and is never watched.
        assert_eq!(flush_points(&[vec![]], &ready), []);
    }

    proptest! {
        #[test]
        fn an_order_has_every_parameter_once_and_depths_fall(
            ready in proptest::collection::vec(proptest::option::of(0_usize..20), 0..60),
        ) {
            let order = ReadyOrder::of(&ready);
            let mut sorted = order.parameters.clone();
            sorted.sort_unstable();
            prop_assert_eq!(sorted, (0..ready.len()).collect::<Vec<_>>());
            let depths: Vec<_> = order.parameters.iter().map(|&at| ready[at]).collect();
            prop_assert!(depths.is_sorted_by(|one, next| one >= next));
            prop_assert!(depths[..order.early].iter().all(Option::is_some));
            prop_assert!(depths[order.early..].iter().all(Option::is_none));
        }

        #[test]
        fn no_point_comes_before_a_gradient_of_its_buckets_is_ready(
            ready in proptest::collection::vec(proptest::option::of(0_usize..20), 1..60),
            cut in 1_usize..10,
        ) {
            let order = ReadyOrder::of(&ready);
            let buckets: Vec<Vec<usize>> =
                order.parameters.chunks(cut).map(<[usize]>::to_vec).collect();
            let points = flush_points(&buckets, &ready);
            prop_assert!(points.is_sorted_by(|one, next| one.depth > next.depth));
            let mut watched: Vec<usize> = Vec::new();
            for point in &points {
                for &bucket in &point.buckets {
                    watched.push(bucket);
                    prop_assert!(
                        buckets[bucket].iter().all(|&at| ready[at] >= Some(point.depth))
                    );
                }
            }
            watched.sort_unstable();
            // A beginning of the buckets, each once, and as long as can be.
            prop_assert_eq!(&watched, &(0..watched.len()).collect::<Vec<_>>());
            if let Some(next) = buckets.get(watched.len()) {
                prop_assert!(next.iter().any(|&at| ready[at].is_none()));
            }
        }
    }

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
