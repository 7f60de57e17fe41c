use core::fmt;
use core::str::FromStr;
use std::panic::{AssertUnwindSafe, catch_unwind};

use accelerator_collective::Topology;
#[cfg(feature = "wgpu")]
use burn::tensor::DeviceKind;
#[cfg(any(feature = "cuda", feature = "rocm", feature = "wgpu"))]
use burn::tensor::DeviceType;
use burn::tensor::{Device, FloatDType};

use super::error::{self, counted, named, panic_text};
use crate::core::error::{Error, Result};

/// A kind of device that a program can run on.
///
/// The crate's features decide which kinds there are: `flex` (the default), `cpu` and `ndarray` on the CPU; `cuda`,
/// `rocm`, `metal`, `vulkan` and `wgpu` on GPUs. On GPUs other than [`BackendKind::Cuda`], gradients are gathered on the
/// device and reduced [through memory](crate::GradientReduction::Staged).
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum BackendKind {
    /// The CPU, through kernels that CubeCL compiles when the program runs.
    Cpu,
    /// NVIDIA devices; each rank of a host takes that of its local rank among those that
    /// `CUDA_VISIBLE_DEVICES` shows (`accel-launch --gpu-ids`). With fewer devices than ranks see
    /// [`Oversubscription`].
    Cuda,
    /// The CPU, through Burn's pure-Rust kernels.
    Flex,
    /// Graphics devices by Metal alone; otherwise as [`BackendKind::Wgpu`].
    Metal,
    /// The CPU, through Burn's older ndarray kernels. They are slower than [`BackendKind::Flex`]
    /// by an order of magnitude and deprecated upstream.
    NdArray,
    /// AMD devices by ROCm; ranks take them as they take those of [`BackendKind::Cuda`].
    Rocm,
    /// Graphics devices by Vulkan alone, for which kernels are compiled to SPIR-V; otherwise as [`BackendKind::Wgpu`].
    Vulkan,
    /// Graphics devices by Vulkan, Metal or DirectX 12. A rank that is alone on its host takes the best.
    ///
    /// Each of several ranks of a host takes the discrete GPU of its local rank; with fewer such GPUs than
    /// ranks, see [`Oversubscription`]. If there is no discrete GPU, or `CUBECL_WGPU_DEFAULT_DEVICE` names
    /// a device, they share one.
    ///
    /// Half [`precision`](crate::precision) is what the device has of it: many have f16, and no bf16.
    Wgpu,
}

impl BackendKind {
    /// Every kind of backend, compiled in or not. A program that names none uses the first that is compiled in.
    pub const ALL: [Self; 8] = [
        Self::Cuda,
        Self::Rocm,
        Self::Metal,
        Self::Vulkan,
        Self::Wgpu,
        Self::Flex,
        Self::Cpu,
        Self::NdArray,
    ];

    /// Returns `true` if this build of the crate has the feature for this kind.
    pub fn is_compiled_in(self) -> bool {
        match self {
            Self::Cpu => cfg!(feature = "cpu"),
            Self::Cuda => cfg!(feature = "cuda"),
            Self::Flex => cfg!(feature = "flex"),
            Self::Metal => cfg!(feature = "metal"),
            Self::NdArray => cfg!(feature = "ndarray"),
            Self::Rocm => cfg!(feature = "rocm"),
            Self::Vulkan => cfg!(feature = "vulkan"),
            Self::Wgpu => cfg!(feature = "wgpu"),
        }
    }

    /// Returns `true` if tensors of this kind are computed by CubeCL, in the order in which a queue takes them.
    pub(crate) fn is_queued(self) -> bool {
        !matches!(self, Self::Flex | Self::NdArray)
    }

    pub(crate) fn preferred() -> Self {
        Self::ALL
            .into_iter()
            .find(|kind| kind.is_compiled_in())
            .unwrap_or(Self::Flex)
    }

    pub(crate) fn open(
        self,
        place: &Topology,
        oversubscription: Oversubscription,
    ) -> Result<Device> {
        if !self.is_compiled_in() {
            let there: Vec<_> = Self::ALL
                .into_iter()
                .filter(|kind| kind.is_compiled_in())
                .map(|kind| format!("`{kind}`"))
                .collect();
            return Err(Error::device(format!(
                "device `{self}` is not compiled in; this program has {}: build it with \
                     `--features {self}`, or choose one of those",
                there.join(", ")
            )));
        }
        // Burn's GPU runtimes panic where the driver or the device is missing.
        let open = AssertUnwindSafe(|| self.open_compiled(place, oversubscription));
        catch_unwind(open).unwrap_or_else(|panic| {
            Err(Error::device(format!(
                    "device `{self}` of local rank {} could not be opened: {}; check its driver, or choose \
                     another device",
                    place.local_rank(),
                    panic_text(&*panic)
                ),
            ))
        })
    }

