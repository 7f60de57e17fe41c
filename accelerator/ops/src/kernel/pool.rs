//! Max pooling and average pooling.

use core::ops::Range;

use burn::tensor::Shape;
use burn_flex::FlexTensor;

use super::loops::{TASK, for_each, for_parts, shape, tensor, values, vectorised, zeros};
use super::math::sum;
use crate::backend::{Backprop, Forward};

/// The sizes of a pooling operation. Pairs are `[height, width]`. A sequence is an image of height 1.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PoolShape {
    /// The number of images, and of channels.
    pub(crate) planes: [usize; 2],
    pub(crate) input: [usize; 2],
    pub(crate) output: [usize; 2],
    pub(crate) kernel: [usize; 2],
    pub(crate) stride: [usize; 2],
    /// The padding above and on the left.
    pub(crate) padding: [usize; 2],
}

/// The divisor in average pooling.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Divisor {
    /// The size of the window: padding counts as zeros.
    Window,
    /// The number of values in the window that are not padding.
    Values,
}

/// Returns the max pooling operation. A window has at most 255 values.
pub(crate) fn max_pool(pool: PoolShape) -> Forward<1> {
    Box::new(move |[x]: [FlexTensor; 1]| {
        let x = x.to_contiguous();
        let (y, chosen) = pool.forward(values(&x));
        let (of_input, of_output) = (shape(&x), pool.output_shape(&x));
        let back: Backprop<1> = Box::new(move |gradient, _| {
            let gradient = gradient.to_contiguous();
            let dx = pool.back(values(&gradient), &chosen);
            [Some(tensor(dx, of_input))]
        });
        (tensor(y, of_output), back)
    })
}

pub(crate) fn avg_pool(pool: PoolShape, divisor: Divisor) -> Forward<1> {
    Box::new(move |[x]: [FlexTensor; 1]| {
        let x = x.to_contiguous();
        let y = pool.means(values(&x), divisor);
        let (of_input, of_output) = (shape(&x), pool.output_shape(&x));
        let back: Backprop<1> = Box::new(move |gradient, _| {
            let gradient = gradient.to_contiguous();
            let dx = pool.spread(values(&gradient), divisor);
            [Some(tensor(dx, of_input))]
        });
        (tensor(y, of_output), back)
    })
}

impl PoolShape {
    fn output_shape(&self, x: &FlexTensor) -> Shape {
        let mut output = shape(x);
        let sides = output.num_dims() - 2;
        for side in 0..sides {
            output[2 + side] = self.output[2 - sides + side];
        }
        output
    }

    fn means(&self, x: &[f32], divisor: Divisor) -> Vec<f32> {
        let [plane_in, plane_out] = [self.input, self.output].map(|[height, width]| height * width);
        let planes = self.planes[0] * self.planes[1];
        let mut y = zeros(planes * plane_out);
        let at_once = (TASK / plane_in).max(1);
        let parts = y.chunks_mut((at_once * plane_out).max(1));
        for_each(planes * plane_in, parts, |part, y| {
            let x = x[part * at_once * plane_in..].chunks_exact(plane_in);
            for (x, y) in x.zip(y.chunks_exact_mut(plane_out)) {
                vectorised(
                    #[inline(always)]
                    || self.means_of_plane(x, y, divisor),
                );
            }
        });
        y
    }

    #[inline(always)]
    fn means_of_plane(&self, x: &[f32], y: &mut [f32], divisor: Divisor) {
        for (at, y) in y.iter_mut().enumerate() {
            let [lines, columns] = self.window(at);
            let scale = self.scale([&lines, &columns], divisor);
            let mut total = 0.0;
            for line in lines {
                let values = &x[line * self.input[1]..][columns.clone()];
                total += match values.len() < 16 {
                    true => values.iter().sum::<f32>(),
                    false => sum(values, |x| x),
                };
            }
            *y = total * scale;
        }
    }

    fn spread(&self, gradient: &[f32], divisor: Divisor) -> Vec<f32> {
        let [plane_in, plane_out] = [self.input, self.output].map(|[height, width]| height * width);
        let mut dx = zeros(self.planes[0] * self.planes[1] * plane_in);
        for_parts(&mut dx, plane_in, |plane, dx| {
            let gradient = &gradient[plane * plane_out..][..plane_out];
            for (at, gradient) in gradient.iter().enumerate() {
                let [lines, columns] = self.window(at);
                let of_value = gradient * self.scale([&lines, &columns], divisor);
                for line in lines {
                    for dx in &mut dx[line * self.input[1]..][columns.clone()] {
                        *dx += of_value;
                    }
                }
            }
        });
        dx
    }

    /// Returns the rows and columns of the window of an output, without padding.
    fn window(&self, output: usize) -> [Range<usize>; 2] {
        let at = [output / self.output[1], output % self.output[1]];
        core::array::from_fn(|side| {
            let start = at[side] * self.stride[side];
            let end = (start + self.kernel[side]).saturating_sub(self.padding[side]);
            start.saturating_sub(self.padding[side])..end.min(self.input[side])
        })
    }

    fn scale(&self, [lines, columns]: [&Range<usize>; 2], divisor: Divisor) -> f32 {
        let values = match divisor {
            Divisor::Window => self.kernel[0] * self.kernel[1],
            Divisor::Values => lines.len() * columns.len(),
        };
        1.0 / values as f32
    }

    /// Returns `true` for the windows that most networks have: 2 × 2, next to each other.
    fn is_halving(&self) -> bool {
        (self.kernel, self.stride, self.padding) == ([2, 2], [2, 2], [0, 0])
            && self.output[1] * 2 <= self.input[1]
            && self.output[0] * 2 <= self.input[0]
    }

