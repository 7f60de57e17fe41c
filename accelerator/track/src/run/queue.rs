//! What was logged and is not in the journal yet.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::error::{Error, Kind, Result};
use crate::record::{Number, Record};

/// Messages from the program to the thread that writes the journal.
///
/// When the queue is full, the program waits for a moment. Where there is no room even then, the disk hangs: metrics are
/// counted and dropped, without waiting again, until there is room.
#[derive(Debug, Default)]
pub(super) struct Queue {
    state: Mutex<QueueState>,
    /// There is something that should not wait for the next tick.
    urgent: Condvar,
    room: Condvar,
}

#[derive(Debug, Default)]
pub(super) struct QueueState {
    pub(super) messages: Vec<(u64, Message)>,
    pub(super) lost: u64,
    /// Asks for everything up to here to be on the disk.
    pub(super) syncs: Vec<mpsc::Sender<Synced>>,
    pub(super) is_closed: bool,
    weight: usize,
    has_stalled: bool,
}

/// The greatest step that was logged and the number of the next entry.
pub(super) type Synced = Result<(Option<u64>, u64)>;

#[derive(Debug)]
pub(super) enum Message {
    Metrics(LoggedMetrics),
    Record(Record),
}

/// The metrics of a call, their names in one string.
#[derive(Debug)]
pub(super) struct LoggedMetrics {
    pub(super) step: u64,
    pub(super) epoch: Option<f64>,
    /// The kind, then the names.
    text: String,
    kind: usize,
    points: Vec<LoggedPoint>,
}

#[derive(Debug)]
struct LoggedPoint {
    name_ends: usize,
    value: Number,
    count: Option<u64>,
}

impl LoggedMetrics {
    pub(super) fn new(kind: &str, step: u64, epoch: Option<f64>) -> Self {
        Self {
            step,
            epoch,
            text: kind.to_owned(),
            kind: kind.len(),
            points: Vec::new(),
        }
    }

    pub(super) fn add(&mut self, name: &str, value: Number, count: Option<u64>) {
        self.text.push_str(name);
        self.points.push(LoggedPoint {
            name_ends: self.text.len(),
            value,
            count,
        });
    }

    pub(super) fn kind(&self) -> &str {
        &self.text[..self.kind]
    }

    pub(super) fn points(&self) -> impl Iterator<Item = (&str, Number, Option<u64>)> {
        let mut from = self.kind;
        self.points.iter().map(move |point| {
            let name = &self.text[std::mem::replace(&mut from, point.name_ends)..point.name_ends];
            (name, point.value, point.count)
        })
    }
}

impl Queue {
    pub(super) fn push(&self, ms: u64, message: Message) {
        let mut state = self.lock();
        if state.weight >= MOST_WEIGHT && matches!(message, Message::Metrics(_)) {
            state = self.wait_for_room(state);
            if state.has_stalled {
                state.lost += 1;
                return;
            }
        }
        state.weight += match &message {
            Message::Metrics(metrics) => 8 + metrics.points.len(),
            Message::Record(_) => 8,
        };
        state.messages.push((ms, message));
        if state.weight >= MOST_WEIGHT / 4 {
            self.urgent.notify_one();
        }
    }

    /// Waits until what was pushed before is on the disk, for a limited time.
    pub(super) fn sync(&self) -> Synced {
        let (answer, synced) = mpsc::channel();
        self.lock().syncs.push(answer);
        self.urgent.notify_one();
        synced.recv_timeout(LONGEST_SYNC).map_err(|error| {
            let why = match error {
                RecvTimeoutError::Timeout => "the disk does not take the run's journal",
                RecvTimeoutError::Disconnected => WRITER_ENDED,
            };
            Error::new(Kind::Io, why)
        })?
    }

    pub(super) fn close(&self) {
        self.lock().is_closed = true;
        self.urgent.notify_one();
    }

    /// Takes what is there, at the latest after a tick.
    pub(super) fn take(&self, tick: Duration) -> QueueState {
        let state = self.lock();
        let is_idle = |state: &mut QueueState| {
            !state.is_closed && state.syncs.is_empty() && state.weight < MOST_WEIGHT / 4
        };
        let waited = self.urgent.wait_timeout_while(state, tick, is_idle);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let is_closed = state.is_closed;
        let taken = std::mem::take(&mut *state);
        state.is_closed = is_closed;
        self.room.notify_all();
        taken
    }

    fn wait_for_room<'a>(&self, state: MutexGuard<'a, QueueState>) -> MutexGuard<'a, QueueState> {
        if state.has_stalled {
            return state;
        }
        let is_full = |state: &mut QueueState| state.weight >= MOST_WEIGHT;
        let waited = self.room.wait_timeout_while(state, LONGEST_WAIT, is_full);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.has_stalled = state.weight >= MOST_WEIGHT;
        state
    }

    fn lock(&self) -> MutexGuard<'_, QueueState> {
        // Each change of the state is whole: a thread that panicked has left it as it should be.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(super) const WRITER_ENDED: &str = "the thread that writes the run's journal has ended";

/// In points: some 40 bytes each.
const MOST_WEIGHT: usize = 1 << 20;

/// How long a checkpoint is held up by one.
const LONGEST_SYNC: Duration = Duration::from_secs(30);

/// How long a step is held up by a disk that hangs, in all.
const LONGEST_WAIT: Duration = Duration::from_millis(200);
