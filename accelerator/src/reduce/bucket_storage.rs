//! The memory of a bucket, and the values in it.

use core::fmt;
use core::ops::Range;

use accelerator_collective::{Buffer, DType, Element, ProcessGroup};
use burn::backend::DispatchTensor;
use burn::tensor::{Device, Tensor, TensorData};

use super::device_bucket::DeviceBucket;
use super::element_values::{ElementValues, with_values};
use crate::core::partition::BLOCK;
use crate::model::Float;

/// The place of a model's sums.
#[derive(Clone, Debug, Default)]
pub(crate) enum Placement {
    /// Host memory, where the CPU and other processes reduce them.
    #[default]
    Host,
    Device(Device),
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Host => "in memory",
            Self::Device(_) => "on the device",
        })
    }
}

#[derive(Debug)]
pub(super) enum BucketStorage {
    Host(Buffer),
    Device(DeviceBucket),
}

/// The gradient of one parameter of a bucket, and how it is written.
pub(super) struct MemberGradient<'a> {
    pub(super) range: &'a Range<usize>,
    pub(super) gradient: Option<&'a DispatchTensor>,
    pub(super) mode: WriteMode,
}

impl BucketStorage {
    /// Allocates memory for `length` elements, all 0.
    pub(super) fn new(
        group: &ProcessGroup,
        placement: &Placement,
        dtype: DType,
        length: usize,
    ) -> Self {
        match placement {
            Placement::Host => Self::Host(group.buffer(dtype, length)),
            Placement::Device(device) => Self::Device(DeviceBucket::new(dtype, length, device)),
        }
    }

    /// Adds `weight · gradient` of each parameter. A parameter without a gradient is left as it is.
    pub(super) fn add<'a>(
        &mut self,
        members: impl Iterator<Item = MemberGradient<'a>> + Clone,
        weight: f64,
    ) {
        match self {
            Self::Host(buffer) => {
                let present = members
                    .clone()
                    .enumerate()
                    .filter_map(|(at, member)| Some((at, member.gradient?)));
                let members: Vec<_> = members.collect();
                with_values(present, |at, values| {
                    let MemberGradient { range, mode, .. } = members[at];
                    write(buffer, range, values, weight, mode);
                });
            }
            Self::Device(flat) => {
                let members = members.map(|member| (member.range, member.gradient));
                flat.add(members, weight);
            }
        }
    }

    pub(super) fn clear(&mut self, range: &Range<usize>) {
        match self {
            Self::Host(buffer) => clear(buffer, range),
            // On a device, an unwritten range is 0.
            Self::Device(_) => {}
        }
    }

    /// Prepares the storage for the next window.
    pub(super) fn reopen(self) -> Self {
        match self {
            Self::Host(buffer) => Self::Host(buffer),
            Self::Device(flat) => Self::Device(flat.blank()),
        }
    }

    /// Moves the sums to host memory.
    pub(super) fn into_host(self, group: &ProcessGroup) -> Self {
        let mut flat = match self {
            Self::Host(buffer) => return Self::Host(buffer),
            Self::Device(flat) => flat,
        };
        let length = flat.len();
        let data = flat.take().into_data();
        let values = ElementValues::of(&data);
        let dtype = match values {
            ElementValues::F64(_) => DType::F64,
            _ => DType::F32,
        };
        let mut buffer = group.buffer(dtype, length);
        write(&mut buffer, &(0..length), values, 1.0, WriteMode::Replace);
        Self::Host(buffer)
    }

    /// Moves the sums to a device.
    pub(super) fn into_device(self, device: &Device) -> Self {
        match self {
            Self::Host(buffer) => {
                let flat = DeviceBucket::new(buffer.dtype(), buffer.len(), device);
                Self::Device(flat.with(uploaded(&buffer, device)))
            }
            Self::Device(flat) => Self::Device(flat),
        }
    }
}

/// Copies a buffer to a device.
pub(super) fn uploaded(buffer: &Buffer, device: &Device) -> Tensor<1> {
    fn data<E: Element + burn::tensor::Element>(buffer: &Buffer) -> TensorData {
        TensorData::new(slice::<E>(buffer).to_vec(), [buffer.len()])
    }
    let data = match buffer.dtype() {
        DType::F64 => data::<f64>(buffer),
        DType::BF16 => data::<half::bf16>(buffer),
        _ => data::<f32>(buffer),
    };
    let dtype = data.dtype();
    Tensor::from_data(data, (device, dtype))
}

