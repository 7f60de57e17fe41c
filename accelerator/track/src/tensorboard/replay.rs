//! The entries of a run as events.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::{fs, io, mem};

use serde_json::Value;

use super::event::{END, EventKind, HYPERPARAMETERS, SummaryData, SummaryValue};
use super::event_files::EventFiles;
use crate::blob::blob_path;
use crate::error::{Error, Kind, Result};
use crate::record::{EndStatus, Entry, Metrics, Number, Record};
use crate::sink::{Origin, RunInfo};

/// A run that is being written.
#[derive(Debug)]
pub(super) struct Replay {
    run: RunInfo,
    files: EventFiles,
    /// By the number by which points refer to them.
    series: HashMap<u32, TaggedSeries>,
    /// What each tag is used for.
    kinds: HashMap<String, &'static str>,
    hyperparameters: Revised<BTreeMap<String, Value>>,
    end: Revised<(EndStatus, u64)>,
    has_warned: bool,
}

impl Replay {
    pub(super) fn begin(folder: &Path, run: &RunInfo) -> Result<Self> {
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

    pub(super) fn write(&mut self, origin: Origin, entry: &Entry) -> Result<()> {
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

    pub(super) fn flush(&mut self) -> Result<()> {
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

    /// What is to be done about the value, which counts as written from now on.
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

/// How many points of a plot a table has.
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
