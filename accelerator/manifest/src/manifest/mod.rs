//! The manifest of a checkpoint.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::num::NonZeroUsize;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Kind, Result};
use crate::hash::ContentHash;
use crate::name::FileName;

/// The content of `manifest.json`.
///
/// The last field of the file, `seal`, is the sum of everything before it, so that no bit of it can
/// change unnoticed.
///
/// ```
/// use std::num::NonZeroUsize;
/// use accelerator_manifest::{Metadata, Folder, Manifest, Role};
///
/// # fn main() -> accelerator_manifest::Result<()> {
/// # let temporary = tempfile::tempdir().unwrap();
/// let mut draft = Folder::create(temporary.path())?.begin(0)?;
/// draft.write_bytes(&"model.bin".parse()?, Role::Model, b"weights")?;
/// let checkpoint = draft.commit(Metadata { step: 10, ..Metadata::new(NonZeroUsize::MIN) })?;
///
/// let manifest: &Manifest = checkpoint.manifest()?;
/// assert_eq!((manifest.format, manifest.number), (1, 1));
/// assert_eq!((manifest.metadata.step, manifest.bytes()), (10, 7));
/// println!("written by {} at {}", manifest.library, manifest.created);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(from = "ManifestFields")]
pub struct Manifest {
    /// The version of the format, 1; fields that a reader does not know do not
    /// raise it.
    pub format: u32,
    /// The number that the checkpoint was written under.
    pub number: u64,
    /// The time at which the checkpoint was written, in seconds since 1970.
    pub created: u64,
    /// The version of the library that wrote it.
    pub library: String,
    /// The record of the training program.
    #[serde(flatten)]
    pub metadata: Metadata,
    /// Every file of the checkpoint but the manifest itself.
    pub files: BTreeMap<FileName, FileEntry>,
}

/// The record of a training program about a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Metadata {
    /// The reason why the checkpoint was written.
    pub kind: CheckpointKind,
    /// Optimizer steps that are done.
    pub step: u64,
    /// The epoch that is to be continued, 0 first.
    pub epoch: u64,
    /// The number of ranks.
    pub world_size: NonZeroUsize,
    /// The seed of the job, where it has one.
    #[serde(default)]
    pub seed: Option<u64>,
    /// The position of each data loader.
    #[serde(default)]
    pub loaders: Vec<LoaderState>,
    /// The parameters and buffers of the models.
    #[serde(default)]
    pub parameters: Vec<Parameter>,
    /// Whatever else the writer wants to find again.
    #[serde(default)]
    pub extra: serde_json::Map<String, serde_json::Value>,
}

/// The reason why a checkpoint was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum CheckpointKind {
    /// All ranks wrote it together.
    Full,
    /// A survivor wrote it after another rank was lost.
    Emergency,
}

/// The position of a data loader.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoaderState {
    /// The number of samples of an epoch.
    pub samples: u64,
    /// The order of the samples, in words: it must be the same on resume.
    pub order: String,
    /// The policy for the last, incomplete batch, in words.
    pub tail: String,
    /// Samples of a full batch over all ranks.
    pub global_batch: u64,
    /// The epoch that is being read, 0 first.
    pub epoch: u64,
    /// Samples of the epoch that all ranks together have used.
    pub consumed: u64,
    /// Batches of the epoch that each rank has used.
    pub step: u64,
    /// Set once the program has seen the end of the epoch.
    pub finished: bool,
    /// Whatever else belongs to it.
    #[serde(default)]
    pub extra: serde_json::Map<String, serde_json::Value>,
}

/// A parameter or a buffer of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Parameter {
    /// The path of the value within the model: `layers.0.weight`.
    pub path: String,
    /// The id that the optimizer knows it by.
    pub id: String,
    /// The shape of the value.
    pub shape: Vec<u64>,
    /// The type of its elements: `f32`.
    pub dtype: String,
}

/// The manifest's entry for a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// The length of the file.
    pub bytes: u64,
    /// The sum of its content.
    pub blake3: ContentHash,
    /// The purpose of the file.
    pub role: Role,
}

/// The purpose of a file of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Role {
    /// A model's values, or the index of their files.
    Model,
    /// An optimizer's state.
    Optimizer,
    /// A schedule's state.
    Scheduler,
    /// The state of single ranks.
    Ranks,
    /// An object of the user's.
    Object,
    /// Anything else, such as a file that a hook has added.
    #[serde(other)]
    Other,
}

impl Metadata {
    /// Metadata of a full checkpoint at the start of training, to be filled in.
    #[must_use]
    pub fn new(world_size: NonZeroUsize) -> Self {
        Self {
            kind: CheckpointKind::Full,
            step: 0,
            epoch: 0,
            world_size,
            seed: None,
            loaders: Vec::new(),
            parameters: Vec::new(),
            extra: serde_json::Map::new(),
        }
    }
}

