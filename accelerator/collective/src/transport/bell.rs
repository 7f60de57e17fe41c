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
pub(crate) struct Bell {
    rope: UnixStream,
    sound: UnixStream,
}

impl Bell {
    pub(crate) fn new() -> io::Result<Self> {
        let (rope, sound) = UnixStream::pair()?;
        rope.set_nonblocking(true)?;
        sound.set_nonblocking(true)?;
        Ok(Self { rope, sound })
    }

    pub(crate) fn ring(&self) {
        // One that is full has been rung before.
        let _ = (&self.rope).write(&[1]);
    }

    /// Takes off all that was rung.
    pub(crate) fn hush(&self) {
        let _ = (&self.sound).read(&mut [0; 64]);
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.sound.as_fd()
    }
}
