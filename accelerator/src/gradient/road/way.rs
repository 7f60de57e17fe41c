//! Which way all ranks take.

use super::Reduction;
use super::nccl::Place;
use crate::error::{Error, Kind, Result};

/// What a rank has to offer: the GPU that it would reduce on, with the NCCL that it has; or what it has in
/// their place.
pub(super) type Offer = core::result::Result<Place, String>;

/// What the offers of all ranks come to.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) enum Choice {
    Nccl,
    /// And why.
    Staged(String),
}

/// The same on all ranks, which see the same offers.
pub(super) fn choose(asked: Reduction, offers: Vec<Offer>) -> Result<Choice> {
    let obstacle = match asked {
        Reduction::Staged => return Ok(Choice::Staged("it was asked for".to_owned())),
        Reduction::Auto | Reduction::Nccl => obstacle(offers),
    };
    match (asked, obstacle) {
        (_, None) => Ok(Choice::Nccl),
        (Reduction::Nccl, Some(obstacle)) => Err(refused(&obstacle)),
        (_, Some(obstacle)) => Ok(Choice::Staged(obstacle)),
    }
}

/// NCCL was asked for, and cannot be had.
pub(super) fn refused(obstacle: &str) -> Error {
    Error::new(
        Kind::Device,
        format!(
            "the reduction `nccl` was asked for, and cannot be: {obstacle}; ask for `auto`, which goes \
             through memory where NCCL cannot be used"
        ),
    )
}

fn obstacle(offers: Vec<Offer>) -> Option<String> {
    let mut places = Vec::with_capacity(offers.len());
    for (rank, offer) in offers.into_iter().enumerate() {
        match offer {
            Ok(place) => places.push(place),
            Err(why) => return Some(format!("rank {rank} has {why}")),
        }
    }
    Place::obstacle(&places)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn without() -> Vec<Offer> {
        vec![Err("no NCCL: libnccl.so was not found".to_owned())]
    }

    #[test]
    fn one_rank_without_it_is_enough() {
        let error = choose(Reduction::Nccl, without()).unwrap_err();
        assert!(error.is_device());
        let Ok(Choice::Staged(why)) = choose(Reduction::Auto, without()) else {
            panic!("NCCL without NCCL");
        };
        assert_eq!(why, "rank 0 has no NCCL: libnccl.so was not found");
        assert!(error.to_string().contains(&why), "{error}");
    }

    #[test]
    fn what_was_asked_for_holds() {
        let choice = choose(Reduction::Staged, Vec::new()).unwrap();
        assert!(matches!(choice, Choice::Staged(_)));
        let choice = choose(Reduction::Nccl, Vec::new()).unwrap();
        assert_eq!(choice, Choice::Nccl);
    }
}
