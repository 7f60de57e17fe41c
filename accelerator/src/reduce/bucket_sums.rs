use core::ops::Range;
use std::sync::Arc;

use accelerator_collective::internal::BufferSlice;
use accelerator_collective::{ProcessGroup, ReduceOp};
use burn::module::ParamId;
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor, TensorData};

use super::bucket_layout::{BucketRange, SumScope};
use super::bucket_set::BucketSet;
use super::bucket_storage::{self, BucketStorage};
use super::device_bucket;
use super::loss::LossSum;
use super::model_state::ModelState;
use crate::core::error::{Error, Result};
use crate::core::partition::BLOCK;
use crate::core::tensor::{from_data, register, with_rank};
use crate::model::Trainable;

/// Sums, whose bucket set goes back to its model state.
pub(super) struct BucketSums {
    /// The group in which rank 0 broadcasts its norms, if sums are on devices: devices choose among kernels that
    /// round differently, so all ranks scale by the norms of rank 0.
    pub(super) norm_broadcast_group: Option<ProcessGroup>,
    /// There until it is dropped. In a box, which its model state keeps with it: gradients are moved often.
    pub(super) bucket_set: Option<Box<BucketSet>>,
    /// The divisor of the sums: the total weight, times the scale of the loss.
    pub(super) divisor: f64,
    /// Σ weight · loss.
    pub(super) loss: LossSum,
    pub(super) ranks: usize,
    pub(super) model_state: Arc<ModelState>,
    /// The part of them that this rank has.
    pub(super) sum_scope: SumScope,
    pub(super) total: f64,
}

impl BucketSums {
    /// The parameters that have a gradient, in path order, and where its sum lies.
    pub(super) fn with_gradients(
        &self,
    ) -> impl Iterator<Item = (usize, &Trainable, &BucketStorage, &Range<usize>)> {
        let parameters = self.model_state.parameters().iter().enumerate();
        parameters.filter_map(|(index, parameter)| {
            let (sums, range) = self.place(index)?;
            Some((index, parameter, sums, range))
        })
    }

    /// Returns `true` if some parameter has a gradient on some rank.
    pub(super) fn some_present(&self) -> bool {
        let records = self.bucket_set.iter().flat_map(|set| &set.parameters);
        records.into_iter().any(|record| record.present)
    }

    pub(super) fn bucket_count(&self) -> usize {
        self.bucket_set.as_ref().map_or(0, |set| set.buckets.len())
    }

    /// Frees the copies of earlier sums: no micro-step is undone any more.
    pub(super) fn drop_undo(&mut self) {
        if let Some(bucket_set) = &mut self.bucket_set {
            let buckets = bucket_set.buckets.iter_mut();
            buckets.for_each(|bucket| bucket.undo = None);
        }
    }

    /// Returns `true` if this rank has its own part of them only.
    pub(super) fn is_sharded(&self) -> bool {
        !self.sum_scope.is_whole()
    }

    pub(super) fn is_on_device(&self) -> bool {
        self.bucket_set
            .as_ref()
            .is_some_and(|bucket_set| bucket_set.is_on_device())
    }

    pub(super) fn move_to_host(&mut self, group: &ProcessGroup) {
        if let Some(bucket_set) = &mut self.bucket_set {
            bucket_set.move_to_host(group);
        }
    }

    /// Returns the elements of a parameter that this rank has the sums of.
    fn own(&self, index: usize) -> Range<usize> {
        let shape = &self.model_state.parameters()[index].shape;
        self.sum_scope.of_parameter(index, shape.iter().product())
    }

