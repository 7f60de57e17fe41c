use std::sync::Arc;

use accelerator_collective::{Buffer, DType, Pending, ProcessGroup};
use burn::backend::DispatchTensor;

use super::bucket::{BucketStorage, MemberGradient, Placement, WriteMode};
use super::bucket_layout::Buckets;
use super::device_bucket::DeviceBucket;
use super::device_reduce::{PendingRead, PendingReduce};
use super::{control_vector, overlap};
use crate::precision::Cast;

/// The buckets of a window, with a record of each bucket and parameter. The next window of the model uses the same set, so
/// that steps allocate nothing and pages stay warm.
#[derive(Debug)]
pub(super) struct BucketSet {
    /// The place of the sums.
    pub(super) placement: Placement,
    pub(super) layout: Arc<Buckets>,
    /// The state of each bucket.
    pub(super) states: Vec<BucketState>,
    /// The sums of each bucket before the last micro-step, so that it can be filled again.
    pub(super) undo: Vec<Option<BucketStorage>>,
    /// Set for a bucket if this rank asks all ranks to reduce it again. It has sent it too early; or, for a hook, its
    /// values are not finite.
    pub(super) needs_retry: Vec<bool>,
    /// The buffer of each bucket that is sent, if the bucket is compressed or lies on a device.
    pub(super) wires: Vec<Option<Buffer>>,
    /// Set for a parameter if an earlier micro-step of the window has added a gradient.
    pub(super) written: Vec<bool>,
    /// Set for a parameter if this micro-step has a gradient.
    pub(super) has_gradient: Vec<bool>,
    /// The gradient of each parameter that is about to be added to its bucket.
    pub(super) gradients: Vec<Option<DispatchTensor>>,
    /// The gradient of each parameter that was added before backward ended.
    pub(super) flushed: Vec<FlushedGradient>,
    /// Set for a parameter if any rank has a gradient; known once the control vector was received.
    pub(super) present: Vec<bool>,
    /// The control vector; `None` while it is reduced.
    pub(super) control: Option<Buffer>,
    /// The buffer in which the weight of the window is reduced ahead of the buckets; `None` while it is reduced.
    pub(super) weight_buffer: Option<Buffer>,
}

/// The progress of a bucket within its window.
#[derive(Debug)]
pub(super) enum BucketState {
    /// It holds sums of this rank; gradients may be added.
    Open(BucketStorage),
    /// It holds all gradients of this rank and is ready to be sent.
    Complete(BucketStorage),
    /// Its sums are being read from the device, to be sent then.
    Read(PendingRead),
    /// Its reduction is in flight.
    Sent(Pending),
    /// Its reduction from device to device is in flight.
    SentOnDevice(PendingReduce),
    /// The reduction of its rounded sums is in flight; the buffer holds this rank's exact ones.
    SentRounded(Buffer, Pending),
    /// The buffer holds this rank's exact sums, and `wires` the rounded sums of all ranks.
    Rounded(Buffer, RangeCheck),
    /// It holds the sums of all ranks.
    Summed(BucketStorage),
    /// Its operation failed.
    Lost,
}

/// The range of rounded sums, compared to that of the type in which they were sent.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum RangeCheck {
    Within,
    /// They are not all finite.
    Beyond,
}

/// The gradient of a parameter whose bucket was filled before backward ended.
#[derive(Debug, Default)]
#[allow(
    clippy::large_enum_variant,
    reason = "there is one a parameter, in memory that is kept; tensors of some devices are large"
)]
pub(super) enum FlushedGradient {
    /// Its bucket was not filled early.
    #[default]
    None,
    /// It had no gradient.
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

impl BucketSet {
    pub(super) fn new(
        group: &ProcessGroup,
        placement: &Placement,
        layout: Arc<Buckets>,
        parameters: usize,
    ) -> Self {
        let buckets = layout.len();
        let store = |bucket| BucketState::Open(layout.store(group, placement, bucket));
        Self {
            placement: placement.clone(),
            states: (0..buckets).map(store).collect(),
            undo: none(buckets),
            needs_retry: vec![false; buckets],
            wires: none(buckets),
            written: vec![false; parameters],
            has_gradient: vec![false; parameters],
            gradients: none(parameters),
            flushed: core::iter::repeat_with(FlushedGradient::default)
                .take(parameters)
                .collect(),
            present: vec![false; parameters],
            control: Some(group.buffer(DType::F64, control_vector::length(parameters, buckets))),
            weight_buffer: None,
            layout,
        }
    }

