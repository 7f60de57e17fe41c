//! What ranks contribute, and what must come out.
//!
//! A pattern is `(i + 13k + 11r) mod M` at element `i` of operation `k` on rank `r`, with `M` so small that no
//! sum over all ranks is above 127, which every element type holds exactly. `M` does not divide the number
//! of ranks, or their values would add up to the same everywhere; 13 and 11 have no factor in common with it.
//!
//! An operation leaves the sums where its inputs were, and they are the inputs of the next one, on all ranks
//! alike, but for one stripe: each operation writes its pattern to the next 64th of the elements. So the
//! inputs of every operation differ from those of the one before, at nearly every element (in a stripe, a value
//! may meet its like), and cost next to nothing. Sums of
//! sums grow by the number of ranks with every operation; before a type no longer holds them exactly, and
//! after 64 operations at the latest, a *period* begins anew with a whole pattern.

use std::ops::Range;

use crate::number::Small;

/// The values of one rank, and the sums of all. Both repeat, so that writing them is a copy.
#[derive(Debug)]
pub(super) struct Input<T> {
    modulus: usize,
    /// What rank 0 has at operation 0, and a modulus more: other ranks and operations begin later.
    own: Vec<T>,
    /// The sums of patterns, summed again as often as the index says.
    sums: Vec<Vec<T>>,
    rank: usize,
}

impl<T: Small> Input<T> {
    /// The input of `rank` among `ranks`, which are at most [`MOST`](super::args::MOST).
    pub(super) fn new(rank: usize, ranks: usize) -> Self {
        let modulus = modulus(ranks);
        let sum = |index: usize| -> u64 {
            let values = (0..ranks).map(|rank| (index + 11 * rank) % modulus);
            values.map(|value| value as u64).sum()
        };
        let mut numbers: Vec<u64> = (0..modulus).map(sum).collect();
        let mut sums: Vec<Vec<T>> = Vec::new();
        while sums.len() < PARTS
            && let Some(values) = numbers.iter().map(|number| T::exact(*number)).collect()
        {
            let values: Vec<T> = values;
            sums.push(values.repeat(REPEATS + 1));
            // While ranks sum them once more, there are all multiples on the way.
            let multiples =
                |number: u64| (1..=ranks as u64).map(move |times| number.checked_mul(times));
            let mut all = numbers.iter().flat_map(|number| multiples(*number));
            if !all.all(|number| number.and_then(T::exact).is_some()) {
                break;
            }
            numbers
                .iter_mut()
                .for_each(|number| *number *= ranks as u64);
        }
        // At most 127, by the choice of the modulus.
        let own = (0..modulus).map(|index| T::small(index as u8));
        Self {
            modulus,
            own: own.collect::<Vec<T>>().repeat(REPEATS + 1),
            sums,
            rank,
        }
    }

    /// Writes what this rank contributes to an operation anew, over the sums of the one before.
    pub(super) fn write(&self, values: &mut [T], operation: usize) {
        let place = match operation % self.period() {
            0 => 0..values.len(),
            number => part(values.len(), number),
        };
        let shift = 13 * operation + 11 * self.rank;
        let block = self.block(&self.own, place.start + shift);
        for values in values[place].chunks_mut(block.len()) {
            values.copy_from_slice(&block[..values.len()]);
        }
    }

    /// Compares the sums of an operation with what they must be.
    ///
    /// # Errors
    /// Text that shows the first one that is wrong.
    pub(super) fn check(&self, values: &[T], operation: usize) -> Result<(), String> {
        (0..PARTS).try_for_each(|number| {
            let place = part(values.len(), number);
            let (sums, shift) = self.expected(number, operation);
            let block = self.block(sums, place.start + shift);
            for (chunk, values) in values[place.clone()].chunks(block.len()).enumerate() {
                if values != &block[..values.len()] {
                    let mut pairs = values.iter().zip(block).enumerate();
                    let wrong = pairs.find(|(_, (found, expected))| found != expected);
                    let (index, (found, expected)) = wrong.unwrap_or((0, (&values[0], &block[0])));
                    let index = place.start + chunk * block.len() + index;
                    return Err(self.wrong_sum(operation, index, found, expected));
                }
            }
            Ok(())
        })
    }

    /// Does so with one of the sums, which depends on the operation.
    ///
    /// # Errors
    /// Text that shows it.
    pub(super) fn check_one(&self, values: &[T], operation: usize) -> Result<(), String> {
        // Any number that has no factor in common with usual lengths walks through all places.
        let index = operation.wrapping_mul(7919) % values.len();
        let within = (0..PARTS).find(|number| part(values.len(), *number).contains(&index));
        let (sums, shift) = self.expected(within.unwrap_or(0), operation);
        let expected = &sums[(index + shift) % self.modulus];
        match &values[index] == expected {
            true => Ok(()),
            false => Err(self.wrong_sum(operation, index, &values[index], expected)),
        }
    }

