//! Buckets that a hook of the program's reduces.

use accelerator_collective::{Buffer, DType};

use super::{Reducer, SendMode};
use crate::core::error::Result;
use crate::reduce::bucket_set::BucketState;
use crate::reduce::bucket_storage::BucketStorage;
use crate::reduce::hook::{BucketParameter, GradientBucket, HookInstance, Ranks};
use crate::reduce::model_state::ModelState;
use crate::timeline::{EventSubject, Phase};

impl Reducer {
    /// Gives the buckets to the hook, one after the other, when all of them are complete.
    ///
    /// Control goes ahead, since a share of the mean needs the total weight. It tells in the place of what
    /// was sent too early, which is nothing here, in which buckets some rank has values that are not
    /// finite: such a step goes past the hook, whose memory would never be rid of them. What decides has the
    /// same bits on all ranks.
    pub(super) fn hand_over(
        &mut self,
        model_state: &ModelState,
        hook: &HookInstance,
    ) -> Result<()> {
        self.send_mode = SendMode::Blocking;
        let bucket_set = &mut self.bucket_set;
        for (needs_retry, state) in bucket_set.needs_retry.iter_mut().zip(&bucket_set.states) {
            *needs_retry = match state {
                BucketState::Complete(BucketStorage::Host(buffer)) => !is_finite(buffer)?,
                _ => false,
            };
        }
        self.send_control()?;
        self.receive_control()?;
        self.bucket_set.needs_retry.fill(false);
        let sums = self.sums()?;
        let (total, is_finite) = (
            sums.header.weight,
            !sums.needs_retry().any(|needs_retry| needs_retry),
        );
        // All ranks get the same error for these.
        if total <= 0.0 || !sums.windows_agree(&self.group) {
            return Ok(());
        }
        let group = self.group.clone();
        let layout = self.bucket_set.layout.clone();
        for number in 0..layout.len() {
            let Some(store) = self.bucket_set.take_complete(number) else {
                continue;
            };
            // Where there is a hook, sums are kept in memory already.
            let BucketStorage::Host(mut buffer) = store.into_host(&group) else {
                continue;
            };
            if !is_finite {
                self.send_exactly(number, buffer)?;
                continue;
            }
            divide(&mut buffer, total * self.loss_scale)?;
            let parameters = layout.members(number).iter().map(|&index| {
                let parameter = &model_state.parameters()[index];
                BucketParameter::new(
                    parameter,
                    layout.place(index).range.clone(),
                    self.bucket_set.present[index],
                )
            });
            let parameters = parameters.collect();
            let mut bucket = GradientBucket::new(
                &mut buffer,
                number,
                layout.len(),
                model_state.steps(),
                parameters,
            );
            {
                let (part, bytes) = (EventSubject::bucket(number), layout.bytes(number));
                let _reduce = self.timeline.span(Phase::Reduce { part, bytes });
                hook.reduce(&mut bucket, &Ranks::new(&group))?;
            }
            self.bucket_set.states[number] = BucketState::Summed(BucketStorage::Host(buffer));
        }
        self.handed_over = is_finite;
        Ok(())
    }
}

fn is_finite(buffer: &Buffer) -> Result<bool> {
    // Without an early end, so that it is done in vectors.
    Ok(match buffer.dtype() {
        DType::F64 => {
            let values = buffer.as_slice::<f64>()?.iter();
            values.fold(true, |finite, value| finite & value.is_finite())
        }
        _ => {
            let values = buffer.as_slice::<f32>()?.iter();
            values.fold(true, |finite, value| finite & value.is_finite())
        }
    })
}

fn divide(buffer: &mut Buffer, divisor: f64) -> Result<()> {
    match buffer.dtype() {
        DType::F64 => {
            let values = buffer.as_mut_slice::<f64>()?;
            values.iter_mut().for_each(|value| *value /= divisor);
        }
        _ => {
            let (values, divisor) = (buffer.as_mut_slice::<f32>()?, divisor as f32);
            values.iter_mut().for_each(|value| *value /= divisor);
        }
    }
    Ok(())
}
