//! A GPU, by the context that everything in a process shares, and what lives in that context.
#![expect(
    unsafe_code,
    reason = "handles and memory of the driver's are made and given back here"
)]

use std::sync::Arc;

use crate::api::{self, Api, CallResult, Device, Progress, UniqueId};
use crate::error::{Error, Result};
use crate::library::{Library, Version};

/// A GPU that this process uses, by its primary context: the one that CUDA's runtime, and CubeCL with
/// it, uses as well. So pointers and kernels of theirs and of ours are of one context.
///
/// Cheap to clone; the context is kept for as long as there are clones.
#[derive(Clone, Debug)]
pub struct Gpu(Arc<GpuInner>);

impl Gpu {
    /// The GPU of that number, as CUDA counts those that `CUDA_VISIBLE_DEVICES` leaves: from 0.
    ///
    /// # Errors
    /// [`is_misuse`](Error::is_misuse) if there are not so many, [`is_cuda`](Error::is_cuda)
    /// if the driver refuses a context.
    pub fn open(library: &Library, ordinal: usize) -> Result<Self> {
        let api = Arc::clone(library.api());
        let count = api.gpu_count()?;
        let Some(number) = i32::try_from(ordinal).ok().filter(|_| ordinal < count) else {
            return Err(Error::misuse(format!(
                "GPU {ordinal} is not there: this process sees {count}, counted from 0; see CUDA_VISIBLE_DEVICES"
            )));
        };
        let driver = api.driver_version()?;
        let device = api.device(number)?;
        let bus_id = api.bus_id(device)?;
        let context = api.retain(device)?;
        let ordering = match driver >= CONTEXT_EVENTS && api.has_context_events() {
            true => Ordering::Events,
            false => Ordering::Host,
        };
        Ok(Self(Arc::new(GpuInner {
            api,
            device,
            context,
            bus_id,
            driver: Version::of_cuda(driver),
            nccl: library.version(),
            ordering,
        })))
    }

    /// Its place on the PCI bus of this host, such as `0000:3B:00.0`. Two ranks of one host have the
    /// same if they share a GPU (or have a part of the same one each), which NCCL refuses by default.
    pub(crate) fn bus_id(&self) -> &str {
        &self.0.bus_id
    }

    /// The latest CUDA that the driver knows.
    pub fn driver_version(&self) -> Version {
        self.0.driver
    }

    pub(crate) fn nccl_version(&self) -> Version {
        self.0.nccl
    }

    /// An id by which ranks find one another.
    pub(crate) fn unique_id(&self) -> Result<UniqueId> {
        Ok(UniqueId::new(self.0.api.unique_id()?))
    }

    /// Returns `true` if this is a handle of the same context.
    pub(crate) fn is(&self, other: &Self) -> bool {
        self.0.context == other.0.context
    }

    pub(crate) fn ordering(&self) -> Ordering {
        self.0.ordering
    }

    /// Waits, on the host, for all that is enqueued in the context.
    pub(crate) fn synchronize(&self) -> CallResult<()> {
        // SAFETY: the context is current.
        self.inside(|api| unsafe { api.synchronize() })
    }

    /// Calls what needs the context, with the context.
    pub(crate) fn inside<T>(&self, call: impl FnOnce(&dyn Api) -> CallResult<T>) -> CallResult<T> {
        let api = &*self.0.api;
        // SAFETY: the context is retained for as long as `self.0` lives.
        unsafe { api.enter(self.0.context)? };
        let outcome = call(api);
        // SAFETY: it was entered above, in this thread; what `call` enters, it leaves.
        unsafe { api.leave() };
        outcome
    }
}

/// The way in which work of other streams and of ours is put in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ordering {
    /// Events about the whole context do it; the host does not wait.
    Events,
    /// The host waits: the driver is older than CUDA 12.5.
    Host,
}

/// A stream that waits for none that it is not told to wait for.
#[derive(Debug)]
pub(crate) struct Stream {
    gpu: Gpu,
    handle: api::StreamHandle,
}

impl Stream {
    pub(crate) fn new(gpu: &Gpu) -> Result<Self> {
        // SAFETY: the context is current.
        let handle = gpu.inside(|api| unsafe { api.create_stream() })?;
        Ok(Self {
            gpu: gpu.clone(),
            handle,
        })
    }

    /// Lets what is enqueued from now on wait for what was recorded.
    pub(crate) fn wait(&self, event: &Event) -> CallResult<()> {
        // SAFETY: both handles live as long as their owners, and are of this context, which is current.
        self.gpu
            .inside(|api| unsafe { api.wait_stream(self.handle, event.handle) })
    }

