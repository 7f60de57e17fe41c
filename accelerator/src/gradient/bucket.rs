use core::ops::Range;

use accelerator_collective::{Buffer, DType, ProcessGroup};
use burn::tensor::TensorData;

use crate::model::{Float, Trainable};

/// The most that the first bucket holds, in bytes: communication starts as soon as it is full.
const FIRST: usize = 1 << 20;

/// Where each parameter's gradient lies.
#[derive(Debug)]
pub(super) struct Buckets {
    shapes: Vec<(DType, usize)>,
    places: Vec<Place>,
}

#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) bucket: usize,
    pub(super) range: Range<usize>,
}

impl Buckets {
    /// Lays `parameters` out from the last to the first, a bucket a dtype, each at most `size`
    /// bytes unless one parameter alone is larger.
    pub(super) fn new(parameters: &[Trainable], size: usize) -> Self {
        let mut shapes: Vec<(DType, usize)> = Vec::new();
        let mut places = vec![
            Place {
                bucket: 0,
                range: 0..0
            };
            parameters.len()
        ];
        // The bucket that is being filled, for each dtype.
        let mut open = [None; 2];
        for (parameter, place) in parameters.iter().zip(&mut places).rev() {
            let dtype = dtype_of(parameter.float);
            let length: usize = parameter.shape.iter().product();
            let open = &mut open[usize::from(dtype == DType::F64)];
            let limit = |bucket| if bucket == 0 { size.min(FIRST) } else { size };
            let bucket = open
                .filter(|&bucket: &usize| {
                    (shapes[bucket].1 + length) * width(dtype) <= limit(bucket)
                })
                .unwrap_or_else(|| {
                    shapes.push((dtype, 0));
                    shapes.len() - 1
                });
            *open = Some(bucket);
            let start = shapes[bucket].1;
            shapes[bucket].1 += length;
            *place = Place {
                bucket,
                range: start..start + length,
            };
        }
        Self { shapes, places }
    }

    pub(super) fn place(&self, parameter: usize) -> &Place {
        &self.places[parameter]
    }

    /// New buffers, one a bucket.
    pub(super) fn allocate(&self, group: &ProcessGroup) -> Vec<Buffer> {
        self.shapes
            .iter()
            .map(|&(dtype, length)| group.buffer(dtype, length))
            .collect()
    }
}

/// How a gradient enters its place.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Entry {
    /// The first of the window: what lies there is of another one.
    Replace,
    Add,
}

/// Puts `weight · gradient` into a buffer.
pub(super) fn write(
    buffer: &mut Buffer,
    range: &Range<usize>,
    gradient: &TensorData,
    weight: f64,
    entry: Entry,
) {
    use burn::tensor::DType as B;
    match gradient.dtype() {
        B::F64 => {
            put(
                f64s_mut(buffer, range),
                slice::<f64>(gradient),
                weight,
                entry,
                |v| v,
            );
        }
        B::F32 | B::Flex32 => {
            put(
                f32s_mut(buffer, range),
                slice::<f32>(gradient),
                weight as f32,
                entry,
                |v| v,
            );
        }
        B::F16 => put(
            f32s_mut(buffer, range),
            slice::<half::f16>(gradient),
            weight as f32,
            entry,
            half::f16::to_f32,
        ),
        B::BF16 => put(
            f32s_mut(buffer, range),
            slice::<half::bf16>(gradient),
            weight as f32,
            entry,
            half::bf16::to_f32,
        ),
        other => not_a_float(other),
    }
}

/// Zeroes a place that no micro-step wrote to.
pub(super) fn clear(buffer: &mut Buffer, range: &Range<usize>) {
    match buffer.dtype() {
        DType::F64 => f64s_mut(buffer, range).fill(0.0),
        _ => f32s_mut(buffer, range).fill(0.0),
    }
}

