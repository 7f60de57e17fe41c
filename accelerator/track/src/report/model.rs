//! The data of a run on a page.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Serialize;
use serde_json::Value;

use super::downsample::{Columns, downsample};
use super::media::{KeyMedia, media_by_key};
use crate::folder_name::folder_name;
use crate::history::{Point, RunHistory, SystemPoint};
use crate::record::Number;

/// A run as a page shows it.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct PageRun {
    /// The number by which a page refers to the run.
    i: usize,
    id: String,
    /// What it is called on the page, and no other run of the folder of runs: its name, or that of its folder where the
    /// two differ.
    pub(super) label: String,
    name: String,
    folder: String,
    pub(super) status: String,
    created_ms: u64,
    duration_ms: u64,
    last_step: Option<u64>,
    attempts: usize,
    world: usize,
    hyperparameters: BTreeMap<String, Value>,
    tags: BTreeMap<String, String>,
    artifacts: Vec<ArtifactNode>,
    failure: Option<Value>,
    pub(super) series: Vec<PageSeries>,
    /// The points of the charts, by series.
    columns: BTreeMap<String, Columns>,
    detail: PageDetail,
}

/// A series in words.
#[derive(Clone, Debug, Serialize)]
pub(super) struct PageSeries {
    pub(super) key: String,
    points: usize,
    pub(super) last: Option<Extreme>,
    pub(super) min: Option<Extreme>,
    pub(super) max: Option<Extreme>,
    /// How many values are infinite or no numbers.
    odd: usize,
}

/// A value, and the step at which it was.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Extreme {
    pub(super) v: Number,
    pub(super) s: u64,
}

/// What a page shows of a run that is selected.
#[derive(Clone, Debug, Serialize)]
struct PageDetail {
    attempts: Vec<AttemptDetail>,
    /// Values that hyperparameters had before.
    earlier: BTreeMap<String, Vec<Value>>,
    checkpoints: Vec<Option<u64>>,
    lost_entries: u64,
    entries: u64,
    path: String,
    traces: Vec<TraceLink>,
    media: Vec<KeyMedia>,
    system: Vec<SystemSeries>,
}

#[derive(Clone, Debug, Serialize)]
struct ArtifactNode {
    role: String,
    name: String,
    version: u32,
    digest: String,
}

#[derive(Clone, Debug, Serialize)]
struct AttemptDetail {
    attempt: u32,
    world: usize,
    started_ms: u64,
    /// The step of the checkpoint in a list, which is empty where the run did not resume.
    resumed: Vec<Option<u64>>,
    provenance: Value,
}

#[derive(Clone, Debug, Serialize)]
struct TraceLink {
    name: String,
    path: String,
}

#[derive(Clone, Debug, Serialize)]
struct SystemSeries {
    name: String,
    rank: usize,
    /// Milliseconds since the run was created.
    t: Vec<u64>,
    v: Vec<Number>,
}

impl PageRun {
    /// A run with at most `points` points per chart.
    pub(crate) fn of(run: &RunHistory, i: usize, points: usize) -> Self {
        let folder = run.folder.file_name().unwrap_or(run.folder.as_os_str());
        let folder = folder.to_string_lossy().into_owned();
        let is_named = folder == folder_name(&run.name);
        Self {
            i,
            id: run.id.to_string(),
            label: if is_named { &run.name } else { &folder }.clone(),
            name: run.name.clone(),
            folder,
            status: run.status().to_string(),
            created_ms: run.created_ms,
            duration_ms: run.duration_ms(),
            last_step: run.last_step(),
            attempts: run.attempts.len(),
            world: run.attempts.last().map_or(1, |attempt| attempt.world),
            hyperparameters: run
                .hyperparameters
                .iter()
                .map(|(key, parameter)| (key.clone(), parameter.value.clone()))
                .collect(),
            tags: run.tags.clone(),
            artifacts: run
                .artifacts
                .iter()
                .map(|artifact| ArtifactNode {
                    role: artifact.role.to_string(),
                    name: artifact.name.clone(),
                    version: artifact.version,
                    digest: artifact.digest.clone(),
                })
                .collect(),
            failure: run.end.as_ref().and_then(|end| end.failure.clone()),
            series: run
                .series
                .iter()
                .map(|series| PageSeries::of(&series.key, &series.points))
                .collect(),
            columns: run
                .series
                .iter()
                .map(|series| {
                    let columns = Columns::of(&series.points, run.created_ms, points);
                    (series.key.clone(), columns)
                })
                .collect(),
            detail: PageDetail::of(run),
        }
    }
}

impl PageSeries {
    fn of(key: &str, points: &[Point]) -> Self {
        let extreme = |point: &Point| Extreme {
            v: Number(point.value),
            s: point.step,
        };
        let finite = || points.iter().filter(|point| point.value.is_finite());
        let by_value = |a: &&Point, b: &&Point| a.value.total_cmp(&b.value);
        Self {
            key: key.to_owned(),
            points: points.len(),
            last: points.iter().max_by_key(|point| point.step).map(extreme),
            min: finite().min_by(by_value).map(extreme),
            max: finite().max_by(by_value).map(extreme),
            odd: points.len() - finite().count(),
        }
    }
}

impl PageDetail {
    fn of(run: &RunHistory) -> Self {
        let attempts = run.attempts.iter().map(|attempt| AttemptDetail {
            attempt: attempt.attempt,
            world: attempt.world,
            started_ms: attempt.started_ms,
            resumed: attempt.resumed.into_iter().collect(),
            provenance: attempt.provenance.clone(),
        });
        let changed = run
            .hyperparameters
            .iter()
            .filter(|(_, parameter)| !parameter.earlier.is_empty());
        let system = run.system.iter().flat_map(|(&rank, values)| {
            values
                .iter()
                .map(move |(name, points)| system_series(run.created_ms, rank, name, points))
        });
        Self {
            attempts: attempts.collect(),
            earlier: changed
                .map(|(key, parameter)| (key.clone(), parameter.earlier.clone()))
                .collect(),
            checkpoints: run.checkpoints.clone(),
            lost_entries: run.lost_entries,
            entries: run.entries,
            path: absolute(&run.folder),
            traces: traces(&run.folder),
            media: media_by_key(run),
            system: system.collect(),
        }
    }
}

fn system_series(created_ms: u64, rank: usize, name: &str, points: &[SystemPoint]) -> SystemSeries {
    let values: Vec<f64> = points.iter().map(|point| point.value).collect();
    let kept = downsample(&values, SYSTEM_POINTS);
    SystemSeries {
        name: name.to_owned(),
        rank,
        t: kept
            .iter()
            .map(|&at| points[at].ms.saturating_sub(created_ms))
            .collect(),
        v: kept.iter().map(|&at| Number(values[at])).collect(),
    }
}

/// Points of a chart of the system, which has a line for each rank.
const SYSTEM_POINTS: usize = 500;

fn absolute(path: &Path) -> String {
    let absolute = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    absolute.to_string_lossy().into_owned()
}

/// The timelines in a run's folder: `trace.json`, and those of other ranks or cycles beside it.
fn traces(folder: &Path) -> Vec<TraceLink> {
    let Ok(files) = folder.read_dir() else {
        return Vec::new();
    };
    let mut traces: Vec<TraceLink> = files
        .filter_map(|file| {
            let name = file.ok()?.file_name().into_string().ok()?;
            let is_trace = name.starts_with("trace.") && name.ends_with(".json");
            is_trace.then(|| TraceLink {
                path: absolute(&folder.join(&name)),
                name,
            })
        })
        .collect();
    traces.sort_by(|a, b| a.name.cmp(&b.name));
    traces
}
