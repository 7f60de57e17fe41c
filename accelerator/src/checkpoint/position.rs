//! The position from which training continues, and the rule for a change of the number of ranks.

use core::fmt;

use serde::{Deserialize, Serialize};

/// The position from which training continues; from [`Accelerator::resume`](crate::Accelerator::resume).
///
/// Loops start at [`epoch`](Self::epoch); the loader continues in mid-epoch by itself.
///
/// ```
/// use accelerator::prelude::*;
/// # let folder = tempfile::tempdir().unwrap();
/// # let folder = folder.path();
///
/// let accelerator = Accelerator::new()?;
/// let (Object(lowest), position) = accelerator.resume(folder, Object(9.0))?;
/// assert!(position.is_start() && lowest == 9.0);
///
/// accelerator.save_state(folder, Object(&0.5))?;
/// let (Object(lowest), position) = accelerator.resume(folder, Object(9.0))?;
/// assert_eq!((lowest, position.checkpoint()), (0.5, Some(1)));
/// assert_eq!(position.to_string(), "step 0 in epoch 0, by checkpoint 1");
/// assert!(position.passed_over().is_empty(), "the newest one is good");
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Position {
    pub(super) origin: Origin,
    pub(super) epoch: u64,
    pub(super) factor: f64,
    pub(super) passed_over: Vec<String>,
    pub(super) step: u64,
    pub(super) steps: Vec<u64>,
    pub(super) world_size_before: usize,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub(super) enum Origin {
    Start,
    Checkpoint(u64),
    GroupBefore,
}

impl Position {
    pub(super) fn start(world_size: usize) -> Self {
        Self {
            origin: Origin::Start,
            epoch: 0,
            factor: 1.0,
            passed_over: Vec::new(),
            step: 0,
            steps: Vec::new(),
            world_size_before: world_size,
        }
    }

    /// Returns the epoch to continue with: the one in which the checkpoint was saved, or the next one if the loop had
    /// finished it. If there are several loaders, it is the epoch of the first one in the tuple whose batches went to
    /// `backward`, or if none did, of the first that was read. It is 0 without a loader. Rank 0 warns once if that
    /// loader's first batch in `backward` is of an earlier epoch.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Returns the number of optimizer steps done by the first optimizer in the tuple. With several optimizers, each
    /// knows [its own](crate::optim::PreparedOptimizer::steps).
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Returns `true` if there was nothing to resume, so that training starts from the beginning.
    pub fn is_start(&self) -> bool {
        self.origin == Origin::Start
    }

    /// Returns the number of the checkpoint; `None` at the start, and if training continues from the [group
    /// before](crate::Accelerator::regroup).
    pub fn checkpoint(&self) -> Option<u64> {
        match self.origin {
            Origin::Checkpoint(number) => Some(number),
            Origin::Start | Origin::GroupBefore => None,
        }
    }

    /// Returns the reasons why newer checkpoints were not used. Each has the path, and the file that is missing,
    /// truncated or changed, or the part that an emergency save left out. Those checkpoints are left in place. Empty
    /// if the newest one was used. The reasons are also logged as a warning or, if the program collects no logs,
    /// printed to standard error by rank 0.
    pub fn passed_over(&self) -> &[String] {
        &self.passed_over
    }

    /// Returns the number of ranks that saved the checkpoint, or were in the group before; the current number at
    /// the start.
    pub fn world_size_before(&self) -> usize {
        self.world_size_before
    }

    /// Returns the factor by which changes of the number of ranks have multiplied the learning rate so far; 1 unless
    /// [`Rescale::with_learning_rate_factor`](super::Rescale::with_learning_rate_factor) was used.
    /// Optimizers with a scheduler apply it by themselves.
    pub fn learning_rate_factor(&self) -> f64 {
        self.factor
    }
}

/// "the start", or "step 120 in epoch 3, by checkpoint 6", or "…, by the group before"; "steps 120 and 24 in epoch 3, by checkpoint 6" where
/// optimizers have stepped at a rate of their own.
impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_start() {
            return f.write_str("the start");
        }
        match self.steps.iter().all(|steps| *steps == self.step) {
            true => write!(f, "step {}", self.step)?,
            false => {
                let steps: Vec<_> = self.steps.iter().map(u64::to_string).collect();
                write!(f, "steps {}", steps.join(" and "))?;
            }
        }
        write!(f, " in epoch {}, by ", self.epoch)?;
        match self.checkpoint() {
            Some(number) => write!(f, "checkpoint {number}"),
            None => f.write_str("the group before"),
        }
    }
}

