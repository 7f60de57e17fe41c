//! The image that a layer is put on, and archives of images in the layout that OCI, containerd, Docker and Podman share.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use accelerator_host::cli::{Error, Result};
use accelerator_host::fs::{Draft, Durability, Replace};
use oci_client::Reference;
use oci_client::manifest::{
    OCI_IMAGE_INDEX_MEDIA_TYPE, OCI_IMAGE_MEDIA_TYPE, OciDescriptor, OciImageIndex,
    OciImageManifest, OciManifest,
};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::layer::{DigestWriter, digest};
use super::registry::{Access, Registries, Repository, size};

/// The base of an image: its description, and the place of its layers.
#[derive(Debug)]
pub(super) struct Base {
    /// The name that was asked for.
    pub(super) name: String,
    /// The configuration of its containers and the digests of its layers, as its own tools wrote it.
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

/// The base without files, for programs that are linked statically.
pub(super) const SCRATCH: &str = "scratch";

/// The prefix of the name of a file that is the base.
const ARCHIVE: &str = "oci-archive:";

impl Base {
    /// Finds the base. Its layers stay where they are.
    ///
    /// # Errors
    /// When it does not exist, or is not for this `architecture`.
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

    /// Writes a layer to `output` without decompressing it.
    ///
    /// # Errors
    /// When it is not there, or `output` cannot be written.
    fn pull(
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

    /// Does the same to a temporary file, positioned at its beginning.
    ///
    /// # Errors
    /// As for [`Self::pull`], and when the disk of temporary files is full.
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

    /// Gives a layer to `target` in the cheapest way.
    ///
    /// # Errors
    /// When the layer does not exist, or `target` does not accept it.
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

/// Parses JSON of an image.
///
/// # Errors
/// When it is none.
fn parse<T: DeserializeOwned>(name: &str, bytes: &[u8]) -> Result<T> {
    serde_json::from_slice(bytes).map_err(|error| {
        Error::usage(format!("{name} is no image that can be understood")).with_source(error)
    })
}

/// Returns the digest of the image for this architecture.
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

/// Replaces Docker's media type of a layer by that of OCI; the bytes are the same.
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

/// An archive, open to be read.
#[derive(Debug)]
struct ImageArchive {
    path: PathBuf,
    file: File,
    /// The position and the length of each of its files.
    files: BTreeMap<String, (u64, u64)>,
}

/// An archive that is written. Until it is complete, there is no file with its name.
pub(super) struct ArchiveWriter {
    path: PathBuf,
    archive: tar::Builder<Draft>,
    written: BTreeSet<String>,
}

impl ImageArchive {
    /// Opens an archive of an image.
    ///
    /// # Errors
    /// When there is none, or it has another layout.
    fn open(path: &Path) -> Result<Self> {
        let failed = |error: io::Error| {
            Error::usage(format!("the archive {} cannot be read", path.display()))
                .with_source(error)
        };
        let file = File::open(path).map_err(failed)?;
        let mut archive = tar::Archive::new(file.try_clone().map_err(failed)?);
        let mut files = BTreeMap::new();
        for entry in archive.entries_with_seek().map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let name = entry.path().map_err(failed)?.to_string_lossy().into_owned();
            files.insert(name, (entry.raw_file_position(), entry.size()));
        }
        Ok(Self {
            path: path.to_owned(),
            file,
            files,
        })
    }

    /// Returns the manifest of the image; if there are several, `choose` picks one of the platforms and digests.
    ///
    /// # Errors
    /// When there is none, or `choose` picks none.
    fn manifest(
        &self,
        choose: impl Fn(Vec<(String, String)>) -> Result<String>,
    ) -> Result<OciImageManifest> {
        let name = self.path.display().to_string();
        let mut index = self.read("index.json")?;
        loop {
            let images: OciImageIndex = parse(&name, &index)?;
            let (kind, digest) = match &images.manifests[..] {
                [only] => (only.media_type.as_str(), only.digest.clone()),
                several => {
                    let platforms = several.iter().filter_map(|entry| {
                        let platform = entry.platform.as_ref()?;
                        let platform = format!("{}/{}", platform.os, platform.architecture);
                        Some((platform, entry.digest.clone()))
                    });
                    (OCI_IMAGE_MEDIA_TYPE, choose(platforms.collect())?)
                }
            };
            let blob = self.blob(&digest)?;
            match kind {
                OCI_IMAGE_INDEX_MEDIA_TYPE => index = blob,
                _ => return parse(&name, &blob),
            }
        }
    }

    /// Reads a small blob.
    ///
    /// # Errors
    /// When it is not there, or is another one.
    fn blob(&self, wanted: &str) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.copy(wanted, &mut bytes)?;
        Ok(bytes)
    }

