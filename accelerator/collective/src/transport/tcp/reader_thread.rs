//! The thread that reads what one peer sends while no operation does.

#[cfg(feature = "fuzzing")]
use std::io::Read;
use std::{
    net::TcpStream,
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use rustix::event::PollFlags;

use super::{
    frame_reader::{FrameReader, ReadOutcome, read_frames},
    link::{Link, await_ready},
    reader_handoff::ReaderHandoff,
};
#[cfg(feature = "fuzzing")]
use crate::transport::Peer;
use crate::{
    error::{Error, Result},
    transport::Inbox,
};

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
    reader: Arc<Mutex<FrameReader<TcpStream>>>,
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
