//! The data of runs on a page: series, attempts, artifacts, and media within a budget of bytes.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Serialize;
use serde_json::Value;

use crate::history::{ArtifactUse, Media, MediaContent, Point, RunHistory, SystemPoint};
use crate::journal::now_ms;
use crate::record::Number;
use crate::run_files::folder_name;

/// A run as a page shows it.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct PageRun {
    /// The number by which a page refers to the run.
    i: usize,
    id: String,
    /// The label on the page, unique in the folder of runs: its name, or that of its folder if the
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
    artifacts: Vec<ArtifactUse>,
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
    /// The number of values that are infinite or NaN.
    odd: usize,
}

/// A value, and the step at which it was.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Extreme {
    pub(super) v: Number,
    pub(super) s: u64,
}

/// The details of a selected run.
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
struct AttemptDetail {
    attempt: u32,
    world: usize,
    started_ms: u64,
    /// The step of the checkpoint in a list, which is empty if the run did not resume.
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
            world: run.last_attempt().map_or(1, |attempt| attempt.world),
            hyperparameters: run
                .hyperparameters
                .iter()
                .map(|(key, parameter)| (key.clone(), parameter.value.clone()))
                .collect(),
            tags: run.tags.clone(),
            artifacts: run.artifacts.clone(),
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

/// The data of a page of runs.
#[derive(Debug, Serialize)]
pub(crate) struct PageData<'a> {
    generated_ms: u64,
    pub(crate) runs: Vec<&'a PageRun>,
    /// Set if a board serves the page, which then asks it for changes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) board: Option<BoardState>,
}

/// A board's progress in reading its runs.
#[derive(Debug, Serialize)]
pub(crate) struct BoardState {
    /// Counts changes; the page's next request names it.
    pub(crate) version: u64,
    /// The number of runs that remain to be read.
    pub(crate) reading: usize,
    /// The numbers of all runs.
    pub(crate) ids: Vec<usize>,
    /// The reasons for which runs could not be read.
    pub(crate) refused: Vec<String>,
}

