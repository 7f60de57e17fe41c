use core::fmt;

use burn::module::Module;

use super::sync_rounds::{self, GradientForm, InRounds, SyncRounds};
use super::{LocalTraining, Weighting};
use crate::accelerator::Accelerator;
use crate::checkpoint::{PartKind, Restorer, Resume, Save, Snapshot, SnapshotExchange};
use crate::core::dyn_module::{BoxedModule, DynModule};
use crate::core::error::{Error, Result};
use crate::core::module;
use crate::core::tensor::any_rank;
use crate::reduce::{OpenRoundConcern, mean_over_ranks};

/// The settings of [`LocalSgd`].
#[derive(Clone, Debug)]
pub struct LocalSgdConfig {
    period: u64,
    weighting: Weighting,
}

impl LocalSgdConfig {
    /// Averages parameters after every `period` optimizer steps.
    pub fn new(period: u64) -> Self {
        Self {
            period,
            weighting: Weighting::default(),
        }
    }

    /// Sets the weight of ranks in an average: [`Weighting::Samples`] by default.
    #[must_use]
    pub fn with_weighting(self, weighting: Weighting) -> Self {
        Self { weighting, ..self }
    }

    /// Starts local SGD on a prepared model. Every rank calls it with the same settings.
    ///
    /// # Errors
    ///
    /// [`Error::is_config`](crate::Error::is_config) for a period of 0, or settings that differ between ranks;
    /// [`Error::is_misuse`](crate::Error::is_misuse) for a model that was not prepared, or is in the middle of
    /// other local training, and if there is a [`SyncBatchNorm`](crate::nn::SyncBatchNorm);
    /// [`Error::is_collective`](crate::Error::is_collective) when another rank is lost.
    #[track_caller]
    pub fn init<M: Module + 'static>(
        &self,
        accelerator: &Accelerator,
        model: &M,
    ) -> Result<LocalSgd> {
        self.begin(accelerator, model)
    }

    #[track_caller]
    pub(crate) fn begin(
        &self,
        accelerator: &Accelerator,
        model: &dyn DynModule,
    ) -> Result<LocalSgd> {
        let concern = match accelerator.world_size() {
            1 => OpenRoundConcern::None,
            _ => OpenRoundConcern::Apart,
        };
        let said = format!("{self:?}");
        let rounds = SyncRounds::new(accelerator, self.period, self.weighting, concern, &said)?;
        let model_state = rounds.model_state(model)?;
        model_state.round().check_together("begin local training")?;
        Ok(LocalSgd { rounds })
    }
}

/// Local SGD ([Stich 2018](https://arxiv.org/abs/1805.09767)): every rank steps with its own gradients, and the
/// parameters of all ranks are averaged every few steps. See [`local`](crate::local).
///
/// It keeps no copy of the model. An average takes an exchange of 24 bytes a rank, the all-reduces of the
/// buckets that gradients travel in, and where the model has running statistics,
/// [`sync_buffers`](Accelerator::sync_buffers). One rank alone trains as with [`Accelerator::backward`], to the
/// same bits.
pub struct LocalSgd {
    rounds: SyncRounds,
}

impl<M: Module + 'static> LocalTraining<M> for LocalSgd {
    #[track_caller]
    fn average(&mut self, model: &mut M) -> Result<()> {
        let accelerator = &self.rounds.accelerator;
        let model_state = self.rounds.model_state(model)?;
        if let Some(share) = self.rounds.share(&model_state)?
            && accelerator.world_size() > 1
        {
            let mine = sync_rounds::of(model, &model_state)?;
            let means = mean_over_ranks(&accelerator.shared.reduction, &model_state, &mine, share)?;
            accelerator.sync_buffers(model)?;
            *model = sync_rounds::replace(model, &model_state, GradientForm::Trained, &means)
                .into_model();
        }
        SyncRounds::close(&model_state);
        Ok(())
    }
}

impl InRounds for LocalSgd {
    fn rounds(&self) -> &SyncRounds {
        &self.rounds
    }
}

impl fmt::Debug for LocalSgd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalSgd").finish_non_exhaustive()
    }
}

/// The settings of [`DiLoCo`].
#[derive(Clone, Debug)]
pub struct DiLoCoConfig {
    momentum: f64,
    period: u64,
    rate: f64,
    weighting: Weighting,
}

