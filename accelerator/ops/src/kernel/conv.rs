//! Convolutions of two dimensions, as products with the patches of each image.

use core::cell::RefCell;
use core::mem::take;
use core::ops::Range;

use burn_flex::FlexTensor;

use super::loops::{add, for_parts, sums, tensor, values, vectorised};
use super::math::sum;
use super::product::{Matrix, Onto, product};
use crate::backend::{Backprop, Forward};

/// The sizes of a convolution. Pairs are of height and width.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ConvShape {
    pub(crate) batch: usize,
    pub(crate) channels_in: usize,
    pub(crate) channels_out: usize,
    pub(crate) input: [usize; 2],
    pub(crate) output: [usize; 2],
    pub(crate) kernel: [usize; 2],
    pub(crate) stride: [usize; 2],
    /// The padding above and on the left; that on the other sides follows from the sizes.
    pub(crate) padding: [usize; 2],
    pub(crate) dilation: [usize; 2],
    pub(crate) groups: usize,
}

/// The activation that follows a convolution in the same operation.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Then {
    Nothing,
    Relu,
}

/// Returns the operation on images, a weight, and a bias if there are three inputs.
pub(crate) fn conv2d<const N: usize>(shape: ConvShape, then: Then) -> Forward<N> {
    Box::new(move |inputs: [FlexTensor; N]| {
        let inputs = inputs.map(|input| input.to_contiguous());
        let [x, weight] = [0, 1].map(|input| values(&inputs[input]));
        let y = shape.forward(x, weight, inputs.get(2).map(values), then);
        let y = tensor(y, shape.output_shape());
        let kept = (then == Then::Relu).then(|| y.clone());
        let back: Backprop<N> = Box::new(move |gradient, needs| {
            let mut gradient = gradient.to_contiguous();
            if let Some(y) = &kept {
                gradient = tensor(
                    through_relu(values(&gradient), values(y)),
                    shape.output_shape(),
                );
            }
            let g = values(&gradient);
            let [x, weight] = [0, 1].map(|input| values(&inputs[input]));
            core::array::from_fn(|input| {
                let gradient_of = || match input {
                    0 => tensor(shape.back_to_input(weight, g), shape.input_shape()),
                    1 => tensor(shape.back_to_weight(x, g), shape.weight_shape()),
                    _ => tensor(shape.back_to_bias(g), [shape.channels_out]),
                };
                needs[input].then(gradient_of)
            })
        });
        (y, back)
    })
}

impl ConvShape {
    fn input_shape(&self) -> [usize; 4] {
        [self.batch, self.channels_in, self.input[0], self.input[1]]
    }

    fn output_shape(&self) -> [usize; 4] {
        [
            self.batch,
            self.channels_out,
            self.output[0],
            self.output[1],
        ]
    }

    fn weight_shape(&self) -> [usize; 4] {
        let channels = self.channels_in / self.groups;
        [self.channels_out, channels, self.kernel[0], self.kernel[1]]
    }

    /// The number of values of an input image.
    fn image(&self) -> usize {
        self.channels_in * self.input[0] * self.input[1]
    }

    /// The number of places in an output channel.
    fn places(&self) -> usize {
        self.output[0] * self.output[1]
    }

    /// The number of values in the patch of one place, in one group.
    fn patch(&self) -> usize {
        self.channels_in / self.groups * self.kernel[0] * self.kernel[1]
    }

    /// The channels of a group: those of the input, and those of the output.
    fn group(&self, group: usize) -> [Range<usize>; 2] {
        [self.channels_in, self.channels_out].map(|channels| {
            let each = channels / self.groups;
            group * each..(group + 1) * each
        })
    }

    /// Returns `true` if the patches of an image are the image itself.
    fn is_pointwise(&self) -> bool {
        (self.kernel, self.stride, self.padding) == ([1, 1], [1, 1], [0, 0])
            && self.input == self.output
    }

    fn forward(&self, x: &[f32], weight: &[f32], bias: Option<&[f32]>, then: Then) -> Vec<f32> {
        let (places, patch) = (self.places(), self.patch());
        let mut out = vec![0.0; self.batch * self.channels_out * places];
        for_parts(
            &mut out,
            (self.channels_out * places).max(1),
            |image, out| {
                let x = &x[image * self.image()..][..self.image()];
                for group in 0..self.groups {
                    let [inputs, outputs] = self.group(group);
                    let weight = Matrix::new(
                        &weight[outputs.start * patch..],
                        [outputs.len(), patch],
                        patch,
                    );
                    let out = &mut out[outputs.start * places..];
                    self.with_patches(x, inputs, |patches| {
                        let patches = Matrix::new(patches, [patch, places], places);
                        product(out, places, Onto::Nothing, weight, patches);
                    });
                }
                finish(out, places, bias, then);
            },
        );
        out
    }

