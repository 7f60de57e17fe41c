//! The memory of a bucket's sums.

use core::fmt;
use core::ops::Range;

use accelerator_collective::{Buffer, DType, Element, ProcessGroup};
use burn::backend::DispatchTensor;
use burn::tensor::{Device, Tensor, TensorData};

use super::bucket::{self, WriteMode};
use super::device_bucket::DeviceBucket;
use super::element_values::{ElementValues, with_values};

/// The place of a model's sums.
#[derive(Clone, Debug, Default)]
pub(crate) enum Placement {
    /// Host memory, where the CPU and other processes reduce them.
    #[default]
    Host,
    /// The device of the gradients.
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

/// The sums of a bucket.
#[derive(Debug)]
#[allow(
    clippy::large_enum_variant,
    reason = "there is one a bucket; tensors of some devices are large"
)]
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
                    bucket::write(buffer, range, values, weight, mode);
                });
            }
            Self::Device(flat) => {
                let members = members.map(|member| (member.range, member.gradient));
                flat.add(members, weight);
            }
        }
    }

    /// Zeroes a range that was not written.
    pub(super) fn clear(&mut self, range: &Range<usize>) {
        match self {
            Self::Host(buffer) => bucket::clear(buffer, range),
            // On a device, an unwritten range is 0.
            Self::Device(_) => {}
        }
    }

    /// Clears it for the next window.
    pub(super) fn reopen(self) -> Self {
        match self {
            Self::Host(buffer) => Self::Host(buffer),
            Self::Device(flat) => Self::Device(flat.blank()),
        }
    }

    /// The same sums in host memory.
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
        bucket::write(&mut buffer, &(0..length), values, 1.0, WriteMode::Replace);
        Self::Host(buffer)
    }

    /// The same sums on a device.
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

/// A copy of a buffer on a device.
pub(super) fn uploaded(buffer: &Buffer, device: &Device) -> Tensor<1> {
    fn data<E: Element + burn::tensor::Element>(buffer: &Buffer) -> Option<TensorData> {
        let values = buffer.as_slice::<E>().ok()?.to_vec();
        Some(TensorData::new(values, [buffer.len()]))
    }
    let data = match buffer.dtype() {
        DType::F64 => data::<f64>(buffer),
        DType::BF16 => data::<half::bf16>(buffer),
        _ => data::<f32>(buffer),
    };
    #[expect(clippy::expect_used, reason = "gradients travel in these types alone")]
    let data = data.expect("a buffer of floats");
    let dtype = data.dtype();
    Tensor::from_data(data, (device, dtype))
}
