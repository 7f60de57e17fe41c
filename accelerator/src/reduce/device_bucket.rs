//! Sums of a bucket that stay on the device of the gradients.

use core::fmt;
use core::ops::Range;

use accelerator_collective::DType;
use burn::backend::DispatchTensor;
use burn::tensor::{DType as TensorDType, Device, Tensor, TensorData, Transaction};

/// A bucket in one tensor. Nothing of it is read here: what it is asked for is queued on the device.
#[derive(Clone)]
pub(super) struct DeviceBucket {
    device: Device,
    dtype: TensorDType,
    length: usize,
    /// `None` if all of it is 0.
    sums: Option<Tensor<1>>,
}

impl DeviceBucket {
    /// Creates a bucket of zeros, of which there is nothing on the device yet.
    pub(super) fn new(dtype: DType, length: usize, device: &Device) -> Self {
        let dtype = match dtype {
            DType::F64 => TensorDType::F64,
            _ => TensorDType::F32,
        };
        Self {
            device: device.clone(),
            dtype,
            length,
            sums: None,
        }
    }

    /// Returns a bucket with those sums in place of its own.
    pub(super) fn with(&self, sums: Tensor<1>) -> Self {
        Self {
            sums: Some(sums.cast(self.dtype)),
            ..self.clone()
        }
    }

    pub(super) fn len(&self) -> usize {
        self.length
    }

    pub(super) fn dtype(&self) -> DType {
        match self.dtype {
            TensorDType::F64 => DType::F64,
            _ => DType::F32,
        }
    }

    /// The same place with nothing in it.
    pub(super) fn blank(&self) -> Self {
        Self {
            sums: None,
            ..self.clone()
        }
    }

    pub(super) fn take(&mut self) -> Tensor<1> {
        self.sums.take().unwrap_or_else(|| self.zeros(self.length))
    }

    pub(super) fn tensor(&self) -> Tensor<1> {
        let sums = self.sums.clone();
        sums.unwrap_or_else(|| self.zeros(self.length))
    }

    /// Adds `weight · gradient` to those places, which lie one behind the other and fill the bucket. Where
    /// there is no gradient, nothing changes.
    pub(super) fn add<'a>(
        &mut self,
        gradients: impl Iterator<Item = (&'a Range<usize>, Option<&'a DispatchTensor>)>,
        weight: f64,
    ) {
        let mut some = false;
        let mut pieces = Vec::new();
        // What lies between two gradients is zeros of one piece.
        let mut reached = 0;
        let mut end = 0;
        for (range, gradient) in gradients {
            end = range.end;
            if let Some(gradient) = gradient
                && !range.is_empty()
            {
                if range.start > reached {
                    pieces.push(self.zeros(range.start - reached));
                }
                let gradient = Tensor::<1>::from_dispatch(gradient.clone());
                pieces.push(gradient.reshape([range.len()]).cast(self.dtype));
                reached = range.end;
                some = true;
            }
        }
        if !some {
            return;
        }
        if end > reached {
            pieces.push(self.zeros(end - reached));
        }
        let weighed = Tensor::cat(pieces, 0).mul_scalar(weight);
        self.sums = Some(match self.sums.take() {
            Some(sums) => sums.add(weighed),
            None => weighed,
        });
    }

    /// Changes the elements of some places, one after the other; the others stay as they are.
    pub(super) fn change(
        &mut self,
        ranges: impl Iterator<Item = Range<usize>>,
        new: impl Fn(usize, Tensor<1>) -> Tensor<1>,
    ) {
        let sums = self.take();
        let mut pieces = Vec::new();
        let mut reached = 0;
        for (number, range) in ranges.enumerate() {
            if range.is_empty() {
                continue;
            }
            if range.start > reached {
                pieces.push(sums.clone().slice(reached..range.start));
            }
            pieces.push(new(number, sums.clone().slice(range.clone())));
            reached = range.end;
        }
        if reached < self.length {
            pieces.push(sums.slice(reached..self.length));
        }
        if !pieces.is_empty() {
            self.sums = Some(Tensor::cat(pieces, 0));
        }
    }

    /// Multiplies those places by one number; the others stay as they are.
    pub(super) fn scale(
        &mut self,
        by: &Tensor<1>,
        places: impl Iterator<Item = (Range<usize>, bool)> + Clone,
    ) {
        if self.sums.is_none() {
            return;
        }
        let by = by.clone().cast(self.dtype);
        if places.clone().all(|(_, chosen)| chosen) {
            self.sums = Some(self.take().mul(by));
            return;
        }
        let chosen = places.filter(|(_, chosen)| *chosen);
        self.change(chosen.map(|(range, _)| range), |_, sums| {
            sums.mul(by.clone())
        });
    }

    fn zeros(&self, length: usize) -> Tensor<1> {
        Tensor::zeros([length], (&self.device, self.dtype))
    }
}