    pub(crate) fn handle(&self) -> api::StreamHandle {
        self.handle
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let destroyed = self.gpu.inside(|api| {
            // SAFETY: the handle was made here, and is not used after.
            unsafe { api.destroy_stream(self.handle) };
            Ok(())
        });
        note(destroyed);
    }
}

/// A place in streams.
#[derive(Debug)]
pub(crate) struct Event {
    gpu: Gpu,
    handle: api::EventHandle,
}

impl Event {
    pub(crate) fn new(gpu: &Gpu) -> Result<Self> {
        // SAFETY: the context is current.
        let handle = gpu.inside(|api| unsafe { api.create_event() })?;
        Ok(Self {
            gpu: gpu.clone(),
            handle,
        })
    }

    /// Records all that is enqueued in the stream so far.
    pub(crate) fn record(&self, stream: &Stream) -> CallResult<()> {
        // SAFETY: both handles live as long as their owners, and are of this context, which is current.
        self.gpu
            .inside(|api| unsafe { api.record(self.handle, stream.handle) })
    }

    /// Records all that is enqueued in the context so far.
    pub(crate) fn record_context(&self) -> CallResult<()> {
        let context = self.gpu.0.context;
        // SAFETY: the handle lives as long as its owner, and is of this context, which is current.
        self.gpu
            .inside(|api| unsafe { api.record_context(self.handle, context) })
    }

    /// Lets all that is enqueued in the context from now on wait for what was recorded.
    pub(crate) fn hold_context(&self) -> CallResult<()> {
        let context = self.gpu.0.context;
        // SAFETY: the handle lives as long as its owner, and is of this context, which is current.
        self.gpu
            .inside(|api| unsafe { api.wait_context(context, self.handle) })
    }

    /// Returns the progress of what was recorded.
    pub(crate) fn query(&self) -> CallResult<Progress> {
        // SAFETY: the handle lives as long as its owner, and is of this context, which is current.
        self.gpu.inside(|api| unsafe { api.query(self.handle) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let destroyed = self.gpu.inside(|api| {
            // SAFETY: the handle was made here, and is not used after.
            unsafe { api.destroy_event(self.handle) };
            Ok(())
        });
        note(destroyed);
    }
}

/// Logs a failure that no error can report.
pub(crate) fn note(outcome: CallResult<()>) {
    if let Err(fault) = outcome {
        tracing::warn!("{fault}");
    }
}

#[derive(Debug)]
struct GpuInner {
    api: Arc<dyn Api>,
    device: Device,
    context: api::Context,
    bus_id: String,
    driver: Version,
    nccl: Version,
    ordering: Ordering,
}

impl Drop for GpuInner {
    fn drop(&mut self) {
        // SAFETY: the share was taken in `open`, and nothing of the context is left: all that lives in it
        // holds a `Gpu`.
        unsafe { self.api.release(self.device) };
    }
}

/// The first driver that has events about a context, as the driver numbers its releases.
const CONTEXT_EVENTS: u32 = 12_050;

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
            return Err(Error::misuse(
                "memory of 0 bytes has no place: ask for at least 1",
            ));
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
        Err(Error::misuse(format!(
            "{bytes} bytes do not fit: this memory holds {}",
            self.bytes
        )))
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

    fn open(fake: Fake) -> Gpu {
        Gpu::open(&Library::with(fake.inner()).unwrap(), 1).unwrap()
    }

    #[test]
    fn a_gpu_tells_where_it_is_and_gives_its_context_back() {
        let fake = Fake::new().inner();
        let gpu = Gpu::open(&Library::with(fake.clone()).unwrap(), 1).unwrap();
        assert_eq!(gpu.bus_id(), "0000:01:00.0");
        assert_eq!(gpu.driver_version(), Version::new(12, 9, 0));
        let clone = gpu.clone();
        drop(gpu);
        assert_eq!(fake.calls(), ["retain 1"]);
        drop(clone);
        assert_eq!(fake.calls(), ["retain 1", "release 1"]);
    }

    #[test]
    fn a_gpu_that_is_not_there_is_refused() {
        let library = Library::with(Fake::new().inner()).unwrap();
        for ordinal in [2, usize::MAX] {
            let error = Gpu::open(&library, ordinal).unwrap_err();
            assert!(error.is_misuse());
            assert!(error.to_string().contains("this process sees 2"), "{error}");
        }
    }

    #[test]
    fn events_about_contexts_need_the_driver_and_its_functions() {
        assert_eq!(open(Fake::new()).ordering(), Ordering::Events);
        assert_eq!(
            open(Fake::new().with_driver(12_040)).ordering(),
            Ordering::Host
        );
        assert_eq!(
            open(Fake::new().with_driver(12_050)).ordering(),
            Ordering::Events
        );
        let lacking = Fake::new().without_context_events();
        assert_eq!(open(lacking).ordering(), Ordering::Host);
    }

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