    #[allow(unused_variables, reason = "a CPU is shared by all ranks")]
    fn open_compiled(self, place: &Topology, oversubscription: Oversubscription) -> Result<Device> {
        match self {
            #[cfg(feature = "cpu")]
            Self::Cpu => opened(Device::cpu()),
            #[cfg(feature = "cuda")]
            Self::Cuda => {
                let index = self.numbered(DeviceType::Cuda, place, oversubscription)?;
                opened(Device::cuda(index))
            }
            #[cfg(feature = "flex")]
            Self::Flex => Ok(Device::flex()),
            #[cfg(feature = "metal")]
            Self::Metal => self.graphics(DeviceType::Metal, Device::metal, place, oversubscription),
            #[cfg(feature = "ndarray")]
            #[allow(
                deprecated,
                reason = "the kind exists to give this device to who asks for it"
            )]
            Self::NdArray => Ok(Device::ndarray()),
            #[cfg(feature = "rocm")]
            Self::Rocm => {
                let index = self.numbered(DeviceType::Rocm, place, oversubscription)?;
                opened(Device::rocm(index))
            }
            #[cfg(feature = "vulkan")]
            Self::Vulkan => {
                self.graphics(DeviceType::Vulkan, Device::vulkan, place, oversubscription)
            }
            #[cfg(feature = "wgpu")]
            Self::Wgpu => self.graphics(DeviceType::Wgpu, Device::wgpu, place, oversubscription),
            #[allow(
                unreachable_patterns,
                reason = "reached by the kinds that are not compiled in"
            )]
            other => Err(Error::device(format!(
                "device `{other}` is not compiled in"
            ))),
        }
    }

    /// The number of the device that the rank takes, of those of a type that a host numbers.
    #[cfg(any(feature = "cuda", feature = "rocm"))]
    fn numbered(
        self,
        devices: DeviceType,
        place: &Topology,
        oversubscription: Oversubscription,
    ) -> Result<usize> {
        let devices = Device::enumerate(devices).into_vec().len();
        take(place, self, devices, oversubscription)
    }

    /// Opens the graphics device that the rank takes, by one API or any.
    #[cfg(feature = "wgpu")]
    fn graphics(
        self,
        devices: DeviceType,
        device: fn(DeviceKind) -> Device,
        place: &Topology,
        oversubscription: Oversubscription,
    ) -> Result<Device> {
        use DeviceKind::{DefaultDevice, DiscreteGpu};

        const NAMED: &str = "CUBECL_WGPU_DEFAULT_DEVICE";

        if place.local_world_size() == 1 || std::env::var_os(NAMED).is_some() {
            return opened(device(DefaultDevice));
        }
        let there = Device::enumerate(devices).into_vec();
        // They are numbered from 0 among themselves.
        let is_there = |index: &usize| there.contains(&device(DiscreteGpu(*index)));
        let kind = match (0..there.len()).take_while(is_there).count() {
            // One that is part of the processor, or computes on it: there is one of it, as there is of a CPU.
            0 => DefaultDevice,
            devices => {
                let index = take(place, self, devices, oversubscription)?;
                match devices {
                    // The same device as that of plain Burn code, which asks for the default.
                    1 => DefaultDevice,
                    _ => DiscreteGpu(index),
                }
            }
        };
        opened(device(kind))
    }
}

impl fmt::Display for BackendKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
            Self::Flex => "flex",
            Self::Metal => "metal",
            Self::NdArray => "ndarray",
            Self::Rocm => "rocm",
            Self::Vulkan => "vulkan",
            Self::Wgpu => "wgpu",
        })
    }
}

impl FromStr for BackendKind {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        named("device", name, &Self::ALL)
    }
}

