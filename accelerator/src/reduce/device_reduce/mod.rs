#[cfg(feature = "cuda")]
mod memory;
#[cfg_attr(not(feature = "cuda"), path = "absent.rs")]
mod nccl;
mod path;
mod reader;

use core::fmt;
use core::str::FromStr;
use std::sync::OnceLock;

use accelerator_collective::ProcessGroup;
use burn::tensor::{Device, FloatDType};

use self::nccl::NcclSetup;
pub(super) use self::nccl::{Nccl, PendingReduce};
use self::path::Capability;
pub(super) use self::reader::{DeviceReader, PendingRead};
use super::bucket_storage::Placement;
use super::compression::Compression;
use crate::core::choice::named;
use crate::core::device::BackendKind;
use crate::core::error::{Error, Result};
use crate::core::user_message;

/// The way in which gradients that are computed on a GPU get to the other ranks.
///
/// They are gathered in buckets on the device either way, and what comes of them stays there. As text, the settings
/// have the names of `ACCEL_REDUCTION`.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum GradientReduction {
    /// Uses NCCL if every rank has it and a CUDA device of its own, and stages buckets otherwise; which one, and
    /// why, is logged. Gradients that are computed on the CPU are reduced in place.
    #[default]
    Auto,
    /// Reduces from device to device, by NCCL 2.18 or later. `build` and `launch` fail on every rank if that
    /// cannot be: with a [hook](crate::hook) or [`Compression::F16`](crate::Compression::F16), which work in memory,
    /// or if a rank has no NCCL or no GPU of its own. One rank alone needs none. The sums that a
    /// [`Sharded`](crate::optim::Sharded) optimizer cuts go through memory all the same.
    ///
    /// The host does not wait for the GPU with a driver of CUDA 12.5 or later; with an older one it does.
    Nccl,
    /// Reads each bucket in one copy, sums it in memory as gradients of the CPU are, and writes it
    /// back in one copy. Sums are those of the CPU, bit by bit; norms are added up on the device, in its own order.
    ///
    /// Ranks with different kinds of devices can train together so.
    Staged,
}

impl GradientReduction {
    const ALL: [Self; 3] = [Self::Auto, Self::Nccl, Self::Staged];

    /// The name that `ACCEL_REDUCTION` takes: `auto`, `nccl` or `staged`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Nccl => "nccl",
            Self::Staged => "staged",
        }
    }
}

impl fmt::Display for GradientReduction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for GradientReduction {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        named("reduction", name, &Self::ALL)
    }
}

/// The way between the device of a rank and the other ranks; see [`GradientReduction`].
#[derive(Debug)]
pub(crate) struct DeviceReducer {
    asked: GradientReduction,
    device: Device,
    placement: Placement,
    kind: BackendKind,
    reader: OnceLock<DeviceReader>,
    /// The path of all ranks, once they have agreed.
    way: OnceLock<ReducePath>,
}

/// The way that all ranks take.
#[derive(Debug)]
enum ReducePath {
    Nccl(Nccl),
    Staged,
}

impl DeviceReducer {
    pub(crate) fn new(
        asked: GradientReduction,
        kind: BackendKind,
        device: &Device,
        compression: Compression,
    ) -> Self {
        Self {
            asked,
            device: device.clone(),
            placement: placement(asked, kind, device, compression),
            kind,
            reader: OnceLock::new(),
            way: OnceLock::new(),
        }
    }

    /// Lets all ranks agree on the way where one was asked for that may be closed: who asks for it learns that
    /// before anything is trained. All of them call it.
    #[track_caller]
    pub(crate) fn check(&self, group: &ProcessGroup) -> Result<()> {
        match self.asked {
            GradientReduction::Nccl => self.settle(group),
            GradientReduction::Auto | GradientReduction::Staged => Ok(()),
        }
    }