    /// Returns for each parameter the sum of `|x|^order` of its elements, or the largest magnitude if the order is
    /// infinite; 0 for a parameter that has no gradient, or is not asked for. If sums are sharded, each rank adds its
    /// own blocks up, and all ranks call it. A device adds up in its own order and type.
    #[track_caller]
    pub(super) fn powers(&self, order: f64, asked: impl Fn(usize) -> bool) -> Result<Vec<f64>> {
        let mut blocks = Vec::new();
        let mut places = Vec::new();
        let mut powers = vec![0.0; self.model_state.parameters().len()];
        let mut on_device = (Vec::new(), Vec::new());
        for (at, parameter, store, range) in self.with_gradients().filter(|(at, ..)| asked(*at)) {
            let buffer = match store {
                BucketStorage::Host(buffer) => buffer,
                BucketStorage::Device(flat) => {
                    if !range.is_empty() {
                        let values = flat.tensor().slice(range.clone());
                        on_device.0.push(at);
                        on_device.1.push(values);
                    }
                    continue;
                }
            };
            let own = self.own(at);
            // The first element of its own, and the number of all of them.
            let (first, elements) = match &parameter.piece {
                Some(piece) => (piece.range().start, piece.partition.elements()),
                None => (own.start, range.len()),
            };
            let (start, count) = (blocks.len(), elements.div_ceil(BLOCK));
            if !own.is_empty() && !self.is_of_another(parameter) {
                blocks.resize(start + first.div_ceil(BLOCK), 0.0);
                let own = range.start + own.start..range.start + own.end;
                bucket_storage::powers(buffer, &own, self.divisor, order, |power| {
                    blocks.push(power)
                });
            }
            blocks.resize(start + count, 0.0);
            places.push((at, start..start + count));
        }
        if let Some(group) = self.sum_scope.group() {
            // Those of others are 0 here, which changes no bit.
            let op = match order.is_infinite() {
                true => ReduceOp::Max,
                false => ReduceOp::Sum,
            };
            let measuring = group.for_purpose("the norm of gradients");
            measuring.all_reduce(&mut blocks, op)?;
        }
        let (numbers, values) = on_device;
        let found = device_bucket::powers(values, self.divisor, order);
        for (at, power) in numbers.into_iter().zip(found) {
            powers[at] = power;
        }
        for (at, range) in places {
            let blocks = blocks[range].iter().copied();
            powers[at] = bucket_storage::joined(blocks, self.divisor, order);
        }
        Ok(powers)
    }

    /// Returns `true` if all ranks have the whole sum of a parameter and another rank counts it in the norm.
    fn is_of_another(&self, parameter: &Trainable) -> bool {
        match &self.sum_scope {
            SumScope::Pieces { group } => parameter.piece.is_none() && group.rank() != 0,
            SumScope::Whole | SumScope::Own { .. } => false,
        }
    }

    /// Shows the gradients, in path order, and leaves the sums as they are.
    pub(super) fn read_each(&self, factors: &[f64], mut read: impl FnMut(&Trainable, TensorData)) {
        for (index, parameter, store, range) in self.with_gradients() {
            let factor = factor(factors, index);
            let (float, shape) = (parameter.float, &parameter.shape);
            let data = match store {
                BucketStorage::Host(buffer) => {
                    bucket_storage::read(buffer, range, float, shape, self.divisor, factor)
                }
                BucketStorage::Device(_) if range.is_empty() => continue,
                BucketStorage::Device(flat) => {
                    let mean = divided(flat.tensor().slice(range.clone()), self.divisor);
                    multiplied(mean, factor).cast(float.dtype()).into_data()
                }
            };
            read(parameter, data);
        }
    }

    /// Aborts the group if other ranks wait for this one: no step takes place.
    pub(super) fn give_up(&self, error: &Error) {
        let waiting = self.sum_scope.group();
        if let Some(group) = waiting.or(self.norm_broadcast_group.as_ref()) {
            group.abort(format!(
                "it could not take part in what all ranks do with gradients: {error}"
            ));
        }
    }

    /// Gives this rank the sums of all. All ranks call it.
    #[track_caller]
    pub(super) fn make_whole(&mut self) -> Result<()> {
        let (SumScope::Own { cuts, group }, Some(bucket_set)) =
            (&self.sum_scope, &mut self.bucket_set)
        else {
            return Ok(());
        };
        let group = group.for_purpose("the gradients of all ranks");
        let layout = bucket_set.layout.clone();
        let mut parts = vec![Vec::new(); group.world_size()];
        for (rank, parts) in parts.iter_mut().enumerate() {
            for bucket in 0..layout.len() {
                let width = layout.width(bucket);
                let ranges = cuts.buckets[bucket].of(rank).iter();
                parts.extend(ranges.map(|range| BufferSlice {
                    buffer: bucket,
                    bytes: range.start * width..range.end * width,
                }));
            }
        }
        let mut buffers = bucket_set.host_sums_mut();
        let mut whole: Vec<Vec<u8>> = buffers
            .iter()
            .map(|buffer| vec![0; buffer.bytes().len()])
            .collect();
        group.all_gather_parts(&mut buffers, &parts, |rank, number, bytes| {
            let BufferSlice { buffer, bytes: at } = &parts[rank][number];
            whole[*buffer][at.clone()].copy_from_slice(bytes);
        })?;
        for (buffer, whole) in buffers.into_iter().zip(whole) {
            buffer.bytes_mut().copy_from_slice(&whole);
        }
        self.sum_scope = SumScope::Whole;
        Ok(())
    }

