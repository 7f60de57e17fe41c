//! Reports of runs: one HTML file.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io::{self, Write};
use std::path::Path;

use serde::Serialize;

use crate::error::{Error, Result};
use crate::history::RunHistory;
use crate::journal::now_ms;
pub(crate) use downsample::Columns;
pub use downsample::downsample;
pub(crate) use media::ImageSource;
#[cfg(feature = "board")]
pub(crate) use media::{image_type, read_image};
pub(crate) use model::{PageDetail, PageRun};
pub use page::HtmlPage;
pub(crate) use page::{Page, page};

mod downsample;
mod media;
mod model;
mod page;

/// A report of a run, or a comparison of several: one HTML file that asks no network for anything.
///
/// It shows metrics as charts, hyperparameters, what the runs ran on, texts, histograms, images, plots, what the hosts
/// measured, restarts, artifacts with their lineage, failures, and links to timelines. A chart has at most 1000 points of a
/// run; the least and the greatest value of each part are among them.
///
/// ```
/// use accelerator_track::{Report, Run, RunHistory};
///
/// # fn main() -> accelerator_track::Result<()> {
/// # let temporary = tempfile::tempdir().unwrap();
/// # let runs = temporary.path();
/// let run = Run::builder("mnist").runs_folder(runs).start()?;
/// run.log("train", [("loss", 0.5)], 1, None);
/// let folder = run.folder().to_owned();
/// run.finish()?;
///
/// let history = RunHistory::read(folder)?;
/// Report::of(&[history]).write(runs.join("mnist.html"))?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Report<'a> {
    runs: &'a [RunHistory],
}

impl<'a> Report<'a> {
    /// A report of these runs, in this order.
    #[must_use]
    pub fn of(runs: &'a [RunHistory]) -> Self {
        Self { runs }
    }

    /// The page. An image whose file is not there is named in its place.
    ///
    /// ```
    /// let page = accelerator_track::Report::of(&[]).html();
    /// assert!(page.starts_with("<!DOCTYPE html>"));
    /// ```
    #[must_use]
    pub fn html(&self) -> String {
        let mut series: BTreeMap<&str, Vec<PageColumns>> = BTreeMap::new();
        let points = points_of(self.runs.len());
        for (i, run) in self.runs.iter().enumerate() {
            for one in &run.series {
                series.entry(&one.key).or_default().push(PageColumns {
                    run: i,
                    columns: Columns::of(&one.points, run.created_ms, points),
                });
            }
        }
        let details = self.runs.iter();
        let data = ReportData {
            generated_ms: now_ms(),
            details: details
                .map(|run| PageDetail::of(run, ImageSource::Inline))
                .collect(),
            runs: self.page_runs(),
            series,
        };
        let title = match data.runs.as_slice() {
            [run] => run.label.clone(),
            runs => format!("Comparison of {} runs", runs.len()),
        };
        page(&Page::Report {
            title: &title,
            data: &serde_json::to_string(&data).unwrap_or_default(),
            runs: &data.runs,
        })
    }

    /// Writes the page to a file, which it replaces as a whole or not at all.
    ///
    /// # Errors
    ///
    /// If the file cannot be written.
    pub fn write(&self, file: impl AsRef<Path>) -> Result<()> {
        write(file.as_ref(), &self.html())
    }

    /// Runs of several folders of runs may have one label: those have their paths.
    fn page_runs(&self) -> Vec<PageRun> {
        let runs = self.runs.iter().enumerate();
        let mut runs: Vec<PageRun> = runs.map(|(i, run)| PageRun::of(run, i)).collect();
        let mut count = HashMap::new();
        for run in &runs {
            *count.entry(run.label.clone()).or_insert(0) += 1;
        }
        for (run, history) in runs.iter_mut().zip(self.runs) {
            if count[&run.label] > 1 {
                run.label = history.folder.display().to_string();
            }
        }
        runs
    }
}

fn write(file: &Path, page: &str) -> Result<()> {
    replace(file, page).map_err(|error| Error::io("write the report", file, error))
}

/// What is no plain file, such as a pipe, is written to.
fn replace(path: &Path, text: &str) -> io::Result<()> {
    if fs::metadata(path).is_ok_and(|found| !found.is_file()) {
        return fs::write(path, text);
    }
    let folder = match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    let mut builder = tempfile::Builder::new();
    // As others are: what the system makes of it takes away what the user does not allow.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let mut file = builder.tempfile_in(folder)?;
    file.write_all(text.as_bytes())?;
    file.persist(path).map_err(|error| error.error)?;
    Ok(())
}

/// The points that a chart gets of each run: the more runs, the fewer.
pub(crate) fn points_of(runs: usize) -> usize {
    (MOST_POINTS * 20 / runs.max(1)).clamp(200, MOST_POINTS)
}

/// The points of a run in a chart, at most.
pub(crate) const MOST_POINTS: usize = 1000;

/// The columns of a series of one run.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct PageColumns {
    pub(crate) run: usize,
    #[serde(flatten)]
    pub(crate) columns: Columns,
}

#[derive(Serialize)]
struct ReportData<'a> {
    generated_ms: u64,
    runs: Vec<PageRun>,
    details: Vec<PageDetail>,
    series: BTreeMap<&'a str, Vec<PageColumns>>,
}
