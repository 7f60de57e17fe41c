//! The thread that reads what one peer sends.

use std::{
    io::{self, BufReader, Read},
    net::TcpStream,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use super::{ear::Ear, link::Link};
use crate::{
    contract::Contract,
    error::{Certainty, Error, Result},
    transport::{Abort, Inbox, Parcel, Parting, Peer, Stage, Tag},
    wire::{
        ReadError, fill,
        frame::{FrameError, FrameKind, Head},
    },
};

/// Starts to read from a peer into the inbox. The thread ends with the connection, or soon after
/// the inbox is closed.
pub(super) fn spawn(link: &Link, peer: Peer, inbox: Arc<Inbox>) -> Result<()> {
    let name = format!("from-rank-{}", peer.rank);
    let spawned = link.source().and_then(|stream| {
        let ear = Arc::clone(&link.ear);
        let source = Patient {
            stream,
            inbox: Arc::clone(&inbox),
            ear: Arc::clone(&ear),
            closed: None,
        };
        let mut reader = Reader {
            source: BufReader::with_capacity(BUFFER, source),
            peer,
            inbox,
            ear,
            preamble: Vec::new(),
        };
        thread::Builder::new()
            .name(name)
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
    Reader {
        source,
        peer,
        inbox,
        ear: Arc::new(Ear::new()),
        preamble: Vec::new(),
    }
    .run();
}

struct Reader<S> {
    source: S,
    peer: Peer,
    inbox: Arc<Inbox>,
    ear: Arc<Ear>,
    preamble: Vec<u8>,
}

impl<S: Read> Reader<S> {
    fn run(&mut self) {
        let rank = self.peer.rank;
        loop {
            match self.step() {
                Ok(()) => {}
                // This rank has left: what the peer does is not read any more.
                Err(error) if error.is_timeout() => return,
                Err(error @ (ReadError::Closed | ReadError::Io(_) | ReadError::Torn)) => {
                    let cause = match error {
                        ReadError::Torn => format!("{ENDED}, in the middle of a frame"),
                        ReadError::Io(error) => format!("{ENDED} ({error})"),
                        _ => ENDED.to_owned(),
                    };
                    self.inbox.lost(rank, cause, Certainty::Guessed);
                    return;
                }
                Err(error @ (ReadError::Frame(_) | ReadError::Message(_))) => {
                    // What follows cannot be understood either.
                    self.inbox.broke(rank, error.to_string());
                    return;
                }
            }
        }
    }

    fn step(&mut self) -> Result<(), ReadError> {
        let rank = self.peer.rank;
        let head = Head::read(&mut self.source)?;
        self.preamble.resize(head.preamble, 0);
        body(&mut self.source, &mut self.preamble)?;
        let mut chunk = self.inbox.chunk(head.payload);
        body(&mut self.source, chunk.bytes_mut())?;
        head.check(&self.preamble, chunk.bytes())?;
        let stage = match head.kind {
            FrameKind::Abort => {
                let abort = Abort::decode(head.sequence, &self.preamble);
                let abort = abort.ok_or(FrameError::Contract)?;
                self.inbox.aborted(rank, abort);
                return Ok(());
            }
            FrameKind::Goodbye => {
                let parting = match head.index {
                    0 => Parting::Closed,
                    _ => Parting::Dropped,
                };
                self.inbox.left(rank, parting);
                return Ok(());
            }
            FrameKind::Heartbeat => {
                self.ear.wish(head.index);
                let awaited = head.sequence.checked_sub(1);
                self.inbox
                    .waits(rank, awaited.and_then(|rank| usize::try_from(rank).ok()));
                return Ok(());
            }
            FrameKind::Begin => Stage::Begin,
            FrameKind::Inward => Stage::Inward,
            FrameKind::Outward => Stage::Outward,
        };
        let contract = match stage {
            Stage::Begin => Some(Contract::decode(&self.preamble).ok_or(FrameError::Contract)?),
            Stage::Inward | Stage::Outward => None,
        };
        let parcel = Parcel {
            tag: Tag {
                sequence: head.sequence,
                stage,
                index: head.index,
            },
            contract,
            chunk,
        };
        self.inbox.deposit(rank, parcel);
        if !self.inbox.has_room(rank, Duration::ZERO) {
            self.ear.shut();
            while !self.inbox.has_room(rank, TICK) {}
            self.ear.open();
        }
        Ok(())
    }
}

/// A connection that is read without end, until some time after the inbox was closed: the peer's
/// last words must be taken off the wire, or closing would cut off our own.
struct Patient {
    stream: TcpStream,
    inbox: Arc<Inbox>,
    ear: Arc<Ear>,
    closed: Option<Instant>,
}

impl Read for Patient {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.stream.read(buffer) {
                Err(error) => match error.kind() {
                    io::ErrorKind::Interrupted
                    | io::ErrorKind::TimedOut
                    | io::ErrorKind::WouldBlock => {}
                    _ => return Err(error),
                },
                Ok(count) => {
                    if count > 0 {
                        self.ear.hear();
                    }
                    return Ok(count);
                }
            }
            if self.inbox.is_closed() {
                let closed = *self.closed.get_or_insert_with(Instant::now);
                if closed.elapsed() >= DRAIN {
                    return Err(io::ErrorKind::TimedOut.into());
                }
            }
        }
    }
}

fn body(source: &mut impl Read, buffer: &mut [u8]) -> Result<(), ReadError> {
    match fill(source, buffer) {
        Err(ReadError::Closed) => Err(ReadError::Torn),
        other => other,
    }
}

const ENDED: &str = "its connection ended: the process died or lost the network";

/// How often a reader that waits looks whether the inbox is closed.
pub(super) const TICK: Duration = Duration::from_millis(500);

/// How long a closed inbox lets the peer finish.
const DRAIN: Duration = Duration::from_secs(2);

/// Takes a short frame in one read; long payloads go past it.
const BUFFER: usize = 16 * 1024;
