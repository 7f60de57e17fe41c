//! Batches with a limit on their tokens.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;

use crate::error::{Error, Kind, Result};
use crate::permutation::{Permutation, mix};

/// Divides samples of different lengths into batches with at most a given number of tokens each, for a
/// [`BatchPlan`](crate::BatchPlan).
///
/// [`padded`](Self::padded) batches contain samples of similar lengths, so that little padding is needed: fairseq's
/// `--max-tokens`. [`packed`](Self::packed) batches are for models that join the samples of a batch into one sequence
/// without padding.
///
/// All epochs have the same number of batches, of the same shapes. [`shuffled`](Self::shuffled) puts the batches in
/// another order and exchanges samples of equal length.
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
    /// The places of a batch's samples among all samples from the longest to the shortest.
    places: Vec<Vec<usize>>,
}

impl TokenBatches {
    /// Limits the number of samples times the length of the longest one. An empty sample counts as one token.
    ///
    /// # Errors
    ///
    /// If a sample is longer than `max_tokens`.
    pub fn padded(lengths: impl Into<Vec<u64>>, max_tokens: u64) -> Result<Self> {
        let (lengths, descending) = descending(lengths.into(), max_tokens)?;
        let mut places = Vec::new();
        let mut start = 0;
        while let Some(longest) = descending.get(start) {
            let samples = max_tokens / longest;
            let end = usize::try_from(samples).map_or(lengths.len(), |samples| start + samples);
            let batch: Range<usize> = start..end.min(lengths.len());
            start = batch.end;
            places.push(batch.collect());
        }
        Ok(Self { lengths, places })
    }

    /// Limits the sum of the lengths, and fills each batch as far as possible (best-fit decreasing). An empty sample
    /// counts as one token.
    ///
    /// # Errors
    ///
    /// If a sample is longer than `max_tokens`.
    pub fn packed(lengths: impl Into<Vec<u64>>, max_tokens: u64) -> Result<Self> {
        let (lengths, descending) = descending(lengths.into(), max_tokens)?;
        let mut places: Vec<Vec<usize>> = Vec::new();
        // The batches by the number of tokens that they have room for.
        let mut rooms: BTreeMap<(u64, usize), ()> = BTreeMap::new();
        for (place, length) in descending.into_iter().enumerate() {
            let fullest = rooms.range((length, 0)..).next();
            let (room, batch) = fullest.map_or((max_tokens, places.len()), |(key, ())| *key);
            rooms.remove(&(room, batch));
            match places.get_mut(batch) {
                Some(batch) => batch.push(place),
                None => places.push(vec![place]),
            }
            rooms.insert((room - length, batch), ());
        }
        Ok(Self { lengths, places })
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

    /// Returns the samples of each batch, with the longest samples first, so that a lack of memory shows at once.
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

/// Returns the lengths of the samples as they are counted, and the same from the longest to the shortest.
fn descending(mut lengths: Vec<u64>, max_tokens: u64) -> Result<(Vec<u64>, Vec<u64>)> {
    if let Some(sample) = lengths.iter().position(|length| *length > max_tokens) {
        return Err(Error::new(
            Kind::BatchSize,
            format!(
                "sample {sample} has {} tokens, and a batch may have {max_tokens}: truncate the sample, leave it out, or \
                 raise the limit",
                lengths[sample]
            ),
        ));
    }
    for length in &mut lengths {
        *length = (*length).max(1);
    }
    let mut descending = lengths.clone();
    descending.sort_unstable_by_key(|&length| Reverse(length));
    Ok((lengths, descending))
}

fn of_places(samples: &[u64], places: &[usize]) -> Vec<u64> {
    places.iter().map(|&place| samples[place]).collect()
}

/// Keeps the order of batches apart from that of samples.
const BATCHES_TAG: u64 = 0x6261_7463_6865_73;
