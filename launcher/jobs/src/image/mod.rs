//! A program as a container image: one layer on a base, built and pushed without Docker.
//!
//! The layer has `accel-launch` at [`LAUNCHER_PATH`], and the program and the included files in [`APP_FOLDER`]. The same
//! files on the same base give the same digest on every machine and at every time, so a registry stores them once.

mod base;
mod layer;
mod registry;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use accelerator_host::cli::{Error, Result};
use object::Endianness;
use object::elf::{self, FileHeader64};
use object::read::elf::{FileHeader, ProgramHeader};
use oci_client::manifest::{
    IMAGE_CONFIG_MEDIA_TYPE, IMAGE_LAYER_GZIP_MEDIA_TYPE, OCI_IMAGE_MEDIA_TYPE, OciDescriptor,
    OciImageManifest,
};
use serde::Serialize;
use serde_json::{Map, Value, json};

use base::{ArchiveWriter, Base, SCRATCH};
use layer::{Layer, LayerFiles, digest, file_name};
pub(crate) use registry::Registries;
use registry::{Access, size};

/// The path of the launcher in the image.
pub(crate) const LAUNCHER_PATH: &str = "/usr/local/bin/accel-launch";

/// The folder of the image that has the program and the included files.
const APP_FOLDER: &str = "/app";

/// The parts of an image.
#[derive(Clone, Debug)]
pub(crate) struct ImageBuild {
    /// The program, a file of this machine.
    pub(crate) program: PathBuf,
    /// `accel-launch`, a file of this machine.
    pub(crate) launcher: PathBuf,
    /// Files and folders of this machine, each with its path in the image, below [`APP_FOLDER`].
    pub(crate) includes: Vec<(PathBuf, String)>,
    /// The image that the layer is put on: a reference, `oci-archive:FILE`, or `scratch`.
    pub(crate) base: String,
}

/// An image that was built, but neither pushed nor saved yet.
#[derive(Debug)]
pub(crate) struct BuiltImage {
    base: Base,
    layer: Layer,
    config: Vec<u8>,
    config_digest: String,
    manifest: Vec<u8>,
    digest: String,
}

/// An image in a registry.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct PushedImage {
    /// The reference that was asked for: `registry.example/team/mnist:1`.
    pub(crate) reference: String,
    /// The reference that names this very image forever: `registry.example/team/mnist@sha256:…`.
    pub(crate) reference_by_digest: String,
    /// The number of bytes of the layer that were sent: 0 if the registry had it.
    pub(crate) sent_bytes: u64,
}

/// The creation time of every image, so that the same files give the same image.
const CREATED: &str = "1970-01-01T00:00:00Z";

const PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

impl ImageBuild {
    /// Returns the path of the program in the image: `/app/NAME`.
    ///
    /// # Errors
    /// When the path has no name.
    pub(crate) fn program_path(&self) -> Result<String> {
        Ok(format!("{APP_FOLDER}/{}", file_name(&self.program)?))
    }

    /// Builds the layer, and checks that the programs in it are for the base's processor. Pulls the description of the
    /// base, and none of its layers.
    ///
    /// # Errors
    /// When a file or the base is missing, or the programs cannot run on the base.
    pub(crate) fn build(&self, registries: &Registries) -> Result<BuiltImage> {
        let program = self.program_path()?;
        let mut files = LayerFiles::default();
        files.add_program(&self.launcher, LAUNCHER_PATH)?;
        files.add_program(&self.program, &program)?;
        for (path, destination) in &self.includes {
            files.add(path, &below_app(destination)?)?;
        }
        let mut programs = Vec::new();
        for path in [&self.launcher, &self.program] {
            programs.extend(ElfFile::read(path)?);
        }
        if self.base == SCRATCH {
            programs.iter().try_for_each(ElfFile::check_static)?;
        }
        let base = Base::open(registries, &self.base, same_architecture(&programs)?)?;
        BuiltImage::new(base, files.write()?, &program)
    }
}

impl BuiltImage {
    /// Puts a layer on a base.
    fn new(base: Base, layer: Layer, program: &str) -> Result<Self> {
        let config = config(&base, &layer, program)?;
        let config_digest = digest(&config);
        let mut layers = base.layers.clone();
        layers.push(descriptor(
            IMAGE_LAYER_GZIP_MEDIA_TYPE,
            &layer.digest,
            layer.size,
        ));
        let manifest = OciImageManifest {
            schema_version: 2,
            media_type: Some(OCI_IMAGE_MEDIA_TYPE.to_owned()),
            config: descriptor(IMAGE_CONFIG_MEDIA_TYPE, &config_digest, config.len() as u64),
            layers,
            subject: None,
            artifact_type: None,
            annotations: None,
        };
        let manifest = bytes(&manifest)?;
        Ok(Self {
            base,
            layer,
            config,
            config_digest,
            digest: digest(&manifest),
            manifest,
        })
    }

