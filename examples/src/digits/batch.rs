use burn::data::dataloader::batcher::Batcher;
use burn::tensor::{Device, Int, Tensor, TensorData};

use super::{Digit, PIXELS, SIDE};

/// The mean grey value of MNIST's training images, with 255 as 1.
const MEAN: f32 = 0.1307;

/// The standard deviation of the grey values of MNIST's training images, with 255 as 1.
const DEVIATION: f32 = 0.3081;

/// Images and labels as tensors on a device.
#[derive(Clone, Debug)]
pub struct DigitBatch {
    /// Normalised grey values, `[batch, 1, 28, 28]`, in the device's default float dtype.
    pub images: Tensor<4>,
    /// The labels, `[batch]`.
    pub targets: Tensor<1, Int>,
    /// The positions of the samples in their data set.
    pub indices: Vec<u64>,
}

/// Makes a [`DigitBatch`] of single digits: scales grey values to the range 0 to 1, then normalises them by the mean
/// 0.1307 and the standard deviation 0.3081.
#[derive(Clone, Copy, Debug, Default)]
pub struct DigitBatcher;

impl Batcher<Digit, DigitBatch> for DigitBatcher {
    fn batch(&self, items: Vec<Digit>, device: &Device) -> DigitBatch {
        let count = items.len();
        let mut images = Vec::with_capacity(count * PIXELS);
        let mut targets = Vec::with_capacity(count);
        let mut indices = Vec::with_capacity(count);
        for digit in &items {
            let grey = digit.image.iter().map(|&value| f32::from(value) / 255.0);
            images.extend(grey.map(|value| (value - MEAN) / DEVIATION));
            targets.push(i64::from(digit.label));
            indices.push(digit.index as u64);
        }
        DigitBatch {
            images: Tensor::from_data(TensorData::new(images, [count, 1, SIDE, SIDE]), device),
            targets: Tensor::from_data(TensorData::new(targets, [count]), device),
            indices,
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::data::dataset::Dataset;

    use super::super::Digits;
    use super::*;

    #[test]
    fn a_batch_holds_normalised_images_labels_and_positions() {
        let mut images = vec![0; PIXELS];
        images.extend([255; PIXELS]);
        let digits = Digits::new(images, vec![4, 7]);
        let items = vec![digits.get(1).unwrap(), digits.get(0).unwrap()];
        let batch = DigitBatcher.batch(items, &Device::default());

        assert_eq!(batch.images.dims(), [2, 1, SIDE, SIDE]);
        assert_eq!(batch.indices, [1, 0]);
        let targets = batch.targets.into_data().convert::<i64>();
        assert_eq!(targets.as_slice::<i64>().unwrap(), [7, 4]);
        let images = batch.images.into_data().convert::<f32>();
        let (ink, ground) = images.as_slice::<f32>().unwrap().split_at(PIXELS);
        assert!(ink.iter().all(|value| (value - 2.8215).abs() < 1e-3));
        assert!(ground.iter().all(|value| (value + 0.4242).abs() < 1e-3));
    }
}
