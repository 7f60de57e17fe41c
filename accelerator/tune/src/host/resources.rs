use std::ops::Range;
use std::path::Path;

use accelerator_host::machine::UsableCores;
use serde::{Deserialize, Serialize};

/// The resources that a host has for trials.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(crate) struct HostResources {
    /// The number of threads that may compute at a time, by affinity and quota.
    pub(crate) cores: usize,
    /// The numbers of the cores to which trials are bound; empty if the system has to choose.
    pub(crate) core_numbers: Vec<usize>,
    /// The GPUs, as `CUDA_VISIBLE_DEVICES` names them.
    pub(crate) gpus: Vec<String>,
}

impl HostResources {
    /// Returns what this process may use: its share of that if a host has several of the job's ranks.
    pub(crate) fn of_this_process(local_rank: usize, local_world_size: usize) -> Self {
        let cores = UsableCores::of_this_process();
        Self {
            cores: share_of(cores.count().get(), local_rank, local_world_size).len(),
            core_numbers: share(cores.numbers(), local_rank, local_world_size),
            gpus: share(&visible_gpus(), local_rank, local_world_size),
        }
    }
}

fn share<T: Clone>(all: &[T], of: usize, among: usize) -> Vec<T> {
    all[share_of(all.len(), of, among)].to_vec()
}

fn share_of(all: usize, of: usize, among: usize) -> Range<usize> {
    all * of / among..all * (of + 1) / among
}

/// Returns the GPUs of `CUDA_VISIBLE_DEVICES`, or all of the machine if that is not set.
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
