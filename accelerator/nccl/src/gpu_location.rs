//! The location of a GPU, which ranks compare before they connect.

use accelerator_collective::ProcessGroup;
use accelerator_host::machine::boot_id;
use serde::{Deserialize, Serialize};

use crate::gpu::Gpu;
use crate::library::Version;

/// The place of a rank's GPU, and the NCCL that the rank has. Ranks tell one another first, since NCCL
/// finds out late, and says less.
///
/// ```no_run
/// use accelerator_collective::ProcessGroup;
/// use accelerator_nccl::{Gpu, Library, GpuLocation};
///
/// /// Whether NCCL can be used by these ranks, each with the GPU of its local rank.
/// fn can_use_nccl(group: &ProcessGroup) -> Result<bool, Box<dyn std::error::Error>> {
///     let gpu = Gpu::open(&Library::load()?, group.topology().local_rank())?;
///     let locations = group.all_gather_object(&GpuLocation::of(&gpu, group))?;
///     if let Some(nccl_unavailable) = GpuLocation::nccl_unavailable(&locations) {
///         println!("without NCCL: {nccl_unavailable}");
///         return Ok(false);
///     }
///     println!("GPUs {:?}", locations.iter().map(GpuLocation::bus_id).collect::<Vec<_>>());
///     Ok(true)
/// }
/// ```
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct GpuLocation {
    /// The text that tells its host apart.
    host: String,
    bus_id: String,
    nccl: Version,
    sharing: Sharing,
}

impl GpuLocation {
    /// Returns the location of this rank's GPU.
    pub fn of(gpu: &Gpu, group: &ProcessGroup) -> Self {
        let topology = group.topology();
        let nccl = gpu.nccl_version();
        let variable = std::env::var("NCCL_MULTI_RANK_GPU_ENABLE").ok();
        Self {
            host: this_host(topology.rank()),
            bus_id: gpu.bus_id().to_owned(),
            nccl,
            sharing: Sharing::of(nccl, variable.as_deref()),
        }
    }

    /// The GPU's place on the PCI bus of its host, such as `0000:3B:00.0`. Ranks of one host that share a GPU, or have
    /// parts of the same one, have the same.
    pub fn bus_id(&self) -> &str {
        &self.bus_id
    }

    /// Returns the reason that NCCL cannot connect these ranks, given in rank order: two share a GPU, or one has
    /// another NCCL than rank 0. `None` if nothing is in the way.
    ///
    /// Ranks may share a GPU if each of them has NCCL 2.30 or later and
    /// `NCCL_MULTI_RANK_GPU_ENABLE=1`, an experiment of NCCL's makers.
    pub fn nccl_unavailable(locations: &[Self]) -> Option<String> {
        for (rank, location) in locations.iter().enumerate() {
            let before = &locations[..rank];
            if let Some(first) = before.iter().position(|other| other.clashes(location)) {
                return Some(format!(
                    "ranks {first} and {rank} share the GPU {}, and NCCL takes one rank a GPU",
                    location.bus_id
                ));
            }
            if let Some(first) = before.first()
                && first.nccl != location.nccl
            {
                return Some(format!(
                    "rank 0 has NCCL {}, and rank {rank} has {}",
                    first.nccl, location.nccl
                ));
            }
        }
        None
    }

    fn clashes(&self, other: &Self) -> bool {
        let same = self.host == other.host && self.bus_id == other.bus_id;
        same && [self.sharing, other.sharing].contains(&Sharing::Refused)
    }
}

/// The life of the kernel that this process runs on, which containers of a host have in common; if it cannot
/// be read, ranks are taken for as many hosts, and NCCL finds out by itself.
fn this_host(rank: usize) -> String {
    boot_id().unwrap_or_else(|| format!("that of rank {rank}"))
}

/// Tells if NCCL lets this rank share its GPU.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
enum Sharing {
    Allowed,
    Refused,
}

impl Sharing {
    fn of(nccl: Version, variable: Option<&str>) -> Self {
        match nccl >= Version::new(2, 30, 0) && variable == Some("1") {
            true => Self::Allowed,
            false => Self::Refused,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn location(host: usize, bus_id: &str) -> GpuLocation {
        GpuLocation {
            host: host.to_string(),
            bus_id: bus_id.to_owned(),
            nccl: Version::new(2, 30, 3),
            sharing: Sharing::Refused,
        }
    }

    #[test]
    fn every_rank_needs_a_gpu_of_its_own() {
        let apart = [
            location(0, "a"),
            location(0, "b"),
            location(2, "a"),
            location(2, "b"),
        ];
        assert_eq!(GpuLocation::nccl_unavailable(&apart), None);
        let shared = [location(0, "a"), location(0, "b"), location(0, "b")];
        assert_eq!(
            GpuLocation::nccl_unavailable(&shared).unwrap(),
            "ranks 1 and 2 share the GPU b, and NCCL takes one rank a GPU"
        );
    }

    #[test]
    fn ranks_of_this_host_find_the_same() {
        assert_eq!(this_host(0), this_host(1));
        assert!(this_host(0).len() > 30, "{}", this_host(0));
    }

    #[test]
    fn ranks_share_a_gpu_where_both_may() {
        let mut locations = [location(0, "a"), location(0, "a")];
        locations[0].sharing = Sharing::Allowed;
        assert!(GpuLocation::nccl_unavailable(&locations).is_some());
        locations[1].sharing = Sharing::Allowed;
        assert_eq!(GpuLocation::nccl_unavailable(&locations), None);
    }

    #[test]
    fn a_later_nccl_lets_ranks_share_if_it_is_told_to() {
        let sharing = |minor, variable| Sharing::of(Version::new(2, minor, 7), variable);
        assert_eq!(sharing(30, Some("1")), Sharing::Allowed);
        assert_eq!(sharing(29, Some("1")), Sharing::Refused);
        assert_eq!(sharing(30, None), Sharing::Refused);
        assert_eq!(sharing(30, Some("0")), Sharing::Refused);
    }

    #[test]
    fn every_rank_needs_the_same_nccl() {
        let mut locations = [location(0, "a"), location(0, "b")];
        locations[1].nccl = Version::new(2, 26, 0);
        assert_eq!(
            GpuLocation::nccl_unavailable(&locations).unwrap(),
            "rank 0 has NCCL 2.30.3, and rank 1 has 2.26.0"
        );
    }
}
