use core::fmt;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::Module;
use burn::optim::ModuleOptimizer;
use burn::tensor::Device;

use super::record_io::{check_types, size_of};
use super::schedule::{self, IntoLearningRate, Manual, Scheduled};
use super::sharded::{PieceState, Shards};
use super::unsharded::FusedSupport;
use crate::context::Context;
use crate::core::dyn_module::{BoxedModule, DynModule};
use crate::core::error::{self, Result};
use crate::core::offload::Offload;
use crate::core::tensor::Scalar;
use crate::model::Layout;
use crate::reduce::{AveragedGradients, StepGradients};
use crate::timeline::{EventSubject, Phase, Timeline};

/// The outcome of the last [`PreparedOptimizer::step`].
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum StepOutcome {
    /// The accumulation window is not full: the model is as it was, and so is the schedule.
    Accumulated,
    /// This rank had no sample in a [local step](crate::local): the model is as it was. The step and the
    /// schedule count on, as on ranks that had some.
    Idle,
    /// Another rank was lost while a [`Sharded`](super::Sharded) optimizer stepped, or while what it had left on the ranks
    /// was gathered for another one: the model is as it was, and so are the
    /// schedule and the scale of losses; the batches of the step count as not used, and come again after an
    /// emergency checkpoint. The next call that communicates returns the error, which names the rank. It is the
    /// same where such an optimizer got gradients of [local training](crate::local), whose next call says what
    /// to do: [`Error::is_misuse`](crate::Error::is_misuse).
    ///
    /// Each rank tells of itself: where one had every new value before the other rank was lost, it has
    /// `Stepped`. They can do nothing together any more, so both are whole.
    Lost,
    /// Gradients were not finite in [`Precision::F16`](crate::precision::Precision::F16), on all ranks alike: the
    /// model is as it was, and so is the schedule. The next losses are scaled by less. In a
    /// [local step](crate::local) it is this rank alone, whose schedule keeps pace with the others'.
    Skipped {
        /// The factor of the loss.
        scale: f64,
    },
    /// The model was updated.
    Stepped {
        /// The base learning rate of this step; those of groups with rates of their own are told by
        /// [`PreparedOptimizer::learning_rates`].
        rate: f64,
        /// The norm of the averaged gradient before clipping, if it was computed.
        norm: Option<f64>,
    },
}

/// An optimizer that steps once per accumulation window, and advances its schedule exactly then.
///
/// Made by [`Accelerator::prepare`](crate::Accelerator::prepare). With a scheduler `S` is
/// [`Scheduled`], without one it is [`Manual`] and `step` takes the rate, as Burn's own does.
pub struct PreparedOptimizer<S> {
    counted: CountedOptimizer,
    /// The factor of the schedule's rates since training continued at another size.
    pub(super) factor: f64,
    kinds: FusedSupport,
    /// The norm of the last step; it may still be on the device.
    pub(super) norm: Option<Scalar>,
    pub(super) optimizer: ModuleOptimizer,
    /// The outcome of the last step, without the norm.
    pub(super) outcome: StepOutcome,
    /// The parameters that a checkpoint had state for, until the first step after it.
    pub(super) resumed: HashSet<u64>,
    /// The part of the state that this rank holds, if it holds pieces of parameters.
    pub(super) pieces: PieceState,
    pub(super) schedule: S,
    pub(super) shards: Option<Shards>,
    pub(super) steps: u64,
    timeline: Timeline,
    /// The device for sample steps, until state that came with the optimizer is known to fit the model.
    pub(super) unchecked: Option<Device>,
}

impl<S> PreparedOptimizer<S> {
    pub(crate) fn new(
        (optimizer, shards): (ModuleOptimizer, Option<Shards>),
        schedule: S,
        context: &Context,
        prepared: &OptimizerCount,
    ) -> Self {
        let state = match shards {
            Some(_) => StateOf::Shards,
            None => StateOf::Whole,
        };
        Self {
            counted: prepared.count(state),
            factor: 1.0,
            kinds: FusedSupport::default(),
            norm: None,
            optimizer,
            outcome: StepOutcome::Accumulated,
            pieces: PieceState::new(context),
            resumed: HashSet::new(),
            schedule,
            shards,
            steps: 0,
            timeline: context.timeline.clone(),
            unchecked: Some(context.device.clone()),
        }
    }

