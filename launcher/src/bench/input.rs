//! What ranks contribute, and what must come out.
//!
//! Element `i` of operation `k` on rank `r` is `(i + 13k + 11r) mod M`, with `M` so small that no sum
//! over all ranks is above 127, which every element type holds exactly. So each operation has other
//! values at each place than the one before, and other sums. `M` does not divide the number of ranks,
//! or their values would add up to the same everywhere; 13 and 11 have no factor in common with it.

use crate::number::Small;

/// The values of one rank, and the sums of all. Both repeat, so that writing them is a copy.
#[derive(Debug)]
pub(super) struct Input<T> {
    modulus: usize,
    /// What rank 0 has at operation 0, and a modulus more: other ranks and operations begin later.
    own: Vec<T>,
    sums: Vec<T>,
    rank: usize,
}

impl<T: Small> Input<T> {
    /// The input of `rank` among `ranks`, which are at most [`MOST`](super::MOST).
    pub(super) fn new(rank: usize, ranks: usize) -> Self {
        let modulus = modulus(ranks);
        let table = |value: &dyn Fn(usize) -> usize| {
            let numbers = (0..modulus * (REPEATS + 1)).map(value);
            // At most 127, by the choice of the modulus.
            numbers.map(|number| T::small(number as u8)).collect()
        };
        Self {
            modulus,
            own: table(&|index| index % modulus),
            sums: table(&|index| (0..ranks).map(|rank| (index + 11 * rank) % modulus).sum()),
            rank,
        }
    }

    /// Writes what this rank contributes to an operation.
    pub(super) fn write(&self, values: &mut [T], operation: usize) {
        let block = self.block(&self.own, 13 * operation + 11 * self.rank);
        for values in values.chunks_mut(block.len()) {
            values.copy_from_slice(&block[..values.len()]);
        }
    }

    /// Compares the sums of an operation with what they must be.
    ///
    /// # Errors
    /// Text that shows the first one that is wrong.
    pub(super) fn check(&self, values: &[T], operation: usize) -> Result<(), String> {
        let block = self.block(&self.sums, 13 * operation);
        for (number, values) in values.chunks(block.len()).enumerate() {
            if values != &block[..values.len()] {
                let mut pairs = values.iter().zip(block).enumerate();
                let wrong = pairs.find(|(_, (found, expected))| found != expected);
                let (index, (found, expected)) = wrong.unwrap_or((0, (&values[0], &block[0])));
                let index = number * block.len() + index;
                return Err(wrong_sum(self.rank, operation, index, found, expected));
            }
        }
        Ok(())
    }

    /// Does so with one of the sums, which depends on the operation.
    ///
    /// # Errors
    /// Text that shows it.
    pub(super) fn check_one(&self, values: &[T], operation: usize) -> Result<(), String> {
        // Any number that has no factor in common with usual lengths walks through all places.
        let index = operation.wrapping_mul(7919) % values.len();
        let expected = &self.sums[(index + 13 * operation) % self.modulus];
        match &values[index] == expected {
            true => Ok(()),
            false => Err(wrong_sum(
                self.rank,
                operation,
                index,
                &values[index],
                expected,
            )),
        }
    }

    fn block<'a>(&self, table: &'a [T], shift: usize) -> &'a [T] {
        &table[shift % self.modulus..][..self.modulus * REPEATS]
    }
}

fn wrong_sum<T: Small>(
    rank: usize,
    operation: usize,
    index: usize,
    found: &T,
    expected: &T,
) -> String {
    format!(
        "the sum of operation {operation} is wrong on rank {rank}: expected {expected:?} at index \
         {index}, found {found:?}"
    )
}

/// How many values there are: at least two, so that operations differ.
fn modulus(ranks: usize) -> usize {
    let most = (127 / ranks + 1).min(7);
    let moduli = (2..=most).rev();
    moduli
        .into_iter()
        .find(|modulus| !ranks.is_multiple_of(*modulus))
        .unwrap_or(2)
}

/// How often a block repeats the values: some thousand elements, which a first-level cache holds.
const REPEATS: usize = 512;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_those_of_what_the_ranks_write() {
        for ranks in 2..=super::super::MOST {
            for operation in [0, 1, 12, 1001] {
                let mut sums = vec![0_i8; 10_000];
                let mut values = vec![0_i8; 10_000];
                for rank in 0..ranks {
                    Input::new(rank, ranks).write(&mut values, operation);
                    let added = sums.iter_mut().zip(&values);
                    added.for_each(|(sum, value)| *sum = sum.checked_add(*value).unwrap());
                }
                let input = Input::new(1, ranks);
                input.check(&sums, operation).unwrap();
                input.check_one(&sums, operation).unwrap();
                assert!(input.check(&sums, operation + 1).is_err(), "{ranks}");
                assert!(input.check_one(&sums, operation + 1).is_err(), "{ranks}");
                sums[9_999] += 1;
                let error = input.check(&sums, operation).unwrap_err();
                assert!(error.contains("at index 9999"), "{error}");
            }
        }
    }

    #[test]
    fn one_element_that_is_wrong_is_seen_where_it_is_looked_at() {
        let input = Input::<f32>::new(0, 2);
        let mut sums = vec![0.0; 100];
        let mut other = vec![0.0; 100];
        input.write(&mut sums, 1);
        Input::new(1, 2).write(&mut other, 1);
        sums.iter_mut()
            .zip(&other)
            .for_each(|(sum, other)| *sum += other);
        input.check_one(&sums, 1).unwrap();
        sums[7919 % 100] += 1.0;
        assert!(input.check_one(&sums, 1).is_err());
    }

    #[test]
    fn every_operation_changes_every_element() {
        let input = Input::<f32>::new(1, 2);
        let (mut before, mut after) = (vec![0.0; 5000], vec![0.0; 5000]);
        for operation in 0..20 {
            input.write(&mut before, operation);
            input.write(&mut after, operation + 1);
            assert!(
                before
                    .iter()
                    .zip(&after)
                    .all(|(before, after)| before != after)
            );
        }
    }
}
