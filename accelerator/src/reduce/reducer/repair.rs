//! Buckets that are reduced again.

use core::mem::replace;

use burn::optim::GradientsParams;

use super::{Reducer, Repair};
use crate::core::error::{Error, Result};
use crate::reduce::bucket_set::{BucketState, RangeCheck};
use crate::reduce::bucket_storage::BucketStorage;
use crate::reduce::compression::{self, Compression};
use crate::reduce::control_vector::ControlSums;
use crate::reduce::element_values;
use crate::reduce::model_state::ModelState;
use crate::timeline::{EventSubject, Phase};

impl Reducer {
    /// Reduces the buckets again that some rank has sent too early. Tells how many there were.
    pub(super) fn redo(
        &mut self,
        model_state: &ModelState,
        gradients: &GradientsParams,
    ) -> Result<usize> {
        let bucket_set = &mut self.bucket_set;
        let layout = bucket_set.layout.clone();
        let sums = ControlSums::read(&bucket_set.control, bucket_set.present.len())?;
        for (mine, some_rank) in bucket_set.needs_retry.iter_mut().zip(sums.needs_retry()) {
            *mine = some_rank;
        }
        if self.repair == Repair::Unneeded && bucket_set.needs_retry.contains(&true) {
            return Err(Error::misuse(
                "another rank sends gradients while backward runs, and this one does not: build the same \
                 layers on every rank",
            ));
        }
        let mut count = 0;
        for bucket in 0..layout.len() {
            let bucket_set = &mut self.bucket_set;
            if !bucket_set.needs_retry[bucket] {
                continue;
            }
            count += 1;
            let mut store = match replace(&mut bucket_set.states[bucket], BucketState::Lost) {
                BucketState::Summed(store) => store,
                BucketState::Rounded(buffer, _) => BucketStorage::Host(buffer),
                _ => continue,
            };
            bucket_set.restore_undo(bucket, &mut store);
            for &index in layout.members(bucket) {
                bucket_set.gradients[index] =
                    element_values::peek(gradients, &model_state.parameters()[index]);
            }
            bucket_set.add_gradients(bucket, &mut store, self.weight);
            bucket_set.clear_unwritten(bucket, &mut store, |index| bucket_set.has_gradient[index]);
            self.send(bucket, store)?;
        }
        if count > 0 {
            self.receive()?;
        }
        Ok(count)
    }

    /// Takes rounded sums over, or reduces all of them again as they are if one of them is not
    /// finite: all ranks see the same bits or tell each other, so all of them do. All, since what a
    /// parameter gets must not depend on the bucket in which it lies.
    pub(super) fn settle(&mut self, model_state: &ModelState) -> Result<()> {
        let mut states = self.bucket_set.states.iter();
        let mut fits =
            !states.any(|state| matches!(state, BucketState::Rounded(_, RangeCheck::Beyond)));
        if self.compression != Compression::None && !self.sum_scope.is_whole() {
            fits = self.all_agree(fits)?;
        }
        if !fits && self.group.rank() == 0 {
            model_state.warn_range(self.compression);
        }
        for bucket in 0..self.bucket_set.layout.len() {
            let bucket_set = &mut self.bucket_set;
            bucket_set.states[bucket] =
                match replace(&mut bucket_set.states[bucket], BucketState::Lost) {
                    BucketState::Rounded(mut sums, _) => {
                        match (&bucket_set.wires[bucket], self.scale) {
                            (Some(wire), Some(scale)) if fits => {
                                let _copy = self
                                    .timeline
                                    .span(Phase::Copy(EventSubject::bucket(bucket)));
                                for range in self.sum_scope.of_bucket(bucket, wire.len()) {
                                    compression::expand(wire, &mut sums, range, scale);
                                }
                                BucketState::Summed(BucketStorage::Host(sums))
                            }
                            _ => BucketState::Complete(BucketStorage::Host(sums)),
                        }
                    }
                    other => other,
                };
            match bucket_set.take_complete(bucket) {
                Some(BucketStorage::Host(buffer)) => self.send_exactly(bucket, buffer)?,
                // Nothing of a device is rounded here.
                Some(store @ BucketStorage::Device(_)) => {
                    bucket_set.states[bucket] = BucketState::Summed(store)
                }
                None => {}
            }
        }
        self.receive()
    }
}
