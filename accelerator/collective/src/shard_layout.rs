//! Shard layouts: which elements of a buffer each rank keeps, after a reduce-scatter and for an all-gather; and the
//! partition into equal parts.

use std::{fmt, iter, ops::Range};

use crate::error::{Error, Kind, Result};

/// The elements of a buffer that each rank keeps of a reduction; see
/// [`reduce_scatter_buffer`](crate::ProcessGroup::reduce_scatter_buffer).
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ShardLayout {
    len: usize,
    parts: Vec<RankShard>,
    /// The most elements that a rank keeps.
    largest: usize,
    digest: Digest,
}

impl ShardLayout {
    /// Creates a layout of `len` elements, in which each rank keeps the ranges `parts[rank]`, in any order. They need
    /// not cover the buffer. Empty ranges are ignored, and adjacent ranges of a rank are merged.
    ///
    /// # Errors
    ///
    /// A misuse error if a range ends before it starts or beyond the buffer, or if two ranges overlap, whether they are
    /// of one rank or of two.
    pub fn new(len: usize, parts: Vec<Vec<Range<usize>>>) -> Result<Self> {
        let mut all = Vec::with_capacity(parts.iter().map(Vec::len).sum());
        for (rank, ranges) in parts.iter().enumerate() {
            for range in ranges {
                if range.start > range.end || range.end > len {
                    return Err(Error::misuse(format!(
                        "expected ranges that lie within a buffer of {len} elements, found {range:?} \
                         for rank {rank}; pass ranges of elements, not of bytes"
                    )));
                }
                if !range.is_empty() {
                    all.push((range.clone(), rank));
                }
            }
        }
        all.sort_unstable_by_key(|(range, _)| range.start);
        for pair in all.windows(2) {
            let [(before, one), (after, other)] = pair else {
                continue;
            };
            if before.end > after.start {
                return Err(Error::misuse(format!(
                    "expected ranges that do not overlap, found {before:?} of rank {one} and {after:?} of \
                     rank {other}; an element has one rank that keeps it, or none"
                )));
            }
        }
        let mut parts: Vec<RankShard> = iter::repeat_with(RankShard::default)
            .take(parts.len())
            .collect();
        for (range, rank) in all {
            parts[rank].push(range);
        }
        Ok(Self {
            len,
            largest: parts.iter().map(RankShard::len).max().unwrap_or(0),
            digest: digest(len, &parts),
            parts,
        })
    }

    /// The ranges of elements that a rank keeps, in order; none if there is no such rank.
    pub fn of(&self, rank: usize) -> &[Range<usize>] {
        self.parts.get(rank).map_or(&[], |part| &part.ranges)
    }

    /// The number of elements of the buffer.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns `true` if the buffer has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(crate) fn ranks(&self) -> usize {
        self.parts.len()
    }

    /// The most elements that a rank keeps.
    pub(crate) fn largest(&self) -> usize {
        self.largest
    }

    /// The places of the elements that a rank keeps, from number `packed.start` to `packed.end` of them; none after the
    /// last one.
    pub(crate) fn runs(&self, rank: usize, packed: Range<usize>) -> Runs<'_> {
        match self.parts.get(rank) {
            Some(part) => part.runs(packed),
            None => Runs::default(),
        }
    }

    /// A BLAKE3 digest, which ranks compare. Ranks that share memory rely on it to agree on the elements that each of
    /// them writes, so it must be collision resistant.
    pub(crate) fn digest(&self) -> &Digest {
        &self.digest
    }
}

/// The elements that one rank keeps: ranges in order, of which no two touch.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
struct RankShard {
    ranges: Vec<Range<usize>>,
    /// The number of elements up to the end of each range.
    ends: Vec<usize>,
}

impl RankShard {
    fn push(&mut self, range: Range<usize>) {
        let len = self.len() + range.len();
        match (self.ranges.last_mut(), self.ends.last_mut()) {
            (Some(last), Some(end)) if last.end == range.start => {
                last.end = range.end;
                *end = len;
            }
            _ => {
                self.ranges.push(range);
                self.ends.push(len);
            }
        }
    }

    fn len(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    fn runs(&self, packed: Range<usize>) -> Runs<'_> {
        let end = packed.end.min(self.len());
        let start = packed.start.min(end);
        let first = self.ends.partition_point(|end| *end <= start);
        let before = first.checked_sub(1).map_or(0, |index| self.ends[index]);
        Runs {
            ranges: &self.ranges[first..],
            skip: start - before,
            left: end - start,
        }
    }
}

/// Ranges of elements, one after the other.
#[derive(Clone, Debug, Default)]
pub(crate) struct Runs<'a> {
    ranges: &'a [Range<usize>],
    /// The number of elements at the start of the first range that are left out.
    skip: usize,
    /// The number of elements in all ranges that are not left out.
    left: usize,
}

impl Runs<'_> {
    pub(crate) fn elements(&self) -> usize {
        self.left
    }
}

impl Iterator for Runs<'_> {
    type Item = Range<usize>;

    fn next(&mut self) -> Option<Range<usize>> {
        if self.left == 0 {
            return None;
        }
        let (range, others) = self.ranges.split_first()?;
        let start = range.start + self.skip;
        let run = start..range.end.min(start + self.left);
        self.ranges = others;
        self.skip = 0;
        self.left -= run.len();
        Some(run)
    }
}

pub(crate) type Digest = [u8; blake3::OUT_LEN];

fn digest(len: usize, parts: &[RankShard]) -> Digest {
    let mut digest = blake3::Hasher::new();
    let mut add = |number: usize| {
        digest.update(&(number as u64).to_le_bytes());
    };
    add(len);
    for RankShard { ranges, .. } in parts {
        add(ranges.len());
        for range in ranges {
            add(range.start);
            add(range.end);
        }
    }
    digest.finalize().into()
}

