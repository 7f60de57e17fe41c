//! Connecting each rank with each.

use std::{
    io,
    net::{TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use crate::{
    error::{Error, Kind, Result, list_ranks},
    rendezvous::{Key, Meeting, random},
    wire::{
        ReadError,
        message::{self, Message, Nonce},
    },
};

/// A connection to every other rank, in rank order: made to the lower ones, taken from the
/// higher ones. Both sides prove that they belong to the job.
pub(super) fn connect(
    rank: usize,
    meeting: &Meeting,
    deadline: Instant,
) -> Result<Vec<Option<TcpStream>>> {
    let world_size = meeting.ranks.len();
    let mut streams: Vec<Option<TcpStream>> = (0..world_size).map(|_| None).collect();
    let arrivals = Door::open(rank, world_size, meeting, deadline)?;
    for (peer, registration) in meeting.ranks.iter().enumerate().take(rank) {
        let failed = |error: ReadError| {
            Error::about(
                Kind::Rendezvous,
                vec![peer],
                format!(
                    "rank {rank} cannot connect to rank {peer} (process {} on {}) at {}: {error}",
                    registration.pid, registration.host, registration.address
                ),
            )
        };
        let left = deadline.saturating_duration_since(Instant::now());
        let left = left.max(Duration::from_millis(1));
        let stream = TcpStream::connect_timeout(&registration.address, left)
            .map_err(|error| failed(ReadError::Io(error)))?;
        greet(&stream, &meeting.key, rank, peer, deadline).map_err(failed)?;
        streams[peer] = Some(stream);
    }
    let missing = |streams: &[Option<TcpStream>]| {
        let missing = streams.iter().enumerate().skip(rank + 1);
        let missing = missing.filter(|(_, stream)| stream.is_none());
        missing.map(|(peer, _)| peer).collect::<Vec<_>>()
    };
    while !missing(&streams).is_empty() {
        let left = deadline.saturating_duration_since(Instant::now());
        match arrivals.arrived.recv_timeout(left) {
            Ok((peer, stream)) => {
                streams[peer].get_or_insert(stream);
            }
            Err(_) => {
                let missing = missing(&streams);
                let message = format!(
                    "rank {rank} met {} at the store, but got no connection in time; did the \
                     process end, or does a firewall keep the hosts apart?",
                    list_ranks(&missing)
                );
                return Err(Error::about(Kind::Rendezvous, missing, message));
            }
        }
    }
    Ok(streams)
}

/// The listening side; dropped, it stops to accept.
struct Door {
    arrived: mpsc::Receiver<(usize, TcpStream)>,
    closed: Arc<AtomicBool>,
}

impl Door {
    fn open(rank: usize, world_size: usize, meeting: &Meeting, deadline: Instant) -> Result<Self> {
        let (sender, arrived) = mpsc::channel();
        let closed = Arc::new(AtomicBool::new(false));
        let visit = Visit {
            key: meeting.key.clone(),
            rank,
            world_size,
            deadline,
            sender,
        };
        let listener = meeting.listener.try_clone();
        let spawned = listener.and_then(|listener| {
            listener.set_nonblocking(true)?;
            let closed = Arc::clone(&closed);
            thread::Builder::new()
                .name("mesh".to_owned())
                .spawn(move || visit.accept(&listener, &closed))
        });
        match spawned {
            Ok(_) => Ok(Self { arrived, closed }),
            Err(error) => Err(Error::io("this rank cannot listen for the others", error)),
        }
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.closed.store(true, Ordering::Release);
    }
}

#[derive(Clone)]
struct Visit {
    key: Key,
    rank: usize,
    world_size: usize,
    deadline: Instant,
    sender: mpsc::Sender<(usize, TcpStream)>,
}

impl Visit {
    fn accept(&self, listener: &TcpListener, closed: &AtomicBool) {
        let open = Arc::new(AtomicUsize::new(0));
        while !closed.load(Ordering::Acquire) && Instant::now() < self.deadline {
            let stream = match listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    thread::sleep(Duration::from_millis(1));
                    continue;
                }
                Err(_) => {
                    thread::sleep(Duration::from_millis(20));
                    continue;
                }
            };
            // Each visitor has its own thread, so that a stranger who says nothing keeps nobody
            // waiting; the number is bounded.
            if open.load(Ordering::Acquire) >= 2 * self.world_size + 64 {
                continue;
            }
            open.fetch_add(1, Ordering::AcqRel);
            let visit = self.clone();
            let counter = Arc::clone(&open);
            let spawned = thread::Builder::new()
                .name("mesh-visitor".to_owned())
                .stack_size(512 * 1024)
                .spawn(move || {
                    match visit.receive(&stream) {
                        // The mesh may be complete, or given up, already.
                        Ok(peer) => drop(visit.sender.send((peer, stream))),
                        Err(error) => {
                            tracing::debug!(%error, "a connection that is no rank was dropped");
                        }
                    }
                    counter.fetch_sub(1, Ordering::AcqRel);
                });
            if spawned.is_err() {
                open.fetch_sub(1, Ordering::AcqRel);
            }
        }
    }

    /// The accepting side of the handshake: who it is that came.
    fn receive(&self, stream: &TcpStream) -> Result<usize, ReadError> {
        let deadline = self.deadline.min(Instant::now() + DOOR);
        // Where the listener does not block, some systems make its connections the same.
        stream.set_nonblocking(false).map_err(ReadError::Io)?;
        let _ = stream.set_nodelay(true);
        let Message::Greet { from, to, nonce } =
            Message::receive(stream, message::SHORT, deadline)?
        else {
            return Err(ReadError::Message("no greeting".to_owned()));
        };
        let peer = from as usize;
        if to as usize != self.rank || peer <= self.rank || peer >= self.world_size {
            return Err(ReadError::Message(format!(
                "a greeting from rank {from} to rank {to}, here is rank {} of {}",
                self.rank, self.world_size
            )));
        }
        let own = random().map_err(|error| ReadError::Io(io::Error::other(error)))?;
        let said = transcript(peer, self.rank, &nonce, &own);
        let proof = self.key.prove("answer", &[&said]);
        Message::Answer { nonce: own, proof }.send(stream)?;
        let Message::Confirm { proof } = Message::receive(stream, message::SHORT, deadline)? else {
            return Err(ReadError::Message("no confirmation".to_owned()));
        };
        if !self.key.accepts("confirm", &[&said], &proof) {
            return Err(ReadError::Message("the proof of another job".to_owned()));
        }
        Ok(peer)
    }
}

