//! Artifacts: files that runs make and use, by name and version.

use std::path::Path;
use std::{fmt, fs};

use accelerator_manifest::ContentHash;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::error::{Error, Kind, Result};
use crate::record::RunId;
pub use draft::Artifact;
pub use retention::PruneReport;
pub(crate) use retention::Retention;
pub use store::ArtifactStore;
pub use stored::StoredArtifact;

mod draft;
pub(crate) mod objects;
mod retention;
mod store;
mod stored;
#[cfg(test)]
mod tests;

/// A file of an artifact.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct ArtifactFile {
    /// The path in the artifact, with `/` between folders.
    pub path: String,
    /// BLAKE3 of its content.
    pub hash: ContentHash,
    /// Its length.
    pub bytes: u64,
}

/// Something that belongs to an artifact and is stored elsewhere.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct ArtifactReference {
    /// The URL.
    pub url: String,
    /// The server's identifier of the content: a hash, an ETag, a version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
}

/// The contents of an artifact, before it has a version.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Contents {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    kind: Option<String>,
    /// Sorted by path.
    files: Vec<ArtifactFile>,
    /// Sorted by URL.
    references: Vec<ArtifactReference>,
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    metadata: Map<String, Value>,
}

impl Contents {
    /// The hash of files and references.
    fn digest(&self) -> ContentHash {
        // As JSON, in which texts have ends.
        let text = serde_json::json!([self.files, self.references]).to_string();
        ContentHash::of(text.as_bytes())
    }
}

/// A version as its file holds it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Version {
    format: u32,
    name: String,
    version: u32,
    created_ms: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    run: Option<RunId>,
    digest: ContentHash,
    #[serde(flatten)]
    contents: Contents,
}

impl Version {
    /// Returns true if it has that name, number and digest.
    fn is(&self, id: &ArtifactId) -> bool {
        self.name == id.name && self.version == id.version && self.digest.to_string() == id.digest
    }

    /// Its file's bytes: an object whose last member is the hash of all before it.
    fn to_bytes(&self) -> Result<Vec<u8>> {
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
    fn read(path: &Path, name: &str, version: u32) -> Result<Self> {
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
const FORMAT: u32 = 1;

const SEAL: &str = ",\"seal\":\"";

/// A version of an artifact, in whatever store. The digest tells apart versions that got one number in two stores.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct ArtifactId {
    /// The artifact's name.
    pub name: String,
    /// Its version.
    pub version: u32,
    /// The hash of its contents.
    pub digest: String,
}

impl fmt::Display for ArtifactId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:v{}", self.name, self.version)
    }
}

/// The name of an artifact, which is the name of a folder too.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
struct ArtifactName(String);

impl ArtifactName {
    fn parse(name: &str) -> Result<Self> {
        check("an artifact", name)?;
        Ok(Self(name.to_owned()))
    }

    fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ArtifactName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// `name`, `name:latest`, `name:v3` or `name:alias`.
#[derive(Clone, Debug, Eq, PartialEq)]
struct Query {
    name: ArtifactName,
    version: VersionQuery,
}

#[derive(Clone, Debug, Eq, PartialEq)]
enum VersionQuery {
    Latest,
    Number(u32),
    Alias(String),
}

impl Query {
    fn parse(text: &str) -> Result<Self> {
        let (name, version) = text.rsplit_once(':').unwrap_or((text, LATEST));
        let version = match parse_version(version) {
            Some(number) => VersionQuery::Number(number),
            None if version == LATEST => VersionQuery::Latest,
            None => VersionQuery::Alias(parse_alias(version)?),
        };
        Ok(Self {
            name: ArtifactName::parse(name)?,
            version,
        })
    }
}

/// A name that a version has beside its number, and that can move to another.
fn parse_alias(alias: &str) -> Result<String> {
    check("an alias", alias)?;
    if alias == LATEST || parse_version(alias).is_some() {
        return Err(Error::new(
            Kind::Misuse,
            format!(
                "{alias:?} cannot be set as an alias: {LATEST:?} is the greatest version, and \"v1\" the first; choose another"
            ),
        ));
    }
    Ok(alias.to_owned())
}

/// The number of `v3`; only as it is written, so that no two texts are one number.
fn parse_version(text: &str) -> Option<u32> {
    let number: u32 = text.strip_prefix('v')?.parse().ok()?;
    (number > 0 && text == format!("v{number}")).then_some(number)
}

/// Checks that this is a path within an artifact: parts with `/` between, none of which leads elsewhere.
fn check_path(path: &str) -> Result<()> {
    // `\` and, on some systems, `:` separate parts too, and an artifact is read on other systems.
    let is_special = |x: char| x.is_control() || x == '\\' || (cfg!(windows) && x == ':');
    let defect = if path.is_empty() {
        "it is empty"
    } else if path.contains(is_special) {
        "it has a control character or a `\\`"
    } else if path.split('/').any(|part| matches!(part, "" | "." | "..")) {
        "a part of it is empty, `.` or `..`"
    } else {
        return Ok(());
    };
    Err(Error::new(
        Kind::Misuse,
        format!(
            "{path:?} is no path of a file in an artifact: {defect}; expected one such as \"weights/model.safetensors\""
        ),
    ))
}

const LATEST: &str = "latest";

/// The most bytes of a name: names of files have 255.
const LONGEST: usize = 128;

fn check(what: &str, name: &str) -> Result<()> {
    let is_special = |x: char| {
        x.is_control()
            || matches!(
                x,
                '/' | '\\' | ':' | '*' | '?' | '"' | '<' | '>' | '|' | '%'
            )
    };
    let defect = if name.is_empty() {
        "it is empty"
    } else if name.len() > LONGEST {
        "it has more than 128 bytes"
    } else if name.contains(is_special) {
        "it has a control character or one of / \\ : * ? \" < > | %"
    } else if name.starts_with(['.', '-', ' ']) || name.ends_with(['.', ' ']) {
        "it begins with `.`, `-` or a space, or ends with `.` or a space"
    } else {
        return Ok(());
    };
    let shown: String = name.chars().take(LONGEST).collect();
    Err(Error::new(
        Kind::Misuse,
        format!("{shown:?} is no name for {what}: {defect}; expected one such as \"mnist-model\""),
    ))
}

#[cfg(test)]
mod name_tests {
    use proptest::prelude::*;

    use super::*;

    fn version(path: &str) -> Version {
        let contents = Contents {
            kind: None,
            files: vec![ArtifactFile {
                path: path.to_owned(),
                hash: ContentHash::of(b""),
                bytes: 0,
            }],
            references: vec![ArtifactReference {
                url: "s3://bucket/data".to_owned(),
                digest: None,
            }],
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
        let (empty, digest) = (ContentHash::of(b""), version("x").digest);
        let text = format!(
            r#"{{"format":1,"name":"a","version":1,"created_ms":0,"digest":"{digest}","files":[{{"path":"x","hash":"{empty}","bytes":0}}],"references":[{{"url":"s3://bucket/data"}}],"seal":""#
        );
        assert!(bytes.starts_with(text.as_bytes()));
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

    #[test]
    fn names_that_lead_elsewhere_are_refused() {
        let long = "x".repeat(129);
        for name in [
            "", ".", "..", "/", "a/b", "../a", "a\\b", "C:", "a:b", ".hidden", "-a", "a ", "a.",
            "a\0", "a\nb", "50%", &long,
        ] {
            assert!(
                ArtifactName::parse(name).unwrap_err().is_misuse(),
                "{name:?}"
            );
        }
        for name in ["a", "mnist_model", "模型 é", "a..b", &long[..128]] {
            assert_eq!(ArtifactName::parse(name).unwrap().as_str(), name);
        }
        for alias in ["latest", "v1", "v30", "a/b", ""] {
            assert!(parse_alias(alias).unwrap_err().is_misuse(), "{alias:?}");
        }
        for alias in ["best", "v", "v0", "v01", "v+1", "version"] {
            assert!(parse_alias(alias).is_ok(), "{alias:?}");
        }
    }

    #[test]
    fn queries_name_a_version() {
        for (text, version) in [
            ("model", VersionQuery::Latest),
            ("model:latest", VersionQuery::Latest),
            ("model:v12", VersionQuery::Number(12)),
            ("model:best", VersionQuery::Alias("best".to_owned())),
        ] {
            let query = Query::parse(text).unwrap();
            assert_eq!((query.name.as_str(), query.version), ("model", version));
        }
        for text in ["", ":", "model:", ":v1", "a:b:v1", "model:../x"] {
            assert!(Query::parse(text).unwrap_err().is_misuse(), "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn no_path_leaves_its_artifact(path in "[a-b./\\\\:]{0,8}|.{0,40}") {
            if check_path(&path).is_ok() {
                let path = std::path::Path::new(&path);
                prop_assert!(path.components().all(|x| matches!(x, std::path::Component::Normal(_))));
            }
        }
    }
}
