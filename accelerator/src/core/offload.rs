//! Tensors and buffers in memory-mapped files, which the kernel writes to disk when it runs short of RAM.

#![expect(
    unsafe_code,
    reason = "Burn accepts memory from other allocators only through unsafe calls"
)]

use core::cell::RefCell;
use core::fmt::Display;
use core::mem::MaybeUninit;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use accelerator_collective::{Buffer, DType, ProcessGroup};
use accelerator_host::OFFLOAD_FOLDER;
use accelerator_host::file_memory::{FileMemory, is_in_memory};
use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{AllocationProperty, Bool, Bytes, Device, Int, Tensor, TensorData};
use burn_std::{AccessError, AccessPolicy, AllocationController};

use super::dyn_module::BoxedModule;
use super::error::{self, Error, Result};

/// The size in bytes from which a tensor is moved to a file. Smaller ones are not worth the pages and the mapping.
const WORTH_A_FILE: usize = 16 << 10;

/// The alignment of Burn's tensor memory. That of a mapping is greater.
const ALIGNMENT: usize = 16;

/// The offload folder, in whose files a rank keeps tensors and buffers.
#[derive(Clone, Debug)]
pub(crate) struct Offload(Arc<OffloadFolder>);

impl PartialEq for Offload {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Offload {}

#[derive(Debug)]
struct OffloadFolder {
    path: PathBuf,
    /// The size of the files of live tensors.
    bytes: AtomicUsize,
    has_warned: AtomicBool,
}

/// Creates the folder if it does not exist. Fails if no file can be created in it, or if its file system is in memory.
pub(crate) fn check_folder(path: &Path) -> Result<()> {
    let checked = std::fs::create_dir_all(path)
        .and_then(|()| FileMemory::new(path, 1))
        .and_then(|_| is_in_memory(path));
    let refused = |cause: &str| {
        let (path, name) = (path.display(), OFFLOAD_FOLDER.name);
        format!(
            "cannot offload to `{path}`, set by `offload_folder` or {name}: {cause}; choose a writable folder on a local disk"
        )
    };
    match checked {
        Ok(false) => Ok(()),
        Ok(true) => Err(Error::config(refused("its file system is in memory"))),
        Err(error) => Err(Error::config(refused(&format!(
            "no file can be created there: {error}"
        )))
        .with_source(error)),
    }
}

impl Offload {
    pub(crate) fn new(path: PathBuf) -> Self {
        Self(Arc::new(OffloadFolder {
            path,
            bytes: AtomicUsize::new(0),
            has_warned: AtomicBool::new(false),
        }))
    }

    /// Returns the size of the files of live tensors, in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.0.bytes.load(Ordering::Relaxed)
    }

    /// Moves values to a file. Small values stay in memory. If the disk is full, all do, and the first failure logs a
    /// warning.
    pub(crate) fn moved(&self, data: TensorData) -> TensorData {
        let bytes = data.bytes();
        let is_in_file = bytes.property() == AllocationProperty::File;
        // A view keeps its whole allocation alive.
        let is_view = bytes.view(0, bytes.len()).is_ok();
        if is_in_file && !is_view {
            return data;
        }
        let moved = match self.memory(bytes.len()) {
            Some(mut memory) => {
                memory.as_mut().copy_from_slice(bytes);
                memory.into_bytes()
            }
            None if is_in_file => Bytes::from_bytes_vec(bytes.to_vec()),
            None => return data,
        };
        TensorData::from_bytes(moved, data.shape().clone(), data.dtype())
    }

    /// Creates a buffer of zeros in a file, or one of the group's own buffers if the disk is full.
    pub(crate) fn buffer(&self, group: &ProcessGroup, dtype: DType, length: usize) -> Buffer {
        match self.file(length.saturating_mul(dtype.size())) {
            Some(file) => ProcessGroup::buffer_of_file(dtype, file),
            None => group.buffer(dtype, length),
        }
    }