    /// Returns the place of a parameter's sum, if it has a gradient.
    pub(super) fn place(&self, index: usize) -> Option<(&BucketStorage, &Range<usize>)> {
        let bucket_set = self.bucket_set.as_ref()?;
        let place = bucket_set.layout.place(index);
        let sums = bucket_set.buckets[place.bucket].sums()?;
        bucket_set.parameters[index]
            .present
            .then_some((sums, &place.range))
    }

    pub(super) fn place_mut(&mut self, index: usize) -> Option<(&mut BucketStorage, Range<usize>)> {
        let bucket_set = self.bucket_set.as_mut()?;
        if !bucket_set.parameters[index].present {
            return None;
        }
        let BucketRange { bucket, range } = bucket_set.layout.place(index).clone();
        Some((bucket_set.buckets[bucket].sums_mut()?, range))
    }

    /// Changes every element of the average.
    pub(super) fn change(&mut self, change: MeanChange<'_>) {
        let divisor = self.divisor;
        if self.is_on_device() {
            self.change_on_device(change);
            return;
        }
        for index in 0..self.model_state.parameters().len() {
            let own = self.own(index);
            if let Some((BucketStorage::Host(sums), place)) = self.place_mut(index) {
                let own = place.start + own.start..place.start + own.end;
                bucket_storage::change(sums, &own, |value| change.of(index, value / divisor));
            }
        }
        self.divisor = 1.0;
    }

    /// Returns the chosen sums, on their device: a whole bucket in one tensor if all of it is chosen.
    pub(super) fn chosen_on_device(&self, chosen: &[bool]) -> Vec<Tensor<1>> {
        let Some(bucket_set) = self.bucket_set.as_ref() else {
            return Vec::new();
        };
        let mut found = Vec::new();
        for bucket in 0..bucket_set.layout.len() {
            let Some(BucketStorage::Device(flat)) = bucket_set.buckets[bucket].sums() else {
                continue;
            };
            let members = bucket_set.layout.members(bucket);
            if members.iter().all(|&at| chosen[at]) {
                found.push(flat.tensor());
                continue;
            }
            let members = members.iter().filter(|&&at| chosen[at]);
            let ranges = members.map(|&at| bucket_set.layout.place(at).range.clone());
            let ranges = ranges.filter(|range| !range.is_empty());
            found.extend(ranges.map(|range| flat.tensor().slice(range)));
        }
        found
    }

    pub(super) fn scale_on_device(&mut self, by: &Tensor<1>, chosen: &[bool]) {
        let Some(bucket_set) = &mut self.bucket_set else {
            return;
        };
        let layout = bucket_set.layout.clone();
        for (bucket, flat) in bucket_set.device_sums_mut() {
            let members = layout.members(bucket).iter();
            let places = members.map(|&at| (layout.place(at).range.clone(), chosen[at]));
            flat.scale(by, places);
        }
    }

    fn change_on_device(&mut self, change: MeanChange<'_>) {
        let divisor = self.divisor;
        let Some(bucket_set) = &mut self.bucket_set else {
            return;
        };
        let layout = bucket_set.layout.clone();
        for (bucket, flat) in bucket_set.device_sums_mut() {
            let members = layout.members(bucket);
            let ranges = members.iter().map(|&at| layout.place(at).range.clone());
            flat.change(ranges, |number, sums| {
                change.of_tensor(members[number], sums.div_scalar(divisor))
            });
        }
        self.divisor = 1.0;
    }

