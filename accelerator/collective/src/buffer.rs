//! Flat, aligned buffers, and the slices of them that ranks gather.

use std::{
    fmt, mem,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use accelerator_host::file_memory::FileMemory;

use crate::{
    element::{DType, Element},
    error::{Error, Kind, Result},
    fingerprint::{SEED, mix},
    shm::{Arena, Region, SHM_CHUNK},
};

/// A flat buffer of elements of one type, owned by its holder and aligned to a cache line.
///
/// A buffer is made by [`ProcessGroup::buffer`](crate::ProcessGroup::buffer), which places it
/// where the group's transport can reduce it best, is handed to
/// [`start_all_reduce`](crate::ProcessGroup::start_all_reduce) and comes back from
/// [`Pending::wait`](crate::Pending::wait), so that one allocation serves every step.
///
/// ```
/// use accelerator_collective::{DType, ProcessGroup};
///
/// # fn main() -> accelerator_collective::Result<()> {
/// let group = ProcessGroup::single();
/// let mut buffer = group.buffer(DType::F32, 3);
/// buffer.as_mut_slice::<f32>()?.copy_from_slice(&[1.0, 2.0, 3.0]);
/// assert_eq!(buffer.as_slice::<f32>()?[1], 2.0);
/// assert!(buffer.as_slice::<f64>().unwrap_err().is_misuse());
/// # Ok(())
/// # }
/// ```
pub struct Buffer {
    dtype: DType,
    len: usize,
    memory: Memory,
    /// The meter that counts its memory while it lives.
    meter: Option<Meter>,
}

impl Buffer {
    /// A buffer of zeros on the heap.
    pub(crate) fn zeroed(dtype: DType, len: usize) -> Self {
        Self {
            dtype,
            len,
            // A product that does not fit is more than any memory; the allocation says so.
            memory: Memory::zeroed(len.saturating_mul(dtype.size())),
            meter: None,
        }
    }

    /// Wraps the zeroed memory of a file in a buffer of as many elements as it holds.
    pub(crate) fn of_file(dtype: DType, memory: FileMemory) -> Self {
        Self {
            dtype,
            len: memory.bytes().len() / dtype.size(),
            memory: Memory::File(memory),
            meter: None,
        }
    }

    /// A buffer of zeros in an arena, or on the heap where there is no room.
    pub(crate) fn placed(dtype: DType, len: usize, arena: &Arc<Arena>) -> Self {
        let bytes = len.checked_mul(dtype.size());
        match bytes.and_then(|bytes| Region::new(arena, bytes)) {
            Some(region) => Self {
                dtype,
                len,
                memory: Memory::Shared(region),
                meter: None,
            },
            None => Self::zeroed(dtype, len),
        }
    }

    /// Lets others write to the buffer, if it lies in this arena.
    pub(crate) fn lend(&mut self, arena: &Arc<Arena>) -> Option<Loan<'_>> {
        let offset = match &self.memory {
            Memory::Shared(region) if region.is_in(arena) => region.offset(),
            _ => return None,
        };
        Some(Loan {
            memory: &mut self.memory,
            offset,
            over: false,
        })
    }

    /// The same buffer, whose memory is counted while it lives.
    pub(crate) fn counted_by(mut self, meter: &Meter) -> Self {
        meter.add(self.memory.bytes().len());
        self.meter = Some(meter.clone());
        self
    }

    /// The elements.
    ///
    /// # Errors
    ///
    /// A misuse error where `T` is not the buffer's element type.
    pub fn as_slice<T: Element>(&self) -> Result<&[T]> {
        self.check::<T>()?;
        Ok(bytemuck::cast_slice(self.bytes()))
    }

    /// The elements, to be written.
    ///
    /// # Errors
    ///
    /// A misuse error where `T` is not the buffer's element type.
    pub fn as_mut_slice<T: Element>(&mut self) -> Result<&mut [T]> {
        self.check::<T>()?;
        Ok(bytemuck::cast_slice_mut(self.bytes_mut()))
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns `true` if the buffer has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements as bytes in the machine's order.
    pub fn bytes(&self) -> &[u8] {
        &self.memory.bytes()[..self.len * self.dtype.size()]
    }

    /// The elements as bytes, to be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let len = self.len * self.dtype.size();
        &mut self.memory.bytes_mut()[..len]
    }

    fn check<T: Element>(&self) -> Result<()> {
        if T::DTYPE == self.dtype {
            return Ok(());
        }
        Err(Error::misuse(format!(
            "the buffer holds {}, it cannot be read as {}; ask its dtype() first",
            self.dtype,
            T::DTYPE
        )))
    }
}

