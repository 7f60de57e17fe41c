use core::fmt;

use burn::module::Module;

use super::parameters::{self, GradientForm};
use super::sync_rounds::{InRounds, SyncRounds};
use super::{LocalTraining, Weighting};
use crate::accelerator::Accelerator;
use crate::core::error::Result;
use crate::reduce::OpenRoundConcern;
use crate::reduce::mean_over_ranks;

/// The settings of [`LocalSgd`].
#[derive(Clone, Debug)]
pub struct LocalSgdConfig {
    period: u64,
    weighting: Weighting,
}

impl LocalSgdConfig {
    /// Parameters are averaged after every `period` optimizer steps.
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
    pub fn init<M: Module>(&self, accelerator: &Accelerator, model: &M) -> Result<LocalSgd> {
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

/// Local SGD ([Stich 2018](https://arxiv.org/abs/1805.09767)): every rank steps with its own gradients, and
/// every so many steps the parameters of all ranks are averaged. See [`local`](crate::local).
///
/// It keeps no copy of the model. An average takes an exchange of 24 bytes a rank, the all-reduces of the
/// buckets that gradients travel in, and where the model has running statistics,
/// [`sync_buffers`](Accelerator::sync_buffers). One rank alone trains as with [`Accelerator::backward`], to the
/// same bits.
pub struct LocalSgd {
    rounds: SyncRounds,
}

impl<M: Module> LocalTraining<M> for LocalSgd {
    #[track_caller]
    fn average(&mut self, model: &mut M) -> Result<()> {
        let accelerator = &self.rounds.accelerator;
        let model_state = self.rounds.model_state(model)?;
        if let Some(share) = self.rounds.share(&model_state)?
            && accelerator.world_size() > 1
        {
            let mine = parameters::of(model, &model_state)?;
            let means = mean_over_ranks(&accelerator.shared.reduction, &model_state, &mine, share)?;
            accelerator.sync_buffers(model)?;
            *model = parameters::replace(model, &model_state, GradientForm::Trained, &means);
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
