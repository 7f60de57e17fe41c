//! Runners carry trials out: in processes, or in a simulation.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::config::{Config, TrialId};
use crate::error::Result;
use crate::value::Metrics;

/// Carries trials out, several at a time. It decides nothing.
///
/// No call waits for a trial; what trials do arrives as events.
pub(crate) trait TrialRunner {
    /// Returns the number of trials that can compute at the same time.
    ///
    /// More may be started.
    fn slots(&self) -> usize;

    /// Returns `true` if trials take turns when more are started than there are slots. Otherwise they wait for one.
    fn takes_turns(&self) -> bool {
        true
    }

    /// Returns `true` if a trial has its turn: its process starts, or computes.
    fn is_computing(&self, trial: TrialId) -> bool;

    /// Returns the resources in use and in all, such as `2.0/2 CPUs, 0.0/0 GPUs`.
    fn requested(&self) -> Option<String>;

    /// Starts an attempt at a trial: it runs to its first report.
    ///
    /// # Errors
    /// If nothing can be started at all. A failure of one trial is an event.
    fn start(&mut self, start: TrialStart) -> Result<()>;

    /// Tells a trial, which has reported and waits, what to do.
    fn answer(&mut self, trial: TrialId, answer: Answer) -> Result<()>;

    /// Ends an attempt without waiting for it. None of its events arrives any more.
    fn kill(&mut self, trial: TrialId);

    /// The next event, waiting for it that long at most.
    fn next(&mut self, wait: Duration) -> Result<Option<RunnerEvent>>;

    /// Ends every process, within seconds.
    fn close(&mut self);
}

#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) struct TrialStart {
    pub(crate) trial: TrialId,
    pub(crate) config: Config,
    /// The trial's folder, which exists.
    pub(crate) folder: PathBuf,
    /// The checkpoint that it continues from.
    pub(crate) restore: Option<Restore>,
}

#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) struct Restore {
    pub(crate) folder: PathBuf,
    /// The number of iterations that were done when it was saved.
    pub(crate) iteration: u64,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Answer {
    /// Continue to the next report.
    Continue,
    /// Save to that folder, which does not exist yet, and continue.
    Save(PathBuf),
    /// Save to that folder and end.
    Pause(PathBuf),
    Stop,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum RunnerEvent {
    Started {
        trial: TrialId,
        location: Location,
    },
    /// It reports, and waits for the answer.
    Reported {
        trial: TrialId,
        report: Report,
    },
    /// A checkpoint is complete, on the disk, under its final name.
    Saved {
        trial: TrialId,
        iteration: u64,
        bytes: u64,
    },
    /// It has nothing more to do. Its attempt is over.
    Ended {
        trial: TrialId,
    },
    /// Its attempt is over: the program failed, or its process ended.
    Failed {
        trial: TrialId,
        message: String,
    },
    /// After [`Answer::Pause`] or [`Answer::Stop`]: its attempt is over, and its slot is free.
    Stopped {
        trial: TrialId,
    },
}

impl RunnerEvent {
    pub(crate) fn trial(&self) -> TrialId {
        match self {
            Self::Started { trial, .. }
            | Self::Reported { trial, .. }
            | Self::Saved { trial, .. }
            | Self::Ended { trial }
            | Self::Failed { trial, .. }
            | Self::Stopped { trial } => *trial,
        }
    }
}

/// A report of a trial after an iteration.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) struct Report {
    /// Counted from 1.
    pub(crate) iteration: u64,
    pub(crate) metrics: Metrics,
    /// Seconds since the report before, or since its attempt began to compute.
    pub(crate) seconds: f64,
    pub(crate) offer: Offer,
}

/// Tells if a report comes with a checkpoint, as those of functions and programs may.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Offer {
    Checkpoint,
    Nothing,
}

#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(crate) struct Location {
    pub(crate) host: String,
    pub(crate) pid: u32,
}
