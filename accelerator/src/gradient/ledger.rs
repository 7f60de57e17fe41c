use std::sync::Arc;

use accelerator_collective::{Buffer, DType, Pending, ProcessGroup};
use burn::backend::DispatchTensor;

use super::bucket::Entry;
use super::flat::Flat;
use super::layout::Buckets;
use super::overlap;
use super::reducer::control;
use super::road::{Reading, Sending};
use super::store::{Entrant, Home, Store};
use crate::precision::Cast;

/// The sums of a window, with the books that are kept on them. The next window uses it again, so
/// that steps allocate nothing and pages stay warm.
#[derive(Debug)]
pub(super) struct Ledger {
    /// Where its sums are kept.
    pub(super) home: Home,
    pub(super) layout: Arc<Buckets>,
    /// By bucket.
    pub(super) stages: Vec<Stage>,
    /// By bucket: sums as they were before the last micro-step, which can be undone.
    pub(super) undo: Vec<Option<Store>>,
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
    pub(super) sights: Vec<Sight>,
    /// By parameter: whether some rank had a gradient, once that is known.
    pub(super) present: Vec<bool>,
    /// What ranks tell each other beside the sums; `None` while it travels.
    pub(super) control: Option<Buffer>,
    /// For the weight of the window, where that goes ahead.
    pub(super) total: Option<Buffer>,
}

/// How far a bucket is.
#[derive(Debug)]
pub(super) enum Stage {
    /// It holds sums of this rank, and may get more.
    Open(Store),
    /// It holds all that this rank has to give.
    Complete(Store),
    /// It is read from its device, to travel.
    Read(Reading),
    /// It travels as it is.
    Sent(Pending),
    /// It travels from device to device.
    SentOnDevice(Sending),
    /// It stays, and what was rounded travels.
    SentRounded(Buffer, Pending),
    /// It holds what this rank has to give, and `wires` the rounded sums of all ranks.
    Rounded(Buffer, Fit),
    /// It holds the sums of all ranks.
    Summed(Store),
    /// Its operation failed.
    Lost,
}

/// Whether rounded sums are within the range of the type in which they travelled.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Fit {
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
pub(super) enum Sight {
    /// It has not been looked for.
    #[default]
    None,
    /// There was no gradient.
    Absent,
    /// There was this one, whose memory is held.
    Seen(DispatchTensor),
}

impl Sight {
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

impl Ledger {
    pub(super) fn new(
        group: &ProcessGroup,
        home: &Home,
        layout: Arc<Buckets>,
        parameters: usize,
    ) -> Self {
        let buckets = layout.len();
        let store = |bucket| Stage::Open(layout.store(group, home, bucket));
        Self {
            home: home.clone(),
            stages: (0..buckets).map(store).collect(),
            undo: none(buckets),
            wrong: vec![false; buckets],
            wires: none(buckets),
            written: vec![false; parameters],
            here: vec![false; parameters],
            held: none(parameters),
            sights: core::iter::repeat_with(Sight::default)
                .take(parameters)
                .collect(),
            present: vec![false; parameters],
            control: Some(group.buffer(DType::F64, control::length(parameters, buckets))),
            total: None,
            layout,
        }
    }

    /// Whether its sums lie on a device.
    pub(super) fn is_on_device(&self) -> bool {
        matches!(self.home, Home::Device(_))
    }

    /// Makes it ready for another window; `false` where a buffer was lost.
    pub(super) fn reopen(&mut self) -> bool {
        self.written.fill(false);
        self.here.fill(false);
        self.wrong.fill(false);
        self.forget();
        // Memory of the host is used again.
        for undo in &mut self.undo {
            undo.take_if(|undo| matches!(undo, Store::Device(_)));
        }
        for stage in &mut self.stages {
            *stage = match core::mem::replace(stage, Stage::Lost) {
                Stage::Open(store) | Stage::Complete(store) | Stage::Summed(store) => {
                    Stage::Open(store.reopen())
                }
                Stage::Read(_)
                | Stage::Sent(_)
                | Stage::SentOnDevice(_)
                | Stage::SentRounded(..)
                | Stage::Rounded(..)
                | Stage::Lost => return false,
            };
        }
        self.control.is_some()
    }

    /// Moves sums that are still open to where the others of their model are kept.
    pub(super) fn move_to(&mut self, group: &ProcessGroup, home: &Home) {
        if self.is_at(home) {
            return;
        }
        for bucket in 0..self.stages.len() {
            let stage = core::mem::replace(&mut self.stages[bucket], Stage::Lost);
            self.stages[bucket] = match (stage, home) {
                (Stage::Open(store), Home::Host) => Stage::Open(store.into_host(group)),
                (Stage::Open(mut store), Home::Device(device)) => {
                    // What nobody has written to means nothing here, and is 0 there.
                    self.clear(bucket, &mut store, |_| false);
                    Stage::Open(store.into_device(device))
                }
                (other, _) => other,
            };
        }
        self.home = home.clone();
        self.undo.fill_with(|| None);
        self.wires.fill_with(|| None);
    }

    /// Whether sums are kept there.
    pub(super) fn is_at(&self, home: &Home) -> bool {
        matches!(
            (&self.home, home),
            (Home::Host, Home::Host) | (Home::Device(_), Home::Device(_))
        )
    }

    /// Lets go of the gradients that were seen.
    pub(super) fn forget(&mut self) {
        self.sights.fill_with(Sight::default);
    }

