use core::fmt;

use super::{PreparedOptimizer, Scheduled};

/// How a learning rate that was found on one process follows the world size.
///
/// ```
/// use accelerator::prelude::*;
///
/// let rates = |scaling| launch(4, |accelerator| Ok(accelerator.scaled_rate(0.1, scaling)));
/// assert_eq!(rates(RateScaling::Linear)?, [0.4; 4]);
/// assert_eq!(rates(RateScaling::Sqrt)?, [0.2; 4]);
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum RateScaling {
    /// As many times as large as there are ranks, as is usual for SGD ([Goyal et al.,
    /// 2017](https://arxiv.org/abs/1706.02677)), after some steps of warm-up.
    Linear,
    /// With the square root of the number of ranks, as is usual for Adam and its kin.
    Sqrt,
}

/// What a training will be: how many samples make a step, how many steps there are. Made by
/// [`Accelerator::plan`](crate::Accelerator::plan), and printed once at the start.
///
/// Figures are `None` where a loader does not tell its length or the size of its batches, and where they do
/// not fit into 64 bits.
///
/// ```
/// use accelerator::prelude::*;
/// # use burn::data::{dataloader::batcher::Batcher, dataset::InMemDataset};
/// # struct Listed;
/// # impl Batcher<u32, Vec<u32>> for Listed {
/// #     fn batch(&self, items: Vec<u32>, _: &burn::tensor::Device) -> Vec<u32> { items }
/// # }
///
/// let plans = Accelerator::builder().accumulation_steps(3).launch(2, |accelerator| {
///     let train = LoaderBuilder::new(Listed).batch_size(8).build(InMemDataset::new((0..100).collect()));
///     Ok(accelerator.plan(&accelerator.prepare(train)?, 5))
/// })?;
/// let plan = plans[0];
/// assert_eq!((plan.world_size, plan.accumulation_steps), (2, 3));
/// assert_eq!((plan.samples, plan.effective_batch), (Some(100), Some(2 * 8 * 3)));
/// // Seven batches of each rank make two full windows and one of a single batch.
/// assert_eq!((plan.micro_steps_per_epoch, plan.steps_per_epoch), (Some(7), Some(3)));
/// assert_eq!((plan.epochs, plan.steps), (5, Some(15)));
/// # Ok::<(), Error>(())
/// ```
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
    /// How many times the learning rate advances in all; `None` where it is not known, or there is no
    /// scheduler.
    pub rate_steps: Option<u64>,
}

impl TrainingPlan {
    /// With the schedule of that optimizer.
    ///
    /// ```
    /// # use accelerator::prelude::*;
    /// use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
    /// # use burn::optim::SgdConfig;
    /// # use burn::data::{dataloader::batcher::Batcher, dataset::InMemDataset};
    /// # struct Listed;
    /// # impl Batcher<u32, Vec<u32>> for Listed {
    /// #     fn batch(&self, items: Vec<u32>, _: &burn::tensor::Device) -> Vec<u32> { items }
    /// # }
    /// # let accelerator = Accelerator::new()?;
    /// # let dataset = InMemDataset::new((0..96).collect());
    /// # let train = LoaderBuilder::new(Listed).batch_size(8).build(dataset);
    /// # let train = accelerator.prepare(train)?;
    ///
    /// let steps = accelerator.plan(&train, 3).steps.expect("a data set knows its length");
    /// let schedule = CosineAnnealingLrSchedulerConfig::new(1e-2, steps as usize).init().unwrap();
    /// let optimizer = accelerator.prepare((SgdConfig::new().init(), schedule))?;
    /// let plan = accelerator.plan(&train, 3).with_schedule(&optimizer);
    /// assert_eq!(plan.rate_steps, Some(36), "the schedule reaches its end");
    /// # Ok::<(), Error>(())
    /// ```
    #[must_use]
    pub fn with_schedule(self, optimizer: &PreparedOptimizer<Scheduled>) -> Self {
        let rate_steps = optimizer.advances(self.steps, self.epochs);
        Self { rate_steps, ..self }
    }
}

impl fmt::Display for TrainingPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", CountedNoun(self.world_size as u64, "rank"))?;
        if let Some(batch) = self.effective_batch {
            write!(f, ", {} a step", CountedNoun(batch, "sample"))?;
        }
        if self.accumulation_steps > 1 {
            write!(f, " in {} micro-steps", self.accumulation_steps)?;
        }
        write!(f, "; {} of ", CountedNoun(self.epochs, "epoch"))?;
        match self.samples {
            Some(samples) => write!(f, "{}", CountedNoun(samples, "sample"))?,
            None => f.write_str("an unknown number of samples")?,
        }
        if let Some(steps) = self.steps_per_epoch {
            write!(f, " in {}", CountedNoun(steps, "optimizer step"))?;
        }
        if let Some(steps) = self.steps {
            write!(f, ", {steps} in all")?;
        }
        if let Some(steps) = self.rate_steps {
            write!(f, "; {}", CountedNoun(steps, "step"))?;
            write!(f, " of the learning rate")?;
        }
        Ok(())
    }
}

/// A number and what it counts.
struct CountedNoun(u64, &'static str);

impl fmt::Display for CountedNoun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(count, noun) = self;
        let plural = if *count == 1 { "" } else { "s" };
        write!(f, "{count} {noun}{plural}")
    }
}
