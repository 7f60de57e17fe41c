use std::process::ExitCode;

use accelerator_host::PREEMPTED_EXIT_CODE;

use super::Accelerator;
use crate::core::error::Result;
use crate::core::preemption::Preemption;
use crate::reduce::ReduceContext;
use crate::tracking::RunEnding;

/// A program that leaves its place when it is told to, and loses nothing.
impl Accelerator {
    /// Watches for notices that this rank will be ended soon: SIGTERM, SIGUSR1 and SIGUSR2, a deadline, or a file.
    /// With [`preempted`](Self::preempted), all ranks learn of a notice, save at the same step, and
    /// [end](Self::finish_preempted) with an exit code that asks for another start.
    ///
    /// Call it on each rank, before the loop; nothing is communicated. What a second call names is watched, too.
    ///
    /// The handler of a signal sets a flag and does nothing else, so the signal may arrive at any time: in the first step,
    /// in an evaluation, during a save. From then on no further one ends the process, as it would by default; nor does the
    /// first one. So a program that does not ask [`preempted`](Self::preempted) is ended by SIGKILL alone. Without
    /// this call, and when the accelerator is dropped without a notice, signals do what they do in any program.
    ///
    /// ```
    /// use std::process::ExitCode;
    ///
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
    /// fn main() -> Result<ExitCode> {
    /// #     let folder = tempfile::tempdir().unwrap();
    /// #     let leave = folder.path().join("leave");
    /// #     std::fs::write(&leave, "")?;
    /// #     let folder = folder.path();
    /// #     let dataset = InMemDataset::new(vec![0.5_f32; 40]);
    /// #     let train = LoaderBuilder::new(Rows).batch_size(4).shuffle(1).build(dataset);
    ///     let accelerator = Accelerator::new()?;
    ///     accelerator.on_preemption(Preemption::new())?;
    /// #     accelerator.on_preemption(Preemption::new().with_signals([]).with_file(leave))?;
    /// #     let model: Linear = LinearConfig::new(1, 1).init(&accelerator.device());
    ///     // Model, optimizer and loader as ever; they continue where they were.
    ///     let parts = accelerator.prepare((model, SgdConfig::new().init(), train))?;
    ///     let ((mut model, mut optimizer, train), position) = accelerator.resume(folder, parts)?;
    ///     for epoch in position.epoch()..3 {
    ///         for batch in train.epoch(epoch) {
    ///             let batch = batch?;
    /// #             let loss = model.forward((*batch).clone()).powi_scalar(2).mean();
    ///             let gradients = accelerator.backward(loss, &model, &batch)?;
    ///             model = optimizer.step(1e-2, model, gradients);
    ///             if accelerator.preempted()? {
    ///                 accelerator.save_state(folder, (&model, &optimizer, &train))?;
    /// #                 assert_eq!(optimizer.steps(), 1);
    /// #                 return accelerator.finish_preempted().map(|_| ExitCode::SUCCESS);
    ///                 return accelerator.finish_preempted();
    ///             }
    ///         }
    ///     }
    /// #     panic!("it has found the file");
    ///     accelerator.finish()?;
    ///     Ok(ExitCode::SUCCESS)
    /// }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::is_io`](crate::Error::is_io) if the system refuses a handler.
    pub fn on_preemption(&self, preemption: Preemption) -> Result<()> {
        self.shared.reduction.trigger.watch_preemption(preemption)
    }

    /// Returns `true` if any rank has been told to leave: the same answer on every rank, and from then on always.
    /// Every rank must call it at the same point of the loop. It also returns `true` if the launcher changes the
    /// number of ranks: a program that does not continue [live](Self::regroup) then saves and ends, and is started
    /// again with the new number.
    ///
    /// It is false when no checkpoint can be saved: while an accumulation window is open, and while
    /// [local training](crate::local) has replicas that differ. Elsewhere it costs what
    /// [`check_trigger`](Self::check_trigger) does: nothing after a window of gradients, which has brought the answer
    /// along, else an all-reduce of one number.
    ///
    /// After each optimizer step is the place for it. A notice that comes during an evaluation is told by the step after
    /// it; if there is none, or evaluations take longer than the time that is left to save, ask in them, too.
    ///
    /// # Errors
    ///
    /// [`Error::is_collective`](crate::Error::is_collective) when ranks have to be asked and one is lost.
    #[track_caller]
    pub fn preempted(&self) -> Result<bool> {
        match self.between_steps() {
            Some(reduction) => reduction.trigger.is_preempted(self.group()),
            None => Ok(false),
        }
    }

    /// The reduction, where a checkpoint could be saved.
    pub(super) fn between_steps(&self) -> Option<&ReduceContext> {
        let reduction = &self.shared.reduction;
        let is_between = self.sync_gradients() && !reduction.models.is_any_apart();
        is_between.then_some(&**reduction)
    }

    /// Ends the job as [`finish`](Self::finish) does, and returns the exit code for `main`,
    /// [`PREEMPTED_EXIT_CODE`](crate::PREEMPTED_EXIT_CODE) (75), which tells `accel-launch`, Slurm and Kubernetes to
    /// start the program again.
    ///
    /// # Errors
    ///
    /// The errors of [`finish`](Self::finish): the job has failed then, and must not end with this code.
    #[track_caller]
    pub fn finish_preempted(&self) -> Result<ExitCode> {
        self.leave(RunEnding::Preempted)?;
        Ok(ExitCode::from(PREEMPTED_EXIT_CODE))
    }
}

/// A flag that any rank raises for all.
impl Accelerator {
    /// Raises a flag that [`check_trigger`](Self::check_trigger) shows to every rank: to stop early, or to save, for
    /// a reason that only this rank knows. It does not communicate, so a single rank may call it.
    pub fn set_trigger(&self) {
        self.shared.reduction.trigger.set();
    }

    /// Returns `true` if any rank has [raised the flag](Self::set_trigger), and resets the flag: the same answer on
    /// every rank. Every rank must call it at the same point of the loop.
    ///
    /// It costs nothing where gradients are reduced anyway:
    ///
    /// - If a window of gradients was reduced since the last check, the answer was sent with it: whether
    ///   some rank had raised the flag by the end of its backward pass. A flag that is raised later is
    ///   sent with the next window, or by the next check without one.
    /// - Otherwise the check is an all-reduce of one number, also right after another check.
    ///
    /// The choice between the two depends on the calls of `backward` and `check_trigger` alone, and so is
    /// the same on every rank, and at every world size.
    ///
    /// ```
    /// let answers = accelerator::launch(2, |accelerator| {
    ///     let before = accelerator.check_trigger()?;
    ///     accelerator.on_process(1, || accelerator.set_trigger());
    ///     Ok([before, accelerator.check_trigger()?, accelerator.check_trigger()?])
    /// })?;
    /// assert_eq!(answers, [[false, true, false]; 2]);
    /// # Ok::<(), accelerator::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::is_collective`](crate::Error::is_collective) when ranks have to be asked and one is
    /// lost.
    #[track_caller]
    pub fn check_trigger(&self) -> Result<bool> {
        self.shared.reduction.trigger.check(self.group())
    }
}
