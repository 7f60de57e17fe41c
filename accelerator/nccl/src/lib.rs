//! All-reduces among the GPUs of a group of processes, by NCCL, without Burn.
//!
//! NCCL and NVIDIA's driver are loaded at run time: this crate builds anywhere, and
//! [`Library::load`] says what is missing. A [`Communicator`] belongs to a
//! [`ProcessGroup`](accelerator_collective::ProcessGroup), which knows who is gone: what waits for a rank
//! that is gone is aborted, and every later call is an error that says why.
//!
//! ```no_run
//! use std::time::Duration;
//!
//! use accelerator_collective::{DType, ProcessGroup, ReduceOp};
//! use accelerator_nccl::{Communicator, DevicePointer, Gpu, Library};
//!
//! let group = ProcessGroup::single(); // or of many processes, each with a GPU
//! let gpu = Gpu::open(&Library::load()?, group.topology().local_rank())?;
//! let communicator = Communicator::connect_group(&gpu, &group, Duration::from_secs(60))??;
//!
//! # let address = 0;
//! let gradients = DevicePointer(address); // of memory on this GPU, such as a tensor of CubeCL's
//! // SAFETY: the memory holds 1024 values, and lives until `wait` has returned.
//! unsafe { communicator.all_reduce(gradients, 1024, DType::F32, ReduceOp::Sum)? };
//! communicator.wait()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! States, order and what is promised about bits are described in this crate's README.

mod api;
mod communicator;
mod error;
mod gpu;
mod gpu_location;
mod library;

pub use communicator::Communicator;
pub use error::{Error, Result};
pub use gpu::{DevicePointer, Gpu};
pub use gpu_location::GpuLocation;
pub use library::{Library, Version};

/// Items for the launcher's benchmark and for tests. They are not part of the public API.
#[doc(hidden)]
pub mod internal {
    pub use crate::gpu::DeviceMemory;
}
