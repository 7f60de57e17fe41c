//! Memory of a GPU, for tests and benches.

#![expect(
    unsafe_code,
    reason = "memory of the driver's is taken and given back here"
)]

use crate::error::{Error, Kind, Result};
use crate::gpu::{Gpu, note};

/// An address in the memory of a GPU.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct DevicePointer(
    /// The address, as in CUDA's `CUdeviceptr`.
    pub u64,
);

impl std::fmt::Debug for DevicePointer {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "DevicePointer({:#x})", self.0)
    }
}

/// Memory of a GPU, which is freed when it is dropped, unless an operation on it failed and may still
/// use it.
///
/// Copies are in the order of CUDA's default stream: [`read`](Self::read) after
/// [`Communicator::wait`](crate::Communicator::wait) or
/// [`Communicator::order_after`](crate::Communicator::order_after).
#[derive(Debug)]
pub struct DeviceMemory {
    gpu: Gpu,
    at: u64,
    bytes: usize,
    /// Set if an operation that did not end may still use it.
    forfeited: bool,
}

impl DeviceMemory {
    /// Takes so many bytes; what is in them is not known.
    ///
    /// # Errors
    /// [`is_misuse`](Error::is_misuse) for no bytes at all, [`is_cuda`](Error::is_cuda) if the GPU
    /// has no room.
    pub fn new(gpu: &Gpu, bytes: usize) -> Result<Self> {
        if bytes == 0 {
            let message = "memory of 0 bytes has no place: ask for at least 1";
            return Err(Error::new(Kind::Misuse, message));
        }
        // SAFETY: the context is current.
        let at = gpu.inside(|api| unsafe { api.allocate(bytes) })?;
        Ok(Self {
            gpu: gpu.clone(),
            at,
            bytes,
            forfeited: false,
        })
    }

    /// Returns the size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the beginning, which is valid until this value is dropped.
    pub fn pointer(&self) -> DevicePointer {
        DevicePointer(self.at)
    }

    /// Copies bytes of the host to the beginning.
    ///
    /// # Errors
    /// [`is_misuse`](Error::is_misuse) for more bytes than there are, [`is_cuda`](Error::is_cuda)
    /// if the driver refuses.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.holds(bytes.len())?;
        // SAFETY: there are so many bytes here, in this context, which is current.
        Ok(self
            .gpu
            .inside(|api| unsafe { api.write(self.at, bytes) })?)
    }

    /// Copies bytes from the beginning to the host, and waits until they are there.
    ///
    /// # Errors
    /// [`is_misuse`](Error::is_misuse) for more bytes than there are, [`is_cuda`](Error::is_cuda)
    /// if the driver refuses.
    pub fn read(&self, bytes: &mut [u8]) -> Result<()> {
        self.holds(bytes.len())?;
        // SAFETY: there are so many bytes here, in this context, which is current.
        Ok(self.gpu.inside(|api| unsafe { api.read(self.at, bytes) })?)
    }

    pub(crate) fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Keeps the memory from being freed.
    pub(crate) fn forfeit(&mut self) {
        self.forfeited = true;
    }

    fn holds(&self, bytes: usize) -> Result<()> {
        if bytes <= self.bytes {
            return Ok(());
        }
        let message = format!("{bytes} bytes do not fit: this memory holds {}", self.bytes);
        Err(Error::new(Kind::Misuse, message))
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if self.forfeited {
            return;
        }
        let freed = self.gpu.inside(|api| {
            // SAFETY: it was taken here, and is not used after: who uses the pointer keeps this value.
            unsafe { api.free(self.at) };
            Ok(())
        });
        note(freed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Library;
    use crate::api::fake::Fake;

    #[test]
    fn bytes_come_back_and_memory_is_freed() {
        let fake = Fake::new().inner();
        let gpu = Gpu::open(&Library::with(fake.clone()).unwrap(), 0).unwrap();
        let mut memory = DeviceMemory::new(&gpu, 4).unwrap();
        memory.write(&[1, 2, 3]).unwrap();
        let mut bytes = [0; 3];
        memory.read(&mut bytes).unwrap();
        assert_eq!((bytes, memory.bytes()), ([1, 2, 3], 4));
        assert!(memory.write(&[0; 5]).unwrap_err().is_misuse());
        assert!(memory.read(&mut [0; 5]).unwrap_err().is_misuse());
        assert!(DeviceMemory::new(&gpu, 0).unwrap_err().is_misuse());
        drop(memory);
        assert!(fake.memory().is_empty());
    }
}
