use accelerator_collective::ProcessGroup;
use accelerator_plan::mix;
use burn::optim::GradientsParams;
use burn::tensor::Tensor;

use super::bucket_set::{BucketSet, BucketState};
use super::device_bucket;
use super::element_values;
use super::model_state::ModelState;
use crate::core::error::{Error, Result};
use crate::data::ConsumeTicket;
use crate::data::weight::{Closing, Weight};

/// The sums of the micro-steps since the last optimizer step.
#[derive(Debug, Default)]
pub(super) struct Window {
    /// Whether the program said with the last micro-step that the window stays open.
    kept_open: bool,
    ledger: Option<Box<BucketSet>>,
    /// By what its losses are multiplied: a step of the window before may move the scale meanwhile.
    loss_scale: Option<f64>,
    /// Where the batches end that are in it: the last one of each pass.
    marks: Vec<ConsumeTicket>,
    totals: Totals,
}

/// What a window adds up to beside its gradients.
#[derive(Clone, Debug, Default)]
pub(super) struct Totals {
    pub(super) weight: f64,
    pub(super) loss: LossSum,
    pub(super) micro_steps: usize,
    pub(super) batches: BatchFingerprint,
}

/// Which batches a window was made from: a number that is the same on all ranks that have taken the same ones.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct BatchFingerprint {
    sum: u64,
    /// Whether it holds a weight that is of no batch.
    has_others: bool,
}

impl BatchFingerprint {
    pub(super) fn add(&mut self, mark: Option<&ConsumeTicket>) {
        match mark {
            Some(mark) => self.sum = self.sum.wrapping_add(mix(&mark.position().numbers())),
            None => self.has_others = true,
        }
    }

    /// `None` where it is not known: nothing is said of a weight that the program made.
    pub(super) fn number(self) -> Option<u64> {
        (!self.has_others).then_some(self.sum)
    }
}

/// Σ weight · loss: what was read of it, and what lies on the device.
#[derive(Clone, Debug, Default)]
pub(super) struct LossSum {
    pub(super) read: f64,
    /// Losses of one element, with their weights.
    pub(super) unread: Vec<(f64, Tensor<1>)>,
}

impl LossSum {
    /// Adds the loss of a micro-step, one element: as it is, where reading it waits for a device.
    pub(super) fn add(&mut self, slot: &ModelState, weight: f64, loss: Tensor<1>) {
        match slot.reads_losses() {
            true => self.read += weight * loss.into_scalar::<f64>(),
            false => self.unread.push((weight, loss)),
        }
    }

    /// What lies on the device, in one element there that is nobody else's.
    pub(super) fn sum_on(&self, device: &burn::tensor::Device) -> Tensor<1> {
        let dtype = burn::tensor::DType::F32;
        let zero = Tensor::zeros([1], (device, dtype));
        let weighed =
            |(weight, loss): &(f64, Tensor<1>)| loss.clone().cast(dtype).mul_scalar(*weight);
        self.unread.iter().map(weighed).fold(zero, Tensor::add)
    }

    /// Reads what lies on the device.
    pub(super) fn read_all(&mut self) {
        self.read = self.value();
        self.unread.clear();
    }

    /// All of it, read from the device at once.
    pub(super) fn value(&self) -> f64 {
        let losses = self.unread.iter().map(|(_, loss)| loss.clone()).collect();
        let losses = device_bucket::numbers(losses);
        let unread = self.unread.iter().zip(losses);
        unread.fold(self.read, |sum, ((weight, _), loss)| sum + weight * loss)
    }
}

/// Refuses gradients of parameters that the slot does not know, so many of them.
pub(super) fn check_all_known(strangers: usize) -> Result<()> {
    if strangers == 0 {
        return Ok(());
    }
    Err(Error::misuse(format!(
        "{strangers} parameters have a gradient that had none when the model was prepared (they were \
         frozen, or belong to another model): prepare the model again after unfreezing"
    )))
}

/// Notes where a batch ends.
pub(super) fn note(marks: &mut Vec<ConsumeTicket>, mark: Option<ConsumeTicket>) {
    if let Some(mark) = mark {
        marks.retain(|earlier| !mark.follows(earlier));
        marks.push(mark);
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
        slot: &ModelState,
        group: &ProcessGroup,
        mut gradients: GradientsParams,
        loss: Tensor<1>,
        weight: Weight,
    ) -> Result<()> {
        let Weight {
            count,
            mark,
            closing,
            ..
        } = weight;
        self.kept_open = closing == Closing::KeepOpen;
        let ledger = self.ledger.get_or_insert_with(|| slot.lend(group));
        if count > 0.0 {
            let layout = ledger.layout.clone();
            for bucket in 0..layout.len() {
                let Some(mut store) = ledger.open(bucket) else {
                    continue;
                };
                for &index in layout.members(bucket) {
                    ledger.held[index] =
                        element_values::take(&mut gradients, &slot.parameters()[index]);
                    ledger.here[index] = ledger.held[index].is_some();
                }
                ledger.enter_held(bucket, &mut store, count);
                ledger.stages[bucket] = BucketState::Open(store);
                for &index in layout.members(bucket) {
                    ledger.written[index] |= ledger.here[index];
                }
            }
            check_all_known(gradients.len())?;
            self.totals.loss.add(slot, count, loss);
            self.totals.weight += count;
        }
        self.totals.batches.add(mark.as_ref());
        note(&mut self.marks, mark);
        self.totals.micro_steps += 1;
        Ok(())
    }

    pub(super) fn micro_steps(&self) -> usize {
        self.totals.micro_steps
    }

    /// Whether a weight in it is of no batch, and so does not know where its epoch ends.
    pub(super) fn has_bare_weights(&self) -> bool {
        self.totals.batches.has_others
    }

    /// The epoch that this batch's loader left while the window was open; `None` if the program kept it open with
    /// `no_sync`.
    pub(super) fn left_epoch(&self, weight: &Weight) -> Option<u64> {
        let mark = weight.mark.as_ref().filter(|_| !self.kept_open)?;
        let left = self.marks.iter().find(|earlier| mark.leaves(earlier))?;
        Some(left.epoch())
    }

    /// What was added up so far, to be completed by the last micro-step.
    pub(super) fn into_parts(
        self,
        slot: &ModelState,
        group: &ProcessGroup,
    ) -> (Box<BucketSet>, Vec<ConsumeTicket>, Totals) {
        let ledger = self.ledger.unwrap_or_else(|| slot.lend(group));
        (ledger, self.marks, self.totals)
    }
}
