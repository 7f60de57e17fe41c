use core::iter::repeat_with;
use core::mem::replace;
use std::sync::Arc;

use accelerator_collective::{Buffer, DType, Pending, ProcessGroup};
use burn::backend::DispatchTensor;

use super::bucket_layout::BucketLayout;
use super::bucket_storage::{BucketStorage, MemberGradient, Placement, WriteMode};
use super::device_bucket::DeviceBucket;
use super::device_reduce::{PendingRead, PendingReduce};
use super::{control_vector, overlap};
use crate::precision::Cast;

/// The buckets of a window, with a record of each parameter. The next window of the model uses the same set, so that steps
/// allocate nothing and pages stay warm.
#[derive(Debug)]
pub(super) struct BucketSet {
    pub(super) placement: Placement,
    pub(super) layout: Arc<BucketLayout>,
    pub(super) buckets: Vec<Bucket>,
    pub(super) parameters: Vec<ParameterRecord>,
    /// The control vector; `None` while it is reduced.
    pub(super) control: Option<Buffer>,
    /// The buffer in which the weight of the window is reduced ahead of the buckets; `None` while it is reduced.
    pub(super) weight_buffer: Option<Buffer>,
}

/// A bucket of gradients: its sums, from the first micro-step of a window to the sums of all ranks.
#[derive(Debug)]
pub(super) struct Bucket {
    pub(super) state: BucketState,
    /// The sums before the last micro-step, so that it can be filled again.
    pub(super) undo: Option<BucketStorage>,
    /// Set if this rank asks all ranks to reduce it again. It has sent it too early; or, for a hook, its values are not
    /// finite.
    pub(super) needs_retry: bool,
    /// The buffer that is sent, if the bucket is compressed or lies on a device.
    pub(super) wire: Option<Buffer>,
}

/// A parameter in the micro-steps of a window.
#[derive(Debug, Default)]
pub(super) struct ParameterRecord {
    /// Set if an earlier micro-step has added a gradient.
    pub(super) written: bool,
    /// Set if this micro-step has a gradient.
    pub(super) has_gradient: bool,
    /// The gradient that is about to be added to its bucket.
    pub(super) gradient: Option<DispatchTensor>,
    /// The gradient that was added before backward ended.
    pub(super) flushed: FlushedGradient,
    /// Set if any rank has a gradient; known once the control vector was received.
    pub(super) present: bool,
}

/// The progress of a bucket within its window.
#[derive(Debug)]
pub(super) enum BucketState {
    /// It holds sums of this rank; gradients may be added.
    Open(BucketStorage),
    /// It holds all gradients of this rank and is ready to be sent.
    Complete(BucketStorage),
    /// Its sums are being read from the device, to be sent then.
    Reading(PendingRead),
    /// Its reduction is in flight.
    Sent(Pending),
    /// Its reduction from device to device is in flight.
    SentOnDevice(PendingReduce),
    /// The reduction of its rounded sums is in flight; the buffer holds this rank's exact ones.
    SentRounded(Buffer, Pending),
    /// The buffer holds this rank's exact sums, and [`Bucket::wire`] the rounded sums of all ranks.
    Rounded {
        exact: Buffer,
        /// Set if the rounded sums of this rank's part are finite.
        fits: bool,
    },
    /// It holds the sums of all ranks.
    Summed(BucketStorage),
    Lost,
}

/// The gradient of a parameter whose bucket was filled before backward ended.
#[derive(Debug, Default)]
pub(super) enum FlushedGradient {
    /// Its bucket was not filled early.
    #[default]
    None,
    Absent,
    /// It had this one, which is kept in memory for comparison.
    Seen(DispatchTensor),
}

impl FlushedGradient {
    pub(super) fn gradient(&self) -> Option<&DispatchTensor> {
        match self {
            Self::Seen(gradient) => Some(gradient),
            Self::None | Self::Absent => None,
        }
    }

