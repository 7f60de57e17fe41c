#[cfg_attr(not(feature = "cuda"), path = "absent.rs")]
mod nccl;

use core::fmt;
use core::str::FromStr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread;

use accelerator_collective::ProcessGroup;
use burn::tensor::{Device, FloatDType, Tensor, TensorData};

use self::nccl::{GpuLocation, NcclSetup};
use super::bucket_storage::Placement;
use super::compression::Compression;
use crate::core::device::BackendKind;
use crate::core::error::{self, Error, Kind, Result, named, panic_text};

pub(super) use self::nccl::{Nccl, PendingReduce};

/// The path by which gradients computed on a GPU reach the other ranks.
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
}

impl fmt::Display for GradientReduction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Nccl => "nccl",
            Self::Staged => "staged",
        })
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

    /// Agrees with all ranks on the path, if the program asked for one that may be unavailable: it learns that before
    /// it trains. All ranks call it.
    #[track_caller]
    pub(crate) fn check(&self, group: &ProcessGroup) -> Result<()> {
        match self.asked {
            GradientReduction::Nccl => self.settle(group),
            GradientReduction::Auto | GradientReduction::Staged => Ok(()),
        }
    }

    /// Agrees with all ranks on the path, before the first sums travel. All ranks call it.
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
        let connected = match obstacle(offers) {
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
            Err(why) if self.asked == GradientReduction::Nccl => Err(refused(&why)),
            Err(why) => {
                self.say(group, &format!("through memory: {why}"));
                Ok(ReducePath::Staged)
            }
        }
    }

    /// Reports the path, if this machine has GPUs.
    fn say(&self, group: &ProcessGroup, way: &str) {
        if group.topology().is_main() && self.kind == BackendKind::Cuda {
            error::tell(&format!("gradients of the GPUs are reduced {way}"));
        }
    }

    pub(super) fn nccl(&self) -> Option<&Nccl> {
        match self.way.get()? {
            ReducePath::Nccl(nccl) => Some(nccl),
            ReducePath::Staged => None,
        }
    }

    /// Waits until the device has done what was sent from it: other ranks take a rank that leaves earlier for lost.
    pub(crate) fn rest(&self) {
        if let Some(nccl) = self.nccl() {
            nccl.rest();
        }
    }

    /// Notes that a window begins, behind those that were stepped with.
    pub(super) fn window_begins(&self) {
        if let Some(nccl) = self.nccl() {
            nccl.window_begins();
        }
    }

    /// Notes that the window may be stepped with.
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
    let flat = kind.is_queued() || asked == GradientReduction::Staged;
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

/// The offer of a rank: the GPU that it would reduce on, with the NCCL that it has; or what it has instead.
type Capability = core::result::Result<GpuLocation, String>;

/// Returns why they cannot, if so: the same on all ranks, which see the same offers.
fn obstacle(offers: Vec<Capability>) -> Option<String> {
    let mut places = Vec::with_capacity(offers.len());
    for (rank, offer) in offers.into_iter().enumerate() {
        match offer {
            Ok(place) => places.push(place),
            Err(why) => return Some(format!("rank {rank} has {why}")),
        }
    }
    GpuLocation::nccl_unavailable(&places)
}

/// Returns the error that NCCL was asked for, and cannot be had.
fn refused(obstacle: &str) -> Error {
    Error::new(
        Kind::Device,
        format!(
            "the reduction `nccl` was asked for, and cannot be: {obstacle}; ask for `auto` (by ACCEL_REDUCTION or \
             `gradient_reduction`), which goes through memory where NCCL cannot be used"
        ),
    )
}

/// Reads tensors in the order in which it is asked to. It ends with its last handle.
#[derive(Debug)]
pub(in crate::reduce) struct DeviceReader {
    requests: Sender<ReadRequest>,
}

#[derive(Debug)]
struct ReadRequest {
    tensor: Tensor<1>,
    answer: Sender<Answer>,
}

type Answer = core::result::Result<TensorData, String>;

pub(in crate::reduce) struct PendingRead {
    answer: Receiver<Answer>,
    received: Option<Answer>,
}

impl DeviceReader {
    pub(in crate::reduce) fn start() -> Result<Self> {
        let (requests, asked) = channel::<ReadRequest>();
        let read = move || {
            for ReadRequest { tensor, answer } in asked {
                let read = catch_unwind(AssertUnwindSafe(|| tensor.into_data()));
                // Who gave up waiting hears nothing.
                let _ = answer.send(read.map_err(|panic| panic_text(&*panic).to_owned()));
            }
        };
        let builder = thread::Builder::new().name("accel-read".to_owned());
        match builder.spawn(read) {
            Ok(_) => Ok(Self { requests }),
            Err(error) => Err(Error::new(
                Kind::Device,
                "the thread that reads gradients from the device could not be started",
            )
            .with_source(error)),
        }
    }

    pub(in crate::reduce) fn read(&self, tensor: Tensor<1>) -> PendingRead {
        let (answer, receiver) = channel();
        // A thread that is gone has dropped the sender, which `wait` tells.
        let _ = self.requests.send(ReadRequest { tensor, answer });
        PendingRead {
            answer: receiver,
            received: None,
        }
    }
}

impl PendingRead {
    /// Returns `true` if [`wait`](Self::wait) returns at once.
    pub(in crate::reduce) fn is_ready(&mut self) -> bool {
        if self.received.is_none() {
            self.received = match self.answer.try_recv() {
                Ok(answer) => Some(answer),
                Err(TryRecvError::Empty) => None,
                Err(TryRecvError::Disconnected) => Some(Err("its thread ended".to_owned())),
            };
        }
        self.received.is_some()
    }

    pub(in crate::reduce) fn wait(mut self) -> Result<TensorData> {
        let answer = match self.received.take() {
            Some(answer) => answer,
            None => {
                let gone = |_| Err("its thread ended".to_owned());
                self.answer.recv().unwrap_or_else(gone)
            }
        };
        answer.map_err(|text| {
            Error::new(
                Kind::Device,
                format!("gradients could not be read from the device: {text}"),
            )
        })
    }
}

impl fmt::Debug for PendingRead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PendingRead")
            .field("is_received", &self.received.is_some())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;

    #[test]
    fn one_rank_without_it_is_enough() {
        let offers = vec![Err("no NCCL: libnccl.so was not found".to_owned())];
        let obstacle = obstacle(offers).unwrap();
        assert_eq!(obstacle, "rank 0 has no NCCL: libnccl.so was not found");
        let error = refused(&obstacle);
        assert!(error.is_device());
        assert!(error.to_string().contains(&obstacle), "{error}");
    }

    #[test]
    fn tensors_are_read_in_their_order() {
        let reader = DeviceReader::start().unwrap();
        let tensor = |value: f32| Tensor::<1>::full([3], value, &Device::default());
        let readings: Vec<_> = (0..4).map(|at| reader.read(tensor(at as f32))).collect();
        for (at, mut reading) in readings.into_iter().enumerate() {
            // Once it is there, it stays.
            while !reading.is_ready() {
                thread::yield_now();
            }
            assert!(reading.is_ready());
            let data = reading.wait().unwrap();
            assert_eq!(data.as_slice::<f32>().unwrap(), [at as f32; 3]);
        }
    }

    #[test]
    fn a_reading_whose_thread_is_gone_is_an_error() {
        let (_, answer) = channel();
        let mut reading = PendingRead {
            answer,
            received: None,
        };
        assert!(reading.is_ready());
        assert!(reading.wait().unwrap_err().is_device());
    }
}
