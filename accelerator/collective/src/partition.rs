//! The partition of a buffer into parts, one per rank.

use std::ops::Range;

/// A sequence of `len` elements cut into consecutive parts whose sizes differ by at most one.
///
/// The first `len % parts` parts hold one element more. Part `r` is what rank `r` owns in a
/// [`reduce_scatter`](crate::ProcessGroup::reduce_scatter), and what it reduces inside an
/// all-reduce.
///
/// ```
/// use accelerator_collective::Partition;
///
/// let partition = Partition::new(7, 3);
/// assert_eq!(partition.range(0), 0..3);
/// assert_eq!(partition.range(1), 3..5);
/// assert_eq!(partition.range(2), 5..7);
/// assert_eq!(partition.largest(), 3);
/// assert_eq!(partition.range(3), 7..7);
/// ```
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Partition {
    len: usize,
    parts: usize,
}

impl Partition {
    /// Cuts `len` elements into `parts` parts; zero parts count as one.
    pub fn new(len: usize, parts: usize) -> Self {
        Self {
            len,
            parts: parts.max(1),
        }
    }

    /// The elements of one part; empty behind the last part.
    pub fn range(&self, part: usize) -> Range<usize> {
        self.start(part)..self.start(part.saturating_add(1))
    }

    /// The number of elements of the largest part, which is the first.
    pub fn largest(&self) -> usize {
        self.len.div_ceil(self.parts)
    }

    fn start(&self, part: usize) -> usize {
        let part = part.min(self.parts);
        let (size, extra) = (self.len / self.parts, self.len % self.parts);
        part * size + part.min(extra)
    }
}

/// The range of one of the chunks of `size` into which `len` is cut; the last one may be shorter, and
/// those behind it are empty.
pub(crate) fn chunk(len: usize, index: usize, size: usize) -> Range<usize> {
    let start = len.min(index * size);
    start..len.min(start + size)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn parts_are_consecutive_even_and_complete(len in 0_usize..5000, parts in 1_usize..70) {
            let partition = Partition::new(len, parts);
            let mut next = 0;
            for part in 0..parts {
                let range = partition.range(part);
                prop_assert_eq!(range.start, next);
                prop_assert!(range.len() == len / parts || range.len() == len / parts + 1);
                prop_assert!(range.len() <= partition.largest());
                next = range.end;
            }
            prop_assert_eq!(next, len);
            prop_assert_eq!(partition.range(0).len(), partition.largest());
        }
    }
}