    /// Returns `true` for the gradient at the end of backward, and for the one from which `cast` made that.
    pub(super) fn is_of(&self, gradient: Option<&DispatchTensor>, cast: Option<&Cast>) -> bool {
        match (self, gradient) {
            (Self::Absent, None) => true,
            (Self::Seen(seen), Some(gradient)) => overlap::is_of(seen, gradient, cast),
            _ => false,
        }
    }
}

impl BucketState {
    /// Takes the state, to put the next one in its place. The bucket is lost if what leads there fails.
    pub(super) fn take(&mut self) -> Self {
        replace(self, Self::Lost)
    }
}

impl Bucket {
    fn new(store: BucketStorage) -> Self {
        Self {
            state: BucketState::Open(store),
            undo: None,
            needs_retry: false,
            wire: None,
        }
    }

    pub(super) fn is_open(&self) -> bool {
        matches!(self.state, BucketState::Open(_))
    }

    pub(super) fn is_complete(&self) -> bool {
        matches!(self.state, BucketState::Complete(_))
    }

    /// Returns the sums of this rank alone, before they are sent.
    pub(super) fn own_mut(&mut self) -> Option<&mut BucketStorage> {
        match &mut self.state {
            BucketState::Open(store) | BucketState::Complete(store) => Some(store),
            _ => None,
        }
    }

    /// Marks an open bucket as one with all gradients of this rank.
    pub(super) fn mark_complete(&mut self) {
        self.state = match self.state.take() {
            BucketState::Open(store) => BucketState::Complete(store),
            other => other,
        };
    }

    /// Opens a bucket again that was sent too early. Its sums are those of this rank only once earlier ones are restored.
    pub(super) fn reopen_summed(&mut self) {
        self.state = match self.state.take() {
            BucketState::Summed(store) => BucketState::Open(store),
            BucketState::Rounded { exact, .. } => BucketState::Open(BucketStorage::Host(exact)),
            other => other,
        };
    }

    /// Takes the sums of a complete bucket out of memory, to send them. The bucket is lost until its next state is set.
    pub(super) fn take_host(&mut self) -> Option<Buffer> {
        match self.state.take() {
            BucketState::Complete(BucketStorage::Host(buffer)) => Some(buffer),
            other => {
                self.state = other;
                None
            }
        }
    }

    /// Does the same for sums on a device.
    pub(super) fn take_device(&mut self) -> Option<DeviceBucket> {
        match self.state.take() {
            BucketState::Complete(BucketStorage::Device(flat)) => Some(flat),
            other => {
                self.state = other;
                None
            }
        }
    }

    /// Marks a complete bucket as one with the sums of all ranks.
    pub(super) fn mark_summed(&mut self) {
        self.state = match self.state.take() {
            BucketState::Complete(store) => BucketState::Summed(store),
            other => other,
        };
    }

    /// Returns the sums over all ranks; `None` before they were reduced.
    pub(super) fn sums(&self) -> Option<&BucketStorage> {
        match &self.state {
            BucketState::Summed(store) => Some(store),
            _ => None,
        }
    }

    pub(super) fn sums_mut(&mut self) -> Option<&mut BucketStorage> {
        match &mut self.state {
            BucketState::Summed(store) => Some(store),
            _ => None,
        }
    }

    /// Returns the reduced sums, if they lie in host memory.
    pub(super) fn host_sums_mut(&mut self) -> Option<&mut Buffer> {
        match self.sums_mut() {
            Some(BucketStorage::Host(buffer)) => Some(buffer),
            _ => None,
        }
    }

    /// Returns the reduced sums, if they lie on a device.
    pub(super) fn device_sums_mut(&mut self) -> Option<&mut DeviceBucket> {
        match self.sums_mut() {
            Some(BucketStorage::Device(flat)) => Some(flat),
            _ => None,
        }
    }

    /// Clears it for the next window; `false` if its sums were lost.
    fn reopen(&mut self) -> bool {
        self.needs_retry = false;
        // Host memory is kept for the next window.
        self.undo
            .take_if(|undo| matches!(undo, BucketStorage::Device(_)));
        self.state = match self.state.take() {
            BucketState::Open(store)
            | BucketState::Complete(store)
            | BucketState::Summed(store) => BucketState::Open(store.reopen()),
            BucketState::Reading(_)
            | BucketState::Sent(_)
            | BucketState::SentOnDevice(_)
            | BucketState::SentRounded(..)
            | BucketState::Rounded { .. }
            | BucketState::Lost => return false,
        };
        true
    }
}

