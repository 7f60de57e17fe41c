use core::fmt;
use std::sync::Arc;

use burn::module::{ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Tensor, TensorData};

use super::model_state::ModelState;
use super::reduce_context::ReduceScope;
use super::reduced_gradients::{
    Clip, GradientStorage, Limit, NormAsked, ReducedGradients, StepCommit,
};
use super::step_gradients::{GradientSums, StepGradients};
use crate::core::dyn_module::DynModule;
use crate::core::tensor::Scalar;
use crate::model::TiedParameters;

/// The averaged gradients of a window, or none yet while it is open.
///
/// Pass them to [`PreparedOptimizer::step`](crate::optim::PreparedOptimizer::step) in either
/// case: an open window leaves the model as it is. Burn's own optimizers do not take them: where
/// the compiler says "expected `GradientsParams`, found `AveragedGradients`", the optimizer was not passed
/// through [`Accelerator::prepare`](crate::Accelerator::prepare).
///
/// Between `backward` and `step` they can be clipped and asked for the loss:
///
/// ```
/// use accelerator::prelude::*;
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::Tensor;
///
/// let accelerator = Accelerator::new()?;
/// let device = accelerator.device();
/// let model: Linear = accelerator.prepare(LinearConfig::new(2, 1).init(&device))?;
///
/// let loss = model.forward(Tensor::<2>::ones([4, 2], &device)).mean();
/// let gradients = accelerator.backward(loss, &model, 4)?;
/// assert!(gradients.loss().is_some() && gradients.samples() == Some(4.0));
/// let mut gradients = gradients.clip_norm(0.5);
/// assert!(gradients.norm().is_some_and(|norm| norm > 1.0), "before clipping");
/// # Ok::<(), Error>(())
/// ```
#[must_use = "pass gradients to the optimizer's `step`"]
pub struct AveragedGradients(pub(super) WindowResult);

pub(super) enum WindowResult {
    Accumulating,
    Reduced(Box<ReducedGradients>),
    Idle {
        epoch: Option<u64>,
    },
    /// They were not finite, and the loss was scaled by this.
    Overflowed {
        scale: f64,
        epoch: Option<u64>,
        scope: ReduceScope,
    },
}

impl AveragedGradients {
    /// Marks them as those of this rank alone, which are in use for as long as they hold `token`.
    pub(crate) fn held_by(mut self, token: &Arc<()>) -> Self {
        if let Some(reduced) = self.reduced_mut() {
            reduced.token = Some(token.clone());
        }
        self
    }

    /// The path of a parameter that they were made for, where they are of none of this model's, or it is a clone from
    /// before `prepare`.
    pub(crate) fn unknown_to(&self, model: &dyn DynModule) -> Option<&str> {
        let model_state = &self.reduced()?.model_state;
        let mut search = KnownParameterSearch {
            model_state,
            found: false,
            is_clone_from_before: false,
        };
        model.visit(&mut search);
        let first = model_state.parameters().first()?;
        (!search.found || search.is_clone_from_before).then_some(first.path.as_str())
    }

    /// Returns the places of their model that hold the same parameter; `None` if no two do.
    pub(crate) fn tied_parameters(&self) -> Option<Arc<TiedParameters>> {
        let tied = self.reduced()?.model_state.tied();
        (!tied.is_empty()).then(|| tied.clone())
    }

    /// Returns `true` if they are those of this rank alone.
    pub(crate) fn is_own(&self) -> bool {
        self.reduced()
            .is_some_and(|reduced| reduced.token.is_some())
    }

    /// Notes that a sharded optimizer was given these gradients of one rank, for local training to return the error.
    pub(crate) fn refuse_shards(&self) {
        if let Some(reduced) = self.reduced() {
            reduced.model_state.round().meet_shards();
        }
    }

    /// Returns `true` if this rank had no sample in a step of its own.
    pub(crate) fn is_idle(&self) -> bool {
        matches!(self.0, WindowResult::Idle { .. })
    }

    /// Returns `true` if this is a step of the job that this rank alone does not take.
    pub(crate) fn is_missed(&self) -> bool {
        match self.0 {
            WindowResult::Idle { .. } => true,
            WindowResult::Overflowed { scope, .. } => scope == ReduceScope::Local,
            WindowResult::Accumulating | WindowResult::Reduced(_) => false,
        }
    }

