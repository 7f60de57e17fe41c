//! Compares outputs and gradients with those of Burn's operations, computed in f64 from the same numbers.
//!
//! Set `PROPTEST_CASES=2000` to test 2000 random shapes of each operation.

#![cfg(feature = "flex")]
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use burn::backend::DispatchTensor;
use burn::tensor::{Bool, DType, Device, Tensor, TensorData};

mod attention;
mod layers;
mod lstm;
mod operations;
mod pytorch;
mod threads;
mod windows;

/// The largest allowed difference, relative to the largest value of the tensor, or to the expected size of its sums if
/// that is larger.
const TOLERANCE: f64 = 2e-6;

/// The leaves of an autodiff graph.
pub(crate) struct Leaves(pub(crate) Vec<DispatchTensor>);

impl Leaves {
    pub(crate) fn at<const D: usize>(&self, number: usize) -> Tensor<D> {
        Tensor::from_dispatch(self.0[number].clone())
    }
}

/// Returns the output of `operation` and the gradients of its inputs. The loss is a weighted sum of the output, with a
/// different weight for each element.
pub(crate) fn run<const D: usize>(
    inputs: &[TensorData],
    dtype: DType,
    operation: impl Fn(&Leaves) -> Tensor<D>,
) -> Vec<TensorData> {
    let device = Device::flex().autodiff();
    fn of_rank<const D: usize>(input: &TensorData, of: (&Device, DType)) -> DispatchTensor {
        Tensor::<D>::from_data(input.clone(), of)
            .require_grad()
            .into_dispatch()
    }
    let leaf = |input: &TensorData| match input.shape().num_dims() {
        1 => of_rank::<1>(input, (&device, dtype)),
        2 => of_rank::<2>(input, (&device, dtype)),
        3 => of_rank::<3>(input, (&device, dtype)),
        _ => of_rank::<4>(input, (&device, dtype)),
    };
    let leaves = Leaves(inputs.iter().map(leaf).collect());
    let output = operation(&leaves);
    let weights = numbers(&output.dims(), 99);
    let weights = Tensor::<D>::from_data(weights, (&device, dtype));
    let gradients = (output.clone() * weights).sum().backward();
    let of = |leaf: &DispatchTensor| {
        let leaf = Tensor::<1>::from_dispatch(leaf.clone());
        leaf.grad(&gradients).unwrap().into_data()
    };
    let mut results = vec![output.into_data()];
    results.extend(leaves.0.iter().map(of));
    results
}

/// Asserts that results differ from Burn's f64 results by at most [`TOLERANCE`], or by at most four times the error of
/// Burn's f32 results if that is larger, as it is if sums cancel.
pub(crate) fn assert_same<const D: usize>(
    inputs: &[TensorData],
    ours: impl Fn(&Leaves) -> Tensor<D>,
    burns: impl Fn(&Leaves) -> Tensor<D>,
) {
    let ours = run(inputs, DType::F32, ours);
    let single = run(inputs, DType::F32, &burns);
    let exact = run(inputs, DType::F64, burns);
    let shape = exact[0].shape();
    let outputs = shape.num_elements();
    let rows = outputs / shape[shape.num_dims() - 1].max(1);
    for (number, exact) in exact.iter().enumerate() {
        assert_eq!(
            ours[number].shape(),
            exact.shape(),
            "shape of result {number}"
        );
        // The gradient of a weight is a sum over rows of products of numbers less than one. If it cancels, its error is
        // compared with the expected size of such a sum.
        let terms = outputs / exact.shape().num_elements().max(1);
        let least = match terms {
            // A loss may be close to zero, as the difference of larger numbers.
            0 | 1 if exact.shape().num_elements() == 1 => 1.0,
            0 | 1 => 1e-30,
            terms => (terms as f64).sqrt() / 3.0,
        };
        let scale = exact.iter::<f64>().map(f64::abs).fold(least, f64::max);
        let additions = match number {
            // The output and the gradient of the first input.
            0 | 1 => terms,
            _ => rows,
        };
        // Each addition rounds by up to half a unit in the last place. The errors add up like a random walk; this bound
        // is twice its expected length.
        let rounding = TOLERANCE.max(f64::from(f32::EPSILON) * (additions as f64).sqrt());
        let off = |found: &TensorData| {
            let pairs = found.iter::<f64>().zip(exact.iter::<f64>());
            let off = pairs.map(|(found, exact)| (found - exact).abs() / scale);
            off.fold(0.0, f64::max)
        };
        let (off, allowed) = (off(&ours[number]), rounding.max(4.0 * off(&single[number])));
        assert!(
            off <= allowed,
            "result {number} is off by {off:e}, more than {allowed:e}"
        );
        assert!(ours[number].iter::<f64>().all(f64::is_finite));
    }
}

/// Returns pseudorandom numbers between -1 and 1 that f32 represents exactly.
pub(crate) fn numbers(shape: &[usize], seed: u64) -> TensorData {
    let count: usize = shape.iter().product();
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let values = (0..count).map(|_| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f32 / (1 << 23) as f32) - 1.0
    });
    TensorData::new(values.collect::<Vec<f32>>(), shape.to_vec())
}

pub(crate) fn mask<const D: usize>(shape: [usize; D], seed: u64) -> Tensor<D, Bool> {
    let values = numbers(&shape, seed);
    let values: Vec<bool> = values.iter::<f32>().map(|value| value > 0.4).collect();
    Tensor::from_data(TensorData::new(values, shape), &Device::flex())
}

/// Locks the random number generator of the process, which all tests share, so that one test draws at a time.
pub(crate) fn drawing() -> std::sync::MutexGuard<'static, ()> {
    static DRAWING: std::sync::Mutex<()> = std::sync::Mutex::new(());
    DRAWING
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}
