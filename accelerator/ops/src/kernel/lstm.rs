//! An LSTM, over all steps of its sequences in one operation.

use burn_flex::FlexTensor;

use super::loops::{for_each, shape, tensor, transpose, values, vectorised};
use super::math::{sigmoid, tanh};
use super::product::{Matrix, Onto, multiplied, product};
use crate::backend::{Backprop, Forward};

/// The number of sequences that one task computes.
const AT_ONCE: usize = 16;

/// Returns the operation. Its inputs are the products of the layer's inputs and weights, `[batch, steps, 4 · width]`; the
/// weight of the hidden state, `[width, 4 · width]`; and the initial hidden state and cell, `[batch, width]` each. Each
/// product consists of four parts: input gate, forget gate, output gate and cell.
///
/// The output, `[batch, steps + 1, width]`, holds the hidden state after each step, followed by the final cell.
pub(crate) fn lstm() -> Forward<4> {
    Box::new(|inputs: [FlexTensor; 4]| {
        let inputs = inputs.map(|input| input.to_contiguous());
        let [batch, steps, _] = shape(&inputs[0]).dims();
        let [width, _] = shape(&inputs[1]).dims();
        let sequences = Sequences { steps, width };
        let [products, weight, hidden, cell] = inputs.each_ref().map(values);
        let mut kept = Kept {
            gates: products.to_vec(),
            cells: vec![0.0; batch * (steps + 1) * width],
            hidden: vec![0.0; batch * steps * width],
        };
        let mut out = vec![0.0; batch * (steps + 1) * width];
        let parts = kept.gates.chunks_mut(AT_ONCE * steps * 4 * width);
        let parts = parts.zip(kept.cells.chunks_mut(AT_ONCE * (steps + 1) * width));
        let parts = parts.zip(kept.hidden.chunks_mut(AT_ONCE * steps * width));
        let parts = parts.zip(out.chunks_mut(AT_ONCE * (steps + 1) * width));
        let parts = parts.zip(
            hidden
                .chunks(AT_ONCE * width)
                .zip(cell.chunks(AT_ONCE * width)),
        );
        for_each(
            products.len(),
            parts,
            |_, ((((gates, cells), before), out), first)| {
                sequences.forward(gates, cells, before, out, weight, first);
            },
        );
        let output = tensor(out, [batch, steps + 1, width]);
        let weight = inputs[1].clone();
        let back: Backprop<4> = Box::new(move |gradient, needs| {
            let gradient = gradient.to_contiguous();
            let Kept {
                mut gates,
                cells,
                hidden,
            } = kept;
            // Otherwise the product of each step would transpose the weight again.
            let mut transposed = vec![0.0; width * 4 * width];
            transpose(&mut transposed, values(&weight), 4 * width);
            let mut d_hidden = vec![0.0; batch * width];
            let mut d_cell = vec![0.0; batch * width];
            let parts = gates.chunks_mut(AT_ONCE * steps * 4 * width);
            let parts = parts.zip(cells.chunks(AT_ONCE * (steps + 1) * width));
            let parts = parts.zip(values(&gradient).chunks(AT_ONCE * (steps + 1) * width));
            let states = d_hidden.chunks_mut(AT_ONCE * width);
            let parts = parts.zip(states.zip(d_cell.chunks_mut(AT_ONCE * width)));
            for_each(
                batch * steps * 4 * width,
                parts,
                |_, (((gates, cells), gradient), first)| {
                    sequences.back(gates, cells, gradient, &transposed, first);
                },
            );
            let d_weight = needs[1].then(|| {
                let before = Matrix::new(&hidden, [batch * steps, width], width);
                let d_products = Matrix::new(&gates, [batch * steps, 4 * width], 4 * width);
                tensor(
                    multiplied(before.transposed(), d_products),
                    [width, 4 * width],
                )
            });
            [
                Some(tensor(gates, [batch, steps, 4 * width])),
                d_weight,
                Some(tensor(d_hidden, [batch, width])),
                Some(tensor(d_cell, [batch, width])),
            ]
        });
        (output, back)
    })
}

/// The values that backward needs.
struct Kept {
    /// The values of the gates at each step, `[batch, steps, 4 · width]`.
    gates: Vec<f32>,
    /// The cells before each step, and after the last, `[batch, steps + 1, width]`.
    cells: Vec<f32>,
    /// The hidden states before each step, `[batch, steps, width]`.
    hidden: Vec<f32>,
}

#[derive(Clone, Copy)]
struct Sequences {
    steps: usize,
    width: usize,
}

