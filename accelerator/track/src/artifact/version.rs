//! The manifest of a version: which files it has, and where it comes from.

use std::fs;
use std::path::Path;

use accelerator_manifest::ContentHash;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::id::ArtifactId;
use super::name::check_path;
use crate::error::{Error, Kind, Result};
use crate::run_id::RunId;

/// A file of an artifact.
///
/// ```
/// use accelerator_manifest::ContentHash;
/// use accelerator_track::ArtifactFile;
///
/// let file = ArtifactFile { path: "weights/model.bin".to_owned(), hash: ContentHash::of(b"weights"), bytes: 7 };
/// assert!(serde_json::to_string(&file).unwrap().starts_with(r#"{"path":"weights/model.bin","hash":""#));
/// ```
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct ArtifactFile {
    /// Where it is in the artifact, with `/` between folders.
    pub path: String,
    /// BLAKE3 of its content.
    pub hash: ContentHash,
    /// Its length.
    pub bytes: u64,
}

/// Something that belongs to an artifact and lies elsewhere.
///
/// ```
/// use accelerator_track::ArtifactReference;
///
/// let data = ArtifactReference { url: "s3://bucket/train.parquet".to_owned(), digest: None };
/// assert_eq!(serde_json::to_string(&data).unwrap(), r#"{"url":"s3://bucket/train.parquet"}"#);
/// ```
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct ArtifactReference {
    /// Where it is.
    pub url: String,
    /// What its place calls its content: a hash, an ETag, a version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
}

/// What an artifact consists of, before it has a version.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Contents {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) kind: Option<String>,
    /// Sorted by path.
    pub(super) files: Vec<ArtifactFile>,
    /// Sorted by URL.
    pub(super) references: Vec<ArtifactReference>,
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub(super) metadata: Map<String, Value>,
}

impl Contents {
    /// The hash of files and references.
    pub(super) fn digest(&self) -> ContentHash {
        // As JSON, in which texts have ends.
        let text = serde_json::json!([self.files, self.references]).to_string();
        ContentHash::of(text.as_bytes())
    }
}

/// A version as its file holds it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Version {
    pub(super) format: u32,
    pub(super) name: String,
    pub(super) version: u32,
    pub(super) created_ms: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) run: Option<RunId>,
    pub(super) digest: ContentHash,
    #[serde(flatten)]
    pub(super) contents: Contents,
}

impl Version {
    /// Returns true if it has that name, number and digest.
    pub(super) fn is(&self, id: &ArtifactId) -> bool {
        self.name == id.name && self.version == id.version && self.digest.to_string() == id.digest
    }

    /// Its file's bytes: an object whose last member is the hash of all before it.
    pub(super) fn to_bytes(&self) -> Result<Vec<u8>> {
        let mut text = serde_json::to_string(self).map_err(|error| {
            let message = format!(
                "cannot write the manifest of {}:v{} as JSON: {error}",
                self.name, self.version
            );
            Error::new(Kind::Misuse, message).with_source(error)
        })?;
        text.pop();
        let seal = ContentHash::of(text.as_bytes());
        text.push_str(&format!("{SEAL}{seal}\"}}\n"));
        Ok(text.into_bytes())
    }

    /// Reads the version that the file at `path` shall hold.
    pub(super) fn read(path: &Path, name: &str, version: u32) -> Result<Self> {
        let bytes = fs::read(path).map_err(|error| Error::io("read", path, error))?;
        let read = Self::parse(&bytes).map_err(|error| {
            let message = format!("{}: {error}", path.display());
            Error::new(
                if error.is_incompatible() {
                    Kind::Incompatible
                } else {
                    Kind::Corrupt
                },
                message,
            )
        })?;
        if (read.name.as_str(), read.version) != (name, version) {
            return Err(Error::new(
                Kind::Corrupt,
                format!(
                    "{}: expected {name}:v{version}, found {}:v{}; the file was moved, or the file system takes capitals for small letters",
                    path.display(),
                    read.name,
                    read.version
                ),
            ));
        }
        Ok(read)
    }

    fn parse(bytes: &[u8]) -> Result<Self> {
        let corrupt = |message: String| Error::new(Kind::Corrupt, message);
        let sealed = std::str::from_utf8(bytes)
            .ok()
            .and_then(|text| text.rsplit_once(SEAL));
        let Some((body, seal)) = sealed else {
            return Err(corrupt(
                "the manifest does not end with its seal: it is cut off, or was edited".to_owned(),
            ));
        };
        if seal != format!("{}\"}}\n", ContentHash::of(body.as_bytes())) {
            return Err(corrupt(
                "the seal of the manifest does not fit: it was changed after it was written"
                    .to_owned(),
            ));
        }
        let body = format!("{body}}}");
        let unreadable =
            |error: serde_json::Error| corrupt(format!("the manifest cannot be read: {error}"));
        let Format { format } = serde_json::from_str(&body).map_err(unreadable)?;
        if format > FORMAT {
            return Err(Error::new(
                Kind::Incompatible,
                format!(
                    "the artifact is of format {format}, and this program reads formats up to {FORMAT}; use a newer one"
                ),
            ));
        }
        let version: Self = serde_json::from_str(&body).map_err(unreadable)?;
        for file in &version.contents.files {
            check_path(&file.path)?;
        }
        if version.digest != version.contents.digest() {
            return Err(corrupt(
                "the digest of the manifest is not that of its files".to_owned(),
            ));
        }
        Ok(version)
    }
}

#[derive(Deserialize)]
struct Format {
    format: u32,
}

/// The version of the format.
pub(super) const FORMAT: u32 = 1;

const SEAL: &str = ",\"seal\":\"";

#[cfg(test)]
mod tests {
    use super::*;

    fn version(path: &str) -> Version {
        let contents = Contents {
            kind: None,
            files: vec![ArtifactFile {
                path: path.to_owned(),
                hash: ContentHash::of(b""),
                bytes: 0,
            }],
            references: Vec::new(),
            metadata: Map::new(),
        };
        Version {
            format: FORMAT,
            name: "a".to_owned(),
            version: 1,
            created_ms: 0,
            run: None,
            digest: contents.digest(),
            contents,
        }
    }

    #[test]
    fn every_changed_bit_of_a_manifest_is_found() {
        let bytes = version("x").to_bytes().unwrap();
        assert_eq!(Version::parse(&bytes).unwrap(), version("x"));
        for at in 0..bytes.len() {
            assert!(Version::parse(&bytes[..at]).unwrap_err().is_corrupt());
            for bit in 0..8 {
                let mut changed = bytes.clone();
                changed[at] ^= 1 << bit;
                assert!(
                    Version::parse(&changed).unwrap_err().is_corrupt(),
                    "{at} {bit}"
                );
            }
        }
    }

    #[test]
    fn manifests_that_lead_elsewhere_or_are_newer_are_refused() {
        let elsewhere = version("../x").to_bytes().unwrap();
        assert!(Version::parse(&elsewhere).is_err());
        let newer = Version {
            format: FORMAT + 1,
            ..version("x")
        };
        assert!(
            Version::parse(&newer.to_bytes().unwrap())
                .unwrap_err()
                .is_incompatible()
        );
    }
}
