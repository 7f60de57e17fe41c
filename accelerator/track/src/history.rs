//! A run as it is replayed from its journal.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize, Serializer};
use serde_json::Value;

use crate::error::{Error, Kind, Result};
use crate::journal::{self, Followed, Follower, RunLock};
use crate::record::{ArtifactRole, EndStatus, Entry, Number, Record};
use crate::run_id::RunId;
use crate::sink::Delivery;

/// A run, with all that still counts: what a resume superseded is left out.
///
/// ```
/// use accelerator_track::{Run, RunHistory, RunStatus};
///
/// # fn main() -> accelerator_track::Result<()> {
/// # let temporary = tempfile::tempdir().unwrap();
/// let run = Run::builder("mnist").runs_folder(temporary.path()).start()?;
/// run.log("train", [("loss", 0.5)], 1, None);
/// let folder = run.folder().to_owned();
/// run.finish()?;
///
/// let history = RunHistory::read(folder)?;
/// assert_eq!(history.status(), RunStatus::Finished);
/// assert_eq!(history.series("train/loss").unwrap().points[0].value, 0.5);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct RunHistory {
    /// The run's folder.
    pub folder: PathBuf,
    /// Its identity.
    pub id: RunId,
    /// Its name, as it was given.
    pub name: String,
    /// When it was created, in milliseconds since 1970.
    pub created_ms: u64,
    /// When it wrote its last entry.
    pub last_ms: u64,
    /// Its starts; restarts and resumes are further ones.
    pub attempts: Vec<RunAttempt>,
    /// Hyperparameters by key; those that are nested are joined with dots.
    pub hyperparameters: BTreeMap<String, Hyperparameter>,
    /// Tags by key.
    pub tags: BTreeMap<String, String>,
    /// The metrics, in the order of their first points.
    pub series: Vec<Series>,
    /// Texts, histograms, images and plots, in the order in which they were logged.
    pub media: Vec<Media>,
    /// Artifacts that it made or used, each once.
    pub artifacts: Vec<ArtifactUse>,
    /// Steps of its checkpoints.
    pub checkpoints: Vec<Option<u64>>,
    /// What the hosts of its ranks measured, by rank and name.
    pub system: BTreeMap<usize, BTreeMap<String, Vec<SystemPoint>>>,
    /// How many entries could not be written.
    pub lost_entries: u64,
    /// How the last attempt ended, if it said so.
    pub end: Option<RunEnd>,
    /// How many entries its journal has.
    pub entries: u64,
    #[serde(skip)]
    is_written_now: bool,
    #[serde(skip)]
    by_series: HashMap<u32, usize>,
}

impl RunHistory {
    /// Reads the run in a folder.
    ///
    /// # Errors
    ///
    /// If there is none, if a newer version wrote it, or if its journal is damaged.
    pub fn read(folder: impl AsRef<Path>) -> Result<Self> {
        let mut reader = HistoryReader::open(folder)?;
        reader.poll()?;
        Ok(reader.history)
    }

    /// What became of it.
    #[must_use]
    pub fn status(&self) -> RunStatus {
        match &self.end {
            _ if self.is_written_now => RunStatus::Running,
            None => RunStatus::Interrupted,
            Some(end) => match end.status {
                EndStatus::Finished => RunStatus::Finished,
                EndStatus::Failed => RunStatus::Failed,
                EndStatus::Preempted => RunStatus::Preempted,
            },
        }
    }

    /// The series of a key, as `train/loss`.
    #[must_use]
    pub fn series(&self, key: &str) -> Option<&Series> {
        self.series.iter().find(|series| series.key == key)
    }

    /// The greatest step that was logged.
    #[must_use]
    pub fn last_step(&self) -> Option<u64> {
        let points = self.series.iter().flat_map(|series| &series.points);
        points.map(|point| point.step).max()
    }

    /// From its creation to its last entry, in milliseconds.
    #[must_use]
    pub fn duration_ms(&self) -> u64 {
        self.last_ms.saturating_sub(self.created_ms)
    }

