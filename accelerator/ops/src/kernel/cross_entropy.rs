//! The cross-entropy of probabilities by softmax, without the probabilities.

use burn_flex::FlexTensor;

use super::loops::{TASK, for_each, for_parts, shape, tensor, values, vectorised, zeros};
use super::math::{exp, largest, sum};
use crate::backend::{Backprop, Forward};

/// Returns the operation on logits of `[rows, classes]`: the mean cross-entropy against the class of each row.
pub(crate) fn cross_entropy(targets: Vec<usize>) -> Forward<1> {
    Box::new(move |[logits]: [FlexTensor; 1]| {
        let logits = logits.to_contiguous();
        let classes = shape(&logits)[1];
        let rows = targets.len();
        let at_once = (TASK / classes).max(1);
        let mut softmax = vec![RowSoftmax::default(); rows];
        let mut losses = vec![0.0; rows];
        let parts = softmax.chunks_mut(at_once).zip(losses.chunks_mut(at_once));
        let inputs = values(&logits);
        for_each(inputs.len(), parts, |part, (softmax, losses)| {
            for (at, (softmax, loss)) in softmax.iter_mut().zip(losses).enumerate() {
                let row = part * at_once + at;
                let logits = &inputs[row * classes..][..classes];
                *softmax = RowSoftmax::of(logits);
                *loss = softmax.sum.ln() - (logits[targets[row]] - softmax.largest);
            }
        });
        let loss = sum(&losses, |loss| loss) / rows as f32;
        let back: Backprop<1> = Box::new(move |gradient, _| {
            let of_row = values(&gradient)[0] / rows as f32;
            let inputs = values(&logits);
            let mut gradients = zeros(inputs.len());
            for_parts(&mut gradients, at_once * classes, |part, gradients| {
                for (at, gradients) in gradients.chunks_exact_mut(classes).enumerate() {
                    let row = part * at_once + at;
                    let logits = &inputs[row * classes..][..classes];
                    let RowSoftmax { largest, sum } = softmax[row];
                    let scale = of_row / sum;
                    vectorised(
                        #[inline(always)]
                        || {
                            for class in 0..classes {
                                gradients[class] = exp(logits[class] - largest) * scale;
                            }
                        },
                    );
                    gradients[targets[row]] -= of_row;
                }
            });
            [Some(tensor(gradients, shape(&logits)))]
        });
        (tensor(vec![loss], [1]), back)
    })
}

/// The numbers of a row by which its probabilities are computed again.
#[derive(Clone, Copy, Default)]
struct RowSoftmax {
    largest: f32,
    /// The sum of the exponentials relative to the largest.
    sum: f32,
}

impl RowSoftmax {
    fn of(logits: &[f32]) -> Self {
        vectorised(
            #[inline(always)]
            || {
                let largest = largest(logits);
                let sum = sum(logits, |logit| exp(logit - largest));
                Self { largest, sum }
            },
        )
    }
}
