//! A run that is being written.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::{Error, Kind, Result};
use crate::journal::{JOURNAL, now_ms};
use crate::record::{EndStatus, Number, Record};
use crate::run_id::RunId;
use crate::warning::warn;

pub use builder::RunBuilder;
use builder::Settings;
pub use feeder::{deliver, export};
use hyperparameters::flatten;
pub use launch_failure::record_failure;
pub use media::Histogram;
use queue::{LoggedMetrics, Message, Queue};
use worker::{JournalEnd, Worker};

mod artifacts;
mod builder;
mod feeder;
mod hyperparameters;
mod launch_failure;
mod media;
mod queue;
#[cfg(test)]
mod tests;
mod worker;

/// A run: what a training was given, what it measures, what it makes.
///
/// One process writes it. What is logged goes to a queue in memory and takes the calling thread a few microseconds; a
/// thread of its own appends it to the journal in the run's folder, and further threads deliver it to
/// [sinks](crate::Sink). No failure of a disk or a server stops the program: it is said once, as a warning of `tracing`.
///
/// ```
/// use accelerator_track::{Run, RunHistory};
/// # fn main() -> accelerator_track::Result<()> {
/// # let temporary = tempfile::tempdir().unwrap();
/// # let folder = temporary.path();
///
/// #[derive(serde::Serialize)]
/// struct Hyperparameters { lr: f64, layers: Vec<u32> }
///
/// let run = Run::builder("mnist")
///     .runs_folder(folder)
///     .hyperparameters(&Hyperparameters { lr: 1e-3, layers: vec![32, 64] })?
///     .start()?;
/// for step in 1..=100 {
///     run.log("train", [("loss", 1.0 / step as f64)], step, None);
/// }
/// run.log("test", [("accuracy", 0.9)], 100, 1.0);
/// run.finish()?;
/// # Ok(())
/// # }
/// ```
///
/// A run that is dropped without [`finish`](Self::finish) or [`fail`](Self::fail) writes what is in the queue, and counts
/// as interrupted.
#[derive(Debug)]
pub struct Run {
    id: RunId,
    name: String,
    folder: PathBuf,
    attempt: u32,
    settings: Settings,
    /// The number of the first entry that the program logs.
    begun: u64,
    queue: Arc<Queue>,
    worker: Worker,
}

/// Where a run was when a checkpoint was taken. It is saved with the checkpoint, and says which run goes on, and from
/// where, when the program resumes from it.
///
/// ```
/// use accelerator_track::{Run, RunHistory, RunMark};
///
/// # fn main() -> accelerator_track::Result<()> {
/// # let temporary = tempfile::tempdir().unwrap();
/// # let runs = temporary.path();
/// let run = Run::builder("mnist").runs_folder(runs).start()?;
/// run.log("train", [("loss", 0.5)], 1, None);
/// let mark = run.mark()?;
/// let saved = serde_json::to_string(&mark).unwrap();      // with the checkpoint
/// run.checkpoint_saved(&mark);
/// run.log("train", [("loss", 0.4)], 2, None);
/// drop(run);                                              // the program is killed
///
/// let mark: RunMark = serde_json::from_str(&saved).unwrap();
/// let run = Run::builder("mnist").runs_folder(runs).resume(&mark).start()?;
/// run.log("train", [("loss", 0.3)], 2, None);
/// let folder = run.folder().to_owned();
/// run.finish()?;
/// let losses = RunHistory::read(folder)?.series("train/loss").unwrap().points.clone();
/// assert_eq!(losses.iter().map(|x| x.value).collect::<Vec<_>>(), [0.5, 0.3]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct RunMark {
    /// The run.
    pub run: RunId,
    /// The name of its folder.
    pub folder: String,
    /// The greatest step that was logged.
    pub step: Option<u64>,
    /// The number of the first entry of the journal that was not written yet.
    pub next: u64,
}

