//! The patches of an image: what the places of a convolution see of it.

use super::loops::vectorised;

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

/// The layout of a channel with its padding, and of the places of a convolution that see it.
pub(super) struct PaddedPlane {
    input: [usize; 2],
    padding: [usize; 2],
    kernel: [usize; 2],
    /// The height and the width, with only as much padding on the right and at the bottom as places see.
    sizes: [usize; 2],
    /// The distances in the plane between neighbouring values of the kernel: downwards, and to the right.
    dilation: [usize; 2],
    /// The distances in the plane between what neighbouring places see: downwards, and to the right.
    stride: [usize; 2],
    /// The number of places in a row.
    width: usize,
}

impl PaddedPlane {
    pub(super) fn of(shape: &ConvShape) -> Self {
        let sizes = [0, 1].map(|side| {
            let last = shape.output[side].saturating_sub(1) * shape.stride[side];
            let seen = last + (shape.kernel[side] - 1) * shape.dilation[side] + 1;
            seen.max(shape.padding[side] + shape.input[side])
        });
        Self {
            input: shape.input,
            padding: shape.padding,
            kernel: shape.kernel,
            sizes,
            dilation: [sizes[1] * shape.dilation[0], shape.dilation[1]],
            stride: [sizes[1] * shape.stride[0], shape.stride[1]],
            width: shape.output[1],
        }
    }

    /// The number of its values.
    pub(super) fn len(&self) -> usize {
        self.sizes[0] * self.sizes[1]
    }

    /// Returns the plane with its padding: copied to `scratch`, or as it is if it has none.
    pub(super) fn pad<'a>(&self, plane: &'a [f32], scratch: &'a mut [f32]) -> &'a [f32] {
        if self.sizes == self.input {
            return plane;
        }
        scratch.fill(0.0);
        if plane.is_empty() {
            return scratch;
        }
        let (width, [top, left]) = (self.input[1], self.padding);
        let first = top * self.sizes[1] + left;
        copy_rows(
            self.input,
            (&mut scratch[first..], self.sizes[1]),
            (plane, width),
        );
        scratch
    }

    /// Copies what is not padding to `plane`, the reverse of [`pad`](Self::pad).
    pub(super) fn unpad(&self, padded: &[f32], plane: &mut [f32]) {
        let (width, [top, left]) = (self.input[1], self.padding);
        let first = top * self.sizes[1] + left;
        copy_rows(
            self.input,
            (plane, width),
            (&padded[first..], self.sizes[1]),
        );
    }

    /// The positions in the plane that the first place sees, one per value of the kernel.
    pub(super) fn offsets(&self) -> impl Iterator<Item = usize> {
        let ([height, width], [down, right]) = (self.kernel, self.dilation);
        (0..height).flat_map(move |y| (0..width).map(move |x| y * down + x * right))
    }

    /// Copies what each place sees through one value of the kernel. `plane` begins with what the first place sees.
    pub(super) fn copy(&self, places: &mut [f32], plane: &[f32]) {
        let [down, right] = self.stride;
        if right == 1 {
            let sizes = [places.len() / self.width, self.width];
            return copy_rows(sizes, (places, self.width), (plane, down));
        }
        for (y, row) in places.chunks_exact_mut(self.width).enumerate() {
            let plane = &plane[y * down..];
            for (x, value) in row.iter_mut().enumerate() {
                *value = plane[x * right];
            }
        }
    }

    /// Adds the values of the places to the plane, the reverse of [`copy`](Self::copy).
    pub(super) fn add(&self, places: &[f32], plane: &mut [f32]) {
        let [down, right] = self.stride;
        vectorised(
            #[inline(always)]
            || match (right, self.width) {
                (1, 4) => add_rows(places, plane, 4, down),
                (1, 8) => add_rows(places, plane, 8, down),
                (1, 16) => add_rows(places, plane, 16, down),
                (1, width) => add_rows(places, plane, width, down),
                (right, width) => {
                    for (y, row) in places.chunks_exact(width).enumerate() {
                        let plane = &mut plane[y * down..];
                        for (x, value) in row.iter().enumerate() {
                            plane[x * right] += value;
                        }
                    }
                }
            },
        );
    }
}

/// Copies `rows` rows of `width` values. Each slice comes with the distance between its rows.
fn copy_rows(
    [rows, width]: [usize; 2],
    (to, to_stride): (&mut [f32], usize),
    (from, from_stride): (&[f32], usize),
) {
    // If the compiler knows the width, it copies a row without a call.
    macro_rules! copy {
        ($width:expr) => {
            for row in 0..rows {
                to[row * to_stride..][..$width]
                    .copy_from_slice(&from[row * from_stride..][..$width]);
            }
        };
    }
    match width {
        4 => copy!(4),
        8 => copy!(8),
        16 => copy!(16),
        32 => copy!(32),
        _ => copy!(width),
    }
}

#[inline(always)]
fn add_rows(places: &[f32], plane: &mut [f32], width: usize, down: usize) {
    for (y, row) in places.chunks_exact(width).enumerate() {
        let plane = &mut plane[y * down..][..width];
        for at in 0..width {
            plane[at] += row[at];
        }
    }
}
