//! Buckets on their way.

use core::mem::replace;

use accelerator_collective::{Buffer, DType, Element, Pending, ProcessGroup, ReduceOp};
use burn::optim::GradientsParams;

use super::{ReadWait, Reducer, Repair, SendMode, waited};
use crate::core::error::{Error, Result};
use crate::reduce::bucket::{BucketStorage, Placement, uploaded};
use crate::reduce::bucket_set::{BucketSet, BucketState, RangeCheck};
use crate::reduce::compression::{self, Compression};
use crate::reduce::control_vector::ControlSums;
use crate::reduce::device_bucket::DeviceBucket;
use crate::reduce::element_values::{self, ElementValues};
use crate::reduce::hook::{BucketParameter, GradientBucket, HookInstance, Ranks};
use crate::reduce::model_state::ModelState;
use crate::timeline::{EventSubject, Phase, Timeline};

impl Reducer {
    /// Sends buckets in their order, up to the first that is not complete.
    pub(super) fn send_complete(&mut self) -> Result<()> {
        if let Some(total) = self.weighing.take() {
            let total = waited(&self.timeline, EventSubject::Weight, 8, total)?;
            let total_weight = total.as_slice::<f64>()?[0];
            self.scale = Some(self.compression.scale(total_weight * self.loss_scale));
            self.bucket_set.weight_buffer = Some(total);
        }
        while self.next < self.bucket_set.layout.len() {
            let Some(store) = self.bucket_set.take_complete(self.next) else {
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
        let spare = self.bucket_set.wires[bucket].take();
        let mut wire = spare.unwrap_or_else(|| self.group.buffer(dtype, buffer.len()));
        {
            let _copy = self
                .timeline
                .span(Phase::Copy(EventSubject::bucket(bucket)));
            compression::compress(&buffer, &mut wire, scale);
        }
        let pending = self.start(bucket, wire)?;
        self.bucket_set.states[bucket] = BucketState::SentRounded(buffer, pending);
        Ok(())
    }

    pub(super) fn send_exactly(&mut self, bucket: usize, mut buffer: Buffer) -> Result<()> {
        self.bucket_set.states[bucket] = match self.send_mode {
            SendMode::Nowhere => BucketState::Summed(BucketStorage::Host(buffer)),
            SendMode::InFlight => BucketState::Sent(self.start(bucket, buffer)?),
            SendMode::Blocking => {
                let (part, bytes) = (EventSubject::bucket(bucket), buffer.bytes().len());
                let _reduce = self.timeline.span(Phase::Reduce { part, bytes });
                let group = self.caller_group();
                match self.sum_scope.cut(bucket) {
                    Some(cut) => {
                        group.reduce_scatter_buffer(&mut buffer, ReduceOp::Sum, cut)?;
                    }
                    None => group.all_reduce_buffer(&mut buffer, ReduceOp::Sum)?,
                }
                self.collective.mark_started();
                BucketState::Summed(arrived(
                    &mut self.bucket_set,
                    bucket,
                    buffer,
                    &self.timeline,
                ))
            }
        };
        Ok(())
    }

    /// Lets sums on a device travel.
    fn send_flat(&mut self, bucket: usize, mut flat: DeviceBucket) -> Result<()> {
        let (Some(device_reducer), SendMode::Blocking | SendMode::InFlight) =
            (&self.device_reducer, self.send_mode)
        else {
            self.bucket_set.states[bucket] = BucketState::Summed(BucketStorage::Device(flat));
            return Ok(());
        };
        let sums = match self.compression.wire(flat.dtype()) {
            // The range of f16 is checked in host memory.
            Some(_) => flat.take().cast(burn::tensor::DType::BF16),
            None => flat.take(),
        };
        if let Some(nccl) = device_reducer.nccl() {
            let (part, bytes) = (
                EventSubject::bucket(bucket),
                self.bucket_set.layout.bytes(bucket),
            );
            let _reduce = self.timeline.span(Phase::Reduce { part, bytes });
            // NCCL reduces in place: what can be undone is copied.
            let sums = match self.bucket_set.undo[bucket] {
                Some(_) => sums.mul_scalar(1.0),
                None => sums,
            };
            let sending = nccl.all_reduce(sums)?;
            self.collective.mark_started();
            self.bucket_set.states[bucket] = BucketState::SentOnDevice(sending);
            return Ok(());
        }
        self.bucket_set.states[bucket] = BucketState::Read(device_reducer.reader()?.read(sums));
        Ok(())
    }

    /// Sends what was read, in its order: all of it, or what is there.
    pub(super) fn send_read(&mut self, wait: ReadWait) -> Result<()> {
        for bucket in 0..self.bucket_set.layout.len() {
            let state = &mut self.bucket_set.states[bucket];
            let is_there = match state {
                BucketState::Read(reading) => wait == ReadWait::Yes || reading.is_ready(),
                // Those behind it come after it.
                BucketState::Open(_) | BucketState::Complete(_) => break,
                _ => continue,
            };
            if !is_there {
                break;
            }
            let BucketState::Read(reading) = replace(state, BucketState::Lost) else {
                continue;
            };
            let copy = self
                .timeline
                .span(Phase::Copy(EventSubject::bucket(bucket)));
            let data = reading.wait()?;
            let spare = self.bucket_set.wires[bucket].take();
            let buffer = filled(&self.group, spare, ElementValues::of(&data))?;
            drop((copy, data));
            self.send_exactly(bucket, buffer)?;
        }
        Ok(())
    }

    /// Sends the loss of the window, or adds it to the control vector.
    pub(super) fn send_loss(&mut self) -> Result<()> {
        if self.send_mode == SendMode::Nowhere {
            return Ok(());
        }
        if let Some(nccl) = self
            .device_reducer
            .as_ref()
            .and_then(|device_reducer| device_reducer.nccl())
            && let Placement::Device(device) = &self.bucket_set.placement
        {
            let sending = nccl.all_reduce(self.loss.sum_on(device))?;
            self.collective.mark_started();
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
        let group = self.caller_group();
        let pending = match self.sum_scope.cut(bucket) {
            Some(cut) => group.start_reduce_scatter(buffer, ReduceOp::Sum, cut)?,
            None => group.start_all_reduce(buffer, ReduceOp::Sum)?,
        };
        self.collective.mark_started();
        Ok(pending)
    }

    /// Takes in the buckets that are on their way. Of those that travelled rounded, the unrounded
    /// sums of this rank stay as they are until `settle`.
    pub(super) fn receive(&mut self) -> Result<()> {
        self.send_read(ReadWait::Yes)?;
        self.receive_on_device()?;
        let bucket_set = &mut self.bucket_set;
        let timeline = &self.timeline;
        for bucket in 0..bucket_set.layout.len() {
            bucket_set.states[bucket] =
                match replace(&mut bucket_set.states[bucket], BucketState::Lost) {
                    BucketState::Sent(pending) => {
                        let bytes = bucket_set.layout.bytes(bucket);
                        let sums = waited(timeline, EventSubject::bucket(bucket), bytes, pending)?;
                        BucketState::Summed(arrived(bucket_set, bucket, sums, timeline))
                    }
                    BucketState::SentRounded(sums, pending) => {
                        let bytes = sums.bytes().len() / 2;
                        let wire = waited(timeline, EventSubject::bucket(bucket), bytes, pending)?;
                        let _copy = timeline.span(Phase::Copy(EventSubject::bucket(bucket)));
                        let mut own = self.sum_scope.of_bucket(bucket, wire.len());
                        let fit = if own.all(|range| compression::is_finite(&wire, range)) {
                            RangeCheck::Within
                        } else {
                            RangeCheck::Beyond
                        };
                        bucket_set.wires[bucket] = Some(wire);
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
        let Some(nccl) = self
            .device_reducer
            .as_ref()
            .and_then(|device_reducer| device_reducer.nccl())
        else {
            return Ok(());
        };
        let Placement::Device(device) = &self.bucket_set.placement else {
            return Ok(());
        };
        nccl.order_after()?;
        if let Some(sent) = self.sent_loss.take() {
            self.loss.unread.push((1.0, sent.finish()));
        }
        for bucket in 0..self.bucket_set.layout.len() {
            let state = &mut self.bucket_set.states[bucket];
            *state = match replace(state, BucketState::Lost) {
                BucketState::SentOnDevice(sending) => {
                    let flat = self.bucket_set.layout.flat(device, bucket);
                    BucketState::Summed(BucketStorage::Device(flat.with(sending.finish())))
                }
                other => other,
            };
        }
        Ok(())
    }
}

/// Returns the sums of a reduced bucket, in memory or uploaded to the device that they are kept on.
fn arrived(
    bucket_set: &mut BucketSet,
    bucket: usize,
    buffer: Buffer,
    timeline: &Timeline,
) -> BucketStorage {
    let Placement::Device(device) = &bucket_set.placement else {
        return BucketStorage::Host(buffer);
    };
    let _copy = timeline.span(Phase::Copy(EventSubject::bucket(bucket)));
    let flat = bucket_set.layout.flat(device, bucket);
    let flat = flat.with(uploaded(&buffer, device));
    bucket_set.wires[bucket] = Some(buffer);
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
