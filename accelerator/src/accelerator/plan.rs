use super::Accelerator;
use crate::data::PreparedLoader;
use crate::optim::{RateScaling, TrainingPlan};

/// The plan of a training.
impl Accelerator {
    /// Plans a training of that many epochs on `loader`.
    ///
    /// A program that [resumes](Self::resume) passes the loader to [`resume_loader`](Self::resume_loader) first:
    /// at another number of ranks, the plan then counts the steps that there will be.
    ///
    /// ```
    /// use accelerator::prelude::*;
    /// # use burn::data::{dataloader::batcher::Batcher, dataset::InMemDataset};
    /// # use burn::tensor::Device;
    /// # struct Rows;
    /// # impl Batcher<f32, Vec<f32>> for Rows {
    /// #     fn batch(&self, items: Vec<f32>, _: &Device) -> Vec<f32> { items }
    /// # }
    /// # let dataset = InMemDataset::new(vec![0.5_f32; 100]);
    ///
    /// let accelerator = Accelerator::builder().accumulation_steps(4).build()?;
    /// let train = LoaderBuilder::new(Rows).batch_size(8).build(dataset);
    /// let train = accelerator.prepare(train)?;
    /// let plan = accelerator.plan(&train, 3);
    /// assert_eq!((plan.effective_batch, plan.steps), (Some(32), Some(12)));
    /// assert_eq!(
    ///     plan.to_string(),
    ///     "1 rank, 32 samples a step in 4 micro-steps; 3 epochs of 100 samples in 4 optimizer steps, \
    ///      12 in all"
    /// );
    /// accelerator.print(plan);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn plan<O: Send + 'static>(&self, train: &PreparedLoader<O>, epochs: u64) -> TrainingPlan {
        let accumulation = self.accumulation_steps();
        let micro_steps = train.steps();
        let steps_per_epoch = micro_steps.map(|steps| steps.div_ceil(accumulation as u64));
        train.note_planned();
        let batch = train.global_batch();
        TrainingPlan {
            world_size: self.world_size(),
            accumulation_steps: accumulation,
            samples: train.known_samples(),
            effective_batch: batch.and_then(|samples| samples.checked_mul(accumulation as u64)),
            micro_steps_per_epoch: micro_steps,
            steps_per_epoch,
            epochs,
            steps: steps_per_epoch.and_then(|steps| steps.checked_mul(epochs)),
            rate_steps: None,
        }
    }

    /// A learning rate that was found on one process, for this many.
    ///
    /// With batches of the same size on each rank, a step sees as many times the samples. If the global
    /// batch stays as it was, so does the rate.
    ///
    /// ```
    /// use accelerator::prelude::*;
    ///
    /// let rates = launch(4, |accelerator| {
    ///     let linear = accelerator.scaled_rate(0.1, RateScaling::Linear);
    ///     let root = accelerator.scaled_rate(0.1, RateScaling::Sqrt);
    ///     Ok((linear, root))
    /// })?;
    /// assert_eq!(rates[3], (0.4, 0.2));
    /// # Ok::<(), Error>(())
    /// ```
    pub fn scaled_rate(&self, rate: f64, scaling: RateScaling) -> f64 {
        let ranks = self.world_size() as f64;
        match scaling {
            RateScaling::Linear => rate * ranks,
            RateScaling::Sqrt => rate * ranks.sqrt(),
        }
    }
}
