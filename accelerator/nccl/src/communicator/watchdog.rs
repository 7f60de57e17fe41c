//! The thread of a communicator. It alone gives NCCL's communicator back, however it ends.

use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::link::Link;
use super::state::{CallerHandle, CommState, CommunicatorInner, Notify, Phase, Work, after};
use crate::api::Progress;
use crate::error::Error;
use crate::gpu::note;

/// Begins to detector.
pub(super) fn start(inner: &Arc<CommunicatorInner>) -> std::io::Result<JoinHandle<()>> {
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
            WatchdogStep::Rest => inner.pause(state),
            WatchdogStep::Look(interval) => {
                state = inner.pause_until(state, looked + interval, |state| {
                    !matches!(next(state), WatchdogStep::Look(_))
                });
                if !matches!(next(&state), WatchdogStep::Look(_)) {
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