    pub(crate) fn digest(&self) -> &str {
        &self.digest
    }

    pub(crate) fn layer_bytes(&self) -> u64 {
        self.layer.size
    }

    /// Pushes the parts that the registry lacks. Layers of a base in the same registry are mounted; those of another
    /// registry are copied.
    pub(crate) fn push(&self, registries: &Registries, reference: &str) -> Result<PushedImage> {
        let target = registries.open(reference, Access::Push)?;
        if target.reference.digest().is_some() {
            return Err(Error::usage(format!(
                "{reference} names an image by its digest, which follows from what is in it; give a tag"
            )));
        }
        let mut pushed = BTreeSet::new();
        for layer in &self.base.layers {
            if !pushed.insert(&layer.digest) || target.has(&layer.digest)? {
                continue;
            }
            self.base.push(registries, layer, &target)?;
        }
        let layer = &self.layer;
        let is_new = !target.has(&layer.digest)?;
        if is_new {
            target.push_file(&layer.digest, &layer.file, 0, layer.size)?;
        }
        if !target.has(&self.config_digest)? {
            target.push_bytes(&self.config_digest, &self.config)?;
        }
        target.push_manifest(&self.manifest)?;
        let name = &target.reference;
        Ok(PushedImage {
            reference: name.whole(),
            reference_by_digest: format!(
                "{}/{}@{}",
                name.registry(),
                name.repository(),
                self.digest
            ),
            sent_bytes: if is_new { layer.size } else { 0 },
        })
    }

    /// Writes the image as an archive for `ctr images import` and `docker load`, in which its reference is `name`.
    ///
    /// # Errors
    /// When a layer of the base cannot be pulled, or the archive cannot be written.
    pub(crate) fn save(&self, registries: &Registries, archive: &Path, name: &str) -> Result<()> {
        let mut writer = ArchiveWriter::create(archive)?;
        for layer in &self.base.layers {
            if !writer.has(&layer.digest) {
                let file = self.base.pull_file(registries, layer)?;
                writer.add_blob(&layer.digest, size(layer), file)?;
            }
        }
        let file = self.layer.reader()?;
        writer.add_blob(&self.layer.digest, self.layer.size, file)?;
        let config = self.config.as_slice();
        writer.add_blob(&self.config_digest, config.len() as u64, config)?;
        let below = self.base.layers.iter().map(|layer| layer.digest.as_str());
        let layers: Vec<_> = below.chain([self.layer.digest.as_str()]).collect();
        writer.finish(&self.manifest, &self.config_digest, &layers, name)
    }
}

/// An ELF file of this machine.
#[derive(Clone, Debug)]
struct ElfFile {
    path: PathBuf,
    /// Its processor, as images call it: `amd64`.
    architecture: &'static str,
    /// The loader that it asks for; a static program has none.
    loader: Option<String>,
}

impl ElfFile {
    /// Reads a program. Returns `None` if it is not an ELF file, such as a script.
    fn read(path: &Path) -> Result<Option<Self>> {
        let contents = std::fs::read(path).map_err(|error| {
            Error::usage(format!("{} cannot be read", path.display())).with_source(error)
        })?;
        if !contents.starts_with(b"\x7fELF") {
            return Ok(None);
        }
        let (machine, loader) = Self::parse(&contents).map_err(|error| {
            Error::usage(format!(
                "{} is not a valid 64-bit ELF file; compile the program for a 64-bit processor",
                path.display()
            ))
            .with_source(error)
        })?;
        let architecture = match machine {
            elf::EM_X86_64 => "amd64",
            elf::EM_AARCH64 => "arm64",
            elf::EM_RISCV => "riscv64",
            _ => {
                return Err(Error::usage(format!(
                    "{} is for an unknown processor; compile it for x86_64 or aarch64",
                    path.display()
                )));
            }
        };
        Ok(Some(Self {
            path: path.to_owned(),
            architecture,
            loader,
        }))
    }

    fn parse(contents: &[u8]) -> object::Result<(elf::Machine, Option<String>)> {
        let header = FileHeader64::<Endianness>::parse(contents)?;
        let endian = header.endian()?;
        let mut loader = None;
        for segment in header.program_headers(endian, contents)? {
            if let Some(path) = segment.interpreter(endian, contents)? {
                loader = Some(String::from_utf8_lossy(path).into_owned());
            }
        }
        Ok((header.e_machine(endian), loader))
    }

    /// Refuses a dynamic program, which needs a base with a C library.
    fn check_static(&self) -> Result<()> {
        match &self.loader {
            None => Ok(()),
            Some(loader) => Err(Error::usage(format!(
                "the base {SCRATCH} has no C library, and {} needs {loader}; take a base with glibc, such as \
                 debian:stable-slim, or link the program statically (--target x86_64-unknown-linux-musl)",
                self.path.display()
            ))),
        }
    }
}

