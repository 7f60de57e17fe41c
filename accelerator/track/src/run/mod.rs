//! A run that is being written, and the histograms that it logs.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Serialize;
use serde_json::Value;

use crate::artifact::{Artifact, ArtifactStore, StoredArtifact};
use crate::error::{Error, Kind, Result};
use crate::journal::{JOURNAL, now_ms};
use crate::record::{ArtifactRole, EndStatus, Number, Record, RunId};
use crate::run_files::write_blob;
pub use builder::RunBuilder;
pub use feeder::{deliver, export};
pub use settings::RunMark;
use settings::{Settings, flatten, folder_name_of};
pub use worker::record_failure;
use worker::{JournalEnd, LoggedMetrics, Message, Queue, Worker};

mod builder;
mod feeder;
mod settings;
#[cfg(test)]
mod tests;
mod worker;

/// A run: what a training was given, what it measures, what it makes.
///
/// One process writes it. What is logged goes to a queue in memory and takes the calling thread a few microseconds; a
/// thread of its own appends it to the journal in the run's folder, and further threads deliver it to
/// [sinks](crate::Sink). A failure of a disk or a server does not stop the program: `tracing` warns of it
/// once.
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
/// A run that is dropped without [`finish`](Self::finish) or [`fail`](Self::fail) writes what is in the queue, and
/// counts as interrupted.
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

impl Run {
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

