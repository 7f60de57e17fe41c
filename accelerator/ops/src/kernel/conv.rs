//! Convolutions of images and of sequences, which are images of one row, as products with the patches of each image.

use core::cell::RefCell;
use core::mem::take;
use core::ops::Range;

use burn_flex::FlexTensor;

use super::elementwise::{relu, through_relu};
use super::loops::{
    self, for_each, mapped_both, sums, tensor, transpose, values, vectorised, zeros,
};
use super::math::sum;
use super::patches::{ConvShape, PaddedPlane};
use super::product::{Matrix, Onto, product};
use crate::backend::{Backprop, Forward};

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
                let through = mapped_both(values(y), values(&gradient), through_relu);
                gradient = tensor(through, loops::shape(y));
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
    /// weight costs more than the product. A batch is divided at least in two, so that threads share the copying, too.
    fn images_per_product(&self) -> usize {
        const COLUMNS: usize = 256;
        let most = self.batch.div_ceil(2).max(1);
        (COLUMNS / self.places().max(1)).clamp(1, most)
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
        let mut out = zeros(self.batch * self.channels_out * places);
        let work = out.len().saturating_mul(self.patch());
        let parts = out.chunks_mut(together * of_image);
        for_each(work, parts, |part, out| {
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
        let outputs_each = self.channels_out / self.groups;
        // `[groups, patch, outputs]`. Each product would otherwise transpose the weight again; a single one does so itself.
        let transposed = (self.batch > 1).then(|| self.transposed_groups(weight, patch));
        let mut dx = zeros(self.batch * self.image());
        let work = dx.len().saturating_mul(self.patch());
        let parts = dx.chunks_mut((together * of_image).max(1));
        for_each(work, parts, |part, dx| {
            let images = Images::new(self, part * together, dx.len() / of_image);
            for group in 0..self.groups {
                let [inputs, outputs] = self.group(group);
                let weight = match &transposed {
                    Some(transposed) => {
                        let weight = &transposed[group * patch * outputs_each..];
                        Matrix::new(weight, [patch, outputs_each], outputs_each)
                    }
                    None => self.weight(weight, &outputs).transposed(),
                };
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
                let sizes = [patch * images.columns, PaddedPlane::of(self).len(), staging];
                with_scratch(sizes, |[patches, scratch, staging]| {
                    let g = self.outputs(g, images, outputs, staging);
                    product(patches, images.columns, Onto::Nothing, weight, g);
                    self.add_patches(patches, images, inputs, scratch, dx);
                });
            }
        });
        dx
    }

    fn back_to_weight(&self, x: &[f32], g: &[f32]) -> Vec<f32> {
        let (patch, together) = (self.patch(), self.images_per_product());
        let outputs_each = self.channels_out / self.groups;
        // A product is faster if its rows are the longer side: `[groups, patch, outputs]`. The sum must then be transposed,
        // which pays unless there are so few places that transposing the patches costs less.
        let is_transposed = self.batch * self.places() > outputs_each;
        let parts = self.batch.div_ceil(together);
        let [sum] = sums(parts, [self.channels_out * patch], |parts, [dw]| {
            for (index, part) in parts.enumerate() {
                let first = part * together;
                let images = Images::new(self, first, together.min(self.batch - first));
                let onto = match index {
                    0 => Onto::Nothing,
                    _ => Onto::Values,
                };
                for group in 0..self.groups {
                    let [inputs, outputs] = self.group(group);
                    let dw = &mut dw[group * patch * outputs_each..];
                    let staging = images.staging(&outputs);
                    self.with_patches(x, images, inputs, staging, |patches, staging| {
                        let g = self.outputs(g, images, outputs, staging);
                        match is_transposed {
                            true => product(dw, outputs_each, onto, patches, g.transposed()),
                            false => product(dw, patch, onto, g, patches.transposed()),
                        }
                    });
                }
            }
        });
        match is_transposed {
            true => self.transposed_groups(&sum, outputs_each),
            false => sum,
        }
    }

    /// Transposes the matrix of each group. The rows of `matrices` have length `columns`.
    fn transposed_groups(&self, matrices: &[f32], columns: usize) -> Vec<f32> {
        let mut transposed = zeros(matrices.len());
        let group = (matrices.len() / self.groups).max(1);
        let groups = transposed.chunks_exact_mut(group);
        for (to, from) in groups.zip(matrices.chunks_exact(group)) {
            transpose(to, from, columns);
        }
        transposed
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
        let padded = PaddedPlane::of(self);
        let scratch = [self.patch() * columns, padded.len(), staging];
        with_scratch(scratch, |[patches, scratch, staging]| {
            let of_channel = self.kernel[0] * self.kernel[1] * columns;
            for (channel, rows) in channels.zip(patches.chunks_exact_mut(of_channel)) {
                for image in 0..images.count {
                    let x = &x[image * self.image() + channel * plane..][..plane];
                    let x = padded.pad(x, scratch);
                    for (row, offset) in rows.chunks_exact_mut(columns).zip(padded.offsets()) {
                        let places = &mut row[image * self.places()..][..self.places()];
                        padded.copy(places, &x[offset..]);
                    }
                }
            }
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

    /// Adds patches back to the images from which they came, with `scratch` for one padded plane.
    fn add_patches(
        &self,
        patches: &[f32],
        images: Images,
        channels: Range<usize>,
        scratch: &mut [f32],
        dx: &mut [f32],
    ) {
        let (plane, padded) = (self.input[0] * self.input[1], PaddedPlane::of(self));
        let of_channel = self.kernel[0] * self.kernel[1] * images.columns;
        for (channel, rows) in channels.zip(patches.chunks_exact(of_channel)) {
            for image in 0..images.count {
                scratch.fill(0.0);
                for (row, offset) in rows.chunks_exact(images.columns).zip(padded.offsets()) {
                    let places = &row[image * self.places()..][..self.places()];
                    padded.add(places, &mut scratch[offset..]);
                }
                let dx = &mut dx[image * self.image() + channel * plane..][..plane];
                padded.unpad(scratch, dx);
            }
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
                        *out = relu(*out + bias);
                    }
                }
            },
        );
    }
}

/// Calls `work` with scratch slices of these lengths, which belong to this thread and hold anything.
fn with_scratch<const N: usize, R>(lens: [usize; N], work: impl FnOnce([&mut [f32]; N]) -> R) -> R {
    thread_local! {
        static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    }
    // Within a product, this thread may be given another image, which then allocates.
    let mut scratch = SCRATCH.with_borrow_mut(take);
    let len = lens.iter().sum();
    if scratch.len() < len {
        scratch.resize(len, 0.0);
    }
    let mut rest = &mut scratch[..];
    let result = work(lens.map(|len| rest.split_off_mut(..len).unwrap_or_default()));
    SCRATCH.set(scratch);
    result
}