    pub(crate) fn new(folder: &Path, head: &Entry) -> Result<Self> {
        let Record::Head { version, run, name } = &head.record else {
            return Err(Error::new(
                Kind::Corrupt,
                format!(
                    "the journal of {} does not begin with its head",
                    folder.display()
                ),
            ));
        };
        if *version > journal::VERSION {
            return Err(Error::new(
                Kind::Incompatible,
                format!(
                    "the run in {} is of format {version}, and this program reads formats up to {}; use a newer one",
                    folder.display(),
                    journal::VERSION
                ),
            ));
        }
        Ok(Self {
            folder: folder.to_owned(),
            id: *run,
            name: name.clone(),
            created_ms: head.ms,
            last_ms: head.ms,
            attempts: Vec::new(),
            hyperparameters: BTreeMap::new(),
            tags: BTreeMap::new(),
            series: Vec::new(),
            media: Vec::new(),
            artifacts: Vec::new(),
            checkpoints: Vec::new(),
            system: BTreeMap::new(),
            lost_entries: 0,
            end: None,
            entries: 1,
            is_written_now: false,
            by_series: HashMap::new(),
        })
    }

    fn take(&mut self, entry: Entry) {
        let Entry { n, ms, record } = entry;
        self.last_ms = self.last_ms.max(ms);
        self.entries = n + 1;
        let mut medium = |key, step, content| {
            self.media.push(Media {
                key,
                step,
                ms,
                content,
            });
        };
        match record {
            Record::Head { .. } | Record::Unknown | Record::System { .. } => {}
            Record::Attempt {
                attempt,
                world,
                provenance,
            } => {
                self.end = None;
                self.attempts.push(RunAttempt {
                    attempt,
                    world,
                    started_ms: ms,
                    resumed: None,
                    provenance,
                });
            }
            Record::Rewind { to } => {
                if let Some(attempt) = self.attempts.last_mut() {
                    attempt.resumed = Some(to);
                }
            }
            Record::Param { set } => {
                for (key, value) in set {
                    let known = self.hyperparameters.entry(key);
                    let parameter = known.or_insert_with(|| Hyperparameter {
                        value: value.clone(),
                        earlier: Vec::new(),
                    });
                    if parameter.value != value {
                        let earlier = std::mem::replace(&mut parameter.value, value);
                        parameter.earlier.push(earlier);
                    }
                }
            }
            Record::Tag { set } => self.tags.extend(set),
            Record::Series { i, key } => {
                self.by_series.insert(i, self.series.len());
                self.series.push(Series {
                    key,
                    points: Vec::new(),
                });
            }
            Record::Metrics(metrics) => {
                for point in metrics.points {
                    let Some(&at) = self.by_series.get(&point.series) else {
                        continue;
                    };
                    self.series[at].points.push(Point {
                        step: metrics.step,
                        epoch: metrics.epoch,
                        value: point.value.0,
                        count: point.count,
                        ms,
                    });
                }
            }
            Record::Text { key, step, text } => medium(key, step, MediaContent::Text(text)),
            Record::Histogram { key, step, bins } => {
                let bins = bins.into_iter().map(|bin| bin.map(|Number(x)| x));
                medium(key, step, MediaContent::Histogram(bins.collect()));
            }
            Record::Image {
                key,
                step,
                hash,
                mime,
                width,
                height,
            } => {
                let image = MediaContent::Image {
                    file: self.folder.join("blobs").join(hash),
                    mime,
                    width,
                    height,
                };
                medium(key, step, image);
            }
            Record::Plot {
                key,
                step,
                x_label,
                y_label,
                points,
            } => {
                let points = points.into_iter().map(|point| point.map(|Number(x)| x));
                let plot = MediaContent::Plot {
                    x_label,
                    y_label,
                    points: points.collect(),
                };
                medium(key, step, plot);
            }
            Record::Artifact {
                role,
                name,
                version,
                digest,
            } => {
                let artifact = ArtifactUse {
                    role,
                    name,
                    version,
                    digest,
                };
                if !self.artifacts.contains(&artifact) {
                    self.artifacts.push(artifact);
                }
            }
            Record::Checkpoint { step, .. } => self.checkpoints.push(step),
            Record::Lost { entries } => self.lost_entries += entries,
            Record::End { status, failure } => {
                self.end = Some(RunEnd {
                    status,
                    failure,
                    ms,
                });
            }
        }
    }