    /// Lets [`in_file`], [`record_in_file`] and [`Scratch`] on this thread use files of this folder, or memory if there is
    /// none, until the guard is dropped.
    pub(crate) fn enter(offload: Option<&Self>) -> impl Drop + use<> {
        struct Before(Option<Offload>);
        impl Drop for Before {
            fn drop(&mut self) {
                CURRENT.set(self.0.take());
            }
        }
        Before(CURRENT.replace(offload.cloned()))
    }

    /// Initializes the parameters of a model one at a time, and moves each to a file.
    pub(crate) fn drawn(&self, model: BoxedModule) -> BoxedModule {
        struct Mover<'a>(&'a Offload);
        impl ModuleMapper for Mover<'_> {
            fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
                let (id, value, mapper) = param.consume();
                let (device, dtype) = (value.device(), value.dtype());
                let is_trained = value.is_require_grad();
                let data = self.0.moved(value.into_data());
                let value = Tensor::from_data(data, (&device, dtype));
                Param::from_mapped_value(id, value.set_require_grad(is_trained), mapper)
            }

            fn map_int<const D: usize>(
                &mut self,
                param: Param<Tensor<D, Int>>,
            ) -> Param<Tensor<D, Int>> {
                drop(param.base());
                param
            }

            fn map_bool<const D: usize>(
                &mut self,
                param: Param<Tensor<D, Bool>>,
            ) -> Param<Tensor<D, Bool>> {
                drop(param.base());
                param
            }
        }
        model.map(&mut Mover(self))
    }

    /// Creates zeroed memory in a file. Returns `None` if `length` is not worth a file, or if the disk is full.
    fn memory(&self, length: usize) -> Option<TensorMemory> {
        self.file(length).map(|file| self.counted(file))
    }

    fn file(&self, length: usize) -> Option<FileMemory> {
        if length < WORTH_A_FILE {
            return None;
        }
        let file = FileMemory::new(&self.0.path, length);
        file.map_err(|error| self.warn(&error)).ok()
    }

    fn counted(&self, file: FileMemory) -> TensorMemory {
        let length = file.bytes().len();
        self.0.bytes.fetch_add(length, Ordering::Relaxed);
        TensorMemory {
            file,
            folder: Some(self.0.clone()),
        }
    }

    fn warn(&self, error: &dyn Display) {
        if !self.0.has_warned.swap(true, Ordering::Relaxed) {
            let path = self.0.path.display();
            error::warn(&format!(
                "no file can be created in the offload folder `{path}`: {error}; tensors stay in memory instead: free disk space, \
                 or set `offload_folder` to another folder"
            ));
        }
    }
}

/// Moves values to a file after [`Offload::enter`]; otherwise returns them unchanged.
pub(crate) fn in_file(data: TensorData) -> TensorData {
    CURRENT.with_borrow(|offload| match offload {
        Some(offload) => offload.moved(data),
        None => data,
    })
}

/// Returns the device of tensors in files after [`Offload::enter`].
pub(crate) fn device() -> Option<Device> {
    #[cfg(feature = "flex")]
    return CURRENT.with_borrow(|offload| offload.as_ref().map(|_| Device::flex()));
    #[cfg(not(feature = "flex"))]
    None
}

/// Calls `save` with the path of a temporary file, and maps the record that it writes. Returns `None` without
/// [`Offload::enter`], and if there cannot be such a file.
pub(crate) fn record_in_file<E: Display>(
    save: impl FnOnce(&Path) -> core::result::Result<(), E>,
) -> Option<Bytes> {
    let offload = CURRENT.with_borrow(Clone::clone)?;
    // The folder is private, so nobody else can open the file.
    let folder = tempfile::tempdir_in(&offload.0.path).map_err(|error| offload.warn(&error));
    let path = folder.as_ref().ok()?.path().join("record.bpk");
    save(&path).map_err(|error| offload.warn(&error)).ok()?;
    let file = FileMemory::take(&path).map_err(|error| offload.warn(&error));
    Some(offload.counted(file.ok()?).into_bytes())
}