impl BucketSet {
    pub(super) fn new(
        group: &ProcessGroup,
        placement: &Placement,
        layout: Arc<BucketLayout>,
        parameters: usize,
    ) -> Self {
        let buckets = layout.len();
        let control_length = control_vector::length(parameters, buckets, group.world_size());
        let bucket = |bucket| {
            let (dtype, length) = layout.shape(bucket);
            Bucket::new(match layout.offload(bucket) {
                Some(offload) => BucketStorage::Host(offload.buffer(group, dtype, length)),
                None => BucketStorage::new(group, placement, dtype, length),
            })
        };
        Self {
            placement: placement.clone(),
            buckets: (0..buckets).map(bucket).collect(),
            parameters: repeat_with(ParameterRecord::default)
                .take(parameters)
                .collect(),
            control: Some(group.buffer(DType::F64, control_length)),
            weight_buffer: None,
            layout,
        }
    }

    pub(super) fn is_on_device(&self) -> bool {
        matches!(self.placement, Placement::Device(_))
    }

    /// Clears the records for the next window; `false` where a buffer was lost.
    pub(super) fn reopen(&mut self) -> bool {
        for record in &mut self.parameters {
            record.written = false;
            record.has_gradient = false;
        }
        self.release_flushed();
        self.buckets.iter_mut().all(Bucket::reopen) && self.control.is_some()
    }

    /// Moves the sums of open buckets to the placement of their model.
    pub(super) fn move_to(&mut self, group: &ProcessGroup, placement: &Placement) {
        if self.is_at(placement) {
            return;
        }
        for number in 0..self.buckets.len() {
            // In host memory an unwritten range holds sums of an earlier window; on the device it must be 0.
            if let Placement::Device(_) = placement
                && self.buckets[number].is_open()
            {
                self.clear_unwritten(number, |_| false);
            }
            let bucket = &mut self.buckets[number];
            bucket.state = match (bucket.state.take(), placement) {
                (BucketState::Open(store), Placement::Host) => {
                    BucketState::Open(store.into_host(group))
                }
                (BucketState::Open(store), Placement::Device(device)) => {
                    BucketState::Open(store.into_device(device))
                }
                (other, _) => other,
            };
            bucket.undo = None;
            bucket.wire = None;
        }
        self.placement = placement.clone();
    }

    pub(super) fn is_at(&self, placement: &Placement) -> bool {
        matches!(
            (&self.placement, placement),
            (Placement::Host, Placement::Host) | (Placement::Device(_), Placement::Device(_))
        )
    }

    pub(super) fn release_flushed(&mut self) {
        for record in &mut self.parameters {
            record.flushed = FlushedGradient::None;
        }
    }

    /// Adds `weight` times the gradients that were seen in the middle of backward.
    pub(super) fn add_flushed(&mut self, bucket: usize, weight: f64) {
        self.add(bucket, |record| record.flushed.gradient(), weight);
    }

    /// Adds `weight` times the gradients of the records, and frees them.
    pub(super) fn add_gradients(&mut self, bucket: usize, weight: f64) {
        self.add(bucket, |record| record.gradient.as_ref(), weight);
        for &parameter in self.layout.members(bucket) {
            self.parameters[parameter].gradient = None;
        }
    }