impl Run {
    /// Starts a run in the folder `runs/<name>`, or another one beside it where a run of this name is there already.
    ///
    /// # Errors
    ///
    /// If the folder cannot be written, or the hyperparameters are no map of JSON.
    ///
    /// ```no_run
    /// let run = accelerator_track::Run::create("mnist", &serde_json::json!({ "lr": 1e-3 }))?;
    /// # Ok::<(), accelerator_track::Error>(())
    /// ```
    pub fn create(name: &str, hyperparameters: &impl Serialize) -> Result<Self> {
        Self::builder(name)
            .hyperparameters(hyperparameters)?
            .start()
    }

    /// Settings of a run, before it starts.
    pub fn builder(name: &str) -> RunBuilder {
        RunBuilder::new(name)
    }

    /// Its identity, which stays through restarts.
    #[must_use]
    pub fn id(&self) -> RunId {
        self.id
    }

    /// Its name, as it was given.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its folder.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// How many starts of the program went before.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// Logs metrics of one kind (`train`, `test`) at a step: the series `train/loss` of `[("loss", 0.5)]`. The epoch may
    /// be a fraction, or `None`.
    ///
    /// Values may be infinite or NaN. Steps may come in any order.
    pub fn log<'a>(
        &self,
        kind: &str,
        metrics: impl IntoIterator<Item = (&'a str, f64)>,
        step: u64,
        epoch: impl Into<Option<f64>>,
    ) {
        let metrics = metrics.into_iter().map(|(name, value)| (name, value, None));
        self.log_points(kind, metrics, step, epoch.into());
    }

    /// Logs means, each with the number of samples that it is of.
    ///
    /// ```
    /// # let temporary = tempfile::tempdir().unwrap();
    /// let run = accelerator_track::Run::builder("a").runs_folder(temporary.path()).start()?;
    /// run.log_means("test", [("loss", 0.25, 10_000)], 938, 1.0);
    /// # Ok::<(), accelerator_track::Error>(())
    /// ```
    pub fn log_means<'a>(
        &self,
        kind: &str,
        means: impl IntoIterator<Item = (&'a str, f64, u64)>,
        step: u64,
        epoch: impl Into<Option<f64>>,
    ) {
        let means = means
            .into_iter()
            .map(|(name, value, count)| (name, value, Some(count)));
        self.log_points(kind, means, step, epoch.into());
    }

    /// Adds hyperparameters, or changes them: a value that was different is kept beside.
    ///
    /// # Errors
    ///
    /// If they are no map of JSON.
    pub fn set_hyperparameters(&self, hyperparameters: &impl Serialize) -> Result<()> {
        let set = flatten(hyperparameters)?;
        self.record(Record::Param { set });
        Ok(())
    }

    /// Sets a tag.
    pub fn set_tag(&self, key: &str, value: &str) {
        let set = [(key.to_owned(), value.to_owned())].into();
        self.record(Record::Tag { set });
    }

    /// Records what the weights of a model are, by a hash of their bits, after the last step that was logged. `accel-launch
    /// runs reproduce` compares them.
    pub fn log_weights(&self, digest: &str, step: u64) {
        let digest = digest.to_owned();
        self.record(Record::Weights { step, digest });
    }

    /// Where the run is, to be saved with a checkpoint. What was logged before is on the disk when it returns.
    ///
    /// # Errors
    ///
    /// If the disk refuses it. The checkpoint is good without.
    pub fn mark(&self) -> Result<RunMark> {
        let (step, next) = self.queue.sync()?;
        Ok(RunMark {
            run: self.id,
            folder: builder::folder_name_of(&self.folder),
            step,
            next,
        })
    }

    /// Says that the checkpoint with a mark is on the disk: a resume from it supersedes nothing that went before.
    pub fn checkpoint_saved(&self, mark: &RunMark) {
        self.record(Record::Checkpoint {
            step: mark.step,
            covers: mark.next,
        });
    }