impl<'a> PageData<'a> {
    pub(crate) fn of(runs: Vec<&'a PageRun>) -> Self {
        Self {
            generated_ms: now_ms(),
            runs,
            board: None,
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

/// The columns of a series, as a page gets them.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Columns {
    /// Steps.
    s: Vec<u64>,
    /// Epochs, where any was logged.
    #[serde(skip_serializing_if = "Option::is_none")]
    e: Option<Vec<Option<f64>>>,
    /// Milliseconds since the run was created.
    t: Vec<u64>,
    /// Values.
    v: Vec<Number>,
}

impl Columns {
    /// Keeps at most `limit` points, by step.
    pub(crate) fn of(points: &[Point], created_ms: u64, limit: usize) -> Self {
        let mut order: Vec<&Point> = points.iter().collect();
        if !points.is_sorted_by_key(|point| point.step) {
            order.sort_by_key(|point| point.step);
        }
        let values: Vec<f64> = order.iter().map(|point| point.value).collect();
        let kept = || downsample(&values, limit).into_iter().map(|at| order[at]);
        let has_epochs = points.iter().any(|point| point.epoch.is_some());
        Self {
            s: kept().map(|point| point.step).collect(),
            e: has_epochs.then(|| kept().map(|point| point.epoch).collect()),
            t: kept()
                .map(|point| point.ms.saturating_sub(created_ms))
                .collect(),
            v: kept().map(|point| Number(point.value)).collect(),
        }
    }
}

/// Selects the values that a chart shows, in order: the first and the last, and of each of as many equal parts as fit
/// in `limit` the least, the greatest, and the first that is not finite. Peaks stay, and so do gaps.
///
/// ```
/// use accelerator_track::internal::downsample;
///
/// let mut losses = vec![1.0; 10_000];
/// losses[777] = 9.0;
/// let shown = downsample(&losses, 100);
/// assert!(shown.len() <= 100 && shown.contains(&777));
/// ```
#[must_use]
pub fn downsample(values: &[f64], limit: usize) -> Vec<usize> {
    let limit = limit.max(LEAST_LIMIT);
    if values.len() <= limit {
        return (0..values.len()).collect();
    }
    let last = values.len() - 1;
    let of_each = if values.iter().all(|x| x.is_finite()) {
        2
    } else {
        3
    };
    let parts = (limit - 2) / of_each;
    let edge = |part: usize| 1 + (last - 1) * part / parts;
    let mut kept = vec![0];
    for part in 0..parts {
        let inside = edge(part)..edge(part + 1);
        let finite = || inside.clone().filter(|&at| values[at].is_finite());
        let mut of_part = [
            finite().min_by(|&a, &b| values[a].total_cmp(&values[b])),
            finite().max_by(|&a, &b| values[a].total_cmp(&values[b])),
            inside.clone().find(|&at| !values[at].is_finite()),
        ];
        of_part.sort_unstable();
        kept.extend(of_part.into_iter().flatten());
    }
    kept.push(last);
    kept.dedup();
    kept
}

const LEAST_LIMIT: usize = 8;

/// Media that was logged under a key, at some of its steps.
#[derive(Clone, Debug, Serialize)]
pub(super) struct KeyMedia {
    kind: &'static str,
    key: String,
    /// The number of times that it was logged.
    of: usize,
    items: Vec<MediaItem>,
}

#[derive(Clone, Debug, Serialize)]
struct MediaItem {
    s: u64,
    #[serde(flatten)]
    content: ItemContent,
}

#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
enum ItemContent {
    Text {
        text: String,
    },
    Histogram {
        bins: Vec<[Number; 3]>,
    },
    Image {
        /// `None` if the file is missing.
        src: Option<String>,
        width: u32,
        height: u32,
    },
    Plot {
        x: String,
        y: String,
        points: Vec<[Number; 2]>,
    },
}

/// Returns media by key, in the order in which keys first occur; of a key that was logged at many steps, some of them,
/// including the first and the last.
pub(super) fn media_by_key(run: &RunHistory) -> Vec<KeyMedia> {
    let mut by_key: Vec<(&'static str, &str, Vec<&Media>)> = Vec::new();
    for media in &run.media {
        let kind = kind(&media.content);
        match by_key
            .iter_mut()
            .find(|(its, key, _)| *its == kind && *key == media.key)
        {
            Some((_, _, all)) => all.push(media),
            None => by_key.push((kind, &media.key, vec![media])),
        }
    }
    let mut budget = IMAGE_BYTES;
    let of_key = |(kind, key, mut all): (&'static str, &str, Vec<&Media>)| {
        all.sort_by_key(|media| media.step);
        let most = if kind == "image" { IMAGES } else { ITEMS };
        let items = spread(all.len(), most).map(|at| MediaItem {
            s: all[at].step,
            content: content(run, &all[at].content, &mut budget),
        });
        KeyMedia {
            kind,
            key: key.to_owned(),
            of: all.len(),
            items: items.collect(),
        }
    };
    by_key.into_iter().map(of_key).collect()
}

/// The bytes of an image in a run's folder, if the file is one that a run writes.
fn read_image(file: &Path) -> Option<Vec<u8>> {
    let name = file.file_name()?.to_str()?;
    let is_hash = !name.is_empty() && name.bytes().all(|x| x.is_ascii_hexdigit());
    if !is_hash || file.parent()?.file_name()? != "blobs" {
        return None;
    }
    let mut bytes = Vec::new();
    let file = File::open(file).ok()?;
    file.take(LARGEST_IMAGE + 1).read_to_end(&mut bytes).ok()?;
    (bytes.len() as u64 <= LARGEST_IMAGE).then_some(bytes)
}

/// `image/png` or `image/jpeg`, by the first bytes.
fn image_type(bytes: &[u8]) -> Option<&'static str> {
    match bytes {
        [0x89, b'P', b'N', b'G', ..] => Some("image/png"),
        [0xff, 0xd8, ..] => Some("image/jpeg"),
        _ => None,
    }
}

/// Steps of a key that a page shows.
const ITEMS: usize = 40;
const IMAGES: usize = 24;
/// All images of a run in a page.
const IMAGE_BYTES: usize = 32 << 20;
const LARGEST_IMAGE: u64 = 16 << 20;

fn kind(content: &MediaContent) -> &'static str {
    match content {
        MediaContent::Text(_) => "text",
        MediaContent::Histogram(_) => "histogram",
        MediaContent::Image { .. } => "image",
        MediaContent::Plot { .. } => "plot",
    }
}

fn content(run: &RunHistory, content: &MediaContent, budget: &mut usize) -> ItemContent {
    match content {
        MediaContent::Text(text) => ItemContent::Text { text: text.clone() },
        MediaContent::Histogram(bins) => ItemContent::Histogram {
            bins: bins.iter().map(|bin| bin.map(Number)).collect(),
        },
        MediaContent::Plot {
            x_label,
            y_label,
            points,
        } => ItemContent::Plot {
            x: x_label.clone(),
            y: y_label.clone(),
            points: points.iter().map(|point| point.map(Number)).collect(),
        },
        MediaContent::Image {
            file,
            width,
            height,
            ..
        } => ItemContent::Image {
            src: inline(&run.folder, file, budget),
            width: *width,
            height: *height,
        },
    }
}

fn inline(folder: &Path, file: &Path, budget: &mut usize) -> Option<String> {
    if !file.starts_with(folder) {
        return None;
    }
    let bytes = read_image(file)?;
    *budget = budget.checked_sub(bytes.len())?;
    let mime = image_type(&bytes)?;
    Some(format!("data:{mime};base64,{}", STANDARD.encode(bytes)))
}

/// `most` of `count` numbers at equal distances, with the first and the last.
fn spread(count: usize, most: usize) -> impl Iterator<Item = usize> {
    let shown = count.min(most);
    (0..shown).map(move |at| match shown {
        1 => count - 1,
        _ => at * (count - 1) / (shown - 1),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_values_are_all_kept() {
        assert!(downsample(&[], 1000).is_empty());
        assert_eq!(downsample(&[1.0, f64::NAN, 3.0], 1000), [0, 1, 2]);
    }

    #[test]
    fn peaks_ends_and_gaps_stay_and_the_limit_holds() {
        let mut values: Vec<f64> = (0..100_000).map(|x| f64::from(x % 97) / 97.0).collect();
        values[12_345] = 50.0;
        values[54_321] = -50.0;
        for limit in [8, 10, 200, 999, 1000] {
            let kept = downsample(&values, limit);
            assert!(kept.len() <= limit, "{} of {limit}", kept.len());
            assert!(kept.len() * 2 > limit);
            assert!(kept.is_sorted_by(|a, b| a < b));
            for at in [0, 12_345, 54_321, 99_999] {
                assert!(kept.contains(&at), "{at} of {limit}");
            }
        }
        values[70_000] = f64::NAN;
        values[80_000] = f64::INFINITY;
        let kept = downsample(&values, 1000);
        assert!(kept.len() <= 1000);
        for at in [12_345, 54_321, 70_000, 80_000] {
            assert!(kept.contains(&at), "{at}");
        }
    }

    #[test]
    fn a_series_without_a_finite_value_is_thinned_too() {
        let kept = downsample(&[f64::NAN; 5000], 100);
        assert!(kept.len() <= 100 && kept.len() > 30, "{}", kept.len());
    }

    #[test]
    fn steps_are_in_order_and_times_are_relative() {
        let point = |step: u64| Point {
            step,
            epoch: (step > 10).then_some(step as f64 / 10.0),
            value: if step == 777 { 9.0 } else { 1.0 },
            count: None,
            ms: 5000 + step,
        };
        let points: Vec<Point> = (0..2000).rev().map(point).collect();
        let columns = Columns::of(&points, 5000, 1000);
        assert!(columns.s.is_sorted() && columns.s.len() <= 1000);
        assert_eq!(columns.t, columns.s, "times are relative");
        assert_eq!(columns.e.unwrap()[0], None);
        assert!(columns.s.contains(&777), "a peak stays");
    }

    #[test]
    fn some_of_many_with_both_ends() {
        assert_eq!(spread(3, 5).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(spread(0, 5).count(), 0);
        assert_eq!(spread(9, 1).collect::<Vec<_>>(), [8]);
        assert_eq!(spread(101, 3).collect::<Vec<_>>(), [0, 50, 100]);
    }

    #[test]
    fn no_other_file_is_an_image() {
        let folder = tempfile::tempdir().unwrap();
        let blobs = folder.path().join("blobs");
        std::fs::create_dir(&blobs).unwrap();
        std::fs::write(blobs.join("ab12"), b"\x89PNG").unwrap();
        std::fs::write(folder.path().join("secret"), b"x").unwrap();
        assert_eq!(read_image(&blobs.join("ab12")).unwrap(), b"\x89PNG");
        assert_eq!(read_image(&blobs.join("../secret")), None);
        assert_eq!(read_image(&folder.path().join("ab12")), None);
        assert_eq!(
            image_type(b"<svg>"),
            None,
            "a script's type is never claimed"
        );
    }
}
