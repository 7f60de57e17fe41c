//! What memory allows.
//!
//! An all-reduce in place cannot do with less than this: every element of every rank is read once
//! and written once, and the ranks share the work. The loop does just that, without synchronization.

/// Adds up the arrays, element by element, and writes the sums back to each: what one rank has to do
/// with its share of all buffers.
pub(super) fn pass(arrays: &mut [&mut [u64]]) {
    match arrays {
        [a, b] => {
            for (a, b) in a.iter_mut().zip(b.iter_mut()) {
                let sum = a.wrapping_add(*b);
                (*a, *b) = (sum, sum);
            }
        }
        [a, b, c] => {
            for ((a, b), c) in a.iter_mut().zip(b.iter_mut()).zip(c.iter_mut()) {
                let sum = a.wrapping_add(*b).wrapping_add(*c);
                (*a, *b, *c) = (sum, sum, sum);
            }
        }
        _ => in_blocks(arrays),
    }
}

/// Any number of arrays, block by block, so that the sums stay in the first-level cache.
fn in_blocks(arrays: &mut [&mut [u64]]) {
    let len = arrays.iter().map(|array| array.len()).min().unwrap_or(0);
    let mut sums = [0_u64; BLOCK];
    for start in (0..len).step_by(BLOCK) {
        let range = start..len.min(start + BLOCK);
        let sums = &mut sums[..range.len()];
        sums.fill(0);
        for array in arrays.iter() {
            for (sum, value) in sums.iter_mut().zip(&array[range.clone()]) {
                *sum = sum.wrapping_add(*value);
            }
        }
        for array in arrays.iter_mut() {
            array[range.clone()].copy_from_slice(sums);
        }
    }
}

/// In elements: 4 KiB.
const BLOCK: usize = 512;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_array_ends_with_the_sums() {
        for count in 2..6_u64 {
            let mut arrays: Vec<Vec<u64>> = (0..count).map(|k| vec![k + 1; 1300]).collect();
            let mut views: Vec<&mut [u64]> = arrays.iter_mut().map(Vec::as_mut_slice).collect();
            pass(&mut views);
            let sum = count * (count + 1) / 2;
            assert!(
                arrays
                    .iter()
                    .all(|array| array.iter().all(|value| *value == sum))
            );
        }
    }
}