impl Sequences {
    /// Computes the given sequences. On entry, `gates` holds the products of their inputs.
    fn forward(
        self,
        gates: &mut [f32],
        cells: &mut [f32],
        before: &mut [f32],
        out: &mut [f32],
        weight: &[f32],
        (hidden, cell): (&[f32], &[f32]),
    ) {
        let Self { steps, width } = self;
        let batch = hidden.len() / width;
        let weight = Matrix::new(weight, [width, 4 * width], 4 * width);
        for row in 0..batch {
            let (state, of_row) = (row * width, row * steps * width);
            before[of_row..][..width].copy_from_slice(&hidden[state..][..width]);
            cells[row * (steps + 1) * width..][..width].copy_from_slice(&cell[state..][..width]);
        }
        for step in 0..steps {
            let states = Matrix::new(&before[step * width..], [batch, width], steps * width);
            let sums = &mut gates[step * 4 * width..];
            product(sums, steps * 4 * width, Onto::Values, states, weight);
            for row in 0..batch {
                let gates = &mut gates[(row * steps + step) * 4 * width..][..4 * width];
                let (cell, after) = cells[(row * (steps + 1) + step) * width..].split_at_mut(width);
                let (cell, after) = (&cell[..width], &mut after[..width]);
                let hidden = &mut out[(row * (steps + 1) + step) * width..][..width];
                vectorised(
                    #[inline(always)]
                    || forward_of_row(gates, cell, after, hidden),
                );
                if step + 1 < steps {
                    before[(row * steps + step + 1) * width..][..width].copy_from_slice(hidden);
                }
            }
        }
        for row in 0..batch {
            let last = (row * (steps + 1) + steps) * width;
            out[last..][..width].copy_from_slice(&cells[last..][..width]);
        }
    }

    /// Replaces the gates of the given sequences by the gradients of their products, and stores the gradients of the
    /// states before the first step in `d_hidden` and `d_cell`, which hold zeros on entry. `transposed` is the
    /// transpose of the weight.
    fn back(
        self,
        gates: &mut [f32],
        cells: &[f32],
        gradient: &[f32],
        transposed: &[f32],
        (d_hidden, d_cell): (&mut [f32], &mut [f32]),
    ) {
        let Self { steps, width } = self;
        let batch = d_hidden.len() / width;
        let weight = Matrix::new(transposed, [4 * width, width], width);
        for row in 0..batch {
            let last = (row * (steps + 1) + steps) * width;
            d_cell[row * width..][..width].copy_from_slice(&gradient[last..][..width]);
        }
        for step in (0..steps).rev() {
            for row in 0..batch {
                let gates = &mut gates[(row * steps + step) * 4 * width..][..4 * width];
                let (cell, after) = cells[(row * (steps + 1) + step) * width..].split_at(width);
                let gradient = &gradient[(row * (steps + 1) + step) * width..][..width];
                let d_hidden = &d_hidden[row * width..][..width];
                let d_cell = &mut d_cell[row * width..][..width];
                vectorised(
                    #[inline(always)]
                    || back_of_row(gates, cell, &after[..width], gradient, d_hidden, d_cell),
                );
            }
            let gates = Matrix::new(
                &gates[step * 4 * width..],
                [batch, 4 * width],
                steps * 4 * width,
            );
            product(d_hidden, width, Onto::Nothing, gates, weight);
        }
    }
}

/// Computes the gates, the cell and the hidden state of one sequence after a step. On entry, `gates` holds the gates' sums.
#[inline(always)]
fn forward_of_row(gates: &mut [f32], cell: &[f32], after: &mut [f32], hidden: &mut [f32]) {
    let width = hidden.len();
    let (input, rest) = gates.split_at_mut(width);
    let (forget, rest) = rest.split_at_mut(width);
    let (output, candidate) = rest.split_at_mut(width);
    let (cell, after, candidate) = (&cell[..width], &mut after[..width], &mut candidate[..width]);
    for at in 0..width {
        input[at] = sigmoid(input[at]);
        forget[at] = sigmoid(forget[at]);
        output[at] = sigmoid(output[at]);
        candidate[at] = tanh(candidate[at]);
        after[at] = forget[at].mul_add(cell[at], input[at] * candidate[at]);
        hidden[at] = output[at] * tanh(after[at]);
    }
}

/// Replaces the gates of one sequence by the gradients of their sums, and `d_cell` by that of the cell before the step.
#[inline(always)]
fn back_of_row(
    gates: &mut [f32],
    cell: &[f32],
    after: &[f32],
    gradient: &[f32],
    d_hidden: &[f32],
    d_cell: &mut [f32],
) {
    let width = d_cell.len();
    let (input, rest) = gates.split_at_mut(width);
    let (forget, rest) = rest.split_at_mut(width);
    let (output, candidate) = rest.split_at_mut(width);
    let (cell, after, candidate) = (&cell[..width], &after[..width], &mut candidate[..width]);
    let (gradient, d_hidden) = (&gradient[..width], &d_hidden[..width]);
    for at in 0..width {
        let (i, f, o, v) = (input[at], forget[at], output[at], candidate[at]);
        let d_hidden = gradient[at] + d_hidden[at];
        let top = tanh(after[at]);
        let d_after = (d_hidden * o).mul_add(slope_of_tanh(top), d_cell[at]);
        output[at] = d_hidden * top * o * (1.0 - o);
        input[at] = d_after * v * i * (1.0 - i);
        forget[at] = d_after * cell[at] * f * (1.0 - f);
        candidate[at] = d_after * i * slope_of_tanh(v);
        d_cell[at] = d_after * f;
    }
}

/// Returns the slope of tanh, given its value `y`, with a single rounding.
#[inline(always)]
fn slope_of_tanh(y: f32) -> f32 {
    (-y).mul_add(y, 1.0)
}
