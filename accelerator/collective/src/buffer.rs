//! Flat, aligned buffers.

use std::fmt;

use crate::{
    element::{DType, Element},
    error::{Error, Kind, Result},
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
    storage: Storage,
}

impl Buffer {
    /// A buffer of zeros on the heap.
    pub(crate) fn zeroed(dtype: DType, len: usize) -> Self {
        let mut storage = Storage::default();
        // A product that does not fit is more than any memory; the allocation says so.
        storage.grow(len.saturating_mul(dtype.size()));
        Self {
            dtype,
            len,
            storage,
        }
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

    /// Whether the buffer has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements as bytes in the machine's order.
    pub fn bytes(&self) -> &[u8] {
        &self.storage.bytes()[..self.len * self.dtype.size()]
    }

    /// The elements as bytes, to be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let len = self.len * self.dtype.size();
        &mut self.storage.bytes_mut()[..len]
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

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer")
            .field("dtype", &self.dtype)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

/// Bytes that start at a cache line, so that they can be viewed as any element type.
#[derive(Default)]
pub(crate) struct Storage {
    lines: Vec<Line>,
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
struct Line([u8; LINE]);

const LINE: usize = 64;

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
