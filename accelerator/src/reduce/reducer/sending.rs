//! Buckets on their way: sent, received, reduced again where one was sent too early, or handed to a hook.

use accelerator_collective::{Buffer, DType, Element, Pending, ProcessGroup, ReduceOp};
use burn::optim::GradientsParams;

use super::{ReadWait, Reducer, Repair, SendMode, waited};
use crate::core::error::{Error, Result};
use crate::reduce::bucket_set::{Bucket, BucketSet, BucketState};
use crate::reduce::bucket_storage::{BucketStorage, Placement, slice, slice_mut, uploaded};
use crate::reduce::compression::{self, Compression, CompressionScale};
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
        while let Some(bucket) = self.bucket_set.buckets.get(self.next) {
            if !bucket.is_complete() {
                break;
            }
            self.send(self.next)?;
            self.next += 1;
        }
        Ok(())
    }

    /// Sends a complete bucket: rounded, where it is compressed, and by its device, where it lies on one.
    fn send(&mut self, number: usize) -> Result<()> {
        if self.bucket_set.layout.is_of_pieces(number) {
            self.bucket_set.buckets[number].mark_summed();
            return Ok(());
        }
        match self.bucket_set.buckets[number].own_mut() {
            Some(BucketStorage::Host(buffer)) => {
                match (self.compression.wire(buffer.dtype()), self.scale) {
                    (Some(dtype), Some(scale)) => self.send_rounded(number, dtype, scale),
                    _ => self.send_unrounded(number),
                }
            }
            Some(BucketStorage::Device(_)) => self.send_from_device(number),
            None => Ok(()),
        }
    }

    fn send_rounded(&mut self, number: usize, dtype: DType, scale: CompressionScale) -> Result<()> {
        let bucket = &mut self.bucket_set.buckets[number];
        let Some(buffer) = bucket.take_host() else {
            return Ok(());
        };
        let spare = bucket.wire.take();
        let mut wire = spare.unwrap_or_else(|| self.group.buffer(dtype, buffer.len()));
        {
            let _copy = self
                .timeline
                .span(Phase::Copy(EventSubject::bucket(number)));
            compression::compress(&buffer, &mut wire, scale);
        }
        let pending = self.start(number, wire)?;
        self.bucket_set.buckets[number].state = BucketState::SentRounded(buffer, pending);
        Ok(())
    }

    fn send_unrounded(&mut self, number: usize) -> Result<()> {
        match self.send_mode {
            SendMode::Nowhere => self.bucket_set.buckets[number].mark_summed(),
            SendMode::InFlight => {
                if let Some(buffer) = self.bucket_set.buckets[number].take_host() {
                    let pending = self.start(number, buffer)?;
                    self.bucket_set.buckets[number].state = BucketState::Sent(pending);
                }
            }
            SendMode::Blocking => {
                let group = self.caller_group();
                let bucket = &mut self.bucket_set.buckets[number];
                let Some(BucketStorage::Host(buffer)) = bucket.own_mut() else {
                    return Ok(());
                };
                {
                    let (part, bytes) = (EventSubject::bucket(number), buffer.bytes().len());
                    let _reduce = self.timeline.span(Phase::Reduce { part, bytes });
                    match self.sum_scope.cut(number) {
                        Some(cut) => {
                            group.reduce_scatter_buffer(buffer, ReduceOp::Sum, cut)?;
                        }
                        None => group.all_reduce_buffer(buffer, ReduceOp::Sum)?,
                    }
                    self.collective.mark_started();
                }
                arrive(&mut self.bucket_set, number, &self.timeline);
            }
        }
        Ok(())
    }

    fn send_from_device(&mut self, number: usize) -> Result<()> {
        let bucket = &mut self.bucket_set.buckets[number];
        if self.send_mode == SendMode::Nowhere {
            bucket.mark_summed();
            return Ok(());
        }
        let Some(mut flat) = bucket.take_device() else {
            return Ok(());
        };
        let sums = match self.compression.wire(flat.dtype()) {
            // The range of f16 is checked in host memory.
            Some(_) => flat.take().cast(burn::tensor::DType::BF16),
            None => flat.take(),
        };
        if let Some(nccl) = self.device_reducer.nccl() {
            let (part, bytes) = (
                EventSubject::bucket(number),
                self.bucket_set.layout.bytes(number),
            );
            let _reduce = self.timeline.span(Phase::Reduce { part, bytes });
            // NCCL reduces in place: what can be undone is copied.
            let sums = match bucket.undo.is_some() {
                true => sums.mul_scalar(1.0),
                false => sums,
            };
            let sending = nccl.all_reduce(sums)?;
            self.collective.mark_started();
            bucket.state = BucketState::SentOnDevice(sending);
            return Ok(());
        }
        bucket.state = BucketState::Reading(self.device_reducer.reader()?.read(sums));
        Ok(())
    }

    /// Sends the buckets that were read back from the device, in order: all of them, or those that have arrived.
    pub(super) fn send_read_back(&mut self, wait: ReadWait) -> Result<()> {
        for number in 0..self.bucket_set.buckets.len() {
            let bucket = &mut self.bucket_set.buckets[number];
            let is_there = match &mut bucket.state {
                BucketState::Reading(reading) => wait == ReadWait::Yes || reading.is_ready(),
                // Those behind it come after it.
                BucketState::Open(_) | BucketState::Complete(_) => break,
                _ => continue,
            };
            if !is_there {
                break;
            }
            let BucketState::Reading(reading) = bucket.state.take() else {
                continue;
            };
            {
                let _copy = self
                    .timeline
                    .span(Phase::Copy(EventSubject::bucket(number)));
                let data = reading.wait()?;
                let spare = bucket.wire.take();
                let buffer = filled(&self.group, spare, ElementValues::of(&data))?;
                bucket.state = BucketState::Complete(BucketStorage::Host(buffer));
            }
            self.send_unrounded(number)?;
        }
        Ok(())
    }

    /// Sends the loss of the window, or adds it to the control vector.
    pub(super) fn send_loss(&mut self) -> Result<()> {
        if self.send_mode == SendMode::Nowhere {
            return Ok(());
        }
        if let Some(nccl) = self.device_reducer.nccl()
            && let Placement::Device(device) = &self.bucket_set.placement
        {
            let sending = nccl.all_reduce(self.totals.loss.sum_on(device))?;
            self.collective.mark_started();
            self.totals.loss.unread.clear();
            self.sent_loss = Some(sending);
            return Ok(());
        }
        // What it waits for, reading the last bucket has waited for.
        self.totals.loss.read_all();
        Ok(())
    }

    /// Starts to reduce the sums of a bucket, or the rounded ones.
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
        self.send_read_back(ReadWait::Yes)?;
        self.receive_on_device()?;
        let bucket_set = &mut self.bucket_set;
        let timeline = &self.timeline;
        for number in 0..bucket_set.buckets.len() {
            let bucket = &mut bucket_set.buckets[number];
            match bucket.state.take() {
                BucketState::Sent(pending) => {
                    let bytes = bucket_set.layout.bytes(number);
                    let sums = waited(timeline, EventSubject::bucket(number), bytes, pending)?;
                    bucket.state = BucketState::Complete(BucketStorage::Host(sums));
                    arrive(bucket_set, number, timeline);
                }
                BucketState::SentRounded(exact, pending) => {
                    let bytes = exact.bytes().len() / 2;
                    let wire = waited(timeline, EventSubject::bucket(number), bytes, pending)?;
                    let _copy = timeline.span(Phase::Copy(EventSubject::bucket(number)));
                    let mut own = self.sum_scope.of_bucket(number, wire.len());
                    let fits = own.all(|range| compression::is_finite(&wire, range));
                    bucket.wire = Some(wire);
                    bucket.state = BucketState::Rounded { exact, fits };
                }
                other => bucket.state = other,
            }
        }
        Ok(())
    }

    /// Takes in what travels from device to device, without waiting for it: what the device is given from
    /// now on does.
    fn receive_on_device(&mut self) -> Result<()> {
        let (Some(nccl), Placement::Device(device)) =
            (self.device_reducer.nccl(), &self.bucket_set.placement)
        else {
            return Ok(());
        };
        nccl.order_after()?;
        if let Some(sent) = self.sent_loss.take() {
            self.totals.loss.unread.push((1.0, sent.finish()));
        }
        for (number, bucket) in self.bucket_set.buckets.iter_mut().enumerate() {
            bucket.state = match bucket.state.take() {
                BucketState::SentOnDevice(sending) => {
                    let (dtype, length) = self.bucket_set.layout.shape(number);
                    let flat = DeviceBucket::new(dtype, length, device);
                    BucketState::Summed(BucketStorage::Device(flat.with(sending.finish())))
                }
                other => other,
            };
        }
        Ok(())
    }

    /// Reduces the buckets again that some rank has sent too early. Returns their number.
    pub(super) fn redo(
        &mut self,
        model_state: &ModelState,
        gradients: &GradientsParams,
    ) -> Result<usize> {
        let bucket_set = &mut self.bucket_set;
        let layout = bucket_set.layout.clone();
        let parameters = bucket_set.parameters.len();
        let sums = ControlSums::read(&bucket_set.control, parameters, &self.group)?;
        for (bucket, some_rank) in bucket_set.buckets.iter_mut().zip(sums.needs_retry()) {
            bucket.needs_retry = some_rank;
        }
        let needs_retry = |bucket: &Bucket| bucket.needs_retry;
        if self.repair == Repair::Unneeded && bucket_set.buckets.iter().any(needs_retry) {
            return Err(Error::misuse(
                "another rank sends gradients while backward runs, and this one does not: build the same \
                 layers on every rank",
            ));
        }
        let mut count = 0;
        for number in 0..layout.len() {
            let bucket_set = &mut self.bucket_set;
            let bucket = &mut bucket_set.buckets[number];
            if !bucket.needs_retry {
                continue;
            }
            count += 1;
            bucket.reopen_summed();
            bucket_set.restore_undo(number);
            for &index in layout.members(number) {
                bucket_set.parameters[index].gradient =
                    element_values::peek(gradients, &model_state.parameters()[index]);
            }
            bucket_set.add_gradients(number, self.weight);
            bucket_set.clear_unwritten(number, |record| record.has_gradient);
            bucket_set.buckets[number].mark_complete();
            self.send(number)?;
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
        let mut buckets = self.bucket_set.buckets.iter();
        let mut fits =
            !buckets.any(|bucket| matches!(bucket.state, BucketState::Rounded { fits: false, .. }));
        if self.compression != Compression::None && !self.sum_scope.is_whole() {
            fits = self.all_agree(fits)?;
        }
        if !fits && self.group.rank() == 0 {
            model_state
                .warnings
                .range(model_state.steps(), self.compression);
        }
        for number in 0..self.bucket_set.buckets.len() {
            let bucket = &mut self.bucket_set.buckets[number];
            let mut sums = match bucket.state.take() {
                BucketState::Rounded { exact, .. } => exact,
                other => {
                    bucket.state = other;
                    continue;
                }
            };
            match (&bucket.wire, self.scale) {
                (Some(wire), Some(scale)) if fits => {
                    let _copy = self
                        .timeline
                        .span(Phase::Copy(EventSubject::bucket(number)));
                    for range in self.sum_scope.of_bucket(number, wire.len()) {
                        compression::expand(wire, &mut sums, range, scale);
                    }
                    bucket.state = BucketState::Summed(BucketStorage::Host(sums));
                }
                _ => {
                    bucket.state = BucketState::Complete(BucketStorage::Host(sums));
                    self.send_unrounded(number)?;
                }
            }
        }
        self.receive()
    }

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
        for bucket in &mut self.bucket_set.buckets {
            bucket.needs_retry = match bucket.own_mut() {
                Some(BucketStorage::Host(buffer)) => !is_finite(buffer),
                _ => false,
            };
        }
        self.send_control()?;
        self.receive_control()?;
        for bucket in &mut self.bucket_set.buckets {
            bucket.needs_retry = false;
        }
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
            if !is_finite {
                self.send_unrounded(number)?;
                continue;
            }
            let BucketSet {
                buckets,
                parameters,
                ..
            } = &mut *self.bucket_set;
            // With a hook, sums are kept in memory.
            let Some(BucketStorage::Host(buffer)) = buckets[number].own_mut() else {
                continue;
            };
            divide(buffer, total * self.loss_scale);
            let parameters = layout.members(number).iter().map(|&index| {
                let parameter = &model_state.parameters()[index];
                let range = layout.place(index).range.clone();
                BucketParameter::new(parameter, range, parameters[index].present)
            });
            let parameters = parameters.collect();
            let (buckets, steps) = (layout.len(), model_state.steps());
            let mut bucket = GradientBucket::new(buffer, number, buckets, steps, parameters);
            {
                let (part, bytes) = (EventSubject::bucket(number), layout.bytes(number));
                let _reduce = self.timeline.span(Phase::Reduce { part, bytes });
                hook.reduce(&mut bucket, &Ranks::new(&group))?;
            }
            self.bucket_set.buckets[number].mark_summed();
        }
        self.handed_over = is_finite;
        Ok(())
    }
}

