//! The events that enter the core, and the actions that it asks for.

use serde::{Deserialize, Serialize};

use crate::config::{Config, TrialId};
use crate::searcher::TrialEnd;
use crate::view::TrialResult;

/// An event. The journal holds events in the order in which they were processed.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Event {
    /// A process carries the search out from here on, with that many slots. Attempts of an earlier one are gone.
    Opened {
        slots: usize,
    },
    /// The searcher's reply; `None` where nothing is left to try.
    Suggested {
        trial: TrialId,
        config: Option<Config>,
    },
    Reported {
        trial: TrialId,
        result: TrialResult,
        /// A closure of the search ends the trial: those who read the journal do not have it.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        stop: bool,
    },
    /// A trial continues from results of another, which count as its own. `stop` is the iteration with which a closure
    /// of the search ends it.
    Shared {
        trial: TrialId,
        stop: Option<u64>,
    },
    Ended {
        trial: TrialId,
    },
    Failed {
        trial: TrialId,
        message: String,
    },
    Saved {
        checkpoint: CheckpointKey,
        bytes: u64,
    },
    /// A checkpoint is about to be deleted.
    Deleted {
        checkpoint: CheckpointKey,
    },
    /// The last line: nothing is left to do.
    Finished,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Action {
    /// A result counts: the trial's files get it, and the searcher learns of its value.
    Record {
        branch: Branch,
        result: TrialResult,
    },
    Tell(TrialId, TrialEnd),
    /// A line of the decision log.
    Log(Decision),
    /// The trial's attempt is brought in line with the core: it starts, ends or gets an answer.
    Reconcile(TrialId),
}

/// A decision, which in ordered mode depends on nothing but the configuration and what trials reported.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "snake_case", tag = "decision")]
pub(crate) enum Decision {
    Start {
        trial: TrialId,
        config: Config,
        /// The trial that it continues from, whose configuration is the same up to there.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        from: Option<Origin>,
    },
    Continue {
        trial: TrialId,
        iteration: u64,
    },
    /// A trial saves a checkpoint after a report, and continues.
    Save {
        trial: TrialId,
        iteration: u64,
    },
    Pause {
        trial: TrialId,
        iteration: u64,
    },
    Resume {
        trial: TrialId,
        iteration: u64,
    },
    /// A trial continues after a report as a changed copy of another.
    Exploit {
        trial: TrialId,
        iteration: u64,
        from: Origin,
        config: Config,
    },
    End {
        trial: TrialId,
        iteration: u64,
        why: EndReason,
    },
}

#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum EndReason {
    Completed,
    StopRule,
    Scheduler,
    /// It failed more often than it may.
    Failed,
}

/// Another trial, and how many of its iterations count.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(crate) struct Origin {
    pub(crate) trial: TrialId,
    pub(crate) iteration: u64,
}

#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
pub(crate) struct CheckpointKey {
    pub(crate) branch: Branch,
    /// The number of iterations that were done.
    pub(crate) iteration: u64,
}

impl CheckpointKey {
    /// The name of its folder in the trial's, such as `checkpoint_000004`.
    pub(crate) fn folder_name(self) -> String {
        let iteration = self.iteration;
        match self.branch.generation {
            0 => format!("checkpoint_{iteration:06}"),
            generation => format!("checkpoint_{iteration:06}.{generation}"),
        }
    }
}

/// A trial with one configuration. Exploiting another gives a trial a new branch.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
pub(crate) struct Branch {
    pub(crate) trial: TrialId,
    /// The number of times that the trial has exploited another.
    pub(crate) generation: u32,
}
