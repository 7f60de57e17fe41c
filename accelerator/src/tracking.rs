//! The run that this rank's training belongs to.

use core::fmt;
use std::cell::Cell;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

use accelerator_collective::ProcessGroup;
use accelerator_host::sync::Mutex;
use accelerator_track::internal::SystemSampler;
use accelerator_track::{CsvFile, Run, RunBuilder, RunHistory, RunMark, Sink, TensorBoard};
use serde::{Deserialize, Serialize};

use crate::core::error;

/// The knowledge of a rank about the run. Rank 0 writes it; the others know which one it is.
#[derive(Debug)]
pub(crate) struct Tracking {
    rank: usize,
    state: RwLock<TrackingState>,
    /// The greatest step that this rank has logged, and 1; 0 where it has logged none.
    steps: AtomicU64,
    /// The values that this rank has logged at its greatest step, which rank 0 may not have recorded when it is lost.
    /// `None` if the run cannot continue on this rank.
    latest: Option<Mutex<Vec<LoggedValues>>>,
}

/// The arguments of a call that logs values.
#[derive(Clone, Debug)]
struct LoggedValues {
    kind: String,
    /// Names and values; a mean also has its number of samples.
    values: Vec<(String, f64, Option<u64>)>,
    step: u64,
    epoch: Option<f64>,
}

