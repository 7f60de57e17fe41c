//! PMIx, by the library of the system's: `libpmix.so.2`, which is that of PMIx 2 to 6.

#![expect(unsafe_code, reason = "a library in C, which is there or not")]

use std::{
    ffi::{CStr, CString, c_char, c_int},
    mem::ManuallyDrop,
    ptr,
    sync::mpsc,
    thread,
    time::Instant,
};

use libloading::Library;

use crate::{
    error::{Error, Result},
    topology::Topology,
};

/// Gives what rank 0 says, its `own`, to every rank of the job of this namespace.
///
/// # Errors
///
/// A topology error if there is no library, no server, or another job than the variables tell; a rendezvous error
/// if the ranks do not come by the deadline, or the server refuses.
pub(super) fn share(
    namespace: &str,
    is_old: bool,
    topology: &Topology,
    own: Option<&str>,
    deadline: Instant,
) -> Result<String> {
    if is_old {
        return Err(unusable("its server speaks PMIx 1"));
    }
    let functions = Functions::load()?;
    let job = PmixJob {
        namespace: namespace.to_owned(),
        rank: topology.rank(),
        world_size: topology.world_size(),
        own: own.map(text).transpose()?,
    };
    // A fence has no timeout that all versions know: if a rank does not come, the thread is left behind.
    let (sender, told) = mpsc::channel();
    let asking = thread::Builder::new().name("pmix".to_owned());
    asking
        .spawn(move || sender.send(functions.share(&job)))
        .map_err(|error| Error::io("a thread for PMIx cannot be started", error))?;
    let left = deadline.saturating_duration_since(Instant::now());
    told.recv_timeout(left).unwrap_or_else(|_| {
        Err(Error::rendezvous(
            "not every rank has come to join the group, as PMIx tells",
        ))
    })
}

/// This process's knowledge of its job.
struct PmixJob {
    namespace: String,
    rank: usize,
    world_size: usize,
    own: Option<CString>,
}

/// The functions that are called, as `pmix.h` declares them.
#[derive(Clone, Copy)]
struct Functions {
    init: unsafe extern "C" fn(*mut PmixProcess, *const PmixInfo, usize) -> c_int,
    put: unsafe extern "C" fn(u8, *const c_char, *mut PmixValue) -> c_int,
    commit: unsafe extern "C" fn() -> c_int,
    fence: unsafe extern "C" fn(*const PmixProcess, usize, *const PmixInfo, usize) -> c_int,
    get: unsafe extern "C" fn(
        *const PmixProcess,
        *const c_char,
        *const PmixInfo,
        usize,
        *mut *mut PmixHead,
    ) -> c_int,
    finalize: unsafe extern "C" fn(*const PmixInfo, usize) -> c_int,
}

impl Functions {
    fn load() -> Result<Self> {
        // SAFETY: the library may be loaded at any time, by any thread. What its initializers do is beyond proof,
        // as with any library that a program is linked to.
        let library = unsafe { Library::new(LIBRARY) }.map_err(|error| {
            let error =
                std::error::Error::source(&error).map_or_else(|| error.to_string(), <_>::to_string);
            unusable(&format!("{LIBRARY} cannot be loaded ({error})"))
        })?;
        // Threads of its own may outlive everything: it is never unloaded.
        let library = ManuallyDrop::new(library);
        let lacks = |error: libloading::Error| unusable(&format!("{LIBRARY}: {error}"));
        // SAFETY: the names have these types in every version with this soname (pmix.h), and the library is never
        // unloaded.
        unsafe {
            Ok(Self {
                init: *library.get("PMIx_Init").map_err(lacks)?,
                put: *library.get("PMIx_Put").map_err(lacks)?,
                commit: *library.get("PMIx_Commit").map_err(lacks)?,
                fence: *library.get("PMIx_Fence").map_err(lacks)?,
                get: *library.get("PMIx_Get").map_err(lacks)?,
                finalize: *library.get("PMIx_Finalize").map_err(lacks)?,
            })
        }
    }

