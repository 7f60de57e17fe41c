use serde::{Deserialize, Serialize};

/// A change of the number of ranks between the save of a checkpoint and the resume from it.
///
/// [`Accelerator::resume_with`](crate::Accelerator::resume_with) shows it to the program, which
/// answers with a [`Rescale`].
#[derive(Clone, Debug, PartialEq)]
pub struct WorldChange {
    pub(super) before: usize,
    pub(super) now: usize,
    pub(super) global_batches: Vec<u64>,
}

impl WorldChange {
    /// Returns the number of ranks that saved the checkpoint.
    pub fn before(&self) -> usize {
        self.before
    }

    /// Returns the current number of ranks.
    pub fn now(&self) -> usize {
        self.now
    }

    /// Returns the current number of ranks divided by the former one: less than 1 if the job shrank.
    pub fn ratio(&self) -> f64 {
        self.now as f64 / self.before as f64
    }

    /// Returns the number of samples that all ranks together used per step, for each loader that was saved; Burn's
    /// own loaders, which do not tell, are left out.
    pub fn global_batches(&self) -> &[u64] {
        &self.global_batches
    }
}

/// The rule for batch size and learning rate at another number of ranks.
///
/// | rule | samples a step, over all ranks | learning rate |
/// |---|---|---|
/// | [`keep_global_batch`](Self::keep_global_batch), the default | as before, divided as evenly as possible | as before |
/// | [`keep_batch_per_rank`](Self::keep_batch_per_rank) | grows and shrinks with the ranks | as before, unless a factor is given |
///
/// The first rule keeps the trajectory of the job that was, up to rounding. Under the second one
/// the rate is often scaled along, as in the example of
/// [`Accelerator::resume_with`](crate::Accelerator::resume_with).
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
    /// A step uses as many samples as before, whatever the number of ranks: where that does not
    /// divide evenly, the first ranks get one sample more.
    pub fn keep_global_batch() -> Self {
        Self {
            batch: BatchChange::Global,
            factor: 1.0,
        }
    }

    /// A rank uses as many samples in a step as before.
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

    /// Tells if a step uses as many samples as before.
    pub(super) fn keeps_samples_of_step(self) -> bool {
        match self.batch {
            BatchChange::Global | BatchChange::ByMicroSteps => true,
            BatchChange::PerRank => false,
        }
    }

    pub(super) fn factor(self) -> f64 {
        self.factor
    }

    /// The global batch for what was `global_batch` samples.
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