    fn back_to_input(&self, weight: &[f32], g: &[f32]) -> Vec<f32> {
        let (places, patch) = (self.places(), self.patch());
        let mut dx = vec![0.0; self.batch * self.image()];
        for_parts(&mut dx, self.image().max(1), |image, dx| {
            let g = &g[image * self.channels_out * places..];
            for group in 0..self.groups {
                let [inputs, outputs] = self.group(group);
                let weight = Matrix::new(
                    &weight[outputs.start * patch..],
                    [outputs.len(), patch],
                    patch,
                );
                let g = Matrix::new(
                    &g[outputs.start * places..],
                    [outputs.len(), places],
                    places,
                );
                if self.is_pointwise() {
                    let dx = &mut dx[inputs.start * places..];
                    product(dx, places, Onto::Nothing, weight.transposed(), g);
                } else {
                    with_scratch(patch * places, |patches| {
                        product(patches, places, Onto::Nothing, weight.transposed(), g);
                        self.add_patches(patches, inputs, dx);
                    });
                }
            }
        });
        dx
    }

    fn back_to_weight(&self, x: &[f32], g: &[f32]) -> Vec<f32> {
        let (places, patch) = (self.places(), self.patch());
        let outputs_each = self.channels_out / self.groups;
        // Transposed, `[groups, patch, outputs]`, so that the longer side is that of the rows.
        let [transposed] = sums(self.batch, [self.channels_out * patch], |images, [dw]| {
            for image in images {
                let x = &x[image * self.image()..][..self.image()];
                let g = &g[image * self.channels_out * places..];
                for group in 0..self.groups {
                    let [inputs, outputs] = self.group(group);
                    let g = Matrix::new(
                        &g[outputs.start * places..],
                        [outputs.len(), places],
                        places,
                    );
                    let dw = &mut dw[group * patch * outputs_each..];
                    self.with_patches(x, inputs, |patches| {
                        let patches = Matrix::new(patches, [patch, places], places);
                        product(dw, outputs_each, Onto::Values, patches, g.transposed());
                    });
                }
            }
        });
        let mut dw = vec![0.0; transposed.len()];
        for (output, dw) in dw.chunks_exact_mut(patch.max(1)).enumerate() {
            let (group, output) = (output / outputs_each, output % outputs_each);
            let from = &transposed[group * patch * outputs_each + output..];
            for (dw, value) in dw.iter_mut().zip(from.iter().step_by(outputs_each)) {
                *dw = *value;
            }
        }
        dw
    }

    fn back_to_bias(&self, g: &[f32]) -> Vec<f32> {
        let places = self.places();
        let [sums] = sums(self.batch, [self.channels_out], |images, [sums]| {
            for image in images {
                let g = g[image * self.channels_out * places..].chunks_exact(places.max(1));
                for (total, g) in sums.iter_mut().zip(g) {
                    *total += vectorised(
                        #[inline(always)]
                        || sum(g, |g| g),
                    );
                }
            }
        });
        sums
    }

    /// Calls `work` with the patches of an image: a row for each value of a patch, of one column for each place.
    fn with_patches(&self, x: &[f32], channels: Range<usize>, work: impl FnOnce(&[f32])) {
        let [height, width] = self.input;
        if self.is_pointwise() {
            return work(&x[channels.start * height * width..channels.end * height * width]);
        }
        with_scratch(self.patch() * self.places(), |patches| {
            let mut rows = patches.chunks_exact_mut(self.output[1].max(1));
            self.for_rows(channels, |channel, line, column| {
                let Some(row) = rows.next() else { return };
                let line = line.map(|line| &x[(channel * height + line) * width..][..width]);
                self.copy_row(row, line, column);
            });
            work(patches);
        });
    }

