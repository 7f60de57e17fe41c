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
    intake::{Intake, Intook, pump},
    link::{Link, await_ready},
    tending::Tending,
};
#[cfg(feature = "fuzzing")]
use crate::transport::Peer;
use crate::{
    error::{Error, Result},
    transport::Inbox,
};

/// Starts to read from a peer into the inbox. The thread ends with the connection, or some time
/// after the inbox is closed: the peer's last words must be taken off the wire, or closing would
/// cut off our own.
pub(super) fn spawn(
    link: &Link,
    rank: usize,
    inbox: Arc<Inbox>,
    tending: Arc<Tending>,
) -> Result<()> {
    let spawned = link.source().and_then(|stream| {
        let reader = Reader {
            stream,
            intake: Arc::clone(&link.intake),
            rank,
            inbox,
            tending,
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
    let ear = Arc::new(super::ear::Ear::new());
    let mut intake = Intake::new(source, peer.rank, Arc::clone(&inbox), ear);
    loop {
        match intake.pump() {
            Intook::Frames | Intook::Nothing => {}
            Intook::Full => drop(inbox.has_room(peer.rank, TICK)),
            Intook::Ended => return,
        }
    }
}

struct Reader {
    stream: TcpStream,
    intake: Arc<Mutex<Intake<TcpStream>>>,
    rank: usize,
    inbox: Arc<Inbox>,
    tending: Arc<Tending>,
}

impl Reader {
    fn run(&self) {
        let mut closed = None;
        loop {
            self.tending.await_turn();
            match pump(&self.intake) {
                Intook::Frames => {}
                Intook::Nothing => drop(await_ready(&self.stream, PollFlags::IN, TICK)),
                Intook::Full => drop(self.inbox.has_room(self.rank, TICK)),
                Intook::Ended => return,
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

/// How often a reader that waits looks whether the inbox is closed.
const TICK: Duration = Duration::from_millis(500);

/// How long a closed inbox lets the peer finish.
const DRAIN: Duration = Duration::from_secs(2);
