//! A linear layer, its weight as it lies in memory: with rows of inputs or of outputs.

use burn_flex::FlexTensor;

use super::loops::{shape, sums, tensor, values, vectorised};
use super::product::{Matrix, Onto, multiplied, product};
use crate::backend::{Backprop, Forward};

/// Returns the operation on an input, a weight of `[inputs, outputs]` and a bias.
pub(crate) fn linear<const N: usize>() -> Forward<N> {
    Box::new(|mut inputs: [FlexTensor; N]| {
        inputs[0] = inputs[0].to_contiguous();
        let weight = matrix(&inputs[1]);
        let [d_input, d_output] = weight.layout().shape().dims();
        inputs[1] = weight;
        let rows = values(&inputs[0]).len() / d_input.max(1);
        let x = Matrix::new(values(&inputs[0]), [rows, d_input], d_input);
        let out = match inputs.get(2) {
            Some(bias) => {
                let bias = bias.to_contiguous();
                let mut out = values(&bias).repeat(rows);
                product(&mut out, d_output, Onto::Values, x, view(&inputs[1]));
                out
            }
            None => multiplied(x, view(&inputs[1])),
        };
        let mut output_shape = shape(&inputs[0]);
        let last = output_shape.num_dims() - 1;
        output_shape[last] = d_output;
        let back: Backprop<N> = Box::new(move |gradient, needs| {
            let gradient = gradient.to_contiguous();
            let g = Matrix::new(values(&gradient), [rows, d_output], d_output);
            let x = Matrix::new(values(&inputs[0]), [rows, d_input], d_input);
            core::array::from_fn(|input| {
                let gradient_of = || match input {
                    0 => tensor(
                        multiplied(g, view(&inputs[1]).transposed()),
                        shape(&inputs[0]),
                    ),
                    1 => tensor(multiplied(x.transposed(), g), [d_input, d_output]),
                    _ => tensor(column_sums(values(&gradient), rows, d_output), [d_output]),
                };
                needs[input].then(gradient_of)
            })
        });
        (tensor(out, output_shape), back)
    })
}

/// Returns a matrix with strides that a product takes.
fn matrix(tensor: &FlexTensor) -> FlexTensor {
    match tensor.layout().has_positive_strides() {
        true => tensor.clone(),
        false => tensor.to_contiguous(),
    }
}

fn view(tensor: &FlexTensor) -> Matrix<'_> {
    let layout = tensor.layout();
    let strides = layout.strides();
    let strides = [strides[0].unsigned_abs(), strides[1].unsigned_abs()];
    Matrix::with_strides(
        &tensor.storage()[layout.start_offset()..],
        layout.shape().dims(),
        strides,
    )
}

/// The number of rows whose sum is added to that of others, so that a small number is not lost in a large sum.
const BLOCK: usize = 32;

fn column_sums(values: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    let [sums] = sums(rows, [columns], |range, [sums]| {
        let mut block = vec![0.0; columns];
        vectorised(
            #[inline(always)]
            || {
                let (sums, block) = (&mut sums[..columns], &mut block[..columns]);
                for start in range.clone().step_by(BLOCK) {
                    block.fill(0.0);
                    for row in start..(start + BLOCK).min(range.end) {
                        let values = &values[row * columns..][..columns];
                        for at in 0..columns {
                            block[at] += values[at];
                        }
                    }
                    for at in 0..columns {
                        sums[at] += block[at];
                    }
                }
            },
        );
    });
    sums
}
