//! Reading from connections with deadlines.

use std::{
    fmt,
    io::{self, Read},
    net::TcpStream,
    time::{Duration, Instant},
};

use super::frame::FrameError;

/// A connection that is read until a deadline, however slowly the bytes come.
#[derive(Debug)]
pub(crate) struct DeadlineReader<'a> {
    stream: &'a TcpStream,
    deadline: Instant,
}

impl<'a> DeadlineReader<'a> {
    pub(crate) fn new(stream: &'a TcpStream, deadline: Instant) -> Self {
        Self { stream, deadline }
    }
}

impl Read for DeadlineReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        // Sub-millisecond timeouts may be rounded to zero, which means none.
        let left = left.max(Duration::from_millis(1));
        self.stream.set_read_timeout(Some(left))?;
        self.stream.read(buffer)
    }
}

/// Fills a buffer from a connection.
pub(crate) fn fill(from: &mut impl Read, buffer: &mut [u8]) -> Result<(), ReadError> {
    let mut filled = 0;
    while filled < buffer.len() {
        match from.read(&mut buffer[filled..]) {
            Ok(0) if filled == 0 => return Err(ReadError::Closed),
            Ok(0) => return Err(ReadError::Torn),
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(ReadError::Io(error)),
        }
    }
    Ok(())
}

/// The reason why nothing could be read.
#[derive(Debug)]
pub(crate) enum ReadError {
    /// The connection ended between two frames.
    Closed,
    /// The bytes are no frame.
    Frame(FrameError),
    Io(io::Error),
    /// The bytes are no message, or one that has no place here.
    Message(String),
    /// The connection ended in the middle of a frame.
    Torn,
}

impl ReadError {
    pub(crate) fn is_timeout(&self) -> bool {
        use io::ErrorKind::{TimedOut, WouldBlock};
        matches!(self, Self::Io(error) if matches!(error.kind(), TimedOut | WouldBlock))
    }
}

impl fmt::Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => f.write_str("the connection was closed"),
            Self::Frame(error) => write!(f, "it sent {error}"),
            Self::Io(_) if self.is_timeout() => f.write_str("nothing came in time"),
            Self::Io(error) => write!(f, "the connection broke: {error}"),
            Self::Message(what) => write!(f, "it sent {what}"),
            Self::Torn => f.write_str("the connection was closed in the middle of a frame"),
        }
    }
}

impl std::error::Error for ReadError {}

impl From<FrameError> for ReadError {
    fn from(error: FrameError) -> Self {
        Self::Frame(error)
    }
}