/// The error of an operation whose ranks pass different shard layouts. It is the same on every rank.
pub(crate) fn shard_layouts_differ(number: impl fmt::Display) -> Error {
    Error::new(
        Kind::Mismatch,
        format!(
            "the ranks disagree in collective {number}: their shard layouts differ; every rank \
             must pass the same ranges of every rank"
        ),
    )
}

/// A sequence of `len` elements cut into consecutive parts whose sizes differ by at most one.
///
/// The first `len % parts` parts hold one element more. Rank `r` owns part `r` in a
/// [`reduce_scatter`](crate::ProcessGroup::reduce_scatter), and reduces it inside an all-reduce.
///
/// ```
/// use accelerator_collective::Partition;
///
/// let partition = Partition::new(7, 3);
/// assert_eq!(partition.range(0), 0..3);
/// assert_eq!(partition.range(1), 3..5);
/// assert_eq!(partition.range(2), 5..7);
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

    /// The elements of one part; empty beyond the last part.
    pub fn range(&self, part: usize) -> Range<usize> {
        self.start(part)..self.start(part.saturating_add(1))
    }

    /// The number of elements of the largest part, which is the first.
    pub(crate) fn largest(&self) -> usize {
        self.len.div_ceil(self.parts)
    }

    fn start(&self, part: usize) -> usize {
        let part = part.min(self.parts);
        let (size, extra) = (self.len / self.parts, self.len % self.parts);
        part * size + part.min(extra)
    }
}

/// The range of chunk `index` if `len` is cut into chunks of `size`. The last chunk may be shorter, and those after it
/// are empty.
pub(crate) fn chunk(len: usize, index: usize, size: usize) -> Range<usize> {
    let start = len.min(index * size);
    start..len.min(start + size)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn ranges_are_put_in_order_and_joined() {
        let layout = ShardLayout::new(
            20,
            vec![vec![7..9, 3..3, 0..2, 2..5], vec![19..20, 5..6], vec![]],
        )
        .unwrap();
        assert_eq!(layout.of(0), [0..5, 7..9]);
        assert_eq!(layout.of(1), [5..6, 19..20]);
        assert!(layout.of(2).is_empty() && layout.of(3).is_empty());
        assert_eq!((layout.len(), layout.ranks(), layout.largest()), (20, 3, 7));
        assert!(ShardLayout::new(0, vec![]).unwrap().is_empty());
    }

    #[test]
    fn ranges_that_overlap_or_lie_outside_are_refused() {
        #[expect(clippy::reversed_empty_ranges, reason = "it is refused")]
        let reversed = 4..2;
        for (parts, named) in [
            (vec![vec![0..11]], "0..11 for rank 0"),
            (vec![vec![], vec![11..11]], "11..11 for rank 1"),
            (vec![vec![reversed]], "4..2 for rank 0"),
            (vec![vec![4..6, 0..5]], "0..5 of rank 0 and 4..6 of rank 0"),
            (
                vec![vec![4..9], vec![0..1, 8..10]],
                "4..9 of rank 0 and 8..10 of rank 1",
            ),
            (
                vec![vec![0..9], vec![1..2], vec![3..4]],
                "0..9 of rank 0 and 1..2 of rank 1",
            ),
        ] {
            let error = ShardLayout::new(10, parts).unwrap_err();
            assert!(error.is_misuse(), "{error}");
            assert!(error.to_string().contains(named), "{error}");
        }
    }

    #[test]
    fn cuts_that_mean_the_same_have_one_digest() {
        let digest = |len, parts| *ShardLayout::new(len, parts).unwrap().digest();
        let one = digest(10, vec![vec![0..4], vec![5..6]]);
        assert_eq!(digest(10, vec![vec![3..4, 0..3, 7..7], vec![5..6]]), one);
        for (len, parts) in [
            (11, vec![vec![0..4], vec![5..6]]),
            (10, vec![vec![5..6], vec![0..4]]),
            (10, vec![vec![0..4, 5..6], vec![]]),
            (10, vec![vec![0..4], vec![5..6], vec![]]),
            (10, vec![vec![0..4], vec![5..7]]),
        ] {
            assert_ne!(digest(len, parts), one);
        }
    }

    proptest! {
        /// However what a rank keeps is taken apart, each of its elements comes once and in order.
        #[test]
        fn runs_are_what_a_rank_keeps(
            gaps in proptest::collection::vec((0..5_usize, 0..9_usize), 0..40),
            size in 1..30_usize,
        ) {
            let mut ranges = Vec::new();
            let mut at = 0;
            for (gap, len) in gaps {
                ranges.push(at + gap..at + gap + len);
                at += gap + len;
            }
            let expected: Vec<usize> = ranges.iter().cloned().flatten().collect();
            let layout = ShardLayout::new(at, vec![vec![], ranges]).unwrap();
            let chunks = layout.largest().div_ceil(size);
            let runs = (0..chunks).flat_map(|n| layout.runs(1, n * size..(n + 1) * size));
            prop_assert_eq!(runs.flatten().collect::<Vec<_>>(), expected);
            for chunk in 0..chunks {
                let runs = layout.runs(1, chunk * size..(chunk + 1) * size);
                prop_assert_eq!(runs.elements(), runs.clone().map(|run| run.len()).sum::<usize>());
                prop_assert!(runs.elements() == size || chunk + 1 == chunks);
            }
            prop_assert_eq!(layout.runs(1, chunks * size..(chunks + 1) * size).elements(), 0);
            prop_assert_eq!(layout.runs(0, 0..size).elements(), 0);
        }
    }
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
