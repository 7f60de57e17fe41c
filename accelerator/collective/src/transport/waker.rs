//! Waking a thread that sleeps on connections.

use std::{
    io::{self, Read, Write},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
};

/// A pair of sockets: whoever polls the one end wakes when the other is rung.
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
        // One that is full has been rung before.
        let _ = (&self.sender).write(&[1]);
    }

    /// Takes off all that was rung.
    pub(crate) fn drain(&self) {
        let _ = (&self.receiver).read(&mut [0; 64]);
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.receiver.as_fd()
    }
}