    #[track_caller]
    fn apply(
        &mut self,
        model: BoxedModule,
        mut gradients: AveragedGradients,
        rate: impl FnOnce(&mut S, &dyn DynModule) -> ModuleLearningRate,
    ) -> BoxedModule
    where
        S: Clone,
    {
        if let Some(path) = gradients.unknown_to(&model) {
            panic!(
                "these gradients are of another model, whose first trainable parameter is `{path}`: the model \
                 that `step` was given has none of its parameters, or is a clone from before `prepare`, which is \
                 another model; pass the one that `backward` was given"
            );
        }
        let missed = match gradients.overflow() {
            Some(scale) => Some(StepOutcome::Skipped { scale }),
            None => gradients.is_idle().then_some(StepOutcome::Idle),
        };
        if let Some(outcome) = missed {
            if gradients.is_missed() {
                // Other ranks step, and schedules keep pace.
                rate(&mut self.schedule, &model);
                self.steps += 1;
            }
            if let StepOutcome::Skipped { .. } = outcome {
                self.counted.note_skipped();
            }
            self.outcome = outcome;
            self.timeline.step_ends();
            return model;
        }
        let norm = gradients.known_norm();
        if gradients.is_accumulating() {
            self.outcome = StepOutcome::Accumulated;
            return model;
        }
        let _offloading = Offload::enter(self.pieces.offload.as_ref());
        // Its model may have been prepared after it.
        if let Some(device) = self.unchecked.take() {
            let parameters = Layout::of(&model).trainable();
            let known = |id| parameters.iter().find(|known| known.id == id).cloned();
            if let Err(error) = check_types(&self.optimizer, known, &device) {
                panic!("{error}");
            }
        }
        let shards = self.shards.as_ref();
        if let Err(error) = self.pieces.settle(&model, &mut self.optimizer, shards) {
            panic!("{error}");
        }
        if !self.resumed.is_empty() {
            warn_of_other_state(&core::mem::take(&mut self.resumed), &Layout::of(&model));
        }
        // Only steps that communicate can fail.
        let may_fail = self.shards.is_some() || gradients.is_sharded() || gradients.is_lost();
        let before = may_fail.then(|| self.schedule.clone());
        let commit = gradients.take_commit();
        let of_all_ranks = !gradients.is_own();
        let rate = rate(&mut self.schedule, &model);
        let tied = gradients.tied_parameters();
        let base_rate = rate.base();
        let stepped = StepOutcome::Stepped {
            rate: base_rate,
            norm: None,
        };
        // Optimizers step the first place of a tied parameter.
        let retie = |model| match &tied {
            Some(tied) => tied.retie(model),
            None => model,
        };
        let outcome = self.step_reduced(rate, model, gradients);
        match outcome.map(retie).map_err(retie) {
            Ok(model) => {
                (self.outcome, self.norm) = (stepped, norm);
                self.counted.note_stepped();
                self.steps += 1;
                if let Some(commit) = commit {
                    if of_all_ranks {
                        commit.note_update(Some(base_rate));
                    }
                    commit.commit();
                }
                self.timeline.step_ends();
                model
            }
            Err(model) => {
                self.outcome = StepOutcome::Lost;
                if let Some(schedule) = before {
                    self.schedule = schedule;
                }
                self.timeline.step_failed();
                model
            }
        }
    }

    /// Returns the updated model, or the model as it was if other ranks are lost.
    #[track_caller]
    fn step_reduced(
        &mut self,
        rate: ModuleLearningRate,
        model: BoxedModule,
        gradients: AveragedGradients,
    ) -> core::result::Result<BoxedModule, BoxedModule> {
        // Pieces would get gradients of different ranks.
        if self.shards.is_some() && gradients.is_own() {
            gradients.refuse_shards();
            return Err(model);
        }
        if gradients.is_lost() {
            return Err(model);
        }
        let copy = self.timeline.span(Phase::Copy(EventSubject::Whole));
        let Some(averaged) = gradients.into_step_gradients() else {
            return Ok(model);
        };
        let optimizer = &mut self.optimizer;
        match (averaged, &mut self.shards) {
            (StepGradients::Sums(mut sums), None) => {
                // They may have been cut for another optimizer.
                if sums.make_whole().is_err() {
                    return Err(model);
                }
                let ready = self.kinds.ready(optimizer, sums);
                drop(copy);
                let _optimizer = self.timeline.span(Phase::Optimizer);
                Ok(ready.step(optimizer, rate, model))
            }
            (StepGradients::Untouched(gradients), None) => {
                drop(copy);
                let _optimizer = self.timeline.span(Phase::Optimizer);
                Ok(optimizer.step(rate, model, gradients))
            }
            (StepGradients::Sums(sums), Some(shards)) => {
                drop(copy);
                let _optimizer = self.timeline.span(Phase::Optimizer);
                shards.step(optimizer, rate, model, sums)
            }
            // They are of an accelerator that is one rank alone.
            (StepGradients::Untouched(_), Some(shards)) => {
                shards.refuse_foreign();
                Err(model)
            }
        }
    }

