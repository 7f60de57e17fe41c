//! Attention of several heads, from projected queries, keys and values.

use std::borrow::Cow;
use std::sync::OnceLock;

use burn_flex::FlexTensor;

use super::dropout::Dropout;
use super::loops::{for_each, tensor, values, vectorised, zeros};
use super::math::{dot, exp, largest, sum};
use super::product::{Matrix, Onto, product};
use crate::backend::{Backprop, Forward};

/// Scaled dot-product attention: queries of `[batch, queries, width]`, keys and values of `[batch, keys, width]`, where
/// the width is divided among heads.
#[derive(Clone, Debug)]
pub(crate) struct Attention {
    pub(crate) heads: usize,
    pub(crate) mask: Option<Mask>,
    /// The dropout of probabilities.
    pub(crate) dropout: Option<Dropout>,
    /// The number of probabilities above which they are computed again in backward, rather than kept.
    pub(crate) most_kept: usize,
}

/// The scores that attention replaces by a number, before it takes probabilities of them.
#[derive(Clone, Debug)]
pub(crate) struct Mask {
    pub(crate) number: f32,
    /// One for each key of each sequence, or of the only one, which is that of all.
    pub(crate) of_keys: Option<Vec<bool>>,
    /// One for each key of each query of each sequence, or of the only one, which is that of all.
    pub(crate) of_pairs: Option<Vec<bool>>,
}

/// The usual `most_kept` of an [`Attention`]: 64 MiB.
pub(crate) const MOST_KEPT: usize = 1 << 24;

impl Attention {
    pub(crate) fn forward(self) -> Forward<3> {
        Box::new(move |inputs| {
            let inputs = inputs.map(|input| input.to_contiguous());
            let sizes = Sizes::of(&inputs, self.heads);
            let kept = (0..sizes.batch).map(|_| OnceLock::new()).collect();
            let run = Run {
                attention: self,
                inputs,
                sizes,
                kept,
            };
            let output = run.output();
            let back: Backprop<3> = Box::new(move |gradient, needs| {
                let mut needs = needs.into_iter();
                let gradients = run.back(&gradient.to_contiguous());
                gradients.map(|gradient| needs.next().unwrap_or(true).then_some(gradient))
            });
            (output, back)
        })
    }
}

#[derive(Clone, Copy)]
struct Sizes {
    batch: usize,
    queries: usize,
    keys: usize,
    width: usize,
    heads: usize,
    /// The width of a head.
    head: usize,
}

impl Sizes {
    fn of([query, key, _]: &[FlexTensor; 3], heads: usize) -> Self {
        let [batch, queries, width] = query.layout().shape().dims();
        let [_, keys, _] = key.layout().shape().dims();
        Self {
            batch,
            queries,
            keys,
            width,
            heads,
            head: width / heads,
        }
    }
}

/// Attention of these inputs.
struct Run {
    attention: Attention,
    inputs: [FlexTensor; 3],
    sizes: Sizes,
    /// The probabilities of each sequence, if there are few: `[heads, queries, keys]`.
    kept: Vec<OnceLock<Vec<f32>>>,
}

impl Run {
    fn output(&self) -> FlexTensor {
        let Sizes {
            batch,
            queries,
            keys,
            width,
            heads,
            ..
        } = self.sizes;
        let [_, _, value] = self.inputs.each_ref().map(values);
        let mut out = zeros(batch * queries * width);
        let work = batch * queries * (width + heads * keys);
        let parts = out.chunks_mut((queries * width).max(1));
        for_each(work, parts, |sequence, out| {
            let probabilities = self.probabilities(sequence);
            let weights = self.weights(sequence, &probabilities);
            for head in 0..heads {
                let p = &weights[head * queries * keys..][..queries * keys];
                let p = Matrix::new(p, [queries, keys], keys);
                let value = self.head(value, keys, sequence, head);
                product(
                    &mut out[head * self.sizes.head..],
                    width,
                    Onto::Nothing,
                    p,
                    value,
                );
            }
            if self.sizes.batch * probabilities.len() <= self.attention.most_kept {
                let _ = self.kept[sequence].set(probabilities);
            }
        });
        tensor(out, [batch, queries, width])
    }