    fn share(self, job: &PmixJob) -> Result<String> {
        let mut process = PmixProcess::named("", 0);
        // SAFETY: `process` has the layout of `pmix_proc_t`, and is filled in; there are no infos.
        let code = unsafe { (self.init)(&raw mut process, ptr::null(), 0) };
        if code != 0 {
            return Err(unusable(&format!(
                "its server cannot be reached (PMIx_Init: {code})"
            )));
        }
        let told = self.share_initialized(&process, job);
        // SAFETY: it is initialized, and no other call is under way.
        let code = unsafe { (self.finalize)(ptr::null(), 0) };
        let told = told?;
        checked("PMIx_Finalize", code)?;
        Ok(told)
    }

    fn share_initialized(self, process: &PmixProcess, job: &PmixJob) -> Result<String> {
        // Without a server some versions make a job of this process alone.
        if process.name() != job.namespace || process.rank as usize != job.rank {
            return Err(unusable(&format!(
                "it takes this process for rank {} of the job {:?}, not for rank {} of {:?}",
                process.rank,
                process.name(),
                job.rank,
                job.namespace
            )));
        }
        let everyone = PmixProcess::named(&job.namespace, EVERYONE);
        let size = self.value(&everyone, c"pmix.job.size")?.unsigned();
        if size != Some(job.world_size) {
            return Err(Error::topology(format!(
                "the variables of this process tell of {} ranks, PMIx's server of {}",
                job.world_size,
                size.map_or_else(|| "none".to_owned(), |size| size.to_string())
            )));
        }
        if let Some(own) = &job.own {
            let text = own.as_ptr();
            let mut value = PmixValue::new(STRING, PmixData { text });
            // SAFETY: the key is a C string, `value` is a string value whose text lives until the call ends, which
            // copies both.
            let code = unsafe { (self.put)(GLOBAL, KEY.as_ptr(), &raw mut value) };
            checked("PMIx_Put", code)?;
        }
        // SAFETY: it has no arguments.
        checked("PMIx_Commit", unsafe { (self.commit)() })?;
        let collect = PmixInfo::truth(c"pmix.collect");
        // SAFETY: both pointers are to one item each, with the layouts of `pmix_proc_t` and `pmix_info_t`.
        let code = unsafe { (self.fence)(&raw const everyone, 1, &raw const collect, 1) };
        checked("PMIx_Fence", code)?;
        let first = PmixProcess::named(&job.namespace, 0);
        let value = self.value(&first, KEY)?;
        value.string().ok_or_else(|| {
            Error::protocol(format!(
                "PMIx gave a value of type {} for rank 0's address",
                value.kind
            ))
        })
    }

    /// The value of a key of a process, which the library keeps: only later versions export what frees it.
    fn value(self, process: &PmixProcess, key: &CStr) -> Result<&'static PmixHead> {
        let mut value = ptr::null_mut();
        // SAFETY: `process` has the layout of `pmix_proc_t`, the key is a C string, there are no infos, and `value`
        // has room for a pointer.
        let code = unsafe { (self.get)(process, key.as_ptr(), ptr::null(), 0, &raw mut value) };
        checked("PMIx_Get", code)?;
        // SAFETY: after a success it is a value that the library has allocated for the caller, who never frees it, or
        // null. Its head is the same in every version.
        let value: Option<&'static PmixHead> = unsafe { value.as_ref() };
        value.ok_or_else(|| Error::protocol("PMIx_Get gave no value"))
    }
}

/// `pmix_proc_t`.
#[repr(C)]
struct PmixProcess {
    namespace: [c_char; 256],
    rank: u32,
}

impl PmixProcess {
    fn named(namespace: &str, rank: u32) -> Self {
        let mut process = Self {
            namespace: [0; 256],
            rank,
        };
        // The last byte stays zero.
        for (to, from) in process.namespace[..255].iter_mut().zip(namespace.bytes()) {
            *to = from as c_char;
        }
        process
    }