    /// Returns the outcome of the last `step`; `Accumulated` before the first.
    ///
    /// On one GPU, a norm that a clip was made by may not have been read: this waits until the device has computed
    /// it. A loop that looks at it every few steps keeps the device busy.
    pub fn outcome(&self) -> StepOutcome {
        match self.outcome {
            StepOutcome::Stepped { rate, .. } => StepOutcome::Stepped {
                rate,
                norm: self.norm.as_ref().map(Scalar::read),
            },
            other => other,
        }
    }

    /// Returns true if the last step was skipped, since gradients were not finite in half precision.
    pub fn step_was_skipped(&self) -> bool {
        matches!(self.outcome, StepOutcome::Skipped { .. })
    }

    /// Returns the number of updates of the model; in [local training](crate::local), those on any rank.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Returns the number of bytes of state that this rank keeps, such as Adam's moments; 0 before the first step. A
    /// [`Sharded`](super::Sharded) optimizer keeps only its part, except for state that it has resumed and not yet
    /// stepped, which is whole.
    ///
    /// Burn does not tell, so the state is copied to be counted: ask now and then.
    ///
    /// # Errors
    ///
    /// [`Error::is_checkpoint`](crate::Error::is_checkpoint) where Burn cannot write the state.
    pub fn state_memory(&self) -> Result<usize> {
        let waiting = self.shards.as_ref().map_or(0, Shards::waiting);
        let _offloading = Offload::enter(self.pieces.offload.as_ref());
        Ok(size_of(&self.optimizer)? + waiting)
    }

    /// Returns Burn's optimizer, for its records. Of a [`Sharded`](super::Sharded) optimizer, it has this rank's part
    /// of the state.
    pub fn inner(&self) -> &ModuleOptimizer {
        &self.optimizer
    }
}

impl PreparedOptimizer<Manual> {
    /// Updates the model with this learning rate, if the accumulation window is full. Otherwise, returns the model
    /// unchanged.
    ///
    /// # Panics
    ///
    /// With gradients of another model: if none of the parameters that `backward` was given is in this one. In the
    /// first step, with a clone of the model from before `prepare`, and where the optimizer was prepared before this
    /// model, with state that was loaded in another float type than that of a parameter.
    #[must_use]
    #[track_caller]
    pub fn step<M: Module + 'static>(
        &mut self,
        rate: impl IntoLearningRate,
        model: M,
        gradients: AveragedGradients,
    ) -> M {
        let model = BoxedModule::new(model);
        self.step_at(rate.into_learning_rate(), model, gradients)
            .into_model()
    }

    #[track_caller]
    fn step_at(
        &mut self,
        rate: ModuleLearningRate,
        model: BoxedModule,
        gradients: AveragedGradients,
    ) -> BoxedModule {
        if gradients.is_accumulating() {
            self.schedule.0.note_dropped(rate.base());
        } else if gradients.overflow().is_some() {
            self.schedule.0.skip_window();
        }
        self.apply(model, gradients, |manual, _| {
            manual.0.note_step(rate.base());
            rate
        })
    }
}

