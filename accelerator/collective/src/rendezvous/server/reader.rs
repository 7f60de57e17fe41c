//! Reads the messages of all ranks that have joined, on one thread.

use std::{io::Read, net::Shutdown, sync::atomic::Ordering, thread, time::Duration};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use super::ServerState;
use super::rank_stream::RankStream;
use crate::rendezvous::store_state::{RankMessage, StoreInput};
use crate::wire::ReadError;
use crate::wire::message::Message;

impl ServerState {
    /// Handles the messages of all ranks until the store stops and their connections have ended.
    pub(super) fn read_ranks(&self) {
        let mut ranks: Vec<RankStream> = Vec::new();
        let mut scratch = vec![0; READ_BYTES];
        loop {
            self.joined.take_new(&mut ranks);
            if ranks.is_empty() && self.stopped.load(Ordering::Acquire) {
                return;
            }
            let mut ready = self.await_ready(&ranks).into_iter();
            ranks.retain_mut(|rank| {
                let is_ready = ready.next().unwrap_or(false);
                let is_open = !is_ready || self.read_rank(rank, &mut scratch).is_ok();
                if !is_open {
                    self.end(rank);
                }
                is_open
            });
        }
    }

    /// Waits until a rank has sent something, or another one has joined, and returns for each rank if it can be read.
    fn await_ready(&self, ranks: &[RankStream]) -> Vec<bool> {
        let streams = ranks
            .iter()
            .map(|rank| PollFd::new(&*rank.stream, PollFlags::IN));
        let wakeup = PollFd::new(self.joined.wakeup(), PollFlags::IN);
        let mut fds: Vec<PollFd<'_>> = streams.chain([wakeup]).collect();
        if let Err(error) = poll(&mut fds, None)
            && error != Errno::INTR
        {
            tracing::warn!(%error, "the store cannot wait for its ranks, and tries again");
            thread::sleep(POLL_RETRY);
        }
        // What wakes the thread has no meaning of its own.
        let mut wakeup = self.joined.wakeup();
        let _ = wakeup.read(&mut [0; 64]);
        let is_ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
        fds[..ranks.len()].iter().map(is_ready).collect()
    }

    fn read_rank(&self, rank: &mut RankStream, scratch: &mut [u8]) -> Result<(), ReadError> {
        let number = rank.rank;
        let mut is_understood = true;
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
                _ => return is_understood = false,
            };
            self.step(StoreInput::Message {
                rank: number,
                message,
            });
        })?;
        match is_understood {
            true => Ok(()),
            false => Err(ReadError::Message("no message of a rank".to_owned())),
        }
    }

    fn end(&self, rank: &RankStream) {
        self.records.end(rank.rank);
        self.registry.lock().connections.remove(&rank.connection);
        // The other end may be gone already.
        let _ = rank.stream.shutdown(Shutdown::Both);
        self.step(StoreInput::Gone {
            connection: rank.connection,
        });
    }
}

/// The most bytes that are read from a rank before the others get their turn.
const READ_BYTES: usize = 64 * 1024;

const POLL_RETRY: Duration = Duration::from_millis(20);