#[derive(Debug, Default)]
struct TrackingState {
    place: Option<RunPlace>,
    run: Option<Run>,
    sampler: Option<SystemSampler>,
    /// The mark of the checkpoint that was resumed before there was a run.
    resumed: Option<RunMark>,
    /// A text about a loss that the run has yet to record, and its step.
    recovery: Option<(String, u64)>,
    /// Values that the run may lack when it continues.
    unrecorded: Vec<LoggedValues>,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct RunPlace {
    folder: PathBuf,
    mark: RunMark,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum RunEnding {
    Finished,
    Preempted,
    /// The run continues in the next group.
    Regrouped,
}

impl Tracking {
    /// Creates the knowledge of this rank of the group.
    pub(crate) fn new(group: &ProcessGroup) -> Self {
        let may_continue = group.rank() > 0 && group.continues_on_loss();
        Self {
            rank: group.rank(),
            state: RwLock::default(),
            steps: AtomicU64::new(0),
            latest: may_continue.then(Mutex::default),
        }
    }

    /// The mark from which a run is to continue that is begun now.
    pub(crate) fn resumed(&self) -> Option<RunMark> {
        self.read().resumed.clone()
    }

    /// The run that rank 0 writes, in place of the one before; gives what the others must know. One of the same name
    /// continues.
    pub(crate) fn begin<E>(
        &self,
        name: &str,
        start: impl FnOnce(Option<RunMark>) -> Result<Run, E>,
    ) -> Result<Option<RunPlace>, E> {
        let Some(mut state) = self.write() else {
            return Ok(None);
        };
        let resumed = state.resumed.take();
        let run = match state.run.take_if(|run| run.name() == name) {
            Some(run) => run,
            None => {
                finish(&mut state, Run::finish);
                start(resumed)?
            }
        };
        record(&run, &std::mem::take(&mut state.unrecorded));
        if let Some((text, step)) = state.recovery.take() {
            run.log_text(RECOVERY, &text, step);
        }
        let place = RunPlace::of(&run);
        state.run = Some(run);
        Ok(place)
    }

    /// Takes part in the run of rank 0, or in none.
    pub(crate) fn join(&self, place: Option<RunPlace>) {
        let Some(mut state) = self.write() else {
            return;
        };
        let folder = place.as_ref().map(|place| &place.folder);
        if state.place.as_ref().map(|place| &place.folder) != folder {
            state.sampler = None;
        }
        if state.sampler.is_none()
            && let Some(folder) = folder
        {
            match SystemSampler::start(folder, self.rank, SAMPLE_EVERY) {
                Ok(sampler) => state.sampler = Some(sampler),
                // On another host, which does not share the folder.
                Err(error) if error.is_not_found() => tracing::debug!(%error, "no system metrics"),
                Err(error) => tracing::warn!(%error, "no system metrics"),
            }
        }
        let step = place.as_ref().and_then(|place| place.mark.step);
        let steps = step.map_or(0, |step| step + 1);
        self.steps.store(steps, Ordering::Relaxed);
        state.place = place;
    }

    pub(crate) fn with<T>(&self, work: impl FnOnce(&Run) -> T) -> Option<T> {
        let state = self.read();
        let _inside = Inside::enter();
        state.run.as_ref().map(work)
    }

    pub(crate) fn note(&self, step: u64) {
        self.steps
            .fetch_max(step.saturating_add(1), Ordering::Relaxed);
    }

    /// Logs values on rank 0; the other ranks note the step.
    pub(crate) fn log<'a>(
        &self,
        kind: &str,
        values: impl IntoIterator<Item = (&'a str, f64, Option<u64>)>,
        step: u64,
        epoch: Option<f64>,
    ) {
        self.note(step);
        let Some(latest) = &self.latest else {
            self.with(|run| run.log_values(kind, values, step, epoch));
            return;
        };
        let values = values.into_iter();
        let values = values.map(|(name, value, count)| (name.to_owned(), value, count));
        let logged = LoggedValues {
            kind: kind.to_owned(),
            values: values.collect(),
            step,
            epoch,
        };
        let mut latest = latest.lock();
        latest.retain(|before| before.step >= step);
        if latest.len() < MOST_REMEMBERED {
            latest.push(logged);
        }
    }

    pub(crate) fn writes(&self) -> bool {
        self.read().run.is_some()
    }

    pub(crate) fn weights(&self, digest: &str) {
        let step = self.steps.load(Ordering::Relaxed).saturating_sub(1);
        self.with(|run| run.log_weights(digest, step));
    }

    /// Returns the place of the run, for a checkpoint that is saved now. A rank that does not write it knows only the
    /// steps.
    pub(crate) fn mark(&self) -> Option<RunMark> {
        let state = self.read();
        if let Some(run) = &state.run {
            return run
                .mark()
                .inspect_err(|error| {
                    error::warn(&format!("the checkpoint does not know its run: {error}"));
                })
                .ok();
        }
        let place = state.place.as_ref()?;
        Some(RunMark {
            step: self.steps.load(Ordering::Relaxed).checked_sub(1),
            ..place.mark.clone()
        })
    }

    /// Continues the run of the lost rank 0 on this rank; `before` is this rank's knowledge in the failed group.
    pub(crate) fn continue_from(&self, before: &Self, mark: Option<RunMark>) {
        self.resume(mark);
        if let (Some(mut state), Some(latest)) = (self.write(), &before.latest) {
            state.unrecorded = latest.lock().clone();
        }
    }

    /// Records in the run, now or when it continues, that ranks were lost and the others continue.
    pub(crate) fn recovered(&self, text: String, step: u64) {
        if self
            .with(|run| run.log_text(RECOVERY, &text, step))
            .is_none()
            && let Some(mut state) = self.write()
        {
            state.recovery = Some((text, step));
        }
    }

    pub(crate) fn checkpoint_saved(&self, mark: &RunMark) {
        self.with(|run| run.checkpoint_saved(mark));
    }

    /// Continues from a checkpoint with that mark, on rank 0; gives what the others must know.
    pub(crate) fn resume(&self, mark: Option<RunMark>) -> Option<RunPlace> {
        let mut state = self.write()?;
        let mark = match (mark, &state.run) {
            (Some(mark), Some(_)) => mark,
            (mark, None) => {
                state.resumed = mark;
                return None;
            }
            (None, Some(run)) => return RunPlace::of(run),
        };
        let run = state.run.take()?;
        match run.resume(&mark) {
            Ok(run) => state.run = Some(run),
            Err(error) => untracked(&error),
        }
        state.run.as_ref().and_then(RunPlace::of)
    }

    /// Ends the run, as one that failed if there is a failure.
    pub(crate) fn end(&self, ending: RunEnding, failure: Option<&str>) {
        let Some(mut state) = self.write() else {
            return;
        };
        state.sampler = None;
        match (failure, ending) {
            (Some(failure), _) => finish(&mut state, |run| run.fail(failure)),
            (None, RunEnding::Finished) => finish(&mut state, Run::finish),
            (None, RunEnding::Preempted) => finish(&mut state, Run::preempted),
            (None, RunEnding::Regrouped) => {}
        }
        state.place = None;
    }

    /// Lets a run that was [left](RunEnding::Regrouped) continue in another group.
    pub(crate) fn hand_over_to(&self, next: &Self) {
        if let (Some(mut next), Some(mut state)) = (next.write(), self.write()) {
            next.run = state.run.take();
        }
    }

    fn read(&self) -> RwLockReadGuard<'_, TrackingState> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// `None` inside [`with`](Self::with), where it would wait for itself.
    fn write(&self) -> Option<RwLockWriteGuard<'_, TrackingState>> {
        if INSIDE.get() > 0 {
            error::warn(
                "a run cannot be begun, resumed or ended inside the closure of `tracker`: nothing was done; do it \
                 behind the call",
            );
            return None;
        }
        Some(self.state.write().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Logs the values that a run lacks.
fn record(run: &Run, unrecorded: &[LoggedValues]) {
    if unrecorded.is_empty() {
        return;
    }
    // Its mark has the step to which it was rewound, also if the lost rank has not written so far.
    let _ = run.flush();
    let recorded = RunHistory::read(run.folder()).ok();
    let recorded = recorded.and_then(|history| history.last_step());
    for logged in unrecorded
        .iter()
        .filter(|logged| recorded < Some(logged.step))
    {
        let values = logged.values.iter();
        let values = values.map(|(name, value, count)| (&**name, *value, *count));
        run.log_values(&logged.kind, values, logged.step, logged.epoch);
    }
}

/// The most calls that a rank remembers.
const MOST_REMEMBERED: usize = 256;

/// The key of the texts about losses.
const RECOVERY: &str = "job/recovery";

thread_local! {
    /// The number of calls of [`Tracking::with`] that this thread is in.
    static INSIDE: Cell<u32> = const { Cell::new(0) };
}

struct Inside;

impl Inside {
    fn enter() -> Self {
        INSIDE.set(INSIDE.get() + 1);
        Self
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        INSIDE.set(INSIDE.get() - 1);
    }
}

impl RunPlace {
    /// Returns the place of a run; `None` if its state cannot be saved now.
    fn of(run: &Run) -> Option<Self> {
        let folder = run.folder();
        Some(Self {
            folder: std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned()),
            mark: run.mark().ok()?,
        })
    }
}

/// Warns that the training continues without a run.
pub(crate) fn untracked(error: &accelerator_track::Error) {
    error::warn(&format!(
        "the training continues and is not tracked: {error}"
    ));
}

fn finish(
    state: &mut TrackingState,
    end: impl FnOnce(Run) -> Result<(), accelerator_track::Error>,
) {
    if let Some(run) = state.run.take()
        && let Err(error) = end(run)
    {
        error::warn(&format!("the run is not recorded completely: {error}"));
    }
}

#[derive(Clone, Debug, Default)]
pub(crate) struct TrackerSettings {
    pub(crate) data_folders: Vec<PathBuf>,
    pub(crate) runs_folder: Option<PathBuf>,
    pub(crate) trackers: Vec<Tracker>,
}

const SAMPLE_EVERY: Duration = Duration::from_secs(10);

/// A destination of a run in addition to its journal; for
/// [`AcceleratorBuilder::log_with`](crate::AcceleratorBuilder::log_with).
#[derive(Clone)]
#[non_exhaustive]
pub enum Tracker {
    /// A table of the metrics, `metrics.csv` in the folder of the run.
    Csv,
    /// Event files of TensorBoard, in `tensorboard` in the folder of the run: `tensorboard --logdir runs` shows all runs.
    TensorBoard,
    /// Event files of TensorBoard below that folder, in one with the name of the run's folder: `tensorboard --logdir logs`
    /// shows all runs that are recorded there.
    TensorBoardIn(PathBuf),
    /// The MLflow server that MLflow's own variables name: `MLFLOW_TRACKING_URI`, with `MLFLOW_EXPERIMENT_NAME` or
    /// `MLFLOW_EXPERIMENT_ID`. With the feature `mlflow`; another server is a [`Tracker::sink`].
    #[cfg(feature = "mlflow")]
    Mlflow,
    /// Another sink, made anew for each run; see [`Tracker::sink`].
    Sink(Arc<dyn Fn() -> Box<dyn Sink> + Send + Sync>),
}

impl Tracker {
    /// Makes a tracker of a sink of your own, or of one with settings. `make` makes the sink, on rank 0.
    pub fn sink<S: Sink + 'static>(make: impl Fn() -> S + Send + Sync + 'static) -> Self {
        Self::Sink(Arc::new(move || Box::new(make())))
    }

    /// Delivers a run to it.
    ///
    /// # Errors
    ///
    /// Fails if variables that it needs are not set.
    pub(crate) fn attach(&self, run: RunBuilder) -> accelerator_track::Result<RunBuilder> {
        Ok(match self {
            Self::Csv => run.sink(CsvFile::in_run()),
            Self::TensorBoard => run.sink(TensorBoard::in_run()),
            Self::TensorBoardIn(folder) => run.sink(TensorBoard::below(folder)),
            #[cfg(feature = "mlflow")]
            Self::Mlflow => run.sink(accelerator_track::MlflowSink::from_env()?),
            Self::Sink(make) => run.sink(make()),
        })
    }
}

impl fmt::Debug for Tracker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Csv => f.write_str("Csv"),
            Self::TensorBoard => f.write_str("TensorBoard"),
            Self::TensorBoardIn(folder) => f.debug_tuple("TensorBoardIn").field(folder).finish(),
            #[cfg(feature = "mlflow")]
            Self::Mlflow => f.write_str("Mlflow"),
            Self::Sink(_) => f.debug_tuple("Sink").finish_non_exhaustive(),
        }
    }
}
