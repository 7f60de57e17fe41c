//! The sink for TensorBoard: event files.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::{fs, io, mem};

use serde_json::Value;

use crate::error::{Error, Kind, Result};
use crate::record::{EndStatus, Entry, Metrics, Number, Record};
use crate::run_files::{TENSORBOARD, blob_path};
use crate::sink::{Origin, RunInfo, Sink, SinkPosition};
use event_files::{END, EventFiles, EventKind, HYPERPARAMETERS, SummaryData, SummaryValue};

mod event_files;

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
/// A tag is the key, as `train/loss`. TensorBoard shows one kind of data under a tag: where a key has another kind too,
/// that one's tag is `train/loss/histogram`.
///
/// The files are written anew when a run resumes, and then take the place of the earlier ones: points that were taken
/// back are gone, also from a server that is running. The earlier files are empty then, and removed after some minutes
/// or when the run is delivered again. Files of others in the folder stay as they are.
///
/// # Limits of TensorBoard
///
/// It shows a sample of long series: 1000 scalars, 10 images a tag; `--samples_per_plugin` changes that. It does not
/// show points that were logged before one of a lower step of the same key; the run keeps them. A running server learns
/// only when it is started again that a tag has no points left, or that hyperparameters or the way the run ended
/// changed.
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
    /// Writes event files in `folder`, which is created if it does not exist. TensorBoard takes a folder for a run: give
    /// each run its own, or use [`below`](Self::below).
    #[must_use]
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self::at(LogFolder::In(folder.into()))
    }

    /// Writes event files in a folder below `folder`, which has the name of the run's folder: `tensorboard --logdir
    /// logs` shows all runs that are delivered there.
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
    /// # for name in ["mnist", "mnist-2"] {
    /// #     let file = std::fs::read_dir(logs.join(name)).unwrap().next().unwrap().unwrap();
    /// #     assert!(file.file_name().to_string_lossy().contains("tfevents"));
    /// # }
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn below(folder: impl Into<PathBuf>) -> Self {
        Self::at(LogFolder::Below(folder.into()))
    }

    /// Writes event files in the folder `tensorboard` of the run. `tensorboard --logdir runs` shows all runs.
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

/// A run that is being written.
#[derive(Debug)]
struct Replay {
    run: RunInfo,
    files: EventFiles,
    /// The series, by the number by which points refer to them.
    series: HashMap<u32, TaggedSeries>,
    /// The use of each tag.
    kinds: HashMap<String, &'static str>,
    hyperparameters: Revised<BTreeMap<String, Value>>,
    end: Revised<(EndStatus, u64)>,
    has_warned: bool,
}

impl Replay {
    fn begin(folder: &Path, run: &RunInfo) -> Result<Self> {
        Ok(Self {
            run: run.clone(),
            files: EventFiles::create(folder, run)?,
            series: HashMap::new(),
            kinds: HashMap::new(),
            hyperparameters: Revised::new(),
            end: Revised::new(),
            has_warned: false,
        })
    }

