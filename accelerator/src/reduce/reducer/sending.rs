//! Buckets on their way.

use core::mem::replace;

use accelerator_collective::{Buffer, Element, Pending, ProcessGroup, ReduceOp, TransportKind};
use burn::tensor::DType;

use super::{ReadWait, Reducer, SendMode};
use crate::core::error::Result;
use crate::reduce::bucket_set::{BucketSet, BucketState, RangeCheck};
use crate::reduce::bucket_storage::{BucketStorage, Placement, uploaded};
use crate::reduce::compression;
use crate::reduce::device_bucket::DeviceBucket;
use crate::reduce::element_values::ElementValues;
use crate::timeline::{EventSubject, Phase, Timeline};

impl Reducer {
    /// Sends buckets in their order, up to the first that is not complete.
    pub(super) fn send_complete(&mut self) -> Result<()> {
        if let Some(total) = self.weighing.take() {
            let total = waited(&self.timeline, EventSubject::Weight, 8, total)?;
            let total_weight = total.as_slice::<f64>()?[0];
            self.scale = Some(self.compression.scale(total_weight * self.loss_scale));
            self.ledger.total = Some(total);
        }
        while self.next < self.ledger.layout.len() {
            let Some(store) = self.ledger.complete(self.next) else {
                break;
            };
            self.send(self.next, store)?;
            self.next += 1;
        }
        Ok(())
    }

    pub(super) fn send(&mut self, bucket: usize, store: BucketStorage) -> Result<()> {
        let buffer = match store {
            BucketStorage::Host(buffer) => buffer,
            BucketStorage::Device(flat) => return self.send_flat(bucket, flat),
        };
        let (Some(dtype), Some(scale)) = (self.compression.wire(buffer.dtype()), self.scale) else {
            return self.send_exactly(bucket, buffer);
        };
        let spare = self.ledger.wires[bucket].take();
        let mut wire = spare.unwrap_or_else(|| self.group.buffer(dtype, buffer.len()));
        {
            let _copy = self
                .timeline
                .span(Phase::Copy(EventSubject::bucket(bucket)));
            compression::compress(&buffer, &mut wire, scale);
        }
        let pending = self.start(bucket, wire)?;
        self.ledger.stages[bucket] = BucketState::SentRounded(buffer, pending);
        Ok(())
    }

    pub(super) fn send_exactly(&mut self, bucket: usize, mut buffer: Buffer) -> Result<()> {
        self.ledger.stages[bucket] = match self.pace {
            SendMode::Nowhere => BucketState::Summed(BucketStorage::Host(buffer)),
            SendMode::InFlight => BucketState::Sent(self.start(bucket, buffer)?),
            SendMode::Blocking => {
                let (part, bytes) = (EventSubject::bucket(bucket), buffer.bytes().len());
                let _reduce = self.timeline.span(Phase::Reduce { part, bytes });
                let (group, caller) = (&self.group, self.caller);
                match self.spread.cut(bucket) {
                    Some(cut) => {
                        group.reduce_scatter_buffer_at(&mut buffer, ReduceOp::Sum, cut, caller)?;
                    }
                    None => group.all_reduce_buffer_at(&mut buffer, ReduceOp::Sum, caller)?,
                }
                self.promise.give();
                BucketState::Summed(arrived(&mut self.ledger, bucket, buffer, &self.timeline))
            }
        };
        Ok(())
    }

    /// Lets sums on a device travel.
    fn send_flat(&mut self, bucket: usize, mut flat: DeviceBucket) -> Result<()> {
        let (Some(road), SendMode::Blocking | SendMode::InFlight) = (&self.road, self.pace) else {
            self.ledger.stages[bucket] = BucketState::Summed(BucketStorage::Device(flat));
            return Ok(());
        };
        let sums = match self.compression.wire(flat.dtype()) {
            // The other one is looked at in memory.
            Some(_) => flat.take().cast(DType::BF16),
            None => flat.take(),
        };
        if let Some(nccl) = road.nccl() {
            let (part, bytes) = (
                EventSubject::bucket(bucket),
                self.ledger.layout.bytes(bucket),
            );
            let _reduce = self.timeline.span(Phase::Reduce { part, bytes });
            // What can be had again is nobody's to add to.
            let sums = match self.ledger.undo[bucket] {
                Some(_) => sums.mul_scalar(1.0),
                None => sums,
            };
            let sending = nccl.all_reduce(sums)?;
            self.promise.give();
            self.ledger.stages[bucket] = BucketState::SentOnDevice(sending);
            return Ok(());
        }
        self.ledger.stages[bucket] = BucketState::Read(road.reader()?.read(sums));
        Ok(())
    }

