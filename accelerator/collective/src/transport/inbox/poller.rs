//! The sleep of operations on connections, and how it ends.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};

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

/// A socket pair: [`wake`](Self::wake) makes the end that is polled readable.
#[derive(Debug)]
pub(crate) struct Waker {
    sender: UnixStream,
    receiver: UnixStream,
}

impl Waker {
    pub(crate) fn new() -> io::Result<Self> {
        let (sender, receiver) = UnixStream::pair()?;
        sender.set_nonblocking(true)?;
        receiver.set_nonblocking(true)?;
        Ok(Self { sender, receiver })
    }

    pub(crate) fn wake(&self) {
        // If the socket is full, a wake-up is already pending.
        let _ = (&self.sender).write(&[1]);
    }

    /// Discards pending wake-ups.
    pub(crate) fn drain(&self) {
        let _ = (&self.receiver).read(&mut [0; 64]);
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.receiver.as_fd()
    }
}
