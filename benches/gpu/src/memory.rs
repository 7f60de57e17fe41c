//! The memory of the device.

use std::process::Command;

use accelerator::BackendKind;
use burn::tensor::Device;
use serde::Serialize;

const MIB: f64 = (1 << 20) as f64;

/// The memory in use after some steps that began with an empty pool, in MiB. `None` if unknown.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Memory {
    /// The memory that Burn's allocator reserved on the device: the peak of the steps, in whole pages.
    reserved_mib: Option<f64>,
    /// The memory in use between steps: parameters, and the state of the optimizer.
    in_use_mib: Option<f64>,
    /// The memory in use by all processes, as the driver reports it.
    driver_mib: Option<f64>,
}

impl Memory {
    /// Runs `steps` with an empty pool, and measures the pool after them.
    pub(crate) fn of<E>(
        kind: BackendKind,
        device: &Device,
        steps: impl FnOnce() -> Result<(), E>,
    ) -> Result<Self, E> {
        release(device);
        steps()?;
        // If the device cannot be waited for, the rounds that follow fail.
        let _ = device.sync();
        let usage = device.memory_pool_usage();
        Ok(Self {
            reserved_mib: usage.map(|usage| usage.bytes_reserved as f64 / MIB),
            in_use_mib: usage.map(|usage| usage.bytes_in_use as f64 / MIB),
            driver_mib: (kind == BackendKind::Cuda).then(driver).flatten(),
        })
    }
}

/// Returns unused memory to the device.
pub(crate) fn release(device: &Device) {
    let _ = device.sync();
    device.memory_cleanup();
    let _ = device.sync();
}

/// Asks `nvidia-smi` for the memory in use on the first GPU.
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