/// The effect of a gradient on its place.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum WriteMode {
    /// The first gradient of the window; it overwrites the values of an earlier window.
    Replace,
    Add,
}

/// Puts `weight · gradient` into a buffer. One in half precision may be that of the working copy of a parameter in
/// `f64`, and is widened to the type of the buffer.
pub(super) fn write(
    buffer: &mut Buffer,
    range: &Range<usize>,
    gradient: ElementValues<'_>,
    weight: f64,
    entry: WriteMode,
) {
    let single = weight as f32;
    match gradient {
        ElementValues::F64(from) => put(
            &mut slice_mut::<f64>(buffer)[range.clone()],
            from,
            weight,
            entry,
            |v| v,
        ),
        ElementValues::F32(from) => put(
            &mut slice_mut::<f32>(buffer)[range.clone()],
            from,
            single,
            entry,
            |v| v,
        ),
        ElementValues::F16(from) => put_half(buffer, range, from, weight, entry, half::f16::to_f32),
        ElementValues::Bf16(from) => {
            put_half(buffer, range, from, weight, entry, half::bf16::to_f32)
        }
    }
}

/// Zeroes a place that no micro-step wrote to.
pub(super) fn clear(buffer: &mut Buffer, range: &Range<usize>) {
    match buffer.dtype() {
        DType::F64 => slice_mut::<f64>(buffer)[range.clone()].fill(0.0),
        _ => slice_mut::<f32>(buffer)[range.clone()].fill(0.0),
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
    if float == Float::F64 {
        let values = &slice::<f64>(buffer)[range.clone()];
        return TensorData::new(scaled(values, total, factor, |v| v), shape);
    }
    let (values, total) = (&slice::<f32>(buffer)[range.clone()], total as f32);
    let factor = factor.map(|factor| factor as f32);
    match float {
        Float::Bf16 => TensorData::new(scaled(values, total, factor, half::bf16::from_f32), shape),
        Float::F16 => TensorData::new(scaled(values, total, factor, half::f16::from_f32), shape),
        Float::F32 | Float::F64 => TensorData::new(scaled(values, total, factor, |v| v), shape),
    }
}

/// Calls `give` for each block of a range, with the sum of `|value / divisor|^order` in f64, or with the maximum
/// if the order is infinite. For order 2, values are squared undivided. Powers are computed by the same library on
/// every system, so that ranks on different hosts get the same bits.
pub(super) fn powers(
    buffer: &Buffer,
    range: &Range<usize>,
    divisor: f64,
    order: f64,
    mut give: impl FnMut(f64),
) {
    match buffer.dtype() {
        DType::F64 => {
            let divisor = if order == 2.0 { 1.0 } else { divisor };
            let blocks = slice::<f64>(buffer)[range.clone()].chunks(BLOCK);
            blocks.for_each(|block| give(sum_of_powers(block, |v| v / divisor, order)));
        }
        _ => {
            let divisor = if order == 2.0 { 1.0 } else { divisor as f32 };
            let blocks = slice::<f32>(buffer)[range.clone()].chunks(BLOCK);
            blocks.for_each(|block| give(sum_of_powers(block, |v| f64::from(v / divisor), order)));
        }
    }
}

/// Returns the sum of the [powers](powers) of the blocks of a parameter, or their maximum for an infinite order.
pub(super) fn joined(blocks: impl Iterator<Item = f64>, divisor: f64, order: f64) -> f64 {
    if order == 2.0 {
        blocks.sum::<f64>() / (divisor * divisor)
    } else if order.is_infinite() {
        blocks.fold(0.0, larger)
    } else {
        blocks.sum()
    }
}

/// The same of a gradient as Burn made it.
pub(super) fn power_of(gradient: ElementValues<'_>, order: f64) -> f64 {
    match gradient {
        ElementValues::F64(values) => by_blocks(values, |v| v, order),
        ElementValues::F32(values) => by_blocks(values, f64::from, order),
        ElementValues::F16(values) => by_blocks(values, half::f16::to_f64, order),
        ElementValues::Bf16(values) => by_blocks(values, half::bf16::to_f64, order),
    }
}

pub(super) fn change(buffer: &mut Buffer, range: &Range<usize>, new: impl Fn(f64) -> f64) {
    match buffer.dtype() {
        DType::F64 => slice_mut::<f64>(buffer)[range.clone()]
            .iter_mut()
            .for_each(|value| *value = new(*value)),
        _ => slice_mut::<f32>(buffer)[range.clone()]
            .iter_mut()
            .for_each(|value| *value = new(f64::from(*value)) as f32),
    }
}

/// The larger of two magnitudes; NaN if either is NaN.
pub(super) fn larger(one: f64, other: f64) -> f64 {
    if other > one || other.is_nan() {
        other
    } else {
        one
    }
}

fn put<S: Copy, T>(into: &mut [T], from: &[S], weight: T, entry: WriteMode, widen: impl Fn(S) -> T)
where
    T: Copy + core::ops::Mul<Output = T> + core::ops::AddAssign,
{
    match entry {
        WriteMode::Replace => {
            for (into, from) in into.iter_mut().zip(from) {
                *into = widen(*from) * weight;
            }
        }
        WriteMode::Add => {
            for (into, from) in into.iter_mut().zip(from) {
                *into += widen(*from) * weight;
            }
        }
    }
}

fn put_half<S: Copy>(
    buffer: &mut Buffer,
    range: &Range<usize>,
    from: &[S],
    weight: f64,
    entry: WriteMode,
    widen: impl Fn(S) -> f32,
) {
    match buffer.dtype() {
        DType::F64 => put(
            &mut slice_mut::<f64>(buffer)[range.clone()],
            from,
            weight,
            entry,
            |v| f64::from(widen(v)),
        ),
        _ => put(
            &mut slice_mut::<f32>(buffer)[range.clone()],
            from,
            weight as f32,
            entry,
            widen,
        ),
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

fn by_blocks<T: Copy>(values: &[T], widen: impl Fn(T) -> f64 + Copy, order: f64) -> f64 {
    let blocks = values.chunks(BLOCK);
    joined(
        blocks.map(|block| sum_of_powers(block, widen, order)),
        1.0,
        order,
    )
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

/// Sums in eight lanes, which the compiler can turn into vector instructions; the order is fixed.
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

/// Returns the elements of a buffer, which the callers know to be of that type.
#[expect(clippy::expect_used, reason = "the callers match on the buffer's type")]
pub(super) fn slice<T: Element>(buffer: &Buffer) -> &[T] {
    buffer.as_slice().expect("a buffer of that type")
}

/// Returns the elements to be changed, as [`slice`] does.
#[expect(clippy::expect_used, reason = "the callers match on the buffer's type")]
pub(super) fn slice_mut<T: Element>(buffer: &mut Buffer) -> &mut [T] {
    buffer.as_mut_slice().expect("a buffer of that type")
}

#[cfg(test)]
mod tests {
    use accelerator_collective::ProcessGroup;

    use super::*;

    #[test]
    fn half_precision_is_summed_in_single() {
        let mut buffer = ProcessGroup::single().buffer(DType::F32, 6);
        let gradient = TensorData::new(vec![half::f16::from_f32(2000.0); 4], [4]);
        let range = &(1..5);
        for entry in [WriteMode::Replace, WriteMode::Add] {
            write(
                &mut buffer,
                range,
                ElementValues::of(&gradient),
                64.0,
                entry,
            );
        }
        let back = read(&buffer, range, Float::F16, &[4], 128.0, None);
        assert_eq!(back, gradient);
        let power = |order| {
            let mut blocks = Vec::new();
            powers(&buffer, range, 128.0, order, |block| blocks.push(block));
            joined(blocks.into_iter(), 128.0, order)
        };
        assert_eq!(power(2.0), 4.0 * 2000.0 * 2000.0);
        assert_eq!(power(1.0), 4.0 * 2000.0);
        assert_eq!(power(f64::INFINITY), 2000.0);
    }

    #[test]
    fn parts_of_whole_blocks_have_the_powers_of_the_whole() {
        let count = 2 * BLOCK + 100;
        let mut buffer = ProcessGroup::single().buffer(DType::F64, count);
        let values = buffer.as_mut_slice::<f64>().unwrap();
        for (at, value) in values.iter_mut().enumerate() {
            *value = (at as f64).sin();
        }
        for order in [1.0, 2.0, 3.0, f64::INFINITY] {
            let blocks = |range| {
                let mut blocks = Vec::new();
                powers(&buffer, &range, 3.0, order, |block| blocks.push(block));
                blocks
            };
            let whole = blocks(0..count);
            let parts = [blocks(0..BLOCK), blocks(BLOCK..count)].concat();
            assert_eq!((whole.len(), &whole), (3, &parts), "{order}");
        }
    }
}