impl Manifest {
    /// The version that this crate writes, and the newest that it reads.
    pub(crate) const FORMAT: u32 = 1;

    /// The longest manifest that is read, in bytes.
    pub(crate) const LONGEST: usize = 64 << 20;

    /// The most files that a checkpoint may have, beside the manifest.
    pub(crate) const MOST_FILES: usize = 65_536;

    /// Reads the content of a `manifest.json`.
    ///
    /// # Errors
    ///
    /// [`Error::is_corrupt`] where it is not, bit for bit, what was written, or is inconsistent: it says what cannot
    /// be; [`Error::is_incompatible`] where a newer version wrote it.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self> {
        let corrupt = |message: String| Error::new(Kind::Corrupt, message);
        if bytes.len() > Self::LONGEST {
            let (found, most) = (bytes.len(), Self::LONGEST);
            return Err(corrupt(format!(
                "expected at most {most} bytes of a manifest, found {found}"
            )));
        }
        check_seal(bytes)?;
        check_bounds(bytes).map_err(corrupt)?;
        #[derive(Deserialize)]
        struct Head {
            format: u32,
        }
        let head: Head = serde_json::from_slice(bytes)
            .map_err(|error| corrupt(format!("expected a manifest in JSON: {error}")))?;
        if head.format > Self::FORMAT || head.format == 0 {
            let message = format!(
                "the manifest has format {}, and this version reads formats 1 to {}; use the \
                 version of the library that wrote it, or a newer one",
                head.format,
                Self::FORMAT
            );
            return Err(Error::new(Kind::Incompatible, message));
        }
        let manifest: Self = serde_json::from_slice(bytes)
            .map_err(|error| corrupt(format!("expected a manifest of format 1: {error}")))?;
        match manifest.defect() {
            None => Ok(manifest),
            Some(defect) => Err(corrupt(defect)),
        }
    }

    /// The bytes of all files together.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let sizes = self.files.values().map(|x| x.bytes);
        sizes.fold(0, u64::saturating_add)
    }

    /// The content of `manifest.json`, with its seal.
    pub(crate) fn to_bytes(&self) -> Result<Vec<u8>> {
        if let Some(defect) = self.defect() {
            return Err(Error::new(Kind::Misuse, defect));
        }
        let mut bytes = serde_json::to_vec_pretty(self).map_err(|error| {
            Error::new(
                Kind::Misuse,
                format!("cannot write the manifest as JSON: {error}"),
            )
            .with_source(error)
        })?;
        // What is left of an object when its end, "\n}", is cut off.
        bytes.truncate(bytes.len() - 2);
        seal(&mut bytes);
        if bytes.len() > Self::LONGEST {
            let message = format!(
                "the manifest would have {} bytes, more than the {} that are read back; put large \
                 values into files",
                bytes.len(),
                Self::LONGEST
            );
            return Err(Error::new(Kind::Misuse, message));
        }
        check_bounds(&bytes).map_err(|defect| {
            let message = format!("{defect}; put what is large into files");
            Error::new(Kind::Misuse, message)
        })?;
        Ok(bytes)
    }

    /// The inconsistency of the manifest, if there is one.
    fn defect(&self) -> Option<String> {
        if self.files.len() > Self::MOST_FILES {
            let (count, most) = (self.files.len(), Self::MOST_FILES);
            return Some(format!(
                "{count} files, more than the {most} that are allowed"
            ));
        }
        let folders: BTreeSet<&str> = self.files.keys().filter_map(FileName::folder).collect();
        if let Some(name) = self.files.keys().find(|x| folders.contains(x.as_str())) {
            return Some(format!("{name} is a file and a folder at once"));
        }
        let sizes = self.files.values().map(|x| x.bytes);
        if sizes
            .into_iter()
            .try_fold(0_u64, u64::checked_add)
            .is_none()
        {
            return Some("files of more than 2^64 bytes together".to_owned());
        }
        None
    }
}

/// The fields of a [`Manifest`] as the file has them, without nesting, so that serde reads each directly into its place
/// and skips unknown ones.
#[derive(Deserialize)]
struct ManifestFields {
    format: u32,
    number: u64,
    created: u64,
    library: String,
    kind: CheckpointKind,
    step: u64,
    epoch: u64,
    world_size: NonZeroUsize,
    #[serde(default)]
    seed: Option<u64>,
    #[serde(default)]
    loaders: Vec<LoaderState>,
    #[serde(default)]
    parameters: Vec<Parameter>,
    #[serde(default)]
    extra: serde_json::Map<String, serde_json::Value>,
    files: BTreeMap<FileName, FileEntry>,
}

