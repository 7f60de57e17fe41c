//! The sleep of operations on connections, and how it ends.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::socket::Waker;
use crate::wire::GroupId;

/// An engine that sleeps on connections, and its waker.
#[derive(Debug)]
pub(crate) struct Poller {
    group: GroupId,
    waker: Waker,
    /// Set while the engine sleeps until its waker wakes it; changed with the inbox's state locked.
    polling: AtomicBool,
}

impl Poller {
    pub(crate) fn new(group: GroupId) -> io::Result<Self> {
        Ok(Self {
            group,
            waker: Waker::new()?,
            polling: AtomicBool::new(false),
        })
    }

    /// The group whose operations sleep.
    pub(super) fn group(&self) -> GroupId {
        self.group
    }

    pub(super) fn waker(&self) -> &Waker {
        &self.waker
    }

    pub(super) fn wake(&self) {
        self.waker.wake();
    }

    pub(super) fn begin_poll(&self) {
        self.polling.store(true, Ordering::Relaxed);
    }

    /// Notes that the engine does not sleep any more, and says whether it did.
    pub(super) fn end_poll(&self) -> bool {
        self.polling.swap(false, Ordering::Relaxed)
    }
}
