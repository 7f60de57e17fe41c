use accelerator_collective::{ProcessGroup, ReduceOp};

use super::Metric;
use crate::core::agreement::sides;
use crate::core::error::{Error, Result};

/// The visitor to which a [`Metric`] shows its sums.
#[derive(Debug)]
pub struct Sums<'a> {
    pass: SumsPass<'a>,
    shape: Shape,
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

    /// Shows several.
    pub fn all(&mut self, sums: &mut [f64]) {
        self.shape.add(sums.len());
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
        shape: Shape::default(),
    };
    metric.sums(&mut sums);
    let lengths = sums.shape.lengths;
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
        shape: Shape::default(),
    });
    Ok(metric)
}

const HEAD: usize = 2;

/// The numbers of sums that were shown at a time.
#[derive(Debug, Default)]
struct Shape {
    lengths: Vec<usize>,
}

impl Shape {
    fn add(&mut self, len: usize) {
        self.lengths.push(len);
    }
}

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

#[cfg(all(test, feature = "flex"))]
mod tests {
    use crate::metric::{Accuracy, Confusion, Mean, TopK};

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
}