    /// Returns `true` if the sums lie on a device.
    pub(super) fn is_on_device(&self) -> bool {
        matches!(self.placement, Placement::Device(_))
    }

    /// Clears the records for the next window; `false` where a buffer was lost.
    pub(super) fn reopen(&mut self) -> bool {
        self.written.fill(false);
        self.has_gradient.fill(false);
        self.needs_retry.fill(false);
        self.release_flushed();
        // Host memory is kept for the next window.
        for undo in &mut self.undo {
            undo.take_if(|undo| matches!(undo, BucketStorage::Device(_)));
        }
        for state in &mut self.states {
            *state = match core::mem::replace(state, BucketState::Lost) {
                BucketState::Open(store)
                | BucketState::Complete(store)
                | BucketState::Summed(store) => BucketState::Open(store.reopen()),
                BucketState::Read(_)
                | BucketState::Sent(_)
                | BucketState::SentOnDevice(_)
                | BucketState::SentRounded(..)
                | BucketState::Rounded(..)
                | BucketState::Lost => return false,
            };
        }
        self.control.is_some()
    }

    /// Moves the sums of open buckets to the placement of their model.
    pub(super) fn move_to(&mut self, group: &ProcessGroup, placement: &Placement) {
        if self.is_at(placement) {
            return;
        }
        for bucket in 0..self.states.len() {
            let state = core::mem::replace(&mut self.states[bucket], BucketState::Lost);
            self.states[bucket] = match (state, placement) {
                (BucketState::Open(store), Placement::Host) => {
                    BucketState::Open(store.into_host(group))
                }
                (BucketState::Open(mut store), Placement::Device(device)) => {
                    // In host memory an unwritten range holds sums of an earlier window; on the device it must be 0.
                    self.clear_unwritten(bucket, &mut store, |_| false);
                    BucketState::Open(store.into_device(device))
                }
                (other, _) => other,
            };
        }
        self.placement = placement.clone();
        self.undo.fill_with(|| None);
        self.wires.fill_with(|| None);
    }

    /// Returns `true` if the sums lie in this placement.
    pub(super) fn is_at(&self, placement: &Placement) -> bool {
        matches!(
            (&self.placement, placement),
            (Placement::Host, Placement::Host) | (Placement::Device(_), Placement::Device(_))
        )
    }

    /// Frees the gradients that were kept for comparison.
    pub(super) fn release_flushed(&mut self) {
        self.flushed.fill_with(FlushedGradient::default);
    }

    /// Takes a bucket out to which gradients may still be added.
    pub(super) fn take_open(&mut self, bucket: usize) -> Option<BucketStorage> {
        match core::mem::replace(&mut self.states[bucket], BucketState::Lost) {
            BucketState::Open(store) => Some(store),
            other => {
                self.states[bucket] = other;
                None
            }
        }
    }

    /// Takes a bucket out that is ready to be sent.
    pub(super) fn take_complete(&mut self, bucket: usize) -> Option<BucketStorage> {
        match core::mem::replace(&mut self.states[bucket], BucketState::Lost) {
            BucketState::Complete(store) => Some(store),
            other => {
                self.states[bucket] = other;
                None
            }
        }
    }

    /// Adds `weight · gradient` of each parameter of a bucket to it. A parameter without a gradient is left as it is.
    pub(super) fn add<'a>(
        &'a self,
        bucket: usize,
        store: &mut BucketStorage,
        gradient: impl Fn(usize) -> Option<&'a DispatchTensor> + Copy,
        weight: f64,
    ) {
        let members = self.layout.members(bucket).iter();
        let gradients = members.map(move |&parameter| MemberGradient {
            range: &self.layout.place(parameter).range,
            gradient: gradient(parameter),
            mode: match self.written[parameter] {
                true => WriteMode::Add,
                false => WriteMode::Replace,
            },
        });
        store.add(gradients, weight);
    }

    /// Adds `weight` times the gradients that are kept in `gradients`, and frees them.
    pub(super) fn add_gradients(&mut self, bucket: usize, store: &mut BucketStorage, weight: f64) {
        let gradients = &self.gradients;
        let gradient = |parameter: usize| gradients[parameter].as_ref();
        self.add(bucket, store, gradient, weight);
        for &parameter in self.layout.members(bucket) {
            self.gradients[parameter] = None;
        }
    }

