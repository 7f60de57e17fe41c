//! What a program needs of the system it runs on, by its file.

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};

use accelerator_collective::TargetFeatures;
use object::Endianness;
use object::elf::{self, FileHeader64};
use object::read::elf::{FileHeader, ProgramHeader};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// An ELF file of this machine.
#[derive(Clone, Debug)]
pub(super) struct ElfFile {
    pub(super) path: PathBuf,
    /// Its processor, as images call it: `amd64`.
    pub(super) architecture: &'static str,
    /// The names of the shared libraries that it needs, its loader included. A static program needs none.
    pub(super) libraries: BTreeSet<String>,
    /// The oldest glibc that it runs with.
    pub(super) glibc: Option<GlibcVersion>,
    /// Features of the processor that it was compiled for, where it tells.
    pub(super) target_features: Vec<String>,
}

/// A version of glibc: `2.36`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct GlibcVersion(u32, u32, u32);

/// How versions begin in an ELF file.
const GLIBC: &str = "GLIBC_";

impl ElfFile {
    /// What the file needs; `None` where it is no ELF file, as scripts are.
    ///
    /// # Errors
    /// When it cannot be read, or is for a processor that is not known here.
    pub(super) fn read(path: &Path) -> Result<Option<Self>> {
        let contents = std::fs::read(path).map_err(|error| {
            Error::usage(format!("{} cannot be read", path.display())).with_source(error)
        })?;
        if !contents.starts_with(b"\x7fELF") {
            return Ok(None);
        }
        let file = Self::parse(path, &contents).map_err(|error| {
            Error::usage(format!(
                "{} is an ELF file that cannot be understood; only 64-bit ones can",
                path.display()
            ))
            .with_source(error)
        })?;
        match file.architecture {
            "" => Err(Error::usage(format!(
                "{} is for a processor that is not known here; take one for x86_64 or aarch64",
                path.display()
            ))),
            _ => Ok(Some(file)),
        }
    }

    fn parse(path: &Path, contents: &[u8]) -> object::Result<Self> {
        let header = FileHeader64::<Endianness>::parse(contents)?;
        let endian = header.endian()?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let mut libraries = BTreeSet::new();
        for segment in header.program_headers(endian, contents)? {
            if let Some(loader) = segment.interpreter(endian, contents)? {
                let loader = text(loader);
                libraries.extend(loader.rsplit('/').next().map(str::to_owned));
            }
        }
        let sections = header.sections(endian, contents)?;
        let dynamic = sections.dynamic_table(endian, contents)?;
        for entry in &dynamic {
            if entry.tag == elf::DT_NEEDED {
                libraries.insert(text(dynamic.string(entry)?));
            }
        }
        let mut glibc = None;
        if let Some((needs, link)) = sections.gnu_verneed(endian, contents)? {
            let strings = sections.strings(endian, contents, link)?;
            for need in needs {
                for version in need?.1 {
                    let name = text(version?.name(endian, strings)?);
                    glibc = glibc.max(name.strip_prefix(GLIBC).and_then(GlibcVersion::parse));
                }
            }
        }
        let features = TargetFeatures::of_program(contents);
        Ok(Self {
            path: path.to_owned(),
            architecture: match header.e_machine(endian) {
                elf::EM_X86_64 => "amd64",
                elf::EM_AARCH64 => "arm64",
                elf::EM_RISCV => "riscv64",
                _ => "",
            },
            libraries,
            glibc,
            target_features: features.map_or_else(Vec::new, |features| {
                features.names().into_iter().map(str::to_owned).collect()
            }),
        })
    }
}

impl GlibcVersion {
    /// Reads `2.36`; `PRIVATE` is none.
    fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split('.').map(|part| part.parse().ok());
        let (major, minor) = (parts.next()??, parts.next()??);
        Some(Self(major, minor, parts.next().flatten().unwrap_or(0)))
    }

    /// The highest version that a C library has, by the bytes of its file.
    pub(super) fn of_library(contents: &[u8]) -> Option<Self> {
        let is_version = |byte: &u8| byte.is_ascii_digit() || *byte == b'.';
        let begins = (0..contents.len()).filter(|&at| contents[at] == GLIBC.as_bytes()[0]);
        begins
            .filter_map(|at| {
                let version = contents[at..].strip_prefix(GLIBC.as_bytes())?;
                let end = version.iter().position(|byte| !is_version(byte))?;
                Self::parse(std::str::from_utf8(&version[..end]).ok()?)
            })
            .max()
    }
}

impl fmt::Display for GlibcVersion {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}.{}", self.0, self.1)?;
        match self.2 {
            0 => Ok(()),
            patch => write!(formatter, ".{patch}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_program_tells_what_it_needs() {
        let own = ElfFile::read(&std::env::current_exe().unwrap());
        let own = own.unwrap().unwrap();
        assert_eq!(own.architecture, super::super::architecture_here());
        if cfg!(target_env = "gnu") {
            assert!(own.libraries.contains("libc.so.6"), "{own:?}");
            assert!(
                own.libraries
                    .iter()
                    .any(|name| name.starts_with("ld-linux"))
            );
            assert!(own.glibc > GlibcVersion::parse("2.2.5"), "{own:?}");
        }
    }

    #[test]
    fn scripts_are_no_elf_files() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("script");
        std::fs::write(&path, "#!/bin/sh\n").unwrap();
        assert!(ElfFile::read(&path).unwrap().is_none());
        std::fs::write(&path, b"\x7fELF\x01").unwrap();
        assert!(ElfFile::read(&path).is_err());
        assert!(ElfFile::read(&folder.path().join("none")).is_err());
    }

    #[test]
    fn versions_are_ordered() {
        let version = |text| GlibcVersion::parse(text);
        assert!(version("2.4") < version("2.36") && version("2.2.5") < version("2.3"));
        assert_eq!(version("2.2.5").unwrap().to_string(), "2.2.5");
        assert_eq!(version("PRIVATE"), None);
        let library = b"\0GLIBC_2.2.5\0GLIBC_PRIVATE\0GLIBC_2.36\0GLIBC_2.9\0";
        assert_eq!(GlibcVersion::of_library(library), version("2.36"));
        assert_eq!(GlibcVersion::of_library(b"GLIBC_"), None);
    }
}
