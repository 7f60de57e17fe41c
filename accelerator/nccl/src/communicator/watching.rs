//! The thread of a communicator. It alone gives NCCL's communicator back, however it ends.

use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::link::Link;
use super::shared::{Owner, Phase, Shared, State, Telling, Work, after};
use crate::api::Progress;
use crate::error::Error;
use crate::gpu::note;

/// Begins to watch.
pub(super) fn start(shared: &Arc<Shared>) -> std::io::Result<JoinHandle<()>> {
    let shared = Arc::clone(shared);
    thread::Builder::new()
        .name("nccl watch".into())
        .spawn(move || run(&shared))
}

fn run(shared: &Shared) {
    let mut state = shared.lock();
    let mut looked = Instant::now();
    loop {
        state = match next(&state) {
            Next::Rest => shared.pause(state),
            Next::Look(interval) => {
                state = shared.pause_until(state, looked + interval, |state| {
                    !matches!(next(state), Next::Look(_))
                });
                if !matches!(next(&state), Next::Look(_)) {
                    continue;
                }
                drop(state);
                look(shared);
                looked = Instant::now();
                shared.lock()
            }
            Next::Abort(error) => {
                let link = state.link.take();
                drop(state);
                tracing::debug!("{error}");
                if let Some(link) = link {
                    note(link.abort());
                }
                shared.lock().phase = Phase::Ended(error);
                break;
            }
            Next::Close => {
                let link = state.link.take();
                drop(state);
                if let Some(link) = link {
                    close(shared, link);
                }
                shared.lock().phase = Phase::Closed;
                break;
            }
            Next::Nothing => return,
        };
    }
    shared.notify();
}

/// What there is to do.
enum Next {
    /// To wait until that changes.
    Rest,
    /// So long after the last look.
    Look(Duration),
    Abort(Error),
    Close,
    Nothing,
}

fn next(state: &State) -> Next {
    match (&state.phase, state.owner) {
        // NCCL has not begun; nothing may end before it is known what.
        (Phase::Connecting, _) if state.link.is_none() => Next::Rest,
        (Phase::Connecting, _) => Next::Look(CONNECTING),
        (Phase::Ready, Owner::Gone) => Next::Close,
        (Phase::Ready, Owner::Here) if state.work == Work::None => Next::Rest,
        (Phase::Ready, Owner::Here) => Next::Look(WORKING),
        (Phase::Ending(error), _) => Next::Abort(error.clone()),
        (Phase::Ended(_) | Phase::Closed, _) => Next::Nothing,
    }
}

/// Asks the group, and NCCL.
fn look(shared: &Shared) {
    if let Some(error) = shared.group_failure() {
        shared.begin_end(error, Telling::Nobody);
        return;
    }
    let mut state = shared.lock();
    let looked = state
        .link
        .as_mut()
        .map_or(Ok(Progress::Done), Link::progress);
    let looked = looked.and_then(|progress| {
        let ended = match state.work {
            Work::Enqueued => shared.done.query()? == Progress::Done,
            Work::None | Work::Enqueuing => false,
        };
        if progress == Progress::Done && matches!(state.phase, Phase::Connecting) {
            state.phase = Phase::Ready;
            shared.notify();
        }
        if ended {
            state.work = Work::None;
        }
        Ok(())
    });
    drop(state);
    if let Err(fault) = looked {
        shared.begin_end(shared.broken(&fault), Telling::Group);
    }
}

/// Ends in good order, or else at once.
fn close(shared: &Shared, mut link: Link) {
    let deadline = after(Instant::now(), shared.patience.closing);
    let mut progress = link.finalize();
    while progress == Ok(Progress::UnderWay) {
        let late = Instant::now() >= deadline;
        if late || shared.group_failure().is_some() {
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

/// Between looks while ranks come together.
const CONNECTING: Duration = Duration::from_millis(1);

/// Between looks while operations are under way.
const WORKING: Duration = Duration::from_millis(20);

/// Between looks while NCCL finalizes.
const FINALIZING: Duration = Duration::from_millis(1);