impl fmt::Debug for DeviceBucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBucket")
            .field("dtype", &self.dtype)
            .field("length", &self.length)
            .field("is_blank", &self.sums.is_none())
            .finish_non_exhaustive()
    }
}

/// Numbers of one element each, in `f64`, read at once.
pub(super) fn numbers(scalars: Vec<Tensor<1>>) -> Vec<f64> {
    let mut read = Transaction::default();
    let count = scalars.len();
    for scalar in scalars {
        read = read.register(scalar);
    }
    let data = match count {
        0 => Vec::new(),
        _ => read.execute(),
    };
    let first = |data: &TensorData| data.iter::<f64>().next();
    data.iter().filter_map(first).collect()
}

/// The L2 norm of all of them, on their device, in the widest of their types, or `f32` where that is narrower; `None`
/// of no element. Added up by shares of the largest magnitude: squares leave the range of a float long before
/// values do.
pub(super) fn norm(tensors: &[Tensor<1>]) -> Option<Tensor<1>> {
    let is_wide = |values: &Tensor<1>| values.dtype() == TensorDType::F64;
    let dtype = match tensors.iter().any(is_wide) {
        true => TensorDType::F64,
        false => TensorDType::F32,
    };
    let tensors: Vec<_> = tensors
        .iter()
        .filter(|values| values.shape().num_elements() > 0)
        .map(|values| values.clone().cast(dtype).abs())
        .collect();
    if tensors.is_empty() {
        return None;
    }
    let largest = Tensor::cat(tensors.iter().cloned().map(Tensor::max).collect(), 0).max();
    let unit = largest.clone().clamp_min(f32::MIN_POSITIVE);
    let squares = tensors.into_iter().map(|values| {
        let shares = values.div(unit.clone());
        shares.clone().mul(shares).sum()
    });
    let norm = Tensor::cat(squares.collect(), 0).sum().sqrt().mul(unit);
    Some(norm.mask_where(largest.clone().is_inf(), largest))
}

/// Returns the factor that brings values of that norm down to `max` at most, which is a number. A NaN norm is passed
/// on, so that nothing is hidden.
pub(super) fn down_to(max: f64, norm: Tensor<1>) -> Tensor<1> {
    let factor = norm.clone().add_scalar(1e-6).recip().mul_scalar(max);
    let factor = factor.clamp_max(1.0);
    factor.mask_where(norm.clone().is_nan(), norm)
}

/// Returns for each tensor `Σ |value / divisor|^order`, or the largest of them if the order is infinite. Added up on
/// the device, in the type of the values, or `f32` if that is narrower, and read at once.
pub(super) fn powers(tensors: Vec<Tensor<1>>, divisor: f64, order: f64) -> Vec<f64> {
    let magnitudes = |values: &Tensor<1>| {
        let values = match values.dtype() {
            TensorDType::F16 | TensorDType::BF16 => values.clone().cast(TensorDType::F32),
            _ => values.clone(),
        };
        match divisor == 1.0 {
            true => values.abs(),
            false => values.div_scalar(divisor).abs(),
        }
    };
    let flat = |values: &Tensor<1>| values.clone().reshape([values.shape().num_elements()]);
    let tensors: Vec<_> = tensors
        .iter()
        .map(|values| magnitudes(&flat(values)))
        .collect();
    let plainly =
        |power: fn(Tensor<1>) -> Tensor<1>| numbers(tensors.iter().cloned().map(power).collect());
    if order.is_infinite() {
        return plainly(Tensor::max);
    }
    if order == 1.0 {
        return plainly(Tensor::sum);
    }
    if order != 2.0 {
        return scaled(&tensors, order);
    }
    let mut squares = plainly(|values| values.clone().mul(values).sum());
    // Squares leave the range of a float long before values do.
    let is_extreme = |square: f64| !(1e-30..=1e30).contains(&square);
    let doubtful: Vec<_> = (0..squares.len())
        .filter(|&at| is_extreme(squares[at]))
        .collect();
    let again: Vec<_> = doubtful.iter().map(|&at| tensors[at].clone()).collect();
    for (at, square) in doubtful.into_iter().zip(scaled(&again, order)) {
        squares[at] = square;
    }
    squares
}