    /// Returns the part of a head in the queries, keys or values of a sequence.
    fn head<'a>(&self, of: &'a [f32], rows: usize, sequence: usize, head: usize) -> Matrix<'a> {
        let Sizes {
            width, head: wide, ..
        } = self.sizes;
        let start = sequence * rows * width + head * wide;
        let of = of.get(start..).unwrap_or(&[]);
        Matrix::new(of, [rows, wide], width)
    }

    /// Computes the probabilities of a sequence, head by head.
    fn probabilities(&self, sequence: usize) -> Vec<f32> {
        let Sizes {
            queries,
            keys,
            heads,
            head: wide,
            ..
        } = self.sizes;
        let [query, key, _] = self.inputs.each_ref().map(values);
        let scale = 1.0 / (wide as f32).sqrt();
        let mut all = vec![0.0; heads * queries * keys];
        for (head, scores) in all.chunks_exact_mut((queries * keys).max(1)).enumerate() {
            let query = self.head(query, queries, sequence, head);
            let key = self.head(key, keys, sequence, head);
            product(scores, keys, Onto::Nothing, query, key.transposed());
            for (number, row) in scores.chunks_exact_mut(keys).enumerate() {
                vectorised(
                    #[inline(always)]
                    || {
                        for score in row.iter_mut() {
                            *score *= scale;
                        }
                    },
                );
                self.for_masked(sequence, number, |key, number| row[key] = number);
                softmax(row);
            }
        }
        all
    }

    /// Returns the weights of values: the probabilities of a sequence, after dropout.
    fn weights<'a>(&self, sequence: usize, probabilities: &'a [f32]) -> Cow<'a, [f32]> {
        match self.attention.dropout {
            None => Cow::Borrowed(probabilities),
            Some(dropout) => {
                let mut weights = probabilities.to_vec();
                dropout.apply_to(&mut weights, sequence * probabilities.len());
                Cow::Owned(weights)
            }
        }
    }

    /// Calls `work` with each key that is masked for a query, and the mask's number.
    fn for_masked(&self, sequence: usize, query: usize, mut work: impl FnMut(usize, f32)) {
        let Some(mask) = &self.attention.mask else {
            return;
        };
        let Sizes { queries, keys, .. } = self.sizes;
        let of_keys = mask
            .of_keys
            .as_ref()
            .map(|mask| &mask[sequence * keys % mask.len()..][..keys]);
        let pairs = (sequence * queries + query) * keys;
        let of_pairs = mask
            .of_pairs
            .as_ref()
            .map(|mask| &mask[pairs % mask.len()..][..keys]);
        for is_masked in [of_keys, of_pairs].into_iter().flatten() {
            for (key, _) in is_masked
                .iter()
                .enumerate()
                .filter(|(_, is_masked)| **is_masked)
            {
                work(key, mask.number);
            }
        }
    }

    /// Returns the gradients of queries, keys and values.
    fn back(&self, gradient: &FlexTensor) -> [FlexTensor; 3] {
        let Sizes {
            batch,
            queries,
            keys,
            width,
            heads,
            head: wide,
        } = self.sizes;
        let [query, key, value] = self.inputs.each_ref().map(values);
        let g = values(gradient);
        let scale = 1.0 / (wide as f32).sqrt();
        let lens = [queries * width, keys * width, keys * width];
        let [mut dquery, mut dkey, mut dvalue] = lens.map(|len| zeros(batch * len));
        let parts = dkey
            .chunks_mut(lens[1].max(1))
            .zip(dvalue.chunks_mut(lens[2].max(1)));
        let parts = dquery.chunks_mut(lens[0].max(1)).zip(parts);
        for_each(
            batch * queries * (width + heads * keys),
            parts,
            |sequence, (dquery, (dkey, dvalue))| {
                let again;
                let probabilities = match self.kept[sequence].get() {
                    Some(kept) => kept,
                    None => {
                        again = self.probabilities(sequence);
                        &again
                    }
                };
                let weights = self.weights(sequence, probabilities);
                let mut dscores = vec![0.0; queries * keys];
                for head in 0..heads {
                    let p = &probabilities[head * queries * keys..][..queries * keys];
                    let column = head * wide;
                    let g = self.head(g, queries, sequence, head);
                    let of_weights = &weights[head * queries * keys..][..queries * keys];
                    let of_weights = Matrix::new(of_weights, [queries, keys], keys);
                    product(
                        &mut dvalue[column..],
                        width,
                        Onto::Nothing,
                        of_weights.transposed(),
                        g,
                    );
                    let value = self.head(value, keys, sequence, head);
                    product(&mut dscores, keys, Onto::Nothing, g, value.transposed());
                    if let Some(dropout) = self.attention.dropout {
                        let first = sequence * probabilities.len() + head * queries * keys;
                        dropout.apply_to(&mut dscores, first);
                    }
                    let rows = dscores.chunks_exact_mut(keys).zip(p.chunks_exact(keys));
                    for (number, (dscores, p)) in rows.enumerate() {
                        softmax_back(dscores, p, scale);
                        self.for_masked(sequence, number, |key, _| dscores[key] = 0.0);
                    }
                    let of_scores = Matrix::new(&dscores, [queries, keys], keys);
                    let key = self.head(key, keys, sequence, head);
                    product(&mut dquery[column..], width, Onto::Nothing, of_scores, key);
                    let query = self.head(query, queries, sequence, head);
                    product(
                        &mut dkey[column..],
                        width,
                        Onto::Nothing,
                        of_scores.transposed(),
                        query,
                    );
                }
            },
        );
        [
            tensor(dquery, [batch, queries, width]),
            tensor(dkey, [batch, keys, width]),
            tensor(dvalue, [batch, keys, width]),
        ]
    }
}

