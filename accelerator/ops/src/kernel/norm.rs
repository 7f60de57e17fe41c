//! Layer and RMS norm over the last dimension.

use burn_flex::FlexTensor;

use super::loops::{for_parts, shape, sums, tensor, values, vectorised, zeros};
use super::math::{dot, sum};
use crate::backend::{Backprop, Forward};

/// A norm over the last dimension, with a scale for each of its values.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Norm {
    Layer { epsilon: f32 },
    Rms { epsilon: f32 },
}

/// The number of rows that one task norms.
const ROWS: usize = 64;

impl Norm {
    /// Returns the operation on an input, a scale, and a shift if there are three inputs.
    pub(crate) fn forward<const N: usize>(self) -> Forward<N> {
        Box::new(move |inputs: [FlexTensor; N]| {
            let inputs = inputs.map(|input| input.to_contiguous());
            let (y, rows) = self.apply(&inputs[0], &inputs[1], inputs.get(2));
            let back: Backprop<N> = Box::new(move |gradient, needs| {
                let gradients = self.back(&inputs[0], &inputs[1], &rows, &gradient, needs[0]);
                let mut gradients = gradients.into_iter();
                core::array::from_fn(|_| gradients.next().flatten())
            });
            (y, back)
        })
    }

    fn apply(
        self,
        x: &FlexTensor,
        gamma: &FlexTensor,
        beta: Option<&FlexTensor>,
    ) -> (FlexTensor, Vec<Row>) {
        let (of, gamma, beta) = (values(x), values(gamma), beta.map(values));
        let n = gamma.len();
        let rows: Vec<Row> = of.chunks_exact(n).map(|x| self.row(x)).collect();
        let mut out = zeros(of.len());
        for_parts(&mut out, ROWS * n, |part, out| {
            let first = part * ROWS;
            let inputs = of[first * n..].chunks_exact(n).zip(&rows[first..]);
            vectorised(
                #[inline(always)]
                || {
                    for (out, (x, row)) in out.chunks_exact_mut(n).zip(inputs) {
                        let Row { mean, scale } = *row;
                        match beta {
                            Some(beta) => {
                                let beta = &beta[..n];
                                for at in 0..n {
                                    let normed = (x[at] - mean) * scale;
                                    out[at] = normed.mul_add(gamma[at], beta[at]);
                                }
                            }
                            None => {
                                for at in 0..n {
                                    out[at] = (x[at] - mean) * scale * gamma[at];
                                }
                            }
                        }
                    }
                },
            );
        });
        (tensor(out, shape(x)), rows)
    }

    fn row(self, x: &[f32]) -> Row {
        let n = x.len() as f32;
        vectorised(
            #[inline(always)]
            || match self {
                Self::Layer { epsilon } => {
                    let mean = sum(x, |x| x) / n;
                    let variance = sum(x, |x| (x - mean) * (x - mean)) / n;
                    Row {
                        mean,
                        scale: 1.0 / (variance + epsilon).sqrt(),
                    }
                }
                Self::Rms { epsilon } => Row {
                    mean: 0.0,
                    scale: 1.0 / (sum(x, |x| x * x) / n + epsilon).sqrt(),
                },
            },
        )
    }

    /// Returns the gradients of the input, if it needs one, the scale and the shift.
    fn back(
        self,
        x: &FlexTensor,
        gamma: &FlexTensor,
        rows: &[Row],
        gradient: &FlexTensor,
        needs_input: bool,
    ) -> [Option<FlexTensor>; 3] {
        let gradient = gradient.to_contiguous();
        let (of, gamma, g) = (values(x), values(gamma), values(&gradient));
        let n = gamma.len();
        let mut dx = zeros(if needs_input { of.len() } else { 0 });
        for_parts(&mut dx, ROWS * n, |part, dx| {
            let first = part * ROWS;
            let inputs = of[first * n..]
                .chunks_exact(n)
                .zip(g[first * n..].chunks_exact(n));
            let inputs = inputs.zip(&rows[first..]);
            let mut normed = vec![0.0; n];
            vectorised(
                #[inline(always)]
                || {
                    for (dx, ((x, g), row)) in dx.chunks_exact_mut(n).zip(inputs) {
                        self.back_of_row(dx, x, g, gamma, *row, &mut normed);
                    }
                },
            );
        });
        let [dgamma, dbeta] = sums(rows.len(), [n, n], |range, [dgamma, dbeta]| {
            vectorised(
                #[inline(always)]
                || {
                    for row in range {
                        let Row { mean, scale } = rows[row];
                        let (x, g) = (&of[row * n..][..n], &g[row * n..][..n]);
                        let (dgamma, dbeta) = (&mut dgamma[..n], &mut dbeta[..n]);
                        for at in 0..n {
                            dgamma[at] = ((x[at] - mean) * scale).mul_add(g[at], dgamma[at]);
                            dbeta[at] += g[at];
                        }
                    }
                },
            );
        });
        [
            needs_input.then(|| tensor(dx, shape(x))),
            Some(tensor(dgamma, [n])),
            Some(tensor(dbeta, [n])),
        ]
    }

    #[inline(always)]
    fn back_of_row(
        self,
        dx: &mut [f32],
        x: &[f32],
        g: &[f32],
        gamma: &[f32],
        Row { mean, scale }: Row,
        normed: &mut [f32],
    ) {
        let n = x.len();
        let (dx, g, gamma) = (&mut dx[..n], &g[..n], &gamma[..n]);
        let normed = &mut normed[..n];
        for at in 0..n {
            normed[at] = (x[at] - mean) * scale;
            dx[at] = g[at] * gamma[at];
        }
        let along = dot(dx, normed) / n as f32;
        let level = match self {
            Self::Layer { .. } => sum(dx, |dx| dx) / n as f32,
            Self::Rms { .. } => 0.0,
        };
        for at in 0..n {
            dx[at] = normed[at].mul_add(-along, dx[at] - level) * scale;
        }
    }
}

/// The mean of a row, and the factor by which its values are scaled.
#[derive(Clone, Copy, Debug)]
struct Row {
    mean: f32,
    scale: f32,
}
