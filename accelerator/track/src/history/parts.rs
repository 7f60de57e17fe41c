//! The parts of a run's history.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize, Serializer};
use serde_json::Value;

use crate::record::{ArtifactRole, EndStatus, Number};

/// The status of a run.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RunStatus {
    /// A process writes it.
    Running,
    /// It did what it was started for.
    Finished,
    /// It failed.
    Failed,
    /// It was asked to stop, and can continue.
    Preempted,
    /// It ended without a word: it was killed, or its host went away.
    Interrupted,
}

impl fmt::Display for RunStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Running => "running",
            Self::Finished => "finished",
            Self::Failed => "failed",
            Self::Preempted => "preempted",
            Self::Interrupted => "interrupted",
        })
    }
}

impl From<EndStatus> for RunStatus {
    fn from(status: EndStatus) -> Self {
        match status {
            EndStatus::Finished => Self::Finished,
            EndStatus::Failed => Self::Failed,
            EndStatus::Preempted => Self::Preempted,
        }
    }
}

/// A start of the program.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct RunAttempt {
    /// Counts them from 0.
    pub attempt: u32,
    /// The number of ranks.
    pub world: usize,
    /// The time at which it began, in milliseconds since 1970.
    pub started_ms: u64,
    /// The launch that it belongs to, which is the same for the restarts of a launcher.
    pub launch: Option<String>,
    /// Set if it resumed: the step of the checkpoint, if there was one.
    pub resumed: Option<Option<u64>>,
    /// The program's origin and machine, as recorded.
    pub provenance: Value,
    /// Set if it logged a step that counts. An attempt to resume a program that had finished logs none.
    pub has_logged: bool,
    /// The end of this attempt, if it was recorded.
    pub end: Option<RunEnd>,
}

/// The value of a hyperparameter.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Hyperparameter {
    /// The latest.
    pub value: Value,
    /// Earlier, different values.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub earlier: Vec<Value>,
}

/// The values of a metric over steps.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Series {
    /// `kind/name`, as `train/loss`.
    pub key: String,
    /// The points, in the order in which they were logged.
    pub points: Vec<Point>,
}

/// The value of a metric at a step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Point {
    /// The step.
    pub step: u64,
    /// The epoch, if it was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub epoch: Option<f64>,
    /// The value; it may be infinite or no number.
    #[serde(serialize_with = "number")]
    pub value: f64,
    /// The number of samples that it is a mean of, if it was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub count: Option<u64>,
    /// The time at which it was logged, in milliseconds since 1970.
    pub ms: u64,
}

/// A text, histogram, image or plot.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Media {
    /// `kind/name`.
    pub key: String,
    /// The step.
    pub step: u64,
    /// The time at which it was logged, in milliseconds since 1970.
    pub ms: u64,
    /// Its content.
    #[serde(flatten)]
    pub content: MediaContent,
}

/// The content of a [`Media`].
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum MediaContent {
    /// Markdown.
    Text(String),
    /// Left and right edge of each bin, and how many values are in it.
    Histogram(#[serde(serialize_with = "numbers")] Vec<[f64; 3]>),
    /// An image.
    Image {
        /// Its file.
        file: PathBuf,
        /// `image/png` or `image/jpeg`.
        mime: String,
        /// The width in pixels.
        width: u32,
        /// The height in pixels.
        height: u32,
    },
    /// A curve.
    Plot {
        /// The label of the x axis.
        x_label: String,
        /// The label of the y axis.
        y_label: String,
        /// Its points.
        #[serde(serialize_with = "numbers")]
        points: Vec<[f64; 2]>,
    },
}

/// A version of an artifact that a run made or used.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ArtifactUse {
    /// The run's part in it.
    pub role: ArtifactRole,
    /// The artifact's name.
    pub name: String,
    /// Its version.
    pub version: u32,
    /// The hash of its contents.
    pub digest: String,
}

/// A digest of the weights of a model; equal digests mean equal bits.
///
/// ```
/// use accelerator_track::{Run, RunHistory};
///
/// # fn main() -> accelerator_track::Result<()> {
/// # let temporary = tempfile::tempdir().unwrap();
/// let run = Run::builder("mnist").runs_folder(temporary.path()).start()?;
/// run.log_weights("af1349b9", 20);
/// let folder = run.folder().to_owned();
/// run.finish()?;
/// assert_eq!(RunHistory::read(folder)?.weights[0].step, 20);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct WeightsDigest {
    /// The greatest step that was logged before; 0 if none was.
    pub step: u64,
    /// A hash of their bits, hexadecimal.
    pub digest: String,
}

/// A measurement of a rank's host.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct SystemPoint {
    /// The time of the value, in milliseconds since 1970.
    pub ms: u64,
    /// The value.
    #[serde(serialize_with = "number")]
    pub value: f64,
}

/// The end of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RunEnd {
    /// Its status.
    pub status: EndStatus,
    /// The cause of its failure.
    pub failure: Option<Value>,
    /// The time of the end, in milliseconds since 1970.
    pub ms: u64,
}

/// JSON has no numbers for what is not finite.
fn number<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    Number(*value).serialize(serializer)
}

fn numbers<S: Serializer, const N: usize>(
    rows: &[[f64; N]],
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(rows.iter().map(|row| row.map(Number).to_vec()))
}