/// A buffer to fill with bytes: in a file after [`Offload::enter`], otherwise in memory.
pub(crate) enum Scratch {
    File(TensorMemory),
    Memory(Vec<u8>),
}

impl Scratch {
    /// Creates zeros.
    pub(crate) fn zeroed(length: usize) -> Self {
        memory(length).map_or_else(|| Self::Memory(vec![0; length]), Self::File)
    }

    /// Creates zeros, or fails if the memory does not suffice.
    pub(crate) fn try_zeroed(length: usize) -> io::Result<Self> {
        if let Some(memory) = memory(length) {
            return Ok(Self::File(memory));
        }
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(length)?;
        bytes.resize(length, 0);
        Ok(Self::Memory(bytes))
    }

    pub(crate) fn of(bytes: Vec<u8>) -> Self {
        match memory(bytes.len()) {
            Some(mut memory) => {
                memory.as_mut().copy_from_slice(&bytes);
                Self::File(memory)
            }
            None => Self::Memory(bytes),
        }
    }

    pub(crate) fn into_bytes(self) -> Bytes {
        match self {
            Self::File(memory) => memory.into_bytes(),
            Self::Memory(bytes) => Bytes::from_bytes_vec(bytes),
        }
    }
}

impl AsMut<[u8]> for Scratch {
    fn as_mut(&mut self) -> &mut [u8] {
        match self {
            Self::File(memory) => memory.as_mut(),
            Self::Memory(bytes) => bytes,
        }
    }
}

fn memory(length: usize) -> Option<TensorMemory> {
    CURRENT.with_borrow(|offload| offload.as_ref()?.memory(length))
}

thread_local! {
    /// The folder for tensors that an optimizer creates. Burn calls optimizers through interfaces that cannot pass it.
    static CURRENT: RefCell<Option<Offload>> = const { RefCell::new(None) };
}

/// Memory in a file, for a tensor or bytes.
pub(crate) struct TensorMemory {
    file: FileMemory,
    /// `None` for memory that is not offloaded.
    folder: Option<Arc<OffloadFolder>>,
}

/// Returns memory that other processes have mapped as well, for a tensor.
#[cfg(target_os = "linux")]
pub(crate) fn shared(file: FileMemory) -> Bytes {
    TensorMemory { file, folder: None }.into_bytes()
}

impl TensorMemory {
    fn into_bytes(self) -> Bytes {
        let length = self.file.bytes().len();
        // SAFETY: the file has this many bytes, all of which are initialized.
        unsafe { Bytes::from_controller(Box::new(self), length) }
    }
}

impl AsMut<[u8]> for TensorMemory {
    fn as_mut(&mut self) -> &mut [u8] {
        self.file.bytes_mut()
    }
}

impl AllocationController for TensorMemory {
    fn alloc_align(&self) -> usize {
        ALIGNMENT
    }

    fn property(&self) -> AllocationProperty {
        AllocationProperty::File
    }

    unsafe fn memory_mut(
        &mut self,
        _policy: AccessPolicy,
    ) -> core::result::Result<&mut [MaybeUninit<u8>], AccessError> {
        let bytes = self.file.bytes_mut();
        let (start, length) = (bytes.as_mut_ptr().cast(), bytes.len());
        // SAFETY: the slice borrows the bytes mutably, and the caller writes only initialized bytes.
        Ok(unsafe { core::slice::from_raw_parts_mut(start, length) })
    }

    fn memory(
        &self,
        _policy: AccessPolicy,
    ) -> core::result::Result<&[MaybeUninit<u8>], AccessError> {
        let bytes = self.file.bytes();
        // SAFETY: initialized bytes are valid as `MaybeUninit<u8>`.
        Ok(unsafe { core::slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len()) })
    }
}

impl Drop for TensorMemory {
    fn drop(&mut self) {
        if let Some(folder) = &self.folder {
            let length = self.file.bytes().len();
            folder.bytes.fetch_sub(length, Ordering::Relaxed);
        }
    }
}