    fn name(&self) -> String {
        let bytes = self.namespace.iter().map(|byte| *byte as u8);
        let bytes: Vec<u8> = bytes.take_while(|byte| *byte != 0).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// `pmix_value_t` of version 3 and later; that of version 2 has 24 bytes.
#[repr(C)]
struct PmixValue {
    head: PmixHead,
    rest: [u64; 2],
}

/// The beginning of a `pmix_value_t` of any version.
#[repr(C)]
struct PmixHead {
    kind: u16,
    data: PmixData,
}

/// The members of its union that are used.
#[repr(C)]
#[derive(Clone, Copy)]
union PmixData {
    truth: bool,
    number: u32,
    text: *const c_char,
    bits: u64,
}

impl PmixValue {
    fn new(kind: u16, data: PmixData) -> Self {
        Self {
            head: PmixHead { kind, data },
            rest: [0; 2],
        }
    }
}

impl PmixHead {
    fn unsigned(&self) -> Option<usize> {
        if self.kind != UINT32 {
            return None;
        }
        // SAFETY: the type says that a number was written, and any bits are one.
        Some(unsafe { self.data.number } as usize)
    }

    fn string(&self) -> Option<String> {
        if self.kind != STRING {
            return None;
        }
        // SAFETY: the type says that a pointer was written.
        let text = unsafe { self.data.text };
        if text.is_null() {
            return None;
        }
        // SAFETY: a string value points to a C string that lives as long as the value.
        let text = unsafe { CStr::from_ptr(text) };
        Some(text.to_string_lossy().into_owned())
    }
}

/// `pmix_info_t` of version 3 and later. That of version 2 is shorter: one of them is read right by all, an array is not.
#[repr(C)]
struct PmixInfo {
    key: [c_char; 512],
    flags: u32,
    value: PmixValue,
}

impl PmixInfo {
    fn truth(key: &CStr) -> Self {
        // No byte of the union is left as it is.
        let mut data = PmixData { bits: 0 };
        data.truth = true;
        let mut info = Self {
            key: [0; 512],
            flags: 0,
            value: PmixValue::new(BOOL, data),
        };
        for (to, from) in info.key[..511].iter_mut().zip(key.to_bytes()) {
            *to = *from as c_char;
        }
        info
    }
}

fn text(text: &str) -> Result<CString> {
    CString::new(text).map_err(|error| Error::protocol(error.to_string()))
}

fn checked(function: &str, code: c_int) -> Result<()> {
    match code {
        0 => Ok(()),
        _ => Err(Error::rendezvous(format!(
            "PMIx's server refused to let the ranks meet: {function} returned {code}"
        ))),
    }
}

fn unusable(why: &str) -> Error {
    Error::topology(format!(
        "the ranks cannot ask their launcher by PMIx where they meet: {why}; set MASTER_ADDR to the host of rank 0 \
         and MASTER_PORT to a free port of it (`mpirun -x MASTER_ADDR=… -x MASTER_PORT=…`), or install the PMIx \
         library of that launcher (Debian and Ubuntu: libpmix2), in a folder of LD_LIBRARY_PATH if need be"
    ))
}

const LIBRARY: &str = "libpmix.so.2";
/// The key of rank 0's line.
const KEY: &CStr = c"accel-store";
/// The rank that stands for the job.
const EVERYONE: u32 = 0xffff_fffe;
const BOOL: u16 = 1;
const STRING: u16 = 3;
const UINT32: u16 = 14;
/// The scope of what ranks of every host read.
const GLOBAL: u8 = 3;

// The layouts of `pmix_common.h`.
#[cfg(target_pointer_width = "64")]
const _: () = {
    use std::mem::{align_of, offset_of, size_of};
    assert!(size_of::<PmixProcess>() == 260 && align_of::<PmixProcess>() == 4);
    assert!(size_of::<PmixValue>() == 32 && offset_of!(PmixHead, data) == 8);
    assert!(size_of::<PmixInfo>() == 552 && offset_of!(PmixInfo, value) == 520);
};