/// Returns the base's configuration with the layer in it.
fn config(base: &Base, layer: &Layer, program: &str) -> Result<Vec<u8>> {
    let wrong = || Error::usage(format!("the base {} is no image of containers", base.name));
    let mut config = base.config.clone();
    let whole = config.as_object_mut().ok_or_else(wrong)?;
    whole.insert("created".to_owned(), CREATED.into());
    if let Some(history) = whole.get_mut("history").and_then(Value::as_array_mut) {
        history.push(json!({ "created": CREATED, "created_by": "accel-jobs image build" }));
    }
    let layers = whole["rootfs"]["diff_ids"].as_array_mut();
    layers
        .ok_or_else(wrong)?
        .push(layer.diff_id.as_str().into());
    let runs = object(whole, "config").ok_or_else(wrong)?;
    runs.insert("Entrypoint".to_owned(), json!([LAUNCHER_PATH]));
    runs.insert("Cmd".to_owned(), json!([program]));
    runs.insert("WorkingDir".to_owned(), APP_FOLDER.into());
    if runs.get("Env").is_none_or(Value::is_null) {
        runs.insert("Env".to_owned(), json!([PATH]));
    }
    bytes(&config)
}

/// Returns the object of this key, which Docker writes as `null` if it is empty.
fn object<'a>(parent: &'a mut Map<String, Value>, key: &str) -> Option<&'a mut Map<String, Value>> {
    let value = parent.entry(key).or_insert(Value::Null);
    if value.is_null() {
        *value = json!({});
    }
    value.as_object_mut()
}

fn bytes(value: &impl Serialize) -> Result<Vec<u8>> {
    serde_json::to_vec(value).map_err(|error| Error::system("cannot write JSON").with_source(error))
}

fn descriptor(kind: &str, digest: &str, size: u64) -> OciDescriptor {
    OciDescriptor {
        media_type: kind.to_owned(),
        digest: digest.to_owned(),
        // Files are not that large.
        size: i64::try_from(size).unwrap_or(i64::MAX),
        ..OciDescriptor::default()
    }
}

/// Returns the processor of this machine, as images call it.
fn architecture_here() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

fn same_architecture(programs: &[ElfFile]) -> Result<&'static str> {
    match programs {
        [first, second, ..] if first.architecture != second.architecture => {
            Err(Error::usage(format!(
                "{} is for {}, and {} for {}; compile one of them for the other's processor",
                first.path.display(),
                first.architecture,
                second.path.display(),
                second.architecture
            )))
        }
        [first, ..] => Ok(first.architecture),
        [] => Ok(architecture_here()),
    }
}

/// Returns the path of an included file in the image.
fn below_app(destination: &str) -> Result<String> {
    let below = match destination.strip_prefix(APP_FOLDER) {
        Some(below) if below.starts_with('/') => below.trim_start_matches('/'),
        _ => destination,
    };
    let names = below.split('/').filter(|name| !["", "."].contains(name));
    let names: Vec<_> = names.collect();
    match below.starts_with('/') || names.is_empty() || names.contains(&"..") {
        false => Ok(format!("{APP_FOLDER}/{}", names.join("/"))),
        true => Err(Error::usage(format!(
            "{destination:?} is no place below {APP_FOLDER} of the image, such as data/train.bin"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn included_files_are_below_the_folder_of_the_program() {
        for (destination, place) in [
            ("data", "/app/data"),
            ("./data//a/", "/app/data/a"),
            ("/app/data", "/app/data"),
        ] {
            assert_eq!(below_app(destination).unwrap(), place);
        }
        for destination in [
            "",
            ".",
            "/",
            "/etc/passwd",
            "../x",
            "a/../../x",
            "/app",
            "/app/../x",
        ] {
            let place = below_app(destination);
            assert!(place.is_err(), "{destination}: {place:?}");
        }
    }

    #[test]
    fn programs_are_read() {
        let own = ElfFile::read(&std::env::current_exe().unwrap());
        let own = own.unwrap().unwrap();
        assert_eq!(own.architecture, architecture_here());
        if cfg!(target_env = "gnu") {
            let loader = own.loader.as_deref().unwrap_or_default();
            assert!(loader.contains("ld-linux"), "{own:?}");
            assert!(own.check_static().is_err());
        }
    }

    #[test]
    fn scripts_are_not_elf_files() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("script");
        std::fs::write(&path, "#!/bin/sh\n").unwrap();
        assert!(ElfFile::read(&path).unwrap().is_none());
        std::fs::write(&path, b"\x7fELF\x01").unwrap();
        assert!(ElfFile::read(&path).is_err());
        assert!(ElfFile::read(&folder.path().join("none")).is_err());
    }
}
