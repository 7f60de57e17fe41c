use core::fmt;

use accelerator_collective::{ProcessGroup, ReduceOp};
use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use crate::core::agreement::sides;
use crate::core::error::{Error, Result};

/// A metric that is computed from sums over samples, so the sums of all ranks give its value over all samples. Tuples
/// of metrics are metrics.
///
/// One method shows every sum, always in the same order. How many there are may be known at run
/// time only; [`Accelerator::reduce_metric`](crate::Accelerator::reduce_metric) makes sure that all ranks have
/// the same.
///
/// ```
/// use accelerator::metric::{Metric, Sums};
///
/// /// How often each byte came.
/// struct Histogram { counts: Vec<f64>, total: f64 }
///
/// impl Metric for Histogram {
///     fn sums(&mut self, sums: &mut Sums<'_>) {
///         sums.all(&mut self.counts);
///         sums.one(&mut self.total);
///     }
/// }
///
/// let accelerator = accelerator::Accelerator::new()?;
/// let mine = Histogram { counts: vec![0.0; 256], total: 0.0 };
/// let all = accelerator.reduce_metric(mine)?;
/// # assert_eq!(all.counts.len(), 256);
/// # Ok::<(), accelerator::Error>(())
/// ```
pub trait Metric {
    /// Shows its sums: first they are read, then overwritten with those of all ranks.
    fn sums(&mut self, sums: &mut Sums<'_>);

    /// Returns a name by which ranks that reduce different metrics with as many sums are found out: that
    /// of the type, unless it says more.
    ///
    /// ```
    /// use accelerator::metric::{Metric, Sums};
    ///
    /// /// Hits within a distance, which all ranks must mean alike.
    /// struct Within { distance: f64, hits: f64 }
    ///
    /// impl Metric for Within {
    ///     fn sums(&mut self, sums: &mut Sums<'_>) {
    ///         sums.one(&mut self.hits);
    ///     }
    ///
    ///     fn name(&self) -> String {
    ///         format!("within {}", self.distance)
    ///     }
    /// }
    ///
    /// let errors = accelerator::launch(2, |accelerator| {
    ///     let mine = Within { distance: accelerator.rank() as f64, hits: 3.0 };
    ///     Ok(accelerator.reduce_metric(mine).err())
    /// })?;
    /// assert!(errors.into_iter().flatten().all(|error| error.is_misuse()));
    /// # Ok::<(), accelerator::Error>(())
    /// ```
    fn name(&self) -> String {
        short(core::any::type_name::<Self>())
    }
}

/// The visitor to which a [`Metric`] shows its sums.
#[derive(Debug)]
pub struct Sums<'a> {
    pass: SumsPass<'a>,
    lengths: Vec<usize>,
}

#[derive(Debug)]
enum SumsPass<'a> {
    /// Sums are appended.
    Read(&'a mut Vec<f64>),
    /// Sums are replaced by these; those at the front come next.
    Write(&'a [f64]),
}

impl Sums<'_> {
    /// Shows one sum.
    pub fn one(&mut self, sum: &mut f64) {
        self.all(core::slice::from_mut(sum));
    }

    /// Shows several sums.
    pub fn all(&mut self, sums: &mut [f64]) {
        self.lengths.push(sums.len());
        match &mut self.pass {
            SumsPass::Read(read) => read.extend_from_slice(sums),
            SumsPass::Write(rest) => {
                // A metric that shows more than it did at first keeps its own value for that.
                let (next, others) = rest.split_at(sums.len().min(rest.len()));
                sums[..next.len()].copy_from_slice(next);
                *rest = others;
            }
        }
    }
}

/// The metric over all ranks.
///
/// Ahead of the sums travel a digest of what they are and its square: over all ranks, the mean of the
/// squares is the square of the mean only where all digests are equal. Every rank sees the same
/// figures, so all of them find the same.
#[track_caller]
pub(crate) fn reduce<M: Metric>(group: &ProcessGroup, mut metric: M) -> Result<M> {
    let mut values = vec![0.0; HEAD];
    let mut sums = Sums {
        pass: SumsPass::Read(&mut values),
        lengths: Vec::new(),
    };
    metric.sums(&mut sums);
    let lengths = sums.lengths;
    let name = metric.name();
    let digest = digest(&name, &lengths);
    values[0] = digest;
    values[1] = digest * digest;
    group.all_reduce(&mut values, ReduceOp::Sum)?;
    let (head, values) = values.split_at(HEAD);
    // Whole numbers of at most 2^53, which f64 adds up exactly.
    let (sum, squares) = (head[0] as u128, head[1] as u128);
    if squares * group.world_size() as u128 != sum * sum {
        let metrics = group.for_purpose("a metric");
        return Err(differing(&metrics.all_gather_object(&(name, lengths))?));
    }
    metric.sums(&mut Sums {
        pass: SumsPass::Write(values),
        lengths: Vec::new(),
    });
    Ok(metric)
}

