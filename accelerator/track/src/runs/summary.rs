//! What a run amounts to, without its points.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::history::{ArtifactUse, Hyperparameter, RunEnd, RunHistory, RunStatus, Series};
use crate::journal::{JOURNAL, RunLock};
use crate::record::Number;
use crate::run_files::{self, SUMMARY};
use crate::run_id::RunId;

/// What a run amounts to, without its points.
///
/// ```
/// use accelerator_track::{Run, RunStatus, RunSummary};
///
/// # let temporary = tempfile::tempdir().unwrap();
/// let run = Run::builder("mnist").runs_folder(temporary.path()).start()?;
/// run.log("train", [("loss", 0.5)], 1, None);
/// run.log("train", [("loss", 0.25)], 2, None);
/// let folder = run.folder().to_owned();
/// run.finish()?;
///
/// let summary = RunSummary::read(folder)?;
/// assert_eq!(summary.status, RunStatus::Finished);
/// let loss = summary.series("train/loss").unwrap();
/// assert_eq!((loss.points, loss.last.0, loss.max.0), (2, 0.25, 0.5));
/// # Ok::<(), accelerator_track::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RunSummary {
    /// The run's folder.
    pub folder: PathBuf,
    /// Its identity.
    pub id: RunId,
    /// Its name, as it was given.
    pub name: String,
    /// What became of it.
    pub status: RunStatus,
    /// When it was created, in milliseconds since 1970.
    pub created_ms: u64,
    /// When it wrote its last entry.
    pub last_ms: u64,
    /// How often the program was started for it.
    pub attempts: usize,
    /// On how many ranks the last attempt ran.
    pub world: usize,
    /// The greatest step that was logged.
    pub last_step: Option<u64>,
    /// Hyperparameters by key.
    pub hyperparameters: BTreeMap<String, Hyperparameter>,
    /// Tags by key.
    pub tags: BTreeMap<String, String>,
    /// The metrics, in the order of their first points.
    pub series: Vec<SeriesSummary>,
    /// Artifacts that it made or used.
    pub artifacts: Vec<ArtifactUse>,
    /// How many entries could not be written.
    pub lost_entries: u64,
    /// How the last attempt ended, if it said so.
    pub end: Option<RunEnd>,
}

/// What a metric amounts to, without its points.
///
/// ```
/// fn describe(series: &accelerator_track::SeriesSummary) -> String {
///     format!("{}: {} at step {}", series.key, series.last.0, series.last_step)
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SeriesSummary {
    /// `kind/name`, as `train/loss`.
    pub key: String,
    /// How many points it has.
    pub points: usize,
    /// The least step.
    pub first_step: u64,
    /// The greatest step.
    pub last_step: u64,
    /// The value at the greatest step.
    pub last: Number,
    /// The least value; no number where all points are none.
    pub min: Number,
    /// The greatest value.
    pub max: Number,
}

impl RunSummary {
    /// Reads the run in a folder, or what was kept of it beside its journal when it was read before.
    ///
    /// # Errors
    ///
    /// If there is none, if a newer version wrote it, or if its journal is damaged.
    pub fn read(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        let state = JournalState::of(folder);
        if let Some(state) = &state
            && !RunLock::is_held(folder)
            && let Some(kept) = KeptSummary::read(folder, state)
        {
            return Ok(kept);
        }
        let summary = Self::of(&RunHistory::read(folder)?);
        // Of a run that is being written it would be out of date at once.
        if summary.status != RunStatus::Running
            && let Some(state) = state.filter(|x| Some(x) == JournalState::of(folder).as_ref())
        {
            KeptSummary::keep(&summary, state);
        }
        Ok(summary)
    }