    /// Scales the gradient down to the norm `max` if its norm is larger. The norm is over all parameters, as for
    /// PyTorch's `clip_grad_norm_`, not one per parameter, as for Burn's `GradientClippingConfig::Norm`. Does nothing
    /// while the window is open.
    ///
    /// The factor is `max / (norm + 1e-6)`. Of two calls the stricter one holds; a negative `max`
    /// is taken as 0. See [`clip`](Self::clip) for other norms, values, and groups of parameters.
    #[track_caller]
    pub fn clip_norm(self, max: f64) -> Self {
        self.clip(Clip::norm(max))
    }

    /// Clamps every element to `-max..=max`, as `clip_grad_value_` does in PyTorch. Does nothing while the window is
    /// open.
    #[track_caller]
    pub fn clip_value(self, max: f64) -> Self {
        self.clip(Clip::value(max))
    }

    /// Clips by the rule `clip`. Several rules are applied one after the other. They apply to the average over all
    /// samples, without the scale of the loss, so the same limits hold at any world size, accumulation and precision.
    /// Does nothing while the window is open.
    ///
    /// All ranks must clip alike. With a [`Sharded`](crate::optim::Sharded) optimizer, whose ranks have a part of the
    /// gradient each, it is a collective.
    ///
    /// With one rank on a GPU, the host does not wait for a clip by value or by the L2 norm; with several it reads the
    /// norm.
    #[track_caller]
    pub fn clip(mut self, clip: Clip<'_>) -> Self {
        let Some(reduced) = self.reduced_mut() else {
            return self;
        };
        let chosen = reduced.chosen(&clip);
        if !chosen.contains(&true) {
            let parameters = reduced.model_state.parameters();
            if let Some(first) = parameters.first() {
                let warnings = &reduced.model_state.warnings;
                warnings.unclipped(parameters.len(), &first.path);
            }
        }
        if let Some(commit) = &mut reduced.commit {
            let (Limit::Norm { max, .. } | Limit::Value(max)) = clip.limit;
            commit.clips.note(max);
        }
        let outcome = match clip.limit {
            Limit::Norm { max, order } => reduced.clip_norm(at_least_zero(max), order, &chosen),
            Limit::Value(max) => reduced.clamp(at_least_zero(max), &chosen),
        };
        if let Err(error) = outcome {
            reduced.give_up(&error);
        }
        self
    }

    /// Returns the L2 norm of the averaged gradient over all parameters, before any clipping; `None` while the window
    /// is open. Squares are added up in f64, parameter by parameter in path order, so every rank has the same bits.
    ///
    /// On a device they are added up in its own order and type, so that ranks may differ in the last bits: a
    /// [clip](Self::clip), for which all ranks use that of rank 0, makes them the same.
    ///
    /// It is not a collective. With a [`Sharded`](crate::optim::Sharded) optimizer or sharded
    /// [units](crate::nn::Units::Shard), whose ranks have a part of the gradient each, it is sent with every window after
    /// it, or a clip, was first asked for: a first call after the first window returns `None`.
    pub fn norm(&mut self) -> Option<f64> {
        self.reduced_mut()?.norm()
    }

    /// Returns the norm of another order, `(Σ |x|ᵖ)^(1/p)`, over all parameters in their current state, after any
    /// clipping. With an infinite order, it is the largest magnitude. `None` while the window is open.
    ///
    /// With a [`Sharded`](crate::optim::Sharded) optimizer or sharded [units](crate::nn::Units::Shard), whose ranks have a
    /// part of the gradient each, it is a collective. If it fails it is `None`, and the next call that communicates fails too.
    #[track_caller]
    pub fn norm_of_order(&mut self, order: f64) -> Option<f64> {
        let reduced = self.reduced_mut()?;
        let all = vec![true; reduced.model_state.parameters().len()];
        match reduced.norm_of(order, &all, NormAsked::ByOne) {
            Ok(norm) => Some(norm),
            Err(error) => {
                reduced.give_up(&error);
                None
            }
        }
    }

