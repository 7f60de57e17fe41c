use core::time::Duration;

use accelerator_collective::internal::NextPlace;

use super::Accelerator;
use crate::checkpoint::{self, DynSave, Save, SavedAs, SurvivorState};
use crate::core::error::{self, Error, Kind, Result};
use crate::reduce::SeenUpdates;
use crate::tracking::RunEnding;

/// The end of a job.
impl Accelerator {
    /// Ends the job: waits for all ranks, and closes the group. Call it at the end of the program. Ranks that still
    /// communicate after another has left without it get an error that says so. With several ranks, it warns of
    /// prepared models for which [`backward`](Self::backward) was never called, and of gradients with which no
    /// optimizer stepped. Micro-steps of an open window are lost, and rank 0 warns of that. The
    /// [run](Self::init_trackers), if there is one, also ends.
    ///
    /// The number of updates of each model, and their learning rates and clips, are compared: some 60 bytes per
    /// model travel. The values of parameters are not compared, so another kind of optimizer on some rank is not
    /// detected here; [`check_replicas`](Self::check_replicas) detects it.
    ///
    /// # Errors
    ///
    /// [`Error::is_drift`](crate::Error::is_drift) on every rank if one has updated a model otherwise than the
    /// others, which [`backward`](Self::backward) tells of all updates but the last; the group is left all the same;
    /// [`Error::is_collective`](crate::Error::is_collective) when a rank does not come;
    /// [`Error::is_misuse`](crate::Error::is_misuse), and nothing happens, where only some ranks are. The error
    /// of a checkpoint that was [saved beside training](Self::save_state_async), if nobody asked for it
    /// before, or of a [`SyncBatchNorm`](crate::nn::SyncBatchNorm) whose output nothing has refused; the group is
    /// left all the same. Where both go wrong, the error is that of the
    /// checkpoint, with the other one as its [source](Error::collective).
    #[track_caller]
    pub fn finish(&self) -> Result<()> {
        self.leave(RunEnding::Finished)
    }

    /// The same, with another word for the run.
    #[track_caller]
    pub(super) fn leave(&self, ending: RunEnding) -> Result<()> {
        let (timeline, group) = (&self.shared.context.timeline, &self.shared.context.group);
        if self.world_size() > 1 {
            group.check_allowed("`finish`")?;
        }
        let alike = self.check_updates();
        self.warn_without_backward();
        if self.is_main_process() {
            self.shared.reduction.models.warn_open_windows();
        }
        let saved = self.shared.checkpoints.settle();
        let saved = saved.and_then(|()| self.shared.context.forward_collectives.check());
        let saved = saved.and(alike);
        if let Some(path) = self.shared.trace.whole()
            && let Err(error) = timeline.write(group, path)
        {
            error::warn(&format!("the trace is lost: {error}"));
        }
        timeline.end(None);
        let met = self.shared.context.group.barrier();
        self.shared.context.group.close()?;
        let left = match (saved, met) {
            (saved, Ok(())) => saved,
            (Ok(()), Err(lost)) => Err(lost.into()),
            (Err(error), Err(_)) if error.is_collective() => Err(error),
            (Err(error), Err(lost)) => {
                let message = format!("{error:?}; and the ranks did not finish together: {lost}");
                Err(Error::new(error.kind(), message).with_source(lost))
            }
        };
        // A program that recovers continues its run. If it does not, the run ends when the accelerator is dropped.
        let is_lost = left.as_ref().err().is_some_and(Error::is_peer_lost);
        if !(is_lost && group.continues_on_loss()) {
            let failure = left.as_ref().err().map(|error| format!("{error:?}"));
            self.shared.tracking.end(ending, failure.as_deref());
        }
        left
    }

    #[track_caller]
    fn check_updates(&self) -> Result<()> {
        if self.world_size() == 1 {
            return Ok(());
        }
        let finishing = self.shared.context.group.for_purpose("finish");
        // Of a rank that is missing, the barrier tells.
        let Ok(ranks) = finishing.all_gather_object(&self.shared.reduction.models.updates()) else {
            return Ok(());
        };
        for model in 0..ranks[0].len() {
            let model: Vec<_> = ranks
                .iter()
                .filter_map(|models| models.get(model).copied())
                .collect();
            SeenUpdates::check(&model)?;
        }
        Ok(())
    }

