//! The state that the caller of a communicator and its watching thread share.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use accelerator_host::sync::{Condvar, Mutex, MutexGuard};

use super::link::Link;
use crate::api::{CallError, Progress};
use crate::error::{Error, Kind, Result};
use crate::failure_detector::FailureDetector;
use crate::gpu::{Event, Gpu, Stream};

/// A communicator without its thread.
#[derive(Debug)]
pub(super) struct CommunicatorInner {
    pub(super) gpu: Gpu,
    pub(super) stream: Stream,
    /// The event that the next operation waits for.
    pub(super) before: Event,
    /// The end of the latest operation.
    pub(super) done: Event,
    pub(super) detector: Arc<dyn FailureDetector>,
    pub(super) timeouts: CommTimeouts,
    /// This rank's name in messages, such as `rank 1 of 4`.
    pub(super) who: String,
    state: Mutex<CommState>,
    changed: Condvar,
}

/// The longest waits for peers.
#[derive(Clone, Copy, Debug)]
pub(super) struct CommTimeouts {
    /// The wait until all are there.
    pub(super) connecting: Duration,
    /// The wait until all end.
    pub(super) closing: Duration,
}

/// The changing state of a communicator.
#[derive(Debug)]
pub(super) struct CommState {
    pub(super) phase: Phase,
    /// `None` once it is given back.
    pub(super) link: Option<Link>,
    pub(super) work: Work,
    pub(super) owner: CallerHandle,
}

/// See the README of this crate for the way through these.
#[derive(Debug)]
pub(super) enum Phase {
    Connecting,
    Ready,
    /// There is a reason to end; the watching thread will.
    Ending(Error),
    /// NCCL has let go of everything.
    Ended(Error),
    /// The communicator has ended in good order.
    Closed,
}

/// The work that is enqueued, as far as is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    /// Nothing that has not ended.
    None,
    /// The event does not tell of it yet.
    Enqueuing,
    /// The event tells when it ends.
    Enqueued,
}

/// Tells if callers still hold the communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallerHandle {
    Held,
    Dropped,
}

/// Tells if an end is reported to the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Notify {
    Group,
    /// Nobody is notified, since the group knows already.
    Nobody,
}

impl CommunicatorInner {
    pub(super) fn new(
        gpu: &Gpu,
        detector: Arc<dyn FailureDetector>,
        timeouts: CommTimeouts,
        who: String,
    ) -> Result<Self> {
        Ok(Self {
            gpu: gpu.clone(),
            stream: Stream::new(gpu)?,
            before: Event::new(gpu)?,
            done: Event::new(gpu)?,
            detector,
            timeouts,
            who,
            state: Mutex::new(CommState {
                phase: Phase::Connecting,
                link: None,
                work: Work::None,
                owner: CallerHandle::Held,
            }),
            changed: Condvar::new(),
        })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, CommState> {
        self.state.lock()
    }

    /// Tells whoever waits that the state is another.
    pub(super) fn notify(&self) {
        self.changed.notify_all();
    }

    pub(super) fn pause<'a>(&self, state: MutexGuard<'a, CommState>) -> MutexGuard<'a, CommState> {
        self.changed.wait(state)
    }

    pub(super) fn pause_for<'a>(
        &self,
        state: MutexGuard<'a, CommState>,
        time: Duration,
    ) -> MutexGuard<'a, CommState> {
        self.changed.wait_timeout(state, time)
    }

    /// Waits until that is so, at most until then.
    pub(super) fn pause_until<'a>(
        &self,
        mut state: MutexGuard<'a, CommState>,
        deadline: Instant,
        is_so: impl Fn(&CommState) -> bool,
    ) -> MutexGuard<'a, CommState> {
        while !is_so(&state) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = self.pause_for(state, left);
        }
        state
    }

    /// The state of a communicator that can be used.
    ///
    /// # Errors
    /// The error that it ended with, once NCCL has let go of everything, or does not for long.
    pub(super) fn ready(&self) -> Result<MutexGuard<'_, CommState>> {
        let state = self.lock();
        if matches!(state.phase, Phase::Ready) {
            return Ok(state);
        }
        let timeouts = Instant::now() + ABORTING;
        let state = self.pause_until(state, timeouts, |state| {
            !matches!(state.phase, Phase::Ending(_))
        });
        match &state.phase {
            Phase::Ending(error) | Phase::Ended(error) => Err(error.clone()),
            Phase::Ready => Ok(state),
            Phase::Connecting | Phase::Closed => {
                let message = format!("{} is not connected", self.who);
                Err(Error::new(Kind::Misuse, message))
            }
        }
    }

    /// Returns `true` if all that was enqueued has ended.
    pub(super) fn is_done(&self) -> Result<bool> {
        let mut state = self.ready()?;
        match state.work {
            Work::None => Ok(true),
            Work::Enqueuing => Ok(false),
            Work::Enqueued => match self.done.query() {
                Ok(Progress::UnderWay) => Ok(false),
                Ok(Progress::Done) => {
                    state.work = Work::None;
                    Ok(true)
                }
                Err(fault) => {
                    drop(state);
                    Err(self.end_by(&fault))
                }
            },
        }
    }

    /// Returns an error with the reason that the group has ended, if it has.
    pub(super) fn group_failure(&self) -> Option<Error> {
        let asked = catch_unwind(AssertUnwindSafe(|| self.detector.failure()));
        let reason = asked.unwrap_or_else(|_| Some("its failure detection panicked".to_owned()))?;
        let message = format!(
            "the NCCL communicator of {} was aborted: {reason}",
            self.who
        );
        Some(Error::new(Kind::Aborted, message))
    }

    /// Ends the communicator, unless it has ended; returns what it ended with. The watching thread
    /// aborts what runs, and this waits for that, within reason.
    pub(super) fn end(&self, error: Error, notify: Notify) -> Error {
        self.start_abort(error.clone(), notify);
        // What is ready cannot be: it was ending.
        self.ready().err().unwrap_or(error)
    }

    /// Runs [`end`](Self::end) because of a call that failed here.
    pub(super) fn end_by(&self, fault: &CallError) -> Error {
        self.end(self.aborted_by(fault), Notify::Group)
    }

    /// The error of a communicator that a failed call ends.
    pub(super) fn aborted_by(&self, fault: &CallError) -> Error {
        let message = format!("the NCCL communicator of {} was aborted: {fault}", self.who);
        Error::new(Kind::Aborted, message).with_source(fault.clone())
    }

    /// Starts to end the communicator, unless it has ended, as [`end`](Self::end) does, without waiting for it.
    pub(super) fn start_abort(&self, error: Error, notify: Notify) {
        let mut state = self.lock();
        if !matches!(state.phase, Phase::Connecting | Phase::Ready) {
            return;
        }
        state.phase = Phase::Ending(error.clone());
        drop(state);
        self.notify();
        if notify == Notify::Group {
            let told = catch_unwind(AssertUnwindSafe(|| {
                self.detector.failed(&error.to_string())
            }));
            if told.is_err() {
                tracing::warn!("failure detection panicked when it was told: {error}");
            }
        }
    }
}

/// Returns the instant `time` after `began`; one that no clock reaches never comes.
pub(super) fn after(began: Instant, time: Duration) -> Instant {
    let never = Duration::from_secs(u32::MAX.into());
    began.checked_add(time).unwrap_or_else(|| began + never)
}

/// The time that callers wait for NCCL to abort.
pub(super) const ABORTING: Duration = Duration::from_secs(10);