impl From<ManifestFields> for Manifest {
    fn from(fields: ManifestFields) -> Self {
        Self {
            format: fields.format,
            number: fields.number,
            created: fields.created,
            library: fields.library,
            metadata: Metadata {
                kind: fields.kind,
                step: fields.step,
                epoch: fields.epoch,
                world_size: fields.world_size,
                seed: fields.seed,
                loaders: fields.loaders,
                parameters: fields.parameters,
                extra: fields.extra,
            },
            files: fields.files,
        }
    }
}

impl fmt::Display for CheckpointKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Full => "full",
            Self::Emergency => "emergency",
        })
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Model => "model",
            Self::Optimizer => "optimizer",
            Self::Scheduler => "scheduler",
            Self::Ranks => "ranks",
            Self::Object => "object",
            Self::Other => "other",
        })
    }
}

/// Fuzzer entry point: reads `bytes` as a loader does, and once more with a seal that fits.
#[cfg(any(test, feature = "fuzzing"))]
pub fn fuzz_manifest(bytes: &[u8]) {
    let _ = Manifest::parse(bytes);
    let mut sealed = bytes.to_vec();
    seal(&mut sealed);
    if let Ok(manifest) = Manifest::parse(&sealed) {
        let root = std::path::Path::new("root");
        assert!(manifest.files.keys().all(|x| x.at(root).starts_with(root)));
        let _ = manifest.bytes();
        // It may be too long once it is written with line breaks.
        if let Ok(bytes) = manifest.to_bytes() {
            assert!(Manifest::parse(&bytes).is_ok_and(|again| again == manifest));
        }
    }
}

/// The most values that a manifest may have: numbers, strings, lists and maps, including nested ones.
const MOST_VALUES: usize = 1 << 20;

/// The deepest nesting of lists and maps.
const DEEPEST: usize = 64;

/// Checks the number of values in a JSON text, and how deep they are nested. A value of two bytes can take hundreds of
/// bytes in memory, so the length of the text alone is a weak bound.
///
/// # Errors
///
/// A description of the bound that is exceeded.
fn check_bounds(bytes: &[u8]) -> Result<(), String> {
    let (mut values, mut depth) = (1, 0_usize);
    let mut bytes = bytes.iter();
    while let Some(byte) = bytes.next() {
        match byte {
            b'"' => skip_text(&mut bytes),
            // At most one value follows.
            b',' => values += 1,
            b'[' | b'{' => {
                values += 1;
                depth += 1;
            }
            b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > DEEPEST {
            return Err(format!(
                "values are in one another more than {} deep, which is the most that is allowed",
                DEEPEST
            ));
        }
        if values > MOST_VALUES {
            return Err(format!(
                "the manifest has more than the {} values that are allowed",
                MOST_VALUES
            ));
        }
    }
    Ok(())
}

/// Skips the rest of a string, including its closing quote.
fn skip_text<'a>(bytes: &mut impl Iterator<Item = &'a u8>) {
    while let Some(byte) = bytes.next() {
        match byte {
            b'"' => return,
            b'\\' => drop(bytes.next()),
            _ => {}
        }
    }
}

/// Appends the seal to what it is the sum of: an object without its end.
fn seal(body: &mut Vec<u8>) {
    let hash = ContentHash::of(body).to_string();
    body.extend_from_slice(SEAL);
    body.extend_from_slice(hash.as_bytes());
    body.extend_from_slice(END);
}

/// Checks that the content is, to the bit, the content that was sealed.
fn check_seal(bytes: &[u8]) -> Result<()> {
    let corrupt = |message: &str| Error::new(Kind::Corrupt, message);
    let sealed = bytes.strip_suffix(END).and_then(|rest| {
        let (rest, digits) = rest.split_at_checked(rest.len().checked_sub(DIGITS)?)?;
        Some((rest.strip_suffix(SEAL)?, digits))
    });
    let Some((body, digits)) = sealed else {
        return Err(corrupt(
            "the manifest does not end with its seal: it is cut off, or was edited",
        ));
    };
    // As text: digits in capitals would be the same sum, but not the same bits.
    if ContentHash::of(body).to_string().as_bytes() != digits {
        return Err(corrupt(
            "the seal of the manifest does not fit its content: it was changed after it was written",
        ));
    }
    Ok(())
}

const SEAL: &[u8] = b",\n  \"seal\": \"";
const END: &[u8] = b"\"\n}\n";
const DIGITS: usize = 64;

#[cfg(test)]
mod tests;