/// A change of the number of ranks between the save of a checkpoint and the resume from it.
///
/// The rule of [`Checkpoints::with_rescale`](super::Checkpoints::with_rescale) answers it with a [`Rescale`].
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct WorldChange {
    /// The number of ranks that saved the checkpoint.
    pub before: usize,
    /// The current number of ranks.
    pub now: usize,
}

/// The rule for batch size and learning rate after a change of the number of ranks.
///
/// | rule | samples a step, over all ranks | learning rate |
/// |---|---|---|
/// | [`keep_global_batch`](Self::keep_global_batch), the default | as before, divided as evenly as possible | as before |
/// | [`keep_batch_per_rank`](Self::keep_batch_per_rank) | grows and shrinks with the ranks | as before, unless a factor is given |
///
/// The first rule keeps the trajectory of the job that was, up to rounding. Under the second one
/// the rate is often scaled along, as in the example of
/// [`Checkpoints::with_rescale`](super::Checkpoints::with_rescale).
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub struct Rescale {
    batch: BatchChange,
    factor: f64,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
enum BatchChange {
    /// Keeps the number of samples per step, by other batches.
    Global,
    /// Keeps the number of samples per step, by more or fewer micro-steps of the same batches.
    ByMicroSteps,
    PerRank,
}

impl Rescale {
    /// Keeps the number of samples per step, whatever the number of ranks. If it does not divide evenly, the first
    /// ranks get one sample more.
    pub fn keep_global_batch() -> Self {
        Self {
            batch: BatchChange::Global,
            factor: 1.0,
        }
    }

    /// Keeps the number of samples per step of each rank.
    pub fn keep_batch_per_rank() -> Self {
        Self {
            batch: BatchChange::PerRank,
            factor: 1.0,
        }
    }

    /// Multiplies learning rates from here on: those of every optimizer with a scheduler. A program
    /// that tells its optimizer the rate multiplies it by
    /// [`Position::learning_rate_factor`](super::Position::learning_rate_factor). Later checkpoints
    /// keep the factor, and a later change multiplies it again.
    #[must_use]
    pub fn with_learning_rate_factor(self, factor: f64) -> Self {
        Self { factor, ..self }
    }

    /// The same where micro-steps reach the global batch on any number of ranks: it is kept by batches
    /// that stay as they are.
    pub(super) fn with_steps_that_follow(self) -> Self {
        Self {
            batch: BatchChange::ByMicroSteps,
            ..self
        }
    }

    pub(super) fn keeps_samples_of_step(self) -> bool {
        match self.batch {
            BatchChange::Global | BatchChange::ByMicroSteps => true,
            BatchChange::PerRank => false,
        }
    }

    pub(super) fn factor(self) -> f64 {
        self.factor
    }

    pub(super) fn global_batch(self, before: usize, now: usize, global_batch: u64) -> u64 {
        match self.batch {
            BatchChange::Global => global_batch,
            BatchChange::ByMicroSteps | BatchChange::PerRank => {
                let (before, now) = (before as u128, now as u128);
                let scaled = (u128::from(global_batch) * now + before / 2) / before;
                u64::try_from(scaled).unwrap_or(u64::MAX).max(now as u64)
            }
        }
    }
}

impl Default for Rescale {
    fn default() -> Self {
        Self::keep_global_batch()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_follow_the_rule() {
        let per_rank = Rescale::keep_batch_per_rank();
        assert_eq!(per_rank.global_batch(4, 3, 128), 96);
        assert_eq!(per_rank.global_batch(3, 2, 8), 5, "rounded");
        assert_eq!(per_rank.global_batch(4, 1, 1), 1);
        assert_eq!(Rescale::default().global_batch(4, 3, 128), 128);
        let by_micro_steps = Rescale::default().with_steps_that_follow();
        assert_eq!(by_micro_steps.global_batch(4, 2, 128), 64);
        assert!(by_micro_steps.keeps_samples_of_step() && !per_rank.keeps_samples_of_step());
    }
}
