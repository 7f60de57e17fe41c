//! Reports of runs: one HTML file.

use std::collections::HashMap;
use std::fs;
use std::io::{self, Write};
use std::path::Path;

use serde::Serialize;

use crate::error::{Error, Result};
use crate::history::RunHistory;
use crate::journal::now_ms;
pub use downsample::downsample;
pub(crate) use model::PageRun;
pub use page::HtmlPage;
pub(crate) use page::runs_page;

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

    /// The page. An image whose file is missing is named in its place.
    ///
    /// ```
    /// let page = accelerator_track::Report::of(&[]).html();
    /// assert!(page.starts_with("<!DOCTYPE html>"));
    /// ```
    #[must_use]
    pub fn html(&self) -> String {
        let runs = self.page_runs();
        let title = match runs.as_slice() {
            [run] => run.label.clone(),
            runs => format!("Comparison of {} runs", runs.len()),
        };
        runs_page(&title, &PageData::of(runs.iter().collect()))
    }

    /// Writes the page to a file, which it replaces as a whole or not at all.
    ///
    /// # Errors
    ///
    /// If the file cannot be written.
    pub fn write(&self, file: impl AsRef<Path>) -> Result<()> {
        write(file.as_ref(), &self.html())
    }

    /// Labels runs from different folders by their paths if they would have the same label.
    fn page_runs(&self) -> Vec<PageRun> {
        let points = points_of(self.runs.len());
        let runs = self.runs.iter().enumerate();
        let mut runs: Vec<PageRun> = runs.map(|(i, run)| PageRun::of(run, i, points)).collect();
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

/// The points of each run in a chart: the more runs, the fewer.
pub(crate) fn points_of(runs: usize) -> usize {
    (MOST_POINTS * 20 / runs.max(1)).clamp(200, MOST_POINTS)
}

const MOST_POINTS: usize = 1000;

/// The data of a page of runs.
#[derive(Debug, Serialize)]
pub(crate) struct PageData<'a> {
    generated_ms: u64,
    pub(crate) runs: Vec<&'a PageRun>,
    /// Set if a board serves the page, which then asks it for changes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) board: Option<BoardState>,
}

/// How far a board has read its runs.
#[derive(Debug, Serialize)]
pub(crate) struct BoardState {
    /// Counts changes; the page's next request names it.
    pub(crate) version: u64,
    /// How many runs remain to be read.
    pub(crate) reading: usize,
    /// The numbers of all runs.
    pub(crate) ids: Vec<usize>,
    /// Why runs could not be read.
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
