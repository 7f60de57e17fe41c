use std::sync::Arc;

use accelerator_collective::{Buffer, DType, Pending, ProcessGroup};
use burn::backend::DispatchTensor;

use super::bucket::{self, Entry};
use super::layout::Buckets;
use super::overlap;
use super::reducer::control;
use super::values::with_values;

/// The sums of a window, with the books that are kept on them. The next window uses it again, so
/// that steps allocate nothing and pages stay warm.
#[derive(Debug)]
pub(super) struct Ledger {
    pub(super) layout: Arc<Buckets>,
    /// By bucket.
    pub(super) stages: Vec<Stage>,
    /// By bucket: sums as they were before the last micro-step, which can be undone.
    pub(super) undo: Vec<Option<Buffer>>,
    /// By bucket: whether this rank sent it too early.
    pub(super) wrong: Vec<bool>,
    /// By bucket: what a compressed one travels in.
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
    Open(Buffer),
    /// It holds all that this rank has to give.
    Complete(Buffer),
    /// It travels as it is.
    Sent(Pending),
    /// It stays, and what was rounded travels.
    SentRounded(Buffer, Pending),
    /// It holds what this rank has to give, and `wires` the rounded sums of all ranks.
    Rounded(Buffer, Fit),
    /// It holds the sums of all ranks.
    Summed(Buffer),
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

    /// Whether it is the gradient that a parameter has in the end.
    pub(super) fn is_of(&self, gradient: Option<&DispatchTensor>) -> bool {
        match (self, gradient) {
            (Self::Absent, None) => true,
            (Self::Seen(seen), Some(gradient)) => overlap::same(seen, gradient),
            _ => false,
        }
    }
}

impl Ledger {
    pub(super) fn new(group: &ProcessGroup, layout: Arc<Buckets>, parameters: usize) -> Self {
        let buckets = layout.len();
        let buffers = layout.allocate(group).into_iter();
        Self {
            stages: buffers.map(Stage::Open).collect(),
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

    /// Makes it ready for another window; `false` where a buffer was lost.
    pub(super) fn reopen(&mut self) -> bool {
        self.written.fill(false);
        self.here.fill(false);
        self.wrong.fill(false);
        self.forget();
        for stage in &mut self.stages {
            *stage = match core::mem::replace(stage, Stage::Lost) {
                Stage::Open(buffer) | Stage::Complete(buffer) | Stage::Summed(buffer) => {
                    Stage::Open(buffer)
                }
                Stage::Sent(_) | Stage::SentRounded(..) | Stage::Rounded(..) | Stage::Lost => {
                    return false;
                }
            };
        }
        self.control.is_some()
    }

    /// Lets go of the gradients that were seen.
    pub(super) fn forget(&mut self) {
        self.sights.fill_with(Sight::default);
    }

    /// Takes a bucket out that may still get gradients.
    pub(super) fn open(&mut self, bucket: usize) -> Option<Buffer> {
        match core::mem::replace(&mut self.stages[bucket], Stage::Lost) {
            Stage::Open(buffer) => Some(buffer),
            other => {
                self.stages[bucket] = other;
                None
            }
        }
    }

    /// Takes a bucket out that is to be sent.
    pub(super) fn complete(&mut self, bucket: usize) -> Option<Buffer> {
        match core::mem::replace(&mut self.stages[bucket], Stage::Lost) {
            Stage::Complete(buffer) => Some(buffer),
            other => {
                self.stages[bucket] = other;
                None
            }
        }
    }

    /// Adds `weight · gradient` of each of its members to a bucket. Those of which no micro-step has
    /// a gradient are left as they are.
    pub(super) fn enter<'a>(
        &self,
        bucket: usize,
        buffer: &mut Buffer,
        gradient: impl Fn(usize) -> Option<&'a DispatchTensor>,
        weight: f64,
    ) {
        let members = self.layout.members(bucket).iter();
        let there = members.filter_map(|&parameter| Some((parameter, gradient(parameter)?)));
        with_values(there, |parameter, values| {
            let range = &self.layout.place(parameter).range;
            let entry = if self.written[parameter] {
                Entry::Add
            } else {
                Entry::Replace
            };
            bucket::write(buffer, range, values, weight, entry);
        });
    }

    /// The same for the gradients that are held, and lets go of them.
    pub(super) fn enter_held(&mut self, bucket: usize, buffer: &mut Buffer, weight: f64) {
        self.enter(
            bucket,
            buffer,
            |parameter| self.held[parameter].as_ref(),
            weight,
        );
        for &parameter in self.layout.members(bucket) {
            self.held[parameter] = None;
        }
    }

    /// Zeroes what nobody has written to in a bucket.
    pub(super) fn clear(
        &self,
        bucket: usize,
        buffer: &mut Buffer,
        is_there: impl Fn(usize) -> bool,
    ) {
        for &parameter in self.layout.members(bucket) {
            if !self.written[parameter] && !is_there(parameter) {
                bucket::clear(buffer, &self.layout.place(parameter).range);
            }
        }
    }

    /// Keeps what a bucket holds, so that it can be had again, where a micro-step before this
    /// one has written to it.
    pub(super) fn keep(&mut self, group: &ProcessGroup, bucket: usize, buffer: &Buffer) {
        if self.is_used(bucket) {
            let kept =
                self.undo[bucket].get_or_insert_with(|| group.buffer(buffer.dtype(), buffer.len()));
            kept.bytes_mut().copy_from_slice(buffer.bytes());
        }
    }

    /// Gives a bucket what was kept.
    pub(super) fn restore(&self, bucket: usize, buffer: &mut Buffer) {
        // What nobody has written to is replaced as a whole.
        if self.is_used(bucket)
            && let Some(kept) = &self.undo[bucket]
        {
            buffer.bytes_mut().copy_from_slice(kept.bytes());
        }
    }

    /// The sums of all ranks, of a window that was reduced.
    pub(super) fn sums(&self, bucket: usize) -> Option<&Buffer> {
        match &self.stages[bucket] {
            Stage::Summed(buffer) => Some(buffer),
            _ => None,
        }
    }

    /// The same, to be changed.
    pub(super) fn sums_mut(&mut self, bucket: usize) -> Option<&mut Buffer> {
        match &mut self.stages[bucket] {
            Stage::Summed(buffer) => Some(buffer),
            _ => None,
        }
    }

    /// The sums of all buckets, of a window that was reduced.
    pub(super) fn summed(&mut self) -> Vec<&mut Buffer> {
        let summed = |stage| match stage {
            &mut Stage::Summed(ref mut buffer) => Some(buffer),
            _ => None,
        };
        self.stages.iter_mut().filter_map(summed).collect()
    }

    fn is_used(&self, bucket: usize) -> bool {
        let members = self.layout.members(bucket);
        members.iter().any(|&parameter| self.written[parameter])
    }
}

fn none<T>(count: usize) -> Vec<Option<T>> {
    core::iter::repeat_with(|| None).take(count).collect()
}
