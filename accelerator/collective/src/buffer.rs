//! Flat, aligned buffers.

use std::{
    fmt, mem,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use crate::{
    element::{DType, Element},
    error::{Error, Kind, Result},
    shm::{Arena, Region},
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
        Err(Error::new(
            Kind::Misuse,
            format!(
                "the buffer holds {}, it cannot be read as {}; ask its dtype() first",
                self.dtype,
                T::DTYPE
            ),
        ))
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
            Self::Heap(storage) => storage.bytes(),
            Self::Shared(region) => region.bytes(),
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Heap(storage) => storage.bytes_mut(),
            Self::Shared(region) => region.bytes_mut(),
        }
    }
}

/// A buffer that other ranks may write to until this ends. Where it is dropped before, they may
/// go on: the buffer then gets other memory.
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

/// The bytes of a cache line.
pub(crate) const LINE: usize = 64;

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

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
}
