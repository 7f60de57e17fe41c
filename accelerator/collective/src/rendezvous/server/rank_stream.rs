//! The connections of joined ranks: the queue to the reading thread, and non-blocking reads.

use std::{io, net::TcpStream, sync::Arc};

use accelerator_host::sync::Mutex;
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

use crate::rendezvous::store_state::Connection;
use crate::socket::Waker;
use crate::wire::ReadError;
use crate::wire::message::{MAX_RECORDS_BYTES, Message};

/// Connections of joined ranks that the reading thread has not taken yet.
#[derive(Debug)]
pub(super) struct ReaderQueue {
    ranks: Mutex<Vec<RankStream>>,
    waker: Waker,
}

/// The connection of a rank that has joined.
#[derive(Debug)]
pub(super) struct RankStream {
    pub(super) connection: Connection,
    pub(super) rank: usize,
    pub(super) stream: Arc<TcpStream>,
    /// The bytes of a message that is not complete yet.
    received: Vec<u8>,
}

impl ReaderQueue {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            ranks: Mutex::default(),
            waker: Waker::new()?,
        })
    }

    pub(super) fn add(&self, rank: RankStream) {
        self.ranks.lock().push(rank);
        self.waker.wake();
    }

    /// Moves all queued connections to the end of `ranks`.
    pub(super) fn take(&self, ranks: &mut Vec<RankStream>) {
        ranks.append(&mut self.ranks.lock());
    }

    /// The waker that the reading thread polls.
    pub(super) fn waker(&self) -> &Waker {
        &self.waker
    }
}

impl RankStream {
    pub(super) fn new(connection: Connection, rank: usize, stream: Arc<TcpStream>) -> Self {
        Self {
            connection,
            rank,
            stream,
            received: Vec::new(),
        }
    }

    /// Reads up to `scratch.len()` bytes without blocking, and calls `on_message` for each complete message. The end of
    /// the connection is an error.
    pub(super) fn read(
        &mut self,
        scratch: &mut [u8],
        mut on_message: impl FnMut(Message) -> Result<(), ReadError>,
    ) -> Result<(), ReadError> {
        match recv(&*self.stream, &mut *scratch, RecvFlags::DONTWAIT) {
            Ok((0, _)) => return Err(ReadError::Closed),
            Ok((count, _)) => self.received.extend_from_slice(&scratch[..count]),
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(error) => return Err(ReadError::Io(error.into())),
        }
        let mut taken = 0;
        loop {
            let rest = &self.received[taken..];
            let len = Message::expected_len(rest, MAX_RECORDS_BYTES)?;
            let Some(mut message) = rest.get(..len) else {
                break;
            };
            on_message(Message::read(&mut message, MAX_RECORDS_BYTES)?)?;
            taken += len;
        }
        self.received.drain(..taken);
        if self.received.is_empty() {
            self.received = Vec::new();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::TcpListener;
    use std::thread;
    use std::time::{Duration, Instant};

    use super::*;

    fn pair() -> (RankStream, TcpStream) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let near = Arc::new(listener.accept().unwrap().0);
        (RankStream::new(1, 0, near), far)
    }

    /// Reads a few bytes at a time until there are `count` messages, or an error.
    fn read(rank: &mut RankStream, count: usize) -> Result<Vec<Message>, ReadError> {
        let until = Instant::now() + Duration::from_secs(30);
        let mut messages = Vec::new();
        while messages.len() < count {
            assert!(Instant::now() < until, "{messages:?}");
            rank.read(&mut [0; 7], |message| {
                messages.push(message);
                Ok(())
            })?;
            thread::sleep(Duration::from_millis(1));
        }
        Ok(messages)
    }

    #[test]
    fn one_read_returns_all_complete_messages_and_keeps_the_rest() {
        let (mut rank, mut far) = pair();
        let sent = [Message::Connected, Message::Heartbeat, Message::Leave];
        let bytes = sent.map(|message| message.encode()).concat();
        let (most, rest) = bytes.split_at(bytes.len() - 3);
        far.write_all(most).unwrap();
        while rank.stream.peek(&mut vec![0; most.len()]).unwrap() < most.len() {
            thread::sleep(Duration::from_millis(1));
        }
        let mut messages = Vec::new();
        rank.read(&mut [0; 1024], |message| {
            messages.push(message);
            Ok(())
        })
        .unwrap();
        assert!(matches!(
            messages[..],
            [Message::Connected, Message::Heartbeat]
        ));
        far.write_all(rest).unwrap();
        assert!(matches!(read(&mut rank, 1).unwrap()[..], [Message::Leave]));
        assert!(rank.received.is_empty());
    }

    #[test]
    fn invalid_bytes_are_an_error() {
        let (mut rank, mut far) = pair();
        far.write_all(&[7; 64]).unwrap();
        let error = read(&mut rank, 1).unwrap_err();
        assert!(matches!(error, ReadError::Message(_)), "{error}");
    }

    #[test]
    fn the_end_of_a_connection_is_an_error() {
        let (mut rank, far) = pair();
        drop(far);
        let error = read(&mut rank, 1).unwrap_err();
        assert!(matches!(error, ReadError::Closed), "{error}");
    }
}