    /// Lets all ranks agree on the way, before the first sums travel. All of them call it.
    #[track_caller]
    pub(super) fn settle(&self, group: &ProcessGroup) -> Result<()> {
        // Without CUDA there is nothing to agree on: a program has the same features on all ranks.
        // Nor where all have been told.
        let open = match self.asked {
            GradientReduction::Auto => nccl::IS_BUILT,
            GradientReduction::Nccl => true,
            GradientReduction::Staged => false,
        };
        if self.way.get().is_some() || group.world_size() == 1 || !open {
            return Ok(());
        }
        let group = group.for_purpose("agree on how gradients are reduced");
        let way = self.agree(&group)?;
        let _ = self.way.set(way);
        Ok(())
    }

    #[track_caller]
    fn agree(&self, group: &ProcessGroup) -> Result<ReducePath> {
        let setup = NcclSetup::find(self.kind, &self.device);
        let offer = setup.as_ref().map(|setup| setup.place(group));
        let offer: Capability = offer.map_err(String::clone);
        let offers = group.all_gather_object(&offer)?;
        let connected = match path::obstacle(offers) {
            Some(why) => Err(why),
            None => match setup {
                Ok(setup) => setup.connect(group)?,
                Err(why) => Err(why),
            },
        };
        match connected {
            Ok(nccl) => {
                self.say(group, "by NCCL");
                Ok(ReducePath::Nccl(nccl))
            }
            Err(why) if self.asked == GradientReduction::Nccl => Err(path::refused(&why)),
            Err(why) => {
                self.say(group, &format!("through memory: {why}"));
                Ok(ReducePath::Staged)
            }
        }
    }

    /// Tells of GPUs, which there are none of on most machines.
    fn say(&self, group: &ProcessGroup, way: &str) {
        if group.topology().is_main() && self.kind == BackendKind::Cuda {
            user_message::tell(&format!("gradients of the GPUs are reduced {way}"));
        }
    }

    /// Returns NCCL among all ranks, if that is the path.
    pub(super) fn nccl(&self) -> Option<&Nccl> {
        match self.way.get()? {
            ReducePath::Nccl(nccl) => Some(nccl),
            ReducePath::Staged => None,
        }
    }

    /// Waits until the device has done what was sent from it: who is gone before the others have done
    /// theirs is taken for lost.
    pub(crate) fn rest(&self) {
        if let Some(nccl) = self.nccl() {
            nccl.rest();
        }
    }

    /// A window begins, behind those that were stepped with.
    pub(super) fn window_begins(&self) {
        if let Some(nccl) = self.nccl() {
            nccl.window_begins();
        }
    }

    /// The window may be stepped with.
    pub(super) fn window_ends(&self) {
        if let Some(nccl) = self.nccl() {
            nccl.window_ends();
        }
    }

    /// Waits for the sums that were stepped with: what is kept of a model that was must not have been made of
    /// sums that a dead rank has left incomplete.
    pub(crate) fn confirm(&self) -> Result<()> {
        match self.nccl() {
            Some(nccl) => nccl.confirm(),
            None => Ok(()),
        }
    }

    /// Returns `true` if all that was stepped with is known to be complete, also after the group has failed.
    pub(crate) fn is_sound(&self) -> bool {
        self.nccl().is_none_or(Nccl::is_sound)
    }

    pub(crate) fn kind(&self) -> BackendKind {
        self.kind
    }

    /// Returns the place of a model's sums that travel this way: the device of each rank, or the memory of each.
    pub(crate) fn placement(&self) -> &Placement {
        &self.placement
    }

    pub(super) fn reader(&self) -> Result<&DeviceReader> {
        if let Some(reader) = self.reader.get() {
            return Ok(reader);
        }
        let reader = DeviceReader::start()?;
        Ok(self.reader.get_or_init(|| reader))
    }
}

/// Returns the place of sums. Those in f16 are checked in memory, and bf16 is rounded there for a device without it.
fn placement(
    asked: GradientReduction,
    kind: BackendKind,
    device: &Device,
    compression: Compression,
) -> Placement {
    let gpu = matches!(kind, BackendKind::Cuda | BackendKind::Wgpu);
    let flat = gpu || asked == GradientReduction::Staged;
    let rounds = match compression {
        Compression::None => true,
        Compression::Bf16 => device.supports_dtype(FloatDType::BF16),
        Compression::F16 => false,
    };
    match flat && rounds {
        true => Placement::Device(device.clone()),
        false => Placement::Host,
    }
}
