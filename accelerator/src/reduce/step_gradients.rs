use core::ops::{Div, Mul, Range};
use std::sync::Arc;

use accelerator_collective::internal::BufferSlice;
use accelerator_collective::{Element, ProcessGroup};
use burn::backend::DispatchTensor;
use burn::module::ParamId;
use burn::optim::GradientsParams;
use burn::tensor::{Device, TensorData};

use super::bucket_layout::ShardMap;
use super::bucket_storage::{self, BucketStorage};
use super::bucket_sums::{BucketSums, factor};
use crate::core::error::Result;
use crate::core::tensor::from_data;
use crate::model::Trainable;

/// The averaged gradients of a window that was reduced over several micro-steps or ranks: sums, to be read
/// in parts, or where they lie.
pub(crate) struct GradientSums {
    pub(super) device: Device,
    pub(super) factors: Vec<f64>,
    pub(super) sums: BucketSums,
}

pub(crate) enum StepGradients {
    Sums(GradientSums),
    /// The gradients as Burn made them, of one rank without accumulation.
    Untouched(GradientsParams),
}

/// Sums of elements, where they lie.
pub(crate) struct SumLocation<'a, E> {
    pub(crate) sums: &'a mut [E],
    /// The scale that makes gradients of them.
    pub(crate) scale: MeanScale<E>,
}

/// The conversion of sums to gradients: `sum / total · factor`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MeanScale<E> {
    by: MeanFactor<E>,
    factor: Option<E>,
}

#[derive(Clone, Copy, Debug)]
enum MeanFactor<E> {
    Total(E),
    /// Multiplies by what is one over a power of two, which gives the same bits as to divide.
    Share(E),
}

impl GradientSums {
    /// Returns all parameters of their model, in path order, with or without gradients.
    pub(crate) fn all_parameters(&self) -> &[Trainable] {
        self.sums.model_state.parameters()
    }

    /// Returns the bounds of the sums of their model's next window.
    pub(crate) fn next_bounds(&self) -> Option<Arc<ShardMap>> {
        self.sums.model_state.bounds()
    }

    /// Returns the bounds of these sums, if each rank has only its own part.
    pub(crate) fn bounds(&self) -> Option<&Arc<ShardMap>> {
        self.sums.sum_scope.bounds()
    }

    /// Gives every rank all sums, of this window and those to come. All ranks call it: where it fails on
    /// one, the group fails.
    #[track_caller]
    pub(crate) fn make_whole(&mut self) -> Result<()> {
        if self.bounds().is_some() {
            let outcome = self.sums.make_whole();
            outcome.inspect_err(|error| self.sums.give_up(error))?;
            self.sums.model_state.unshard();
        }
        Ok(())
    }

    pub(crate) fn ranks(&self) -> usize {
        self.sums.ranks
    }

    /// Returns `true` if each rank can get only its own part of the next windows.
    pub(crate) fn can_shard(&self) -> bool {
        self.sums.model_state.can_shard()
    }

    /// Gives each rank only the sums within its bounds, from the next window on. All ranks call it between the same
    /// windows.
    pub(crate) fn shard_next(&self, bounds: &Arc<ShardMap>) -> Result<()> {
        self.sums.model_state.shard(bounds)
    }

    /// The parameters that have a gradient, in path order: the same on every rank.
    pub(crate) fn parameters(&self) -> impl Iterator<Item = &Trainable> {
        self.sums
            .with_gradients()
            .map(|(_, parameter, _, _)| parameter)
    }

    /// Returns `true` if they lie on a device, where nothing can be read or written in parts.
    pub(crate) fn are_on_device(&self) -> bool {
        self.sums.is_on_device()
    }

    /// Brings them to memory, if they lie on a device.
    pub(crate) fn move_to_host(&mut self, group: &ProcessGroup) {
        self.sums.move_to_host(group);
    }

    /// Returns those elements of a parameter's gradient, clipped if that was asked for, in that shape; `None` if
    /// it has no gradient, or it is on a device.
    pub(crate) fn part(
        &self,
        id: ParamId,
        range: &Range<usize>,
        shape: &[usize],
    ) -> Option<DispatchTensor> {
        let index = self.sums.model_state.number(id)?;
        let (BucketStorage::Host(buffer), place) = self.sums.place(index)? else {
            return None;
        };
        let range = place.start + range.start..place.start + range.end;
        let factor = factor(&self.factors, index);
        let float = self.sums.model_state.parameters()[index].float;
        let data = bucket_storage::read(buffer, &range, float, shape, self.sums.divisor, factor);
        Some(from_data(data, &self.device))
    }

    /// The sums of those elements of a parameter; `None` if it has no gradient, or sums of another type, or
    /// on a device.
    pub(crate) fn place<E>(
        &mut self,
        id: ParamId,
        range: &Range<usize>,
    ) -> Option<SumLocation<'_, E>>
    where
        E: Element + GradientFloat,
    {
        let index = self.sums.model_state.number(id)?;
        let scale = MeanScale::of(self.sums.divisor, factor(&self.factors, index));
        let (BucketStorage::Host(buffer), place) = self.sums.place_mut(index)? else {
            return None;
        };
        let sums = buffer.as_mut_slice::<E>().ok()?;
        let sums = &mut sums[place.start + range.start..place.start + range.end];
        Some(SumLocation { sums, scale })
    }

