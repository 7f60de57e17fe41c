//! What the layers of a base have that programs need: the C library and other shared libraries.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, BufReader, Read, Seek, Write};
use std::path::PathBuf;

use flate2::read::MultiGzDecoder;
use oci_client::manifest::OciDescriptor;
use serde::{Deserialize, Serialize};

use super::base::Base;
use super::elf::{ElfFile, GlibcVersion};
use super::registry::Registries;
use crate::error::{Error, Result};

/// What a layer has.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct LayerContents {
    /// The names of shared libraries.
    libraries: BTreeSet<String>,
    /// That of its C library.
    glibc: Option<GlibcVersion>,
}

/// Checks that a base has the C library and the shared libraries that programs need, beside those that the layer on it
/// `has`. Layers are looked at from the lowest on, until all is found. Gives a sentence where a layer cannot be read.
///
/// # Errors
/// When the base lacks something, or a layer of it cannot be pulled.
pub(super) fn check(
    registries: &Registries,
    base: &Base,
    programs: &[ElfFile],
    has: &BTreeSet<String>,
) -> Result<Option<String>> {
    let mut found = LayerContents {
        libraries: has.clone(),
        glibc: None,
    };
    let mut unread = None;
    for layer in &base.layers {
        if lacks(base, programs, &found).is_none() {
            return Ok(None);
        }
        match LayerContents::of(registries, base, layer)? {
            Some(contents) => {
                found.libraries.extend(contents.libraries);
                // That of a layer above another takes its place.
                found.glibc = contents.glibc.or(found.glibc);
            }
            None => unread = Some(&layer.digest),
        }
    }
    match (lacks(base, programs, &found), unread) {
        (None, _) => Ok(None),
        (Some(_), Some(layer)) => Ok(Some(format!(
            "the layer {layer} of the base {} is not compressed by gzip, so it is not known whether the base has the \
             libraries that the program needs",
            base.name
        ))),
        (Some(error), None) => Err(error),
    }
}

fn lacks(base: &Base, programs: &[ElfFile], found: &LayerContents) -> Option<Error> {
    programs
        .iter()
        .find_map(|program| program.lacks(base, found))
}

impl ElfFile {
    fn lacks(&self, base: &Base, found: &LayerContents) -> Option<Error> {
        let (base, program) = (&base.name, self.path.display());
        let missing: Vec<_> = self
            .libraries
            .iter()
            .filter(|name| !found.libraries.contains(*name) && !is_of_driver(name))
            .map(String::as_str)
            .collect();
        let is_libc = |name: &&str| *name == LIBC || name.starts_with("ld-");
        if missing.iter().any(is_libc) {
            let musl = found
                .libraries
                .iter()
                .any(|name| name.starts_with("ld-musl"));
            let other = if musl { " but musl's" } else { "" };
            return Some(Error::usage(format!(
                "the base {base} has no C library{other}, and {program} needs {}; take a base with glibc, such as \
                 debian:stable-slim, or link the program statically (--target x86_64-unknown-linux-musl)",
                missing.join(", ")
            )));
        }
        if !missing.is_empty() {
            return Some(Error::usage(format!(
                "the base {base} lacks {}, which {program} needs; take a base that has it, or put it in with --include",
                missing.join(", ")
            )));
        }
        let needed = self.glibc?;
        match found.glibc {
            Some(there) if there >= needed => None,
            Some(there) => Some(Error::usage(format!(
                "the base {base} has glibc {there}, and {program} needs {needed}; take a newer base, build the program \
                 on an older system, or link it statically (--target x86_64-unknown-linux-musl)"
            ))),
            None => Some(Error::usage(format!(
                "which glibc the base {base} has cannot be found in it, and {program} needs {needed}; take a base whose \
                 {LIBC} is a file of a layer"
            ))),
        }
    }
}

impl LayerContents {
    /// What a layer has, as it was found before, or by reading it; `None` where it is compressed in an unknown way.
    fn of(registries: &Registries, base: &Base, layer: &OciDescriptor) -> Result<Option<Self>> {
        let cache = cache_file(&layer.digest);
        let known = cache.as_ref().and_then(|path| fs::read(path).ok());
        if let Some(known) = known.and_then(|known| serde_json::from_slice(&known).ok()) {
            return Ok(Some(known));
        }
        let file = base.pull_file(registries, layer)?;
        let contents = Self::read(file).map_err(|error| {
            Error::usage(format!(
                "the layer {} of the base {} cannot be read",
                layer.digest, base.name
            ))
            .with_source(error)
        })?;
        if let (Some(contents), Some(path)) = (&contents, cache) {
            // It is found again without it.
            let _ = contents.keep(&path);
        }
        Ok(contents)
    }

    fn read(mut layer: File) -> io::Result<Option<Self>> {
        let mut magic = [0; 4];
        let read = layer.read(&mut magic)?;
        layer.rewind()?;
        let layer = BufReader::new(layer);
        match magic {
            [0x1f, 0x8b, ..] => Self::read_archive(MultiGzDecoder::new(layer)).map(Some),
            // Zstandard.
            [0x28, 0xb5, 0x2f, 0xfd] => Ok(None),
            _ if read == 0 => Ok(Some(Self::default())),
            _ => Self::read_archive(layer).map(Some),
        }
    }

    fn read_archive(archive: impl Read) -> io::Result<Self> {
        let mut contents = Self::default();
        for entry in tar::Archive::new(archive).entries()? {
            let mut entry = entry?;
            let path = entry.path()?;
            let name = path
                .file_name()
                .map(|name| name.to_string_lossy().into_owned());
            let Some(name) = name.filter(|name| name.contains(".so")) else {
                continue;
            };
            // Before 2.34, it was a link to a file with its version.
            let is_libc = name == LIBC || (name.starts_with("libc-2") && name.ends_with(".so"));
            if is_libc && entry.header().entry_type().is_file() {
                let mut library = Vec::new();
                entry.read_to_end(&mut library)?;
                contents.glibc = contents.glibc.max(GlibcVersion::of_library(&library));
            }
            contents.libraries.insert(name);
        }
        Ok(contents)
    }

    fn keep(&self, path: &std::path::Path) -> io::Result<()> {
        let folder = path.parent().unwrap_or(path);
        fs::create_dir_all(folder)?;
        let mut file = tempfile::NamedTempFile::new_in(folder)?;
        file.write_all(&serde_json::to_vec(self)?)?;
        file.persist(path)?;
        Ok(())
    }
}

const LIBC: &str = "libc.so.6";

/// Whether a library comes with a GPU's driver: the runtime of containers brings it from the host.
fn is_of_driver(name: &str) -> bool {
    name.starts_with("libcuda.so") || name.starts_with("libnvidia-")
}

/// Where the contents of a layer are kept; nowhere if this user has no folder for it.
fn cache_file(digest: &str) -> Option<PathBuf> {
    let digits = digest.strip_prefix("sha256:")?;
    if !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.filter(|folder| folder.is_absolute());
    let cache = cache.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")))?;
    Some(
        cache
            .join("accel-jobs/layers")
            .join(digits)
            .with_extension("json"),
    )
}
