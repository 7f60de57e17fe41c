//! A run as it is replayed from its journal.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::Value;

use crate::error::{Error, Kind, Result};
use crate::journal::{self, Followed, Follower, RankJournals, RunLock};
use crate::record::{Entry, Number, Record, RunId};
use crate::run_files::blob_path;
use crate::sink::Delivery;
pub use parts::{
    ArtifactUse, Hyperparameter, Media, MediaContent, Point, RunAttempt, RunEnd, RunStatus, Series,
    SystemPoint, WeightsDigest,
};

mod parts;

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
    /// The time of its creation, in milliseconds since 1970.
    pub created_ms: u64,
    /// The time of its last entry, in milliseconds since 1970.
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
    /// The digests of the weights of its models, in the order of recording.
    pub weights: Vec<WeightsDigest>,
    /// Steps of its checkpoints.
    pub checkpoints: Vec<Option<u64>>,
    /// The measurements of the hosts of its ranks, by rank and name.
    pub system: BTreeMap<usize, BTreeMap<String, Vec<SystemPoint>>>,
    /// The number of entries that could not be written.
    pub lost_entries: u64,
    /// The end of the last attempt, if it is recorded.
    pub end: Option<RunEnd>,
    /// The number of entries in its journal.
    pub entries: u64,
    #[serde(skip)]
    is_written_now: bool,
    #[serde(skip)]
    by_series: HashMap<u32, usize>,
    /// The hyperparameters of an attempt that has not logged yet.
    #[serde(skip)]
    begun_with: BTreeMap<String, Value>,
    /// The milliseconds from the start of each attempt to its last entry, together.
    #[serde(skip)]
    duration_ms: u64,
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
        Ok(reader.into_history())
    }

    /// Returns the status.
    #[must_use]
    pub fn status(&self) -> RunStatus {
        match &self.end {
            _ if self.is_written_now => RunStatus::Running,
            None => RunStatus::Interrupted,
            Some(end) => end.status.into(),
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

    /// Returns the last attempt that logged a step, by which the run has its ranks and provenance; if none did, the last
    /// one.
    #[must_use]
    pub fn last_attempt(&self) -> Option<&RunAttempt> {
        let logged = self.attempts.iter().rfind(|attempt| attempt.has_logged);
        logged.or(self.attempts.last())
    }

    /// Returns the time that its attempts took, from the start of each to its last entry, in milliseconds.
    #[must_use]
    pub fn duration_ms(&self) -> u64 {
        self.duration_ms
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
            weights: Vec::new(),
            checkpoints: Vec::new(),
            system: BTreeMap::new(),
            lost_entries: 0,
            end: None,
            entries: 1,
            is_written_now: false,
            by_series: HashMap::new(),
            begun_with: BTreeMap::new(),
            duration_ms: 0,
        })
    }

    fn take(&mut self, entry: Entry) {
        let Entry { n, ms, record } = entry;
        if !matches!(record, Record::Attempt { .. }) {
            self.duration_ms += ms.saturating_sub(self.last_ms);
        }
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
        if record.step().is_some()
            && let Some(attempt) = self.attempts.last_mut()
        {
            attempt.has_logged = true;
            let begun_with = std::mem::take(&mut self.begun_with);
            set_hyperparameters(&mut self.hyperparameters, begun_with);
        }
        match record {
            Record::Head { .. } | Record::Unknown | Record::System { .. } => {}
            Record::Attempt {
                attempt,
                world,
                launch,
                provenance,
            } => {
                self.end = None;
                self.begun_with.clear();
                self.attempts.push(RunAttempt {
                    attempt,
                    world,
                    started_ms: ms,
                    launch,
                    resumed: None,
                    provenance,
                    has_logged: false,
                    end: None,
                });
            }
            Record::Rewind { to } => {
                if let Some(attempt) = self.attempts.last_mut() {
                    attempt.resumed = Some(to);
                }
            }
            Record::Param { set } => {
                let (earlier, last) = match self.attempts.split_last() {
                    Some((last, earlier)) => (earlier, last),
                    None => return,
                };
                // A program that resumes after its end trains nothing by its hyperparameters.
                if !last.has_logged && earlier.iter().any(|attempt| attempt.has_logged) {
                    self.begun_with.extend(set);
                } else {
                    set_hyperparameters(&mut self.hyperparameters, set);
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
                if let Some(file) = blob_path(&self.folder, &hash) {
                    let image = MediaContent::Image {
                        file,
                        mime,
                        width,
                        height,
                    };
                    medium(key, step, image);
                }
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
            Record::Weights { step, digest } => {
                let weights = WeightsDigest { step, digest };
                if !self.weights.contains(&weights) {
                    self.weights.push(weights);
                }
            }
            Record::Checkpoint { step, .. } => self.checkpoints.push(step),
            Record::Lost { entries } => self.lost_entries += entries,
            Record::End { status, failure } => {
                let end = RunEnd {
                    status,
                    failure,
                    ms,
                };
                if let Some(attempt) = self.attempts.last_mut() {
                    attempt.end = Some(end.clone());
                }
                self.end = Some(end);
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

fn set_hyperparameters(known: &mut BTreeMap<String, Hyperparameter>, set: BTreeMap<String, Value>) {
    for (key, value) in set {
        let parameter = known.entry(key).or_insert_with(|| Hyperparameter {
            value: value.clone(),
            earlier: Vec::new(),
        });
        if parameter.value != value {
            let earlier = std::mem::replace(&mut parameter.value, value);
            parameter.earlier.push(earlier);
        }
    }
}

/// Reads a run repeatedly while it is written.
#[derive(Debug)]
pub(crate) struct HistoryReader {
    history: RunHistory,
    follower: Follower,
    ranks: RankJournals,
}

impl HistoryReader {
    /// Opens the run in a folder. [`poll`](Self::poll) reads more than its head.
    pub(crate) fn open(folder: impl AsRef<Path>) -> Result<Self> {
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
        let head = journal::first_entry(&path).map_err(missing)?;
        let head = head.ok_or_else(|| {
            Error::new(
                Kind::NotFound,
                format!(
                    "the run in {} has not begun: its journal is empty",
                    folder.display()
                ),
            )
        })?;
        Ok(Self {
            history: RunHistory::new(folder, &head)?,
            follower: Follower::open(&path, Delivery::Live)?,
            ranks: RankJournals::default(),
        })
    }

    /// Reads what was written since, and says whether anything has changed.
    ///
    /// # Errors
    ///
    /// If the journal cannot be read, or is damaged.
    pub(crate) fn poll(&mut self) -> Result<bool> {
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
        loop {
            let polled = self.ranks.poll(&self.history.folder, BATCH);
            if polled.is_empty() {
                break;
            }
            has_changed = true;
            for (rank, entries) in polled {
                for entry in entries {
                    self.history.take_system(rank, entry);
                }
            }
        }
        Ok(has_changed)
    }

    /// The run as it was at the last [`poll`](Self::poll).
    #[must_use]
    pub(crate) fn history(&self) -> &RunHistory {
        &self.history
    }

    fn into_history(self) -> RunHistory {
        self.history
    }
}

const BATCH: usize = 8192;
