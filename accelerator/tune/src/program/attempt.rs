use std::collections::{BTreeSet, VecDeque};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc::Receiver;
use std::time::Instant;

use super::lines::{FileWriter, MetricsLine};
use crate::checkpoint_folder;
use crate::error::{Error, Result};
use crate::host::TrialProcess;
use crate::runner::{Offer, RunnerEvent};
use crate::trial_id::TrialId;

/// A process of a program, which carries out one attempt at a trial.
#[derive(Debug)]
pub(super) struct ProgramAttempt {
    pub(super) trial: TrialId,
    pub(super) slot: usize,
    /// The trial's.
    pub(super) folder: PathBuf,
    pub(super) process: TrialProcess,
    pub(super) iteration: u64,
    pub(super) since: Instant,
    /// The reports that it has printed and that are not passed on yet.
    pub(super) reports: VecDeque<MetricsLine>,
    /// The checkpoints that it has named.
    pub(super) named: BTreeSet<PathBuf>,
    /// The report whose answer is awaited.
    pub(super) unanswered: Option<UnansweredReport>,
    /// The channel from which a permit is taken for each report; `None` once no more are wanted.
    pub(super) permits: Option<Receiver<()>>,
    /// The number of its outputs that are open.
    pub(super) open: usize,
    /// Held while it may write to its file of metrics.
    pub(super) writer: Option<FileWriter>,
    pub(super) exited: Option<Instant>,
    /// The time at which it was asked to end.
    pub(super) stopping: Option<Instant>,
    /// The reason for that, if it has done something that it may not.
    pub(super) failure: Option<String>,
    pub(super) has_reported: bool,
    /// A rank other than 0 that has printed reports.
    pub(super) other_rank: Option<usize>,
}

#[derive(Debug)]
pub(super) struct UnansweredReport {
    /// The checkpoint that the program has saved.
    checkpoint: Option<PathBuf>,
}

impl ProgramAttempt {
    /// The next report, unless an earlier one is not answered.
    pub(super) fn next_report(&mut self) -> Option<RunnerEvent> {
        if self.unanswered.is_some() || self.stopping.is_some() {
            return None;
        }
        let report = self.reports.pop_front()?;
        if let Some(path) = &report.checkpoint
            && let Some(refusal) = self.refusal(path)
        {
            self.failure = Some(refusal);
            self.stop();
            return None;
        }
        // There is one: its sender has put it there before.
        let _ = self.permits.as_ref().map(Receiver::try_recv);
        self.iteration += 1;
        let offer = match report.checkpoint {
            Some(_) => Offer::Checkpoint,
            None => Offer::Nothing,
        };
        self.unanswered = Some(UnansweredReport {
            checkpoint: report.checkpoint,
        });
        let seconds = self.since.elapsed().as_secs_f64();
        self.since = Instant::now();
        Some(RunnerEvent::Reported {
            trial: self.trial,
            iteration: self.iteration,
            metrics: report.metrics,
            seconds,
            offer,
        })
    }

    /// Returns the reason for which a checkpoint that it has named is refused, if it is.
    fn refusal(&mut self, path: &Path) -> Option<String> {
        if path.exists() && !is_within(path, &self.folder) {
            return Some(format!(
                "it named the checkpoint {}, which is not in its folder {}: the search moves what is named, so save it below \
                 `{{folder}}`",
                path.display(),
                self.folder.display()
            ));
        }
        let is_new = self.named.insert(path.to_owned());
        (!is_new).then(|| {
            format!(
                "it named the checkpoint {} twice: what is there may be of a later report, since a program does not wait; save \
                 each under a new name",
                path.display()
            )
        })
    }

    /// Returns `true` if it has ended, its outputs are closed, and its last report is answered.
    pub(super) fn is_over(&self) -> bool {
        self.open == 0 && self.exited.is_some() && self.unanswered.is_none()
    }

    /// Reaps its process and returns the event of its end.
    pub(super) fn end(mut self) -> RunnerEvent {
        let trial = self.trial;
        let status = self.process.reap();
        if let Some(message) = self.failure {
            return RunnerEvent::Failed { trial, message };
        }
        match (self.stopping, status) {
            (Some(_), _) => RunnerEvent::Stopped { trial },
            (None, Some(status)) if status.success() => match self.other_rank {
                Some(rank) if !self.has_reported => RunnerEvent::Failed {
                    trial,
                    message: format!(
                        "rank {rank} printed reports, and rank 0 none: reports are those of rank 0, so print them there"
                    ),
                },
                _ => RunnerEvent::Ended { trial },
            },
            (None, status) => RunnerEvent::Failed {
                trial,
                message: self.process.failure(status),
            },
        }
    }

    /// Keeps the checkpoint that the program has named in its report.
    pub(super) fn keep_checkpoint(&mut self, folder: &Path) -> Result<Option<RunnerEvent>> {
        let Some(report) = &mut self.unanswered else {
            return Ok(None);
        };
        let Some(path) = &report.checkpoint else {
            return Ok(None);
        };
        let partial = checkpoint_folder::partial(folder);
        let taken = checkpoint_folder::begin(folder).and_then(|()| {
            let name = path.file_name().unwrap_or_default();
            fs::rename(path, partial.join(name))
        });
        if let Err(error) = taken {
            checkpoint_folder::abandon(folder);
            tracing::warn!("the checkpoint {} cannot be taken: {error}", path.display());
            report.checkpoint = None;
            return Ok(None);
        }
        let bytes = checkpoint_folder::commit(folder)?;
        Ok(Some(RunnerEvent::Saved {
            trial: self.trial,
            iteration: self.iteration,
            bytes,
        }))
    }

    /// Its report is answered: a checkpoint that is not kept is removed.
    pub(super) fn answered(&mut self) -> Result<()> {
        let report = self.unanswered.take();
        let Some(unused) = report.and_then(|report| report.checkpoint) else {
            return Ok(());
        };
        if !is_within(&unused, &self.folder) {
            return Ok(());
        }
        let removed = match unused.is_dir() {
            true => fs::remove_dir_all(&unused),
            false => fs::remove_file(&unused),
        };
        removed.map_err(|error| Error::io("remove", &unused, error))
    }

    /// Asks it to end.
    pub(super) fn stop(&mut self) {
        self.stopping = Some(Instant::now());
        self.permits = None;
        self.process.terminate();
    }
}

/// Returns `true` if something is there, below a trial's folder. Paths elsewhere are the program's own.
fn is_within(path: &Path, folder: &Path) -> bool {
    let place = |path: &Path| path.canonicalize().ok();
    let (Some(path), Some(folder)) = (place(path), place(folder)) else {
        return false;
    };
    path.starts_with(&folder) && path != folder
}