    /// Adds `weight · gradient` of each parameter of a bucket to it. A parameter without a gradient is left as it is.
    fn add(
        &mut self,
        bucket: usize,
        gradient: impl Fn(&ParameterRecord) -> Option<&DispatchTensor> + Copy,
        weight: f64,
    ) {
        let (layout, records) = (&self.layout, &self.parameters);
        // Gradients of pieces are weighted already.
        let weight = match layout.is_of_pieces(bucket) {
            true => 1.0,
            false => weight,
        };
        let Some(store) = self.buckets[bucket].own_mut() else {
            return;
        };
        let members = layout.members(bucket).iter();
        let gradients = members.map(move |&parameter| MemberGradient {
            range: &layout.place(parameter).range,
            gradient: gradient(&records[parameter]),
            mode: match records[parameter].written {
                true => WriteMode::Add,
                false => WriteMode::Replace,
            },
        });
        store.add(gradients, weight);
    }

    /// Zeroes the ranges of parameters without a gradient in any micro-step.
    pub(super) fn clear_unwritten(
        &mut self,
        bucket: usize,
        has_gradient: impl Fn(&ParameterRecord) -> bool,
    ) {
        let Some(store) = self.buckets[bucket].own_mut() else {
            return;
        };
        for &parameter in self.layout.members(bucket) {
            let record = &self.parameters[parameter];
            if !record.written && !has_gradient(record) {
                store.clear(&self.layout.place(parameter).range);
            }
        }
    }

    /// Copies the sums of a bucket, so that the last micro-step can be undone. A bucket without sums of earlier micro-steps
    /// needs no copy.
    pub(super) fn save_undo(&mut self, group: &ProcessGroup, bucket: usize) {
        if !self.is_written(bucket) {
            return;
        }
        let Bucket { state, undo, .. } = &mut self.buckets[bucket];
        match (state, undo) {
            (BucketState::Open(BucketStorage::Host(buffer)), Some(BucketStorage::Host(kept))) => {
                kept.bytes_mut().copy_from_slice(buffer.bytes())
            }
            (BucketState::Open(BucketStorage::Host(buffer)), undo) => {
                let mut kept = group.buffer(buffer.dtype(), buffer.len());
                kept.bytes_mut().copy_from_slice(buffer.bytes());
                *undo = Some(BucketStorage::Host(kept));
            }
            (BucketState::Open(BucketStorage::Device(flat)), undo) => {
                *undo = Some(BucketStorage::Device(flat.clone()));
            }
            _ => {}
        }
    }

    /// Restores the sums of an open bucket from before the last micro-step.
    pub(super) fn restore_undo(&mut self, bucket: usize) {
        let written = self.is_written(bucket);
        let Bucket { state, undo, .. } = &mut self.buckets[bucket];
        let BucketState::Open(store) = state else {
            return;
        };
        match (store, undo) {
            (BucketStorage::Host(buffer), Some(BucketStorage::Host(kept))) if written => {
                buffer.bytes_mut().copy_from_slice(kept.bytes());
            }
            (BucketStorage::Device(flat), Some(BucketStorage::Device(kept))) if written => {
                *flat = kept.clone();
            }
            // A bucket that was not written before is overwritten as a whole.
            (BucketStorage::Host(_), _) => {}
            (BucketStorage::Device(flat), _) => *flat = flat.blank(),
        }
    }

    pub(super) fn move_to_host(&mut self, group: &ProcessGroup) {
        for bucket in &mut self.buckets {
            bucket.state = match bucket.state.take() {
                BucketState::Summed(store) => BucketState::Summed(store.into_host(group)),
                other => other,
            };
        }
        self.placement = Placement::Host;
    }

    /// Returns the reduced sums of each bucket that lies in host memory.
    pub(super) fn host_sums_mut(&mut self) -> Vec<&mut Buffer> {
        self.buckets
            .iter_mut()
            .filter_map(Bucket::host_sums_mut)
            .collect()
    }

    /// Returns the number and the reduced sums of each bucket that lies on a device.
    pub(super) fn device_sums_mut(&mut self) -> impl Iterator<Item = (usize, &mut DeviceBucket)> {
        let buckets = self.buckets.iter_mut().enumerate();
        buckets.filter_map(|(number, bucket)| Some((number, bucket.device_sums_mut()?)))
    }

    fn is_written(&self, bucket: usize) -> bool {
        let members = self.layout.members(bucket);
        members
            .iter()
            .any(|&parameter| self.parameters[parameter].written)
    }
}