    fn take_system(&mut self, rank: usize, entry: Entry) {
        let Record::System { values } = entry.record else {
            return;
        };
        let of_rank = self.system.entry(rank).or_default();
        for (name, value) in values {
            of_rank.entry(name).or_default().push(SystemPoint {
                ms: entry.ms,
                value: value.0,
            });
        }
    }
}

/// Reads a run that may be being written, again and again.
///
/// ```
/// use accelerator_track::{HistoryReader, Run};
///
/// # fn main() -> accelerator_track::Result<()> {
/// # let temporary = tempfile::tempdir().unwrap();
/// let run = Run::builder("mnist").runs_folder(temporary.path()).start()?;
/// let mut reader = HistoryReader::open(run.folder())?;
/// run.log("train", [("loss", 0.5)], 1, None);
/// run.flush()?;
/// assert!(reader.poll()?);
/// assert_eq!(reader.history().last_step(), Some(1));
/// assert!(!reader.poll()?, "nothing has changed");
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct HistoryReader {
    history: RunHistory,
    follower: Follower,
    ranks: BTreeMap<usize, Follower>,
}

impl HistoryReader {
    /// Opens the run in a folder, of which [`poll`](Self::poll) reads more than its head.
    ///
    /// # Errors
    ///
    /// If there is none, or a newer version wrote it.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        let path = folder.join(journal::JOURNAL);
        let missing = |error: Error| match error.is_not_found() {
            true => Error::new(
                Kind::NotFound,
                format!(
                    "there is no run in {}: expected the file {}",
                    folder.display(),
                    journal::JOURNAL
                ),
            ),
            false => error,
        };
        let mut follower = Follower::open(&path, Delivery::Live).map_err(missing)?;
        let head = match follower.poll(1)? {
            Followed::Entries(mut entries) if !entries.is_empty() => entries.remove(0),
            _ => {
                return Err(Error::new(
                    Kind::NotFound,
                    format!(
                        "the run in {} has not begun: its journal is empty",
                        folder.display()
                    ),
                ));
            }
        };
        Ok(Self {
            history: RunHistory::new(folder, &head)?,
            follower,
            ranks: BTreeMap::new(),
        })
    }

    /// Reads what was written since, and says whether anything has changed.
    ///
    /// # Errors
    ///
    /// If the journal cannot be read, or is damaged.
    pub fn poll(&mut self) -> Result<bool> {
        let is_written_now = RunLock::is_held(&self.history.folder);
        let mut has_changed =
            std::mem::replace(&mut self.history.is_written_now, is_written_now) != is_written_now;
        loop {
            let entries = match self.follower.poll(BATCH)? {
                Followed::Entries(entries) => entries,
                Followed::Superseded => {
                    *self = Self::open(&self.history.folder)?;
                    self.history.is_written_now = is_written_now;
                    has_changed = true;
                    continue;
                }
            };
            if entries.is_empty() {
                break;
            }
            has_changed = true;
            for entry in entries {
                self.history.take(entry);
            }
        }
        for (rank, path) in journal::rank_journals(&self.history.folder) {
            let follower = match self.ranks.entry(rank) {
                std::collections::btree_map::Entry::Occupied(known) => known.into_mut(),
                std::collections::btree_map::Entry::Vacant(new) => {
                    new.insert(Follower::open(&path, Delivery::Live)?)
                }
            };
            while let Followed::Entries(entries) = follower.poll(BATCH)? {
                if entries.is_empty() {
                    break;
                }
                has_changed = true;
                for entry in entries {
                    self.history.take_system(rank, entry);
                }
            }
        }
        Ok(has_changed)
    }

    /// The run as it was at the last [`poll`](Self::poll).
    #[must_use]
    pub fn history(&self) -> &RunHistory {
        &self.history
    }
}