    /// How many values there are.
    pub(super) fn modulus(&self) -> usize {
        self.modulus
    }

    /// How many operations there are from one whole pattern to the next.
    pub(super) fn period(&self) -> usize {
        self.sums.len()
    }

    /// The sums of a part of the elements after an operation, and how far they are shifted.
    fn expected(&self, part: usize, operation: usize) -> (&[T], usize) {
        let begun = operation % self.period();
        let written = if part <= begun { part } else { 0 };
        let operation = operation - begun + written;
        (&self.sums[begun - written], 13 * operation)
    }

    fn block<'a>(&self, table: &'a [T], shift: usize) -> &'a [T] {
        &table[shift % self.modulus..][..self.modulus * REPEATS]
    }

    fn wrong_sum(&self, operation: usize, index: usize, found: &T, expected: &T) -> String {
        format!(
            "the sum of operation {operation} is wrong on rank {}: expected {expected:?} at index \
             {index}, found {found:?}",
            self.rank
        )
    }
}

/// Part `number` of [`PARTS`]. The first is written with the whole.
fn part(len: usize, number: usize) -> Range<usize> {
    len * number / PARTS..len * (number + 1) / PARTS
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

/// How many stripes there are, and the most operations in a period.
const PARTS: usize = 64;

/// How often a block repeats the values: some thousand elements, which a first-level cache holds.
const REPEATS: usize = 512;

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;

    /// What an all-reduce does: the ranks one after the other, in the type itself.
    fn reduce<T: Small + std::ops::Add<Output = T>>(ranks: &mut [Vec<T>]) {
        for index in 0..ranks[0].len() {
            let values = ranks.iter().map(|values| values[index]);
            let sum = values.reduce(|sum, value| sum + value).unwrap();
            ranks.iter_mut().for_each(|values| values[index] = sum);
        }
    }

    fn follow<T: Small + std::ops::Add<Output = T>>(ranks: usize, len: usize) -> usize {
        let inputs: Vec<_> = (0..ranks)
            .map(|rank| Input::<T>::new(rank, ranks))
            .collect();
        let mut values = vec![vec![T::zeroed(); len]; ranks];
        let mut before = Vec::new();
        for operation in 0..150 {
            for (input, values) in inputs.iter().zip(&mut values) {
                input.write(values, operation);
            }
            assert_ne!(
                values, before,
                "operation {operation} has the inputs of the one before"
            );
            before.clone_from(&values);
            reduce(&mut values);
            inputs[1].check(&values[0], operation).unwrap();
            inputs[0].check_one(&values[1], operation).unwrap();
            let index = operation * 7919 % len;
            let other = [98, 99].map(T::small);
            values[0][index] = other[usize::from(values[0][index] == other[0])];
            let error = inputs[1].check(&values[0], operation).unwrap_err();
            assert!(error.contains(&format!("at index {index},")), "{error}");
            assert!(inputs[0].check_one(&values[0], operation).is_err());
            values[0][index] = values[1][index];
        }
        inputs[0].period()
    }

    #[test]
    fn sums_of_sums_are_those_that_are_expected() {
        let periods = [
            follow::<f32>(2, 10_001),
            follow::<f32>(3, 1000),
            follow::<f64>(4, 500),
            follow::<bf16>(2, 1000),
            follow::<bf16>(3, 1000),
            follow::<f16>(2, 1000),
            follow::<i8>(2, 1000),
            follow::<u8>(32, 1000),
            follow::<i32>(2, 1),
        ];
        // How often a type lets sums of some dozen be multiplied by the number of ranks.
        assert_eq!(periods, [61, 13, 30, 61, 3, 13, 4, 1, 28]);
    }

    #[test]
    fn a_rank_alone_keeps_what_it_writes() {
        let input = Input::<f32>::new(0, 1);
        let mut values = vec![0.0; 1000];
        for period in 0..3 {
            input.write(&mut values, period * input.period());
            input.check(&values, period * input.period()).unwrap();
        }
        values[999] += 1.0;
        assert!(input.check(&values, 2 * input.period()).is_err());
    }

    #[test]
    fn every_count_of_ranks_has_inputs() {
        for ranks in 2..=super::super::args::MOST {
            follow::<i8>(ranks, 700);
            follow::<bf16>(ranks, 700);
        }
    }
}