/// Marks a bucket as reduced, whose sums have arrived in memory; uploads them, where sums are kept on a device.
fn arrive(bucket_set: &mut BucketSet, number: usize, timeline: &Timeline) {
    let bucket = &mut bucket_set.buckets[number];
    let Placement::Device(device) = &bucket_set.placement else {
        bucket.mark_summed();
        return;
    };
    let Some(buffer) = bucket.take_host() else {
        return;
    };
    let _copy = timeline.span(Phase::Copy(EventSubject::bucket(number)));
    let (dtype, length) = bucket_set.layout.shape(number);
    let flat = DeviceBucket::new(dtype, length, device);
    let flat = flat.with(uploaded(&buffer, device));
    bucket.wire = Some(buffer);
    bucket.state = BucketState::Summed(BucketStorage::Device(flat));
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

fn is_finite(buffer: &Buffer) -> bool {
    let values = match buffer.dtype() {
        DType::F64 => ElementValues::F64(slice(buffer)),
        _ => ElementValues::F32(slice(buffer)),
    };
    values.is_finite()
}

fn divide(buffer: &mut Buffer, divisor: f64) {
    match buffer.dtype() {
        DType::F64 => slice_mut::<f64>(buffer)
            .iter_mut()
            .for_each(|value| *value /= divisor),
        _ => slice_mut::<f32>(buffer)
            .iter_mut()
            .for_each(|value| *value /= divisor as f32),
    }
}
