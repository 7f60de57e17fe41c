//! The messages of the head that the main thread has not taken yet.

use std::collections::VecDeque;
use std::sync::Arc;

use accelerator_host::sync::Mutex;
use signal_hook::consts::signal::{SIGKILL, SIGTERM};

use crate::agent::line::LineEnd;
use crate::agent::message::ToHost;
use crate::event::Event;
use crate::supervisor::signals::Relay;

/// The signal that stands for a message of the head while the main thread awaits only signals; no process receives it.
pub(super) const HURRY: i32 = SIGKILL;

/// An event on the connection to the head.
#[derive(Debug)]
pub(super) enum Inbound {
    /// It says something.
    Message(ToHost),
    /// The connection has ended.
    End(LineEnd),
}

impl From<Result<ToHost, LineEnd>> for Inbound {
    fn from(received: Result<ToHost, LineEnd>) -> Self {
        received.map_or_else(Self::End, Self::Message)
    }
}

/// Work of the main thread in which it looks at no messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    /// It waits for cargo, which a signal ends.
    Build,
    /// It waits for leftover processes, which a signal has killed.
    Sweep,
}

/// The queue of events from the head. Clones share it.
#[derive(Clone, Debug)]
pub(super) struct Inbox {
    state: Arc<Mutex<InboxState>>,
    relay: Relay,
}

#[derive(Debug, Default)]
struct InboxState {
    inbound: VecDeque<Inbound>,
    work: Option<Work>,
}

impl Inbox {
    /// An empty one, which wakes the main thread by `relay`.
    pub(super) fn new(relay: Relay) -> Self {
        Self {
            state: Arc::default(),
            relay,
        }
    }

    /// Adds what has come.
    pub(super) fn put(&self, inbound: Inbound) {
        let mut state = self.state.lock();
        let event = match (state.work, &inbound) {
            (
                Some(Work::Build),
                Inbound::End(_) | Inbound::Message(ToHost::JobOver { .. } | ToHost::Left),
            ) => Event::Signal(SIGTERM),
            (Some(Work::Sweep), _) => Event::Signal(HURRY),
            _ => Event::Message,
        };
        state.inbound.push_back(inbound);
        drop(state);
        self.relay.send(event);
    }

    /// Removes and returns the oldest event.
    pub(super) fn take(&self) -> Option<Inbound> {
        self.state.lock().inbound.pop_front()
    }

    /// Does `work`, whose wait a message of the head ends.
    pub(super) fn during<T>(&self, work: Work, body: impl FnOnce() -> T) -> T {
        self.state.lock().work = Some(work);
        let done = body();
        self.state.lock().work = None;
        done
    }
}
