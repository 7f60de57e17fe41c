use core::time::Duration;

use accelerator_collective::internal::GroupExt;

use super::Accelerator;
use crate::checkpoint::{DynSave, Save, SavedAs, SurvivorState};
use crate::core::error::Result;
use crate::tracking::RunEnding;

/// A job that continues after the loss of a rank.
impl Accelerator {
    /// Continues in the same process after the [loss of another rank](crate::Error::is_peer_lost): joins the other
    /// survivors in a next group, if the launcher was started with `--on-loss continue`. Otherwise it returns the loss as an
    /// error at once, so a program can always call it. Call it when [`backward`](Self::backward) or another call has
    /// returned such an error; all survivors get one.
    ///
    /// `parts` are those of [`save_state`](Self::save_state). They are taken as after the last complete step: the step in
    /// which the rank was lost is not in them, and its batch comes again. With the new accelerator, the program prepares its
    /// parts anew, and [`resume`](Self::resume) continues from that state, as after [`regroup`](Self::regroup): the rest of
    /// the epoch is divided among the survivors, and each sample is used once. Nothing is written. If a rank is lost before
    /// `resume` has returned, call `recover(())`: it continues from the same state, and at the beginning of a job, where
    /// there is none, as `resume` does without it.
    ///
    /// - The survivors are numbered without gaps, in the order of their ranks. The lowest one is rank 0, and its last
    ///   complete step counts. The others may have finished one step more, which they do again.
    /// - [`PerRank`](crate::checkpoint::PerRank) values, and what a [`CommHook`](crate::CommHook) keeps, stay with the
    ///   process. Those of the lost rank are lost. Running statistics of a batch norm are rank 0's own.
    /// - The [run](Self::init_trackers) continues, and gets a text `recovery`. If rank 0 was lost, call
    ///   [`init_trackers`](Self::init_trackers) again, as after a restart.
    /// - If the launcher starts another process for the lost rank, the job grows by [`regroup`](Self::regroup).
    ///
    /// ```
    /// use accelerator::prelude::*;
    /// # use burn::data::{dataloader::batcher::Batcher, dataset::InMemDataset};
    /// # use burn::nn::{Linear, LinearConfig};
    /// # use burn::optim::SgdConfig;
    /// # use burn::tensor::{Device, Tensor, TensorData};
    /// # struct Rows;
    /// # impl Batcher<f32, Tensor<2>> for Rows {
    /// #     fn batch(&self, items: Vec<f32>, device: &Device) -> Tensor<2> {
    /// #         let shape = [items.len(), 1];
    /// #         Tensor::from_data(TensorData::new(items, shape), device)
    /// #     }
    /// # }
    ///
    /// /// Trains until the end, or until another rank is lost.
    /// fn train(accelerator: &Accelerator) -> Result<Option<Accelerator>> {
    /// #     let dataset = InMemDataset::new(vec![0.5_f32; 40]);
    /// #     let train = LoaderBuilder::new(Rows).batch_size(4).shuffle(1).build(dataset);
    /// #     let model: Linear = LinearConfig::new(1, 1).init(&accelerator.device());
    ///     // Model, optimizer and loader as ever.
    ///     let parts = accelerator.prepare((model, SgdConfig::new().init(), train))?;
    ///     let ((mut model, mut optimizer, train), position) = accelerator.resume("checkpoints/a", parts)?;
    ///     for epoch in position.epoch()..3 {
    ///         for batch in train.epoch(epoch) {
    ///             let batch = batch?;
    /// #             let loss = model.forward((*batch).clone()).powi_scalar(2).mean();
    ///             match accelerator.backward(loss, &model, &batch) {
    ///                 Ok(gradients) => model = optimizer.step(1e-2, model, gradients),
    ///                 Err(error) if error.is_peer_lost() => {
    ///                     return accelerator.recover((&model, &optimizer, &train)).map(Some);
    ///                 }
    ///                 Err(error) => return Err(error),
    ///             }
    ///         }
    ///     }
    ///     accelerator.finish()?;
    ///     Ok(None)
    /// }
    ///
    /// fn main() -> Result<()> {
    ///     let mut accelerator = Accelerator::new()?;
    ///     while let Some(next) = train(&accelerator)? {
    ///         accelerator = next;
    ///     }
    ///     Ok(())
    /// }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::is_peer_lost`](crate::Error::is_peer_lost) with the loss if the launcher does not let the survivors
    /// continue: it was not told to, or fewer are left than it was told. End the program with it, and the launcher handles
    /// the failure as without `recover`.
    /// [`Error::is_misuse`](crate::Error::is_misuse) if no rank is lost, or if a part of the state is lost with the rank:
    /// sharded units, or a sharded optimizer. The errors of [`save_state`](Self::save_state), except those of files, and of
    /// [`AcceleratorBuilder::build`](crate::AcceleratorBuilder::build).
    #[track_caller]
    pub fn recover<K>(&self, parts: impl Save<K>) -> Result<Self> {
        self.recover_with(&SavedAs::new(parts))
    }

