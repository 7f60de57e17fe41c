//! The sink for TensorBoard: event files.

use std::path::PathBuf;

use self::replay::Replay;
use crate::error::{Error, Kind, Result};
use crate::record::Entry;
use crate::run_files::TENSORBOARD;
use crate::sink::{Origin, RunInfo, Sink, SinkPosition};

mod event;
mod event_files;
mod protobuf;
mod record_file;
mod replay;

/// Writes what TensorBoard shows of a run: `tensorboard --logdir FOLDER`.
///
/// | in a run | in TensorBoard |
/// |---|---|
/// | metrics | scalars, of 32 bits, by step; NaN and infinities stay |
/// | what hosts measured | scalars `system/rank-0/cpu` by seconds since the run was created |
/// | texts | texts |
/// | histograms | histograms and distributions |
/// | images | images |
/// | plots | texts: tables of the first 1000 points |
/// | hyperparameters, how the run ended | HParams; numbers are numbers, lists are JSON, a preempted run is running |
///
/// A tag is the key, as `train/loss`. TensorBoard shows one kind of data under a tag: where a key has another kind too, that
/// one's tag is `train/loss/histogram`.
///
/// The files are written anew when a run resumes, and then take the place of the earlier ones: points that were taken back
/// are gone, also from a server that is running. The earlier files are empty then, and removed after some minutes or when
/// the run is delivered again. Files of others in the folder stay as they are.
///
/// # Limits of TensorBoard
///
/// It shows a sample of long series: 1000 scalars, 10 images a tag; `--samples_per_plugin` changes that. It does not show
/// points that were logged before one of a lower step of the same key; the run keeps them. A running server learns only
/// when it is started again that a tag has no points left, or that hyperparameters or the way the run ended changed.
///
/// ```
/// use accelerator_track::{
///     Entry, Metrics, Number, Origin, PointValue, Record, RunId, RunInfo, Sink, TensorBoard,
/// };
///
/// # fn main() -> accelerator_track::Result<()> {
/// # let temporary = tempfile::tempdir().unwrap();
/// # let logs = temporary.path().join("logs");
/// let run = RunInfo { id: RunId::new(), name: "mnist".to_owned(), folder: "runs/mnist".into(), created_ms: 0 };
/// let mut sink = TensorBoard::new(&logs);
/// sink.open(&run)?;
/// let points = vec![PointValue { series: 0, value: Number(0.5), count: None }];
/// for (n, record) in [
///     Record::Series { i: 0, key: "train/loss".to_owned() },
///     Record::Metrics(Metrics { step: 1, epoch: None, points }),
/// ].into_iter().enumerate() {
///     sink.write(Origin::Run, &Entry { n: n as u64, ms: 0, record })?;
/// }
/// sink.flush()?;
/// assert_eq!(std::fs::read_dir(&logs).unwrap().count(), 1);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct TensorBoard {
    place: LogFolder,
    replay: Option<Replay>,
}

#[derive(Debug)]
enum LogFolder {
    InRun,
    In(PathBuf),
    Below(PathBuf),
}

impl TensorBoard {
    /// Writes event files in `folder`, which is made where it is not there. TensorBoard takes a folder for a run: give each
    /// run its own, or use [`below`](Self::below).
    ///
    /// ```
    /// let sink = accelerator_track::TensorBoard::new("logs/mnist");
    /// ```
    #[must_use]
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self::at(LogFolder::In(folder.into()))
    }

    /// Writes event files in a folder below `folder`, which has the name of the run's folder: `tensorboard --logdir logs`
    /// shows all runs that are delivered there.
    ///
    /// ```
    /// use accelerator_track::{Run, TensorBoard};
    ///
    /// # fn main() -> accelerator_track::Result<()> {
    /// # let temporary = tempfile::tempdir().unwrap();
    /// # let (runs, logs) = (temporary.path().join("runs"), temporary.path().join("logs"));
    /// for _ in 0..2 {
    ///     let run = Run::builder("mnist").runs_folder(&runs).sink(TensorBoard::below(&logs));
    ///     run.start()?.finish()?;
    /// }
    /// assert!(logs.join("mnist").is_dir() && logs.join("mnist-2").is_dir());
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn below(folder: impl Into<PathBuf>) -> Self {
        Self::at(LogFolder::Below(folder.into()))
    }

    /// Writes event files in the folder `tensorboard` of the run. `tensorboard --logdir runs` shows all runs.
    ///
    /// ```
    /// let sink = accelerator_track::TensorBoard::in_run();
    /// ```
    #[must_use]
    pub fn in_run() -> Self {
        Self::at(LogFolder::InRun)
    }

    fn at(place: LogFolder) -> Self {
        Self {
            place,
            replay: None,
        }
    }
}

