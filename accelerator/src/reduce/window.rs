use accelerator_plan::mix;
use burn::optim::GradientsParams;

use super::bucket_set::BucketSet;
use super::element_values;
use super::loss::{LossSum, MicroLoss};
use crate::core::error::{Error, Result};
use crate::data::ConsumeTicket;
use crate::data::batch::{Closing, Weight};
use crate::model::Trainable;

/// The sums of the micro-steps since the last optimizer step.
#[derive(Debug, Default)]
pub(super) struct Window {
    /// Set if the program said with the last micro-step that the window stays open.
    kept_open: bool,
    bucket_set: Option<Box<BucketSet>>,
    /// The factor of its losses: a step of the window before may move the scale meanwhile.
    loss_scale: Option<f64>,
    /// The ends of its batches: the last one of each pass.
    tickets: Vec<ConsumeTicket>,
    totals: Totals,
}

/// The totals of a window beside its gradients.
#[derive(Clone, Debug, Default)]
pub(super) struct Totals {
    pub(super) weight: f64,
    pub(super) loss: LossSum,
    pub(super) micro_steps: usize,
    pub(super) batches: BatchFingerprint,
}

/// A fingerprint of a window's batches: a number that is the same on all ranks that have taken the same ones.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct BatchFingerprint {
    sum: u64,
    /// Set if it holds a weight that is of no batch.
    has_others: bool,
}

impl BatchFingerprint {
    pub(super) fn add(&mut self, ticket: Option<&ConsumeTicket>) {
        match ticket {
            Some(ticket) => self.sum = self.sum.wrapping_add(mix(&ticket.position().numbers())),
            None => self.has_others = true,
        }
    }

    /// Returns the fingerprint; `None` if some weight is of no batch.
    pub(super) fn number(self) -> Option<u64> {
        (!self.has_others).then_some(self.sum)
    }
}

/// Fails if there are gradients of parameters that the model does not have.
pub(super) fn check_all_known(unknown: usize) -> Result<()> {
    if unknown == 0 {
        return Ok(());
    }
    Err(Error::misuse(format!(
        "{unknown} gradients are of parameters that this model does not train: pass the model whose gradients they are"
    )))
}

pub(super) fn note(tickets: &mut Vec<ConsumeTicket>, ticket: Option<ConsumeTicket>) {
    if let Some(ticket) = ticket {
        tickets.retain(|earlier| !ticket.follows(earlier));
        tickets.push(ticket);
    }
}

impl Window {
    /// Begins a micro-step. The losses of a window are multiplied as its first one, whose scale is `now`.
    pub(super) fn begin(&mut self, now: Option<f64>) -> Option<f64> {
        if self.totals.micro_steps == 0 {
            self.loss_scale = now;
        }
        self.loss_scale
    }

    pub(super) fn loss_scale(&self) -> Option<f64> {
        self.loss_scale
    }

    /// Adds a micro-step that is not the last one. One of weight 0 counts as a step, and nothing
    /// else of it counts.
    pub(super) fn add(
        &mut self,
        parameters: &[Trainable],
        lend: impl FnOnce() -> Box<BucketSet>,
        mut gradients: GradientsParams,
        loss: MicroLoss,
        weight: Weight,
    ) -> Result<()> {
        let Weight {
            count,
            ticket,
            closing,
            ..
        } = weight;
        self.kept_open = closing == Closing::KeepOpen;
        let bucket_set = self.bucket_set.get_or_insert_with(lend);
        let layout = bucket_set.layout.clone();
        if count > 0.0 || layout.has_pieces() {
            for bucket in 0..layout.len() {
                // A rank without samples may have computed garbage, except in pieces, which are sums over the ranks.
                if count <= 0.0 && !layout.is_of_pieces(bucket) {
                    continue;
                }
                for &index in layout.members(bucket) {
                    let record = &mut bucket_set.parameters[index];
                    record.gradient = element_values::take(&mut gradients, &parameters[index]);
                    record.has_gradient = record.gradient.is_some();
                }
                bucket_set.add_gradients(bucket, count);
                for &index in layout.members(bucket) {
                    let record = &mut bucket_set.parameters[index];
                    record.written |= record.has_gradient;
                }
            }
        }
        if count > 0.0 {
            check_all_known(gradients.len())?;
            self.totals.weight += count;
        }
        self.totals.loss.add(count, loss);
        self.totals.batches.add(ticket.as_ref());
        note(&mut self.tickets, ticket);
        self.totals.micro_steps += 1;
        Ok(())
    }

    pub(super) fn micro_steps(&self) -> usize {
        self.totals.micro_steps
    }

    /// Returns `true` if a weight in it is of no batch, and so does not know where its epoch ends.
    pub(super) fn has_bare_weights(&self) -> bool {
        self.totals.batches.has_others
    }

    /// The epoch that this batch's loader left while the window was open; `None` if the program kept it open with
    /// `no_sync`.
    pub(super) fn left_epoch(&self, weight: &Weight) -> Option<u64> {
        let ticket = weight.ticket.as_ref().filter(|_| !self.kept_open)?;
        let left = self.tickets.iter().find(|earlier| ticket.leaves(earlier))?;
        Some(left.epoch())
    }

    /// Returns what was added up so far, to be completed by the last micro-step.
    pub(super) fn into_parts(
        self,
        lend: impl FnOnce() -> Box<BucketSet>,
    ) -> (Box<BucketSet>, Vec<ConsumeTicket>, Totals) {
        let bucket_set = self.bucket_set.unwrap_or_else(lend);
        (bucket_set, self.tickets, self.totals)
    }
}
