use std::sync::Arc;

use accelerator_collective::{Buffer, DType, Pending, ProcessGroup};
use burn::backend::DispatchTensor;

use super::bucket::WriteMode;
use super::bucket_storage::{BucketStorage, MemberGradient, Placement};
use super::control_vector;
use super::device_bucket::DeviceBucket;
use super::device_reduce::{PendingRead, PendingReduce};
use super::bucket_layout::Buckets;
use super::overlap;
use crate::precision::Cast;

/// The sums of a window, with what is recorded for each bucket and parameter. The next window uses it again, so
/// that steps allocate nothing and pages stay warm.
#[derive(Debug)]
pub(super) struct BucketSet {
    /// Where its sums are kept.
    pub(super) placement: Placement,
    pub(super) layout: Arc<Buckets>,
    /// By bucket.
    pub(super) states: Vec<BucketState>,
    /// By bucket: sums as they were before the last micro-step, which can be undone.
    pub(super) undo: Vec<Option<BucketStorage>>,
    /// By bucket: whether this rank sent it too early.
    pub(super) wrong: Vec<bool>,
    /// By bucket: what one travels in that is compressed, or on a device.
    pub(super) wires: Vec<Option<Buffer>>,
    /// By parameter: whether a micro-step before this one had a gradient.
    pub(super) written: Vec<bool>,
    /// By parameter: whether this micro-step has a gradient.
    pub(super) here: Vec<bool>,
    /// By parameter: a gradient that is being read.
    pub(super) held: Vec<Option<DispatchTensor>>,
    /// By parameter: what was sent before backward ended.
    pub(super) flushed: Vec<FlushedGradient>,
    /// By parameter: whether some rank had a gradient, once that is known.
    pub(super) present: Vec<bool>,
    /// What ranks tell each other beside the sums; `None` while it travels.
    pub(super) control: Option<Buffer>,
    /// For the weight of the window, where that goes ahead.
    pub(super) total: Option<Buffer>,
}

/// How far a bucket is.
#[derive(Debug)]
pub(super) enum BucketState {
    /// It holds sums of this rank, and may get more.
    Open(BucketStorage),
    /// It holds all that this rank has to give.
    Complete(BucketStorage),
    /// It is read from its device, to travel.
    Read(PendingRead),
    /// It travels as it is.
    Sent(Pending),
    /// It travels from device to device.
    SentOnDevice(PendingReduce),
    /// It stays, and what was rounded travels.
    SentRounded(Buffer, Pending),
    /// It holds what this rank has to give, and `wires` the rounded sums of all ranks.
    Rounded(Buffer, RangeCheck),
    /// It holds the sums of all ranks.
    Summed(BucketStorage),
    /// Its operation failed.
    Lost,
}

/// Whether rounded sums are within the range of the type in which they travelled.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum RangeCheck {
    Within,
    /// They are not all finite.
    Beyond,
}

/// What was seen of a parameter's gradient when its bucket was filled before backward ended.
#[derive(Debug, Default)]
#[allow(
    clippy::large_enum_variant,
    reason = "there is one a parameter, in memory that is kept; tensors of some devices are large"
)]
pub(super) enum FlushedGradient {
    /// It has not been looked for.
    #[default]
    None,
    /// There was no gradient.
    Absent,
    /// There was this one, whose memory is held.
    Seen(DispatchTensor),
}

impl FlushedGradient {
    pub(super) fn gradient(&self) -> Option<&DispatchTensor> {
        match self {
            Self::Seen(gradient) => Some(gradient),
            Self::None | Self::Absent => None,
        }
    }