/// Allows or forbids that a host's ranks share GPUs if there are more ranks than GPUs.
///
/// A shared GPU computes for one rank after the other, and its memory holds the model of each: a program
/// that was meant to have one GPU a rank would be slow and not know why.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum Oversubscription {
    /// More ranks than GPUs are an error.
    #[default]
    Refuse,
    /// Local rank `r` takes GPU `r mod n` of `n`.
    ///
    /// It is also the setting for schedulers that show each rank a GPU of its own, as Slurm's
    /// `--gpus-per-task=1` does: each takes the one that it sees.
    Allow,
}

/// Makes `dtype` the device's default. Burn allows this once per process and before the first
/// tensor.
pub(crate) fn configure(device: &mut Device, dtype: FloatDType) -> Result<()> {
    if dtype == FloatDType::Flex32 {
        return Err(Error::config(
            "the dtype Flex32 has no fixed size in memory and cannot be reduced; choose F32",
        ));
    }
    if !device.supports_dtype(dtype) {
        return Err(Error::device(format!(
            "the device {device:?} does not support {dtype:?}; choose another dtype"
        )));
    }
    match device.configure(dtype) {
        Ok(()) => Ok(()),
        Err(_) if device.settings().float_dtype == dtype => Ok(()),
        Err(error) => Err(Error::config(format!(
            "the dtype {dtype:?} was asked for, but this process already computes in {:?} on \
                 that device: build the Accelerator before the first tensor, and with one dtype \
                 only",
            device.settings().float_dtype
        ))
        .with_source(error)),
    }
}

/// Runs something on the device, so that a missing driver shows here and not in the first step.
#[cfg(feature = "cube")]
fn opened(device: Device) -> Result<Device> {
    device.sync().map_err(|error| {
        Error::device(format!("the device {device:?} does not answer: {error:?}"))
    })?;
    Ok(device)
}

/// Returns the number of the device that the rank takes, of the `devices` of this kind on its host.
///
/// # Errors
///
/// If there is none, or if there are more ranks than devices and they may not share: on every rank
/// of the host alike, so that none of them waits for another.
fn choose(
    place: &Topology,
    kind: BackendKind,
    devices: usize,
    oversubscription: Oversubscription,
) -> Result<usize> {
    let ranks = place.local_world_size();
    let error = |text: String| Err(Error::device(text + advice(kind)));
    let Some(shared) = place.local_rank().checked_rem(devices) else {
        return error(format!(
            "this host has {}, and no {} that they can see: check its driver, or choose another device",
            counted(ranks, "rank"),
            noun(kind)
        ));
    };
    if ranks <= devices || oversubscription == Oversubscription::Allow {
        return Ok(shared);
    }
    error(format!(
        "this host has {} and {}: start at most {devices} here, or let ranks share devices \
         (`accel-launch --oversubscribe-gpus`, ACCEL_OVERSUBSCRIBE_GPUS=1 or `oversubscription`)",
        counted(ranks, "rank"),
        counted(devices, &noun(kind))
    ))
}

/// Does the same as [`choose`], and warns once per host if ranks share devices.
#[cfg_attr(
    not(any(feature = "cuda", feature = "rocm", feature = "wgpu")),
    allow(dead_code, reason = "a CPU is shared by all ranks")
)]
fn take(
    place: &Topology,
    kind: BackendKind,
    devices: usize,
    oversubscription: Oversubscription,
) -> Result<usize> {
    let index = choose(place, kind, devices, oversubscription)?;
    if place.is_local_main()
        && let Some(text) = remark(place.local_world_size(), kind, devices)
    {
        error::tell(&text);
    }
    Ok(index)
}

fn remark(ranks: usize, kind: BackendKind, devices: usize) -> Option<String> {
    (ranks > devices).then(|| {
        format!(
            "{} of this host share {}: local rank r takes number r mod {devices}",
            counted(ranks, "rank"),
            counted(devices, &noun(kind))
        )
    })
}

/// The handling of values that single operations need in backward, set by
/// [`AcceleratorBuilder::operations`](crate::AcceleratorBuilder::operations). As text, the settings have the names
/// that `ACCEL_OPERATIONS` takes.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum Operations {
    /// Keeps them.
    #[default]
    Keep,
    /// Recomputes those of cheap operations, such as activation functions, in backward: Burn's
    /// [`gradient_checkpointing`](Device::gradient_checkpointing).
    Recompute,
}

impl Operations {
    const ALL: [Self; 2] = [Self::Keep, Self::Recompute];

    /// The device with gradients.
    pub(crate) fn on(self, device: Device) -> Device {
        match self {
            Self::Keep => device.autodiff(),
            Self::Recompute => device.autodiff().gradient_checkpointing(),
        }
    }
}

