//! The functions themselves, from libraries that are loaded at run time.
//!
//! They are declared by hand, a few dozen: NVIDIA's interfaces are stable, and a name that a library
//! lacks is an error then, never a panic. Results are taken as numbers, since later releases have
//! codes that no list here knows. This crate's README says why no bindings are used.

#![expect(unsafe_code, reason = "foreign functions")]

mod functions;

use std::ffi::{CStr, c_char, c_int};
use std::{fmt, ptr};

use super::{
    Api, CallError, CallResult, Comm, Context, Device, EventHandle, Foreign, Operation, Progress,
    StreamHandle,
};
use crate::error::{Error, Kind, Result};
use functions::{
    CUDA_FILES, Config, ContextEvents, Cuda, DISABLE_TIMING, IN_PROGRESS, NCCL_FILES, NO_DEVICE,
    NON_BLOCKING, NOT_FOUND, NOT_READY, Nccl, Pointer, RawUniqueId, SUCCESS, open,
};

/// CUDA's driver and NCCL, loaded. They are never unloaded: both have threads of their own.
pub(crate) struct Dynamic {
    cuda: Cuda,
    nccl: Nccl,
    context_events: Option<ContextEvents>,
}

impl Dynamic {
    /// Loads both libraries and starts the driver.
    pub(crate) fn load() -> Result<Self> {
        let driver = open(&CUDA_FILES)?;
        let cuda = Cuda::of(&driver)?;
        let context_events = ContextEvents::of(&driver).ok();
        let library = open(&NCCL_FILES)?;
        let nccl = Nccl::of(&library)?;
        let dynamic = Self {
            cuda,
            nccl,
            context_events,
        };
        // SAFETY: without conditions; 0 is the only value that is defined.
        match unsafe { (dynamic.cuda.init)(0) } {
            SUCCESS => {}
            code @ NO_DEVICE => {
                let message = format!(
                    "there is no NVIDIA GPU that this process may use ({}): see what `nvidia-smi -L` lists and \
                     what CUDA_VISIBLE_DEVICES says",
                    dynamic.cuda_text(code)
                );
                return Err(Error::new(Kind::Absent, message));
            }
            code => return Err(dynamic.cuda_fault("cuInit", code).into()),
        }
        Ok(dynamic)
    }

    fn cuda(&self, call: &'static str, code: c_int) -> CallResult<()> {
        match code {
            SUCCESS => Ok(()),
            code => Err(self.cuda_fault(call, code)),
        }
    }

    fn cuda_fault(&self, call: &'static str, code: c_int) -> CallError {
        CallError {
            of: Foreign::Cuda,
            call,
            text: self.cuda_text(code),
        }
    }

    fn cuda_text(&self, code: c_int) -> String {
        let mut name = ptr::null();
        let mut text = ptr::null();
        // SAFETY: the two places are ours; the driver leaves them null for a code that it does not know.
        unsafe {
            (self.cuda.error_name)(code, &mut name);
            (self.cuda.error_string)(code, &mut text);
        }
        // SAFETY: texts of the driver's live as long as it is loaded.
        let (name, text) = unsafe { (static_text(name), static_text(text)) };
        match (name, text) {
            (Some(name), Some(text)) => format!("{name}, {text}"),
            _ => format!("error {code}"),
        }
    }

    fn nccl(&self, call: &'static str, code: c_int) -> CallResult<Progress> {
        match code {
            SUCCESS => Ok(Progress::Done),
            IN_PROGRESS => Ok(Progress::UnderWay),
            code => {
                // SAFETY: any number may be asked for; the text is the library's, for good.
                let text = unsafe { static_text((self.nccl.error_string)(code)) };
                // SAFETY: the argument is not used. The text is a buffer of the library's, which another
                // error may overwrite meanwhile; it stays terminated.
                let last = unsafe { static_text((self.nccl.last_error)(ptr::null_mut())) };
                let mut text = text.unwrap_or_else(|| format!("error {code}"));
                if let Some(last) = last.filter(|last| !last.trim().is_empty()) {
                    text = format!("{text} ({})", last.trim());
                }
                Err(CallError {
                    of: Foreign::Nccl,
                    call,
                    text,
                })
            }
        }
    }
}

impl fmt::Debug for Dynamic {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Dynamic")
    }
}

// The conditions of each call are those of the trait, which its callers keep. Places for results are
// variables of this function's.
impl Api for Dynamic {
    fn driver_version(&self) -> CallResult<u32> {
        let mut version = 0;
        // SAFETY: see above the block.
        let code = unsafe { (self.cuda.driver_version)(&mut version) };
        self.cuda("cuDriverGetVersion", code)?;
        Ok(u32::try_from(version).unwrap_or(0))
    }

    fn has_context_events(&self) -> bool {
        self.context_events.is_some()
    }

