//! Buckets on their way.

use core::mem::replace;
use core::ops::Range;
use std::sync::Arc;

use accelerator_collective::{Buffer, Cut, Pending, ProcessGroup, ReduceOp, TransportKind};

use super::{Pace, Reducer};
use crate::error::Result;
use crate::gradient::compression;
use crate::gradient::ledger::{Fit, Stage};
use crate::gradient::spread::Spread;
use crate::timeline::{Part, Phase, Timeline};

impl Reducer {
    /// Sends buckets in their order, up to the first that is not complete.
    pub(super) fn send_complete(&mut self) -> Result<()> {
        if let Some(total) = self.weighing.take() {
            let total = waited(&self.timeline, Part::Weight, 8, total)?;
            let total_weight = total.as_slice::<f64>()?[0];
            self.scale = Some(self.compression.scale(total_weight * self.loss_scale));
            self.ledger.total = Some(total);
        }
        while self.next < self.ledger.layout.len() {
            let Some(buffer) = self.ledger.complete(self.next) else {
                break;
            };
            self.send(self.next, buffer)?;
            self.next += 1;
        }
        Ok(())
    }

    pub(super) fn send(&mut self, bucket: usize, buffer: Buffer) -> Result<()> {
        let (Some(dtype), Some(scale)) = (self.compression.wire(buffer.dtype()), self.scale) else {
            return self.send_exactly(bucket, buffer);
        };
        let spare = self.ledger.wires[bucket].take();
        let mut wire = spare.unwrap_or_else(|| self.group.buffer(dtype, buffer.len()));
        {
            let _copy = self.timeline.span(Phase::Copy(Part::bucket(bucket)));
            compression::compress(&buffer, &mut wire, scale);
        }
        let pending = self.start(bucket, wire)?;
        self.ledger.stages[bucket] = Stage::SentRounded(buffer, pending);
        Ok(())
    }

    pub(super) fn send_exactly(&mut self, bucket: usize, mut buffer: Buffer) -> Result<()> {
        self.ledger.stages[bucket] = match self.pace {
            Pace::Nowhere => Stage::Summed(buffer),
            Pace::InFlight => Stage::Sent(self.start(bucket, buffer)?),
            Pace::Blocking => {
                let (part, bytes) = (Part::bucket(bucket), buffer.bytes().len());
                let _reduce = self.timeline.span(Phase::Reduce { part, bytes });
                let (group, caller) = (&self.group, self.caller);
                match self.cut(bucket) {
                    Some(cut) => {
                        group.reduce_scatter_buffer_at(&mut buffer, ReduceOp::Sum, cut, caller)?;
                    }
                    None => group.all_reduce_buffer_at(&mut buffer, ReduceOp::Sum, caller)?,
                }
                self.promise.give();
                Stage::Summed(buffer)
            }
        };
        Ok(())
    }

    /// Lets the sums of a bucket travel, or what was rounded of them.
    fn start(&mut self, bucket: usize, buffer: Buffer) -> Result<Pending> {
        let (group, caller) = (&self.group, self.caller);
        let pending = match self.cut(bucket) {
            Some(cut) => group.start_reduce_scatter_at(buffer, ReduceOp::Sum, cut, caller)?,
            None => group.start_all_reduce_at(buffer, ReduceOp::Sum, caller)?,
        };
        self.promise.give();
        Ok(pending)
    }

    /// Which elements of a bucket each rank gets, where that is not all.
    fn cut(&self, bucket: usize) -> Option<&Arc<Cut>> {
        match self.spread {
            Spread::Whole => None,
            Spread::Own(_) => self.ledger.layout.cut(bucket),
        }
    }

    /// Takes in the buckets that are on their way. Of those that travelled rounded, the unrounded
    /// sums of this rank stay as they are until `settle`.
    pub(super) fn receive(&mut self) -> Result<()> {
        let ledger = &mut self.ledger;
        let timeline = &self.timeline;
        for bucket in 0..ledger.layout.len() {
            ledger.stages[bucket] = match replace(&mut ledger.stages[bucket], Stage::Lost) {
                Stage::Sent(pending) => {
                    let bytes = ledger.layout.bytes(bucket);
                    Stage::Summed(waited(timeline, Part::bucket(bucket), bytes, pending)?)
                }
                Stage::SentRounded(sums, pending) => {
                    let bytes = sums.bytes().len() / 2;
                    let wire = waited(timeline, Part::bucket(bucket), bytes, pending)?;
                    let _copy = timeline.span(Phase::Copy(Part::bucket(bucket)));
                    let cut = ledger.layout.cut(bucket);
                    let mut own = own_ranges(&self.spread, cut, wire.len());
                    let fit = if own.all(|range| compression::is_finite(&wire, range)) {
                        Fit::Within
                    } else {
                        Fit::Beyond
                    };
                    ledger.wires[bucket] = Some(wire);
                    Stage::Rounded(sums, fit)
                }
                other => other,
            };
        }
        Ok(())
    }
}

/// The elements of a bucket that this rank gets, where it is cut so.
pub(super) fn own_ranges<'a>(
    spread: &Spread,
    cut: Option<&'a Arc<Cut>>,
    len: usize,
) -> impl Iterator<Item = Range<usize>> + use<'a> {
    let own = match (spread, cut) {
        (Spread::Own(group), Some(cut)) => Some(cut.of(group.rank())),
        _ => None,
    };
    let whole = own.is_none().then_some(0..len);
    own.into_iter().flatten().cloned().chain(whole)
}

/// Waits for what was started, and notes how long.
pub(super) fn waited(
    timeline: &Timeline,
    part: Part,
    bytes: usize,
    pending: Pending,
) -> Result<Buffer> {
    let _reduce = timeline.span(Phase::Reduce { part, bytes });
    Ok(pending.wait()?)
}

/// Whether started operations gain from others in flight: connections carry several, whereas
/// memory is as fast as the thread that works on it.
pub(super) fn is_networked(group: &ProcessGroup) -> bool {
    matches!(
        group.transport(),
        TransportKind::Tcp | TransportKind::Hierarchical
    )
}
