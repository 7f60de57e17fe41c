//! The policies for samples that do not fill a global batch.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Kind, Result};

/// The policy for the last samples of an epoch if they do not fill a global batch.
///
/// It is written `exact`, `pad`, `drop` or `uneven`, by [`Display`](fmt::Display) and [`FromStr`].
///
/// | policy | last, incomplete global batch | every sample seen | same steps on every rank |
/// |---|---|---|---|
/// | `Exact` | divided as evenly as possible | exactly once | yes |
/// | `Pad` | filled up with samples from the start of the epoch | at least once | yes |
/// | `Drop` | left out | all but the last | yes |
/// | `Uneven` | the first ranks get theirs, the last ranks none | exactly once | no |
///
/// ```
/// use accelerator_plan::{BatchSize, PlanConfig, TailPolicy};
///
/// # fn main() -> accelerator_plan::Result<()> {
/// // Nine samples, two ranks, two each in a step: in the last one, a single sample is left.
/// let sizes = |tail| -> accelerator_plan::Result<[Vec<usize>; 2]> {
///     let config = PlanConfig::new(9, BatchSize::per_rank(2)?).with_world_size(2);
///     let epoch = config.with_tail(tail).init()?.epoch(0);
///     Ok([0, 1].map(|rank| epoch.rank(rank).map(|batch| batch.real).collect()))
/// };
/// assert_eq!(sizes(TailPolicy::Exact)?, [[2, 2, 1], [2, 2, 0]]);
/// assert_eq!(sizes(TailPolicy::Pad)?, [[2, 2, 1], [2, 2, 0]], "and three that come again");
/// assert_eq!(sizes(TailPolicy::Drop)?, [[2, 2], [2, 2]]);
/// assert_eq!(sizes(TailPolicy::Uneven)?, [vec![2, 2, 1], vec![2, 2]]);
/// assert_eq!("pad".parse::<TailPolicy>()?, TailPolicy::Pad);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum TailPolicy {
    /// No duplicates: the samples that are left are divided over the ranks as evenly as possible,
    /// the first ranks get one more. Where fewer samples than ranks are left, the others idle:
    /// see [`BatchKind::Idle`](crate::BatchKind::Idle).
    #[default]
    Exact,
    /// Accelerate's `even_batches=True`, on its map-style and iterable shards alike: every batch
    /// is full; the missing samples are taken from the start of the epoch, over and over again
    /// where there are fewer samples than a global batch holds.
    Pad,
    /// Accelerate's `drop_last=True`: the whole incomplete global batch is left out.
    Drop,
    /// Accelerate's `even_batches=False`: every rank gets what is left of its share, a short batch
    /// or none. Ranks may differ in their number of steps, so it is for evaluation, not training.
    Uneven,
}

impl fmt::Display for TailPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Exact => "exact",
            Self::Pad => "pad",
            Self::Drop => "drop",
            Self::Uneven => "uneven",
        })
    }
}

impl FromStr for TailPolicy {
    type Err = Error;

    fn from_str(word: &str) -> Result<Self> {
        match word {
            "exact" => Ok(Self::Exact),
            "pad" => Ok(Self::Pad),
            "drop" => Ok(Self::Drop),
            "uneven" => Ok(Self::Uneven),
            _ => Err(Error::new(
                Kind::Tail,
                format!("{word:?} is no tail policy: write exact, pad, drop or uneven"),
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_and_policies_match() {
        for policy in [
            TailPolicy::Exact,
            TailPolicy::Pad,
            TailPolicy::Drop,
            TailPolicy::Uneven,
        ] {
            assert_eq!(policy.to_string().parse::<TailPolicy>().unwrap(), policy);
        }
        let error = "Pad".parse::<TailPolicy>().unwrap_err();
        assert!(error.is_tail());
        assert_eq!(
            error.to_string(),
            "\"Pad\" is no tail policy: write exact, pad, drop or uneven"
        );
    }
}
