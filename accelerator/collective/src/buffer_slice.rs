//! Parts of buffers, by rank.

use std::ops::Range;

use crate::{
    buffer::Buffer,
    checksum::{SEED, mix},
    error::{Error, Kind, Result},
    shm::SHM_CHUNK,
};

/// Some bytes of one of several buffers; see
/// [`ProcessGroup::all_gather_parts`](crate::ProcessGroup::all_gather_parts).
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct BufferSlice {
    /// The number of the buffer.
    pub buffer: usize,
    /// The range of its bytes.
    pub bytes: Range<usize>,
}

/// The slices that each rank contributes to a gather, checked against the buffers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GatherLayout<'a> {
    shares: &'a [Vec<BufferSlice>],
    checksum: u64,
}

impl<'a> GatherLayout<'a> {
    pub(crate) fn new(
        buffers: &[&mut Buffer],
        shares: &'a [Vec<BufferSlice>],
        world_size: usize,
    ) -> Result<Self> {
        if shares.len() != world_size {
            return Err(misuse(format!(
                "expected the parts of {world_size} ranks, found those of {}",
                shares.len()
            )));
        }
        if buffers.len() > MOST_BUFFERS {
            return Err(misuse(format!(
                "expected at most {MOST_BUFFERS} buffers in one operation, found {}",
                buffers.len()
            )));
        }
        let mut checksum = SEED;
        let mut add = |number: usize| checksum = mix(checksum, number as u64);
        for buffer in buffers {
            add(buffer.bytes().len());
        }
        for (rank, parts) in shares.iter().enumerate() {
            add(parts.len());
            for BufferSlice { buffer, bytes } in parts {
                let len = buffers
                    .get(*buffer)
                    .map_or(0, |buffer| buffer.bytes().len());
                if bytes.start > bytes.end || bytes.end > len {
                    return Err(misuse(format!(
                        "expected parts that lie within their buffers, found bytes {bytes:?} of buffer \
                         {buffer}, which has {len}, for rank {rank}"
                    )));
                }
                add(*buffer);
                add(bytes.start);
                add(bytes.end);
            }
        }
        Ok(Self { shares, checksum })
    }

    /// A checksum of buffer lengths and slices, which ranks compare.
    pub(crate) fn checksum(&self) -> [u8; size_of::<u64>()] {
        self.checksum.to_le_bytes()
    }

    pub(crate) fn of(&self, rank: usize) -> &'a [BufferSlice] {
        &self.shares[rank]
    }

    /// The number of bytes that a rank gives.
    pub(crate) fn len(&self, rank: usize) -> usize {
        self.of(rank).iter().map(|part| part.bytes.len()).sum()
    }

    /// The most bytes that a rank gives.
    pub(crate) fn longest(&self) -> usize {
        let lens = (0..self.shares.len()).map(|rank| self.len(rank));
        lens.max().unwrap_or(0)
    }

    /// Copies the bytes that a rank gives, one part after the other.
    pub(crate) fn collect(&self, rank: usize, buffers: &[&mut Buffer]) -> Vec<u8> {
        let mut all = Vec::with_capacity(self.len(rank));
        for BufferSlice { buffer, bytes } in self.of(rank) {
            all.extend_from_slice(&buffers[*buffer].bytes()[bytes.clone()]);
        }
        all
    }

    /// Puts a piece of what a rank gives where it belongs; the piece begins at that byte of all.
    pub(crate) fn put(&self, rank: usize, at: usize, piece: &[u8], buffers: &mut [&mut Buffer]) {
        let mut start = 0;
        let end = at + piece.len();
        for BufferSlice { buffer, bytes } in self.of(rank) {
            let (from, to) = (at.max(start), end.min(start + bytes.len()));
            if from < to {
                let place = bytes.start + from - start..bytes.start + to - start;
                buffers[*buffer].bytes_mut()[place].copy_from_slice(&piece[from - at..to - at]);
            }
            start += bytes.len();
        }
    }

    /// Shows everything, once it is there.
    pub(crate) fn show(&self, buffers: &[&mut Buffer], mut sink: impl FnMut(usize, usize, &[u8])) {
        for rank in 0..self.shares.len() {
            for (number, BufferSlice { buffer, bytes }) in self.of(rank).iter().enumerate() {
                sink(rank, number, &buffers[*buffer].bytes()[bytes.clone()]);
            }
        }
    }
}

/// The offsets of so many fit one step in shared memory.
const MOST_BUFFERS: usize = SHM_CHUNK / size_of::<u64>() - 1;

/// The error of an operation whose ranks pass different slices. It is the same on every rank.
pub(crate) fn gather_layouts_differ(sequence: u64) -> Error {
    Error::new(
        Kind::Mismatch,
        format!(
            "the ranks disagree in collective #{sequence}: they gather other parts of their buffers; every \
             rank must pass buffers of the same lengths, and the same parts of every rank"
        ),
    )
}

fn misuse(message: String) -> Error {
    Error::new(Kind::Misuse, message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::DType;

    #[test]
    fn pieces_find_their_places_however_they_are_cut() {
        let part = |buffer, bytes| BufferSlice { buffer, bytes };
        let shares = [vec![part(1, 2..5), part(0, 0..0), part(0, 1..4)], vec![]];
        for cut in 1..8 {
            let mut from = [5, 6].map(|len| Buffer::zeroed(DType::U8, len));
            let mut into = [5, 6].map(|len| Buffer::zeroed(DType::U8, len));
            for (at, byte) in from.iter_mut().flat_map(Buffer::bytes_mut).enumerate() {
                *byte = at as u8;
            }
            let [a, b] = &mut from;
            let (from, [c, d]) = ([a, b], &mut into);
            let mut into = [c, d];
            let shares = GatherLayout::new(&from, &shares, 2).unwrap();
            let all = shares.collect(0, &from);
            assert_eq!(all, [7, 8, 9, 1, 2, 3]);
            for (number, piece) in all.chunks(cut).enumerate() {
                shares.put(0, number * cut, piece, &mut into);
            }
            assert_eq!(into[0].bytes(), [0, 1, 2, 3, 0]);
            assert_eq!(into[1].bytes(), [0, 0, 7, 8, 9, 0]);
            let mut seen = Vec::new();
            shares.show(&into, |rank, part, bytes| {
                seen.push((rank, part, bytes.to_vec()))
            });
            assert_eq!(seen[2], (0, 2, vec![1, 2, 3]));
        }
    }

    #[test]
    fn parts_outside_of_their_buffers_are_refused() {
        let mut buffer = Buffer::zeroed(DType::F32, 2);
        let buffers = [&mut buffer];
        for (number, bytes, ranks) in [(0, 0..9, 1), (1, 0..1, 1), (0, 0..1, 2)] {
            let part = BufferSlice {
                buffer: number,
                bytes,
            };
            let error = GatherLayout::new(&buffers, &[vec![part]], ranks).unwrap_err();
            assert!(error.is_misuse(), "{error}");
        }
    }
}