    fn gpu_count(&self) -> CallResult<usize> {
        let mut count = 0;
        // SAFETY: see above the block.
        let code = unsafe { (self.cuda.device_count)(&mut count) };
        self.cuda("cuDeviceGetCount", code)?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    fn device(&self, ordinal: i32) -> CallResult<Device> {
        let mut device = 0;
        // SAFETY: see above the block.
        let code = unsafe { (self.cuda.device)(&mut device, ordinal) };
        self.cuda("cuDeviceGet", code)?;
        Ok(Device(device))
    }

    fn bus_id(&self, device: Device) -> CallResult<String> {
        let mut text: [c_char; 32] = [0; 32];
        // SAFETY: the length is that of the array.
        let code = unsafe { (self.cuda.bus_id)(text.as_mut_ptr(), 32, device.0) };
        self.cuda("cuDeviceGetPCIBusId", code)?;
        let bytes = text.iter().take_while(|byte| **byte != 0);
        Ok(bytes.map(|byte| char::from(*byte as u8)).collect())
    }

    fn retain(&self, device: Device) -> CallResult<Context> {
        let mut context = ptr::null_mut();
        // SAFETY: see above the block.
        let code = unsafe { (self.cuda.retain)(&mut context, device.0) };
        self.cuda("cuDevicePrimaryCtxRetain", code)?;
        Ok(Context(context as usize))
    }

    unsafe fn release(&self, device: Device) {
        // SAFETY: see above the block. A failure is that of a process which ends.
        let _ = unsafe { (self.cuda.release)(device.0) };
    }

    unsafe fn enter(&self, context: Context) -> CallResult<()> {
        // SAFETY: see above the block.
        let code = unsafe { (self.cuda.push)(context.0 as Pointer) };
        self.cuda("cuCtxPushCurrent", code)
    }

    unsafe fn leave(&self) {
        let mut context = ptr::null_mut();
        // SAFETY: see above the block.
        let _ = unsafe { (self.cuda.pop)(&mut context) };
    }

    unsafe fn synchronize(&self) -> CallResult<()> {
        // SAFETY: see above the block.
        let code = unsafe { (self.cuda.synchronize)() };
        self.cuda("cuCtxSynchronize", code)
    }

    unsafe fn create_stream(&self) -> CallResult<StreamHandle> {
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: see above the block.
        let code = unsafe { (self.cuda.priorities)(&mut least, &mut greatest) };
        self.cuda("cuCtxGetStreamPriorityRange", code)?;
        let mut stream = ptr::null_mut();
        // SAFETY: see above the block.
        let code = unsafe { (self.cuda.create_stream)(&mut stream, NON_BLOCKING, greatest) };
        self.cuda("cuStreamCreateWithPriority", code)?;
        Ok(StreamHandle(stream as usize))
    }

    unsafe fn destroy_stream(&self, stream: StreamHandle) {
        // SAFETY: see above the block. What is enqueued still runs.
        let _ = unsafe { (self.cuda.destroy_stream)(stream.0 as Pointer) };
    }

    unsafe fn create_event(&self) -> CallResult<EventHandle> {
        let mut event = ptr::null_mut();
        // SAFETY: see above the block.
        let code = unsafe { (self.cuda.create_event)(&mut event, DISABLE_TIMING) };
        self.cuda("cuEventCreate", code)?;
        Ok(EventHandle(event as usize))
    }

    unsafe fn destroy_event(&self, event: EventHandle) {
        // SAFETY: see above the block. What waits for it still does.
        let _ = unsafe { (self.cuda.destroy_event)(event.0 as Pointer) };
    }

    unsafe fn record(&self, event: EventHandle, stream: StreamHandle) -> CallResult<()> {
        // SAFETY: see above the block.
        let code = unsafe { (self.cuda.record)(event.0 as Pointer, stream.0 as Pointer) };
        self.cuda("cuEventRecord", code)
    }

    unsafe fn record_context(&self, event: EventHandle, context: Context) -> CallResult<()> {
        let Some(functions) = &self.context_events else {
            return Err(self.cuda_fault("cuCtxRecordEvent", NOT_FOUND));
        };
        // SAFETY: see above the block.
        let code = unsafe { (functions.record)(context.0 as Pointer, event.0 as Pointer) };
        self.cuda("cuCtxRecordEvent", code)
    }

    unsafe fn query(&self, event: EventHandle) -> CallResult<Progress> {
        // SAFETY: see above the block.
        match unsafe { (self.cuda.query)(event.0 as Pointer) } {
            NOT_READY => Ok(Progress::UnderWay),
            code => self.cuda("cuEventQuery", code).map(|()| Progress::Done),
        }
    }

    unsafe fn wait_stream(&self, stream: StreamHandle, event: EventHandle) -> CallResult<()> {
        // SAFETY: see above the block.
        let code = unsafe { (self.cuda.wait)(stream.0 as Pointer, event.0 as Pointer, 0) };
        self.cuda("cuStreamWaitEvent", code)
    }

    unsafe fn wait_context(&self, context: Context, event: EventHandle) -> CallResult<()> {
        let Some(functions) = &self.context_events else {
            return Err(self.cuda_fault("cuCtxWaitEvent", NOT_FOUND));
        };
        // SAFETY: see above the block.
        let code = unsafe { (functions.wait)(context.0 as Pointer, event.0 as Pointer) };
        self.cuda("cuCtxWaitEvent", code)
    }

    unsafe fn allocate(&self, bytes: usize) -> CallResult<u64> {
        let mut at = 0;
        // SAFETY: see above the block.
        let code = unsafe { (self.cuda.allocate)(&mut at, bytes) };
        self.cuda("cuMemAlloc", code)?;
        Ok(at)
    }

    unsafe fn free(&self, at: u64) {
        // SAFETY: see above the block.
        let _ = unsafe { (self.cuda.free)(at) };
    }

    unsafe fn write(&self, at: u64, bytes: &[u8]) -> CallResult<()> {
        // SAFETY: see above the block; the slice is read while the call lasts.
        let code = unsafe { (self.cuda.write)(at, bytes.as_ptr().cast(), bytes.len()) };
        self.cuda("cuMemcpyHtoD", code)
    }

    unsafe fn read(&self, at: u64, bytes: &mut [u8]) -> CallResult<()> {
        // SAFETY: see above the block; the slice is written while the call lasts.
        let code = unsafe { (self.cuda.read)(bytes.as_mut_ptr().cast(), at, bytes.len()) };
        self.cuda("cuMemcpyDtoH", code)
    }

    fn nccl_version(&self) -> CallResult<u32> {
        let mut version = 0;
        // SAFETY: see above the block.
        let code = unsafe { (self.nccl.version)(&mut version) };
        self.nccl("ncclGetVersion", code)?;
        Ok(u32::try_from(version).unwrap_or(0))
    }

    fn unique_id(&self) -> CallResult<[u8; 128]> {
        let mut id = RawUniqueId([0; 128]);
        // SAFETY: see above the block.
        let code = unsafe { (self.nccl.unique_id)(&mut id) };
        self.nccl("ncclGetUniqueId", code)?;
        Ok(id.0)
    }

    unsafe fn connect(&self, id: &[u8; 128], rank: i32, world_size: i32) -> CallResult<Comm> {
        let mut comm = ptr::null_mut();
        let mut config = Config::non_blocking();
        // SAFETY: see above the block; NCCL copies the configuration.
        let code =
            unsafe { (self.nccl.init)(&mut comm, world_size, RawUniqueId(*id), rank, &mut config) };
        match self.nccl("ncclCommInitRankConfig", code) {
            Ok(_) => Ok(Comm(comm as usize)),
            Err(fault) => {
                if !comm.is_null() {
                    // SAFETY: it was made by this very call, and is returned to nobody.
                    let _ = unsafe { (self.nccl.abort)(comm) };
                }
                Err(fault)
            }
        }
    }

    unsafe fn progress(&self, comm: Comm) -> CallResult<Progress> {
        let mut state = SUCCESS;
        // SAFETY: see above the block.
        let code = unsafe { (self.nccl.async_error)(comm.0 as Pointer, &mut state) };
        self.nccl("ncclCommGetAsyncError", code)?;
        self.nccl("an operation under way", state)
    }

    unsafe fn all_reduce(
        &self,
        comm: Comm,
        stream: StreamHandle,
        at: u64,
        elements: usize,
        operation: Operation,
    ) -> CallResult<Progress> {
        let buffer = at as Pointer;
        // SAFETY: see above the block.
        let code = unsafe {
            (self.nccl.all_reduce)(
                buffer,
                buffer,
                elements,
                operation.dtype_code,
                operation.op_code,
                comm.0 as Pointer,
                stream.0 as Pointer,
            )
        };
        self.nccl("ncclAllReduce", code)
    }

    unsafe fn finalize(&self, comm: Comm) -> CallResult<Progress> {
        // SAFETY: see above the block.
        let code = unsafe { (self.nccl.finalize)(comm.0 as Pointer) };
        self.nccl("ncclCommFinalize", code)
    }

    unsafe fn destroy(&self, comm: Comm) -> CallResult<()> {
        // SAFETY: see above the block.
        let code = unsafe { (self.nccl.destroy)(comm.0 as Pointer) };
        self.nccl("ncclCommDestroy", code).map(drop)
    }

    unsafe fn abort(&self, comm: Comm) -> CallResult<()> {
        // SAFETY: see above the block.
        let code = unsafe { (self.nccl.abort)(comm.0 as Pointer) };
        self.nccl("ncclCommAbort", code).map(drop)
    }
}

/// A text of a library's.
///
/// # Safety
/// The pointer is null, or points to bytes that end with a zero.
unsafe fn static_text(text: *const c_char) -> Option<String> {
    if text.is_null() {
        return None;
    }
    // SAFETY: by this function's condition.
    let text = unsafe { CStr::from_ptr(text) };
    Some(text.to_string_lossy().into_owned())
}
