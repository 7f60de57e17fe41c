//! Memory of the device.

use std::process::Command;

use accelerator::BackendKind;
use burn::tensor::Device;
use serde::Serialize;

const MIB: f64 = (1 << 20) as f64;

/// What is held after some steps that began with nothing in reserve, in MiB. `None` where nobody tells.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Memory {
    /// What Burn's allocator took from the device: the most that the steps needed at once, in whole pages.
    reserved_mib: Option<f64>,
    /// What is in use between steps: parameters, and the optimizer's state.
    in_use_mib: Option<f64>,
    /// What the driver says is in use, by all processes.
    driver_mib: Option<f64>,
}

impl Memory {
    /// Runs `steps` with an empty reserve, and tells what they left in it.
    pub(crate) fn of<E>(
        kind: BackendKind,
        device: &Device,
        steps: impl FnOnce() -> Result<(), E>,
    ) -> Result<Self, E> {
        release(device);
        steps()?;
        // A device that cannot be waited for fails in the rounds that follow.
        let _ = device.sync();
        let usage = device.memory_pool_usage();
        Ok(Self {
            reserved_mib: usage.map(|usage| usage.bytes_reserved as f64 / MIB),
            in_use_mib: usage.map(|usage| usage.bytes_in_use as f64 / MIB),
            driver_mib: (kind == BackendKind::Cuda).then(driver).flatten(),
        })
    }
}

/// Gives memory that nobody uses back to the device.
pub(crate) fn release(device: &Device) {
    let _ = device.sync();
    device.memory_cleanup();
    let _ = device.sync();
}

/// Asks `nvidia-smi` about the first GPU.
fn driver() -> Option<f64> {
    let output = Command::new("nvidia-smi")
        .args([
            "--id=0",
            "--query-gpu=memory.used",
            "--format=csv,noheader,nounits",
        ])
        .output()
        .ok()?;
    String::from_utf8(output.stdout).ok()?.trim().parse().ok()
}