    /// Zeroes the ranges of parameters without a gradient in any micro-step.
    pub(super) fn clear_unwritten(
        &self,
        bucket: usize,
        store: &mut BucketStorage,
        has_gradient: impl Fn(usize) -> bool,
    ) {
        for &parameter in self.layout.members(bucket) {
            if !self.written[parameter] && !has_gradient(parameter) {
                store.clear(&self.layout.place(parameter).range);
            }
        }
    }

    /// Copies the sums of a bucket, so that the last micro-step can be undone. A bucket without sums of earlier micro-steps
    /// needs no copy.
    pub(super) fn save_undo(&mut self, group: &ProcessGroup, bucket: usize, store: &BucketStorage) {
        if !self.is_written(bucket) {
            return;
        }
        match (store, &mut self.undo[bucket]) {
            (BucketStorage::Host(buffer), Some(BucketStorage::Host(kept))) => {
                kept.bytes_mut().copy_from_slice(buffer.bytes());
            }
            (BucketStorage::Host(buffer), undo) => {
                let mut kept = group.buffer(buffer.dtype(), buffer.len());
                kept.bytes_mut().copy_from_slice(buffer.bytes());
                *undo = Some(BucketStorage::Host(kept));
            }
            (BucketStorage::Device(flat), undo) => {
                *undo = Some(BucketStorage::Device(flat.clone()))
            }
        }
    }

    /// Restores the sums of a bucket from before the last micro-step.
    pub(super) fn restore_undo(&mut self, bucket: usize, store: &mut BucketStorage) {
        let written = self.is_written(bucket);
        match (store, &mut self.undo[bucket]) {
            (BucketStorage::Host(buffer), Some(BucketStorage::Host(kept))) if written => {
                buffer.bytes_mut().copy_from_slice(kept.bytes());
            }
            (BucketStorage::Device(flat), Some(BucketStorage::Device(kept))) if written => {
                *flat = kept.clone()
            }
            // A bucket that was not written before is overwritten as a whole.
            (BucketStorage::Host(_), _) => {}
            (BucketStorage::Device(flat), _) => *flat = flat.blank(),
        }
    }

    /// The sums of a bucket over all ranks; `None` before they were reduced.
    pub(super) fn sums(&self, bucket: usize) -> Option<&BucketStorage> {
        match &self.states[bucket] {
            BucketState::Summed(store) => Some(store),
            _ => None,
        }
    }

    /// The same, mutable.
    pub(super) fn sums_mut(&mut self, bucket: usize) -> Option<&mut BucketStorage> {
        match &mut self.states[bucket] {
            BucketState::Summed(store) => Some(store),
            _ => None,
        }
    }

    /// The number and the reduced sums of each bucket that lies on a device.
    pub(super) fn device_sums_mut(&mut self) -> impl Iterator<Item = (usize, &mut DeviceBucket)> {
        let states = self.states.iter_mut().enumerate();
        states.filter_map(|(bucket, state)| match state {
            BucketState::Summed(BucketStorage::Device(flat)) => Some((bucket, flat)),
            _ => None,
        })
    }

    /// The reduced sums of each bucket that lies in host memory.
    pub(super) fn host_sums_mut(&mut self) -> Vec<&mut Buffer> {
        let summed = |state| match state {
            &mut BucketState::Summed(BucketStorage::Host(ref mut buffer)) => Some(buffer),
            _ => None,
        };
        self.states.iter_mut().filter_map(summed).collect()
    }

    /// Moves the reduced sums to host memory.
    pub(super) fn move_to_host(&mut self, group: &ProcessGroup) {
        for state in &mut self.states {
            *state = match core::mem::replace(state, BucketState::Lost) {
                BucketState::Summed(store) => BucketState::Summed(store.into_host(group)),
                other => other,
            };
        }
        self.placement = Placement::Host;
    }

    /// Returns `true` if an earlier micro-step has added to a bucket.
    fn is_written(&self, bucket: usize) -> bool {
        let members = self.layout.members(bucket);
        members.iter().any(|&parameter| self.written[parameter])
    }
}

fn none<T>(count: usize) -> Vec<Option<T>> {
    core::iter::repeat_with(|| None).take(count).collect()
}
