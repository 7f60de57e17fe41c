//! The messages of ranks beside the sums.

use accelerator_collective::{DType, ReduceOp};

use super::{Reducer, SendMode, waited};
use crate::core::agreement::sides;
use crate::core::error::{Error, Result};
use crate::data::ConsumeTicket;
use crate::reduce::backward_calls::BackwardCall;
use crate::reduce::control_vector::{
    ControlHeader, ControlSums, HEADER, WindowFingerprint, length,
};
use crate::reduce::pace;
use crate::reduce::updates::SeenUpdates;
use crate::timeline::{EventSubject, Phase};

impl Reducer {
    /// Starts to add up the weights of all ranks, before anybody sends.
    pub(super) fn start_weighing(&mut self) -> Result<()> {
        let spare = self.bucket_set.weight_buffer.take();
        let mut total = spare.unwrap_or_else(|| self.group.buffer(DType::F64, 1));
        total.as_mut_slice::<f64>()?[0] = self.totals.weight;
        let pending = self.caller_group().start_all_reduce(total, ReduceOp::Sum)?;
        self.collective.mark_started();
        self.weighing = Some(pending);
        Ok(())
    }

    /// Returns `true` if `here` is `true` on all ranks.
    pub(super) fn all_agree(&mut self, here: bool) -> Result<bool> {
        let spare = self.bucket_set.weight_buffer.take();
        let mut others = spare.unwrap_or_else(|| self.group.buffer(DType::F64, 1));
        others.as_mut_slice::<f64>()?[0] = f64::from(u8::from(!here));
        self.caller_group()
            .all_reduce_buffer(&mut others, ReduceOp::Max)?;
        self.collective.mark_started();
        let everywhere = others.as_slice::<f64>()? == [0.0];
        self.bucket_set.weight_buffer = Some(others);
        Ok(everywhere)
    }

    pub(super) fn send_control(&mut self) -> Result<()> {
        let bucket_set = &mut self.bucket_set;
        let Some(mut control) = bucket_set.control.take() else {
            return Ok(());
        };
        let Some((header, rest)) = control.as_mut_slice::<f64>()?.split_at_mut_checked(HEADER)
        else {
            return Ok(());
        };
        let ranks = self.group.world_size();
        let (rest, paces) = rest.split_at_mut(rest.len().saturating_sub(pace::length(ranks)));
        let failed = self.call.as_ref().map_or(0, BackwardCall::count);
        let window = [
            self.model.number(),
            self.totals.micro_steps as u64,
            failed,
            self.updates.digest,
        ];
        let batches = self.totals.batches.number().map(|number| [number]);
        // A loss of 0 tells nothing of the batch: an idle rank, a converged model and a loss still on the device all
        // have it. Batches of prepared loaders are known to be others on each rank, whatever comes of them.
        let loss = Some(self.totals.loss.read).filter(|loss| loss.is_finite() && *loss != 0.0);
        let loss = loss.filter(|_| batches.is_none());
        let loss = loss.map(|loss| [loss.to_bits()]);
        ControlHeader {
            weight: self.totals.weight,
            loss: self.totals.loss.read,
            window: WindowFingerprint::of(ranks, Some(&window)),
            batches: WindowFingerprint::of(ranks, batches.as_ref().map(|batches| &batches[..])),
            losses: WindowFingerprint::of(ranks, loss.as_ref().map(|loss| &loss[..])),
            norm: f64::from(u8::from(self.wants_norm)),
        }
        .write(header);
        let records = bucket_set.parameters.iter();
        let in_window = records.map(|record| record.written | record.has_gradient);
        let needs_retry = bucket_set.buckets.iter().map(|bucket| bucket.needs_retry);
        for (value, flag) in rest.iter_mut().zip(in_window.chain(needs_retry)) {
            *value = f64::from(u8::from(flag));
        }
        if let (Some(last), Some(trigger)) = (rest.last_mut(), &self.trigger) {
            *last = trigger.send(&self.group);
        }
        match &self.pace {
            Some(pace) => pace.send(&self.group, &self.timeline, paces),
            None => paces.fill(0.0),
        }
        match self.send_mode {
            SendMode::Nowhere => self.bucket_set.control = Some(control),
            SendMode::InFlight => {
                let pending = self
                    .caller_group()
                    .start_all_reduce(control, ReduceOp::Sum)?;
                self.collective.mark_started();
                self.control = Some(pending);
            }
            SendMode::Blocking => {
                let (part, bytes) = (EventSubject::Control, control.bytes().len());
                let _reduce = self.timeline.span(Phase::Reduce { part, bytes });
                self.caller_group()
                    .all_reduce_buffer(&mut control, ReduceOp::Sum)?;
                self.collective.mark_started();
                self.bucket_set.control = Some(control);
            }
        }
        Ok(())
    }

