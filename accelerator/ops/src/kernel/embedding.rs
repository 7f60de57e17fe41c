//! Embedding: the lookup of rows in a table.

use burn_flex::FlexTensor;

use super::loops::{TASK, for_parts, tensor, values, zeros};
use crate::backend::{Backprop, Forward};

/// Returns the operation that looks up rows in a table of `[entries, width]`. Its output is `[batch, length, width]`.
pub(crate) fn embedding(indices: Vec<usize>, [batch, length]: [usize; 2]) -> Forward<1> {
    Box::new(move |[table]: [FlexTensor; 1]| {
        let [entries, width] = table.layout().shape().dims();
        let table = table.to_contiguous();
        let mut rows = zeros(indices.len() * width);
        let at_once = (TASK / width).max(1);
        for_parts(&mut rows, at_once * width, |part, rows| {
            let indices = &indices[part * at_once..];
            for (row, index) in rows.chunks_exact_mut(width).zip(indices) {
                row.copy_from_slice(&values(&table)[index * width..][..width]);
            }
        });
        let back: Backprop<1> = Box::new(move |gradient, _| {
            let gradient = gradient.to_contiguous();
            let mut sums = zeros(entries * width);
            // Each task sums the gradients of its own entries in batch order, so the bits do not depend on the threads.
            for_parts(&mut sums, entries.div_ceil(PARTS) * width, |part, sums| {
                let first = part * entries.div_ceil(PARTS);
                let own = first..first + sums.len() / width;
                let rows = values(&gradient).chunks_exact(width).zip(&indices);
                for (row, index) in rows.filter(|(_, index)| own.contains(index)) {
                    let sums = &mut sums[(index - first) * width..][..width];
                    for (sum, value) in sums.iter_mut().zip(row) {
                        *sum += value;
                    }
                }
            });
            [Some(tensor(sums, [entries, width]))]
        });
        (tensor(rows, [batch, length, width]), back)
    })
}

/// The maximum number of parts of a table whose gradients are summed in parallel.
const PARTS: usize = 8;