    /// That of a run that was read.
    ///
    /// ```
    /// # let temporary = tempfile::tempdir().unwrap();
    /// # let run = accelerator_track::Run::builder("mnist").runs_folder(temporary.path()).start()?;
    /// # let folder = run.folder();
    /// let history = accelerator_track::RunHistory::read(folder)?;
    /// assert_eq!(accelerator_track::RunSummary::of(&history).id, history.id);
    /// # Ok::<(), accelerator_track::Error>(())
    /// ```
    #[must_use]
    pub fn of(history: &RunHistory) -> Self {
        Self {
            folder: history.folder.clone(),
            id: history.id,
            name: history.name.clone(),
            status: history.status(),
            created_ms: history.created_ms,
            last_ms: history.last_ms,
            attempts: history.attempts.len(),
            world: history.attempts.last().map_or(0, |x| x.world),
            last_step: history.last_step(),
            hyperparameters: history.hyperparameters.clone(),
            tags: history.tags.clone(),
            series: history
                .series
                .iter()
                .filter_map(SeriesSummary::of)
                .collect(),
            artifacts: history.artifacts.clone(),
            lost_entries: history.lost_entries,
            end: history.end.clone(),
        }
    }

    /// The series of a key, as `train/loss`.
    #[must_use]
    pub fn series(&self, key: &str) -> Option<&SeriesSummary> {
        self.series.iter().find(|series| series.key == key)
    }

    /// From its creation to its last entry, in milliseconds.
    #[must_use]
    pub fn duration_ms(&self) -> u64 {
        self.last_ms.saturating_sub(self.created_ms)
    }
}

impl SeriesSummary {
    /// None where a resume has superseded all its points.
    fn of(series: &Series) -> Option<Self> {
        let first = series.points.first()?;
        let mut summary = Self {
            key: series.key.clone(),
            points: series.points.len(),
            first_step: first.step,
            last_step: first.step,
            last: Number(first.value),
            min: Number(f64::NAN),
            max: Number(f64::NAN),
        };
        for point in &series.points {
            summary.first_step = summary.first_step.min(point.step);
            if point.step >= summary.last_step {
                summary.last_step = point.step;
                summary.last = Number(point.value);
            }
            // Of a number and none, `min` and `max` give the number.
            summary.min.0 = summary.min.0.min(point.value);
            summary.max.0 = summary.max.0.max(point.value);
        }
        Some(summary)
    }
}

/// A journal's length and when it was written, by which a change is seen.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub(super) struct JournalState {
    bytes: u64,
    modified_ns: u128,
}

impl JournalState {
    pub(super) fn of(folder: &Path) -> Option<Self> {
        let file = fs::metadata(folder.join(JOURNAL)).ok()?;
        let modified = file.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
        Some(Self {
            bytes: file.len(),
            modified_ns: modified.as_nanos(),
        })
    }
}

/// The file `summary.json`, which may be deleted at any time.
#[derive(Serialize, Deserialize)]
struct KeptSummary<S> {
    version: u32,
    journal: JournalState,
    summary: S,
}

impl KeptSummary<RunSummary> {
    fn read(folder: &Path, state: &JournalState) -> Option<RunSummary> {
        let bytes = fs::read(folder.join(SUMMARY)).ok()?;
        let kept: Self = serde_json::from_slice(&bytes).ok()?;
        let is_good = kept.version == VERSION && kept.journal == *state;
        // The folder may have been moved since.
        is_good.then(|| RunSummary {
            folder: folder.to_owned(),
            ..kept.summary
        })
    }
}

impl KeptSummary<&RunSummary> {
    /// The folder may be read-only, or another user's: then the run is read again next time.
    fn keep(summary: &RunSummary, journal: JournalState) {
        let kept = KeptSummary {
            version: VERSION,
            journal,
            summary,
        };
        let written = serde_json::to_vec(&kept)
            .map_err(std::io::Error::from)
            .and_then(|bytes| {
                let mut file = run_files::staged(&summary.folder)?;
                file.write_all(&bytes)?;
                file.persist(summary.folder.join(SUMMARY))?;
                Ok(())
            });
        if let Err(error) = written {
            tracing::debug!(folder = %summary.folder.display(), %error, "no summary is kept");
        }
    }
}

/// Of the file. Another one is written anew.
const VERSION: u32 = 1;
