use core::fmt;

use burn::lr_scheduler::LrSchedulerRecord;
use burn::lr_scheduler::module_lr_scheduler::{ModuleLearningRate, ModuleLrScheduler};
use burn::module::ParamGroup;

use crate::core::dyn_module::DynModule;
use crate::core::error;
use crate::core::module::visit_floats;

/// A scheduler that advances once per epoch instead of with each optimizer step: prepare `(optimizer,
/// PerEpoch(scheduler))`.
///
/// The epoch is that of the batches passed to `backward`; the rate holds from the epoch's first
/// step. A bare count passed instead of a batch does not tell the epoch, and then the rate stays
/// as it is: pass the batch, or its [`with_weight`](crate::data::Batch::with_weight).
///
/// ```
/// use accelerator::prelude::*;
/// use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
/// # use burn::optim::SgdConfig;
/// # use burn::data::dataset::InMemDataset;
/// # use burn::nn::{Linear, LinearConfig};
/// # use burn::tensor::Tensor;
/// # let accelerator = Accelerator::new()?;
/// # let device = accelerator.device();
/// # let model: Linear = accelerator.prepare(LinearConfig::new(2, 1).init(&device))?;
/// # let dataset = InMemDataset::new((0..8).collect());
/// # let train = LoaderBuilder::from_fn(|items: Vec<u32>, _| items).batch_size(2).build(dataset);
///
/// let schedule = LinearLrSchedulerConfig::new(0.5, 0.25, 2).init().unwrap();
/// let (mut model, mut optimizer, train) =
///     accelerator.prepare((model, (SgdConfig::new().init(), PerEpoch(schedule)), train))?;
/// for epoch in 0..3 {
///     for batch in train.epoch(epoch) {
///         let loss = model.forward(Tensor::<2>::ones([2, 2], &device)).mean();
///         let gradients = accelerator.backward(loss, &model, &batch?)?;
///         model = optimizer.step(model, gradients);
///         assert_eq!(optimizer.learning_rate(), Some([0.5, 0.375, 0.25][epoch as usize]));
///     }
/// }
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct PerEpoch<S>(pub S);

/// A scheduler that advances once per rank with every optimizer step, as those that Accelerate prepares do: prepare
/// `(optimizer, PerProcess(scheduler))`.
///
/// It is for schedules that count the batches of one process which has all the data: on two ranks they
/// come to their end after half the steps. A schedule that counts optimizer steps needs nothing around it.
///
/// ```
/// use accelerator::prelude::*;
/// use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
/// use burn::nn::{Linear, LinearConfig};
/// use burn::optim::SgdConfig;
/// use burn::tensor::Tensor;
///
/// let rates = launch(2, |accelerator| {
///     let device = accelerator.device();
///     let model: Linear = accelerator.init(|device| LinearConfig::new(2, 1).init(device));
///     let scheduler = LinearLrSchedulerConfig::new(1.0, 0.5, 5).init().unwrap();
///     let (mut model, mut optimizer) =
///         accelerator.prepare((model, (SgdConfig::new().init(), PerProcess(scheduler))))?;
///     let mut rates = Vec::new();
///     for _ in 0..3 {
///         let loss = model.forward(Tensor::<2>::ones([4, 2], &device)).mean();
///         let gradients = accelerator.backward(loss, &model, 4)?;
///         model = optimizer.step(model, gradients);
///         rates.extend(optimizer.learning_rate().map(|rate| (rate * 10.0).round()));
///     }
///     Ok(rates)
/// })?;
/// assert_eq!(rates[0], [10.0, 8.0, 6.0]);
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct PerProcess<S>(pub S);

/// Marks an optimizer without a schedule: each `step` gets the learning rate.
///
/// Rank 0 warns once where a rate that changes with each call is dropped in micro-steps that make no step, and where
/// the first rate after a resume shows that a schedule by hand begins anew.
#[derive(Clone, Debug)]
pub struct Manual(pub(super) ManualRates);

impl Manual {
    pub(crate) fn new(is_main_process: bool) -> Self {
        Self(ManualRates {
            first: None,
            before_resume: None,
            dropped: None,
            warns: is_main_process,
        })
    }
}

/// Marks an optimizer with a schedule, which advances with it.
#[derive(Clone, Debug)]
pub struct Scheduled(pub(crate) Scheduler);

