//! The libraries, and what they give without a GPU of one's own.

use std::fmt;
use std::sync::Arc;

use accelerator_host::sync::Mutex;
use serde::{Deserialize, Serialize};

use crate::api::{Api, Dynamic};
use crate::error::{Error, Kind, Result};

/// NVIDIA's driver and NCCL, loaded into this process for as long as it lives.
///
/// ```
/// use accelerator_nccl::Library;
///
/// match Library::load() {
///     Ok(library) => println!("NCCL {}, {} GPUs", library.version(), library.gpu_count()?),
///     Err(error) if error.is_absent() => println!("without GPUs: {error}"),
///     Err(error) => return Err(error),
/// }
/// # Ok::<(), accelerator_nccl::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Library {
    api: Arc<dyn Api>,
    version: Version,
}

impl Library {
    /// Loads NVIDIA's driver (`libcuda.so.1`) and NCCL (`libnccl.so.2`), once in a process, from where
    /// the system finds libraries, such as a folder in `LD_LIBRARY_PATH`.
    ///
    /// # Errors
    /// [`is_absent`](Error::is_absent) if there is no GPU or a library is missing or too old,
    /// [`is_cuda`](Error::is_cuda) if the driver does not start.
    pub fn load() -> Result<Self> {
        static LOADED: Mutex<Option<Library>> = Mutex::new(None);
        let mut loaded = LOADED.lock();
        if let Some(library) = &*loaded {
            return Ok(library.clone());
        }
        let library = Self::with(Arc::new(Dynamic::load()?))?;
        Ok(loaded.insert(library).clone())
    }

    /// The version of NCCL.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Returns the number of GPUs that this process sees, which `CUDA_VISIBLE_DEVICES` may restrict.
    ///
    /// # Errors
    /// [`is_cuda`](Error::is_cuda) if the driver does not say.
    pub fn gpu_count(&self) -> Result<usize> {
        Ok(self.api.gpu_count()?)
    }

    pub(crate) fn with(api: Arc<dyn Api>) -> Result<Self> {
        let version = Version::of_nccl(api.nccl_version()?);
        if version < OLDEST {
            let message =
                format!("NCCL {version} is too old: expected {OLDEST} or later; update it");
            return Err(Error::new(Kind::Absent, message));
        }
        Ok(Self { api, version })
    }

    pub(crate) fn api(&self) -> &Arc<dyn Api> {
        &self.api
    }
}

/// A version of NCCL or of CUDA.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct Version {
    major: u32,
    minor: u32,
    /// 0 for CUDA, whose versions have two numbers.
    patch: u32,
}

impl Version {
    /// A version by its numbers.
    pub(crate) const fn new(major: u32, minor: u32, patch: u32) -> Self {
        Self {
            major,
            minor,
            patch,
        }
    }

    /// The first number.
    pub fn major(self) -> u32 {
        self.major
    }

    /// The second number.
    pub fn minor(self) -> u32 {
        self.minor
    }

    /// Reads NCCL's number of a version: 2708 is 2.7.8, and since 2.9, 22703 is 2.27.3.
    fn of_nccl(code: u32) -> Self {
        match code {
            0..10_000 => Self::new(code / 1000, code / 100 % 10, code % 100),
            _ => Self::new(code / 10_000, code / 100 % 100, code % 100),
        }
    }

    /// Reads CUDA's number of a version: 12050 is 12.5.
    pub(crate) fn of_cuda(code: u32) -> Self {
        Self::new(code / 1000, code % 1000 / 10, 0)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            major,
            minor,
            patch,
        } = self;
        write!(formatter, "{major}.{minor}.{patch}")
    }
}

/// Communicators that do not block can be finalized and aborted, and have all fields that are set here.
const OLDEST: Version = Version::new(2, 18, 0);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::fake::Fake;

    #[test]
    fn versions_are_read_as_they_are_numbered() {
        assert_eq!(Version::of_nccl(2708), Version::new(2, 7, 8));
        assert_eq!(Version::of_nccl(21_805), Version::new(2, 18, 5));
        assert_eq!(Version::of_nccl(23_007), Version::new(2, 30, 7));
        assert_eq!(Version::of_cuda(12_050), Version::new(12, 5, 0));
        assert_eq!(Version::of_cuda(11_040), Version::new(11, 4, 0));
    }

    #[test]
    fn an_old_nccl_is_refused() {
        let error = Library::with(Fake::new().with_nccl(21_400).inner()).unwrap_err();
        assert!(error.is_absent());
        assert_eq!(
            error.to_string(),
            "NCCL 2.14.0 is too old: expected 2.18.0 or later; update it"
        );
        let library = Library::with(Fake::new().with_nccl(21_800).inner()).unwrap();
        assert_eq!(library.version(), Version::new(2, 18, 0));
    }
}