impl fmt::Display for Operations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Keep => "keep",
            Self::Recompute => "recompute",
        })
    }
}

impl FromStr for Operations {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        named("mode of operations", name, &Self::ALL)
    }
}

fn noun(kind: BackendKind) -> String {
    match kind {
        BackendKind::Cuda | BackendKind::Rocm => format!("`{kind}` device"),
        BackendKind::Metal | BackendKind::Vulkan | BackendKind::Wgpu => {
            format!("discrete `{kind}` device")
        }
        BackendKind::Cpu | BackendKind::Flex | BackendKind::NdArray => "device".to_owned(),
    }
}

fn advice(kind: BackendKind) -> &'static str {
    match kind {
        BackendKind::Cuda => {
            "; `accel-launch env` lists the GPUs, and those that CUDA_VISIBLE_DEVICES hides"
        }
        _ => "",
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Returns autodiff devices of each kind and strategy.
    pub(crate) fn devices() -> Vec<Device> {
        let mut devices = Vec::new();
        #[cfg(feature = "flex")]
        devices.push(Device::flex().autodiff());
        #[cfg(feature = "ndarray")]
        #[allow(deprecated, reason = "it is served while it is there")]
        devices.push(Device::ndarray().autodiff());
        let balanced = |device: &Device| device.clone().gradient_checkpointing();
        devices.extend(devices.iter().map(balanced).collect::<Vec<_>>());
        devices
    }

    #[test]
    fn names_round_trip() {
        for kind in BackendKind::ALL {
            assert_eq!(kind.to_string().parse::<BackendKind>().unwrap(), kind);
        }
    }

    #[test]
    fn a_device_that_is_not_compiled_in_says_how_to_get_it() {
        for kind in BackendKind::ALL
            .into_iter()
            .filter(|kind| !kind.is_compiled_in())
        {
            let place = Topology::single();
            let error = kind.open(&place, Oversubscription::Refuse).unwrap_err();
            assert!(error.is_device());
            assert!(
                error.to_string().contains(&format!("--features {kind}")),
                "{error}"
            );
        }
    }

    /// The ranks of a host that is the second of two.
    fn host(ranks: usize) -> impl Iterator<Item = Topology> {
        let of = move |rank| Topology::new(ranks + rank, 2 * ranks)?.with_local(rank, ranks);
        (0..ranks).map(move |rank| of(rank).unwrap())
    }

    fn chosen(ranks: usize, devices: usize, setting: Oversubscription) -> Vec<Result<usize>> {
        host(ranks)
            .map(|place| choose(&place, BackendKind::Cuda, devices, setting))
            .collect()
    }

    #[test]
    fn ranks_take_the_device_of_their_local_rank() {
        for setting in [Oversubscription::Refuse, Oversubscription::Allow] {
            for devices in [3, 8] {
                let chosen: Result<Vec<_>> = chosen(3, devices, setting).into_iter().collect();
                assert_eq!(chosen.unwrap(), [0, 1, 2]);
            }
        }
        assert_eq!(remark(3, BackendKind::Cuda, 3), None);
    }

    #[test]
    fn more_ranks_than_devices_are_an_error_of_every_rank() {
        for result in chosen(3, 2, Oversubscription::Refuse) {
            let error = result.unwrap_err();
            assert!(error.is_device());
            let text = error.to_string();
            for part in ["3 ranks and 2 `cuda` devices", "ACCEL_OVERSUBSCRIBE_GPUS=1"] {
                assert!(text.contains(part), "{text}");
            }
        }
    }

    #[test]
    fn ranks_that_may_share_take_turns_over_the_devices() {
        let chosen: Result<Vec<_>> = chosen(5, 2, Oversubscription::Allow).into_iter().collect();
        assert_eq!(chosen.unwrap(), [0, 1, 0, 1, 0]);
        let text = remark(5, BackendKind::Wgpu, 1).unwrap();
        assert!(
            text.contains("5 ranks of this host share 1 discrete `wgpu` device:"),
            "{text}"
        );
    }

    #[test]
    fn there_is_nothing_to_share_where_there_is_no_device() {
        for setting in [Oversubscription::Refuse, Oversubscription::Allow] {
            for result in chosen(2, 0, setting) {
                let error = result.unwrap_err();
                assert!(error.is_device());
                assert!(error.to_string().contains("no `cuda` device"), "{error}");
            }
        }
    }
}
