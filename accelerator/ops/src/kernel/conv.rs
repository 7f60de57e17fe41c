//! Convolutions of images and of sequences, which are images of one row, as products with the patches of each image.

use core::cell::RefCell;
use core::mem::take;
use core::ops::Range;

use burn_flex::FlexTensor;

use super::loops::{self, for_parts, mapped_both, sums, tensor, transpose, values, vectorised};
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
pub(crate) fn convolution<const N: usize>(shape: ConvShape, then: Then) -> Forward<N> {
    Box::new(move |inputs: [FlexTensor; N]| {
        let inputs = inputs.map(|input| input.to_contiguous());
        let [x, weight] = [0, 1].map(|input| values(&inputs[input]));
        let y = shape.forward(x, weight, inputs.get(2).map(values), then);
        let mut output_shape = loops::shape(&inputs[0]);
        output_shape[1] = shape.channels_out;
        let sides = output_shape.num_dims() - 2;
        for (side, size) in shape.output[2 - sides..].iter().enumerate() {
            output_shape[2 + side] = *size;
        }
        let y = tensor(y, output_shape);
        let kept = (then == Then::Relu).then(|| y.clone());
        let back: Backprop<N> = Box::new(move |gradient, needs| {
            let mut gradient = gradient.to_contiguous();
            if let Some(y) = &kept {
                gradient = tensor(through_relu(values(&gradient), values(y)), loops::shape(y));
            }
            let g = values(&gradient);
            let [x, weight] = [0, 1].map(|input| values(&inputs[input]));
            core::array::from_fn(|input| {
                let gradient_of = || match input {
                    0 => tensor(shape.back_to_input(weight, g), loops::shape(&inputs[0])),
                    1 => tensor(shape.back_to_weight(x, g), loops::shape(&inputs[1])),
                    _ => tensor(shape.back_to_bias(g), [shape.channels_out]),
                };
                needs[input].then(gradient_of)
            })
        });
        (y, back)
    })
}

impl ConvShape {
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

    /// The number of images whose places together form the columns of one matrix product. With few columns, packing the
    /// weight costs more than the product.
    fn images_per_product(&self) -> usize {
        const COLUMNS: usize = 256;
        (COLUMNS / self.places().max(1)).clamp(1, self.batch.max(1))
    }