    #[track_caller]
    fn recover_with(&self, parts: &dyn DynSave) -> Result<Self> {
        let brought = self.shared.brought.lock().take();
        let mut state = SurvivorState::take(&self.shared.checkpoints, parts, brought)?;
        let lost = self.group().lost();
        let mut last = self.clone();
        let mut timeout = FIRST_PLACE_TIMEOUT;
        let mut failure = None;
        let next = loop {
            let launch = match last.group().survivors_place(timeout) {
                Ok(launch) => launch,
                Err(error) => return Err(failure.unwrap_or_else(|| state.not_continued(error))),
            };
            timeout = NEXT_PLACE_TIMEOUT;
            let builder = self.shared.builder.clone().launched_as(launch);
            let next = match builder.build() {
                Ok(next) => next,
                // Another rank of that group was lost, and the launcher forms a smaller one.
                Err(error) => {
                    failure = Some(error);
                    continue;
                }
            };
            match state.bring_to(&next.shared.checkpoints) {
                Ok(()) => break next,
                Err(error) if error.is_peer_lost() => {
                    failure = Some(error);
                    last = next;
                }
                Err(error) => return Err(error),
            }
        };
        self.end_for(&next, &state, &lost)?;
        *next.shared.brought.lock() = Some(state);
        Ok(next)
    }

    /// Ends this group, which has failed, and hands over to that of the survivors.
    fn end_for(&self, next: &Self, state: &SurvivorState, lost: &[usize]) -> Result<()> {
        let [old, new] = [&self.shared, &next.shared];
        old.context.timeline.end(None);
        old.context.group.close()?;
        old.reduction.trigger.hand_over_to(&new.reduction.trigger);
        old.tracking.end(RunEnding::Regrouped, None);
        old.tracking.hand_over_to(&new.tracking);
        let ranks = next.world_size();
        if next.is_main_process() {
            if !new.tracking.writes() {
                // The run that the lost rank 0 wrote.
                new.tracking
                    .continue_from(&old.tracking, state.run().cloned());
            }
            let lost: Vec<String> = lost.iter().map(ToString::to_string).collect();
            let (lost, before, step) = (lost.join(", "), state.ranks(), state.step());
            new.tracking.recovered(
                format!("lost of {before} ranks: {lost}; {ranks} continue after step {step}"),
                step,
            );
            next.tracker(|run| run.set_tag("world", &ranks.to_string()));
        }
        tracing::info!(before = %self.topology(), now = %next.topology(), "joined the other survivors");
        Ok(())
    }
}

/// The launcher waits for the last evidence of the loss first, and then tells all ranks at about the same time.
const FIRST_PLACE_TIMEOUT: Duration = Duration::from_secs(60);

/// The time for a newer place, after a group that was not complete.
const NEXT_PLACE_TIMEOUT: Duration = Duration::from_secs(10);
