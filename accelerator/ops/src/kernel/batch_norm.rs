//! Batch norm by the statistics of the batch.

use std::sync::{Arc, OnceLock};

use burn_flex::FlexTensor;

use super::loops::{TASK, for_each, for_parts, shape, tensor, values, vectorised};
use super::math::{sum, sum_of_pairs};
use crate::backend::{Backprop, Forward};

/// The mean and the biased variance of each channel, which the operation sets.
pub(crate) type Statistics = Arc<OnceLock<[Vec<f32>; 2]>>;

/// Returns the operation on an input of `[batch, channels, …]`, a scale and a shift.
pub(crate) fn batch_norm(epsilon: f32, statistics: Statistics) -> Forward<3> {
    Box::new(move |inputs: [FlexTensor; 3]| {
        let [x, gamma, beta] = inputs.map(|input| input.to_contiguous());
        let planes = Planes::of(&x);
        let mean = planes.means(
            values(&x),
            #[inline(always)]
            |_, x| sum(x, |x| x),
        );
        let variance = planes.means(
            values(&x),
            #[inline(always)]
            |channel, x| {
                let mean = mean[channel];
                sum(x, |x| (x - mean) * (x - mean))
            },
        );
        let scale = |variance: &f32| 1.0 / (variance + epsilon).sqrt();
        let scale: Vec<f32> = variance.iter().map(scale).collect();
        let mut out = vec![0.0; values(&x).len()];
        planes.for_each(
            &mut out,
            [values(&x); 2],
            #[inline(always)]
            |channel, out, x, _| {
                let factor = scale[channel] * values(&gamma)[channel];
                let (mean, shift) = (mean[channel], values(&beta)[channel]);
                let x = &x[..out.len()];
                for at in 0..out.len() {
                    out[at] = (x[at] - mean).mul_add(factor, shift);
                }
            },
        );
        let output = tensor(out, shape(&x));
        // Nothing else sets them.
        let _ = statistics.set([mean.clone(), variance]);
        let back: Backprop<3> = Box::new(move |gradient, [needs_input, ..]| {
            let gradient = gradient.to_contiguous();
            let g = values(&gradient);
            let level = planes.means(
                g,
                #[inline(always)]
                |_, g| sum(g, |g| g),
            );
            let along = planes.means_of_pairs(
                values(&x),
                g,
                #[inline(always)]
                |channel, x, g| {
                    let mean = mean[channel];
                    scale[channel] * sum_of_pairs(x, g, |sum, x, g| (x - mean).mul_add(g, sum))
                },
            );
            let mut dx = vec![0.0; if needs_input { g.len() } else { 0 }];
            planes.for_each(
                &mut dx,
                [values(&x), g],
                #[inline(always)]
                |channel, dx, x, g| {
                    let (mean, level) = (mean[channel], level[channel]);
                    let slope = -along[channel] * scale[channel];
                    let factor = scale[channel] * values(&gamma)[channel];
                    let (x, g) = (&x[..dx.len()], &g[..dx.len()]);
                    for at in 0..dx.len() {
                        dx[at] = (x[at] - mean).mul_add(slope, g[at] - level) * factor;
                    }
                },
            );
            let sums = |means: Vec<f32>| {
                let sums = means.iter().map(|mean| mean * planes.of_channel());
                tensor(sums.collect(), [planes.channels])
            };
            let dx = needs_input.then(|| tensor(dx, shape(&x)));
            [dx, Some(sums(along)), Some(sums(level))]
        });
        (output, back)
    })
}

/// The layout of a `[batch, channels, …]` tensor. A plane is the contiguous values of one channel of one item.
#[derive(Clone, Copy)]
struct Planes {
    batch: usize,
    channels: usize,
    len: usize,
}

impl Planes {
    fn of(x: &FlexTensor) -> Self {
        let shape = shape(x);
        let (batch, channels) = (shape[0], shape[1]);
        Self {
            batch,
            channels,
            len: shape.num_elements() / (batch * channels),
        }
    }

    /// The number of values of a channel.
    fn of_channel(self) -> f32 {
        (self.batch * self.len) as f32
    }

    /// Returns the mean of each channel. `sum` gets a channel's index and one of its planes.
    fn means(self, x: &[f32], sum: impl Fn(usize, &[f32]) -> f32 + Sync) -> Vec<f32> {
        self.means_of_pairs(
            x,
            x,
            #[inline(always)]
            |channel, x, _| sum(channel, x),
        )
    }

    /// Like [`means`](Self::means), but `sum` gets the planes of two inputs.
    fn means_of_pairs(
        self,
        x: &[f32],
        y: &[f32],
        sum: impl Fn(usize, &[f32], &[f32]) -> f32 + Sync,
    ) -> Vec<f32> {
        let mut means = vec![0.0; self.channels];
        for_each(x.len(), means.iter_mut(), |channel, mean| {
            let mut total = 0.0;
            for item in 0..self.batch {
                let start = (item * self.channels + channel) * self.len;
                let (x, y) = (&x[start..][..self.len], &y[start..][..self.len]);
                total += vectorised(
                    #[inline(always)]
                    || sum(channel, x, y),
                );
            }
            *mean = total / self.of_channel();
        });
        means
    }

    /// Calls `work` for each plane of `out`, with its channel and the matching planes of the inputs.
    fn for_each(
        self,
        out: &mut [f32],
        [x, y]: [&[f32]; 2],
        work: impl Fn(usize, &mut [f32], &[f32], &[f32]) + Sync,
    ) {
        let at_once = (TASK / self.len).max(1);
        for_parts(out, at_once * self.len, |part, out| {
            for (at, out) in out.chunks_exact_mut(self.len).enumerate() {
                let plane = part * at_once + at;
                let start = plane * self.len;
                let (x, y) = (&x[start..][..self.len], &y[start..][..self.len]);
                vectorised(
                    #[inline(always)]
                    || work(plane % self.channels, out, x, y),
                );
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channels_have_the_statistics_that_are_told() {
        let x = [1.0, 2.0, 3.0, 4.0, 10.0, 10.0, 20.0, 20.0];
        let statistics = Statistics::default();
        let operation = batch_norm(0.0, statistics.clone());
        let inputs = [
            tensor(x.to_vec(), [2, 2, 2]),
            tensor(vec![1.0, 2.0], [2]),
            tensor(vec![0.0, 5.0], [2]),
        ];
        let (y, _) = operation(inputs);
        let [mean, variance] = statistics.get().unwrap();
        assert_eq!(mean[..], [5.75, 11.75]);
        assert_eq!(variance[..], [18.1875, 68.1875]);
        let of = |x: f32, channel: usize| {
            let normed = (x - mean[channel]) / variance[channel].sqrt();
            normed * [1.0, 2.0][channel] + [0.0, 5.0][channel]
        };
        for (at, (x, y)) in x.iter().zip(values(&y)).enumerate() {
            assert!((of(*x, at / 2 % 2) - y).abs() < 1e-6);
        }
    }
}