/// What became of a run.
///
/// ```
/// assert_eq!(accelerator_track::RunStatus::Interrupted.to_string(), "interrupted");
/// ```
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RunStatus {
    /// A process writes it.
    Running,
    /// It did what it was started for.
    Finished,
    /// It failed.
    Failed,
    /// It was told to leave, and can go on.
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

/// A start of the program.
///
/// ```
/// fn describe(attempt: &accelerator_track::RunAttempt) -> String {
///     format!("attempt {} on {} ranks", attempt.attempt, attempt.world)
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct RunAttempt {
    /// Counts them from 0.
    pub attempt: u32,
    /// How many ranks there were.
    pub world: usize,
    /// When it began, in milliseconds since 1970.
    pub started_ms: u64,
    /// Whether it went back, and to the checkpoint of which step.
    pub resumed: Option<Option<u64>>,
    /// Where the program came from and what it ran on.
    pub provenance: Value,
}

/// The value of a hyperparameter.
///
/// ```
/// fn has_changed(parameter: &accelerator_track::Hyperparameter) -> bool {
///     !parameter.earlier.is_empty()
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Hyperparameter {
    /// The latest.
    pub value: Value,
    /// Those of earlier attempts, where they were different.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub earlier: Vec<Value>,
}

/// The values of a metric over steps.
///
/// ```
/// fn last(series: &accelerator_track::Series) -> Option<f64> {
///     Some(series.points.last()?.value)
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Series {
    /// `kind/name`, as `train/loss`.
    pub key: String,
    /// In the order in which they were logged.
    pub points: Vec<Point>,
}

/// The value of a metric at a step.
///
/// ```
/// fn is_good(point: &accelerator_track::Point) -> bool {
///     point.value.is_finite()
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Point {
    /// The step.
    pub step: u64,
    /// The epoch, where it was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub epoch: Option<f64>,
    /// The value; it may be infinite or no number.
    #[serde(serialize_with = "number")]
    pub value: f64,
    /// How many samples it is a mean of, where that was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub count: Option<u64>,
    /// When it was logged, in milliseconds since 1970.
    pub ms: u64,
}

/// A text, histogram, image or plot.
///
/// ```
/// fn title(media: &accelerator_track::Media) -> String {
///     format!("{} at step {}", media.key, media.step)
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Media {
    /// `kind/name`.
    pub key: String,
    /// The step.
    pub step: u64,
    /// When it was logged, in milliseconds since 1970.
    pub ms: u64,
    /// What it is.
    #[serde(flatten)]
    pub content: MediaContent,
}

/// What a [`Media`] is.
///
/// ```
/// use accelerator_track::MediaContent;
///
/// assert_eq!(MediaContent::Text("**good**".to_owned()), MediaContent::Text("**good**".to_owned()));
/// ```
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
        /// In pixels.
        width: u32,
        /// In pixels.
        height: u32,
    },
    /// A curve.
    Plot {
        /// What the axis to the right counts.
        x_label: String,
        /// What the axis upwards counts.
        y_label: String,
        /// Its points.
        #[serde(serialize_with = "numbers")]
        points: Vec<[f64; 2]>,
    },
}

/// A version of an artifact that a run made or used.
///
/// ```
/// fn reference(artifact: &accelerator_track::ArtifactUse) -> String {
///     format!("{}:v{}", artifact.name, artifact.version)
/// }
/// ```
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ArtifactUse {
    /// Which of the two.
    pub role: ArtifactRole,
    /// The artifact's name.
    pub name: String,
    /// Its version.
    pub version: u32,
    /// The hash of its contents.
    pub digest: String,
}

/// What the host of a rank measured.
///
/// ```
/// fn mib(memory: &accelerator_track::SystemPoint) -> f64 {
///     memory.value / f64::from(1 << 20)
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct SystemPoint {
    /// When, in milliseconds since 1970.
    pub ms: u64,
    /// How much.
    #[serde(serialize_with = "number")]
    pub value: f64,
}

/// How a run ended.
///
/// ```
/// fn is_good(end: &accelerator_track::RunEnd) -> bool {
///     end.status == accelerator_track::EndStatus::Finished
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RunEnd {
    /// How.
    pub status: EndStatus,
    /// Why it failed.
    pub failure: Option<Value>,
    /// When, in milliseconds since 1970.
    pub ms: u64,
}

/// JSON has no numbers for what is not finite.
pub(crate) fn number<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    Number(*value).serialize(serializer)
}

fn numbers<S: Serializer, const N: usize>(
    rows: &[[f64; N]],
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(rows.iter().map(|row| row.map(Number).to_vec()))
}

const BATCH: usize = 8192;
