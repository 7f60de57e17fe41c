//! What the batch script leaves in the folder of its job: Slurm forgets a job some minutes after its end.

use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;

/// Written when the job starts, and starts again.
pub(super) const RUN: &str = "run.json";
/// Written when it has ended.
pub(super) const END: &str = "end.json";
/// The exit code of the agent on a node; the node's number follows.
pub(super) const AGENT_EXIT: &str = "exit-";
/// What TensorBoard says.
pub(super) const TENSORBOARD_LOG: &str = "tensorboard.log";
/// Begins a line of the batch script's log for each start; the number of the restart follows.
pub(super) const START_MARK: &str = "restart ";

/// The start of a job.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Run {
    /// How often it had been started before.
    pub(super) restarts: u32,
    /// Seconds since 1970.
    pub(super) started: u64,
    pub(super) nodes: Vec<String>,
}

/// The end of a job that Slurm did not kill.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(super) struct RunEnd {
    pub(super) code: i32,
    /// Seconds since 1970.
    pub(super) ended: u64,
    /// Whether Slurm sent SIGTERM: the job was cancelled or preempted, or its time was over.
    pub(super) signalled: bool,
    /// Whether the time limit of the job was over.
    pub(super) timed_out: bool,
}

impl Run {
    /// That of the job's last start; `None` before its first.
    pub(super) fn read(folder: &Path) -> Option<Self> {
        json(&folder.join(RUN))
    }
}

impl RunEnd {
    /// `None` for a job that runs, and for one that Slurm killed.
    pub(super) fn read(folder: &Path) -> Option<Self> {
        json(&folder.join(END))
    }
}

/// What srun and the batch script say.
pub(super) fn batch_log(folder: &Path) -> PathBuf {
    folder.join("slurm.log")
}

/// The exit code of the agent of a node, once it has ended.
pub(super) fn agent_exit(folder: &Path, node: usize) -> Option<i32> {
    let text = fs::read_to_string(folder.join(format!("{AGENT_EXIT}{node}"))).ok()?;
    text.trim().parse().ok()
}

/// Where TensorBoard says that it is, or what else it says at last.
pub(super) fn tensorboard(folder: &Path) -> Option<String> {
    let text = fs::read_to_string(folder.join(TENSORBOARD_LOG)).ok()?;
    let address = |line: &str| {
        let (_, rest) = line.split_once(" at http")?;
        Some(format!("http{}", rest.split_whitespace().next()?))
    };
    let found = text.lines().find_map(address);
    found.or_else(|| text.lines().last().map(str::to_owned))
}

/// The node of the last run whose process was killed for want of memory, as srun reports it:
/// `srun: error: n2: task 1: Out Of Memory`.
pub(super) fn out_of_memory(folder: &Path) -> Option<usize> {
    let text = fs::read_to_string(batch_log(folder)).ok()?;
    let line = text
        .lines()
        .rev()
        .take_while(|line| !line.starts_with(START_MARK))
        .find(|line| line.ends_with("Out Of Memory"))?;
    let (_, tasks) = line.split_once(": task")?;
    let digits = |c: char| !c.is_ascii_digit();
    tasks
        .trim_start_matches(digits)
        .split(digits)
        .next()?
        .parse()
        .ok()
}

fn json<T: DeserializeOwned>(path: &Path) -> Option<T> {
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_tensorboard_says_is_shown() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(tensorboard(folder.path()), None);
        let path = folder.path().join(TENSORBOARD_LOG);
        fs::write(
            &path,
            "some warning\nTensorBoard 2.21.0 at http://n1:40631/ (Press CTRL+C to quit)\n",
        )
        .unwrap();
        assert_eq!(
            tensorboard(folder.path()).as_deref(),
            Some("http://n1:40631/")
        );
        fs::write(&path, "bash: tensorboard: command not found\n").unwrap();
        assert_eq!(
            tensorboard(folder.path()).as_deref(),
            Some("bash: tensorboard: command not found")
        );
    }

    #[test]
    fn the_node_without_memory_is_found() {
        let folder = tempfile::tempdir().unwrap();
        for (line, node) in [
            ("srun: error: n2: task 1: Out Of Memory", Some(1)),
            ("srun: error: n[3-4]: tasks 2-3: Out Of Memory", Some(2)),
            ("srun: error: n2: task 1: Exited with exit code 3", None),
            (
                "srun: error: n2: task 1: Out Of Memory\nrestart 1 of job 7, on n1 n2",
                None,
            ),
        ] {
            fs::write(batch_log(folder.path()), format!("first\n{line}\nlast\n")).unwrap();
            assert_eq!(out_of_memory(folder.path()), node, "{line}");
        }
    }
}
