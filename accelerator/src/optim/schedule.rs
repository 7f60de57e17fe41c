use core::fmt;

use burn::lr_scheduler::LrSchedulerRecord;
use burn::lr_scheduler::module_lr_scheduler::{ModuleLearningRate, ModuleLrScheduler};

/// A scheduler that is to advance once an epoch, not with each optimizer step: prepare
/// `(optimizer, PerEpoch(scheduler))`.
///
/// The epoch is that of the batches passed to `backward`; the rate holds from the epoch's first
/// step. A bare count passed instead of a batch does not tell the epoch, and then the rate stays
/// as it is: pass the batch, or its [`with_weight`](crate::data::Batch::with_weight).
#[derive(Clone, Copy, Debug)]
pub struct PerEpoch<S>(pub S);

/// The optimizer has no schedule: each `step` is told its learning rate.
#[derive(Debug)]
pub struct Manual(pub(super) ());

/// The optimizer has a schedule, which advances with it.
#[derive(Debug)]
pub struct Scheduled(pub(super) Scheduler);

/// A Burn scheduler and when it advances.
pub(crate) struct Scheduler {
    pub(super) scheduler: ModuleLrScheduler,
    pub(super) unit: Unit,
    pub(super) current: Option<ModuleLearningRate>,
    /// How it stood before it gave the current rate, which Burn has no record for.
    pub(super) before: Option<LrSchedulerRecord>,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Unit {
    Step,
    Epoch { last: Option<u64> },
}

impl Scheduler {
    pub(crate) fn by_step(scheduler: ModuleLrScheduler) -> Self {
        Self {
            scheduler,
            unit: Unit::Step,
            current: None,
            before: None,
        }
    }

    pub(crate) fn by_epoch(scheduler: ModuleLrScheduler) -> Self {
        Self {
            scheduler,
            unit: Unit::Epoch { last: None },
            current: None,
            before: None,
        }
    }

    /// The rate for an optimizer step on a window of that epoch.
    pub(super) fn next(&mut self, epoch: Option<u64>) -> ModuleLearningRate {
        let held = match &mut self.unit {
            Unit::Step => None,
            Unit::Epoch { last } => {
                let same = epoch.is_none() || *last == epoch;
                *last = epoch.or(*last);
                self.current.clone().filter(|_| same)
            }
        };
        let rate = held.unwrap_or_else(|| {
            self.before = Some(self.scheduler.to_record());
            self.scheduler.step()
        });
        self.current = Some(rate.clone());
        rate
    }

    pub(super) fn last(&self) -> Option<f64> {
        self.current.as_ref().map(ModuleLearningRate::base)
    }
}

impl fmt::Debug for Scheduler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scheduler")
            .field("rate", &self.last())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use burn::lr_scheduler::step::StepLrSchedulerConfig;

    use super::*;

    fn halving() -> ModuleLrScheduler {
        StepLrSchedulerConfig::new(1.0, 1)
            .with_gamma(0.5)
            .init()
            .unwrap()
    }

    #[test]
    fn by_step_advances_each_time() {
        let mut scheduler = Scheduler::by_step(halving());
        let rates: Vec<_> = (0..3).map(|_| scheduler.next(Some(0)).base()).collect();
        assert_eq!(rates, [1.0, 0.5, 0.25]);
    }

    #[test]
    fn by_epoch_advances_with_the_epoch_only() {
        let mut scheduler = Scheduler::by_epoch(halving());
        let epochs = [Some(0), Some(0), Some(1), None, Some(1), Some(2)];
        let rates: Vec<_> = epochs.map(|epoch| scheduler.next(epoch).base()).to_vec();
        assert_eq!(rates, [1.0, 1.0, 0.5, 0.5, 0.5, 0.25]);
    }
}
