use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;

use crate::core::user_message;

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
    pub(super) fn new(is_main_process: bool) -> Self {
        Self {
            first: None,
            before_resume: None,
            dropped: None,
            warns: is_main_process,
        }
    }

    /// Returns the rate of the first step.
    pub(super) fn first(&self) -> Option<f64> {
        self.first
    }

    /// Goes on behind a checkpoint.
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
                 the last one before was {before:e}: a schedule that is advanced by hand begins anew"
            ),
            (None, None) => return,
        };
        if core::mem::take(&mut self.warns) {
            user_message::warn(&format!(
                "{found}; prepare `(optimizer, scheduler)`, which advances once a step and is saved with the optimizer \
                 (said once an optimizer)"
            ));
        }
    }
}
