use core::ops::Range;

use accelerator_collective::{Buffer, DType, ProcessGroup};
use burn::tensor::TensorData;

use super::overlap::Order;
use super::values::Values;
use crate::model::{Float, Trainable};

/// What is worth an all-reduce of its own, in bytes: the most that the first bucket holds, so that
/// communication starts soon, and what a bucket holds at least before it is sent without one that is
/// ready later.
const WORTHWHILE: usize = 1 << 20;

/// Where each parameter's gradient lies.
#[derive(Debug)]
pub(super) struct Buckets {
    buckets: Vec<Bucket>,
    places: Vec<Place>,
}

#[derive(Debug)]
struct Bucket {
    dtype: DType,
    /// In elements.
    length: usize,
    /// The parameters whose gradients lie there, one after the other.
    members: Vec<usize>,
}

#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) bucket: usize,
    pub(super) range: Range<usize>,
}

impl Buckets {
    /// Lays `parameters` out in that order, a bucket a dtype, each at most `size` bytes unless one
    /// parameter alone is larger. A bucket that is worth an operation does not wait for a gradient
    /// that is ready later. A bucket comes before those that are full later.
    pub(super) fn new(parameters: &[Trainable], order: &Order, size: usize) -> Self {
        let mut buckets: Vec<Bucket> = Vec::new();
        // The bucket that is being filled, for each dtype.
        let mut open = [None; 2];
        for (position, &index) in order.parameters.iter().enumerate() {
            if position == order.early {
                open = [None; 2];
            } else if order.is_later(position) {
                let size = |&bucket: &usize| {
                    let Bucket { dtype, length, .. } = &buckets[bucket];
                    length * width(*dtype)
                };
                open = open.map(|open| open.filter(|bucket| size(bucket) < WORTHWHILE));
            }
            let parameter = &parameters[index];
            let dtype = dtype_of(parameter.float);
            let length: usize = parameter.shape.iter().product();
            let open = &mut open[usize::from(dtype == DType::F64)];
            let limit = |bucket| {
                if bucket == 0 {
                    size.min(WORTHWHILE)
                } else {
                    size
                }
            };
            let bucket = open
                .filter(|&bucket: &usize| {
                    (buckets[bucket].length + length) * width(dtype) <= limit(bucket)
                })
                .unwrap_or_else(|| {
                    buckets.push(Bucket {
                        dtype,
                        length: 0,
                        members: Vec::new(),
                    });
                    buckets.len() - 1
                });
            *open = Some(bucket);
            buckets[bucket].length += length;
            buckets[bucket].members.push(index);
        }
        let mut position = vec![0; parameters.len()];
        for (at, &index) in order.parameters.iter().enumerate() {
            position[index] = at;
        }
        buckets.sort_by_key(|bucket| bucket.members.last().map(|&last| position[last]));
        let nowhere = Place {
            bucket: 0,
            range: 0..0,
        };
        let mut places = vec![nowhere; parameters.len()];
        for (number, bucket) in buckets.iter().enumerate() {
            let mut start = 0;
            for &index in &bucket.members {
                let end = start + parameters[index].shape.iter().product::<usize>();
                places[index] = Place {
                    bucket: number,
                    range: start..end,
                };
                start = end;
            }
        }
        Self { buckets, places }
    }

    pub(super) fn len(&self) -> usize {
        self.buckets.len()
    }

    pub(super) fn place(&self, parameter: usize) -> &Place {
        &self.places[parameter]
    }

    /// The parameters of a bucket, by number.
    pub(super) fn members(&self, bucket: usize) -> &[usize] {
        &self.buckets[bucket].members
    }

    /// The size of a bucket.
    pub(super) fn bytes(&self, bucket: usize) -> usize {
        let (dtype, length) = (self.buckets[bucket].dtype, self.buckets[bucket].length);
        length * width(dtype)
    }

    /// The bytes of an element of a bucket.
    pub(super) fn width(&self, bucket: usize) -> usize {
        width(self.buckets[bucket].dtype)
    }

    /// New buffers, one a bucket.
    pub(super) fn allocate(&self, group: &ProcessGroup) -> Vec<Buffer> {
        (0..self.len())
            .map(|bucket| self.allocate_one(group, bucket))
            .collect()
    }