    /// Whether it is the gradient that a parameter has in the end, or what `cast` has made that of.
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
            wrong: vec![false; buckets],
            wires: none(buckets),
            written: vec![false; parameters],
            here: vec![false; parameters],
            held: none(parameters),
            flushed: core::iter::repeat_with(FlushedGradient::default)
                .take(parameters)
                .collect(),
            present: vec![false; parameters],
            control: Some(group.buffer(DType::F64, control_vector::length(parameters, buckets))),
            total: None,
            layout,
        }
    }

    /// Whether its sums lie on a device.
    pub(super) fn is_on_device(&self) -> bool {
        matches!(self.placement, Placement::Device(_))
    }

    /// Makes it ready for another window; `false` where a buffer was lost.
    pub(super) fn reopen(&mut self) -> bool {
        self.written.fill(false);
        self.here.fill(false);
        self.wrong.fill(false);
        self.forget();
        // Memory of the host is used again.
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

    /// Moves sums that are still open to where the others of their model are kept.
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
                    // What nobody has written to means nothing here, and is 0 there.
                    self.clear(bucket, &mut store, |_| false);
                    BucketState::Open(store.into_device(device))
                }
                (other, _) => other,
            };
        }
        self.placement = placement.clone();
        self.undo.fill_with(|| None);
        self.wires.fill_with(|| None);
    }

    /// Whether sums are kept there.
    pub(super) fn is_at(&self, placement: &Placement) -> bool {
        matches!(
            (&self.placement, placement),
            (Placement::Host, Placement::Host) | (Placement::Device(_), Placement::Device(_))
        )
    }

    /// Lets go of the gradients that were seen.
    pub(super) fn forget(&mut self) {
        self.flushed.fill_with(FlushedGradient::default);
    }

    /// Takes a bucket out that may still get gradients.
    pub(super) fn open(&mut self, bucket: usize) -> Option<BucketStorage> {
        match core::mem::replace(&mut self.states[bucket], BucketState::Lost) {
            BucketState::Open(store) => Some(store),
            other => {
                self.states[bucket] = other;
                None
            }
        }
    }

    /// Takes a bucket out that is to be sent.
    pub(super) fn complete(&mut self, bucket: usize) -> Option<BucketStorage> {
        match core::mem::replace(&mut self.states[bucket], BucketState::Lost) {
            BucketState::Complete(store) => Some(store),
            other => {
                self.states[bucket] = other;
                None
            }
        }
    }

    /// Adds `weight · gradient` of each of its members to a bucket. Those of which no micro-step has
    /// a gradient are left as they are.
    pub(super) fn enter<'a>(
        &'a self,
        bucket: usize,
        store: &mut BucketStorage,
        gradient: impl Fn(usize) -> Option<&'a DispatchTensor> + Copy,
        weight: f64,
    ) {
        let members = self.layout.members(bucket).iter();
        let entrants = members.map(move |&parameter| MemberGradient {
            range: &self.layout.place(parameter).range,
            gradient: gradient(parameter),
            entry: match self.written[parameter] {
                true => WriteMode::Add,
                false => WriteMode::Replace,
            },
        });
        store.enter(entrants, weight);
    }

    /// The same for the gradients that are held, and lets go of them.
    pub(super) fn enter_held(&mut self, bucket: usize, store: &mut BucketStorage, weight: f64) {
        let held = &self.held;
        self.enter(bucket, store, |parameter| held[parameter].as_ref(), weight);
        for &parameter in self.layout.members(bucket) {
            self.held[parameter] = None;
        }
    }

    /// Zeroes what nobody has written to in a bucket.
    pub(super) fn clear(
        &self,
        bucket: usize,
        store: &mut BucketStorage,
        is_there: impl Fn(usize) -> bool,
    ) {
        for &parameter in self.layout.members(bucket) {
            if !self.written[parameter] && !is_there(parameter) {
                store.clear(&self.layout.place(parameter).range);
            }
        }
    }

    /// Keeps what a bucket holds, so that it can be had again, where a micro-step before this
    /// one has written to it.
    pub(super) fn keep(&mut self, group: &ProcessGroup, bucket: usize, store: &BucketStorage) {
        if !self.is_used(bucket) {
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

    /// Gives a bucket what was kept.
    pub(super) fn restore(&mut self, bucket: usize, store: &mut BucketStorage) {
        let used = self.is_used(bucket);
        match (store, &mut self.undo[bucket]) {
            (BucketStorage::Host(buffer), Some(BucketStorage::Host(kept))) if used => {
                buffer.bytes_mut().copy_from_slice(kept.bytes());
            }
            (BucketStorage::Device(flat), Some(BucketStorage::Device(kept))) if used => {
                *flat = kept.clone()
            }
            // What nobody has written to is replaced as a whole.
            (BucketStorage::Host(_), _) => {}
            (BucketStorage::Device(flat), _) => *flat = flat.blank(),
        }
    }

    /// The sums of all ranks, of a window that was reduced.
    pub(super) fn sums(&self, bucket: usize) -> Option<&BucketStorage> {
        match &self.states[bucket] {
            BucketState::Summed(store) => Some(store),
            _ => None,
        }
    }

    /// The same, to be changed.
    pub(super) fn sums_mut(&mut self, bucket: usize) -> Option<&mut BucketStorage> {
        match &mut self.states[bucket] {
            BucketState::Summed(store) => Some(store),
            _ => None,
        }
    }

    /// The sums of buckets on a device, of a window that was reduced, by bucket.
    pub(super) fn summed_on_device(&mut self) -> impl Iterator<Item = (usize, &mut DeviceBucket)> {
        let states = self.states.iter_mut().enumerate();
        states.filter_map(|(bucket, state)| match state {
            BucketState::Summed(BucketStorage::Device(flat)) => Some((bucket, flat)),
            _ => None,
        })
    }

    /// The sums of all buckets in memory, of a window that was reduced.
    pub(super) fn summed(&mut self) -> Vec<&mut Buffer> {
        let summed = |state| match state {
            &mut BucketState::Summed(BucketStorage::Host(ref mut buffer)) => Some(buffer),
            _ => None,
        };
        self.states.iter_mut().filter_map(summed).collect()
    }

    /// Brings the sums of a window that was reduced to memory.
    pub(super) fn bring_home(&mut self, group: &ProcessGroup) {
        for state in &mut self.states {
            *state = match core::mem::replace(state, BucketState::Lost) {
                BucketState::Summed(store) => BucketState::Summed(store.into_host(group)),
                other => other,
            };
        }
        self.placement = Placement::Host;
    }

    fn is_used(&self, bucket: usize) -> bool {
        let members = self.layout.members(bucket);
        members.iter().any(|&parameter| self.written[parameter])
    }
}

fn none<T>(count: usize) -> Vec<Option<T>> {
    core::iter::repeat_with(|| None).take(count).collect()
}
