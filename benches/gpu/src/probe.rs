//! Describes the device.

use std::error::Error;

use accelerator::prelude::*;
use accelerator_examples::DeviceName;
use burn::tensor::{DType, Device, Distribution, Tensor};
use serde::Serialize;

/// The rows and columns of the matrices to multiply.
const SIDE: usize = 512;

/// The settings of `probe`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// The kind of device
    #[arg(long, value_enum)]
    device: DeviceName,
}

/// The result.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Probe {
    measure: &'static str,
    device: String,
    name: Option<String>,
    /// The compiler that makes machine code of kernels.
    kernel_compiler: Option<String>,
    fusion: bool,
    autotune: bool,
    bf16: bool,
    f16: bool,
    f64: bool,
    /// The largest error of a matrix product in f32, over its largest element: at most 1e-6 if computed in f32, at
    /// least 1e-4 in TF32.
    matmul_relative_error: f64,
}

/// Probes the device.
pub(crate) fn run(args: &Args) -> Result<Probe, Box<dyn Error>> {
    let accelerator = Accelerator::builder()
        .device(BackendKind::from(args.device))
        .build()?;
    let device = accelerator.device().inner();
    let probe = Probe {
        measure: "probe",
        device: args.device.to_string(),
        name: name(&device),
        kernel_compiler: kernel_compiler(args.device),
        fusion: cfg!(any(feature = "cuda-untuned", feature = "wgpu")) && is_gpu(args.device),
        autotune: cfg!(any(feature = "cuda", feature = "wgpu")) && is_gpu(args.device),
        bf16: device.supports_dtype(DType::BF16),
        f16: device.supports_dtype(DType::F16),
        f64: device.supports_dtype(DType::F64),
        matmul_relative_error: matmul_error(&device),
    };
    accelerator.finish()?;
    Ok(probe)
}

fn is_gpu(device: DeviceName) -> bool {
    !matches!(device, DeviceName::Flex | DeviceName::NdArray)
}

#[cfg(any(feature = "cuda-untuned", feature = "wgpu"))]
fn name(device: &Device) -> Option<String> {
    device.identity().map(|identity| identity.name)
}

#[cfg(not(any(feature = "cuda-untuned", feature = "wgpu")))]
fn name(_device: &Device) -> Option<String> {
    None
}

fn kernel_compiler(device: DeviceName) -> Option<String> {
    match device {
        DeviceName::Cuda if cfg!(feature = "nvrtc") => Some("nvrtc".to_owned()),
        DeviceName::Cuda => Some("llvm".to_owned()),
        _ => None,
    }
}

/// Multiplies on the device, and in f64 on the CPU to compare.
fn matmul_error(device: &Device) -> f64 {
    let cpu = Device::flex();
    let draw = || Tensor::<2>::random([SIDE, SIDE], Distribution::Uniform(-1.0, 1.0), &cpu);
    let (left, right) = (draw(), draw());
    let there = |x: &Tensor<2>| Tensor::<2>::from_data(x.to_data(), device);
    let found = there(&left).matmul(there(&right)).into_data();
    let found = Tensor::<2>::from_data(found, &cpu).cast(DType::F64);
    let exact = left.cast(DType::F64).matmul(right.cast(DType::F64));
    let largest = exact.clone().abs().max().into_scalar::<f64>();
    (found - exact).abs().max().into_scalar::<f64>() / largest
}