    /// Copies what a row of places sees of a line of the image through one column of the kernel.
    fn copy_row(&self, row: &mut [f32], line: Option<&[f32]>, column: usize) {
        let Some(line) = line else {
            return row.fill(0.0);
        };
        let inside = self.inside(column);
        let (start, end) = (inside.start, inside.end);
        row[..start].fill(0.0);
        row[end..].fill(0.0);
        let stride = self.stride[1];
        let first = (start * stride + column).saturating_sub(self.padding[1]);
        let from = line.get(first..).unwrap_or(&[]);
        if stride == 1 {
            row[start..end].copy_from_slice(&from[..end - start]);
        } else {
            for (to, from) in row[start..end].iter_mut().zip(from.iter().step_by(stride)) {
                *to = *from;
            }
        }
    }

    /// Adds patches to the image that they are of.
    fn add_patches(&self, patches: &[f32], channels: Range<usize>, dx: &mut [f32]) {
        let [height, width] = self.input;
        let stride = self.stride[1];
        let mut rows = patches.chunks_exact(self.output[1].max(1));
        self.for_rows(channels, |channel, line, column| {
            let (Some(row), Some(line)) = (rows.next(), line) else {
                return;
            };
            let inside = self.inside(column);
            let first = (inside.start * stride + column).saturating_sub(self.padding[1]);
            let line = &mut dx[(channel * height + line) * width..][..width];
            let to = line.get_mut(first..).unwrap_or(&mut []);
            if stride == 1 {
                let row = &row[inside];
                add(&mut to[..row.len()], row);
            } else {
                for (to, value) in to.iter_mut().step_by(stride).zip(&row[inside]) {
                    *to += value;
                }
            }
        });
    }

    /// The places of a row that see a column of the image, and not its padding, through `column` of the kernel.
    fn inside(&self, column: usize) -> Range<usize> {
        let [stride, padding, width] = [self.stride[1], self.padding[1], self.input[1]];
        // The place `x` sees the column `x * stride + column - padding`.
        let start = padding.saturating_sub(column).div_ceil(stride);
        let end = (width + padding).saturating_sub(column).div_ceil(stride);
        let end = end.min(self.output[1]);
        start.min(end)..end
    }

    /// Calls `work` for each row of patches: with its channel, the line of the image that it sees unless that is
    /// padding, and the column of the kernel, dilated.
    fn for_rows(&self, channels: Range<usize>, mut work: impl FnMut(usize, Option<usize>, usize)) {
        for channel in channels {
            for y in 0..self.kernel[0] {
                for x in 0..self.kernel[1] {
                    for place in 0..self.output[0] {
                        let line = place * self.stride[0] + y * self.dilation[0];
                        let line = line.checked_sub(self.padding[0]);
                        let line = line.filter(|&line| line < self.input[0]);
                        work(channel, line, x * self.dilation[1]);
                    }
                }
            }
        }
    }
}

/// Adds the bias to an image of outputs, and applies what follows.
fn finish(out: &mut [f32], places: usize, bias: Option<&[f32]>, then: Then) {
    if bias.is_none() && then == Then::Nothing {
        return;
    }
    for (channel, out) in out.chunks_exact_mut(places.max(1)).enumerate() {
        let bias = bias.map_or(0.0, |bias| bias[channel]);
        vectorised(
            #[inline(always)]
            || match then {
                Then::Nothing => out.iter_mut().for_each(|out| *out += bias),
                Then::Relu => {
                    for out in out {
                        let sum = *out + bias;
                        // NaN stays.
                        *out = if sum < 0.0 { 0.0 } else { sum };
                    }
                }
            },
        );
    }
}

fn through_relu(gradient: &[f32], output: &[f32]) -> Vec<f32> {
    let mut masked = vec![0.0; gradient.len()];
    for_parts(&mut masked, super::loops::TASK, |part, masked| {
        let start = part * super::loops::TASK;
        vectorised(
            #[inline(always)]
            || {
                let inputs = gradient[start..].iter().zip(&output[start..]);
                for (masked, (gradient, output)) in masked.iter_mut().zip(inputs) {
                    *masked = if *output > 0.0 { *gradient } else { 0.0 };
                }
            },
        );
    });
    masked
}

/// Calls `work` with values that are this thread's, and may be anything.
fn with_scratch<R>(len: usize, work: impl FnOnce(&mut [f32]) -> R) -> R {
    thread_local! {
        static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    }
    // Within a product, this thread may be given another image, which then allocates.
    let mut scratch = SCRATCH.with_borrow_mut(take);
    if scratch.len() < len {
        scratch.resize(len, 0.0);
    }
    let result = work(&mut scratch[..len]);
    SCRATCH.set(scratch);
    result
}