    /// A new buffer for that bucket.
    pub(super) fn allocate_one(&self, group: &ProcessGroup, bucket: usize) -> Buffer {
        let Bucket { dtype, length, .. } = &self.buckets[bucket];
        group.buffer(*dtype, *length)
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
    gradient: Values<'_>,
    weight: f64,
    entry: Entry,
) {
    let single = weight as f32;
    match gradient {
        Values::F64(from) => put(f64s_mut(buffer, range), from, weight, entry, |v| v),
        Values::F32(from) => put(f32s_mut(buffer, range), from, single, entry, |v| v),
        Values::F16(from) => put(
            f32s_mut(buffer, range),
            from,
            single,
            entry,
            half::f16::to_f32,
        ),
        Values::Bf16(from) => put(
            f32s_mut(buffer, range),
            from,
            single,
            entry,
            half::bf16::to_f32,
        ),
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
    float: Float,
    shape: &[usize],
    total: f64,
    factor: Option<f64>,
) -> TensorData {
    let shape = shape.to_vec();
    match float {
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

/// The sum of `|value / total|^order`, in f64; the largest of them, where the order is infinite. Powers are
/// those of one library, whatever the system has: ranks on other hosts get the same bits.
pub(super) fn power(buffer: &Buffer, range: &Range<usize>, total: f64, order: f64) -> f64 {
    match buffer.dtype() {
        DType::F64 => sum_of_powers(f64s(buffer, range), |v| v / total, order),
        _ => {
            let total = total as f32;
            sum_of_powers(f32s(buffer, range), |v| f64::from(v / total), order)
        }
    }
}

/// The same of a gradient as Burn made it.
pub(super) fn power_of(gradient: Values<'_>, order: f64) -> f64 {
    match gradient {
        Values::F64(values) => sum_of_powers(values, |v| v, order),
        Values::F32(values) => sum_of_powers(values, f64::from, order),
        Values::F16(values) => sum_of_powers(values, half::f16::to_f64, order),
        Values::Bf16(values) => sum_of_powers(values, half::bf16::to_f64, order),
    }
}

/// Replaces every value of a place.
pub(super) fn change(buffer: &mut Buffer, range: &Range<usize>, new: impl Fn(f64) -> f64) {
    match buffer.dtype() {
        DType::F64 => f64s_mut(buffer, range)
            .iter_mut()
            .for_each(|value| *value = new(*value)),
        _ => f32s_mut(buffer, range)
            .iter_mut()
            .for_each(|value| *value = new(f64::from(*value)) as f32),
    }
}

/// The larger of two magnitudes, or what is no number.
pub(super) fn larger(one: f64, other: f64) -> f64 {
    if other > one || other.is_nan() {
        other
    } else {
        one
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

fn sum_of_powers<T: Copy>(values: &[T], widen: impl Fn(T) -> f64, order: f64) -> f64 {
    if order == 2.0 {
        return sum_of_squares(values, widen);
    }
    let magnitudes = values.iter().map(|&value| widen(value).abs());
    if order.is_infinite() {
        magnitudes.fold(0.0, larger)
    } else {
        magnitudes
            .map(|magnitude| libm::pow(magnitude, order))
            .sum()
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
        let buckets = Buckets::new(&parameters, &Order::reversed(3), 25 << 20);
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
        let buckets = Buckets::new(&parameters, &Order::reversed(1), 1024);
        let mut buffer = buckets.allocate(&group).remove(0);
        let gradient = TensorData::new(vec![half::f16::from_f32(2000.0); 4], [4]);
        let range = &buckets.place(0).range;
        for entry in [Entry::Replace, Entry::Add] {
            write(&mut buffer, range, Values::of(&gradient), 64.0, entry);
        }
        let back = read(&buffer, range, Float::F16, &[4], 128.0, None);
        assert_eq!(back, gradient);
        assert_eq!(power(&buffer, range, 128.0, 2.0), 4.0 * 2000.0 * 2000.0);
        assert_eq!(power(&buffer, range, 128.0, f64::INFINITY), 2000.0);
    }

    #[test]
    fn what_is_late_shares_no_bucket_with_what_is_early() {
        let mut parameters = parameters(&[10, 10, 10, 10], Float::F32);
        parameters[2].float = Float::F64;
        let order = Order::of(&[None, Some(4), Some(2), Some(3)]);
        let buckets = Buckets::new(&parameters, &order, 1024);
        assert_eq!(buckets.len(), 3);
        assert_eq!(buckets.members(0), [1, 3]);
        assert_eq!(buckets.members(1), [2]);
        assert_eq!(buckets.members(2), [0]);
    }

    #[test]
    fn a_bucket_that_is_worth_it_does_not_wait_for_what_is_ready_later() {
        // A classifier: a small last layer, a large one, and two convolutions.
        let parameters = parameters(&[10_000, 20_000, 1 << 20, 1000, 500], Float::F32);
        let order = Order::of(&[Some(1), Some(2), Some(7), Some(8), Some(7)]);
        let buckets = Buckets::new(&parameters, &order, 25 << 20);
        assert_eq!(buckets.len(), 3);
        assert_eq!(buckets.members(0), [3, 4]);
        assert_eq!(buckets.members(1), [2]);
        assert_eq!(buckets.members(2), [1, 0]);
    }

    proptest! {
        #[test]
        fn places_do_not_overlap_and_fill_the_buckets(
            sizes in proptest::collection::vec(0_usize..5000, 1..40),
            ready in proptest::collection::vec(proptest::option::of(0_usize..9), 40),
            limit in 1024_usize..40_000,
        ) {
            let mut parameters = parameters(&sizes, Float::F32);
            for parameter in parameters.iter_mut().step_by(3) {
                parameter.float = Float::F64;
            }
            let order = Order::of(&ready[..sizes.len()]);
            let buckets = Buckets::new(&parameters, &order, limit);
            let mut covered = vec![0; buckets.len()];
            for &index in &order.parameters {
                let place = buckets.place(index);
                prop_assert_eq!(place.range.len(), sizes[index]);
                prop_assert_eq!(place.range.start, covered[place.bucket]);
                prop_assert!(buckets.members(place.bucket).contains(&index));
                covered[place.bucket] = place.range.end;
                let alone = place.range.start == 0;
                let bytes = place.range.end * width(dtype_of(parameters[index].float));
                prop_assert!(alone || bytes <= limit);
            }
            let lengths: Vec<_> = buckets.buckets.iter().map(|bucket| bucket.length).collect();
            prop_assert_eq!(covered, lengths);
            for bucket in &buckets.buckets {
                let first = ready[bucket.members[0]].is_some();
                prop_assert!(bucket.members.iter().all(|&at| ready[at].is_some() == first));
            }
        }
    }
}
