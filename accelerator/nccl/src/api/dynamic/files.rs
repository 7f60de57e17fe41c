//! The files of the libraries.

use std::mem::ManuallyDrop;

use libloading::Library;

use crate::error::{Error, Kind, Result};

/// A library, and what is said if it is not there.
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
    use super::*;

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