fn softmax(row: &mut [f32]) {
    vectorised(
        #[inline(always)]
        || {
            let top = largest(row);
            for score in row.iter_mut() {
                *score = exp(*score - top);
            }
            let all = 1.0 / sum(row, |score| score);
            for score in row.iter_mut() {
                *score *= all;
            }
        },
    );
}

/// Replaces the gradients of probabilities by those of scores, each of which was multiplied by `scale`.
fn softmax_back(gradients: &mut [f32], probabilities: &[f32], scale: f32) {
    vectorised(
        #[inline(always)]
        || {
            let along = dot(gradients, probabilities);
            let probabilities = &probabilities[..gradients.len()];
            for at in 0..gradients.len() {
                gradients[at] = (gradients[at] - along) * probabilities[at] * scale;
            }
        },
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_that_are_not_kept_are_computed_again() {
        let numbers = |seed: f32| {
            let values = (0..2 * 9 * 8).map(|at| (at as f32 * seed).sin());
            tensor(values.collect(), [2, 9, 8])
        };
        let run = |most_kept| {
            let attention = Attention {
                heads: 2,
                mask: None,
                dropout: Some(Dropout {
                    seed: 7,
                    probability: 0.3,
                }),
                most_kept,
            };
            let (y, back) = attention.forward()([numbers(0.3), numbers(0.7), numbers(1.1)]);
            let gradients = back(numbers(1.7), [true; 3]);
            let gradients = gradients.into_iter().flatten();
            gradients
                .chain([y])
                .map(|it| values(&it).to_vec())
                .collect::<Vec<_>>()
        };
        assert_eq!(run(0), run(MOST_KEPT));
    }
}
