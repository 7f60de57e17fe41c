//! Images of handwritten digits, 28 by 28 grey values each, and their labels: read from files in the format of MNIST,
//! or drawn.

mod batch;
mod draw;
mod glyph;
mod idx;
mod noise;
mod pixels;
mod split;

use std::sync::Arc;

use burn::data::dataset::{Dataset, DatasetError};
use serde::{Deserialize, Serialize};

pub use self::batch::{DigitBatch, DigitBatcher};
pub use self::split::Split;

/// The width and the height of an image, in pixels.
pub const SIDE: usize = 28;

/// The number of grey values in an image, row by row; 0 is the ground, and 255 is full ink.
pub const PIXELS: usize = SIDE * SIDE;

/// The number of labels: the digits 0 to 9.
pub const CLASSES: usize = 10;

/// A set of images with their labels. Clones share the images.
///
/// ```
/// use accelerator_examples::Digits;
/// use burn::data::dataset::Dataset;
///
/// let digits = Digits::draw(20, 7);
/// let digit = digits.get(3)?;
/// assert_eq!(digit.index, 3);
/// assert!(digit.label < 10);
/// assert_eq!(digit.image.len(), 28 * 28);
/// # Ok::<(), burn::data::dataset::DatasetError>(())
/// ```
#[derive(Clone)]
pub struct Digits {
    samples: Arc<Samples>,
    len: usize,
}

struct Samples {
    images: Vec<u8>,
    labels: Vec<u8>,
}

/// One image, its label, and its position in its set. It can be sent between processes.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Digit {
    /// The position of this sample in its [`Digits`].
    pub index: usize,
    /// The grey values, row by row: 0 is the ground, 255 is full ink.
    #[serde(with = "pixels")]
    pub image: [u8; PIXELS],
    /// The digit that the image shows, 0 to 9.
    pub label: u8,
}

impl Digits {
    /// Draws `count` digits: glyphs in several styles, randomly bent, rotated, sheared, scaled and shifted, with
    /// strokes of varying width and darkness on a noisy ground.
    ///
    /// Each image depends only on `seed` and its index, so a longer set begins with the shorter one. Every ten
    /// successive samples (from a multiple of ten on) show the ten digits in random order.
    pub fn draw(count: usize, seed: u64) -> Self {
        let mut images = Vec::with_capacity(count * PIXELS);
        let mut labels = Vec::with_capacity(count);
        for index in 0..count {
            let (image, label) = draw::digit(seed, index);
            images.extend_from_slice(&image);
            labels.push(label);
        }
        Self::new(images, labels)
    }

    /// Returns the first `count` samples of this set, or all if it has fewer.
    #[must_use]
    pub fn limit(mut self, count: usize) -> Self {
        self.len = self.len.min(count);
        self
    }

    /// Returns the number of samples.
    pub fn count(&self) -> usize {
        self.len
    }

    /// Returns the labels, in the order of the samples.
    pub fn labels(&self) -> &[u8] {
        &self.samples.labels[..self.len]
    }

    /// Returns the grey values of the image at `index`, row by row.
    ///
    /// # Panics
    ///
    /// If `index` is not below [`count`](Self::count).
    pub fn image(&self, index: usize) -> &[u8; PIXELS] {
        assert!(
            index < self.len,
            "sample {index} was asked for, but the set has {}",
            self.len
        );
        &self.samples.images.as_chunks().0[index]
    }

    /// Creates a set from images, [`PIXELS`] bytes each, and as many labels.
    fn new(images: Vec<u8>, labels: Vec<u8>) -> Self {
        Self {
            len: labels.len(),
            samples: Arc::new(Samples { images, labels }),
        }
    }
}

impl Dataset<Digit> for Digits {
    fn get(&self, index: usize) -> Result<Digit, DatasetError> {
        Ok(Digit {
            index,
            image: *self.image(index),
            label: self.samples.labels[index],
        })
    }

    fn len(&self) -> usize {
        self.len
    }
}

impl core::fmt::Debug for Digits {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Digits").field("count", &self.len).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_keeps_the_first_samples() {
        let all = Digits::draw(30, 1);
        let some = all.clone().limit(12);
        assert_eq!((some.len(), all.len()), (12, 30));
        assert_eq!(some.labels(), &all.labels()[..12]);
        assert_eq!(some.get(11).unwrap(), all.get(11).unwrap());
        assert_eq!(all.clone().limit(99).len(), 30);
    }
}
