//! The events of a running job, and the channel on which the launcher's threads report them to the main thread.

use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Instant;

use crate::process::End;

/// An event of a group of processes, from another thread of the launcher.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// A process of the group ended.
    Ended {
        /// Its place in the group.
        rank: usize,
        end: End,
    },
    /// A rank has joined the job: it learns of failures from the store.
    Joined(usize),
    /// A rank has closed its group.
    Closed(usize),
    /// A rank reported to the store that its group has failed.
    FailureReported {
        rank: usize,
        /// The ranks that it blames: itself after a panic, none if it does not know.
        blamed: Vec<usize>,
    },
    /// The launcher received a signal that asks it to end.
    Signal(i32),
    /// The launcher received a signal that is only forwarded to the ranks.
    ForwardSignal(i32),
    /// The launcher of another host has forwarded a signal to the ranks there.
    ForwardedElsewhere,
    /// The launcher's output was closed.
    OutputClosed,
    /// A reader of a rank's output has come to its end.
    Drained,
    /// The launcher of another host has sent something.
    Message,
    /// No event: a deadline has passed.
    Tick,
}

/// The two ends of the channel on which the launcher's threads report.
#[derive(Debug)]
pub(crate) struct Channel {
    /// The sender, cloned for every thread that reports.
    pub(crate) sender: Sender<Event>,
    /// The receiver, read by the main thread.
    pub(crate) events: Receiver<Event>,
}

impl Channel {
    /// A channel on which nothing has been reported.
    pub(crate) fn new() -> Self {
        let (sender, events) = mpsc::channel();
        Self { sender, events }
    }

    /// Waits for the next event; [`Event::Tick`] at the deadline.
    pub(crate) fn next(&self, deadline: Option<Instant>) -> Event {
        let event = match deadline {
            // This side holds a sender, so the channel cannot be disconnected.
            None => self.events.recv().ok(),
            Some(at) => {
                let left = at.saturating_duration_since(Instant::now());
                self.events.recv_timeout(left).ok()
            }
        };
        event.unwrap_or(Event::Tick)
    }
}