    /// Logs metrics of one kind (`train`, `test`) at a step: the series `train/loss` of `[("loss", 0.5)]`. The epoch
    /// may be a fraction, or `None`.
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
        self.log_values(kind, metrics, step, epoch.into());
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
        self.log_values(kind, means, step, epoch.into());
    }

    /// Logs values; each mean comes with its number of samples.
    #[doc(hidden)]
    pub fn log_values<'a>(
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

    /// Logs a text, as Markdown.
    ///
    /// ```
    /// # let temporary = tempfile::tempdir().unwrap();
    /// let run = accelerator_track::Run::builder("a").runs_folder(temporary.path()).start()?;
    /// run.log_text("sample/poem", "To **be**", 100);
    /// # Ok::<(), accelerator_track::Error>(())
    /// ```
    pub fn log_text(&self, key: &str, text: &str, step: u64) {
        self.record(Record::Text {
            key: key.to_owned(),
            step,
            text: text.to_owned(),
        });
    }

    /// Logs a histogram, as of a parameter or its gradient.
    ///
    /// ```
    /// use accelerator_track::{Histogram, Run};
    ///
    /// # let temporary = tempfile::tempdir().unwrap();
    /// let run = Run::builder("a").runs_folder(temporary.path()).start()?;
    /// let weights = [0.1f32, -0.2, 0.3];
    /// run.log_histogram("weights/conv1", &Histogram::of(weights.iter().map(|&x| x.into()), 30), 100);
    /// # Ok::<(), accelerator_track::Error>(())
    /// ```
    pub fn log_histogram(&self, key: &str, histogram: &Histogram, step: u64) {
        let bins = histogram.bins.iter().map(|bin| bin.map(Number));
        self.record(Record::Histogram {
            key: key.to_owned(),
            step,
            bins: bins.collect(),
        });
    }

    /// Logs a curve of one step, x and y of its points.
    ///
    /// ```
    /// # let temporary = tempfile::tempdir().unwrap();
    /// let run = accelerator_track::Run::builder("a").runs_folder(temporary.path()).start()?;
    /// run.log_plot("test/precision", ["recall", "precision"], [[0.0, 1.0], [0.5, 0.9], [1.0, 0.4]], 938);
    /// # Ok::<(), accelerator_track::Error>(())
    /// ```
    pub fn log_plot(
        &self,
        key: &str,
        [x_label, y_label]: [&str; 2],
        points: impl IntoIterator<Item = [f64; 2]>,
        step: u64,
    ) {
        let points = points.into_iter().map(|point| point.map(Number));
        self.record(Record::Plot {
            key: key.to_owned(),
            step,
            x_label: x_label.to_owned(),
            y_label: y_label.to_owned(),
            points: points.collect(),
        });
    }

    /// Logs an image: the bytes of a PNG or JPEG file. They are written to the run's folder before it returns.
    ///
    /// # Errors
    ///
    /// If they are not such an image, or the disk refuses them.
    ///
    /// ```no_run
    /// # fn f(run: &accelerator_track::Run) -> accelerator_track::Result<()> {
    /// run.log_image("samples/digits", &std::fs::read("digits.png").unwrap(), 100)
    /// # }
    /// ```
    pub fn log_image(&self, key: &str, image: &[u8], step: u64) -> Result<()> {
        let Some((mime, width, height)) = image_size(image) else {
            return Err(Error::new(
                Kind::Misuse,
                format!(
                    "the image {key:?} of step {step} is neither PNG nor JPEG: expected the bytes of such a file, found {} \
                     bytes that begin with {:02x?}",
                    image.len(),
                    &image[..image.len().min(4)]
                ),
            ));
        };
        let hash = write_blob(&self.folder, image)?;
        self.record(Record::Image {
            key: key.to_owned(),
            step,
            hash,
            mime: mime.to_owned(),
            width,
            height,
        });
        Ok(())
    }

    /// Adds hyperparameters, or changes them: a value that was different is kept beside.
    ///
    /// # Errors
    ///
    /// If they are not a map of JSON.
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

    /// Records what the weights of a model are, by a hash of their bits, after the last step that was logged.
    /// `accel-launch runs reproduce` compares them.
    pub fn log_weights(&self, digest: &str, step: u64) {
        let digest = digest.to_owned();
        self.record(Record::Weights { step, digest });
    }

    /// Stores an artifact beside the runs, and records that this run made it. Files are copied before it returns; where
    /// the latest version of the name has the same contents, it is that version.
    ///
    /// ```
    /// use accelerator_track::{Artifact, Run};
    ///
    /// # let temporary = tempfile::tempdir().unwrap();
    /// # let (runs, file) = (temporary.path(), temporary.path().join("model.safetensors"));
    /// # std::fs::write(&file, "weights").unwrap();
    /// let run = Run::builder("mnist").runs_folder(runs).start()?;
    /// let model = run.mark_output(Artifact::create("mnist-cnn").kind("model").add_file(&file)?)?;
    /// assert_eq!(model.reference(), "mnist-cnn:v1");
    ///
    /// let other = Run::builder("evaluation").runs_folder(runs).start()?;
    /// let model = other.use_input("mnist-cnn:latest")?;
    /// assert_eq!(model.read("model.safetensors")?, b"weights");
    /// # Ok::<(), accelerator_track::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// If a file cannot be read or changes meanwhile, the store cannot be written, or a name cannot be one.
    pub fn mark_output(&self, artifact: Artifact) -> Result<StoredArtifact> {
        let store = self.artifacts();
        let _kept = store.make()?;
        let stored = store.commit(&artifact.produced_by(self.id))?;
        self.record_artifact(ArtifactRole::Output, &stored);
        Ok(stored)
    }

    /// Opens an artifact by `name`, `name:v3` or `name:alias`, and records that this run uses it.
    ///
    /// # Errors
    ///
    /// If there is none.
    pub fn use_input(&self, reference: &str) -> Result<StoredArtifact> {
        let store = self.artifacts();
        let _kept = store.keep()?;
        let stored = store.open(reference)?;
        self.record_artifact(ArtifactRole::Input, &stored);
        Ok(stored)
    }

    /// Returns the run's position, to be saved with a checkpoint. Everything logged before is on the disk when it
    /// returns.
    ///
    /// # Errors
    ///
    /// If the disk refuses it. The checkpoint is good without.
    pub fn mark(&self) -> Result<RunMark> {
        let (step, next) = self.queue.sync()?;
        Ok(RunMark {
            run: self.id,
            folder: folder_name_of(&self.folder),
            step,
            next,
        })
    }

    /// Records that the checkpoint with a mark is on the disk: a resume from it supersedes nothing that went before.
    pub fn checkpoint_saved(&self, mark: &RunMark) {
        self.record(Record::Checkpoint {
            step: mark.step,
            covers: mark.next,
        });
    }

    /// Waits until what was logged is in the journal.
    ///
    /// # Errors
    ///
    /// If the disk refuses it.
    pub fn flush(&self) -> Result<()> {
        self.queue.sync().map(|_| ())
    }

    /// Ends the run: what is left is written and delivered. A sink that does not answer is given half a minute, and
    /// said; `accel-launch runs sync` delivers the rest.
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

    /// Ends this attempt of the run, which will continue later.
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

    fn record(&self, record: Record) {
        self.queue.push(now_ms(), Message::Record(record));
    }

    fn artifacts(&self) -> ArtifactStore {
        ArtifactStore::of_runs(&self.settings.runs)
    }

    /// Records it on disk while it cannot be removed: whoever removes artifacts reads the references of all runs.
    fn record_artifact(&self, role: ArtifactRole, stored: &StoredArtifact) {
        self.record(Record::Artifact {
            role,
            name: stored.name().to_owned(),
            version: stored.version(),
            digest: stored.digest().to_string(),
        });
        // The writing thread reports a disk error.
        let _ = self.flush();
    }
}