    fn write(&mut self, origin: Origin, entry: &Entry) -> Result<()> {
        let ms = entry.ms;
        match (origin, &entry.record) {
            (Origin::Run, Record::Series { i, key }) => {
                let tag = self.tag(key, "scalar");
                let series = TaggedSeries { tag, last_step: 0 };
                self.series.insert(*i, series);
                Ok(())
            }
            (Origin::Run, Record::Metrics(metrics)) => self.write_metrics(ms, metrics),
            (Origin::Run, Record::Text { key, step, text }) => {
                self.write_value(ms, *step, key, "text", SummaryData::Text(text))
            }
            (Origin::Run, Record::Histogram { key, step, bins }) => {
                self.write_value(ms, *step, key, "histogram", SummaryData::Histogram(bins))
            }
            (
                Origin::Run,
                Record::Plot {
                    key,
                    step,
                    x_label,
                    y_label,
                    points,
                },
            ) => {
                let text = table(x_label, y_label, points);
                self.write_value(ms, *step, key, "text", SummaryData::Text(&text))
            }
            (
                Origin::Run,
                Record::Image {
                    key,
                    step,
                    hash,
                    width,
                    height,
                    ..
                },
            ) => {
                let Some(encoded) = self.read_blob(hash)? else {
                    tracing::warn!(
                        "TensorBoard will not show image {key} of step {step}: its file is missing"
                    );
                    return Ok(());
                };
                let image = SummaryData::Image {
                    width: *width,
                    height: *height,
                    encoded: &encoded,
                };
                self.write_value(ms, *step, key, "image", image)
            }
            (Origin::Rank(rank), Record::System { values }) => {
                let step = ms.saturating_sub(self.run.created_ms) / 1000;
                for (name, value) in values {
                    let key = format!("system/rank-{rank}/{name}");
                    let value = SummaryData::Scalar(value.0 as f32);
                    self.write_value(ms, step, &key, "scalar", value)?;
                }
                Ok(())
            }
            (Origin::Run, Record::Param { set }) => {
                let all = self.hyperparameters.value.get_or_insert_default();
                all.extend(set.clone());
                Ok(())
            }
            (Origin::Run, Record::Attempt { .. }) => {
                self.end.value = None;
                Ok(())
            }
            (Origin::Run, Record::End { status, .. }) => {
                self.end.value = Some((*status, ms));
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn flush(&mut self) -> Result<()> {
        let started_ms = self.run.created_ms;
        let revisions = [self.hyperparameters.revise(), self.end.revise()];
        let values = [
            self.hyperparameters.value.as_ref().map(|set| SummaryValue {
                tag: HYPERPARAMETERS,
                data: SummaryData::Hyperparameters { set, started_ms },
            }),
            self.end.value.map(|(status, ms)| SummaryValue {
                tag: END,
                data: SummaryData::End { status, ms },
            }),
        ];
        for (revision, value) in revisions.iter().zip(values) {
            if let (Revision::First, Some(value)) = (revision, value) {
                self.files
                    .write(started_ms, 0, EventKind::Summary(&[value]))?;
            }
        }
        if revisions.contains(&Revision::Later) {
            let values: Vec<_> = values.into_iter().flatten().collect();
            self.files.write_before(&values)?;
        }
        self.files.flush()
    }

    fn write_metrics(&mut self, ms: u64, metrics: &Metrics) -> Result<()> {
        let step = metrics.step;
        for point in &metrics.points {
            let Some(series) = self.series.get_mut(&point.series) else {
                let number = point.series;
                let message =
                    format!("a point of step {step} is of series {number}, which has no name");
                return Err(Error::new(Kind::Corrupt, message));
            };
            if step < series.last_step && !self.has_warned {
                self.has_warned = true;
                tracing::warn!(
                    "{} was logged for step {step} after step {}: TensorBoard does not show what was logged before",
                    series.tag,
                    series.last_step
                );
            }
            series.last_step = step;
        }
        let values: Vec<_> = metrics
            .points
            .iter()
            .filter_map(|point| {
                Some(SummaryValue {
                    tag: &self.series.get(&point.series)?.tag,
                    data: SummaryData::Scalar(point.value.0 as f32),
                })
            })
            .collect();
        self.files.write(ms, step, EventKind::Summary(&values))
    }

    fn write_value(
        &mut self,
        ms: u64,
        step: u64,
        key: &str,
        kind: &'static str,
        data: SummaryData<'_>,
    ) -> Result<()> {
        let tag = &self.tag(key, kind);
        self.files
            .write(ms, step, EventKind::Summary(&[SummaryValue { tag, data }]))
    }

    /// A tag that is used for nothing else: a reader passes over what is of another kind than a tag's first value.
    fn tag(&mut self, key: &str, kind: &'static str) -> String {
        let mut tag = key.to_owned();
        while *self.kinds.entry(tag.clone()).or_insert(kind) != kind {
            tag = format!("{tag}/{kind}");
        }
        tag
    }

    fn read_blob(&self, hash: &str) -> Result<Option<Vec<u8>>> {
        let Some(path) = blob_path(&self.run.folder, hash) else {
            return Ok(None);
        };
        match fs::read(&path) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(Error::io("read", &path, error)),
        }
    }
}

#[derive(Debug)]
struct TaggedSeries {
    tag: String,
    last_step: u64,
}

/// Something of which readers keep what they read first.
#[derive(Debug)]
struct Revised<T> {
    value: Option<T>,
    written: Option<T>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Revision {
    Unchanged,
    First,
    Later,
}

impl<T: Clone + PartialEq> Revised<T> {
    fn new() -> Self {
        let (value, written) = (None, None);
        Self { value, written }
    }

    /// Returns what to do about the value, which counts as written from now on.
    fn revise(&mut self) -> Revision {
        match (&self.value, &self.written) {
            (None, _) => return Revision::Unchanged,
            (Some(value), Some(written)) if value == written => return Revision::Unchanged,
            _ => {}
        }
        match mem::replace(&mut self.written, self.value.clone()) {
            None => Revision::First,
            Some(_) => Revision::Later,
        }
    }
}

/// The number of points of a plot in a table.
const ROWS: usize = 1000;

/// A plot as Markdown.
fn table(x_label: &str, y_label: &str, points: &[[Number; 2]]) -> String {
    let cell = |text: &str| text.replace('|', "\\|").replace(['\n', '\r'], " ");
    let mut table = format!("| {} | {} |\n|---|---|\n", cell(x_label), cell(y_label));
    for [x, y] in points.iter().take(ROWS) {
        table.push_str(&format!("| {} | {} |\n", x.0, y.0));
    }
    if let left @ 1.. = points.len().saturating_sub(ROWS) {
        table.push_str(&format!("\n{left} more points are in the run's journal.\n"));
    }
    table
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::tests::{assert_says, entry, metrics, run_info};

    #[test]
    fn what_cannot_be_shown_is_told_or_passed_over() {
        let temporary = tempfile::tempdir().unwrap();
        let folder = temporary.path();
        let run = run_info(folder);
        let mut sink = TensorBoard::in_run();
        let error = sink.flush().unwrap_err();
        assert!(error.is_misuse(), "{error}");

        sink.open(&run).unwrap();
        // An image whose file is gone, and one that is not a file of the run.
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
        let error = sink.write(Origin::Run, &entry(metrics(7, None, [1.0])));
        let error = error.unwrap_err();
        assert!(error.is_corrupt());
        assert_says(&error, "step 7");
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
