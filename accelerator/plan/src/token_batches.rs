//! Batches with a limit on their tokens.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;

use crate::error::{Error, Kind, Result};
use crate::permutation::{Permutation, mix};

/// Groups samples into batches of at most a given number of tokens, for a [`BatchPlan`](crate::BatchPlan).
///
/// [`padded`](Self::padded) batches contain samples of similar lengths, so that little padding is needed: fairseq's
/// `--max-tokens`. [`packed`](Self::packed) batches are for models that join the samples of a batch into one sequence
/// without padding.
///
/// Every epoch has the same number of batches, with the same shapes. [`shuffled`](Self::shuffled) reorders the batches
/// and swaps samples of equal length; if all lengths differ, each batch always has the same samples.
///
/// ```
/// use accelerator_plan::TokenBatches;
///
/// # fn main() -> accelerator_plan::Result<()> {
/// let lengths = [3, 9, 4, 8, 2];
/// let batches = TokenBatches::padded(lengths, 18)?;
/// assert_eq!(batches.longest_first(), [vec![1, 3], vec![2, 0, 4]]);
/// let batches = TokenBatches::packed(lengths, 13)?;
/// assert_eq!(batches.longest_first(), [vec![1, 2], vec![3, 0, 4]]);
/// assert_eq!(batches.len(), 2);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct TokenBatches {
    /// The length of each sample.
    lengths: Vec<u64>,
    /// For each batch, the positions of its samples when all samples are sorted by length, longest first.
    places: Vec<Vec<usize>>,
    max_tokens: u64,
    padding: Padding,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Padding {
    ToLongest,
    None,
}

impl TokenBatches {
    /// Makes batches in which the number of samples times the longest length is at most `max_tokens`. An empty sample
    /// counts as one token.
    ///
    /// # Errors
    ///
    /// If a sample is longer than `max_tokens`.
    pub fn padded(lengths: impl Into<Vec<u64>>, max_tokens: u64) -> Result<Self> {
        Self::new(lengths.into(), max_tokens, Padding::ToLongest)
    }

    /// Makes batches whose lengths add up to at most `max_tokens`, each as full as possible (best-fit decreasing). An
    /// empty sample counts as one token.
    ///
    /// # Errors
    ///
    /// If a sample is longer than `max_tokens`.
    pub fn packed(lengths: impl Into<Vec<u64>>, max_tokens: u64) -> Result<Self> {
        Self::new(lengths.into(), max_tokens, Padding::None)
    }

    fn new(mut lengths: Vec<u64>, max_tokens: u64, padding: Padding) -> Result<Self> {
        for length in &mut lengths {
            *length = (*length).max(1);
        }
        if let Some(sample) = lengths.iter().position(|length| *length > max_tokens) {
            return Err(Error::new(
                Kind::BatchSize,
                format!(
                    "sample {sample} has {} tokens, but a batch can have at most {max_tokens}: truncate or drop the sample, \
                     or raise the limit",
                    lengths[sample]
                ),
            ));
        }
        Ok(Self::of(lengths, max_tokens, padding))
    }

    /// Makes batches of lengths from 1 to `max_tokens`.
    fn of(lengths: Vec<u64>, max_tokens: u64, padding: Padding) -> Self {
        let mut descending = lengths.clone();
        descending.sort_unstable_by_key(|&length| Reverse(length));
        let places = match padding {
            Padding::ToLongest => in_turn(&descending, max_tokens),
            Padding::None => best_fit(&descending, max_tokens),
        };
        Self {
            lengths,
            places,
            max_tokens,
            padding,
        }
    }

    /// Makes batches of these samples alone, which are numbered from 0, with the same limit.
    ///
    /// # Panics
    ///
    /// If there are fewer samples.
    #[must_use]
    pub fn slice(&self, samples: Range<usize>) -> Self {
        let lengths = self.lengths[samples].to_vec();
        Self::of(lengths, self.max_tokens, self.padding)
    }

    /// Returns the number of batches.
    #[must_use]
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Returns `true` if there are no samples.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Returns the samples of each batch, longest first, so that a batch that does not fit in memory fails in the first
    /// step.
    #[must_use]
    pub fn longest_first(&self) -> Vec<Vec<u64>> {
        let samples = self.sorted(0..self.lengths.len() as u64);
        let places = self.places.iter();
        places.map(|places| of_places(&samples, places)).collect()
    }

    /// Returns the samples of each batch in this epoch, in an order that depends on the seed and the epoch.
    #[must_use]
    pub fn shuffled(&self, seed: u64, epoch: u64) -> Vec<Vec<u64>> {
        let len = self.lengths.len() as u64;
        let order = Permutation::new(len, seed, epoch);
        let samples = self.sorted((0..len).map(|position| order.index(position)));
        let batches = self.places.len() as u64;
        let order = Permutation::new(batches, mix(&[BATCHES_TAG, seed]), epoch);
        let places = (0..batches).map(|position| &self.places[order.index(position) as usize]);
        places.map(|places| of_places(&samples, places)).collect()
    }

    /// Returns samples from the longest to the shortest, those of equal length in the order given.
    fn sorted(&self, samples: impl Iterator<Item = u64>) -> Vec<u64> {
        let mut samples: Vec<u64> = samples.collect();
        samples.sort_by_key(|&sample| Reverse(self.lengths[sample as usize]));
        samples
    }
}

/// Shows the limit.
impl fmt::Display for TokenBatches {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at most {} tokens", self.max_tokens)?;
        match self.padding {
            Padding::ToLongest => f.write_str(" with padding"),
            Padding::None => Ok(()),
        }
    }
}

/// Cuts samples into batches of consecutive ones.
fn in_turn(descending: &[u64], max_tokens: u64) -> Vec<Vec<usize>> {
    let mut places = Vec::new();
    let mut start: usize = 0;
    while let Some(longest) = descending.get(start) {
        let samples = usize::try_from(max_tokens / longest).unwrap_or(usize::MAX);
        let end = start.saturating_add(samples).min(descending.len());
        places.push((start..end).collect());
        start = end;
    }
    places
}

/// Puts each sample into the fullest batch that has room for it.
fn best_fit(descending: &[u64], max_tokens: u64) -> Vec<Vec<usize>> {
    let mut places: Vec<Vec<usize>> = Vec::new();
    // The batches by the number of tokens that they have room for.
    let mut rooms: BTreeSet<(u64, usize)> = BTreeSet::new();
    for (place, &length) in descending.iter().enumerate() {
        let fullest = rooms.range((length, 0)..).next().copied();
        let (room, batch) = fullest.unwrap_or((max_tokens, places.len()));
        rooms.remove(&(room, batch));
        match places.get_mut(batch) {
            Some(batch) => batch.push(place),
            None => places.push(vec![place]),
        }
        rooms.insert((room - length, batch));
    }
    places
}

fn of_places(samples: &[u64], places: &[usize]) -> Vec<u64> {
    places.iter().map(|&place| samples[place]).collect()
}

/// Makes the order of batches independent of the order of samples.
const BATCHES_TAG: u64 = 0x0062_6174_6368_6573;
