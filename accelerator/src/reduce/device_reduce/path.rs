//! Decides if all ranks can reduce from GPU to GPU.

use super::nccl::GpuLocation;
use crate::core::error::{Error, Kind};

/// The offer of a rank: the GPU that it would reduce on, with the NCCL that it has; or what it has instead.
pub(super) type Capability = core::result::Result<GpuLocation, String>;

/// Returns why they cannot, if so: the same on all ranks, which see the same offers.
pub(super) fn obstacle(offers: Vec<Capability>) -> Option<String> {
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
pub(super) fn refused(obstacle: &str) -> Error {
    Error::new(
        Kind::Device,
        format!(
            "the reduction `nccl` was asked for, and cannot be: {obstacle}; ask for `auto` (by ACCEL_REDUCTION or \
             `gradient_reduction`), which goes through memory where NCCL cannot be used"
        ),
    )
}

#[cfg(test)]
mod tests {
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
}
