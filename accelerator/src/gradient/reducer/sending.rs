//! Buckets on their way.

use core::mem::replace;

use accelerator_collective::{Buffer, Pending, ProcessGroup, ReduceOp, TransportKind};

use super::{Pace, Reducer};
use crate::error::Result;
use crate::gradient::compression;
use crate::gradient::ledger::{Fit, Stage};
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
                match self.spread.cut(bucket) {
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
        let pending = match self.spread.cut(bucket) {
            Some(cut) => group.start_reduce_scatter_at(buffer, ReduceOp::Sum, cut, caller)?,
            None => group.start_all_reduce_at(buffer, ReduceOp::Sum, caller)?,
        };
        self.promise.give();
        Ok(pending)
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
                    let mut own = self.spread.of_bucket(bucket, wire.len());
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
