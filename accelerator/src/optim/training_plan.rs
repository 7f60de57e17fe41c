use core::fmt;

use super::{PreparedOptimizer, Scheduled};
use crate::core::error::counted;

/// The rule by which a learning rate that was found on one process scales with the world size.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum RateScaling {
    /// Multiplies the rate by the number of ranks, as is usual for SGD ([Goyal et al.,
    /// 2017](https://arxiv.org/abs/1706.02677)), after some steps of warm-up.
    Linear,
    /// Multiplies the rate by the square root of the number of ranks, as is usual for Adam and its kin.
    Sqrt,
}

/// The size of a training: the samples per step and the number of steps. Made by
/// [`Accelerator::plan`](crate::Accelerator::plan), to be printed once at the start.
///
/// Figures are `None` if a loader does not tell its length or the size of its batches, or if they do
/// not fit into 64 bits.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct TrainingPlan {
    /// Ranks.
    pub world_size: usize,
    /// Micro-steps of a full accumulation window.
    pub accumulation_steps: usize,
    /// Samples of an epoch, over all ranks; a stream does not tell.
    pub samples: Option<u64>,
    /// Samples of all ranks in one optimizer step with a full window: the effective batch.
    pub effective_batch: Option<u64>,
    /// Batches of each rank in an epoch.
    pub micro_steps_per_epoch: Option<u64>,
    /// Optimizer steps in an epoch. Its last one may hold fewer samples.
    pub steps_per_epoch: Option<u64>,
    /// Epochs.
    pub epochs: u64,
    /// Optimizer steps in all, if none is skipped.
    pub steps: Option<u64>,
    /// Advances of the learning rate in all; `None` if that is not known, or there is no scheduler.
    pub rate_steps: Option<u64>,
}

impl TrainingPlan {
    /// Adds the schedule of that optimizer.
    #[must_use]
    pub fn with_schedule(self, optimizer: &PreparedOptimizer<Scheduled>) -> Self {
        let rate_steps = optimizer.advances(self.steps, self.epochs);
        Self { rate_steps, ..self }
    }
}

impl fmt::Display for TrainingPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", counted(self.world_size, "rank"))?;
        if let Some(batch) = self.effective_batch {
            write!(f, ", {} a step", counted(batch as usize, "sample"))?;
        }
        if self.accumulation_steps > 1 {
            write!(f, " in {} micro-steps", self.accumulation_steps)?;
        }
        write!(f, "; {} of ", counted(self.epochs as usize, "epoch"))?;
        match self.samples {
            Some(samples) => write!(f, "{}", counted(samples as usize, "sample"))?,
            None => f.write_str("an unknown number of samples")?,
        }
        if let Some(steps) = self.steps_per_epoch {
            write!(f, " in {}", counted(steps as usize, "optimizer step"))?;
        }
        if let Some(steps) = self.steps {
            write!(f, ", {steps} in all")?;
        }
        if let Some(steps) = self.rate_steps {
            write!(f, "; {}", counted(steps as usize, "step"))?;
            write!(f, " of the learning rate")?;
        }
        Ok(())
    }
}
