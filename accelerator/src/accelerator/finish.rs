use super::Accelerator;
use crate::core::error::{Error, Result};
use crate::core::user_message;
use crate::reduce::SeenUpdates;
use crate::tracking::RunEnding;

/// The end of a job.
impl Accelerator {
    /// Ends the job: waits for all ranks, and closes the group. Call it at the end of the program: ranks that still
    /// communicate when another has left without it get an error that says so. With several ranks, it warns of
    /// prepared models for which [`backward`](Self::backward) was never called, and of gradients that no optimizer
    /// stepped with. Micro-steps of an open window are lost, with a warning of rank 0. The [run](Self::init_trackers), if
    /// there is one, ends, too.
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
            user_message::warn(&format!("the trace is lost: {error}"));
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
        let failure = left.as_ref().err().map(|error| format!("{error:?}"));
        self.shared.tracking.end(ending, failure.as_deref());
        left
    }

    /// Checks that all ranks have updated their models alike.
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

    /// Warns of prepared models for which `backward` was never called.
    fn warn_without_backward(&self) {
        if !self.is_main_process() {
            return;
        }
        for path in self.shared.reduction.models.unstepped() {
            user_message::warn(&format!(
                "`backward` was called for a model (its first parameter is `{path}`), and no optimizer stepped with \
                 what it gave, so it is as it was: where it was to be trained, give those to the optimizer, and go on with the \
                 model that `step` gives back"
            ));
        }
        if self.world_size() == 1 {
            return;
        }
        for path in self.shared.reduction.models.untrained() {
            user_message::warn(&format!(
                "a model was prepared (its first parameter is `{path}`), and `backward` was never called for it: \
                 where it was trained, each of the {} ranks has trained a model of its own; write \
                 `accelerator.backward(loss, &model, &batch)` and step with what that gives; where it is only \
                 evaluated, do so with `accelerator.valid(&model)`, which compares it, or prepare it with `.no_grad()`",
                self.world_size()
            ));
        }
    }
}