    fn warn_without_backward(&self) {
        if !self.is_main_process() {
            return;
        }
        for path in self.shared.reduction.models.unstepped() {
            error::warn(&format!(
                "`backward` was called for a model (its first parameter is `{path}`), and no optimizer stepped with \
                 what it gave, so it is as it was: where it was to be trained, give those to the optimizer, and continue with the \
                 model that `step` gives back"
            ));
        }
        if self.world_size() == 1 {
            return;
        }
        for path in self.shared.reduction.models.untrained() {
            error::warn(&format!(
                "a model was prepared (its first parameter is `{path}`), and `backward` was never called for it: \
                 where it was trained, each of the {} ranks has trained a model of its own; write \
                 `accelerator.backward(loss, &model, &batch)` and step with what that gives; where it is only \
                 evaluated, do so with `accelerator.valid(&model)`, which compares it, or prepare it with `.no_grad()`",
                self.world_size()
            ));
        }
    }
}

/// A job whose number of ranks changes while it runs.
impl Accelerator {
    /// Returns `true` if the launcher has a new number of ranks for the job, so all ranks should call
    /// [`regroup`](Self::regroup): the same answer on every rank, and from then on always. Every rank must call it at
    /// the same point of the loop.
    ///
    /// It is false when [`preempted`](Self::preempted) is, within an accumulation window for example, and costs the same:
    /// nothing after a window of gradients, else an all-reduce of one number, which brings both answers. A program that
    /// asks both asks this first.
    ///
    /// # Errors
    ///
    /// [`Error::is_collective`](crate::Error::is_collective) when ranks have to be asked and one is lost.
    #[track_caller]
    pub fn regroup_pending(&self) -> Result<bool> {
        match self.between_steps() {
            Some(reduction) => reduction.trigger.is_regroup_pending(self.group()),
            None => Ok(false),
        }
    }

