//! An image that is made: where it is pushed to, and how it is written to a file.

use std::collections::BTreeSet;
use std::path::Path;

use oci_client::manifest::{
    IMAGE_CONFIG_MEDIA_TYPE, IMAGE_LAYER_GZIP_MEDIA_TYPE, OCI_IMAGE_MEDIA_TYPE, OciDescriptor,
    OciImageManifest,
};
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::archive::ArchiveWriter;
use super::base::Base;
use super::elf::ElfFile;
use super::layer::{Layer, digest};
use super::registry::{Access, Registries, size};
use super::{APP_FOLDER, LAUNCHER_PATH};
use crate::error::{Error, Result};

/// An image that is made, and is nowhere yet.
#[derive(Debug)]
pub(crate) struct BuiltImage {
    base: Base,
    layer: Layer,
    config: Vec<u8>,
    config_digest: String,
    manifest: Vec<u8>,
    digest: String,
    notes: Vec<String>,
}

/// An image that a registry has.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct PushedImage {
    /// As it was asked for: `registry.example/team/mnist:1`.
    pub(crate) reference: String,
    /// What names this very image forever: `registry.example/team/mnist@sha256:…`.
    pub(crate) reference_by_digest: String,
    /// How many bytes of the layer were sent: 0 where the registry had it.
    pub(crate) sent_bytes: u64,
}

/// Labels by which an image tells what its programs need of a node.
const LABEL_FEATURES: &str = "burn-accelerate.target-features";
const LABEL_GLIBC: &str = "burn-accelerate.glibc";

/// When every image is made, so that the same files give the same image.
const CREATED: &str = "1970-01-01T00:00:00Z";

const PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

impl BuiltImage {
    /// Puts a layer on a base.
    ///
    /// # Errors
    /// When the base's configuration is none.
    pub(super) fn new(
        base: Base,
        layer: Layer,
        program: &str,
        programs: &[ElfFile],
        notes: Vec<String>,
    ) -> Result<Self> {
        let config = config(&base, &layer, program, programs)?;
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
            notes,
        })
    }

    /// The digest of its manifest.
    pub(crate) fn digest(&self) -> &str {
        &self.digest
    }

    /// How many bytes its layer has.
    pub(crate) fn layer_bytes(&self) -> u64 {
        self.layer.size
    }

    /// What could not be checked, a sentence each.
    pub(crate) fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Pushes what the registry lacks of it. Layers of the base are taken from where the registry has them; only from
    /// another registry they are copied.
    ///
    /// # Errors
    /// When the registry is not reached, or refuses it.
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

    /// Writes it as an archive, which `ctr images import` and `docker load` take. `name` is its reference there.
    ///
    /// # Errors
    /// When a layer of the base cannot be pulled, or the archive not written.
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

/// The base's configuration with the layer in it.
fn config(base: &Base, layer: &Layer, program: &str, programs: &[ElfFile]) -> Result<Vec<u8>> {
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
    let labels = object(runs, "Labels").ok_or_else(wrong)?;
    let features: BTreeSet<_> = programs
        .iter()
        .flat_map(|program| &program.target_features)
        .map(String::as_str)
        .collect();
    let features = features.into_iter().collect::<Vec<_>>().join(",");
    if !features.is_empty() {
        labels.insert(LABEL_FEATURES.to_owned(), features.into());
    }
    if let Some(needed) = programs.iter().filter_map(|program| program.glibc).max() {
        labels.insert(LABEL_GLIBC.to_owned(), needed.to_string().into());
    }
    bytes(&config)
}

/// The object of this key, which Docker writes as `null` where it is empty.
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
