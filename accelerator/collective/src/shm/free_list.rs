//! The free parts of an arena.

use std::ops::Range;

/// Free ranges, in order, with a gap between any two.
#[derive(Debug)]
pub(super) struct FreeList(Vec<Range<usize>>);

impl FreeList {
    pub(super) fn new(all: Range<usize>) -> Self {
        let mut free_list = Self(Vec::new());
        free_list.free(all);
        free_list
    }

    /// Takes the first range of `len` bytes that starts at a multiple of `align`.
    pub(super) fn take(&mut self, len: usize, align: usize) -> Option<Range<usize>> {
        let fits = |hole: &Range<usize>| {
            let start = hole.start.checked_next_multiple_of(align)?;
            let end = start.checked_add(len)?;
            (end <= hole.end).then_some(start..end)
        };
        let (index, taken) = self
            .0
            .iter()
            .enumerate()
            .find_map(|(index, hole)| Some((index, fits(hole)?)))?;
        let hole = self.0.remove(index);
        // In this order, so that both land where the hole was.
        for rest in [taken.end..hole.end, hole.start..taken.start] {
            if !rest.is_empty() {
                self.0.insert(index, rest);
            }
        }
        Some(taken)
    }

    /// Gives a range back.
    pub(super) fn free(&mut self, range: Range<usize>) {
        if range.is_empty() {
            return;
        }
        let index = self.0.partition_point(|hole| hole.start < range.start);
        self.0.insert(index, range);
        // With what follows, then with what is before.
        for index in [index, index.wrapping_sub(1)] {
            if let Some([left, right]) = self.0.get(index..).and_then(<[_]>::first_chunk)
                && left.end == right.start
            {
                self.0[index].end = right.end;
                self.0.remove(index + 1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_was_given_back_becomes_one_again() {
        let mut free_list = FreeList::new(10..1000);
        let first = free_list.take(100, 64).unwrap();
        assert_eq!(first, 64..164);
        let second = free_list.take(100, 64).unwrap();
        let third = free_list.take(600, 64).unwrap();
        assert_eq!(free_list.take(100, 64), None);
        free_list.free(second.clone());
        assert_eq!(free_list.take(100, 64), Some(second.clone()));
        for range in [first, third, second] {
            free_list.free(range);
        }
        assert_eq!((free_list.0.len(), free_list.0[0].clone()), (1, 10..1000));
        assert_eq!(free_list.take(usize::MAX, 4096), None);
    }

    proptest! {
        #[test]
        fn no_byte_is_given_twice(steps in proptest::collection::vec((any::<bool>(), 1..40_usize, 0..5_u32), 0..60)) {
            let mut free_list = FreeList::new(0..256);
            let mut taken: Vec<Range<usize>> = Vec::new();
            for (take, len, align) in steps {
                if take {
                    if let Some(range) = free_list.take(len, 1 << align) {
                        prop_assert_eq!((range.len(), range.start % (1 << align)), (len, 0));
                        prop_assert!(taken.iter().all(|x| x.end <= range.start || range.end <= x.start));
                        taken.push(range);
                    }
                } else if !taken.is_empty() {
                    free_list.free(taken.swap_remove(len % taken.len()));
                }
                let used: usize = taken.iter().map(ExactSizeIterator::len).sum();
                let free: usize = free_list.0.iter().map(ExactSizeIterator::len).sum();
                prop_assert_eq!(used + free, 256);
            }
        }
    }
}