/// The distribution of values.
///
/// ```
/// use accelerator_track::Histogram;
///
/// let histogram = Histogram::of([0.0, 0.1, 0.9, 1.0].into_iter(), 2);
/// assert_eq!(histogram.bins(), [[0.0, 0.5, 2.0], [0.5, 1.0, 2.0]]);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Histogram {
    bins: Vec<[f64; 3]>,
}

impl Histogram {
    /// Counts values in bins of equal width, from the least to the greatest. Values that are not finite are left out;
    /// if all are equal, there is one bin.
    #[must_use]
    pub fn of(values: impl Iterator<Item = f64> + Clone, bins: usize) -> Self {
        let finite = values.filter(|x| x.is_finite());
        let (least, greatest) = finite
            .clone()
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), x| {
                (a.min(x), b.max(x))
            });
        if least > greatest {
            return Self { bins: Vec::new() };
        }
        let bins = if least == greatest { 1 } else { bins.max(1) };
        let width = (greatest - least) / bins as f64;
        let edge = |at: usize| match at {
            at if at == bins => greatest,
            at => least + width * at as f64,
        };
        let mut counts = vec![0.0; bins];
        for value in finite {
            let at = ((value - least) / width) as usize;
            counts[at.min(bins - 1)] += 1.0;
        }
        let bins = counts.into_iter().enumerate();
        Self {
            bins: bins
                .map(|(at, count)| [edge(at), edge(at + 1), count])
                .collect(),
        }
    }

    /// Left edge, right edge and count of each bin.
    #[must_use]
    pub fn bins(&self) -> &[[f64; 3]] {
        &self.bins
    }
}

/// The type of an image and its width and height, from its header.
fn image_size(image: &[u8]) -> Option<(&'static str, u32, u32)> {
    if image.starts_with(b"\x89PNG\r\n\x1a\n") {
        let at = |from: usize| {
            Some(u32::from_be_bytes(
                image.get(from..from + 4)?.try_into().ok()?,
            ))
        };
        return Some(("image/png", at(16)?, at(20)?));
    }
    let mut rest = image.strip_prefix(&[0xff, 0xd8])?;
    // Segments: a marker, the length of what follows. That of the frame has the size.
    loop {
        let &[0xff, marker, high, low, ..] = rest else {
            return None;
        };
        if matches!(marker, 0xc0..=0xcf) && !matches!(marker, 0xc4 | 0xc8 | 0xcc) {
            let at = |from: usize| {
                Some(u32::from(u16::from_be_bytes(
                    rest.get(from..from + 2)?.try_into().ok()?,
                )))
            };
            return Some(("image/jpeg", at(7)?, at(5)?));
        }
        rest = rest.get(2 + usize::from(u16::from_be_bytes([high, low]))..)?;
    }
}
