//! The threads that read what peers send while no operation does, and the handoff to them. See the README.

use std::{
    net::TcpStream,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use accelerator_host::sync::{Condvar, Mutex, MutexGuard};
use rustix::event::PollFlags;

use super::{
    frame_reader::{FrameReader, ReadOutcome, read_frames},
    link::{Link, await_ready},
};
use crate::{
    error::{Error, Result},
    transport::Inbox,
};

#[cfg(feature = "fuzzing")]
use crate::transport::Peer;
#[cfg(feature = "fuzzing")]
use std::io::Read;

/// Starts to read from a peer into the inbox. The thread ends with the connection, or some time
/// after the inbox is closed: the peer's final message must be taken off the wire, or closing would
/// cut off our own.
pub(super) fn spawn(
    link: &Link,
    rank: usize,
    inbox: Arc<Inbox>,
    handoff: Arc<ReaderHandoff>,
) -> Result<()> {
    let spawned = link.source().and_then(|stream| {
        let reader = ReaderThread {
            stream,
            reader: Arc::clone(&link.reader),
            rank,
            inbox,
            handoff,
        };
        thread::Builder::new()
            .name(format!("from-rank-{rank}"))
            .stack_size(256 * 1024)
            .spawn(move || reader.run())
    });
    match spawned {
        Ok(_) => Ok(()),
        Err(error) => Err(Error::io("a reading thread cannot be started", error)),
    }
}

/// Reads bytes as if a peer had sent them, until they end.
#[cfg(feature = "fuzzing")]
pub(crate) fn feed(source: impl Read, peer: Peer, inbox: Arc<Inbox>) {
    let liveness = Arc::new(super::peer_liveness::PeerLiveness::new());
    let mut reader = FrameReader::new(source, peer.rank, Arc::clone(&inbox), liveness);
    loop {
        match reader.read_frames() {
            ReadOutcome::Frames | ReadOutcome::Nothing => {}
            ReadOutcome::Full => drop(inbox.has_room(peer.rank, CLOSE_CHECK_INTERVAL)),
            ReadOutcome::Ended => return,
        }
    }
}

struct ReaderThread {
    stream: TcpStream,
    reader: Arc<std::sync::Mutex<FrameReader<TcpStream>>>,
    rank: usize,
    inbox: Arc<Inbox>,
    handoff: Arc<ReaderHandoff>,
}

impl ReaderThread {
    fn run(&self) {
        let mut closed = None;
        loop {
            self.handoff.wait_for_turn();
            match read_frames(&self.reader) {
                ReadOutcome::Frames => {}
                ReadOutcome::Nothing => drop(await_ready(
                    &self.stream,
                    PollFlags::IN,
                    CLOSE_CHECK_INTERVAL,
                )),
                ReadOutcome::Full => drop(self.inbox.has_room(self.rank, CLOSE_CHECK_INTERVAL)),
                ReadOutcome::Ended => return,
            }
            if self.inbox.is_closed() {
                let closed = *closed.get_or_insert_with(Instant::now);
                if closed.elapsed() >= DRAIN {
                    return;
                }
            }
        }
    }
}

/// The interval at which a waiting reader checks if the inbox is closed.
const CLOSE_CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// The time that a closed inbox leaves the peer to finish.
const DRAIN: Duration = Duration::from_secs(2);

/// Tracks if an operation of this rank reads the connections, or did a moment ago.
#[derive(Debug)]
pub(super) struct ReaderHandoff {
    since: Instant,
    /// The number of threads that read for operations.
    inside: AtomicUsize,
    /// The time at which the last one left, in milliseconds after `since`, plus one; zero before the first.
    left: AtomicU64,
    queue: Mutex<WaitingReaders>,
    /// The reading threads may read.
    wakeup: Condvar,
}

/// The reading threads that wait for their turn.
#[derive(Debug, Default)]
struct WaitingReaders {
    /// Set while one of them checks from time to time on behalf of all.
    watched: bool,
    /// Set once no operation will read any more.
    is_over: bool,
}

impl ReaderHandoff {
    pub(super) fn new() -> Self {
        Self {
            since: Instant::now(),
            inside: AtomicUsize::new(0),
            left: AtomicU64::new(0),
            queue: Mutex::default(),
            wakeup: Condvar::new(),
        }
    }

    /// Lets this thread read until the guard is dropped, and some time longer.
    pub(super) fn enter(&self) -> PollingGuard<'_> {
        self.inside.fetch_add(1, Ordering::Relaxed);
        PollingGuard(self)
    }

    /// Leaves the connections to the reading threads for good.
    pub(super) fn end(&self) {
        self.lock().is_over = true;
        self.wakeup.notify_all();
    }

    /// Waits until a reading thread may read. One of those that wait looks from time to time, and
    /// wakes the others: operations, which come and go all the time, need not tell them.
    pub(super) fn wait_for_turn(&self) {
        let mut queue = self.lock();
        let mut has_watched = false;
        while !queue.is_over
            && let Some(nap) = self.nap()
        {
            if queue.watched {
                let woken = self.wakeup.wait(queue);
                queue = woken;
                continue;
            }
            queue.watched = true;
            let woken = self.wakeup.wait_timeout(queue, nap);
            queue = woken;
            queue.watched = false;
            has_watched = true;
        }
        drop(queue);
        if has_watched {
            self.wakeup.notify_all();
        }
    }

    /// The time for which the reading threads leave the connections alone before one of them checks again.
    pub(super) fn nap(&self) -> Option<Duration> {
        if self.inside.load(Ordering::Relaxed) > 0 {
            return Some(NAP);
        }
        let left = self.left.load(Ordering::Relaxed).checked_sub(1)?;
        let due = self.since + Duration::from_millis(left) + NAP;
        let nap = due.saturating_duration_since(Instant::now());
        (!nap.is_zero()).then_some(nap)
    }

    fn lock(&self) -> MutexGuard<'_, WaitingReaders> {
        self.queue.lock()
    }
}