macro_rules! tuples {
    ($($metric:ident),+) => {
        impl<$($metric: Metric),+> Metric for ($($metric,)+) {
            #[allow(non_snake_case, reason = "the names are those of the type parameters")]
            fn sums(&mut self, sums: &mut Sums<'_>) {
                let ($($metric,)+) = self;
                $($metric.sums(sums);)+
            }

            #[allow(non_snake_case, reason = "the names are those of the type parameters")]
            fn name(&self) -> String {
                let ($($metric,)+) = self;
                let names = [$($metric.name()),+];
                format!("({})", names.join(", "))
            }
        }
    };
}

tuples!(A);
tuples!(A, B);
tuples!(A, B, C);
tuples!(A, B, C, D);
tuples!(A, B, C, D, E);
tuples!(A, B, C, D, E, F);

impl<M: Metric> Metric for Vec<M> {
    fn sums(&mut self, sums: &mut Sums<'_>) {
        self.iter_mut().for_each(|metric| metric.sums(sums));
    }

    fn name(&self) -> String {
        let names: Vec<_> = self.iter().map(Metric::name).collect();
        match names.first() {
            Some(first) if names.iter().all(|name| name == first) => {
                format!("[{first}; {}]", names.len())
            }
            _ => format!("[{}]", names.join(", ")),
        }
    }
}

const HEAD: usize = 2;

/// A whole number below 2^18, the square of which can be added up over 2^17 ranks without rounding.
fn digest(name: &str, lengths: &[usize]) -> f64 {
    let name = name.bytes().map(u64::from);
    let words: Vec<u64> = core::iter::once(lengths.len() as u64)
        .chain(lengths.iter().map(|&len| len as u64))
        .chain(name)
        .collect();
    (accelerator_plan::mix(&words) >> 46) as f64
}

fn differing(ranks: &[(String, Vec<usize>)]) -> Error {
    let ranks = ranks
        .iter()
        .map(|(name, lengths)| format!("{name} with sums in pieces of {lengths:?}"));
    Error::misuse(format!(
        "reduce: metrics differ between ranks ({}); reduce the same metrics, of the same size and in the same \
         order, on every rank",
        sides(ranks)
    ))
}

/// The name of a type without the paths of modules.
fn short(name: &str) -> String {
    let mut short = String::new();
    // An identifier that a path follows is a module.
    for part in name.split_inclusive(|c: char| !(c.is_alphanumeric() || c == '_' || c == ':')) {
        short.push_str(part.rsplit("::").next().unwrap_or(part));
    }
    short
}

/// A weighted mean, for example of a loss. Without samples, its value is NaN.
///
/// The means of all ranks, each over its own values, as in an evaluation, are combined by
/// [`Accelerator::reduce_metric`](crate::Accelerator::reduce_metric). The training loss of
/// [`AveragedGradients::loss`](crate::AveragedGradients::loss) is that of all ranks already: it only needs to be added up.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Mean {
    pub(super) sum: f64,
    pub(super) samples: f64,
}

impl Mean {
    /// Makes a mean without samples.
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes a mean with the value `value` over `samples` samples.
    pub fn of(value: f64, samples: usize) -> Self {
        Self::weighted(value, samples as f64)
    }

    /// Makes a weighted mean. A value that counts for nothing may be NaN.
    pub(crate) fn weighted(value: f64, samples: f64) -> Self {
        let sum = if samples > 0.0 { value * samples } else { 0.0 };
        Self { sum, samples }
    }

    pub(crate) fn merge(&mut self, other: Self) {
        self.sum += other.sum;
        self.samples += other.samples;
    }

    /// Adds the mean `value` of `samples` samples. If `samples` is 0, adds nothing.
    pub fn update(&mut self, value: f64, samples: usize) {
        self.merge(Self::of(value, samples));
    }

    /// Adds a value with a weight, such as the number of tokens over which it is the mean. A weight of 0 adds
    /// nothing.
    ///
    /// ```
    /// use accelerator::metric::Mean;
    ///
    /// let mut mean = Mean::new();
    /// mean.update_weighted(2.0, 0.5);
    /// mean.update_weighted(4.0, 1.5);
    /// assert_eq!(mean.value(), 3.5);
    /// ```
    pub fn update_weighted(&mut self, value: f64, weight: f64) {
        self.merge(Self::weighted(value, weight));
    }

    /// Adds a loss, the mean over `samples` samples.
    pub fn update_with(&mut self, loss: Tensor<1>, samples: usize) {
        if samples > 0 {
            self.update(loss.into_scalar::<f64>(), samples);
        }
    }

    /// Returns the mean so far.
    pub fn value(&self) -> f64 {
        self.sum / self.samples
    }

