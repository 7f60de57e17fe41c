//! What the launcher says of runs whose job has failed.

use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::Value;

use super::worker::Journal;
use crate::error::{Error, Result};
use crate::journal::{self, JOURNAL, RunLock, now_ms};
use crate::provenance::mask_value;
use crate::record::{EndStatus, Record};
use crate::run_files::FAILURE;

/// Ends the runs of a launch that did not finish as failed with that cause, and puts the report into their folders, as
/// `failure.json`. Both are masked, as [`mask_arguments`](crate::mask_arguments) does. Gives the folders of those runs.
///
/// ```
/// use accelerator_track::{Run, RunHistory, record_failure};
///
/// # let temporary = tempfile::tempdir().unwrap();
/// # let runs = temporary.path();
/// let run = Run::builder("mnist").runs_folder(runs).launch("b7f2").start()?;
/// drop(run);                                              // the program is killed
/// let report = serde_json::json!({ "exit_code": 137 });
/// let folders = record_failure(runs, "b7f2", "rank 1 was killed", &report)?;
/// assert_eq!(RunHistory::read(&folders[0])?.end.unwrap().failure.unwrap(), "rank 1 was killed");
/// assert!(folders[0].join("failure.json").exists());
/// # Ok::<(), accelerator_track::Error>(())
/// ```
///
/// # Errors
///
/// If a run of the launch cannot be written, or the folder of runs cannot be read; where there is none, no run is
/// recorded in it.
pub fn record_failure(
    runs: impl AsRef<Path>,
    launch: &str,
    cause: &str,
    report: &impl Serialize,
) -> Result<Vec<PathBuf>> {
    let runs = runs.as_ref();
    let unread = |error| Error::io("read the folder", runs, error);
    if !runs.is_dir() {
        return Ok(Vec::new());
    }
    let report = serde_json::to_value(report).map(mask_value);
    let cause = mask_value(cause.into());
    let mut recorded = Vec::new();
    for entry in runs.read_dir().map_err(unread)? {
        let folder = entry.map_err(unread)?.path();
        // What cannot be read is a run of somebody else.
        let of = journal::unfinished_launch(&folder.join(JOURNAL)).unwrap_or_default();
        if of.as_deref() != Some(launch) || RunLock::is_held(&folder) {
            continue;
        }
        if let Ok(report) = &report {
            let path = folder.join(FAILURE);
            std::fs::write(&path, format!("{report:#}\n"))
                .map_err(|error| Error::io("write", &path, error))?;
        }
        end(folder.clone(), cause.clone())?;
        recorded.push(folder);
    }
    Ok(recorded)
}

fn end(folder: PathBuf, cause: Value) -> Result<()> {
    let lock = RunLock::take(&folder)?;
    let (mut journal, _) = Journal::reopen(folder, lock)?;
    let ending = Record::End {
        status: EndStatus::Failed,
        failure: Some(cause),
    };
    journal.append(now_ms(), ending);
    journal.flush_or_fail()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::{Run, RunHistory, RunStatus};

    #[test]
    fn only_runs_of_the_launch_that_did_not_finish_have_failed() {
        let temporary = tempfile::tempdir().unwrap();
        let runs = temporary.path();
        let begin = |name: &str, launch: &str| {
            let run = Run::builder(name).runs_folder(runs).launch(launch);
            run.start().unwrap()
        };
        begin("finished", "1").finish().unwrap();
        drop(begin("killed", "1"));
        begin("failed", "1").fail("rank 1 is lost").unwrap();
        drop(begin("other", "2"));
        let report = json!({ "command": ["train", "--api-key", "abc"], "last_words": ["at http://me:abc@host/x"] });
        let cause = "rank 1 failed first: no http://me:abc@host/x";
        let recorded = record_failure(runs, "1", cause, &report).unwrap();
        assert_eq!(recorded.len(), 2);
        let status = |name: &str| RunHistory::read(runs.join(name)).unwrap().status();
        assert_eq!(status("finished"), RunStatus::Finished);
        assert_eq!(status("other"), RunStatus::Interrupted);
        for name in ["killed", "failed"] {
            let end = RunHistory::read(runs.join(name)).unwrap().end.unwrap();
            let cause = "rank 1 failed first: no http://***@host/x";
            assert_eq!(
                (end.status, end.failure.unwrap()),
                (EndStatus::Failed, json!(cause))
            );
            let kept = std::fs::read_to_string(runs.join(name).join(FAILURE)).unwrap();
            assert!(kept.contains("train") && !kept.contains("abc"), "{kept}");
        }
    }

    #[test]
    fn a_job_without_runs_leaves_nothing() {
        let temporary = tempfile::tempdir().unwrap();
        let runs = temporary.path().join("runs");
        assert_eq!(
            record_failure(&runs, "1", "x", &json!({})).unwrap(),
            [""; 0].map(PathBuf::from)
        );
        assert!(!runs.exists());
    }
}
