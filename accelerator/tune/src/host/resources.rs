use std::path::Path;

use serde::{Deserialize, Serialize};

/// What a host has for trials.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(crate) struct HostResources {
    pub(crate) cores: Vec<usize>,
    /// As `CUDA_VISIBLE_DEVICES` names them.
    pub(crate) gpus: Vec<String>,
}

impl HostResources {
    /// What this process may use, and its share of that where a host has several of the job's ranks.
    pub(crate) fn of_this_process(local_rank: usize, local_world_size: usize) -> Self {
        Self {
            cores: share(&usable_cores(), local_rank, local_world_size),
            gpus: share(&visible_gpus(), local_rank, local_world_size),
        }
    }
}

fn share<T: Clone>(all: &[T], of: usize, among: usize) -> Vec<T> {
    all[all.len() * of / among..all.len() * (of + 1) / among].to_vec()
}

#[cfg(target_os = "linux")]
fn usable_cores() -> Vec<usize> {
    match rustix::thread::sched_getaffinity(None) {
        Ok(set) => (0..rustix::thread::CpuSet::MAX_CPU)
            .filter(|core| set.is_set(*core))
            .collect(),
        Err(_) => Vec::new(),
    }
}

#[cfg(not(target_os = "linux"))]
fn usable_cores() -> Vec<usize> {
    let count = std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get);
    (0..count).collect()
}

/// Those of `CUDA_VISIBLE_DEVICES`, or all of the machine.
fn visible_gpus() -> Vec<String> {
    if let Ok(list) = std::env::var("CUDA_VISIBLE_DEVICES") {
        // As CUDA reads it: what stands behind an invalid one is not seen.
        let listed = list.split(',').map(str::trim);
        let listed = listed.take_while(|id| !id.is_empty() && !id.starts_with('-'));
        return listed.map(str::to_owned).collect();
    }
    let devices = Path::new("/proc/driver/nvidia/gpus").read_dir();
    let count = devices.map_or(0, Iterator::count);
    (0..count).map(|index| index.to_string()).collect()
}
