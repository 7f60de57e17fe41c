use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;

/// What [`PreparedOptimizer::step`](super::PreparedOptimizer::step) takes as its learning rate: a number, or
/// Burn's rates of groups of parameters.
///
/// It stands before what Burn converts into a rate, so that the compiler names the argument that is missing.
///
/// ```
/// use accelerator::optim::IntoLearningRate;
///
/// assert_eq!(0.1.into_learning_rate().base(), 0.1);
/// ```
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