    /// Takes a bucket out that may still get gradients.
    pub(super) fn open(&mut self, bucket: usize) -> Option<Store> {
        match core::mem::replace(&mut self.stages[bucket], Stage::Lost) {
            Stage::Open(store) => Some(store),
            other => {
                self.stages[bucket] = other;
                None
            }
        }
    }

    /// Takes a bucket out that is to be sent.
    pub(super) fn complete(&mut self, bucket: usize) -> Option<Store> {
        match core::mem::replace(&mut self.stages[bucket], Stage::Lost) {
            Stage::Complete(store) => Some(store),
            other => {
                self.stages[bucket] = other;
                None
            }
        }
    }

    /// Adds `weight · gradient` of each of its members to a bucket. Those of which no micro-step has
    /// a gradient are left as they are.
    pub(super) fn enter<'a>(
        &'a self,
        bucket: usize,
        store: &mut Store,
        gradient: impl Fn(usize) -> Option<&'a DispatchTensor> + Copy,
        weight: f64,
    ) {
        let members = self.layout.members(bucket).iter();
        let entrants = members.map(move |&parameter| Entrant {
            range: &self.layout.place(parameter).range,
            gradient: gradient(parameter),
            entry: match self.written[parameter] {
                true => Entry::Add,
                false => Entry::Replace,
            },
        });
        store.enter(entrants, weight);
    }

    /// The same for the gradients that are held, and lets go of them.
    pub(super) fn enter_held(&mut self, bucket: usize, store: &mut Store, weight: f64) {
        let held = &self.held;
        self.enter(bucket, store, |parameter| held[parameter].as_ref(), weight);
        for &parameter in self.layout.members(bucket) {
            self.held[parameter] = None;
        }
    }

    /// Zeroes what nobody has written to in a bucket.
    pub(super) fn clear(&self, bucket: usize, store: &mut Store, is_there: impl Fn(usize) -> bool) {
        for &parameter in self.layout.members(bucket) {
            if !self.written[parameter] && !is_there(parameter) {
                store.clear(&self.layout.place(parameter).range);
            }
        }
    }

    /// Keeps what a bucket holds, so that it can be had again, where a micro-step before this
    /// one has written to it.
    pub(super) fn keep(&mut self, group: &ProcessGroup, bucket: usize, store: &Store) {
        if !self.is_used(bucket) {
            return;
        }
        match (store, &mut self.undo[bucket]) {
            (Store::Host(buffer), Some(Store::Host(kept))) => {
                kept.bytes_mut().copy_from_slice(buffer.bytes());
            }
            (Store::Host(buffer), undo) => {
                let mut kept = group.buffer(buffer.dtype(), buffer.len());
                kept.bytes_mut().copy_from_slice(buffer.bytes());
                *undo = Some(Store::Host(kept));
            }
            (Store::Device(flat), undo) => *undo = Some(Store::Device(flat.clone())),
        }
    }

    /// Gives a bucket what was kept.
    pub(super) fn restore(&mut self, bucket: usize, store: &mut Store) {
        let used = self.is_used(bucket);
        match (store, &mut self.undo[bucket]) {
            (Store::Host(buffer), Some(Store::Host(kept))) if used => {
                buffer.bytes_mut().copy_from_slice(kept.bytes());
            }
            (Store::Device(flat), Some(Store::Device(kept))) if used => *flat = kept.clone(),
            // What nobody has written to is replaced as a whole.
            (Store::Host(_), _) => {}
            (Store::Device(flat), _) => *flat = flat.blank(),
        }
    }

    /// The sums of all ranks, of a window that was reduced.
    pub(super) fn sums(&self, bucket: usize) -> Option<&Store> {
        match &self.stages[bucket] {
            Stage::Summed(store) => Some(store),
            _ => None,
        }
    }

    /// The same, to be changed.
    pub(super) fn sums_mut(&mut self, bucket: usize) -> Option<&mut Store> {
        match &mut self.stages[bucket] {
            Stage::Summed(store) => Some(store),
            _ => None,
        }
    }

    /// The sums of buckets on a device, of a window that was reduced, by bucket.
    pub(super) fn summed_on_device(&mut self) -> impl Iterator<Item = (usize, &mut Flat)> {
        let stages = self.stages.iter_mut().enumerate();
        stages.filter_map(|(bucket, stage)| match stage {
            Stage::Summed(Store::Device(flat)) => Some((bucket, flat)),
            _ => None,
        })
    }

    /// The sums of all buckets in memory, of a window that was reduced.
    pub(super) fn summed(&mut self) -> Vec<&mut Buffer> {
        let summed = |stage| match stage {
            &mut Stage::Summed(Store::Host(ref mut buffer)) => Some(buffer),
            _ => None,
        };
        self.stages.iter_mut().filter_map(summed).collect()
    }

    /// Brings the sums of a window that was reduced to memory.
    pub(super) fn bring_home(&mut self, group: &ProcessGroup) {
        for stage in &mut self.stages {
            *stage = match core::mem::replace(stage, Stage::Lost) {
                Stage::Summed(store) => Stage::Summed(store.into_host(group)),
                other => other,
            };
        }
        self.home = Home::Host;
    }

    fn is_used(&self, bucket: usize) -> bool {
        let members = self.layout.members(bucket);
        members.iter().any(|&parameter| self.written[parameter])
    }
}

fn none<T>(count: usize) -> Vec<Option<T>> {
    core::iter::repeat_with(|| None).take(count).collect()
}