    /// The gradients of the parameters that are asked for. Elements are multiplied by the factor of their
    /// parameter, if there are any. A bucket on a device is taken out if all of it is asked for.
    pub(super) fn params(
        &mut self,
        device: &Device,
        factors: &[f64],
        asked: impl Fn(ParamId) -> bool,
    ) -> GradientsParams {
        let mut gradients = GradientsParams::new();
        self.params_on_device(factors, &asked, &mut gradients);
        for (index, parameter, store, range) in self.with_gradients() {
            let BucketStorage::Host(buffer) = store else {
                continue;
            };
            if !asked(parameter.id) {
                continue;
            }
            let factor = factor(factors, index);
            let (float, shape) = (parameter.float, &parameter.shape);
            let data = bucket_storage::read(buffer, range, float, shape, self.divisor, factor);
            register(&mut gradients, parameter.id, from_data(data, device));
        }
        gradients
    }

    fn params_on_device(
        &mut self,
        factors: &[f64],
        asked: impl Fn(ParamId) -> bool,
        gradients: &mut GradientsParams,
    ) {
        let (divisor, model_state) = (self.divisor, self.model_state.clone());
        let Some(bucket_set) = &mut self.bucket_set else {
            return;
        };
        let layout = bucket_set.layout.clone();
        for bucket in 0..layout.len() {
            let Some(flat) = bucket_set.buckets[bucket].device_sums_mut() else {
                continue;
            };
            let members = layout.members(bucket).iter();
            let members = members.map(|&index| (index, &model_state.parameters()[index]));
            // Its memory is free again when gradients are made of it, unless somebody may come for the rest.
            let sums = match members.clone().all(|(_, parameter)| asked(parameter.id)) {
                true => flat.take(),
                false => flat.tensor(),
            };
            let mean = divided(sums, divisor);
            for (index, parameter) in members {
                if !bucket_set.parameters[index].present || !asked(parameter.id) {
                    continue;
                }
                let gradient = mean.clone().slice(layout.place(index).range.clone());
                let gradient = multiplied(gradient, factor(factors, index));
                let gradient = gradient.cast(parameter.float.dtype());
                with_rank!(parameter.shape.len(), D => {
                    let mut shape = [1; D];
                    for (to, from) in shape.iter_mut().zip(&parameter.shape) {
                        *to = *from;
                    }
                    gradients.register(parameter.id, gradient.reshape(shape));
                });
            }
        }
    }
}

/// A change of averages.
#[derive(Clone, Copy, Debug)]
pub(super) enum MeanChange<'a> {
    /// Clamps the chosen ones to `-max..=max`.
    Clamp {
        max: f64,
        chosen: &'a [bool],
    },
    Multiply(&'a [f64]),
}

impl MeanChange<'_> {
    fn of(&self, index: usize, value: f64) -> f64 {
        match self {
            Self::Clamp { max, chosen } if chosen[index] => value.clamp(-max, *max),
            Self::Clamp { .. } => value,
            Self::Multiply(factors) => value * factors[index],
        }
    }

    fn of_tensor(&self, index: usize, values: Tensor<1>) -> Tensor<1> {
        match self {
            Self::Clamp { max, chosen } if chosen[index] => values.clamp(-max, *max),
            Self::Clamp { .. } => values,
            Self::Multiply(factors) => multiplied(values, factor(factors, index)),
        }
    }
}

fn divided(sums: Tensor<1>, divisor: f64) -> Tensor<1> {
    match divisor == 1.0 {
        true => sums,
        false => sums.div_scalar(divisor),
    }
}

/// Multiplies values by a factor that [`factor`] returned.
pub(super) fn multiplied(values: Tensor<1>, factor: Option<f64>) -> Tensor<1> {
    match factor {
        Some(factor) => values.mul_scalar(factor),
        None => values,
    }
}

/// Returns the factor of a parameter's elements; `None` if there is none, or it is 1, which would change no bit.
pub(super) fn factor(factors: &[f64], index: usize) -> Option<f64> {
    factors.get(index).copied().filter(|&factor| factor != 1.0)
}

impl Drop for BucketSums {
    fn drop(&mut self) {
        if let Some(bucket_set) = self.bucket_set.take() {
            self.model_state.take_back(bucket_set);
        }
    }
}