    /// Sends what was read, in its order: all of it, or what is there.
    pub(super) fn send_read(&mut self, wait: ReadWait) -> Result<()> {
        for bucket in 0..self.ledger.layout.len() {
            let stage = &mut self.ledger.stages[bucket];
            let is_there = match stage {
                BucketState::Read(reading) => wait == ReadWait::Yes || reading.is_ready(),
                // Those behind it come after it.
                BucketState::Open(_) | BucketState::Complete(_) => break,
                _ => continue,
            };
            if !is_there {
                break;
            }
            let BucketState::Read(reading) = replace(stage, BucketState::Lost) else {
                continue;
            };
            let copy = self
                .timeline
                .span(Phase::Copy(EventSubject::bucket(bucket)));
            let data = reading.wait()?;
            let spare = self.ledger.wires[bucket].take();
            let buffer = filled(&self.group, spare, ElementValues::of(&data))?;
            drop((copy, data));
            self.send_exactly(bucket, buffer)?;
        }
        Ok(())
    }

    /// Lets the loss of the window travel, or puts it with what ranks tell each other.
    pub(super) fn send_loss(&mut self) -> Result<()> {
        if self.pace == SendMode::Nowhere {
            return Ok(());
        }
        if let Some(nccl) = self.road.as_ref().and_then(|road| road.nccl())
            && let Placement::Device(device) = &self.ledger.home
        {
            let sending = nccl.all_reduce(self.loss.sum_on(device))?;
            self.promise.give();
            self.loss.unread.clear();
            self.sent_loss = Some(sending);
            return Ok(());
        }
        // What it waits for, reading the last bucket has waited for.
        self.loss.read_all();
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
        self.send_read(ReadWait::Yes)?;
        self.receive_on_device()?;
        let ledger = &mut self.ledger;
        let timeline = &self.timeline;
        for bucket in 0..ledger.layout.len() {
            ledger.stages[bucket] = match replace(&mut ledger.stages[bucket], BucketState::Lost) {
                BucketState::Sent(pending) => {
                    let bytes = ledger.layout.bytes(bucket);
                    let sums = waited(timeline, EventSubject::bucket(bucket), bytes, pending)?;
                    BucketState::Summed(arrived(ledger, bucket, sums, timeline))
                }
                BucketState::SentRounded(sums, pending) => {
                    let bytes = sums.bytes().len() / 2;
                    let wire = waited(timeline, EventSubject::bucket(bucket), bytes, pending)?;
                    let _copy = timeline.span(Phase::Copy(EventSubject::bucket(bucket)));
                    let mut own = self.spread.of_bucket(bucket, wire.len());
                    let fit = if own.all(|range| compression::is_finite(&wire, range)) {
                        RangeCheck::Within
                    } else {
                        RangeCheck::Beyond
                    };
                    ledger.wires[bucket] = Some(wire);
                    BucketState::Rounded(sums, fit)
                }
                other => other,
            };
        }
        Ok(())
    }

    /// Takes in what travels from device to device, without waiting for it: what the device is given from
    /// now on does.
    fn receive_on_device(&mut self) -> Result<()> {
        let Some(nccl) = self.road.as_ref().and_then(|road| road.nccl()) else {
            return Ok(());
        };
        let Placement::Device(device) = &self.ledger.home else {
            return Ok(());
        };
        nccl.order_after()?;
        if let Some(sent) = self.sent_loss.take() {
            self.loss.unread.push((1.0, sent.finish()));
        }
        for bucket in 0..self.ledger.layout.len() {
            let stage = &mut self.ledger.stages[bucket];
            *stage = match replace(stage, BucketState::Lost) {
                BucketState::SentOnDevice(sending) => {
                    let flat = self.ledger.layout.flat(device, bucket);
                    BucketState::Summed(BucketStorage::Device(flat.with(sending.finish())))
                }
                other => other,
            };
        }
        Ok(())
    }
}

/// What came of a bucket: sums in memory, or those of a device, which get back there.
fn arrived(
    ledger: &mut BucketSet,
    bucket: usize,
    buffer: Buffer,
    timeline: &Timeline,
) -> BucketStorage {
    let Placement::Device(device) = &ledger.home else {
        return BucketStorage::Host(buffer);
    };
    let _copy = timeline.span(Phase::Copy(EventSubject::bucket(bucket)));
    let flat = ledger.layout.flat(device, bucket);
    let flat = flat.with(uploaded(&buffer, device));
    ledger.wires[bucket] = Some(buffer);
    BucketStorage::Device(flat)
}

/// Values in a buffer of their type: that one, if it is one.
fn filled(
    group: &ProcessGroup,
    spare: Option<Buffer>,
    values: ElementValues<'_>,
) -> Result<Buffer> {
    fn fill<E: Element>(
        group: &ProcessGroup,
        spare: Option<Buffer>,
        values: &[E],
    ) -> Result<Buffer> {
        let spare = spare.filter(|spare| spare.dtype() == E::DTYPE && spare.len() == values.len());
        let mut buffer = spare.unwrap_or_else(|| group.buffer(E::DTYPE, values.len()));
        buffer.as_mut_slice::<E>()?.copy_from_slice(values);
        Ok(buffer)
    }
    match values {
        ElementValues::Bf16(values) => fill(group, spare, values),
        ElementValues::F16(values) => fill(group, spare, values),
        ElementValues::F32(values) => fill(group, spare, values),
        ElementValues::F64(values) => fill(group, spare, values),
    }
}

/// Waits for what was started, and notes how long.
pub(super) fn waited(
    timeline: &Timeline,
    part: EventSubject,
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
