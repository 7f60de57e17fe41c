//! The connections of ranks that have joined, and how messages are read from them.

use std::{
    io::{self, Write},
    net::TcpStream,
    os::unix::net::UnixStream,
    sync::Arc,
};

use accelerator_host::sync::Mutex;
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

use crate::rendezvous::store_state::Connection;
use crate::wire::ReadError;
use crate::wire::message::{MAX_RECORDS_BYTES, Message};

/// The connections that the reading thread has not taken over yet.
#[derive(Debug)]
pub(super) struct JoinedRanks {
    new: Mutex<Vec<RankStream>>,
    /// A byte written here wakes the reading thread.
    waker: UnixStream,
    wakeup: UnixStream,
}

/// The connection of a rank that has joined.
#[derive(Debug)]
pub(super) struct RankStream {
    pub(super) connection: Connection,
    pub(super) rank: usize,
    pub(super) stream: Arc<TcpStream>,
    /// The beginning of a message that has not arrived whole.
    received: Vec<u8>,
}

impl JoinedRanks {
    pub(super) fn new() -> io::Result<Self> {
        let (waker, wakeup) = UnixStream::pair()?;
        waker.set_nonblocking(true)?;
        wakeup.set_nonblocking(true)?;
        Ok(Self {
            new: Mutex::default(),
            waker,
            wakeup,
        })
    }

    /// Hands a connection over to the reading thread.
    pub(super) fn add(&self, rank: RankStream) {
        self.new.lock().push(rank);
        self.wake();
    }

    /// Moves the connections that were added to `ranks`.
    pub(super) fn take_new(&self, ranks: &mut Vec<RankStream>) {
        ranks.append(&mut self.new.lock());
    }

    /// Makes [`wakeup`](Self::wakeup) readable.
    pub(super) fn wake(&self) {
        // If there is no room, bytes that wake the thread are there already.
        let _ = (&self.waker).write(&[0]);
    }

    /// The end that the reading thread polls.
    pub(super) fn wakeup(&self) -> &UnixStream {
        &self.wakeup
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

    /// Reads what has arrived, at most the length of `scratch`, and calls `on_message` for each message that is complete.
    pub(super) fn read(
        &mut self,
        scratch: &mut [u8],
        mut on_message: impl FnMut(Message),
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
            on_message(Message::read(&mut message, MAX_RECORDS_BYTES)?);
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
    use std::net::TcpListener;
    use std::time::{Duration, Instant};

    use super::*;

    fn pair() -> (RankStream, TcpStream) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let near = Arc::new(listener.accept().unwrap().0);
        (RankStream::new(1, 0, near), far)
    }

    /// Reads until there are `count` messages, or an error.
    fn read(rank: &mut RankStream, count: usize) -> Result<Vec<Message>, ReadError> {
        let until = Instant::now() + Duration::from_secs(30);
        let mut messages = Vec::new();
        while messages.len() < count {
            assert!(Instant::now() < until, "{messages:?}");
            // Messages are longer than this.
            rank.read(&mut [0; 7], |message| messages.push(message))?;
        }
        Ok(messages)
    }

    #[test]
    fn messages_are_whole_however_their_bytes_arrive() {
        let (mut rank, mut far) = pair();
        rank.read(&mut [0; 7], |message| panic!("{message:?} was not sent"))
            .unwrap();
        let both = [Message::Connected, Message::Leave].map(|message| message.encode());
        let (first, rest) = both[0].split_at(9);
        far.write_all(first).unwrap();
        far.write_all(&[rest, &both[1]].concat()).unwrap();
        let messages = read(&mut rank, 2).unwrap();
        assert!(matches!(messages[..], [Message::Connected, Message::Leave]));
        assert!(rank.received.is_empty());
    }

    #[test]
    fn bytes_that_are_no_message_are_an_error() {
        let (mut rank, mut far) = pair();
        far.write_all(&[7; 64]).unwrap();
        let error = read(&mut rank, 1).unwrap_err();
        assert!(matches!(error, ReadError::Message(_)), "{error}");
        let (mut rank, far) = pair();
        drop(far);
        let error = read(&mut rank, 1).unwrap_err();
        assert!(matches!(error, ReadError::Closed), "{error}");
    }
}
