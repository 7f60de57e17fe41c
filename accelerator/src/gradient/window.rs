use accelerator_collective::{Buffer, DType, ProcessGroup, ReduceOp};
use burn::optim::GradientsParams;

use super::bucket::{self, Entry};
use super::rank::with_rank;
use super::slot::Slot;
use super::weight::Weight;
use crate::data::Mark;
use crate::error::{Error, Result};

/// The sums of the micro-steps since the last optimizer step.
#[derive(Debug, Default)]
pub(super) struct Window {
    buffers: Vec<Buffer>,
    /// Which parameters had a gradient.
    written: Vec<bool>,
    /// Where the batches end that are in it: the last one of each pass.
    marks: Vec<Mark>,
    micro_steps: usize,
    weight: f64,
    /// Σ weight · loss.
    loss: f64,
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

/// What a window comes to, over all ranks.
#[derive(Debug)]
pub(super) struct Reduced {
    /// Σ weight · gradient, one buffer a bucket.
    pub(super) buffers: Vec<Buffer>,
    /// The mean loss.
    pub(super) loss: f64,
    /// Where the batches end that are in it.
    pub(super) marks: Vec<Mark>,
    /// Which parameters had a gradient somewhere.
    pub(super) present: Vec<bool>,
    /// Σ weight.
    pub(super) total: f64,
}

impl Window {
    /// Adds a micro-step. One of weight 0 counts as a step, and nothing else of it counts.
    pub(super) fn add(
        &mut self,
        slot: &Slot,
        group: &ProcessGroup,
        mut gradients: GradientsParams,
        loss: f64,
        weight: Weight,
    ) -> Result<usize> {
        let Weight { count, mark, .. } = weight;
        if self.buffers.is_empty() {
            self.buffers = slot.lend(group);
            self.written = vec![false; slot.parameters().len()];
        }
        if count > 0.0 {
            for (index, parameter) in slot.parameters().iter().enumerate() {
                let gradient = with_rank!(parameter.shape.len(), D => {
                    gradients.remove::<D>(parameter.id).map(|tensor| tensor.into_data())
                });
                let Some(gradient) = gradient else { continue };
                let entry = if self.written[index] {
                    Entry::Add
                } else {
                    Entry::Replace
                };
                let place = slot.buckets.place(index);
                let buffer = &mut self.buffers[place.bucket];
                bucket::write(buffer, &place.range, &gradient, count, entry);
                self.written[index] = true;
            }
            check_all_known(gradients.len())?;
            self.loss += count * loss;
            self.weight += count;
        }
        if let Some(mark) = mark {
            self.marks.retain(|earlier| !mark.follows(earlier));
            self.marks.push(mark);
        }
        self.micro_steps += 1;
        Ok(self.micro_steps)
    }

    pub(super) fn micro_steps(&self) -> usize {
        self.micro_steps
    }

    /// Closes the window and sums it over the ranks.
    #[track_caller]
    pub(super) fn reduce(self, slot: &Slot, group: &ProcessGroup) -> Result<Reduced> {
        let mut buffers = self.buffers;
        for (index, _) in self
            .written
            .iter()
            .enumerate()
            .filter(|(_, written)| !**written)
        {
            let place = slot.buckets.place(index);
            bucket::clear(&mut buffers[place.bucket], &place.range);
        }
        let mut control = group.buffer(DType::F64, 2 + self.written.len());
        let values = control.as_mut_slice::<f64>()?;
        values[0] = self.weight;
        values[1] = self.loss;
        for (value, written) in values[2..].iter_mut().zip(&self.written) {
            *value = f64::from(u8::from(*written));
        }
        let control = group.start_all_reduce(control, ReduceOp::Sum)?;
        let pending = buffers
            .into_iter()
            .map(|buffer| group.start_all_reduce(buffer, ReduceOp::Sum))
            .collect::<Result<Vec<_>, _>>()?;
        let control = control.wait()?;
        let buffers = pending
            .into_iter()
            .map(|pending| pending.wait())
            .collect::<Result<Vec<_>, _>>()?;
        let values = control.as_slice::<f64>()?;
        let present: Vec<bool> = values[2..].iter().map(|&count| count > 0.0).collect();
        // An idle rank has none of its own, and that is as it should be.
        if self.weight > 0.0 {
            slot.report_missing(&self.written, &present);
        }
        Ok(Reduced {
            buffers,
            loss: values[1] / values[0],
            marks: self.marks,
            present,
            total: values[0],
        })
    }
}