#[derive(Clone)]
pub(crate) struct Scheduler {
    pub(super) scheduler: ModuleLrScheduler,
    pub(super) unit: ScheduleUnit,
    pub(super) current: Option<ModuleLearningRate>,
    /// Its state before it gave the current rate, which Burn has no record for.
    pub(super) before: Option<LrSchedulerRecord>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum ScheduleUnit {
    Step,
    Epoch {
        last: Option<u64>,
    },
    /// So many times with each step.
    Process {
        world_size: usize,
    },
}

impl ScheduleUnit {
    pub(crate) const EPOCH: Self = Self::Epoch { last: None };

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Step => "step",
            Self::Epoch { .. } => "epoch",
            Self::Process { .. } => "process",
        }
    }
}

impl Scheduler {
    pub(crate) fn new(scheduler: impl Into<ModuleLrScheduler>, unit: ScheduleUnit) -> Self {
        Self {
            scheduler: scheduler.into(),
            unit,
            current: None,
            before: None,
        }
    }

    pub(super) fn advances(&self, steps: Option<u64>, epochs: u64) -> Option<u64> {
        match self.unit {
            ScheduleUnit::Step => steps,
            ScheduleUnit::Epoch { .. } => Some(epochs),
            ScheduleUnit::Process { world_size } => {
                let steps = steps?;
                // The first rate is that of the beginning.
                let rest = steps.saturating_sub(1).checked_mul(world_size as u64)?;
                rest.checked_add(steps.min(1))
            }
        }
    }