    /// The weight of a group, with one row per output channel.
    fn weight<'a>(&self, weight: &'a [f32], outputs: &Range<usize>) -> Matrix<'a> {
        let patch = self.patch();
        Matrix::new(
            &weight[outputs.start * patch..],
            [outputs.len(), patch],
            patch,
        )
    }

    fn forward(&self, x: &[f32], weight: &[f32], bias: Option<&[f32]>, then: Then) -> Vec<f32> {
        let (places, together) = (self.places(), self.images_per_product());
        let of_image = (self.channels_out * places).max(1);
        let mut out = vec![0.0; self.batch * self.channels_out * places];
        for_parts(&mut out, together * of_image, |part, out| {
            let images = Images::new(self, part * together, out.len() / of_image);
            for group in 0..self.groups {
                let [inputs, outputs] = self.group(group);
                let weight = self.weight(weight, &outputs);
                let staging = images.staging(&outputs);
                self.with_patches(x, images, inputs, staging, |patches, staging| {
                    if images.count == 1 {
                        let out = &mut out[outputs.start * places..];
                        return product(out, places, Onto::Nothing, weight, patches);
                    }
                    product(staging, images.columns, Onto::Nothing, weight, patches);
                    for (channel, row) in outputs.zip(staging.chunks_exact(images.columns)) {
                        for (image, row) in row.chunks_exact(places).enumerate() {
                            let start = image * of_image + channel * places;
                            out[start..][..places].copy_from_slice(row);
                        }
                    }
                });
            }
            for out in out.chunks_exact_mut(of_image) {
                finish(out, places, bias, then);
            }
        });
        out
    }

    fn back_to_input(&self, weight: &[f32], g: &[f32]) -> Vec<f32> {
        let (places, patch, together) = (self.places(), self.patch(), self.images_per_product());
        let of_image = self.image().max(1);
        let mut dx = vec![0.0; self.batch * self.image()];
        for_parts(&mut dx, together * of_image, |part, dx| {
            let images = Images::new(self, part * together, dx.len() / of_image);
            for group in 0..self.groups {
                let [inputs, outputs] = self.group(group);
                let weight = self.weight(weight, &outputs).transposed();
                let staging = images.staging(&outputs);
                if self.is_pointwise() && images.count == 1 {
                    let g = self.outputs(g, images, outputs, &mut []);
                    product(
                        &mut dx[inputs.start * places..],
                        places,
                        Onto::Nothing,
                        weight,
                        g,
                    );
                    continue;
                }
                with_scratch(patch * images.columns + staging, |scratch| {
                    let (patches, staging) = scratch.split_at_mut(patch * images.columns);
                    let g = self.outputs(g, images, outputs, staging);
                    product(patches, images.columns, Onto::Nothing, weight, g);
                    self.add_patches(patches, images, inputs, dx);
                });
            }
        });
        dx
    }

    fn back_to_weight(&self, x: &[f32], g: &[f32]) -> Vec<f32> {
        let (patch, together) = (self.patch(), self.images_per_product());
        let outputs_each = self.channels_out / self.groups;
        let parts = self.batch.div_ceil(together);
        // Transposed, `[groups, patch, outputs]`, so that the longer side is that of the rows.
        let [transposed] = sums(parts, [self.channels_out * patch], |parts, [dw]| {
            for part in parts {
                let first = part * together;
                let images = Images::new(self, first, together.min(self.batch - first));
                for group in 0..self.groups {
                    let [inputs, outputs] = self.group(group);
                    let dw = &mut dw[group * patch * outputs_each..];
                    let staging = images.staging(&outputs);
                    self.with_patches(x, images, inputs, staging, |patches, staging| {
                        let g = self.outputs(g, images, outputs, staging).transposed();
                        product(dw, outputs_each, Onto::Values, patches, g);
                    });
                }
            }
        });
        let mut dw = vec![0.0; transposed.len()];
        let group = (patch * outputs_each).max(1);
        for (dw, from) in dw
            .chunks_exact_mut(group)
            .zip(transposed.chunks_exact(group))
        {
            transpose(dw, from, outputs_each);
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

    /// Calls `work` with the patches of the images as a matrix (one row per value of a patch, one column per place) and
    /// with a scratch slice of `staging` values.
    fn with_patches(
        &self,
        x: &[f32],
        images: Images,
        channels: Range<usize>,
        staging: usize,
        work: impl FnOnce(Matrix<'_>, &mut [f32]),
    ) {
        let (plane, columns) = (self.input[0] * self.input[1], images.columns);
        let x = &x[images.first * self.image()..];
        let sizes = [self.patch(), columns];
        if self.is_pointwise() && images.count == 1 {
            let patches = Matrix::new(&x[channels.start * plane..], sizes, columns);
            return work(patches, &mut []);
        }
        with_scratch(self.patch() * columns + staging, |scratch| {
            let (patches, staging) = scratch.split_at_mut(self.patch() * columns);
            let mut rows = patches.chunks_exact_mut(columns.max(1));
            self.for_offsets(channels, |channel, offset| {
                let Some(row) = rows.next() else { return };
                for (image, places) in row.chunks_exact_mut(self.places()).enumerate() {
                    let x = &x[image * self.image() + channel * plane..][..plane];
                    self.copy_plane(places, x, offset);
                }
            });
            work(Matrix::new(patches, sizes, columns), staging);
        });
    }

    /// Returns the gradients of the images' outputs as a matrix with one row per channel. If there are several images,
    /// copies them to `staging`.
    fn outputs<'a>(
        &self,
        g: &'a [f32],
        images: Images,
        channels: Range<usize>,
        staging: &'a mut [f32],
    ) -> Matrix<'a> {
        let (places, columns) = (self.places(), images.columns);
        let g = &g[images.first * self.channels_out * places..];
        let sizes = [channels.len(), columns];
        if images.count == 1 {
            return Matrix::new(&g[channels.start * places..], sizes, columns);
        }
        for (channel, row) in channels.zip(staging.chunks_exact_mut(columns)) {
            for (image, row) in row.chunks_exact_mut(places).enumerate() {
                let start = (image * self.channels_out + channel) * places;
                row.copy_from_slice(&g[start..][..places]);
            }
        }
        Matrix::new(staging, sizes, columns)
    }

    /// Copies what all places see of a channel through one value of the kernel.
    fn copy_plane(&self, plane: &mut [f32], image: &[f32], offset: [usize; 2]) {
        if self.stride == [1, 1] && self.input[1] == self.output[1] {
            return self.shift_plane(plane, image, offset);
        }
        let (Seen { start, end, first }, stride) = (self.seen(offset[1]), self.stride[1]);
        for (place, row) in plane.chunks_exact_mut(self.output[1]).enumerate() {
            let Some(line) = self.line(place, offset[0]) else {
                row.fill(0.0);
                continue;
            };
            let line = &image[line * self.input[1]..][..self.input[1]];
            row[..start].fill(0.0);
            row[end..].fill(0.0);
            if stride == 1 {
                row[start..end].copy_from_slice(&line[first..first + end - start]);
            } else {
                for at in start..end {
                    row[at] = line[first + (at - start) * stride];
                }
            }
        }
    }

    /// Like [`copy_plane`](Self::copy_plane), for a stride of 1 and an output as wide as the input: copies all lines at
    /// once, then zeroes the padding.
    fn shift_plane(&self, plane: &mut [f32], image: &[f32], offset: [usize; 2]) {
        let (width, Seen { start, end, first }) = (self.input[1], self.seen(offset[1]));
        let places = 0..self.output[0];
        let mut lines = places.filter_map(|place| Some((place, self.line(place, offset[0])?)));
        let Some((top, line)) = lines.next().filter(|_| start < end) else {
            return plane.fill(0.0);
        };
        let bottom = lines.next_back().map_or(top, |(place, _)| place) + 1;
        let (from, to) = (top * width + start, (bottom - 1) * width + end);
        plane[..from].fill(0.0);
        plane[to..].fill(0.0);
        plane[from..to].copy_from_slice(&image[line * width + first..][..to - from]);
        for row in plane[top * width..bottom * width].chunks_exact_mut(width) {
            row[..start].fill(0.0);
            row[end..].fill(0.0);
        }
    }

    /// Adds patches back to the images from which they came.
    fn add_patches(&self, patches: &[f32], images: Images, channels: Range<usize>, dx: &mut [f32]) {
        let plane = self.input[0] * self.input[1];
        let mut rows = patches.chunks_exact(images.columns.max(1));
        self.for_offsets(channels, |channel, offset| {
            let Some(row) = rows.next() else { return };
            for (image, places) in row.chunks_exact(self.places()).enumerate() {
                let dx = &mut dx[image * self.image() + channel * plane..][..plane];
                vectorised(
                    #[inline(always)]
                    || self.add_plane(places, dx, offset),
                );
            }
        });
    }

    #[inline(always)]
    fn add_plane(&self, plane: &[f32], image: &mut [f32], offset: [usize; 2]) {
        let (Seen { start, end, first }, stride) = (self.seen(offset[1]), self.stride[1]);
        for (place, row) in plane.chunks_exact(self.output[1]).enumerate() {
            let Some(line) = self.line(place, offset[0]) else {
                continue;
            };
            let line = &mut image[line * self.input[1]..][..self.input[1]];
            let row = &row[start..end];
            if stride == 1 {
                let line = &mut line[first..first + row.len()];
                for at in 0..row.len() {
                    line[at] += row[at];
                }
            } else {
                for at in 0..row.len() {
                    line[first + at * stride] += row[at];
                }
            }
        }
    }

    /// Calls `work` for each value of a patch: with its channel, and its offset in the image from that of the first.
    fn for_offsets(&self, channels: Range<usize>, mut work: impl FnMut(usize, [usize; 2])) {
        for channel in channels {
            for y in 0..self.kernel[0] {
                for x in 0..self.kernel[1] {
                    work(channel, [y * self.dilation[0], x * self.dilation[1]]);
                }
            }
        }
    }

    /// The line of the image that a row of places sees through a value of the kernel, unless it is padding.
    fn line(&self, place: usize, offset: usize) -> Option<usize> {
        let line = (place * self.stride[0] + offset).checked_sub(self.padding[0])?;
        (line < self.input[0]).then_some(line)
    }

    /// The part of a row of places that sees the image, and not its padding, through a value of the kernel.
    fn seen(&self, offset: usize) -> Seen {
        let [stride, padding, width] = [self.stride[1], self.padding[1], self.input[1]];
        // The place `x` sees the column `x * stride + offset - padding`.
        let end = (width + padding).saturating_sub(offset).div_ceil(stride);
        let end = end.min(self.output[1]);
        let start = padding.saturating_sub(offset).div_ceil(stride).min(end);
        let first = (start * stride + offset).saturating_sub(padding);
        Seen {
            start,
            end,
            // Nothing is seen if they are equal.
            first: if start < end { first } else { 0 },
        }
    }
}

/// Consecutive images whose places form the columns of one matrix product.
#[derive(Clone, Copy)]
struct Images {
    first: usize,
    count: usize,
    columns: usize,
}

impl Images {
    fn new(shape: &ConvShape, first: usize, count: usize) -> Self {
        Self {
            first,
            count,
            columns: count * shape.places(),
        }
    }

    /// The number of output values of these channels to copy; 0 for a single image.
    fn staging(self, channels: &Range<usize>) -> usize {
        match self.count {
            1 => 0,
            _ => channels.len() * self.columns,
        }
    }
}

/// The places from `start` to `end`, the first of which sees the column `first`.
#[derive(Clone, Copy)]
struct Seen {
    start: usize,
    end: usize,
    first: usize,
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
                        *out = if sum <= 0.0 { 0.0 } else { sum };
                    }
                }
            },
        );
    }
}

fn through_relu(gradient: &[f32], output: &[f32]) -> Vec<f32> {
    mapped_both(gradient, output, |gradient, output| {
        // NaN passes.
        if output <= 0.0 { 0.0 } else { gradient }
    })
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