    /// Goes on from the checkpoint with a mark, where the program learns of it after the start of a run;
    /// [`RunBuilder::resume`] is for one that knows it before.
    ///
    /// With this run's mark, earlier entries for greater steps do not count any more once something is logged. With
    /// another run's mark, that run continues instead, unless this one has metrics or the other does not exist; this
    /// one is deleted if nothing was logged to it.
    ///
    /// ```
    /// use accelerator_track::Run;
    ///
    /// # let temporary = tempfile::tempdir().unwrap();
    /// # let runs = temporary.path();
    /// let run = Run::builder("mnist").runs_folder(runs).start()?;
    /// let (id, mark) = (run.id(), run.mark()?);
    /// drop(run);
    ///
    /// let run = Run::builder("mnist").runs_folder(runs).start()?;
    /// assert_ne!(run.id(), id);
    /// assert_eq!(run.resume(&mark)?.id(), id);
    /// # Ok::<(), accelerator_track::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// If the other run cannot be read or written.
    pub fn resume(self, mark: &RunMark) -> Result<Self> {
        if mark.run == self.id {
            self.record(Record::Rewind { to: mark.step });
            return Ok(self);
        }
        let here = self.mark()?;
        if here.step.is_some() || !self.settings.can_reopen(mark) {
            tracing::warn!(
                run = self.name,
                from = %mark.run,
                "the run of the checkpoint does not go on: it is not there or in use, or metrics were logged before the resume"
            );
            return Ok(self);
        }
        let Self {
            folder,
            settings,
            attempt,
            worker,
            begun,
            ..
        } = self;
        let sinks = worker.release();
        if here.next > begun {
            warn(&format!(
                "the run of the checkpoint goes on, and the one in {} stays: it has tags, hyperparameters or artifacts of its \
                 own, which the other does not get",
                folder.display()
            ));
        } else if attempt == 0 {
            builder::discard(&folder);
        }
        RunBuilder::of(settings, sinks).resume(mark).start()
    }

    /// Waits until what was logged is in the journal.
    ///
    /// # Errors
    ///
    /// If the disk refuses it.
    pub fn flush(&self) -> Result<()> {
        self.queue.sync().map(|_| ())
    }

    /// Ends the run: what is left is written and delivered. A sink that does not answer is given half a minute, and said;
    /// `accel-launch runs sync` delivers the rest.
    ///
    /// # Errors
    ///
    /// If the journal could not be written, or lacks entries that a disk did not take: the message says how many.
    pub fn finish(self) -> Result<()> {
        self.end(EndStatus::Finished, None)
    }

    /// Ends the run as one that failed.
    ///
    /// # Errors
    ///
    /// If the journal could not be written.
    pub fn fail(self, failure: impl Into<Value>) -> Result<()> {
        self.end(EndStatus::Failed, Some(failure.into()))
    }

    /// Ends this attempt of the run, which will go on later.
    ///
    /// # Errors
    ///
    /// If the journal could not be written.
    pub fn preempted(self) -> Result<()> {
        self.end(EndStatus::Preempted, None)
    }

    fn end(mut self, status: EndStatus, failure: Option<Value>) -> Result<()> {
        self.record(Record::End { status, failure });
        let JournalEnd { lost, flushed } = self.worker.finish();
        if lost == 0 {
            return flushed;
        }
        let why = match flushed {
            Ok(()) => "the disk did not take them in time".to_owned(),
            Err(error) => error.to_string(),
        };
        let path = self.folder.join(JOURNAL);
        Err(Error::new(
            Kind::Io,
            format!(
                "{lost} entries of the run were lost, and {} lacks them: {why}",
                path.display()
            ),
        ))
    }

    fn log_points<'a>(
        &self,
        kind: &str,
        points: impl IntoIterator<Item = (&'a str, f64, Option<u64>)>,
        step: u64,
        epoch: Option<f64>,
    ) {
        let mut logged = LoggedMetrics::new(kind, step, epoch);
        for (name, value, count) in points {
            logged.add(name, Number(value), count);
        }
        self.queue.push(now_ms(), Message::Metrics(logged));
    }

    fn record(&self, record: Record) {
        self.queue.push(now_ms(), Message::Record(record));
    }
}