/// Somebody reads.
pub(super) struct PollingGuard<'a>(&'a ReaderHandoff);

impl Drop for PollingGuard<'_> {
    fn drop(&mut self) {
        let handoff = self.0;
        let left = handoff.since.elapsed().as_millis() as u64 + 1;
        handoff.left.store(left, Ordering::Relaxed);
        handoff.inside.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The time after an operation's last read for which reading threads expect the next one. A peer
/// whose socket is full waits at most this much longer.
const NAP: Duration = Duration::from_millis(20);

#[cfg(test)]
mod tests {
    use std::{
        sync::{Arc, mpsc},
        thread,
    };

    use super::*;

    /// Reading threads; each sends a message when it has its turn.
    fn readers(handoff: &Arc<ReaderHandoff>) -> mpsc::Receiver<()> {
        let (sender, turns) = mpsc::channel();
        for _ in 0..READERS {
            let (handoff, sender) = (Arc::clone(handoff), sender.clone());
            thread::spawn(move || {
                handoff.wait_for_turn();
                // The receiver is gone only where the test has failed already.
                let _ = sender.send(());
            });
        }
        turns
    }

    fn assert_all(turns: &mpsc::Receiver<()>) {
        for _ in 0..READERS {
            turns.recv_timeout(Duration::from_secs(30)).unwrap();
        }
    }

    #[test]
    fn every_reading_thread_has_its_turn_when_operations_leave() {
        let handoff = Arc::new(ReaderHandoff::new());
        let (first, second) = (handoff.enter(), handoff.enter());
        let turns = readers(&handoff);
        drop(first);
        assert!(turns.recv_timeout(3 * NAP).is_err());
        drop(second);
        assert_all(&turns);
    }

    #[test]
    fn reading_threads_do_not_wait_where_no_operation_will_come() {
        let handoff = Arc::new(ReaderHandoff::new());
        let _polling = handoff.enter();
        let turns = readers(&handoff);
        handoff.end();
        assert_all(&turns);
    }

    const READERS: usize = 8;
}