    /// Writes a blob to `output`.
    ///
    /// # Errors
    /// When it is not there, is another one, or `output` cannot be written.
    fn copy(&self, wanted: &str, output: &mut dyn Write) -> Result<()> {
        let (start, size) = self.place(wanted)?;
        let mut output = DigestWriter::new(output);
        let mut file = &self.file;
        let copied = file
            .seek(SeekFrom::Start(start))
            .and_then(|_| io::copy(&mut file.take(size), &mut output));
        copied.map_err(|error| {
            Error::system(format!("{wanted} cannot be copied")).with_source(error)
        })?;
        match output.finish().1 == wanted {
            true => Ok(()),
            false => Err(self.broken(&format!("{wanted} is something else"))),
        }
    }

    /// Returns the position of a blob in the file, and its length.
    ///
    /// # Errors
    /// When it is not there.
    fn place(&self, digest: &str) -> Result<(u64, u64)> {
        let place = self.files.get(&blob_path(digest)).copied();
        place.ok_or_else(|| self.broken(&format!("{digest} is not in it")))
    }

    fn file(&self) -> &File {
        &self.file
    }

    fn read(&self, name: &str) -> Result<Vec<u8>> {
        let place = self.files.get(name).copied();
        let (start, size) = place.ok_or_else(|| self.broken(&format!("{name} is not in it")))?;
        let mut bytes = Vec::new();
        let mut file = &self.file;
        let read = file
            .seek(SeekFrom::Start(start))
            .and_then(|_| file.take(size).read_to_end(&mut bytes));
        read.map_err(|error| {
            self.broken(&format!("{name} cannot be read"))
                .with_source(error)
        })?;
        Ok(bytes)
    }

    fn broken(&self, why: &str) -> Error {
        Error::usage(format!(
            "{} is no image in the layout of OCI: {why}; write it by `docker save` (25 or newer), `skopeo copy` or \
             `accel-jobs image build --archive`",
            self.path.display()
        ))
    }
}

impl ArchiveWriter {
    /// Begins an archive.
    ///
    /// # Errors
    /// When its folder cannot be written.
    pub(super) fn create(path: &Path) -> Result<Self> {
        let file = Replace::new(path, Durability::Cached).private().begin();
        Ok(Self {
            path: path.to_owned(),
            archive: tar::Builder::new(file.map_err(|error| unwritten(path, error))?),
            written: BTreeSet::new(),
        })
    }

    /// Returns `true` if the blob is in it already.
    pub(super) fn has(&self, digest: &str) -> bool {
        self.written.contains(digest)
    }

    /// Adds a blob of `size` bytes.
    ///
    /// # Errors
    /// When the disk is full.
    pub(super) fn add_blob(&mut self, digest: &str, size: u64, blob: impl Read) -> Result<()> {
        match self.written.insert(digest.to_owned()) {
            true => self.add(&blob_path(digest), size, blob),
            false => Ok(()),
        }
    }

    /// Completes the archive with its index, in which the image is called `name`.
    ///
    /// # Errors
    /// When `name` is not a reference of an image, or the disk is full.
    pub(super) fn finish(
        mut self,
        manifest: &[u8],
        config: &str,
        layers: &[&str],
        name: &str,
    ) -> Result<()> {
        let reference: Reference = name.parse().map_err(|error| {
            Error::usage(format!(
                "{name:?} is not a name of an image, such as mnist:1"
            ))
            .with_source(error)
        })?;
        let blob = digest(manifest);
        self.add_blob(&blob, manifest.len() as u64, manifest)?;
        let index = json!({
            "schemaVersion": 2,
            "mediaType": OCI_IMAGE_INDEX_MEDIA_TYPE,
            "manifests": [{
                "mediaType": OCI_IMAGE_MEDIA_TYPE,
                "digest": blob,
                "size": manifest.len(),
                "annotations": {
                    "io.containerd.image.name": reference.whole(),
                    "org.opencontainers.image.ref.name": reference.tag().unwrap_or("latest"),
                },
            }],
        });
        // The index that Docker reads.
        let docker = json!([{
            "Config": blob_path(config),
            "RepoTags": [reference.whole()],
            "Layers": layers.iter().map(|layer| blob_path(layer)).collect::<Vec<_>>(),
        }]);
        let layout = json!({ "imageLayoutVersion": "1.0.0" });
        for (name, value) in [
            ("index.json", index),
            ("manifest.json", docker),
            ("oci-layout", layout),
        ] {
            let text = value.to_string();
            self.add(name, text.len() as u64, text.as_bytes())?;
        }
        let file = self.archive.into_inner();
        file.and_then(|mut draft| draft.publish())
            .map_err(|error| unwritten(&self.path, error))
    }

    fn add(&mut self, name: &str, size: u64, contents: impl Read) -> Result<()> {
        let mut header = tar::Header::new_gnu();
        header.set_mode(0o644);
        header.set_mtime(0);
        header.set_size(size);
        let added = self.archive.append_data(&mut header, name, contents);
        added.map_err(|error| unwritten(&self.path, error))
    }
}

fn blob_path(digest: &str) -> String {
    format!("blobs/{}", digest.replacen(':', "/", 1))
}

fn unwritten(path: &Path, error: io::Error) -> Error {
    Error::system(format!(
        "the archive {} cannot be written; is there room?",
        path.display()
    ))
    .with_source(error)
}