impl fmt::Debug for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Storage({} bytes)", self.bytes().len())
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(meter) = &self.meter {
            meter.subtract(self.memory.bytes().len());
        }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer")
            .field("dtype", &self.dtype)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

#[derive(Debug)]
enum Memory {
    File(FileMemory),
    Heap(Storage),
    Shared(Region),
}

impl Memory {
    fn zeroed(bytes: usize) -> Self {
        let mut storage = Storage::default();
        storage.grow(bytes);
        Self::Heap(storage)
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Self::File(memory) => memory.bytes(),
            Self::Heap(storage) => storage.bytes(),
            Self::Shared(region) => region.bytes(),
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::File(memory) => memory.bytes_mut(),
            Self::Heap(storage) => storage.bytes_mut(),
            Self::Shared(region) => region.bytes_mut(),
        }
    }
}

/// A buffer that other ranks may write to until this ends. Where it is dropped before, they may
/// continue: the buffer then gets other memory.
pub(crate) struct Loan<'a> {
    memory: &'a mut Memory,
    offset: usize,
    over: bool,
}

impl Loan<'_> {
    /// The offset of the buffer in this rank's arena.
    pub(crate) fn offset(&self) -> usize {
        self.offset
    }

    /// Ends the loan: nobody else writes to the buffer any more.
    pub(crate) fn end(mut self) {
        self.over = true;
    }
}

impl Drop for Loan<'_> {
    fn drop(&mut self) {
        if self.over {
            return;
        }
        let Memory::Shared(region) = &*self.memory else {
            return;
        };
        let other = Memory::zeroed(region.len());
        if let Memory::Shared(region) = mem::replace(self.memory, other) {
            region.abandon();
        }
    }
}

/// Counts the bytes of buffers that live.
#[derive(Clone, Debug, Default)]
pub(crate) struct Meter(Arc<AtomicUsize>);

impl Meter {
    pub(crate) fn bytes(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    fn add(&self, bytes: usize) {
        self.0.fetch_add(bytes, Ordering::Relaxed);
    }

    fn subtract(&self, bytes: usize) {
        self.0.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// Bytes on the heap that start at a cache line, so that they can be viewed as any element type.
#[derive(Default)]
pub(crate) struct Storage {
    lines: Vec<CacheLine>,
}

impl Storage {
    /// Makes room for at least `bytes` bytes; what is new is zero.
    pub(crate) fn grow(&mut self, bytes: usize) {
        let lines = bytes.div_ceil(LINE);
        if lines > self.lines.len() {
            self.lines.resize(lines, bytemuck::Zeroable::zeroed());
        }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.lines)
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.lines)
    }
}

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
struct CacheLine([u8; LINE]);

pub(crate) const LINE: usize = 64;

/// Some bytes of one of several buffers; see
/// [`all_gather_parts`](crate::ProcessGroup::all_gather_parts).
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
            return Err(Error::misuse(format!(
                "expected the parts of {world_size} ranks, found those of {}",
                shares.len()
            )));
        }
        if buffers.len() > MOST_BUFFERS {
            return Err(Error::misuse(format!(
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
                    return Err(Error::misuse(format!(
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
pub(crate) fn gather_layouts_differ(number: impl fmt::Display) -> Error {
    Error::new(
        Kind::Mismatch,
        format!(
            "the ranks disagree in collective {number}: they gather other parts of their buffers; every \
             rank must pass buffers of the same lengths, and the same parts of every rank"
        ),
    )
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    use crate::element::DType;

    #[test]
    fn buffers_are_aligned_typed_and_zero() {
        let mut buffer = Buffer::zeroed(DType::BF16, 33);
        assert_eq!(buffer.bytes().len(), 66);
        assert_eq!(buffer.bytes().as_ptr().align_offset(64), 0);
        assert!(
            buffer
                .as_slice::<bf16>()
                .unwrap()
                .iter()
                .all(|x| *x == bf16::ZERO)
        );
        buffer.as_mut_slice::<bf16>().unwrap()[32] = bf16::ONE;
        assert_eq!(buffer.as_slice::<bf16>().unwrap()[32], bf16::ONE);
        let error = buffer.as_slice::<u16>().unwrap_err();
        assert!(error.is_misuse());
        assert!(error.to_string().contains("bf16"));
        assert!(Buffer::zeroed(DType::U8, 0).is_empty());
    }
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