/// `value / total · factor` of a place, as the data of a gradient of that type and shape.
pub(super) fn read(
    buffer: &Buffer,
    range: &Range<usize>,
    parameter: &Trainable,
    total: f64,
    factor: Option<f64>,
) -> TensorData {
    let shape = parameter.shape.clone();
    match parameter.float {
        Float::F64 => {
            let values = f64s(buffer, range);
            TensorData::new(scaled(values, total, factor, |v| v), shape)
        }
        Float::F32 => TensorData::new(
            scaled(
                f32s(buffer, range),
                total as f32,
                factor.map(|f| f as f32),
                |v| v,
            ),
            shape,
        ),
        Float::F16 => TensorData::new(
            scaled(
                f32s(buffer, range),
                total as f32,
                factor.map(|f| f as f32),
                half::f16::from_f32,
            ),
            shape,
        ),
        Float::Bf16 => TensorData::new(
            scaled(
                f32s(buffer, range),
                total as f32,
                factor.map(|f| f as f32),
                half::bf16::from_f32,
            ),
            shape,
        ),
    }
}

/// The sum of the squares of `value / total`, in f64.
pub(super) fn squares(buffer: &Buffer, range: &Range<usize>, total: f64) -> f64 {
    match buffer.dtype() {
        DType::F64 => sum_of_squares(f64s(buffer, range), |v| v / total),
        _ => {
            let total = total as f32;
            sum_of_squares(f32s(buffer, range), |v| f64::from(v / total))
        }
    }
}

/// The sum of the squares of a gradient as Burn made it, in f64.
pub(super) fn squares_of(gradient: &TensorData) -> f64 {
    use burn::tensor::DType as B;
    match gradient.dtype() {
        B::F64 => sum_of_squares(slice::<f64>(gradient), |v| v),
        B::F32 | B::Flex32 => sum_of_squares(slice::<f32>(gradient), f64::from),
        B::F16 => sum_of_squares(slice::<half::f16>(gradient), half::f16::to_f64),
        B::BF16 => sum_of_squares(slice::<half::bf16>(gradient), half::bf16::to_f64),
        other => not_a_float(other),
    }
}

fn dtype_of(float: Float) -> DType {
    match float {
        Float::F64 => DType::F64,
        Float::Bf16 | Float::F16 | Float::F32 => DType::F32,
    }
}

fn width(dtype: DType) -> usize {
    if dtype == DType::F64 { 8 } else { 4 }
}

fn put<S: Copy, T>(into: &mut [T], from: &[S], weight: T, entry: Entry, widen: impl Fn(S) -> T)
where
    T: Copy + core::ops::Mul<Output = T> + core::ops::AddAssign,
{
    match entry {
        Entry::Replace => {
            for (into, from) in into.iter_mut().zip(from) {
                *into = widen(*from) * weight;
            }
        }
        Entry::Add => {
            for (into, from) in into.iter_mut().zip(from) {
                *into += widen(*from) * weight;
            }
        }
    }
}

fn scaled<T, R>(values: &[T], total: T, factor: Option<T>, narrow: impl Fn(T) -> R) -> Vec<R>
where
    T: Copy + core::ops::Div<Output = T> + core::ops::Mul<Output = T>,
{
    match factor {
        None => values.iter().map(|&value| narrow(value / total)).collect(),
        Some(factor) => values
            .iter()
            .map(|&value| narrow(value / total * factor))
            .collect(),
    }
}

/// In eight lanes, which the compiler can turn into vector instructions; the order is fixed.
fn sum_of_squares<T: Copy>(values: &[T], widen: impl Fn(T) -> f64) -> f64 {
    let mut lanes = [0.0; 8];
    let chunks = values.chunks_exact(8);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            let value = widen(value);
            *lane += value * value;
        }
    }
    for (lane, &value) in lanes.iter_mut().zip(rest) {
        let value = widen(value);
        *lane += value * value;
    }
    lanes.iter().sum()
}