/// The same by shares of the largest magnitude, whose powers are numbers.
fn scaled(magnitudes: &[Tensor<1>], order: f64) -> Vec<f64> {
    let mut scalars = Vec::with_capacity(2 * magnitudes.len());
    for magnitudes in magnitudes {
        let largest = magnitudes.clone().max();
        let shares = magnitudes.clone().div(largest.clone());
        scalars.push(shares.powf_scalar(order).sum());
        scalars.push(largest);
    }
    let found = numbers(scalars);
    let found = found.chunks_exact(2).map(|pair| match *pair {
        [_, largest] if largest == 0.0 || !largest.is_finite() => largest,
        [sum, largest] => sum * libm::pow(largest, order),
        _ => f64::NAN,
    });
    found.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor<const N: usize>(values: [f32; N]) -> Tensor<1> {
        Tensor::from_floats(values, &Device::default())
    }

    fn values(flat: &DeviceBucket) -> Vec<f32> {
        flat.tensor().into_data().try_to_vec().unwrap()
    }

    #[test]
    fn gradients_are_weighed_and_added_where_they_belong() {
        let mut flat = DeviceBucket::new(DType::F32, 6, &Device::default());
        let (first, last) = (tensor([1.0, 2.0]), tensor([3.0]));
        let dispatch = |tensor: &Tensor<1>| tensor.clone().into_dispatch();
        let (first, last) = (dispatch(&first), dispatch(&last));
        let ranges = [0..2, 2..2, 2..5, 5..6];
        let members = [Some(&first), None, None, Some(&last)];
        flat.add(ranges.iter().zip(members), 2.0);
        assert_eq!(values(&flat), [2.0, 4.0, 0.0, 0.0, 0.0, 6.0]);
        // Where there is none, nothing changes.
        flat.add(ranges.iter().zip([None; 4]), 9.0);
        flat.add(ranges.iter().zip([Some(&first), None, None, None]), 1.0);
        assert_eq!(values(&flat), [3.0, 6.0, 0.0, 0.0, 0.0, 6.0]);
        flat.change([0..2, 2..2, 5..6].into_iter(), |number, values| {
            values.add_scalar(number as f32 + 1.0)
        });
        assert_eq!(values(&flat), [4.0, 7.0, 0.0, 0.0, 0.0, 9.0]);
        let by = tensor([2.0]);
        flat.scale(&by, [(0..2, false), (2..5, true), (5..6, true)].into_iter());
        assert_eq!(values(&flat), [4.0, 7.0, 0.0, 0.0, 0.0, 18.0]);
        flat.scale(&by, [(0..5, true), (5..6, true)].into_iter());
        assert_eq!(values(&flat), [8.0, 14.0, 0.0, 0.0, 0.0, 36.0]);
        assert_eq!(values(&flat.blank()), [0.0; 6]);
    }

    #[test]
    fn a_norm_is_found_where_squares_are_no_floats_and_hides_nothing() {
        let of = |values: [f32; 3]| {
            let tensors = [tensor(values), tensor([]), tensor([4.0 * values[0]])];
            let norm = norm(&tensors).unwrap();
            let factor = numbers(vec![down_to(0.5, norm.clone())])[0];
            (numbers(vec![norm])[0], factor)
        };
        for size in [1.0_f32, 1e30, 1e-30, 0.0] {
            let (found, factor) = of([size, -2.0 * size, 2.0 * size]);
            let expected = 5.0 * f64::from(size);
            assert!(
                (found - expected).abs() <= 1e-6 * expected,
                "{size}: {found}"
            );
            let expected = (0.5 / (expected + 1e-6)).min(1.0);
            assert!(
                (factor - expected).abs() <= 1e-6 * expected,
                "{size}: {factor}"
            );
        }
        let (found, factor) = of([1.0, f32::NAN, 2.0]);
        assert!(found.is_nan() && factor.is_nan(), "{found}, {factor}");
        assert_eq!(of([1.0, f32::NEG_INFINITY, 2.0]), (f64::INFINITY, 0.0));
        assert!(norm(&[]).is_none() && norm(&[tensor([])]).is_none());
    }

    #[test]
    fn powers_are_those_of_the_cpu_also_where_they_leave_the_range_of_a_float() {
        for (element, order) in [
            (3.0_f32, 1.0),
            (3.0, 2.0),
            (1e25, 2.0),
            (1e-25, 2.0),
            (1e-5, 10.0),
            (1e4, 10.0),
            (0.5, 3.0),
            (7.0, f64::INFINITY),
            (0.0, 2.0),
            (0.0, 3.0),
        ] {
            let values = tensor([element, -element, element]);
            let found = powers(vec![values, tensor([4.0])], 2.0, order);
            let power = |value: f32| libm::pow(f64::from((value / 2.0).abs()), order);
            let expected = match order.is_infinite() {
                true => [f64::from(element / 2.0), 2.0],
                false => [3.0 * power(element), power(4.0)],
            };
            for (found, expected) in found.into_iter().zip(expected) {
                let norm = |power: f64| libm::pow(power, 1.0 / order.min(100.0));
                let (found, expected) = (norm(found), norm(expected));
                assert!(
                    (found - expected).abs() <= 1e-5 * expected,
                    "{element}, {order}: {found} for {expected}"
                );
            }
        }
        let odd = powers(
            vec![tensor([f32::NAN, 1.0]), tensor([f32::INFINITY])],
            1.0,
            2.0,
        );
        assert!(odd[0].is_nan() && odd[1].is_infinite(), "{odd:?}");
    }
}