    /// The rate for an optimizer step on a window of that epoch.
    pub(super) fn next(&mut self, epoch: Option<u64>) -> ModuleLearningRate {
        let held = match &mut self.unit {
            ScheduleUnit::Step => None,
            ScheduleUnit::Process { world_size } => {
                // The first rate is that of the beginning.
                let skipped = if self.current.is_some() {
                    *world_size
                } else {
                    1
                };
                for _ in 1..skipped {
                    self.scheduler.step();
                }
                None
            }
            ScheduleUnit::Epoch { last } => {
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

/// A learning rate, as [`PreparedOptimizer::step`](super::PreparedOptimizer::step) takes it: a number, or
/// Burn's rates of groups of parameters.
///
/// It stands before what Burn converts into a rate, so that the compiler names the argument that is missing.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no learning rate",
    label = "expected the learning rate: an optimizer that was prepared without a scheduler takes \
             `step(rate, model, gradients)`",
    note = "prepared beside its scheduler, `prepare((model, (optimizer, scheduler)))`, it takes \
            `step(model, gradients)`"
)]
pub trait IntoLearningRate {
    /// The rate of each parameter.
    fn into_learning_rate(self) -> ModuleLearningRate;
}

#[diagnostic::do_not_recommend]
impl<T: Into<ModuleLearningRate>> IntoLearningRate for T {
    fn into_learning_rate(self) -> ModuleLearningRate {
        self.into()
    }
}

/// The base rates that an optimizer without a schedule was told.
#[derive(Clone, Debug)]
pub(super) struct ManualRates {
    /// The rate of the first step, in this process or an earlier one.
    first: Option<f64>,
    /// The rate of the last step before a resume, until the first step after it.
    before_resume: Option<f64>,
    /// The rate of the first micro-step of the open window.
    dropped: Option<f64>,
    /// Set on the main process until it has warned of them.
    warns: bool,
}

impl ManualRates {
    pub(super) fn first(&self) -> Option<f64> {
        self.first
    }

    /// Continues behind a checkpoint.
    pub(super) fn resume(&mut self, first: Option<f64>, last: Option<f64>) {
        (self.first, self.before_resume) = (first, last);
    }

    /// A micro-step makes no step: its window is open.
    pub(super) fn note_dropped(&mut self, rate: f64) {
        self.dropped.get_or_insert(rate);
    }

    /// A window is skipped.
    pub(super) fn skip_window(&mut self) {
        self.dropped = None;
    }

    /// The optimizer steps.
    pub(super) fn note_step(&mut self, rate: f64) {
        let dropped = self.dropped.take().filter(|dropped| *dropped != rate);
        let before = self.before_resume.take().filter(|before| *before != rate);
        let first = *self.first.get_or_insert(rate);
        // A rate that is computed from the step is another one behind a resume, too, but not the first of all.
        let begins_anew = before.filter(|_| rate == first);
        let found = match (dropped, begins_anew) {
            (Some(dropped), _) => format!(
                "`step` was told the learning rate {dropped:e} in a micro-step that makes no step, where it is dropped, \
                 and {rate:e} in the one that steps: a schedule that is advanced with each call runs ahead"
            ),
            (None, Some(before)) => format!(
                "the learning rate of the first step after the resume is {rate:e}, that of the first step of all, and \
                 the last one before was {before:e}: if a schedule is advanced by hand, it begins anew here"
            ),
            (None, None) => return,
        };
        if core::mem::take(&mut self.warns) {
            error::warn(&format!(
                "{found}; in place of a schedule by hand, prepare `(optimizer, scheduler)`, which advances once a step and \
                 is saved with the optimizer (reported once per optimizer)"
            ));
        }
    }
}

/// The rate of every parameter of the model, times a factor.
///
/// Burn's rate tells what each parameter gets, and has no other way in than a scheduler: so where
/// parameters differ, a constant one is made that has a group for each that does.
pub(super) fn scaled(
    rate: ModuleLearningRate,
    factor: f64,
    model: &dyn DynModule,
) -> ModuleLearningRate {
    if factor == 1.0 {
        return rate;
    }
    let mut others = Vec::new();
    visit_floats(model, |float| {
        let own = rate.lr_from_param(float.id, Some(float.path));
        if own != rate.base() {
            others.push((float.id, own));
        }
    });
    if others.is_empty() {
        return ModuleLearningRate::from(rate.base() * factor);
    }
    let scheduler = ModuleLrScheduler::new(rate.base() * factor);
    others
        .into_iter()
        .fold(scheduler, |scheduler, (id, rate)| {
            scheduler.with_group(ParamGroup::from_ids(vec![id]), rate * factor)
        })
        .step()
}

pub(super) fn by_path(
    rate: &ModuleLearningRate,
    factor: f64,
    model: &dyn DynModule,
) -> Vec<(String, f64)> {
    let mut rates = Vec::new();
    visit_floats(model, |float| {
        if float.is_trained {
            let own = rate.lr_from_param(float.id, Some(float.path));
            rates.push((float.path.to_owned(), own * factor));
        }
    });
    rates
}

#[cfg(test)]
mod tests {
    use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
    use burn::lr_scheduler::step::StepLrSchedulerConfig;
    use burn::nn::{Linear, LinearConfig};
    use burn::tensor::Device;

    use super::*;

    fn halving() -> ModuleLrScheduler {
        StepLrSchedulerConfig::new(1.0, 1)
            .with_gamma(0.5)
            .init()
            .unwrap()
    }

    #[test]
    fn by_step_advances_each_time() {
        let mut scheduler = Scheduler::new(halving(), ScheduleUnit::Step);
        let rates: Vec<_> = (0..3).map(|_| scheduler.next(Some(0)).base()).collect();
        assert_eq!(rates, [1.0, 0.5, 0.25]);
    }

    /// C9: the rate of `LambdaLR(1 - n/10)` after one step is 0.9 on one process, 0.8 on two.
    #[test]
    fn c9_by_process_advances_once_for_each_rank() {
        for (world_size, expected) in [(1, [1.0, 0.9, 0.8]), (2, [1.0, 0.8, 0.6])] {
            let linear = LinearLrSchedulerConfig::new(1.0, 0.0001, 10)
                .init()
                .unwrap();
            let mut scheduler = Scheduler::new(linear, ScheduleUnit::Process { world_size });
            let rates: Vec<_> = (0..3)
                .map(|_| (scheduler.next(Some(0)).base() * 10.0).round() / 10.0)
                .collect();
            assert_eq!(rates, expected);
        }
    }

    #[test]
    fn by_epoch_advances_with_the_epoch_only() {
        let mut scheduler = Scheduler::new(halving(), ScheduleUnit::EPOCH);
        let epochs = [Some(0), Some(0), Some(1), None, Some(1), Some(2)];
        let rates: Vec<_> = epochs.map(|epoch| scheduler.next(epoch).base()).to_vec();
        assert_eq!(rates, [1.0, 1.0, 0.5, 0.5, 0.5, 0.25]);
    }

    #[test]
    fn groups_keep_their_own_rates() {
        let model: Linear = LinearConfig::new(2, 1).init(&Device::default());
        let rate = || {
            ModuleLrScheduler::new(0.5_f64)
                .with_group(ParamGroup::from_predicate("bias"), 2.0_f64)
                .step()
        };
        let halved = scaled(rate(), 0.5, &model);
        assert_eq!(halved.base(), 0.25);
        let bias = model.bias.as_ref().unwrap().id;
        assert_eq!(halved.lr_from_param(bias, Some("bias")), 1.0);
        assert_eq!(halved.lr_from_param(model.weight.id, Some("weight")), 0.25);
        assert_eq!(scaled(rate(), 1.0, &model).base(), 0.5);
    }
}