    /// Returns a stand-in to register as the gradient of a parameter whose sums are read in place. It is NaN, so that
    /// no reader takes it for a gradient.
    pub(crate) fn stand_in(&self, id: ParamId) -> Option<DispatchTensor> {
        let parameter = &self.sums.model_state.parameters()[self.sums.model_state.number(id)?];
        let shape = vec![1; parameter.shape.len()];
        let data = TensorData::new(vec![f64::NAN], shape).convert_dtype(parameter.float.dtype());
        Some(from_data(data, &self.device))
    }

    /// Writes bytes of new elements of a parameter over their sums.
    pub(crate) fn write(&mut self, id: ParamId, range: &Range<usize>, bytes: &[u8]) {
        let width = bytes.len() / range.len().max(1);
        if let Some(index) = self.sums.model_state.number(id)
            && let Some((BucketStorage::Host(buffer), place)) = self.sums.place_mut(index)
        {
            let start = place.start * buffer.dtype().size() + range.start * width;
            buffer.bytes_mut()[start..start + bytes.len()].copy_from_slice(bytes);
        }
    }

    /// Shows every rank what each has [written](Self::write): the bytes of the part of each
    /// parameter that a rank has, and where they begin in the parameter. It shows everything, or nothing.
    #[track_caller]
    pub(crate) fn exchange(
        &mut self,
        group: &ProcessGroup,
        part: impl Fn(ParamId, usize) -> Range<usize>,
        mut sink: impl FnMut(ParamId, usize, &[u8]),
    ) -> accelerator_collective::Result<()> {
        let Some(bucket_set) = &mut self.sums.bucket_set else {
            return Ok(());
        };
        let ranks = group.world_size();
        let (mut parts, mut targets) = (vec![Vec::new(); ranks], vec![Vec::new(); ranks]);
        for (index, parameter) in self.sums.model_state.parameters().iter().enumerate() {
            if !bucket_set.parameters[index].present {
                continue;
            }
            let place = bucket_set.layout.place(index);
            let start = place.range.start * bucket_set.layout.width(place.bucket);
            let width = parameter.float.width();
            for rank in 0..ranks {
                let range = part(parameter.id, rank);
                if !range.is_empty() {
                    let (from, to) = (range.start * width, range.end * width);
                    parts[rank].push(BufferSlice {
                        buffer: place.bucket,
                        bytes: start + from..start + to,
                    });
                    targets[rank].push((parameter.id, from));
                }
            }
        }
        let mut buffers = bucket_set.host_sums_mut();
        group.all_gather_parts(&mut buffers, &parts, |rank, number, bytes| {
            let (id, start) = targets[rank][number];
            sink(id, start, bytes);
        })
    }

    /// The gradients of the parameters that are asked for, once.
    pub(crate) fn params(&mut self, asked: impl Fn(ParamId) -> bool) -> GradientsParams {
        self.sums.params(&self.device, &self.factors, asked)
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }
}

pub(crate) trait GradientFloat: Copy + Div<Output = Self> + Mul<Output = Self> {
    fn near(value: f64) -> Self;

    /// Returns one over it, if it is a power of two and neither is subnormal.
    fn exact_share(self) -> Option<Self>;
}

macro_rules! real {
    ($($float:ty, $bits:ty, $mantissa:expr);+) => {
        $(
            impl GradientFloat for $float {
                fn near(value: f64) -> Self {
                    value as Self
                }

                fn exact_share(self) -> Option<Self> {
                    let fraction: $bits = self.to_bits() << (<$bits>::BITS - $mantissa);
                    let share = 1.0 / self;
                    (fraction == 0 && self.is_normal() && share.is_normal()).then_some(share)
                }
            }
        )+
    };
}

real!(f32, u32, 23; f64, u64, 52);

impl<E: GradientFloat> MeanScale<E> {
    fn of(total: f64, factor: Option<f64>) -> Self {
        let total = E::near(total);
        Self {
            by: total
                .exact_share()
                .map_or(MeanFactor::Total(total), MeanFactor::Share),
            factor: factor.map(E::near),
        }
    }

    /// Writes gradients of `sums`.
    #[inline(always)]
    pub(crate) fn write(self, sums: &[E], gradients: &mut [E]) {
        let pairs = gradients.iter_mut().zip(sums);
        match (self.by, self.factor) {
            (MeanFactor::Total(total), None) => pairs.for_each(|(g, s)| *g = *s / total),
            (MeanFactor::Total(total), Some(factor)) => {
                pairs.for_each(|(g, s)| *g = *s / total * factor);
            }
            (MeanFactor::Share(share), None) => pairs.for_each(|(g, s)| *g = *s * share),
            (MeanFactor::Share(share), Some(factor)) => {
                pairs.for_each(|(g, s)| *g = *s * share * factor);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn sums_are_divided_to_the_same_bits(
            sums in proptest::collection::vec(any::<f32>(), 1..20),
            total in prop_oneof![
                (-130_i32..130).prop_map(|power| f64::from(power).exp2()),
                0.1..1e6_f64,
            ],
            factor in proptest::option::of(1e-6..1.0_f64),
        ) {
            let mut found = vec![0.0; sums.len()];
            MeanScale::<f32>::of(total, factor).write(&sums, &mut found);
            for (found, sum) in found.iter().zip(sums) {
                let mut expected = sum / total as f32;
                if let Some(factor) = factor {
                    expected *= factor as f32;
                }
                prop_assert!(found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan());
            }
        }
    }
}