    /// Returns what all ranks have told each other, once it is there.
    pub(super) fn sums(&self) -> Result<ControlSums<'_>> {
        let bucket_set = &self.bucket_set;
        ControlSums::read(
            &bucket_set.control,
            bucket_set.parameters.len(),
            &self.group,
        )
    }

    pub(super) fn receive_control(&mut self) -> Result<()> {
        if let Some(control) = self.control.take() {
            let bucket_set = &self.bucket_set;
            let (parameters, buckets) = (bucket_set.parameters.len(), bucket_set.buckets.len());
            let bytes = 8 * length(parameters, buckets, self.group.world_size());
            self.bucket_set.control = Some(waited(
                &self.timeline,
                EventSubject::Control,
                bytes,
                control,
            )?);
        }
        let bucket_set = &mut self.bucket_set;
        let parameters = bucket_set.parameters.len();
        let sums = ControlSums::read(&bucket_set.control, parameters, &self.group)?;
        if let Some(call) = &self.call {
            call.mark_synchronized();
        }
        for (record, ranks) in bucket_set.parameters.iter_mut().zip(sums.present) {
            record.present = *ranks > 0.0;
        }
        if let Some(trigger) = &self.trigger {
            trigger.receive(sums.trigger);
        }
        if let Some(pace) = &self.pace {
            pace.receive(&self.group, sums.paces);
        }
        Ok(())
    }
}

/// Checks that windows of the same length, of the same model and the same batches, ended on all ranks, none of which
/// has missed one, or updated its replica otherwise. All ranks see the same numbers, so all get the same error.
pub(super) fn check_windows(reducer: &Reducer) -> Result<()> {
    let group = &reducer.group;
    if reducer.sums()?.windows_agree(group) {
        return Ok(());
    }
    let failed = reducer.call.as_ref().map(BackwardCall::failed);
    let mine = (
        failed.unwrap_or_default(),
        reducer.model.to_string(),
        reducer.totals.micro_steps as u64,
        reducer.updates,
        reducer
            .totals
            .batches
            .number()
            .map(|_| ends_of(&reducer.tickets)),
    );
    let asking = group.for_purpose("average gradients");
    let all = asking.all_gather_object(&mine)?;
    let least = all.iter().map(|(failed, ..)| failed.calls).min();
    let missed = (0..)
        .zip(&all)
        .filter(|(_, (failed, ..))| Some(failed.calls) > least);
    let missed: Vec<_> = missed
        .map(|(rank, (failed, ..))| format!("rank {rank} ({})", failed.last))
        .collect();
    if !missed.is_empty() {
        return Err(Error::misuse(format!(
            "`backward` failed on {} before the other ranks heard of it, and the program continued, so that ranks \
             average the gradients of different steps: return the error from the program, or resume the model \
             on every rank",
            missed.join(", ")
        )));
    }
    let models: Vec<_> = all.iter().map(|(_, model, ..)| model.clone()).collect();
    if models.iter().any(|model| *model != models[0]) {
        return Err(Error::misuse(format!(
            "the ranks average gradients of different models with each other: {}; call `backward` for the \
             models in the same order on every rank",
            sides(models)
        )));
    }
    let updates: Vec<_> = all.iter().map(|(.., updates, _)| *updates).collect();
    SeenUpdates::check(&updates)?;
    if all.iter().all(|(_, _, calls, ..)| *calls == all[0].2) {
        return Err(Error::misuse(format!(
            "the ranks average gradients of different batches, so that samples are used twice or never ({}): a rank \
             has left out a batch, left its loop early or counts its epochs on its own; take the same batches in \
             the same steps on every rank, and pass `batch.with_weight(0.0)` for one that is to count for nothing; \
             where ranks are meant to read different loaders, pass a number of samples, such as `batch.real()`; \
             loaders are numbered from 0, in the order in which they were prepared",
            different_batches(all.into_iter().map(|(.., ends)| ends).collect())
        )));
    }
    let shown: Vec<_> = (0..)
        .zip(&all)
        .map(|(rank, (_, _, calls, ..))| format!("{calls} on rank {rank}"))
        .collect();
    Err(Error::misuse(format!(
        "the accumulation windows that end here hold different numbers of `backward` calls: {}; call \
         `no_sync` and `trigger_sync` in the same steps on every rank, and run the same number of \
         steps",
        shown.join(", ")
    )))
}

/// The last batch of each pass in a window, in words.
fn ends_of(tickets: &[ConsumeTicket]) -> String {
    let ends: Vec<_> = tickets
        .iter()
        .map(|ticket| ticket.position().to_string())
        .collect();
    ends.join(", ")
}

/// Lists where windows of different batches end, by rank: all that is known of their batches. The place of a rank with
/// a weight of the program's own is not known.
fn different_batches(ends: Vec<Option<String>>) -> String {
    let mut known = ends.iter().flatten();
    match known.next() {
        Some(first) if known.all(|one| one == first) => {
            format!(
                "their last batch is the same, {first}, and those before it in the window are not"
            )
        }
        _ => sides(ends.into_iter().map(|ends| {
            ends.unwrap_or_else(|| "not known (a weight of the program's own)".to_owned())
        })),
    }
}

/// The losses of all ranks, in their order. The sum does not tell which rank's loss is not finite, so all ranks exchange
/// theirs.
pub(super) fn gather_losses(reducer: &Reducer) -> Result<Vec<f64>> {
    let asking = reducer.group.for_purpose("average gradients");
    Ok(asking.all_gather_object(&reducer.totals.loss.read)?)
}
