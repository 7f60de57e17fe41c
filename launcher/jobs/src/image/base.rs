//! The image that a layer is put on.

use std::fs::File;
use std::io::{Seek, Write};

use oci_client::manifest::{OciDescriptor, OciManifest};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::archive::ImageArchive;
use super::registry::{Access, Registries, Repository, size};
use crate::error::{Error, Result};

/// The base of an image: what it is, and where its layers are.
#[derive(Debug)]
pub(super) struct Base {
    /// As it was asked for.
    pub(super) name: String,
    /// What its containers run with, and the digests of its layers, as its own tools wrote it.
    pub(super) config: Value,
    pub(super) layers: Vec<OciDescriptor>,
    place: LayerSource,
}

#[derive(Debug)]
enum LayerSource {
    Nowhere,
    Registry,
    Archive(ImageArchive),
}

/// A base without files, for programs that need none.
const SCRATCH: &str = "scratch";

/// Begins the name of a file that is the base.
const ARCHIVE: &str = "oci-archive:";

impl Base {
    /// Finds the base. Its layers stay where they are.
    ///
    /// # Errors
    /// When it is not there, or not for this `architecture`.
    pub(super) fn open(registries: &Registries, name: &str, architecture: &str) -> Result<Self> {
        let base = if name == SCRATCH {
            Self {
                name: name.to_owned(),
                config: json!({
                    "architecture": architecture,
                    "os": "linux",
                    "rootfs": { "type": "layers", "diff_ids": [] },
                    "history": [],
                }),
                layers: Vec::new(),
                place: LayerSource::Nowhere,
            }
        } else if let Some(path) = name.strip_prefix(ARCHIVE) {
            let archive = ImageArchive::open(path.as_ref())?;
            let manifest = archive.manifest(|index| choose(name, index, architecture))?;
            Self::new(
                name,
                &archive.blob(&manifest.config.digest)?,
                manifest.layers,
                LayerSource::Archive(archive),
            )?
        } else {
            let repository = registries.open(name, Access::Pull)?;
            let mut manifest = repository.manifest(&repository.reference)?.0;
            if let OciManifest::ImageIndex(index) = &manifest {
                let entries = index.manifests.iter().filter_map(|entry| {
                    let platform = entry.platform.as_ref()?;
                    let platform = format!("{}/{}", platform.os, platform.architecture);
                    Some((platform, entry.digest.clone()))
                });
                let digest = choose(name, entries.collect(), architecture)?;
                let chosen = repository.reference.clone_with_digest(digest);
                manifest = repository.manifest(&chosen)?.0;
            }
            let OciManifest::Image(manifest) = manifest else {
                return Err(Error::usage(format!(
                    "the base {name} is a list of lists of images"
                )));
            };
            let mut config = Vec::new();
            repository.pull(&manifest.config, &mut config)?;
            Self::new(name, &config, manifest.layers, LayerSource::Registry)?
        };
        base.is_for(architecture)?;
        Ok(base)
    }

    /// Writes a layer to `output`, as it is compressed.
    ///
    /// # Errors
    /// When it is not there, or `output` cannot be written.
    pub(super) fn pull(
        &self,
        registries: &Registries,
        layer: &OciDescriptor,
        output: &mut dyn Write,
    ) -> Result<()> {
        match &self.place {
            LayerSource::Nowhere => Ok(()),
            LayerSource::Registry => registries
                .open(&self.name, Access::Pull)?
                .pull(layer, output),
            LayerSource::Archive(archive) => archive.copy(&layer.digest, output),
        }
    }

    /// The same to a file without a name, read from its beginning.
    ///
    /// # Errors
    /// The same, and when the disk of temporary files is full.
    pub(super) fn pull_file(&self, registries: &Registries, layer: &OciDescriptor) -> Result<File> {
        let failed = |error| {
            Error::system("a layer of the base cannot be kept in the folder of temporary files")
                .with_source(error)
        };
        let mut file = tempfile::tempfile().map_err(failed)?;
        self.pull(registries, layer, &mut file)?;
        file.rewind().map_err(failed)?;
        Ok(file)
    }

    /// Has `target` have a layer, by the shortest way.
    ///
    /// # Errors
    /// When the layer is not there, or `target` does not take it.
    pub(super) fn push(
        &self,
        registries: &Registries,
        layer: &OciDescriptor,
        target: &Repository<'_>,
    ) -> Result<()> {
        match &self.place {
            LayerSource::Nowhere => Ok(()),
            LayerSource::Registry => {
                let source = registries.open(&self.name, Access::Pull)?;
                let is_same = source.reference.registry() == target.reference.registry();
                match is_same && target.mount(&layer.digest, &source.reference) {
                    true => Ok(()),
                    false => target.copy(layer, &source),
                }
            }
            LayerSource::Archive(archive) => {
                let (start, _) = archive.place(&layer.digest)?;
                target.push_file(&layer.digest, archive.file(), start, size(layer))
            }
        }
    }

    fn new(
        name: &str,
        config: &[u8],
        layers: Vec<OciDescriptor>,
        place: LayerSource,
    ) -> Result<Self> {
        let base = Self {
            name: name.to_owned(),
            config: parse(name, config)?,
            layers: layers.into_iter().map(as_oci).collect(),
            place,
        };
        let known = base.config["rootfs"]["diff_ids"].as_array().map(Vec::len);
        match known == Some(base.layers.len()) {
            true => Ok(base),
            false => Err(Error::usage(format!(
                "the base {name} is no image of containers: its configuration does not have a digest for each layer"
            ))),
        }
    }

    fn is_for(&self, architecture: &str) -> Result<()> {
        let text = |key: &str| self.config[key].as_str().unwrap_or("unknown");
        let found = (text("os"), text("architecture"));
        match found == ("linux", architecture) {
            true => Ok(()),
            false => Err(Error::usage(format!(
                "the base {} is for {}/{}, and the program for linux/{architecture}; take a base for it, or compile the \
                 program for that one",
                self.name, found.0, found.1
            ))),
        }
    }
}

/// JSON of an image.
///
/// # Errors
/// When it is none.
pub(super) fn parse<T: DeserializeOwned>(name: &str, bytes: &[u8]) -> Result<T> {
    serde_json::from_slice(bytes).map_err(|error| {
        Error::usage(format!("{name} is no image that can be understood")).with_source(error)
    })
}

/// Of images for several platforms, the digest of the one for this one.
fn choose(name: &str, images: Vec<(String, String)>, architecture: &str) -> Result<String> {
    let wanted = format!("linux/{architecture}");
    let found = images.iter().find(|(platform, _)| *platform == wanted);
    found.map(|(_, digest)| digest.clone()).ok_or_else(|| {
        let mut there: Vec<_> = images
            .iter()
            .map(|(platform, _)| platform.as_str())
            .collect();
        there.retain(|platform| !platform.starts_with("unknown"));
        Error::usage(format!(
            "the base {name} is there for {}, and the program is for {wanted}",
            there.join(", ")
        ))
    })
}

/// A layer of Docker is called so in a manifest of OCI; its bytes are the same.
fn as_oci(mut layer: OciDescriptor) -> OciDescriptor {
    let kind = match layer.media_type.as_str() {
        "application/vnd.docker.image.rootfs.diff.tar" => "application/vnd.oci.image.layer.v1.tar",
        "application/vnd.docker.image.rootfs.diff.tar.gzip" => {
            "application/vnd.oci.image.layer.v1.tar+gzip"
        }
        other => other,
    };
    layer.media_type = kind.to_owned();
    layer
}
