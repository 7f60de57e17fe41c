//! The state that the caller of a communicator and its watchdog share, the watchdog, and the failures that the
//! communicator and its group tell each other.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use std::{fmt, thread};

use accelerator_collective::ProcessGroup;
use accelerator_host::sync::{Condvar, Mutex, MutexGuard};

use super::link::Link;
use crate::api::{CallError, Progress};
use crate::error::{Error, Kind, Result};
use crate::gpu::{Event, Gpu, Stream, note};

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

    /// Waits while the condition holds, at most until the deadline.
    pub(super) fn pause_until<'a>(
        &self,
        state: MutexGuard<'a, CommState>,
        deadline: Instant,
        condition: impl Fn(&CommState) -> bool,
    ) -> MutexGuard<'a, CommState> {
        let left = deadline.saturating_duration_since(Instant::now());
        let condition = |state: &mut CommState| condition(state);
        self.changed.wait_timeout_while(state, left, condition)
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
            matches!(state.phase, Phase::Ending(_))
        });
        match &state.phase {
            Phase::Ending(error) | Phase::Ended(error) => Err(error.clone()),
            Phase::Ready => Ok(state),
            Phase::Connecting | Phase::Closed => {
                Err(Error::misuse(format!("{} is not connected", self.who)))
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
    fn group_failure(&self) -> Option<Error> {
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
    fn aborted_by(&self, fault: &CallError) -> Error {
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

/// Starts the thread of a communicator. It alone gives NCCL's communicator back, however it ends.
pub(super) fn start_watchdog(inner: &Arc<CommunicatorInner>) -> std::io::Result<JoinHandle<()>> {
    let inner = Arc::clone(inner);
    thread::Builder::new()
        .name("nccl watchdog".into())
        .spawn(move || run(&inner))
}

fn run(inner: &CommunicatorInner) {
    let mut state = inner.lock();
    let mut looked = Instant::now();
    loop {
        state = match next(&state) {
            WatchdogStep::Rest => inner.changed.wait(state),
            WatchdogStep::Look(interval) => {
                let waits = |state: &CommState| matches!(next(state), WatchdogStep::Look(_));
                state = inner.pause_until(state, looked + interval, waits);
                if !waits(&state) {
                    continue;
                }
                drop(state);
                look(inner);
                looked = Instant::now();
                inner.lock()
            }
            WatchdogStep::Abort(error) => {
                let link = state.link.take();
                drop(state);
                tracing::debug!("{error}");
                if let Some(link) = link {
                    note(link.abort());
                }
                inner.lock().phase = Phase::Ended(error);
                break;
            }
            WatchdogStep::Close => {
                let link = state.link.take();
                drop(state);
                if let Some(link) = link {
                    close(inner, link);
                }
                inner.lock().phase = Phase::Closed;
                break;
            }
            WatchdogStep::Nothing => return,
        };
    }
    inner.notify();
}

/// The next thing to do.
enum WatchdogStep {
    /// Wait until the state changes.
    Rest,
    /// Look, so long after the last time.
    Look(Duration),
    Abort(Error),
    Close,
    Nothing,
}

fn next(state: &CommState) -> WatchdogStep {
    match (&state.phase, state.owner) {
        // NCCL has not begun; nothing may end before it is known what.
        (Phase::Connecting, _) if state.link.is_none() => WatchdogStep::Rest,
        (Phase::Connecting, _) => WatchdogStep::Look(CONNECTING),
        (Phase::Ready, CallerHandle::Dropped) => WatchdogStep::Close,
        (Phase::Ready, CallerHandle::Held) if state.work == Work::None => WatchdogStep::Rest,
        (Phase::Ready, CallerHandle::Held) => WatchdogStep::Look(WORKING),
        (Phase::Ending(error), _) => WatchdogStep::Abort(error.clone()),
        (Phase::Ended(_) | Phase::Closed, _) => WatchdogStep::Nothing,
    }
}

/// Asks the group, and NCCL.
fn look(inner: &CommunicatorInner) {
    if let Some(error) = inner.group_failure() {
        inner.start_abort(error, Notify::Nobody);
        return;
    }
    let mut state = inner.lock();
    let looked = state
        .link
        .as_mut()
        .map_or(Ok(Progress::Done), Link::progress);
    let looked = looked.and_then(|progress| {
        let ended = match state.work {
            Work::Enqueued => inner.done.query()? == Progress::Done,
            Work::None | Work::Enqueuing => false,
        };
        if progress == Progress::Done && matches!(state.phase, Phase::Connecting) {
            state.phase = Phase::Ready;
            inner.notify();
        }
        if ended {
            state.work = Work::None;
        }
        Ok(())
    });
    drop(state);
    if let Err(fault) = looked {
        inner.start_abort(inner.aborted_by(&fault), Notify::Group);
    }
}

/// Ends in good order, or else at once.
fn close(inner: &CommunicatorInner, mut link: Link) {
    let deadline = after(Instant::now(), inner.timeouts.closing);
    let mut progress = link.finalize();
    while progress == Ok(Progress::UnderWay) {
        let late = Instant::now() >= deadline;
        if late || inner.group_failure().is_some() {
            break;
        }
        thread::sleep(FINALIZING);
        progress = link.progress();
    }
    let closed = match progress {
        Ok(Progress::Done) => link.destroy(),
        Ok(Progress::UnderWay) => link.abort(),
        Err(fault) => link.abort().and(Err(fault)),
    };
    note(closed);
}

/// The time between looks while ranks come together.
const CONNECTING: Duration = Duration::from_millis(1);

/// The time between looks while operations are under way.
const WORKING: Duration = Duration::from_millis(20);

/// The time between looks while NCCL finalizes.
const FINALIZING: Duration = Duration::from_millis(1);

/// The failure detection of the group that a communicator belongs to.
///
/// Both methods are called by a thread of the communicator's, and by those that use it, at any time until
/// it is dropped; they return at once.
pub(super) trait FailureDetector: Send + Sync {
    /// Returns the reason that the group has ended, if it has. What is waiting for peers is freed then.
    fn failure(&self) -> Option<String>;

    /// Takes the news, at most once, that the communicator has ended on this rank for a reason that the
    /// group may not know.
    fn failed(&self, text: &str);
}

impl fmt::Debug for dyn FailureDetector {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("FailureDetector")
    }
}

/// The failure detection of a process group.
pub(super) struct GroupFailureDetector {
    group: ProcessGroup,
    /// Set once all ranks are connected. Until then, a failure of NCCL's is no failure of the group.
    enabled: AtomicBool,
}

impl GroupFailureDetector {
    pub(super) fn new(group: &ProcessGroup) -> Self {
        Self {
            group: group.clone(),
            enabled: AtomicBool::new(false),
        }
    }

    /// Lets failures of NCCL's end the group from now on.
    pub(super) fn enable(&self) {
        self.enabled.store(true, Ordering::Release);
    }
}

impl FailureDetector for GroupFailureDetector {
    fn failure(&self) -> Option<String> {
        self.group.failure()
    }

    fn failed(&self, text: &str) {
        if self.enabled.load(Ordering::Acquire) {
            self.group.abort(text);
        }
    }
}
