//! The files of NVIDIA's libraries, and the functions that are called, as their headers declare them (cuda.h, nccl.h).

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::mem::ManuallyDrop;
use std::ptr;

use libloading::Library;

use crate::error::{Error, Kind, Result};

/// Functions of a library, by the names that it exports.
macro_rules! functions {
    ($(#[$doc:meta])* $table:ident { $($field:ident: $name:literal ($($argument:ty),*) $(-> $output:ty)?;)* }) => {
        $(#[$doc])*
        pub(super) struct $table { $(pub(super) $field: unsafe extern "C" fn($($argument),*) -> functions!(@ $($output)?),)* }

        impl $table {
            pub(super) fn of(library: &Library) -> Result<Self> {
                // SAFETY: the names have these types in NVIDIA's headers (cuda.h, nccl.h), and a library is
                // never unloaded.
                Ok(Self { $($field: unsafe { *library.get($name).map_err(|error| lacks($name, error))? },)* })
            }
        }
    };
    (@ $output:ty) => { $output };
    (@) => { c_int };
}

fn lacks(name: &str, error: libloading::Error) -> Error {
    let message = format!(
        "the library that was found has no function {name}: expected a driver for CUDA 11.4 or later, and NCCL \
         2.18 or later; update it"
    );
    Error::new(Kind::Absent, message).with_source(error)
}

pub(super) type Pointer = *mut c_void;

functions! {
    /// The driver's.
    Cuda {
        init: "cuInit" (c_uint);
        driver_version: "cuDriverGetVersion" (*mut c_int);
        error_name: "cuGetErrorName" (c_int, *mut *const c_char);
        error_string: "cuGetErrorString" (c_int, *mut *const c_char);
        device_count: "cuDeviceGetCount" (*mut c_int);
        device: "cuDeviceGet" (*mut c_int, c_int);
        bus_id: "cuDeviceGetPCIBusId" (*mut c_char, c_int, c_int);
        retain: "cuDevicePrimaryCtxRetain" (*mut Pointer, c_int);
        release: "cuDevicePrimaryCtxRelease_v2" (c_int);
        push: "cuCtxPushCurrent_v2" (Pointer);
        pop: "cuCtxPopCurrent_v2" (*mut Pointer);
        synchronize: "cuCtxSynchronize" ();
        priorities: "cuCtxGetStreamPriorityRange" (*mut c_int, *mut c_int);
        create_stream: "cuStreamCreateWithPriority" (*mut Pointer, c_uint, c_int);
        destroy_stream: "cuStreamDestroy_v2" (Pointer);
        wait: "cuStreamWaitEvent" (Pointer, Pointer, c_uint);
        create_event: "cuEventCreate" (*mut Pointer, c_uint);
        destroy_event: "cuEventDestroy_v2" (Pointer);
        record: "cuEventRecord" (Pointer, Pointer);
        query: "cuEventQuery" (Pointer);
        allocate: "cuMemAlloc_v2" (*mut u64, usize);
        free: "cuMemFree_v2" (u64);
        write: "cuMemcpyHtoD_v2" (u64, *const c_void, usize);
        read: "cuMemcpyDtoH_v2" (*mut c_void, u64, usize);
    }
}

functions! {
    /// The functions of drivers for CUDA 12.5 and later.
    ContextEvents {
        record: "cuCtxRecordEvent" (Pointer, Pointer);
        wait: "cuCtxWaitEvent" (Pointer, Pointer);
    }
}

functions! {
    /// NCCL's.
    Nccl {
        version: "ncclGetVersion" (*mut c_int);
        unique_id: "ncclGetUniqueId" (*mut RawUniqueId);
        error_string: "ncclGetErrorString" (c_int) -> *const c_char;
        last_error: "ncclGetLastError" (Pointer) -> *const c_char;
        init: "ncclCommInitRankConfig" (*mut Pointer, c_int, RawUniqueId, c_int, *mut Config);
        async_error: "ncclCommGetAsyncError" (Pointer, *mut c_int);
        all_reduce: "ncclAllReduce" (*const c_void, Pointer, usize, c_int, c_int, Pointer, Pointer);
        finalize: "ncclCommFinalize" (Pointer);
        destroy: "ncclCommDestroy" (Pointer);
        abort: "ncclCommAbort" (Pointer);
    }
}

/// `ncclUniqueId`.
#[repr(C)]
pub(super) struct RawUniqueId(pub(super) [u8; 128]);

/// `ncclConfig_t` of NCCL 2.18. Later releases have more fields and fill them in themselves, by the
/// size and version that are given.
#[repr(C)]
pub(super) struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

impl Config {
    pub(super) fn non_blocking() -> Self {
        Self {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: 21_800,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: ptr::null(),
            split_share: UNDEFINED,
        }
    }
}

/// The success code of both libraries.
pub(super) const SUCCESS: c_int = 0;
/// `ncclInProgress`.
pub(super) const IN_PROGRESS: c_int = 7;
/// `NCCL_CONFIG_UNDEF_INT`.
const UNDEFINED: c_int = c_int::MIN;
/// `CUDA_ERROR_NO_DEVICE`.
pub(super) const NO_DEVICE: c_int = 100;
/// `CUDA_ERROR_NOT_FOUND`.
pub(super) const NOT_FOUND: c_int = 500;
/// `CUDA_ERROR_NOT_READY`.
pub(super) const NOT_READY: c_int = 600;
/// `CU_STREAM_NON_BLOCKING`.
pub(super) const NON_BLOCKING: c_uint = 1;
/// `CU_EVENT_DISABLE_TIMING`.
pub(super) const DISABLE_TIMING: c_uint = 2;

/// A library, and the error message if it is missing.
pub(super) struct Files {
    what: &'static str,
    names: &'static [&'static str],
    remedy: &'static str,
}

pub(super) const CUDA_FILES: Files = Files {
    what: "NVIDIA's driver",
    names: &["libcuda.so.1", "libcuda.so"],
    remedy: "install the driver, or start the container with the host's (`--gpus all`)",
};

pub(super) const NCCL_FILES: Files = Files {
    what: "NCCL",
    names: &["libnccl.so.2", "libnccl.so"],
    remedy: "install it (Debian and Ubuntu: libnccl2 of NVIDIA's repository; pip: nvidia-nccl-cu12 or -cu13, \
             whose folder nvidia/nccl/lib then goes to LD_LIBRARY_PATH)",
};

/// Loads the first of the files that is there.
pub(super) fn open(files: &Files) -> Result<ManuallyDrop<Library>> {
    let mut reasons = Vec::new();
    for &name in files.names {
        // SAFETY: NVIDIA's libraries may be loaded at any time, by any thread. What their initializers
        // do is beyond proof, as with any library that a program is linked to.
        match unsafe { Library::new(name) } {
            Ok(library) => return Ok(ManuallyDrop::new(library)),
            // The text of the system's, if there is one.
            Err(error) => reasons.push(
                std::error::Error::source(&error).map_or_else(|| error.to_string(), <_>::to_string),
            ),
        }
    }
    let Files {
        what,
        names,
        remedy,
    } = files;
    let message = format!(
        "{what} is not there: no {} could be loaded; {remedy}",
        names.join(" or ")
    );
    Err(Error::new(Kind::Absent, message).with_source(reasons.join("; ")))
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use cudarc::driver::sys as cuda;
    use cudarc::nccl::sys as nccl;

    use super::*;

    #[test]
    fn codes_are_those_of_the_headers() {
        assert_eq!(SUCCESS, nccl::ncclResult_t::ncclSuccess as c_int);
        assert_eq!(IN_PROGRESS, nccl::ncclResult_t::ncclInProgress as c_int);
        use cuda::CUresult as Code;
        assert_eq!(SUCCESS, Code::CUDA_SUCCESS as c_int);
        assert_eq!(NO_DEVICE, Code::CUDA_ERROR_NO_DEVICE as c_int);
        assert_eq!(NOT_FOUND, Code::CUDA_ERROR_NOT_FOUND as c_int);
        assert_eq!(NOT_READY, Code::CUDA_ERROR_NOT_READY as c_int);
        assert_eq!(
            NON_BLOCKING,
            cuda::CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint
        );
        assert_eq!(
            DISABLE_TIMING,
            cuda::CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint
        );
    }

    #[test]
    fn layouts_are_those_of_the_headers() {
        assert_eq!(size_of::<RawUniqueId>(), size_of::<nccl::ncclUniqueId>());
        assert_eq!(align_of::<RawUniqueId>(), align_of::<nccl::ncclUniqueId>());
        assert_eq!(size_of::<cuda::CUdeviceptr>(), size_of::<u64>());
        assert_eq!(size_of::<cuda::CUdevice>(), size_of::<c_int>());
        macro_rules! same {
            ($($ours:ident, $theirs:ident;)*) => {
                [$((offset_of!(Config, $ours), offset_of!(nccl::ncclConfig_t, $theirs)),)*]
            };
        }
        let offsets = same! {
            size, size;
            magic, magic;
            version, version;
            blocking, blocking;
            cga_cluster_size, cgaClusterSize;
            min_ctas, minCTAs;
            max_ctas, maxCTAs;
            net_name, netName;
            split_share, splitShare;
        };
        for (ours, theirs) in offsets {
            assert_eq!(ours, theirs);
        }
    }

    #[test]
    fn a_function_that_is_not_there_is_an_error() {
        // The C library is a library that lacks all of them.
        let name = if cfg!(target_os = "linux") {
            "libc.so.6"
        } else {
            return;
        };
        // SAFETY: it is loaded already.
        let library = unsafe { Library::new(name) }.unwrap();
        let error = Nccl::of(&library).err().unwrap();
        assert!(error.is_absent());
        assert!(error.to_string().contains("ncclGetVersion"), "{error}");
    }

    #[test]
    fn a_library_that_is_not_there_is_named_with_a_remedy() {
        let files = Files {
            what: "the library",
            names: &["libaccelerator-has-no-such.so.1"],
            remedy: "install it",
        };
        let error = open(&files).unwrap_err();
        assert!(error.is_absent());
        assert_eq!(
            error.to_string(),
            "the library is not there: no libaccelerator-has-no-such.so.1 could be loaded; install it"
        );
        let source = std::error::Error::source(&error).unwrap().to_string();
        assert!(
            source.contains("libaccelerator-has-no-such.so.1"),
            "{source}"
        );
    }
}
