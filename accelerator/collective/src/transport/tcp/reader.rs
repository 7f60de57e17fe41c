//! The thread that reads what one peer sends.

use std::{
    io::{self, BufReader, Read},
    net::TcpStream,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use crate::{
    contract::Contract,
    error::{Error, Kind, Result},
    transport::{Abort, Inbox, Parcel, Peer, Stage, Tag},
    wire::{
        ReadError, fill,
        frame::{FrameError, FrameKind, Head},
    },
};

/// Starts to read from a peer into the inbox. The thread ends with the connection, or soon after
/// the inbox is closed.
pub(super) fn spawn(stream: &TcpStream, peer: Peer, inbox: Arc<Inbox>) -> Result<()> {
    let name = format!("from-rank-{}", peer.rank);
    let spawned = stream.try_clone().and_then(|stream| {
        let source = Patient {
            stream,
            inbox: Arc::clone(&inbox),
            closed: None,
        };
        let mut reader = Reader {
            source: BufReader::with_capacity(BUFFER, source),
            peer,
            inbox,
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

struct Reader {
    source: BufReader<Patient>,
    peer: Peer,
    inbox: Arc<Inbox>,
    preamble: Vec<u8>,
}

impl Reader {
    fn run(&mut self) {
        let rank = self.peer.rank;
        loop {
            match self.step() {
                Ok(()) => {}
                Err(ReadError::Closed) => {
                    self.inbox
                        .lost(rank, "its connection ended without a goodbye");
                    return;
                }
                Err(error @ (ReadError::Io(_) | ReadError::Torn)) => {
                    self.inbox.lost(rank, error.to_string());
                    return;
                }
                Err(error @ (ReadError::Frame(_) | ReadError::Message(_))) => {
                    // What follows cannot be understood either.
                    let message = format!("{} broke the protocol: {error}", self.peer);
                    let error = Error::about(Kind::Protocol, vec![rank], message);
                    self.inbox.aborted(rank, Abort { sequence: 0, error });
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
                self.inbox.left(rank);
                return Ok(());
            }
            FrameKind::Heartbeat => return Ok(()),
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
        while !self.inbox.has_room(rank, TICK) {}
        Ok(())
    }
}

/// A connection that is read without end, until some time after the inbox was closed: the peer's
/// last words must be taken off the wire, or closing would cut off our own.
struct Patient {
    stream: TcpStream,
    inbox: Arc<Inbox>,
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
                done => return done,
            }
            if self.inbox.is_closed() {
                let closed = *self.closed.get_or_insert_with(Instant::now);
                if closed.elapsed() >= DRAIN {
                    return Ok(0);
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

/// How often a reader that waits looks whether the inbox is closed.
pub(super) const TICK: Duration = Duration::from_millis(500);

/// How long a closed inbox lets the peer finish.
const DRAIN: Duration = Duration::from_secs(2);

/// Takes a short frame in one read; long payloads go past it.
const BUFFER: usize = 16 * 1024;
