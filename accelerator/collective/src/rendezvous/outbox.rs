//! The ranks of a store with their connections, and the messages of the store to each.

use std::{
    collections::HashMap,
    io::{self, Write},
    net::{Shutdown, TcpStream},
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use accelerator_host::sync::{Condvar, Mutex};
use rustix::{
    event::PollFlags,
    io::Errno,
    net::{SendFlags, send},
};

use super::{
    Report,
    store_state::{Connection, StoreState},
};
use crate::socket::await_ready;
use crate::wire::message::{MAX_TABLE_BYTES, Message, Nonce, SHORT_SEND_TIMEOUT};

/// A non-blocking send queue to a rank. Bytes that the socket does not accept at once are queued in
/// order and written by a thread that exits when the queue is empty. The connection of a rank is closed
/// if its queue grows too long or a message cannot be sent completely.
#[derive(Debug)]
pub(super) struct Outbox {
    stream: Arc<TcpStream>,
    backlog: Mutex<Backlog>,
    /// The backlog is gone.
    written: Condvar,
}

impl Outbox {
    pub(super) fn new(stream: Arc<TcpStream>) -> io::Result<Arc<Self>> {
        // The liveness decides how long a rank may take, and then the stream is shut down.
        stream.set_write_timeout(None)?;
        Ok(Arc::new(Self {
            stream,
            backlog: Mutex::default(),
            written: Condvar::new(),
        }))
    }

    pub(super) fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Sends a message, at once or behind the others.
    pub(super) fn push(self: &Arc<Self>, message: &[u8]) {
        let mut backlog = self.backlog.lock();
        let sent = match backlog.writer {
            Writer::Idle => self.send_some(message),
            Writer::Busy => 0,
        };
        let rest = &message[sent..];
        if rest.is_empty() {
            return;
        }
        if backlog.bytes.len() + rest.len() > MAX_QUEUED_BYTES {
            tracing::debug!("a rank takes nothing of what the store says, and is cut off");
            return self.end();
        }
        backlog.bytes.extend_from_slice(rest);
        if backlog.writer == Writer::Idle {
            let outbox = Arc::clone(self);
            let spawned = thread::Builder::new()
                .name("store-writer".to_owned())
                .stack_size(256 * 1024)
                .spawn(move || outbox.write());
            match spawned {
                Ok(_) => backlog.writer = Writer::Busy,
                Err(error) => {
                    tracing::warn!(%error, "the store has no thread for a rank that is slow");
                    self.end();
                }
            }
        }
    }

    /// Sends a heartbeat, unless another message is queued.
    pub(super) fn heartbeat(self: &Arc<Self>, message: &[u8]) {
        let busy = self.backlog.lock().writer == Writer::Busy;
        if !busy {
            self.push(message);
        }
    }

    /// Waits for the rank to take what was said.
    pub(super) fn flush(&self, deadline: Instant) {
        let left = deadline.saturating_duration_since(Instant::now());
        let busy = |backlog: &mut Backlog| backlog.writer == Writer::Busy;
        drop(
            self.written
                .wait_timeout_while(self.backlog.lock(), left, busy),
        );
    }

    /// Ends the connection, and with it whatever waits to be written.
    pub(super) fn end(&self) {
        // The other end may be gone already.
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Sends as much as there is room for.
    fn send_some(&self, bytes: &[u8]) -> usize {
        match send(&*self.stream, bytes, FLAGS) {
            Ok(sent) => sent,
            Err(Errno::AGAIN | Errno::INTR) => 0,
            Err(_) => {
                // Who has gone is noticed by the thread that reads.
                self.end();
                bytes.len()
            }
        }
    }

    fn write(&self) {
        loop {
            let bytes = {
                let mut backlog = self.backlog.lock();
                if backlog.bytes.is_empty() {
                    backlog.writer = Writer::Idle;
                    self.written.notify_all();
                    return;
                }
                std::mem::take(&mut backlog.bytes)
            };
            if (&*self.stream).write_all(&bytes).is_err() {
                self.end();
                self.backlog.lock().bytes.clear();
            }
        }
    }
}

#[derive(Debug, Default)]
struct Backlog {
    bytes: Vec<u8>,
    writer: Writer,
}

/// The state of the thread that writes.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
enum Writer {
    Busy,
    #[default]
    Idle,
}

/// The deadline for ranks to take the store's last messages.
pub(super) fn last_call() -> Instant {
    Instant::now() + SHORT_SEND_TIMEOUT
}

/// Rust's programs ignore the signal of a broken pipe; the others must not end by it.
#[cfg(not(target_vendor = "apple"))]
const FLAGS: SendFlags = SendFlags::DONTWAIT.union(SendFlags::NOSIGNAL);
#[cfg(target_vendor = "apple")]
const FLAGS: SendFlags = SendFlags::DONTWAIT;

/// The most bytes that may be queued for a rank: a table, and notices of very many deaths.
const MAX_QUEUED_BYTES: usize = 4 * MAX_TABLE_BYTES;

/// The state machine with the connections of the ranks.
pub(super) struct Registry {
    pub(super) state: StoreState,
    pub(super) connections: HashMap<Connection, RankConnection>,
    pub(super) reports: Option<mpsc::Sender<Report>>,
    /// The time at which the clock is to look, if it is.
    pub(super) clock_due: Option<Instant>,
}

/// The store's end of a connection to a rank.
pub(super) struct RankConnection {
    pub(super) outbox: Arc<Outbox>,
    /// The nonces of its challenge, for the proof of the answer.
    pub(super) nonces: [Nonce; 2],
}

impl Registry {
    /// Returns `true` if bytes wait to be read. The end of a connection counts too; the reading thread reports it.
    pub(super) fn has_unread(&self, connection: Connection) -> bool {
        let Some(rank) = self.connections.get(&connection) else {
            return false;
        };
        await_ready(rank.outbox.stream(), PollFlags::IN, Duration::ZERO)
    }

    pub(super) fn send(&self, connections: &[Connection], message: &Message) {
        let message = message.encode();
        for rank in self.of(connections) {
            rank.outbox.push(&message);
        }
    }

    pub(super) fn of(&self, connections: &[Connection]) -> impl Iterator<Item = &RankConnection> {
        let rank = |connection| self.connections.get(connection);
        connections.iter().filter_map(rank)
    }
}

#[cfg(test)]
mod tests {
    use std::{io::Read, net::TcpListener, time::Duration};

    use super::*;

    fn pair() -> (Arc<Outbox>, TcpStream) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let near = Arc::new(listener.accept().unwrap().0);
        (Outbox::new(near).unwrap(), far)
    }

    fn is_busy(outbox: &Outbox) -> bool {
        outbox.backlog.lock().writer == Writer::Busy
    }

    #[test]
    fn who_is_slow_hears_everything_in_order() {
        let (outbox, mut far) = pair();
        let mut sent = Vec::new();
        let mut say = |number: u32| {
            let message = number.to_le_bytes().repeat(10_000);
            outbox.push(&message);
            sent.extend_from_slice(&message);
        };
        let mut number = 0;
        while !is_busy(&outbox) {
            say(number);
            number += 1;
        }
        outbox.heartbeat(b"no heartbeat is needed");
        (0..3).for_each(|more| say(number + more));
        let mut heard = vec![0; sent.len()];
        far.read_exact(&mut heard).unwrap();
        assert!(heard == sent);
        outbox.flush(Instant::now() + Duration::from_secs(30));
        assert!(!is_busy(&outbox));
        outbox.heartbeat(b"beat");
        let mut beat = [0; 4];
        far.read_exact(&mut beat).unwrap();
        assert_eq!(&beat, b"beat");
    }

    #[test]
    fn who_takes_nothing_is_cut_off() {
        let (outbox, mut far) = pair();
        let message = vec![7; 100_000];
        // What the kernel keeps is more than the backlog, but has bounds too.
        for _ in 0..1000 {
            outbox.push(&message);
        }
        outbox.flush(Instant::now() + Duration::from_secs(30));
        assert!(!is_busy(&outbox));
        let mut heard = Vec::new();
        // The connection ends, in one way or the other.
        let _ = far.read_to_end(&mut heard);
        assert!(heard.len() < 1000 * message.len());
    }
}
