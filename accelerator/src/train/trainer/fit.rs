use core::fmt;
use std::time::Instant;

use burn::module::Module;

use super::parts::TrainData;
use super::{TrainOutput, Trainer};
use crate::core::error::{Error, Result};
use crate::core::preemption::Preemption;
use crate::core::tensors::Tensors;
use crate::data::Batch;
use crate::local::LocalTraining as _;
use crate::optim::StepOutcome;
use crate::train::callback::{CallbackContext, TrainerCallback};
use crate::train::state::{EpochEnd, LogEntry, Metrics, PendingWork, TrainerControl, UpdateEnd};

/// The reason why the training in a group of ranks ends.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum GroupEnd {
    Finished,
    Regroup,
}

impl<M, I, O, P> Trainer<M, I, O, P>
where
    M: Module + fmt::Display + 'static,
    I: fmt::Debug + Send + Sync + 'static,
    O: Send + 'static,
    P: Tensors + Clone + 'static,
{
    /// Trains until the last update, or until a callback ends it, or a [notice to
    /// leave](crate::Accelerator::on_preemption), which also saves a checkpoint. Every rank must call it.
    ///
    /// If the launcher changes the number of ranks, or if it was started with `--on-loss continue` and a rank is lost,
    /// training continues with the next group of ranks, as after [`regroup`](crate::Accelerator::regroup) or
    /// [`recover`](crate::Accelerator::recover). [`accelerator`](Self::accelerator) then returns a new accelerator, and
    /// callbacks get `on_train_begin` and `on_epoch_begin` again. A process that has no place in the next group exits in
    /// `train`, with code 0. An added process calls [`build`](super::TrainerBuilder::build) while the other ranks are in
    /// `train`. So before `train`, call nothing else that involves all ranks, such as [`evaluate`](Self::evaluate).
    ///
    /// # Errors
    ///
    /// [`Error::is_config`] without training data; those of [`Accelerator::backward`](crate::Accelerator::backward),
    /// of evaluations, of checkpoints and of callbacks; [`Error::is_collective`] if a rank is lost and the launcher
    /// does not let the others continue.
    pub fn train(&mut self) -> Result<TrainOutput> {
        let (since, before) = (Instant::now(), self.state.global_step);
        let Some(mut data) = self.train.take() else {
            return Err(Error::config(
                "there is no training data: pass `train_dataset` to the builder of the trainer",
            ));
        };
        loop {
            let next = match self.train_on(&data) {
                Ok(GroupEnd::Finished) => break,
                Ok(GroupEnd::Regroup) => self.regroup(&data),
                Err(lost) if lost.is_peer_lost() => self.recover(&data, lost),
                Err(error) => Err(error),
            };
            match next {
                Ok(next) => data = next,
                Err(error) => {
                    self.train = Some(data);
                    return Err(error);
                }
            }
        }
        let output = self.output(&data, since, before);
        self.train = Some(data);
        let ended = self.hook(|callback, at, _| callback.on_train_end(at));
        self.state.pending = PendingWork::Nothing;
        ended?;
        self.console
            .on_train_end(&self.accelerator, &output.metrics);
        Ok(output)
    }

    /// Trains until the end, or until the number of ranks changes.
    fn train_on(&mut self, data: &TrainData<O>) -> Result<GroupEnd> {
        self.was_preempted = false;
        if !self.watches {
            self.accelerator.on_preemption(Preemption::new())?;
            self.watches = true;
        }
        self.begin_run()?;
        self.print_banner(data);
        let begun = self.hook(|callback, at, control| callback.on_train_begin(at, control))?;
        let mut stops = begun.should_training_stop || self.state.pending == PendingWork::TrainEnd;
        if self.arguments.eval_on_start
            && self.state.global_step == 0
            && !self.state.is_evaluated_at_start
        {
            stops |= self.evaluate_now()?.should_training_stop;
            self.state.is_evaluated_at_start = true;
        }
        if stops {
            self.state.pending.stop();
        }
        if let PendingWork::SaveAfterEpoch(control) = self.state.pending {
            stops = self.save_after_epoch(data, control)?;
        }
        loop {
            let end = match self.state.pending {
                PendingWork::AfterEpoch(end) => end,
                pending if pending.update().is_some() => self.train_epoch(data)?,
                _ if stops || self.state.ended_epochs >= data.flow.epochs => break,
                _ if self.state.global_step < data.flow.updates => self.train_epoch(data)?,
                // It ended between the last update and the end of its epoch.
                _ => EpochEnd::Complete,
            };
            if end == EpochEnd::Regroup {
                return Ok(GroupEnd::Regroup);
            }
            if self.was_preempted {
                break;
            }
            self.state.pending = PendingWork::AfterEpoch(end);
            let control = self.hook(|callback, at, control| callback.on_epoch_end(at, control))?;
            let due = data.flow.after_epoch(self.state.epoch);
            let mut control = self.log_and_evaluate(control.or(due))?;
            if end != EpochEnd::Interrupted {
                self.state.ended_epochs += 1;
            }
            control.should_training_stop |= end != EpochEnd::Complete;
            self.state.unreported_log = None;
            self.state.pending = PendingWork::SaveAfterEpoch(control);
            stops |= self.save_after_epoch(data, control)?;
        }
        self.share_losses()?;
        self.average_weights()?;
        if !self.was_preempted {
            self.state.pending = PendingWork::TrainEnd;
            self.load_best()?;
        }
        Ok(GroupEnd::Finished)
    }

    fn train_epoch(&mut self, data: &TrainData<O>) -> Result<EpochEnd> {
        self.hook(|callback, at, control| callback.on_epoch_begin(at, control))?;
        let begin = || data.loader.epoch(self.state.ended_epochs);
        let mut batches = self.interrupted_epoch.take().unwrap_or_else(begin);
        let mut end = match self.state.pending.update() {
            Some(_) => self.after_update(data)?,
            None => None,
        };
        while end.is_none()
            && let Some(batch) = batches.next()
        {
            let batch = batch?;
            self.micro_step(data, &batch)?;
            if self.accelerator.sync_gradients() {
                self.state.pending = PendingWork::AfterUpdate(UpdateEnd {
                    control: TrainerControl::default(),
                    is_last_of_epoch: batch.is_last(),
                });
                end = self.after_update(data)?;
            }
        }
        let end = end.unwrap_or(EpochEnd::Complete);
        if end == EpochEnd::Interrupted {
            self.interrupted_epoch = Some(batches);
        }
        Ok(end)
    }

    /// Does the pending work after an update: logs, evaluates and saves what is due. Returns how the epoch ends, or
    /// `None` if it continues.
    fn after_update(&mut self, data: &TrainData<O>) -> Result<Option<EpochEnd>> {
        let Some(mut update) = self.state.pending.update() else {
            return Ok(None);
        };
        if let PendingWork::AfterUpdate(_) = self.state.pending {
            self.console.on_step_end(&self.state);
            let control = self.hook(|callback, at, control| callback.on_step_end(at, control))?;
            let due = data.flow.after_update(self.state.global_step);
            let control = self.log_and_evaluate(control.or(due))?;
            update.control = update.control.or(control);
            self.state.unreported_log = None;
            self.state.pending = PendingWork::SaveAfterUpdate(update);
        }
        update.control = self.save_if_due(data, update.control)?;
        update.control.should_save = false;
        self.state.pending = PendingWork::SaveAfterUpdate(update);
        let UpdateEnd {
            control,
            is_last_of_epoch,
        } = update;
        let is_complete = control.should_epoch_stop || self.state.global_step >= data.flow.updates;
        let stops = control.should_training_stop;
        // The answer comes with that about preemption.
        let regroups = !self.is_bound_to_group() && self.accelerator.regroup_pending()?;
        if regroups && !is_complete && !stops {
            self.share_losses()?;
            self.state.pending = PendingWork::Nothing;
            return Ok(Some(EpochEnd::Regroup));
        }
        let trigger = &self.accelerator.shared.reduction.trigger;
        let leaves = match regroups {
            // A training that ends anyway does not start again at another size.
            true => trigger.has_told_of_preemption(),
            false => self.accelerator.preempted()?,
        };
        if leaves {
            self.was_preempted = true;
            if !self.is_saved() {
                self.save(data)?;
            }
            self.state.pending = PendingWork::Nothing;
            return Ok(Some(EpochEnd::Interrupted));
        }
        self.state.pending = PendingWork::Nothing;
        Ok(match stops {
            true if is_complete || is_last_of_epoch => Some(EpochEnd::LastOfTraining),
            true => Some(EpochEnd::Interrupted),
            false => is_complete.then_some(EpochEnd::Complete),
        })
    }

    /// Saves a checkpoint after an epoch, if requested, and returns true if the training stops.
    fn save_after_epoch(&mut self, data: &TrainData<O>, control: TrainerControl) -> Result<bool> {
        let control = self.save_if_due(data, control)?;
        self.state.pending = PendingWork::Nothing;
        Ok(control.should_training_stop)
    }

    /// Runs forward and backward of a batch, and the optimizer's step at the end of a window.
    fn micro_step(&mut self, data: &TrainData<O>, batch: &Batch<O>) -> Result<()> {
        let output = self.compute_loss(self.model.get(), batch);
        let Self {
            accelerator,
            arguments,
            local,
            optimizer,
            state,
            ..
        } = self;
        let weight = output.weight(batch);
        let model = self.model.get();
        let mut gradients = match local {
            Some(local) => local.sgd.backward(output.loss, model, weight)?,
            None => accelerator.backward(output.loss, model, weight)?,
        };
        let rate = data.flow.schedule.rate(optimizer.steps());
        if !gradients.is_accumulating() {
            state.global_step += 1;
            state.epoch =
                batch.epoch() as f64 + (batch.step() + 1) as f64 / data.flow.batches as f64;
            state.learning_rate = Some(rate);
            match local {
                Some(local) => local.note(&gradients),
                None => state.add_losses(gradients.loss(), 1),
            }
            // A norm that is not clipped to is computed for logs alone; of local SGD each rank has another.
            let logs = local.is_none() && data.flow.may_log(state.global_step, batch.is_last());
            state.grad_norm = if logs { gradients.norm() } else { None };
            if arguments.max_grad_norm > 0.0 {
                gradients = gradients.clip_norm(arguments.max_grad_norm);
            }
        }
        self.model
            .replace(|model| optimizer.step(rate, model, gradients));
        if let Some(local) = local {
            local.sgd.step(self.model.get_mut())?;
        }
        // Asked for the average alone: on a GPU, the outcome waits for the device.
        if let Some(ema) = &mut self.ema
            && matches!(optimizer.outcome(), StepOutcome::Stepped { .. })
        {
            ema.update(self.model.get());
        }
        Ok(())
    }

    /// Does what is due or asked for, as far as it does not need the checkpoint.
    fn log_and_evaluate(&mut self, mut control: TrainerControl) -> Result<TrainerControl> {
        if control.should_log {
            self.share_losses()?;
            control = control.or(self.log_losses()?);
        }
        if control.should_evaluate {
            self.average_weights()?;
            control = control.or(self.evaluate_now()?);
        }
        Ok(control)
    }

    fn save_if_due(
        &mut self,
        data: &TrainData<O>,
        control: TrainerControl,
    ) -> Result<TrainerControl> {
        match control.should_save {
            true => Ok(control.or(self.save(data)?)),
            false => Ok(control),
        }
    }

    /// Logs the mean loss of the updates since the last time.
    fn log_losses(&mut self) -> Result<TrainerControl> {
        let step = self.state.global_step;
        let unreported = self.state.unreported_log.take();
        let entry = match unreported.filter(|entry| entry.step == step) {
            Some(entry) => entry,
            None => match self.log_window() {
                Some(entry) => entry,
                None => return Ok(TrainerControl::default()),
            },
        };
        self.state.unreported_log = Some(entry.clone());
        self.hook(|callback, at, control| callback.on_log(at, &entry, control))
    }

    fn log_window(&mut self) -> Option<LogEntry> {
        let loss = core::mem::take(&mut self.state.window).mean()?;
        let mut metrics = Metrics::default();
        metrics.push("loss", loss);
        for (name, metric) in [
            ("grad_norm", self.state.grad_norm),
            ("learning_rate", self.state.learning_rate),
        ] {
            if let Some(metric) = metric {
                metrics.push(name, metric);
            }
        }
        let entry = self.log("train", metrics);
        self.console.on_log(&self.accelerator, &entry);
        Some(entry)
    }

    fn evaluate_now(&mut self) -> Result<TrainerControl> {
        let step = self.state.global_step;
        let unreported = self.state.unreported_evaluation.take();
        let entry = match unreported.filter(|entry| entry.step == step) {
            Some(entry) => entry,
            None => {
                let entry = self.evaluate_and_log()?;
                let loss = self.state.last_loss();
                self.console.on_evaluate(&self.accelerator, &entry, loss);
                entry
            }
        };
        self.state.unreported_evaluation = Some(entry.clone());
        let metrics = &entry.metrics;
        let mut control =
            self.hook(|callback, at, control| callback.on_evaluate(at, metrics, control))?;
        control.should_save |= self.compare_with_best(metrics);
        self.state.unreported_evaluation = None;
        Ok(control)
    }

    fn save(&mut self, data: &TrainData<O>) -> Result<TrainerControl> {
        self.share_losses()?;
        self.average_weights()?;
        let saved = self.save_checkpoint(data)?;
        self.hook(|callback, at, control| callback.on_save(at, &saved, control))
    }

    /// Puts the mean loss over the samples of all ranks in place of those of each.
    fn share_losses(&mut self) -> Result<()> {
        let Some(local) = &mut self.local else {
            return Ok(());
        };
        let losses = self
            .accelerator
            .reduce_metric(core::mem::take(&mut local.losses))?;
        let updates = core::mem::take(&mut local.updates);
        let mean = (losses.samples() > 0.0).then(|| losses.value());
        self.state.add_losses(mean, updates);
        Ok(())
    }

    /// Ends a round of local steps, so that ranks have the same weights.
    fn average_weights(&mut self) -> Result<()> {
        match &mut self.local {
            Some(local) => local.sgd.average(self.model.get_mut()),
            None => Ok(()),
        }
    }

    pub(super) fn log(&mut self, kind: &str, metrics: Metrics) -> LogEntry {
        let entry = LogEntry {
            step: self.state.global_step,
            epoch: self.state.epoch,
            metrics,
        };
        let prefix = format!("{kind}_");
        let named = entry.metrics.iter();
        let named = named.map(|(name, value)| (name.strip_prefix(&prefix).unwrap_or(name), value));
        self.accelerator.log(kind, named, entry.step, entry.epoch);
        self.state.log_history.push(entry.clone());
        entry
    }

    /// Calls a hook of each callback: what they ask for, if one rank does.
    fn hook(
        &mut self,
        mut call: impl FnMut(
            &mut dyn TrainerCallback<M>,
            &CallbackContext<'_, M>,
            &mut TrainerControl,
        ) -> Result<()>,
    ) -> Result<TrainerControl> {
        let mut control = TrainerControl::default();
        let at = CallbackContext {
            accelerator: &self.accelerator,
            arguments: &self.arguments,
            state: &self.state,
            model: self.model.get(),
        };
        for callback in &mut self.callbacks.of_program {
            call(callback.as_mut(), &at, &mut control)?;
        }
        if !self.callbacks.of_program.is_empty() {
            control = control.agreed(&self.accelerator)?;
        }
        // It sees the same metrics on every rank.
        if let Some(callback) = &mut self.callbacks.early_stopping {
            call(callback, &at, &mut control)?;
        }
        Ok(control)
    }

    fn output(&mut self, data: &TrainData<O>, since: Instant, before: u64) -> TrainOutput {
        let seconds = since.elapsed().as_secs_f64();
        let updates = self.state.global_step.saturating_sub(before);
        let arguments = &self.arguments;
        let of_all = match u64::try_from(arguments.max_steps) {
            Ok(steps) => steps as f64 * self.batch_of_update(data) as f64,
            Err(_) => data.loader.samples() as f64 * arguments.num_train_epochs,
        };
        let share = updates as f64 / data.flow.updates.max(1) as f64;
        let training_loss = self.state.whole.mean().unwrap_or(0.0);
        let mut metrics = Metrics::default();
        for (name, value) in [
            ("train_runtime", seconds),
            ("train_samples_per_second", of_all * share / seconds),
            ("train_steps_per_second", updates as f64 / seconds),
            ("train_loss", training_loss),
            ("epoch", self.state.epoch),
        ] {
            metrics.push(name, value);
        }
        self.log("train", metrics.clone());
        TrainOutput {
            global_step: self.state.global_step,
            training_loss,
            metrics,
        }
    }
}
