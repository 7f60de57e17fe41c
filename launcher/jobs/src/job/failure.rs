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
    let text = std::fs::read(log_dir.join("latest/failure.json")).ok()?;
    let report: Report = serde_json::from_slice(&text).ok()?;
    let first = report.first?;
    Some(Failure {
        instance: Some(Role::instance_name(job, first.node)),
        exit_code: first.exit_code,
        reason: format!("rank {}: {}", first.rank, first.cause),
        last_lines: first.last_words,
    })
}

/// The fields of `failure.json` that are shown.
#[derive(Deserialize)]
struct Report {
    first: Option<FirstFailure>,
}

#[derive(Deserialize)]
struct FirstFailure {
    rank: usize,
    node: usize,
    cause: String,
    exit_code: Option<i32>,
    last_words: Vec<String>,
}
