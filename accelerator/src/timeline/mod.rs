//! Where the time of a step goes.
//!
//! Ask for it when the accelerator is built, and read the [`StepSummary`]; or write a
//! [trace](crate::AcceleratorBuilder::with_trace) of all ranks and look at it.

mod clock;
mod event;
mod interval;
mod place;
mod recorder;
mod ring;
mod span;
mod summary;
mod trace;

use core::fmt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use accelerator_collective::ProcessGroup;

pub(crate) use self::event::{Part, Phase};
pub(crate) use self::recorder::Recording;
pub(crate) use self::span::Span;
pub use self::summary::{Figure, StepSummary};

use self::clock::Meeting;
pub(crate) use self::place::Place;
use self::recorder::Recorder;
use self::trace::RankTrace;
use crate::error::{Error, Result};
use crate::notice;

/// What one rank notes about its steps: a handle, clones of which note in one place.
///
/// Where nothing is recorded, each method is one branch, and no clock is read.
#[derive(Clone)]
pub(crate) struct Timeline(Arc<Inner>);

struct Inner {
    rank: usize,
    recorder: Option<Arc<Recorder>>,
    /// How many optimizer steps this process did.
    steps: AtomicU64,
    /// Whether the trace was written.
    written: AtomicBool,
}

impl Timeline {
    /// For a rank of that group, whose operations it will see.
    #[track_caller]
    pub(crate) fn new(group: &ProcessGroup, recording: Recording) -> Result<Self> {
        let recorder = match recording {
            Recording::Nothing => None,
            Recording::Steps | Recording::Events => Some(Arc::new(Recorder::new(recording))),
        };
        if let Some(recorder) = &recorder
            && group.world_size() > 1
        {
            let recorder = Arc::clone(recorder);
            group.observe(move |operation| recorder.communicated(operation))?;
        }
        let timeline = Self(Arc::new(Inner {
            rank: group.rank(),
            recorder,
            steps: AtomicU64::new(0),
            written: AtomicBool::new(false),
        }));
        if recording == Recording::Events {
            timeline.meet(group)?;
        }
        Ok(timeline)
    }

    /// Begins a phase on the thread that trains; it ends when the guard is dropped. Phases may lie
    /// within each other: the time of the inner one counts for it alone.
    pub(crate) fn span(&self, phase: Phase) -> Span<'_> {
        let recorder = self.0.recorder.as_deref();
        Span::enter(phase, self.0.rank, self.steps(), recorder)
    }

    /// Begins to load a batch on a worker's thread; the end is that of the guard.
    pub(crate) fn load(&self, worker: usize) -> impl Drop + use<'_> {
        span::Load::begin(worker, self.0.recorder.as_deref())
    }

    /// A batch came, for which the loop had waited since `start`.
    pub(crate) fn batch_came(&self, start: Instant, end: Instant) {
        if let Some(recorder) = &self.0.recorder {
            recorder.batch_came(start, end);
        }
    }

    /// The loss is computed, and `backward` was called.
    pub(crate) fn backward_begins(&self) {
        if let Some(recorder) = &self.0.recorder {
            recorder.backward_begins();
        }
    }

    /// `backward` is done.
    pub(crate) fn backward_ends(&self) {
        if let Some(recorder) = &self.0.recorder {
            recorder.backward_ends();
        }
    }

    /// What was begun since the last step will not become one.
    pub(crate) fn step_failed(&self) {
        if let Some(recorder) = &self.0.recorder {
            recorder.step_failed();
        }
    }

    /// The optimizer has moved the model.
    pub(crate) fn step_ends(&self) {
        let step = self.0.steps.fetch_add(1, Ordering::Relaxed);
        if let Some(recorder) = &self.0.recorder {
            let times = recorder.step_ends();
            tracing::debug!(rank = self.0.rank, step, times = %times, "step");
        }
    }

    /// What the steps so far came to.
    pub(crate) fn summary(&self) -> Option<StepSummary> {
        self.0.recorder.as_ref()?.summary()
    }

    /// Gathers the events of all ranks and lets rank 0 write them to `path`, where a trace is
    /// recorded. A rank that cannot reach rank 0 writes its own beside it.
    #[track_caller]
    pub(crate) fn write(&self, group: &ProcessGroup, path: &Path) -> Result<()> {
        let Some(recorder) = &self.0.recorder else {
            return Ok(());
        };
        if self.0.written.swap(true, Ordering::Relaxed) {
            return Ok(());
        }
        let met = self.meet(group);
        let own = RankTrace::new(self.0.rank, recorder);
        let gathered = match met {
            Ok(()) => group.gather_object(&own, 0).map_err(Error::from),
            Err(error) => Err(error),
        };
        let (path, ranks) = match gathered {
            Ok(None) => return Ok(()),
            Ok(Some(ranks)) => (path.to_owned(), ranks),
            Err(error) => {
                let path = place::of_rank(path, own.rank);
                let shown = path.display();
                tracing::warn!(%error, path = %shown, "ranks are missing: the trace is this rank's alone");
                (path, vec![own])
            }
        };
        put(&path, &ranks)
    }

    /// Writes what this rank alone noted, where nothing was written before: beside the trace that it
    /// would have been a part of, or as the trace where there is no other rank. Waits for nobody.
    pub(crate) fn write_own(&self, world_size: usize, path: &Path) -> Result<()> {
        let Some(recorder) = &self.0.recorder else {
            return Ok(());
        };
        if self.0.written.swap(true, Ordering::Relaxed) {
            return Ok(());
        }
        let path = match world_size {
            1 => path.to_owned(),
            _ => place::of_rank(path, self.0.rank),
        };
        put(&path, &[RankTrace::new(self.0.rank, recorder)])
    }

    /// Compares clocks with the other ranks.
    #[track_caller]
    fn meet(&self, group: &ProcessGroup) -> Result<()> {
        if let Some(recorder) = &self.0.recorder {
            let meeting = Meeting::hold(group, recorder.anchor())?;
            recorder.met(meeting);
        }
        Ok(())
    }

    fn steps(&self) -> u64 {
        self.0.steps.load(Ordering::Relaxed)
    }
}

/// Writes a trace, and says where.
fn put(path: &Path, ranks: &[RankTrace]) -> Result<()> {
    let written = Place::find(path).and_then(|place| trace::write(&place, ranks));
    written.map_err(|error| Error::io("write the trace", path, error))?;
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    notice::tell(&format!(
        "trace of {} written to {}: open it with https://ui.perfetto.dev",
        match ranks {
            [one] => format!("rank {}", one.rank),
            _ => format!("{} ranks", ranks.len()),
        },
        path.display()
    ));
    Ok(())
}

impl fmt::Debug for Timeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Timeline")
            .field("rank", &self.0.rank)
            .field("recorder", &self.0.recorder)
            .finish_non_exhaustive()
    }
}