#[expect(
    clippy::expect_used,
    reason = "the callers match on the data's type first"
)]
fn slice<E: burn::tensor::Element>(data: &TensorData) -> &[E] {
    data.as_slice().expect("data of the type that was matched")
}

#[expect(
    clippy::unreachable,
    reason = "a parameter of another type is not listed as trainable"
)]
fn not_a_float(dtype: burn::tensor::DType) -> ! {
    unreachable!("a gradient of type {dtype:?}")
}

// The `expect`s hold: a place is only read as the type that its bucket was allocated with, which
// the callers match on.
macro_rules! views {
    ($shared:ident, $unique:ident, $type:ty) => {
        fn $shared<'a>(buffer: &'a Buffer, range: &Range<usize>) -> &'a [$type] {
            &buffer.as_slice::<$type>().expect("a bucket of that type")[range.clone()]
        }

        fn $unique<'a>(buffer: &'a mut Buffer, range: &Range<usize>) -> &'a mut [$type] {
            &mut buffer
                .as_mut_slice::<$type>()
                .expect("a bucket of that type")[range.clone()]
        }
    };
}

views!(f32s, f32s_mut, f32);
views!(f64s, f64s_mut, f64);

#[cfg(test)]
mod tests {
    use burn::module::ParamId;
    use proptest::prelude::*;

    use super::*;

    fn parameters(sizes: &[usize], float: Float) -> Vec<Trainable> {
        sizes
            .iter()
            .map(|&size| Trainable {
                id: ParamId::new(),
                path: String::new(),
                shape: vec![size],
                float,
            })
            .collect()
    }

    #[test]
    fn the_first_bucket_is_small_and_holds_the_last_parameters() {
        let parameters = parameters(&[3 << 20, 100_000, 200_000], Float::F32);
        let buckets = Buckets::new(&parameters, 25 << 20);
        assert_eq!(buckets.place(2).bucket, 0);
        assert_eq!(buckets.place(2).range, 0..200_000);
        // 300,000 × 4 bytes would be more than 1 MiB.
        assert_eq!(buckets.place(1).bucket, 1);
        assert_eq!(buckets.place(0).range.start, 100_000);
    }

    #[test]
    fn half_precision_is_summed_in_single() {
        let parameters = parameters(&[4], Float::F16);
        let group = ProcessGroup::single();
        let buckets = Buckets::new(&parameters, 1024);
        let mut buffer = buckets.allocate(&group).remove(0);
        let gradient = TensorData::new(vec![half::f16::from_f32(2000.0); 4], [4]);
        let range = &buckets.place(0).range;
        for entry in [Entry::Replace, Entry::Add] {
            write(&mut buffer, range, &gradient, 64.0, entry);
        }
        let back = read(&buffer, range, &parameters[0], 128.0, None);
        assert_eq!(back, gradient);
        assert_eq!(squares(&buffer, range, 128.0), 4.0 * 2000.0 * 2000.0);
    }

    proptest! {
        #[test]
        fn places_do_not_overlap_and_fill_the_buckets(
            sizes in proptest::collection::vec(0_usize..5000, 1..40),
            limit in 1024_usize..40_000,
        ) {
            let parameters = parameters(&sizes, Float::F32);
            let buckets = Buckets::new(&parameters, limit);
            let mut covered = vec![0; buckets.shapes.len()];
            for index in (0..sizes.len()).rev() {
                let place = buckets.place(index);
                prop_assert_eq!(place.range.len(), sizes[index]);
                prop_assert_eq!(place.range.start, covered[place.bucket]);
                covered[place.bucket] = place.range.end;
                let alone = place.range.start == 0;
                prop_assert!(alone || place.range.end * 4 <= limit);
            }
            let lengths: Vec<_> = buckets.shapes.iter().map(|shape| shape.1).collect();
            prop_assert_eq!(covered, lengths);
        }
    }
}
