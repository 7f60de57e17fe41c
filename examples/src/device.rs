use core::fmt;

use accelerator::BackendKind;
#[cfg(feature = "wgpu")]
use burn::tensor::DeviceKind;
use burn::tensor::{Device, FloatDType};
use clap::ValueEnum;

use crate::error::{Error, Kind, Result};

/// The kinds of device to choose from, whether compiled in or not.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub enum DeviceName {
    /// The CPU
    Flex,
    /// The CPU, with older and much slower kernels
    #[value(name = "ndarray")]
    NdArray,
    /// A graphics device, through Vulkan, Metal or WebGPU
    Wgpu,
    /// An NVIDIA device
    Cuda,
    /// An AMD device
    Rocm,
    /// A graphics device, through Metal
    Metal,
    /// A graphics device, through Vulkan
    Vulkan,
    /// The CPU, with kernels that are compiled when they are first used
    Cpu,
}

impl DeviceName {
    /// Opens the first device of this kind.
    ///
    /// # Errors
    ///
    /// [`Error::is_device`] if this kind is not compiled in.
    pub fn open(self) -> Result<Device> {
        match self {
            #[cfg(feature = "flex")]
            Self::Flex => Ok(Device::flex()),
            #[cfg(feature = "ndarray")]
            #[allow(deprecated, reason = "who asks for this device gets it")]
            Self::NdArray => Ok(Device::ndarray()),
            #[cfg(feature = "wgpu")]
            Self::Wgpu => Ok(Device::wgpu(DeviceKind::DefaultDevice)),
            #[cfg(feature = "cuda")]
            Self::Cuda => Ok(Device::cuda(0)),
            #[cfg(feature = "rocm")]
            Self::Rocm => Ok(Device::rocm(0)),
            #[cfg(feature = "metal")]
            Self::Metal => Ok(Device::metal(DeviceKind::DefaultDevice)),
            #[cfg(feature = "vulkan")]
            Self::Vulkan => Ok(Device::vulkan(DeviceKind::DefaultDevice)),
            #[cfg(feature = "cpu")]
            Self::Cpu => Ok(Device::cpu()),
            #[allow(
                unreachable_patterns,
                reason = "reached by the kinds that are left out"
            )]
            other => Err(Error::new(
                Kind::Device,
                format!(
                    "the device `{other}` is not compiled in; build with `--features {other}`, \
                     or choose another device"
                ),
            )),
        }
    }
}

impl From<DeviceName> for BackendKind {
    fn from(name: DeviceName) -> Self {
        match name {
            DeviceName::Flex => Self::Flex,
            DeviceName::NdArray => Self::NdArray,
            DeviceName::Wgpu => Self::Wgpu,
            DeviceName::Cuda => Self::Cuda,
            DeviceName::Rocm => Self::Rocm,
            DeviceName::Metal => Self::Metal,
            DeviceName::Vulkan => Self::Vulkan,
            DeviceName::Cpu => Self::Cpu,
        }
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        BackendKind::from(*self).fmt(f)
    }
}

/// Makes `dtype` the default of the device; Burn allows this only before the first tensor.
pub(crate) fn configure(device: &mut Device, dtype: FloatDType) -> Result<()> {
    match device.configure(dtype) {
        Ok(()) => Ok(()),
        Err(_) if device.settings().float_dtype == dtype => Ok(()),
        Err(error) => Err(Error::with_source(
            Kind::Device,
            format!(
                "the device {device:?} cannot compute in {dtype:?}; it computes in {:?}: choose \
                 that, or another device",
                device.settings().float_dtype
            ),
            error,
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_command_line() {
        for name in DeviceName::value_variants() {
            assert_eq!(
                DeviceName::from_str(&name.to_string(), false).as_ref(),
                Ok(name)
            );
        }
    }

    #[test]
    #[cfg(not(feature = "cuda"))]
    fn a_device_that_is_not_compiled_in_says_how_to_get_it() {
        let error = DeviceName::Cuda.open().unwrap_err();
        assert!(error.is_device());
        assert!(error.to_string().contains("--features cuda"), "{error}");
    }
}
