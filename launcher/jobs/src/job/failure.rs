//! The launcher's `failure.json`, as far as a job's failure is shown by it.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::{Failure, Role};

/// How many lines of output a failure shows.
pub(crate) const LAST_LINES: usize = 20;

/// The output of the agent of a node, in the folder of its job.
pub(crate) fn node_log(folder: &Path, node: usize) -> PathBuf {
    folder.join(format!("node-{node}.log"))
}

/// Reads the report of the job's last failure from a log folder of its launcher, where there is one.
pub(crate) fn read_failure(log_dir: &Path, job: &str) -> Option<Failure> {
    let first = Report::read(log_dir)?.first?;
    Some(Failure {
        instance: Some(Role::instance_name(job, first.node)),
        exit_code: first.exit_code,
        reason: format!("rank {}: {}", first.rank, first.cause),
        last_lines: first.last_words,
    })
}

/// How often the launcher had started its ranks again when it wrote that report.
pub(crate) fn launcher_restarts(log_dir: &Path) -> u32 {
    Report::read(log_dir).map_or(0, |report| report.restarts)
}

/// The fields of `failure.json` that are shown.
#[derive(Deserialize)]
struct Report {
    #[serde(default)]
    restarts: u32,
    first: Option<FirstFailure>,
}

impl Report {
    fn read(log_dir: &Path) -> Option<Self> {
        let text = std::fs::read(log_dir.join("latest/failure.json")).ok()?;
        serde_json::from_slice(&text).ok()
    }
}

#[derive(Deserialize)]
struct FirstFailure {
    rank: usize,
    node: usize,
    cause: String,
    exit_code: Option<i32>,
    last_words: Vec<String>,
}