    /// Ends this group as [`finish`](Self::finish) does, and joins the next one, of another size, in the same
    /// process. Call it on every rank after [`regroup_pending`](Self::regroup_pending) has returned `true`. Returns
    /// `None` if this process has no rank in the next group: the program should then end with success.
    ///
    /// `parts` are those of [`save_state`](Self::save_state). They go into the memory of rank 0, which stays rank 0, and
    /// nothing is written. The new accelerator has the settings of the builder of this one, and what it
    /// [watches](Self::on_preemption). With it, the program prepares its parts anew, and [`resume`](Self::resume)
    /// continues from that state, once, in place of the newest checkpoint, on the ranks that have just been started,
    /// too: they run the program from its beginning. A program that does not resume starts afresh. The launcher's part
    /// is in `docs/elastic.md`.
    ///
    /// - It is a resume at [another number of ranks](Self::resume): a step uses as many samples as before, and the epoch
    ///   continues where it stands, with each sample once.
    /// - [`PerRank`](crate::checkpoint::PerRank) values go to the ranks of the same numbers. Where there is no such rank any
    ///   more, the value is lost; a new rank keeps what it passes.
    /// - Hooks of [`Checkpoints`](crate::checkpoint::Checkpoints) do not run, neither here nor when it is resumed. The
    ///   accumulation steps are the builder's again. A trace is that of the last group.
    /// - The [run](Self::init_trackers) continues, with the new number of ranks as its tag `world`.
    ///
    /// ```
    /// use accelerator::prelude::*;
    /// # use accelerator::collective::Launch;
    /// # use accelerator::collective::internal::StoreServer;
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
    /// fn main() -> Result<()> {
    /// #     // What a launcher does, for one process.
    /// #     let stores = [(); 2].map(|()| StoreServer::bind(("127.0.0.1", 0), 1, None).unwrap());
    /// #     let told = |store: &StoreServer| {
    /// #         let port = store.local_addr().port().to_string();
    /// #         let told = [
    /// #             ("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"),
    /// #             ("ACCEL_PORT", &port), ("ACCEL_STORE", "launcher"), ("ACCEL_ELASTIC", "running"),
    /// #         ];
    /// #         told.map(|(name, value)| (name.to_owned(), value.to_owned()))
    /// #     };
    /// #     let first = told(&stores[0]);
    /// #     let found = |name: &str| first.iter().find(|told| told.0 == name).map(|told| told.1.clone());
    /// #     let launch = Launch::from_vars(found).unwrap();
    /// #     let accelerator = Accelerator::builder().launched_as(launch).build()?;
    /// #     stores[0].tell_next_place(0, told(&stores[1]));
    /// #     let mut accelerator = accelerator;
    /// #     let mut groups = 1;
    /// #     #[cfg(any())]
    ///     let mut accelerator = Accelerator::new()?;
    ///     while let Some(next) = train(&accelerator)? {
    ///         accelerator = next;
    /// #         groups += 1;
    ///     }
    /// #     assert_eq!(groups, 2);
    ///     Ok(())
    /// }
    ///
    /// /// Trains until the end, or until the number of ranks changes.
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
    ///             let gradients = accelerator.backward(loss, &model, &batch)?;
    ///             model = optimizer.step(1e-2, model, gradients);
    ///             if accelerator.regroup_pending()? {
    ///                 return accelerator.regroup((&model, &optimizer, &train));
    ///             }
    ///         }
    ///     }
    /// #     assert_eq!(optimizer.steps(), 30);
    ///     accelerator.finish()?;
    ///     Ok(None)
    /// }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::is_misuse`](crate::Error::is_misuse) if [`regroup_pending`](Self::regroup_pending) has not said so.
    /// The errors of [`save_state`](Self::save_state), except those of files, of [`finish`](Self::finish) and of
    /// [`AcceleratorBuilder::build`](crate::AcceleratorBuilder::build).
    /// [`Error::is_collective`](crate::Error::is_collective) if the launcher assigns this rank no place within a minute,
    /// or assigns rank 0 another rank.
    #[track_caller]
    pub fn regroup<K>(&self, parts: impl Save<K>) -> Result<Option<Self>> {
        self.regroup_with(&SavedAs::new(parts))
    }

    #[track_caller]
    pub(crate) fn regroup_with(&self, parts: &dyn DynSave) -> Result<Option<Self>> {
        if !self.shared.reduction.trigger.has_told_of_regroup() {
            return Err(Error::misuse(
                "`regroup` is for where `regroup_pending` has said that there is a next group, on all ranks",
            ));
        }
        let live = checkpoint::keep(&self.shared.checkpoints, parts)?;
        // If a rank is lost before the program has resumed, rank 0 may be another one. Of state that lies on several ranks,
        // nobody can keep the whole.
        let brought = match self.group().continues_on_loss() {
            true => SurvivorState::take(&self.shared.checkpoints, parts).ok(),
            false => None,
        };
        let place = self.group().next_place(PLACE_TIMEOUT)?;
        let leads = matches!(&place, NextPlace::Join(launch) if launch.topology.is_main());
        if self.is_main_process() && !leads {
            return Err(Error::new(
                Kind::Collective,
                "rank 0 holds the state of the training, and the launcher has not made it rank 0 of the next group",
            ));
        }
        self.leave(RunEnding::Regrouped)?;
        let NextPlace::Join(launch) = place else {
            return Ok(None);
        };
        let next = self.shared.builder.clone().launched_as(*launch).build()?;
        let trigger = &self.shared.reduction.trigger;
        trigger.hand_over_to(&next.shared.reduction.trigger);
        self.shared.tracking.hand_over_to(&next.shared.tracking);
        let ranks = next.world_size().to_string();
        next.tracker(|run| run.set_tag("world", &ranks));
        next.shared.checkpoints.go_on_from(live);
        *next.shared.brought.lock() = brought;
        tracing::info!(before = %self.topology(), now = %next.topology(), "joined the next group");
        Ok(Some(next))
    }
}

/// The launcher tells all ranks at about the same time.
const PLACE_TIMEOUT: Duration = Duration::from_secs(60);