    /// Returns the largest values, and the place of each in its window. NaN is larger than all numbers; of equal values,
    /// the first is chosen.
    fn forward(&self, x: &[f32]) -> (Vec<f32>, Vec<u8>) {
        let [plane_in, plane_out] = [self.input, self.output].map(|[height, width]| height * width);
        let values = self.planes[0] * self.planes[1] * plane_out;
        let (mut y, mut chosen) = (zeros(values), vec![0; values]);
        let len = plane_out.max(1);
        let parts = y.chunks_mut(len).zip(chosen.chunks_mut(len));
        let work = self.planes[0] * self.planes[1] * plane_in;
        for_each(work, parts, |plane, (y, chosen)| {
            let x = &x[plane * plane_in..][..plane_in];
            let width = self.output[1];
            let rows = y.chunks_mut(width).zip(chosen.chunks_mut(width));
            for (row, (y, chosen)) in rows.enumerate() {
                match self.is_halving() {
                    true => self.halve(x, row, y, chosen),
                    false => self.pool(x, row, y, chosen),
                }
            }
        });
        (y, chosen)
    }

    fn halve(&self, x: &[f32], row: usize, y: &mut [f32], chosen: &mut [u8]) {
        let width = self.input[1];
        let [upper, lower] = [2 * row, 2 * row + 1].map(|line| &x[line * width..][..2 * y.len()]);
        vectorised(
            #[inline(always)]
            || {
                let len = y.len();
                let chosen = &mut chosen[..len];
                for at in 0..len {
                    let mut top = (upper[2 * at], 0);
                    top = larger(top, (upper[2 * at + 1], 1));
                    top = larger(top, (lower[2 * at], 2));
                    (y[at], chosen[at]) = larger(top, (lower[2 * at + 1], 3));
                }
            },
        );
    }

    fn pool(&self, x: &[f32], row: usize, y: &mut [f32], chosen: &mut [u8]) {
        for (place, (y, chosen)) in y.iter_mut().zip(chosen).enumerate() {
            let mut top = (f32::NEG_INFINITY, u8::MAX);
            self.for_window([row, place], |at, from| {
                top = match top.1 {
                    u8::MAX => (x[from], at),
                    _ => larger(top, (x[from], at)),
                };
            });
            (*y, *chosen) = top;
        }
    }

    /// Calls `work` for each value of a window that is not padding: with its place there, and in the plane.
    fn for_window(&self, [row, place]: [usize; 2], mut work: impl FnMut(u8, usize)) {
        let [height, width] = self.input;
        for y in 0..self.kernel[0] {
            for x in 0..self.kernel[1] {
                let line = (row * self.stride[0] + y).wrapping_sub(self.padding[0]);
                let column = (place * self.stride[1] + x).wrapping_sub(self.padding[1]);
                if line < height && column < width {
                    work((y * self.kernel[1] + x) as u8, line * width + column);
                }
            }
        }
    }

    fn back(&self, gradient: &[f32], chosen: &[u8]) -> Vec<f32> {
        let [plane_in, plane_out] = [self.input, self.output].map(|[height, width]| height * width);
        let mut dx = zeros(self.planes[0] * self.planes[1] * plane_in);
        for_parts(&mut dx, plane_in, |plane, dx| {
            let outputs = plane * plane_out..(plane + 1) * plane_out;
            let width = self.output[1].max(1);
            let rows = gradient[outputs.clone()]
                .chunks(width)
                .zip(chosen[outputs].chunks(width));
            for (row, (gradient, chosen)) in rows.enumerate() {
                match self.is_halving() {
                    true => self.unhalve(dx, row, gradient, chosen),
                    false => self.unpool(dx, row, gradient, chosen),
                }
            }
        });
        dx
    }

    fn unhalve(&self, dx: &mut [f32], row: usize, gradient: &[f32], chosen: &[u8]) {
        let width = self.input[1];
        let (upper, lower) = dx[2 * row * width..].split_at_mut(width);
        vectorised(
            #[inline(always)]
            || {
                let len = gradient.len();
                let (chosen, upper) = (&chosen[..len], &mut upper[..2 * len]);
                let lower = &mut lower[..2 * len];
                for at in 0..len {
                    let of = |place| {
                        if chosen[at] == place {
                            gradient[at]
                        } else {
                            0.0
                        }
                    };
                    (upper[2 * at], upper[2 * at + 1]) = (of(0), of(1));
                    (lower[2 * at], lower[2 * at + 1]) = (of(2), of(3));
                }
            },
        );
    }

    fn unpool(&self, dx: &mut [f32], row: usize, gradient: &[f32], chosen: &[u8]) {
        let width = self.input[1];
        for (place, (gradient, chosen)) in gradient.iter().zip(chosen).enumerate() {
            let (y, x) = (
                usize::from(*chosen) / self.kernel[1],
                usize::from(*chosen) % self.kernel[1],
            );
            let line = (row * self.stride[0] + y).wrapping_sub(self.padding[0]);
            let column = (place * self.stride[1] + x).wrapping_sub(self.padding[1]);
            // A window of padding alone has chosen nothing.
            if line < self.input[0] && column < width {
                dx[line * width + column] += gradient;
            }
        }
    }
}

#[inline(always)]
fn larger(top: (f32, u8), candidate: (f32, u8)) -> (f32, u8) {
    let is_larger = candidate.0 > top.0 || (candidate.0.is_nan() && !top.0.is_nan());
    if is_larger { candidate } else { top }
}