    /// Returns the number of samples.
    pub fn samples(&self) -> f64 {
        self.samples
    }
}

impl fmt::Display for Mean {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.*}", f.precision().unwrap_or(4), self.value())
    }
}

impl Metric for Mean {
    fn sums(&mut self, sums: &mut Sums<'_>) {
        sums.one(&mut self.sum);
        sums.one(&mut self.samples);
    }
}

/// A total over all samples of all ranks, for example of tokens, seconds or events.
///
/// ```
/// use accelerator::metric::Sum;
///
/// let totals = accelerator::launch(2, |accelerator| {
///     let (mut tokens, mut skipped) = (Sum::new(), Sum::new());
///     tokens.update(100.0 + accelerator.rank() as f64);
///     skipped.count(1);
///     let (tokens, skipped) = accelerator.reduce_metric((tokens, skipped))?;
///     Ok((tokens.value(), skipped.value()))
/// })?;
/// assert_eq!(totals, [(201.0, 2.0); 2]);
/// # Ok::<(), accelerator::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Sum(f64);

impl Sum {
    /// Makes a sum of 0.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a value.
    pub fn update(&mut self, value: f64) {
        self.0 += value;
    }

    /// Adds a number of things. Counts are exact up to 2⁵³.
    pub fn count(&mut self, things: usize) {
        self.0 += things as f64;
    }

    /// Returns the sum so far.
    pub fn value(&self) -> f64 {
        self.0
    }
}

impl fmt::Display for Sum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl Metric for Sum {
    fn sums(&mut self, sums: &mut Sums<'_>) {
        sums.one(&mut self.0);
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::metric::{Accuracy, Confusion, TopK};

    #[test]
    fn collections_of_any_size_are_reduced_together() {
        let reduced = crate::launch(3, |accelerator| {
            let means = vec![Mean::of(accelerator.rank() as f64, 2); 4];
            let mut confusion = Confusion::new(2);
            confusion.count(&[1], &[0])?;
            accelerator.reduce_metric((means, confusion))
        })
        .unwrap();
        for (means, confusion) in reduced {
            assert_eq!(means, vec![Mean::of(1.0, 6); 4]);
            assert_eq!(confusion.of(1, 0), 3);
        }
    }

    /// Both orders have the same number of sums in all.
    #[test]
    fn sums_in_another_order_are_refused_on_every_rank() {
        let errors = crate::launch(3, |accelerator| {
            let (two, three) = (Confusion::new(2), Confusion::new(3));
            let outcome = if accelerator.rank() == 2 {
                accelerator.reduce_metric((two, three)).map(drop)
            } else {
                accelerator.reduce_metric((three, two)).map(drop)
            };
            let error = outcome.unwrap_err();
            accelerator.wait_for_everyone()?;
            Ok(error)
        })
        .unwrap();
        for error in errors {
            assert!(error.is_misuse(), "{error:?}");
            let text = error.to_string();
            assert!(
                text.contains("ranks 0, 1: (Confusion, Confusion) with sums in pieces of [9, 4]")
                    && text
                        .contains("rank 2: (Confusion, Confusion) with sums in pieces of [4, 9]"),
                "{text}"
            );
        }
    }

    /// The metrics have the same size, and pieces of the same lengths.
    #[test]
    fn another_kind_of_metric_is_refused_on_every_rank() {
        let errors = crate::launch(2, |accelerator| {
            let mean = Mean::of(1.0, 2);
            let error = if accelerator.is_main_process() {
                accelerator
                    .reduce_metric((mean, vec![mean; 2]))
                    .unwrap_err()
            } else {
                let others = (Accuracy::new(), vec![mean; 2]);
                accelerator.reduce_metric(others).unwrap_err()
            };
            let other_k = accelerator.reduce_metric(TopK::new(accelerator.rank()));
            assert!(other_k.unwrap_err().is_misuse());
            Ok(error)
        })
        .unwrap();
        for error in errors {
            assert!(error.is_misuse(), "{error:?}");
            let text = error.to_string();
            assert!(
                text.contains("rank 0: (Mean, [Mean; 2]) with")
                    && text.contains("rank 1: (Accuracy, [Mean; 2]) with"),
                "{text}"
            );
        }
    }

    #[test]
    fn another_number_of_sums_is_refused_on_every_rank() {
        let errors = crate::launch(2, |accelerator| {
            let confusion = Confusion::new(2 + accelerator.rank());
            Ok(accelerator.reduce_metric(confusion).unwrap_err())
        })
        .unwrap();
        assert!(errors.iter().all(crate::Error::is_collective), "{errors:?}");
    }

    #[test]
    fn a_mean_of_nothing_ignores_the_value() {
        let mut mean = Mean::new();
        mean.update(f64::NAN, 0);
        mean.update(2.0, 4);
        assert_eq!(mean.value(), 2.0);
    }
}