    /// Returns the mean loss over every sample of every rank and micro-step. `None` while the window is open, and for
    /// gradients that were [averaged](crate::Accelerator::average) without a loss. The loss was reduced with the
    /// gradients: it is the same on all ranks, costs no communication, and must not be reduced again. On a GPU, this
    /// call waits until it is computed.
    ///
    /// The mean loss of an epoch, over all ranks, each window counting with its samples:
    ///
    /// ```
    /// use accelerator::metric::Mean;
    /// use accelerator::prelude::*;
    /// use burn::nn::{Linear, LinearConfig};
    /// use burn::optim::SgdConfig;
    /// use burn::tensor::Tensor;
    ///
    /// let losses = Accelerator::builder().launch(2, |accelerator| {
    ///     let device = accelerator.device();
    ///     let model: Linear = accelerator.init(|device| LinearConfig::new(2, 1).init(device));
    ///     let (mut model, mut optimizer) = accelerator.prepare((model, SgdConfig::new().init()))?;
    ///
    ///     let mut epoch = Mean::new();
    ///     for samples in [4, 4, 2] {
    ///         let input = Tensor::<2>::ones([samples, 2], &device);
    ///         let loss = model.forward(input).powi_scalar(2).mean();
    ///         let gradients = accelerator.backward(loss, &model, samples)?;
    ///         // `None` while gradients are accumulated.
    ///         if let (Some(loss), Some(samples)) = (gradients.loss(), gradients.samples()) {
    ///             epoch.update(loss, samples as usize);
    ///         }
    ///         model = optimizer.step(0.1, model, gradients);
    ///     }
    ///     accelerator.print(format_args!("mean loss {epoch}"));
    ///     assert_eq!(epoch.samples(), 20.0, "of both ranks");
    ///     Ok(epoch.value())
    /// })?;
    /// assert_eq!(losses[0], losses[1]);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn loss(&self) -> Option<f64> {
        let reduced = self.reduced()?;
        let loss = reduced.read_loss()?;
        // What is read as it comes was looked at then.
        if !loss.is_finite() && !reduced.model_state.reads_losses() {
            reduced
                .model_state
                .warn_non_finite_loss("the mean loss", loss);
        }
        Some(loss)
    }

    /// Returns the number of samples (or tokens) of all ranks in the average; `None` while the window is open. Like
    /// the [`loss`](Self::loss), it must not be reduced again.
    pub fn samples(&self) -> Option<f64> {
        match &self.reduced()?.values {
            GradientStorage::Sums(sums) => Some(sums.total),
            GradientStorage::Untouched { samples, .. } => Some(*samples),
        }
    }

    /// Returns `true` while the window is open, so an optimizer will not step.
    pub fn is_accumulating(&self) -> bool {
        matches!(self.0, WindowResult::Accumulating)
    }

    /// Returns the scale of the loss with which the gradient exceeded the range of
    /// [`Precision::F16`](crate::precision::Precision::F16); `None` if it did not. If it did, all ranks drop the
    /// gradient, and the optimizer skips this step.
    pub fn overflow(&self) -> Option<f64> {
        match self.0 {
            WindowResult::Overflowed { scale, .. } => Some(scale),
            _ => None,
        }
    }

    /// Returns the gradients as Burn's own type, with any clipping applied. `None` while the window is open, and if
    /// the step is skipped.
    ///
    /// The window counts as stepped from here on: [save](crate::Accelerator::save_state) behind the step of your
    /// optimizer, not between.
    ///
    /// For an optimizer of Burn's that was not prepared:
    ///
    /// ```
    /// # use accelerator::prelude::*;
    /// use burn::optim::SgdConfig;
    /// # use burn::nn::{Linear, LinearConfig};
    /// # use burn::tensor::Tensor;
    /// # let accelerator = Accelerator::new()?;
    /// # let device = accelerator.device();
    /// # let model: Linear = accelerator.prepare(LinearConfig::new(2, 1).init(&device))?;
    ///
    /// let mut optimizer = SgdConfig::new().init();
    /// let loss = model.forward(Tensor::<2>::ones([4, 2], &device)).mean();
    /// let gradients = accelerator.backward(loss, &model, 4)?;
    /// let model = match gradients.into_params() {
    ///     Some(gradients) => optimizer.step(0.1, model, gradients),
    ///     None => model,
    /// };
    /// # let _: Linear = model;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// With a [`Sharded`](crate::optim::Sharded) optimizer, whose ranks have a part of the gradient each, it is a
    /// collective that returns whole gradients. If it fails it is `None`, and the next call that communicates
    /// returns the error.
    #[track_caller]
    pub fn into_params(mut self) -> Option<GradientsParams> {
        if self.is_lost() {
            return None;
        }
        let commit = self.take_commit();
        let of_all_ranks = !self.is_own();
        let params = match self.into_step_gradients()? {
            StepGradients::Sums(mut sums) => {
                sums.make_whole().ok()?;
                sums.params(|_| true)
            }
            StepGradients::Untouched(gradients) => gradients,
        };
        if let Some(commit) = commit {
            if of_all_ranks {
                commit.note_update(None);
            }
            commit.commit();
        }
        Some(params)
    }

    /// Returns gradients for an optimizer that reads sums in place; `None` while the window is open, and if the
    /// step is skipped.
    pub(crate) fn into_step_gradients(self) -> Option<StepGradients> {
        let WindowResult::Reduced(mut reduced) = self.0 else {
            return None;
        };
        if let GradientStorage::Untouched { .. } = reduced.values {
            reduced.apply_factors();
        }
        let ReducedGradients {
            device,
            factors,
            values,
            ..
        } = *reduced;
        Some(match values {
            GradientStorage::Sums(sums) => StepGradients::Sums(GradientSums {
                device,
                factors,
                sums,
            }),
            GradientStorage::Untouched { gradients, .. } => StepGradients::Untouched(gradients),
        })
    }

    /// Shows each gradient as a step would take it, with its parameter's path: none where there is no step to take, or
    /// this rank has a part of them alone.
    pub(crate) fn read_each(&self, mut read: impl FnMut(&str, TensorData)) {
        if let Some(reduced) = self.reduced()
            && !reduced.lost
        {
            reduced.read_each(|parameter, data| read(&parameter.path, data));
        }
    }

    /// Returns `true` if each rank has only a part of them.
    pub(crate) fn is_sharded(&self) -> bool {
        self.reduced().is_some_and(ReducedGradients::is_sharded)
    }

    /// Returns `true` if something that all ranks do with them failed.
    pub(crate) fn is_lost(&self) -> bool {
        self.reduced().is_some_and(|reduced| reduced.lost)
    }

    /// Takes the commit of a step with them, once.
    pub(crate) fn take_commit(&mut self) -> Option<StepCommit> {
        self.reduced_mut()?.commit.take()
    }

    pub(crate) fn epoch(&self) -> Option<u64> {
        match &self.0 {
            WindowResult::Accumulating => None,
            WindowResult::Reduced(reduced) => reduced.epoch,
            WindowResult::Idle { epoch } | WindowResult::Overflowed { epoch, .. } => *epoch,
        }
    }

    /// Returns the norm, if it was asked for, or a clip was.
    pub(crate) fn known_norm(&self) -> Option<Scalar> {
        let known = self.reduced()?.norm.as_ref()?;
        Some(known.value.clone())
    }

    fn reduced(&self) -> Option<&ReducedGradients> {
        match &self.0 {
            WindowResult::Reduced(reduced) => Some(reduced),
            _ => None,
        }
    }

    fn reduced_mut(&mut self) -> Option<&mut ReducedGradients> {
        match &mut self.0 {
            WindowResult::Reduced(reduced) => Some(reduced),
            _ => None,
        }
    }
}

impl fmt::Debug for AveragedGradients {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            WindowResult::Accumulating => f.write_str("AveragedGradients(accumulating)"),
            WindowResult::Idle { .. } => f.write_str("AveragedGradients(idle)"),
            WindowResult::Overflowed { scale, .. } => {
                write!(f, "AveragedGradients(not finite at scale {scale})")
            }
            WindowResult::Reduced(reduced) => f
                .debug_struct("AveragedGradients")
                .field("epoch", &reduced.epoch)
                .field("norm", &self.known_norm())
                .field("samples", &self.samples())
                .finish_non_exhaustive(),
        }
    }
}

/// Looks for a parameter that a model state knows.
struct KnownParameterSearch<'a> {
    model_state: &'a ModelState,
    found: bool,
    /// Set if it is still the parameter that was given to `prepare`.
    is_clone_from_before: bool,
}

impl ModuleVisitor for KnownParameterSearch<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.found |= self.model_state.number(param.id).is_some();
        self.is_clone_from_before |= self.model_state.is_clone_from_before(param);
    }
}

/// A limit that is no number stays so, and is seen in what it limits.
fn at_least_zero(limit: f64) -> f64 {
    if limit < 0.0 { 0.0 } else { limit }
}