impl Sink for TensorBoard {
    fn name(&self) -> String {
        match &self.place {
            LogFolder::In(folder) | LogFolder::Below(folder) => {
                format!("TensorBoard in {}", folder.display())
            }
            LogFolder::InRun => "TensorBoard".to_owned(),
        }
    }

    fn sync_options(&self) -> Vec<String> {
        let place = match &self.place {
            LogFolder::In(_) => return Vec::new(),
            LogFolder::InRun => TENSORBOARD.to_owned(),
            LogFolder::Below(folder) => format!("tensorboard:{}", folder.display()),
        };
        vec!["--to".to_owned(), place]
    }

    fn open(&mut self, run: &RunInfo) -> Result<SinkPosition> {
        // Nothing of the earlier replay may be written after this.
        self.replay = None;
        let folder = match &self.place {
            LogFolder::InRun => run.folder.join(TENSORBOARD),
            LogFolder::In(folder) => folder.clone(),
            LogFolder::Below(folder) => {
                // `.` has no name.
                let whole = run.folder.canonicalize();
                let whole = whole.unwrap_or_else(|_| run.folder.clone());
                folder.join(whole.file_name().unwrap_or_default())
            }
        };
        self.replay = Some(Replay::begin(&folder, run)?);
        Ok(SinkPosition::default())
    }

    fn write(&mut self, origin: Origin, entry: &Entry) -> Result<()> {
        self.replay()?.write(origin, entry)
    }

    fn flush(&mut self) -> Result<()> {
        self.replay()?.flush()
    }
}

impl TensorBoard {
    fn replay(&mut self) -> Result<&mut Replay> {
        self.replay.as_mut().ok_or_else(|| {
            Error::new(
                Kind::Misuse,
                "the sink for TensorBoard is not open; call open first",
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::record::{Metrics, Number, PointValue, Record};
    use crate::run_id::RunId;

    #[test]
    fn what_cannot_be_shown_is_told_or_passed_over() {
        let temporary = tempfile::tempdir().unwrap();
        let folder = temporary.path();
        let run = RunInfo {
            id: RunId::new(),
            name: "a".to_owned(),
            folder: folder.to_owned(),
            created_ms: 0,
        };
        let entry = |record| Entry {
            n: 0,
            ms: 0,
            record,
        };
        let mut sink = TensorBoard::in_run();
        let error = sink.flush().unwrap_err();
        assert!(error.is_misuse(), "{error}");

        sink.open(&run).unwrap();
        // An image whose file is gone, and one that is no file of the run.
        fs::write(folder.join("secret"), "secret").unwrap();
        for hash in ["0".repeat(64), "../secret".to_owned()] {
            let image = Record::Image {
                key: "a".to_owned(),
                step: 1,
                hash,
                mime: "image/png".to_owned(),
                width: 1,
                height: 1,
            };
            sink.write(Origin::Run, &entry(image)).unwrap();
        }
        let point = PointValue {
            series: 3,
            value: Number(1.0),
            count: None,
        };
        let metrics = Metrics {
            step: 7,
            epoch: None,
            points: vec![point],
        };
        let error = sink
            .write(Origin::Run, &entry(Record::Metrics(metrics)))
            .unwrap_err();
        assert!(
            error.is_corrupt() && error.to_string().contains('7'),
            "{error}"
        );
        // Opened again, it begins again.
        sink.open(&run).unwrap();
        sink.flush().unwrap();
        let files: Vec<_> = fs::read_dir(folder.join("tensorboard")).unwrap().collect();
        let [file] = files.as_slice() else {
            panic!("{files:?}");
        };
        let bytes = fs::read(file.as_ref().unwrap().path()).unwrap();
        // The version and the start of a session.
        assert_eq!(bytes.len(), 16 + 22 + 16 + 13 + 2);
    }
}
