//! Batch norm by the statistics of the batch.

use std::sync::{Arc, OnceLock};

use burn_flex::FlexTensor;

use super::loops::{TASK, for_each, shape, tensor, values, vectorised, zeros};
use super::math::{sum, sum_of_pairs};
use crate::backend::{Backprop, Forward};

/// The mean and the biased variance of each channel, which the operation sets.
pub(crate) type Statistics = Arc<OnceLock<[Vec<f32>; 2]>>;

/// Returns the operation on an input of `[batch, channels, …]`, a scale and a shift.
pub(crate) fn batch_norm(epsilon: f32, statistics: Statistics) -> Forward<3> {
    Box::new(move |inputs: [FlexTensor; 3]| {
        let [x, gamma, beta] = inputs.map(|input| input.to_contiguous());
        let planes = Planes::of(&x);
        let scale = |variance: f32| 1.0 / (variance + epsilon).sqrt();
        let mut out = zeros(values(&x).len());
        let [mean, variance] = planes.for_channels(
            &mut out,
            [values(&x); 2],
            #[inline(always)]
            |_, planes| {
                let mean = planes.mean(
                    #[inline(always)]
                    |x, _| sum(x, |x| x),
                );
                let variance = planes.mean(
                    #[inline(always)]
                    |x, _| sum(x, |x| (x - mean) * (x - mean)),
                );
                [mean, variance]
            },
            #[inline(always)]
            |channel, [mean, variance], out, x, _| {
                let factor = scale(variance) * values(&gamma)[channel];
                let shift = values(&beta)[channel];
                for at in 0..out.len() {
                    out[at] = (x[at] - mean).mul_add(factor, shift);
                }
            },
        );
        let scale: Vec<f32> = variance.iter().map(|variance| scale(*variance)).collect();
        let output = tensor(out, shape(&x));
        // Nothing else sets them.
        let _ = statistics.set([mean.clone(), variance]);
        let back: Backprop<3> = Box::new(move |gradient, [needs_input, ..]| {
            let gradient = gradient.to_contiguous();
            let g = values(&gradient);
            let mut dx = zeros(if needs_input { g.len() } else { 0 });
            let [level, along] = planes.for_channels(
                &mut dx,
                [values(&x), g],
                #[inline(always)]
                |channel, planes| {
                    let (mean, scale) = (mean[channel], scale[channel]);
                    let level = planes.mean(
                        #[inline(always)]
                        |_, g| sum(g, |g| g),
                    );
                    let along = planes.mean(
                        #[inline(always)]
                        |x, g| scale * sum_of_pairs(x, g, |sum, x, g| (x - mean).mul_add(g, sum)),
                    );
                    [level, along]
                },
                #[inline(always)]
                |channel, [level, along], dx, x, g| {
                    let (mean, slope) = (mean[channel], -along * scale[channel]);
                    let factor = scale[channel] * values(&gamma)[channel];
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

    /// Computes the statistics of each channel, then calls `work` with them and each of the channel's planes, in `out`
    /// and in the inputs, while the inputs are in the cache. Returns the statistics. If `out` is empty, `work` is not
    /// called.
    fn for_channels(
        self,
        out: &mut [f32],
        [x, y]: [&[f32]; 2],
        statistics: impl Fn(usize, Channel<'_>) -> [f32; 2] + Sync,
        work: impl Fn(usize, [f32; 2], &mut [f32], &[f32], &[f32]) + Sync,
    ) -> [Vec<f32>; 2] {
        let Self {
            batch,
            channels,
            len,
        } = self;
        let at_once = (TASK / (batch * len)).clamp(1, channels);
        let [mut first, mut second] = [(); 2].map(|()| vec![0.0; channels]);
        let parts = first.chunks_mut(at_once).zip(second.chunks_mut(at_once));
        let mut parts: Vec<_> = parts.map(|parts| (parts, Vec::new())).collect();
        for item in out.chunks_exact_mut(channels * len) {
            for ((_, outs), out) in parts.iter_mut().zip(item.chunks_mut(at_once * len)) {
                outs.push(out);
            }
        }
        for_each(
            x.len(),
            parts.into_iter(),
            |part, ((first, second), mut outs)| {
                for at in 0..first.len() {
                    let channel = part * at_once + at;
                    vectorised(
                        #[inline(always)]
                        || {
                            let planes = Channel {
                                planes: self,
                                channel,
                                x,
                                y,
                            };
                            let of_channel = statistics(channel, planes);
                            [first[at], second[at]] = of_channel;
                            for (item, out) in outs.iter_mut().enumerate() {
                                let out = &mut out[at * len..][..len];
                                let (x, y) = planes.of(item);
                                work(channel, of_channel, out, x, y);
                            }
                        },
                    );
                }
            },
        );
        [first, second]
    }
}

/// The planes of a channel in two tensors.
#[derive(Clone, Copy)]
struct Channel<'a> {
    planes: Planes,
    channel: usize,
    x: &'a [f32],
    y: &'a [f32],
}

impl<'a> Channel<'a> {
    /// Returns the planes of an item.
    #[inline(always)]
    fn of(self, item: usize) -> (&'a [f32], &'a [f32]) {
        let Planes { channels, len, .. } = self.planes;
        let start = (item * channels + self.channel) * len;
        (&self.x[start..][..len], &self.y[start..][..len])
    }

    /// Returns the mean of the values that `sum` adds up in each pair of planes.
    #[inline(always)]
    fn mean(self, sum: impl Fn(&[f32], &[f32]) -> f32) -> f32 {
        let mut total = 0.0;
        for item in 0..self.planes.batch {
            let (x, y) = self.of(item);
            total += sum(x, y);
        }
        total / self.planes.of_channel()
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