/// The connecting side of the handshake.
fn greet(
    stream: &TcpStream,
    key: &Key,
    rank: usize,
    peer: usize,
    deadline: Instant,
) -> Result<(), ReadError> {
    let _ = stream.set_nodelay(true);
    let nonce = random().map_err(|error| ReadError::Io(io::Error::other(error)))?;
    Message::Greet {
        from: rank as u32,
        to: peer as u32,
        nonce,
    }
    .send(stream)?;
    let Message::Answer { nonce: own, proof } = Message::receive(stream, message::SHORT, deadline)?
    else {
        return Err(ReadError::Message("no answer to the greeting".to_owned()));
    };
    let said = transcript(rank, peer, &nonce, &own);
    if !key.accepts("answer", &[&said], &proof) {
        return Err(ReadError::Message("the proof of another job".to_owned()));
    }
    Message::Confirm {
        proof: key.prove("confirm", &[&said]),
    }
    .send(stream)
}

/// What both sides of a handshake prove: who speaks with whom, and the nonces of both.
fn transcript(from: usize, to: usize, nonce: &Nonce, own: &Nonce) -> Vec<u8> {
    let mut said = Vec::with_capacity(80);
    said.extend_from_slice(&(from as u64).to_le_bytes());
    said.extend_from_slice(&(to as u64).to_le_bytes());
    said.extend_from_slice(nonce);
    said.extend_from_slice(own);
    said
}

/// How long a stranger may take to say who it is.
const DOOR: Duration = Duration::from_secs(10);
