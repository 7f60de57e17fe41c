use core::time::Duration;

use super::Accelerator;
use crate::checkpoint::{self, DynSave, Save, SavedAs, SurvivorState};
use crate::core::error::{Error, Kind, Result};
use crate::tracking::RunEnding;

/// A job that continues after the loss of a rank.
impl Accelerator {
    /// Continues in the same process after the [loss of another rank](crate::Error::is_peer_lost). If the launcher was
    /// started with `--on-loss continue`, this rank joins the other survivors in a next group. Otherwise, `recover`
    /// returns the loss as an error at once, so a program can always call it. Call it when [`backward`](Self::backward)
    /// or another call has returned such an error; all survivors get one.
    ///
    /// `parts` are those of [`save_state`](Self::save_state), in their state after the last complete step. The step in
    /// which the rank was lost is not included, and its batch is used again. With the new accelerator, the program
    /// prepares its parts anew, and [`resume`](Self::resume) continues from that state, as after
    /// [`regroup`](Self::regroup): the rest of the epoch is divided among the survivors, and each sample is used once.
    /// `recover` writes no files.
    ///
    /// If a rank is lost before `resume` has returned, call `recover(())`, and the next `resume` continues from the
    /// same state. At the beginning of a job there is no such state yet, and `resume` does what it does without
    /// `recover`.
    ///
    /// - The survivors are numbered without gaps, in the order of their ranks. The lowest one becomes rank 0, and all
    ///   continue from its last complete step. The others may have finished one more step, which they repeat.
    /// - [`PerRank`](crate::checkpoint::PerRank) values, and the state of a
    ///   [`CommunicationHook`](crate::hook::CommunicationHook), stay with the process. Those of the lost rank are lost.
    ///   Running statistics of a batch norm are rank 0's own.
    /// - The [run](Self::init_trackers) continues, and records the loss in the text `job/recovery`. If rank 0 was lost,
    ///   call [`init_trackers`](Self::init_trackers) again, as after a restart.
    /// - If the launcher starts another process for the lost rank, the job grows with [`regroup`](Self::regroup).
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
    /// [`Error::is_peer_lost`](crate::Error::is_peer_lost), with the loss, if the launcher does not let the survivors
    /// continue: it runs without `--on-loss continue`, or fewer ranks are left than the MIN of `continue:MIN`. End the
    /// program with this error, and the launcher handles the failure as it does without `recover`.
    /// [`Error::is_misuse`](crate::Error::is_misuse) if no rank is lost, or if part of the state is lost with the rank
    /// (sharded units, a sharded optimizer, or ranks that [train apart](crate::local)). The errors of [`save_state`](Self::save_state), except those of files,
    /// and of [`AcceleratorBuilder::build`](crate::AcceleratorBuilder::build).
    #[track_caller]
    pub fn recover<K>(&self, parts: impl Save<K>) -> Result<Self> {
        self.recover_with(&SavedAs::new(parts))
    }

    #[track_caller]
    pub(crate) fn recover_with(&self, parts: &dyn DynSave) -> Result<Self> {
        let checkpoints = &self.shared.checkpoints;
        let loss = checkpoint::loss_to_survive(checkpoints)?;
        // Until the program has resumed, the state is the one that was brought into this group.
        let mut state = match self.shared.brought.lock().take() {
            Some(brought) => brought,
            None => SurvivorState::take(checkpoints, parts)?,
        };
        let mut last = self.clone();
        let mut timeout = FIRST_PLACE_TIMEOUT;
        let mut failure: Option<Error> = None;
        let next = loop {
            let launch = match last.group().survivors_place(timeout) {
                Ok(launch) => launch,
                Err(error) => {
                    return Err(match failure {
                        Some(newer) if newer.is_peer_lost() => newer,
                        Some(failure) => not_continued(
                            &format!("{error}; this rank did not join: {failure}"),
                            loss,
                        ),
                        None => not_continued(&error, loss),
                    });
                }
            };
            timeout = NEXT_PLACE_TIMEOUT;
            let builder = self.shared.builder.clone().launched_as(launch);
            let builder =
                builder.keep_device(self.backend_kind(), self.shared.context.device.clone());
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
        self.end_for(&next, &state)?;
        state.note_recovery(next.world_size());
        *next.shared.brought.lock() = Some(state);
        Ok(next)
    }

    /// Ends this group, which has failed, and hands over to the group of the survivors.
    fn end_for(&self, next: &Self, state: &SurvivorState) -> Result<()> {
        let [old, new] = [&self.shared, &next.shared];
        old.context.timeline.end(None);
        old.context.group.close()?;
        old.reduction.trigger.hand_over_to(&new.reduction.trigger);
        old.tracking.end(RunEnding::Regrouped, None);
        old.tracking.hand_over_to(&new.tracking);
        let ranks = next.world_size();
        if next.is_main_process() {
            if !new.tracking.writes() {
                // Rank 0 was lost, so this rank continues the run.
                new.tracking
                    .continue_from(&old.tracking, state.run().cloned());
            }
            next.tracker(|run| run.set_tag("world", &ranks.to_string()));
        }
        tracing::info!(before = %self.topology(), now = %next.topology(), "joined the other survivors");
        Ok(())
    }
}

/// The error of a rank that was to continue but does not.
fn not_continued(why: &dyn core::fmt::Display, loss: accelerator_collective::Error) -> Error {
    let message = format!("the survivors do not continue ({why}); {loss}");
    Error::new(Kind::Collective, message).with_source(loss)
}

/// The time for the first place. The launcher waits until the evidence of the loss is complete, then gives all ranks
/// their places at about the same time.
const FIRST_PLACE_TIMEOUT: Duration = Duration::from_secs(60);

/// The time for a newer place, if the previous group was never complete.
const NEXT_PLACE_TIMEOUT: Duration = Duration::from_secs(10);
