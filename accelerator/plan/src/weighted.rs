//! Sampling with weights.

use crate::error::{Error, Kind, Result};
use crate::permutation::mix;

/// Draws samples with given weights, anew in every epoch, by seed and epoch alone.
///
/// With replacement a sample comes as often as it is drawn, each draw by itself, with the
/// probability `weight / sum of weights` (inverse of the cumulative sum). Without replacement a
/// sample comes at most once; the first draw has these probabilities, and each further one those of
/// the samples that are left (Efraimidis and Spirakis, "Weighted random sampling with a reservoir",
/// 2006). This is PyTorch's `WeightedRandomSampler`.
///
/// ```
/// use accelerator_plan::WeightedSampler;
///
/// # fn main() -> accelerator_plan::Result<()> {
/// // Class 1 is rare: its two samples are drawn as often as the four of class 0 together.
/// let sampler = WeightedSampler::new([1.0, 1.0, 1.0, 1.0, 2.0, 2.0])?;
/// let order = sampler.with_replacement(1000, 42, 0);
/// let rare = order.iter().filter(|&&index| index >= 4).count();
/// assert!((400..600).contains(&rare));
/// assert_eq!(sampler.len(), 6);
///
/// let mut each_once = sampler.without_replacement(6, 42, 0)?;
/// each_once.sort();
/// assert_eq!(each_once, [0, 1, 2, 3, 4, 5]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct WeightedSampler {
    weights: Vec<f64>,
    /// The sum of the weights up to each sample.
    sums: Vec<f64>,
    /// Samples that can be drawn.
    drawable: usize,
}

impl WeightedSampler {
    /// A sampler of as many samples as there are weights; one of weight 0 is never drawn.
    ///
    /// # Errors
    ///
    /// If a weight is negative or not finite, or all are 0, or their sum is not finite.
    pub fn new(weights: impl Into<Vec<f64>>) -> Result<Self> {
        let weights = weights.into();
        for (index, &weight) in weights.iter().enumerate() {
            if !(weight >= 0.0 && weight.is_finite()) {
                return Err(refused(&format!("sample {index} has the weight {weight}")));
            }
        }
        let sums: Vec<f64> = weights
            .iter()
            .scan(0.0, |sum, weight| {
                *sum += weight;
                Some(*sum)
            })
            .collect();
        match sums.last() {
            Some(sum) if *sum > 0.0 && sum.is_finite() => {}
            sum => return Err(refused(&format!("their sum is {}", sum.unwrap_or(&0.0)))),
        }
        let drawable = weights.iter().filter(|&&weight| weight > 0.0).count();
        Ok(Self {
            weights,
            sums,
            drawable,
        })
    }

    /// The number of samples.
    #[must_use]
    #[expect(
        clippy::len_without_is_empty,
        reason = "there is always a sample that can be drawn"
    )]
    pub fn len(&self) -> usize {
        self.weights.len()
    }

    /// Draws this many samples for this epoch, each from all samples.
    #[must_use]
    pub fn with_replacement(&self, draws: usize, seed: u64, epoch: u64) -> Vec<u64> {
        let total = self.sums.last().copied().unwrap_or(0.0);
        let draw = |number: usize| {
            let target = uniform(&[REPLACED_TAG, seed, epoch, number as u64]) * total;
            // The product can be rounded up to the sum, behind which there is no sample.
            let index = self.sums.partition_point(|&sum| sum <= target);
            match index < self.sums.len() {
                true => index as u64,
                false => self.last_drawable(),
            }
        };
        (0..draws).map(draw).collect()
    }

    /// Draws this many different samples for this epoch, in the order in which they are drawn.
    ///
    /// # Errors
    ///
    /// If fewer have a weight above 0.
    pub fn without_replacement(&self, draws: usize, seed: u64, epoch: u64) -> Result<Vec<u64>> {
        if draws > self.drawable {
            return Err(Error::new(
                Kind::Other,
                format!(
                    "{draws} samples cannot be drawn without replacement, only {} have a weight above 0: \
                     draw fewer, or with replacement",
                    self.drawable
                ),
            ));
        }
        // The time until a sample is seen, at a rate that is its weight.
        let mut times: Vec<(f64, u64)> = (0_u64..)
            .zip(&self.weights)
            .filter(|(_, weight)| **weight > 0.0)
            .map(|(index, weight)| {
                let unit = 1.0 - uniform(&[DISTINCT_TAG, seed, epoch, index]);
                (-unit.ln() / weight, index)
            })
            .collect();
        times.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        times.truncate(draws);
        Ok(times.into_iter().map(|(_, index)| index).collect())
    }

    fn last_drawable(&self) -> u64 {
        let last = self.weights.iter().rposition(|&weight| weight > 0.0);
        last.unwrap_or(0) as u64
    }
}