impl DiLoCoConfig {
    /// Makes settings in which the outer optimizer steps after every `period` optimizer steps, with a rate of 0.7 and
    /// a Nesterov momentum of 0.9, as in the paper. There, a period is about 500 steps.
    pub fn new(period: u64) -> Self {
        Self {
            momentum: 0.9,
            period,
            rate: 0.7,
            weighting: Weighting::default(),
        }
    }

    /// Sets the learning rate of the outer optimizer. With a rate of 1 and a momentum of 0, this is [`LocalSgd`] (up
    /// to rounding).
    ///
    /// [`LocalSgd`]: super::LocalSgd
    #[must_use]
    pub fn with_outer_rate(self, rate: f64) -> Self {
        Self { rate, ..self }
    }

    /// Sets the Nesterov momentum of the outer optimizer, from 0 to below 1.
    #[must_use]
    pub fn with_outer_momentum(self, momentum: f64) -> Self {
        Self { momentum, ..self }
    }

    /// Sets the weight of ranks in an average: [`Weighting::Samples`] by default.
    #[must_use]
    pub fn with_weighting(self, weighting: Weighting) -> Self {
        Self { weighting, ..self }
    }

    /// Starts DiLoCo on a prepared model, whose parameters become the first outer ones. Warm up with
    /// [`Accelerator::backward`], if at all, before this call. Every rank must call it with the same settings.
    ///
    /// # Errors
    ///
    /// [`Error::is_config`](crate::Error::is_config) for a period of 0, a rate that is not positive, a
    /// momentum out of 0 to 1, or settings that differ between ranks;
    /// [`Error::is_misuse`](crate::Error::is_misuse) for a model that was not prepared, or is in the middle of
    /// other local training, and if there is a [`SyncBatchNorm`](crate::nn::SyncBatchNorm);
    /// [`Error::is_collective`](crate::Error::is_collective) when another rank is lost.
    #[track_caller]
    pub fn init<M: Module + 'static>(
        &self,
        accelerator: &Accelerator,
        model: &M,
    ) -> Result<DiLoCo<M>> {
        let said = format!("{self:?}");
        let concern = OpenRoundConcern::Apart;
        let rounds = SyncRounds::new(accelerator, self.period, self.weighting, concern, &said)?;
        if !(self.rate > 0.0 && self.rate.is_finite()) {
            return Err(Error::config(format!(
                "the outer rate is {}; expected a positive number, such as 0.7",
                self.rate
            )));
        }
        if !(0.0..1.0).contains(&self.momentum) {
            return Err(Error::config(format!(
                "the outer momentum is {}; expected 0 or more, and less than 1",
                self.momentum
            )));
        }
        let model_state = rounds.model_state(model)?;
        model_state.round().check_together("begin local training")?;
        let outer = model.valid();
        sync_rounds::of(&outer, &model_state)?;
        Ok(DiLoCo {
            momentum: self.momentum,
            outer,
            rate: self.rate,
            rounds,
            velocity: sync_rounds::zeros(model).into_model(),
        })
    }
}

/// DiLoCo ([Douillard et al. 2023](https://arxiv.org/abs/2311.08105)): every rank takes many steps with its own
/// optimizer. The change of its parameters, averaged over the ranks, is the gradient of an outer SGD with Nesterov
/// momentum. See [`local`](crate::local).
///
/// With outer parameters `θ`, the mean `g` of `θ` − a rank's parameters, momentum `μ` and rate `η`, a round ends
/// with `v ← μ v + g`, `θ ← θ − η (g + μ v)`, and `θ` on every rank. So it does on one rank alone, where
/// nothing is communicated.
///
/// It keeps `θ` and `v` in the type of the parameters, twice their memory, on every rank, and belongs into
/// checkpoints beside the model:
///
/// ```
/// use accelerator::prelude::*;
/// use burn::nn::{Linear, LinearConfig};
/// use burn::optim::AdamWConfig;
/// use burn::tensor::Tensor;
///
/// # let folder = tempfile::tempdir().unwrap();
/// # let folder = folder.path();
/// let accelerator = Accelerator::new()?;
/// let device = accelerator.device();
/// let model: Linear = LinearConfig::new(2, 1).init(&device);
/// let (model, optimizer) = accelerator.prepare((model, AdamWConfig::new().init()))?;
/// let local = DiLoCoConfig::new(3).with_outer_rate(0.5).init(&accelerator, &model)?;
/// let ((mut model, mut optimizer, mut local), _) =
///     accelerator.resume(folder, (model, optimizer, local))?;
/// for _ in 0..9 {
///     let loss = model.forward(Tensor::<2>::ones([4, 2], &device)).powi_scalar(2).mean();
///     let gradients = local.backward(loss, &model, 4)?;
///     model = optimizer.step(1e-3, model, gradients);
///     if local.step(&mut model)? == LocalOutcome::Averaged {
///         accelerator.save_state(folder, (&model, &optimizer, &local))?;
///     }
/// }
/// local.finish(&mut model)?;
/// # Ok::<(), Error>(())
/// ```
pub struct DiLoCo<M> {
    momentum: f64,
    /// The outer parameters, on the plain device.
    outer: M,
    rate: f64,
    rounds: SyncRounds,
    /// The momentum of each outer parameter, as a model, so that it is saved as one.
    velocity: M,
}