impl PreparedOptimizer<Scheduled> {
    /// Updates the model with the schedule's next learning rate, if the accumulation window is full. Otherwise,
    /// returns the model unchanged and does not advance the schedule.
    ///
    /// # Panics
    ///
    /// With gradients of another model: if none of the parameters that `backward` was given is in this one. In the
    /// first step, with a clone of the model from before `prepare`, and where the optimizer was prepared before this
    /// model, with state that was loaded in another float type than that of a parameter.
    #[must_use]
    #[track_caller]
    pub fn step<M: Module + 'static>(&mut self, model: M, gradients: AveragedGradients) -> M {
        self.step_on_schedule(BoxedModule::new(model), gradients)
            .into_model()
    }

    #[track_caller]
    fn step_on_schedule(
        &mut self,
        model: BoxedModule,
        gradients: AveragedGradients,
    ) -> BoxedModule {
        let (epoch, factor) = (gradients.epoch(), self.factor);
        self.apply(model, gradients, |schedule, model| {
            schedule::scaled(schedule.0.next(epoch), factor, model)
        })
    }

    pub(crate) fn advances(&self, steps: Option<u64>, epochs: u64) -> Option<u64> {
        self.schedule.0.advances(steps, epochs)
    }

    /// Returns the learning rate of the last step for each trainable parameter of the model, by path; empty before
    /// the first step.
    ///
    /// ```
    /// use accelerator::prelude::*;
    /// use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
    /// use burn::module::ParamGroup;
    /// use burn::nn::{Linear, LinearConfig};
    /// use burn::optim::SgdConfig;
    /// use burn::tensor::Tensor;
    ///
    /// let accelerator = Accelerator::new()?;
    /// let device = accelerator.device();
    /// let model: Linear = LinearConfig::new(2, 1).init(&device);
    /// let scheduler = ModuleLrScheduler::new(0.5).with_group(ParamGroup::from_predicate("bias"), 2.0);
    /// let (mut model, mut optimizer) =
    ///     accelerator.prepare((model, (SgdConfig::new().init(), scheduler)))?;
    /// let loss = model.forward(Tensor::<2>::ones([4, 2], &device)).mean();
    /// let gradients = accelerator.backward(loss, &model, 4)?;
    /// model = optimizer.step(model, gradients);
    /// let rates = optimizer.learning_rates(&model);
    /// assert_eq!(rates, [("weight".to_owned(), 0.5), ("bias".to_owned(), 2.0)]);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn learning_rates<M: Module + 'static>(&self, model: &M) -> Vec<(String, f64)> {
        let current = self.schedule.0.current.as_ref();
        current.map_or_else(Vec::new, |rate| schedule::by_path(rate, self.factor, model))
    }

    /// Returns the base learning rate of the last step; `None` before the first.
    pub fn learning_rate(&self) -> Option<f64> {
        self.schedule.0.last().map(|rate| rate * self.factor)
    }
}

impl<S> fmt::Debug for PreparedOptimizer<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PreparedOptimizer")
            .field("outcome", &self.outcome)
            .field("norm", &self.norm)
            .field("steps", &self.steps)
            .finish_non_exhaustive()
    }
}

/// Warns where an optimizer was resumed with state for none of the parameters that it steps first.
fn warn_of_other_state(resumed: &HashSet<u64>, layout: &Layout) {
    let mut parameters = layout.trainable().into_iter();
    if !parameters.any(|parameter| resumed.contains(&parameter.id.val())) {
        error::warn(&format!(
            "an optimizer was resumed with state for {} parameters, and the model of its first step has none of \
             them: it begins anew there; where there are several optimizers, pass them to `save_state`, `resume` \
             and `step` in the same order",
            resumed.len()
        ));
    }
}

/// The number of living optimizers that an accelerator has prepared, by where their state is.
#[derive(Debug, Default)]
pub(crate) struct OptimizerCount {
    sharded: Arc<()>,
    whole: Arc<()>,
    skipped: Arc<AtomicBool>,
}

/// An optimizer that is counted as long as it holds this.
#[derive(Debug)]
pub(crate) struct CountedOptimizer {
    _count: Arc<()>,
    skipped: Arc<AtomicBool>,
}

impl CountedOptimizer {
    pub(super) fn note_stepped(&self) {
        self.skipped.store(false, Ordering::Relaxed);
    }

    pub(super) fn note_skipped(&self) {
        self.skipped.store(true, Ordering::Relaxed);
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum StateOf {
    Shards,
    Whole,
}

impl OptimizerCount {
    pub(crate) fn count(&self, state: StateOf) -> CountedOptimizer {
        let count = match state {
            StateOf::Shards => &self.sharded,
            StateOf::Whole => &self.whole,
        };
        CountedOptimizer {
            _count: count.clone(),
            skipped: self.skipped.clone(),
        }
    }

    pub(crate) fn skipped(&self) -> bool {
        self.skipped.load(Ordering::Relaxed)
    }

    pub(crate) fn has_only_shards(&self) -> bool {
        // One handle is the count's own.
        Arc::strong_count(&self.sharded) > 1 && Arc::strong_count(&self.whole) == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_is_dropped_counts_no_more() {
        let count = OptimizerCount::default();
        assert!(!count.has_only_shards());
        let _sharded = count.count(StateOf::Shards);
        assert!(count.has_only_shards());
        let whole = count.count(StateOf::Whole);
        assert!(!count.has_only_shards());
        drop(whole);
        assert!(count.has_only_shards());
    }
}
