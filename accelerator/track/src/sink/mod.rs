//! Where a run is delivered to, beside its journal.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::record::Entry;
use crate::run_id::RunId;

pub(crate) mod csv;

/// A place that runs are delivered to: a format of files, a server.
///
/// A sink is a replay of the journal. It never sees an entry that is superseded when it opens: where the program goes
/// back to a checkpoint while the sink is open, it is opened again. Calls come from one thread, which is not the one that
/// trains; a call may take long, and one that fails is made again later.
///
/// ```
/// use accelerator_track::{Entry, Origin, Record, Result, RunInfo, Sink, SinkPosition};
///
/// /// Prints each metric.
/// struct Print;
///
/// impl Sink for Print {
///     fn name(&self) -> String {
///         "standard output".to_owned()
///     }
///     fn open(&mut self, run: &RunInfo) -> Result<SinkPosition> {
///         println!("{}", run.name);
///         Ok(SinkPosition::default())
///     }
///     fn write(&mut self, _: Origin, entry: &Entry) -> Result<()> {
///         if let Record::Metrics(metrics) = &entry.record {
///             println!("{}: {:?}", metrics.step, metrics.points);
///         }
///         Ok(())
///     }
///     fn flush(&mut self) -> Result<()> {
///         Ok(())
///     }
/// }
/// assert_eq!(Print.name(), "standard output");
/// ```
pub trait Sink: Send {
    /// What it is called in messages.
    fn name(&self) -> String;

    /// The options with which `accel-launch runs sync` delivers to it, as `--to csv`; none where that command cannot.
    fn sync_options(&self) -> Vec<String> {
        Vec::new()
    }

    /// When entries are delivered.
    fn delivery(&self) -> Delivery {
        Delivery::Live
    }

    /// Begins a run, and says from where on it is to be delivered: from the start where the sink has nothing, or writes
    /// everything anew. Where the journal ends before, entries come from its start again.
    ///
    /// # Errors
    ///
    /// If the sink cannot take a run now. It is opened again later.
    fn open(&mut self, run: &RunInfo) -> Result<SinkPosition>;

    /// Takes an entry, which it may keep until [`flush`](Sink::flush). Series come before their points.
    ///
    /// # Errors
    ///
    /// If it cannot. The sink is then opened again later.
    fn write(&mut self, origin: Origin, entry: &Entry) -> Result<()>;

    /// Makes what was written visible.
    ///
    /// # Errors
    ///
    /// If it cannot. The sink is then opened again later.
    fn flush(&mut self) -> Result<()>;
}

impl Sink for Box<dyn Sink> {
    fn name(&self) -> String {
        (**self).name()
    }

    fn sync_options(&self) -> Vec<String> {
        (**self).sync_options()
    }

    fn delivery(&self) -> Delivery {
        (**self).delivery()
    }

    fn open(&mut self, run: &RunInfo) -> Result<SinkPosition> {
        (**self).open(run)
    }

    fn write(&mut self, origin: Origin, entry: &Entry) -> Result<()> {
        (**self).write(origin, entry)
    }

    fn flush(&mut self) -> Result<()> {
        (**self).flush()
    }
}

/// When entries are delivered to a sink.
///
/// ```
/// assert_ne!(accelerator_track::Delivery::Live, accelerator_track::Delivery::Settled);
/// ```
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Delivery {
    /// At once. What a resume supersedes must be taken back.
    #[default]
    Live,
    /// When a resume from the latest checkpoint does not supersede them any more: a checkpoint covers them, or the run
    /// finished. A resume from an earlier checkpoint still does. The end of a run that failed or was preempted is
    /// delivered before entries that may still be superseded.
    Settled,
}

/// Whose journal an entry is of.
///
/// ```
/// assert!(accelerator_track::Origin::Run < accelerator_track::Origin::Rank(0));
/// ```
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Origin {
    /// The run's.
    Run,
    /// That of a rank, with what its host measured.
    Rank(usize),
}

/// The run that is delivered.
///
/// ```
/// use accelerator_track::{RunId, RunInfo};
///
/// let run = RunInfo { id: RunId::new(), name: "mnist".to_owned(), folder: "runs/mnist".into(), created_ms: 0 };
/// assert_eq!(run.folder.file_name().unwrap(), "mnist");
/// ```
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct RunInfo {
    /// Its identity.
    pub id: RunId,
    /// Its name, as it was given.
    pub name: String,
    /// Its folder.
    pub folder: PathBuf,
    /// When it was created, in milliseconds since 1970.
    pub created_ms: u64,
}

/// How far a run has been delivered to a sink.
///
/// ```
/// use accelerator_track::SinkPosition;
///
/// assert_eq!(SinkPosition::default().next, 0);
/// ```
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct SinkPosition {
    /// The number of the first entry of the run's journal that has not been delivered.
    pub next: u64,
    /// The same for the journals of ranks.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub ranks: BTreeMap<usize, u64>,
}