impl<M: Module + 'static> LocalTraining<M> for DiLoCo<M> {
    #[track_caller]
    fn average(&mut self, model: &mut M) -> Result<()> {
        let accelerator = &self.rounds.accelerator;
        let model_state = self.rounds.model_state(model)?;
        let Some(share) = self.rounds.share(&model_state)? else {
            return Ok(());
        };
        let mut outer = sync_rounds::of(&self.outer, &model_state)?;
        let mut velocity = sync_rounds::of(&self.velocity, &model_state)?;
        let mut changes = sync_rounds::of(model, &model_state)?;
        for at in 0..model_state.parameters().len() {
            changes[at] = (any_rank(&outer[at]) - any_rank(&changes[at])).into_dispatch();
        }
        let gradients =
            mean_over_ranks(&accelerator.shared.reduction, &model_state, &changes, share)?;
        accelerator.sync_buffers(model)?;
        for at in 0..model_state.parameters().len() {
            let gradient = any_rank(&gradients[at]);
            let moved = any_rank(&velocity[at]).mul_scalar(self.momentum) + gradient.clone();
            let step = gradient + moved.clone().mul_scalar(self.momentum);
            outer[at] = (any_rank(&outer[at]) - step.mul_scalar(self.rate)).into_dispatch();
            velocity[at] = moved.into_dispatch();
        }
        self.outer = sync_rounds::replace(&self.outer, &model_state, GradientForm::Plain, &outer)
            .into_model();
        self.velocity =
            sync_rounds::replace(&self.velocity, &model_state, GradientForm::Plain, &velocity)
                .into_model();
        *model =
            sync_rounds::replace(model, &model_state, GradientForm::Trained, &outer).into_model();
        SyncRounds::close(&model_state);
        Ok(())
    }
}

impl<M> InRounds for DiLoCo<M> {
    fn rounds(&self) -> &SyncRounds {
        &self.rounds
    }
}

impl<M> fmt::Debug for DiLoCo<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DiLoCo")
            .field("rate", &self.rate)
            .field("momentum", &self.momentum)
            .finish_non_exhaustive()
    }
}

// Between rounds it has nothing to keep; within one, the model refuses.
impl Save<module::Part> for &LocalSgd {
    fn collect(&self, _snapshot: &mut Snapshot<'_>) -> Result<()> {
        Ok(())
    }

    fn settle(&self, _settling: &mut SnapshotExchange<'_>) -> Result<()> {
        Ok(())
    }
}

impl Resume<module::Part> for LocalSgd {
    fn kinds(_kinds: &mut Vec<PartKind>) {}

    fn restore(self, _restorer: &mut Restorer<'_>) -> Result<Self> {
        Ok(self)
    }
}

// To a checkpoint it is two more models: the outer parameters, and their momentum.
impl<M: Module + fmt::Display + 'static> Save<module::Part> for &DiLoCo<M> {
    fn collect(&self, snapshot: &mut Snapshot<'_>) -> Result<()> {
        snapshot.add_companion("`DiLoCo`", &self.outer)?;
        snapshot.add_companion("`DiLoCo`", &self.velocity)
    }

    fn settle(&self, settling: &mut SnapshotExchange<'_>) -> Result<()> {
        settling.model(&self.outer)?;
        settling.model(&self.velocity)
    }
}

impl<M: Module + fmt::Display + 'static> Resume<module::Part> for DiLoCo<M> {
    fn kinds(kinds: &mut Vec<PartKind>) {
        kinds.extend([PartKind::Model, PartKind::Model]);
    }

    fn restore(self, restorer: &mut Restorer<'_>) -> Result<Self> {
        Ok(Self {
            outer: restorer
                .companion(BoxedModule::new(self.outer))?
                .valid()
                .into_model(),
            velocity: restorer
                .companion(BoxedModule::new(self.velocity))?
                .valid()
                .into_model(),
            ..self
        })
    }
}