fn refused(found: &str) -> Error {
    Error::new(
        Kind::Other,
        format!("the weights of samples are finite numbers from 0, not all of them 0; {found}"),
    )
}

/// Uniform in [0, 1), in steps of 2⁻⁵³.
fn uniform(parts: &[u64]) -> f64 {
    (mix(parts) >> 11) as f64 / (1_u64 << 53) as f64
}

/// "replaced" and "distinct" in ASCII.
const REPLACED_TAG: u64 = 0x7265_706c_6163_6564;
const DISTINCT_TAG: u64 = 0x6469_7374_696e_6374;

#[cfg(test)]
mod tests {
    use super::*;

    fn shares(order: impl IntoIterator<Item = u64>, len: usize) -> Vec<f64> {
        let mut counts = vec![0.0; len];
        let mut total = 0.0;
        for index in order {
            counts[index as usize] += 1.0;
            total += 1.0;
        }
        counts.iter().map(|count| count / total).collect()
    }

    fn assert_near(found: &[f64], expected: &[f64]) {
        for (found, expected) in found.iter().zip(expected) {
            assert!(
                (found - expected).abs() < 0.01,
                "{found} is not about {expected}"
            );
        }
    }

    #[test]
    fn draws_follow_the_weights() {
        let sampler = WeightedSampler::new([1.0, 0.0, 3.0, 6.0]).unwrap();
        let expected = [0.1, 0.0, 0.3, 0.6];
        let one_epoch = sampler.with_replacement(40_000, 1, 2);
        assert_near(&shares(one_epoch, 4), &expected);
        let first = (0..20_000).map(|epoch| sampler.with_replacement(1, 1, epoch)[0]);
        assert_near(&shares(first, 4), &expected);
        let firsts = (0..20_000).map(|epoch| sampler.without_replacement(2, 1, epoch).unwrap());
        let (first, second): (Vec<_>, Vec<_>) = firsts.map(|drawn| (drawn[0], drawn[1])).unzip();
        assert_near(&shares(first, 4), &expected);
        // P(second = i) = sum over j of p(j) p(i) / (1 - p(j)).
        let p = expected;
        let wanted = [0, 1, 2, 3].map(|i| {
            let others = [0, 1, 2, 3].into_iter().filter(|&j| j != i);
            others.map(|j| p[j] * p[i] / (1.0 - p[j])).sum::<f64>()
        });
        assert_near(&shares(second, 4), &wanted);
    }

    #[test]
    fn epochs_and_seeds_differ_and_come_again() {
        let sampler = WeightedSampler::new(vec![1.0; 50]).unwrap();
        let drawn = |seed, epoch| {
            let distinct = sampler.without_replacement(50, seed, epoch).unwrap();
            (sampler.with_replacement(50, seed, epoch), distinct)
        };
        assert_eq!(drawn(1, 2), drawn(1, 2));
        for other in [drawn(2, 2), drawn(1, 3), drawn(2, 1)] {
            assert_ne!(drawn(1, 2).0, other.0);
            assert_ne!(drawn(1, 2).1, other.1);
        }
    }

    #[test]
    fn stays_what_it_is() {
        let sampler = WeightedSampler::new([1.0, 2.0, 3.0, 4.0, 5.0]).unwrap();
        let drawn = sampler.with_replacement(12, 42, 1);
        assert_eq!(drawn, [2, 4, 4, 4, 3, 4, 4, 1, 3, 4, 1, 4]);
    }

    #[test]
    fn weights_that_cannot_be_drawn_by_are_refused() {
        for (weights, found) in [
            (vec![1.0, -1.0], "sample 1 has the weight -1"),
            (vec![f64::NAN], "sample 0 has the weight NaN"),
            (vec![0.0, 0.0], "their sum is 0"),
            (vec![], "their sum is 0"),
            (vec![f64::MAX, f64::MAX], "their sum is inf"),
        ] {
            let error = WeightedSampler::new(weights).unwrap_err();
            assert!(error.to_string().contains(found), "{error}");
        }
        let sampler = WeightedSampler::new([1.0, 0.0]).unwrap();
        let error = sampler.without_replacement(2, 0, 0).unwrap_err();
        assert!(error.to_string().contains("only 1"), "{error}");
        assert_eq!(sampler.with_replacement(3, 0, 0), [0, 0, 0]);
    }
}
