//! Reads the messages of all joined ranks, on one thread.

use std::{
    net::Shutdown,
    sync::atomic::Ordering,
    thread,
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use super::ServerState;
use super::rank_stream::RankStream;
use crate::rendezvous::store_state::{RankMessage, StoreInput};
use crate::wire::ReadError;
use crate::wire::message::Message;

impl ServerState {
    /// Reads and handles the messages of all joined ranks. Returns once the store has stopped and all connections have
    /// ended.
    pub(super) fn read_ranks(&self) {
        let mut ranks: Vec<RankStream> = Vec::new();
        let mut scratch = vec![0; READ_BYTES];
        loop {
            self.reader_queue.take(&mut ranks);
            if ranks.is_empty() && self.stopped.load(Ordering::Acquire) {
                return;
            }
            let mut readable = self.poll_ranks(&ranks).into_iter();
            ranks.retain_mut(|rank| {
                if !readable.next().unwrap_or(false) {
                    return true;
                }
                self.reading.store(rank.connection + 1, Ordering::SeqCst);
                let outcome = self.read_rank(rank, &mut scratch);
                self.reading.store(0, Ordering::SeqCst);
                let Err(error) = outcome else {
                    return true;
                };
                tracing::debug!(rank = rank.rank, %error, "the connection of a rank ended");
                self.disconnect(rank);
                false
            });
        }
    }

    /// Waits until a connection is readable or the thread is woken. Returns, for each rank, whether to read from it.
    fn poll_ranks(&self, ranks: &[RankStream]) -> Vec<bool> {
        let waker = self.reader_queue.waker();
        let streams = ranks
            .iter()
            .map(|rank| PollFd::new(&*rank.stream, PollFlags::IN));
        let mut fds: Vec<PollFd<'_>> = streams.chain([PollFd::new(waker, PollFlags::IN)]).collect();
        let polled = poll(&mut fds, None);
        waker.drain();
        match polled {
            Ok(_) => {
                let is_ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
                fds[..ranks.len()].iter().map(is_ready).collect()
            }
            Err(Errno::INTR) => vec![false; ranks.len()],
            Err(error) => {
                tracing::debug!(%error, "polling the connections of the ranks failed");
                thread::sleep(POLL_RETRY);
                // Reads do not block, so each connection can be tried.
                vec![true; ranks.len()]
            }
        }
    }

    fn read_rank(&self, rank: &mut RankStream, scratch: &mut [u8]) -> Result<(), ReadError> {
        let number = rank.rank;
        rank.read(scratch, |message| {
            let message = match message {
                Message::ReportFailure(refusal) => RankMessage::ReportFailure(refusal.into_error()),
                Message::Connected => RankMessage::Connected,
                Message::Leave => RankMessage::Leave,
                Message::Heartbeat => RankMessage::Heartbeat,
                Message::Records(records) => {
                    self.records.add(number, records);
                    RankMessage::Heartbeat
                }
                _ => {
                    let text = "a message that ranks do not send".to_owned();
                    return Err(ReadError::Message(text));
                }
            };
            let rank = number;
            self.step(StoreInput::Message { rank, message });
            Ok(())
        })
    }

    /// Closes the connection of a rank and reports its end.
    fn disconnect(&self, rank: &RankStream) {
        let connection = rank.connection;
        // The other end may be gone already.
        let _ = rank.stream.shutdown(Shutdown::Both);
        let mut registry = self.registry.lock();
        registry.connections.remove(&connection);
        let gone = StoreInput::Gone { connection };
        let is_sooner = self.step_before_clock(&mut registry, gone, Instant::now());
        drop(registry);
        if is_sooner {
            self.changed.notify_all();
        }
        // After the step: an observer that asks in between finds the rank gone, and does not wait for its records.
        self.records.end(rank.rank);
    }
}

/// The maximum number of bytes read from one rank before the next is served.
const READ_BYTES: usize = 64 * 1024;

/// The pause after a failed poll.
const POLL_RETRY: Duration = Duration::from_millis(20);
