//! Ranks as processes, connected each with each by TCP.

mod mesh;
mod reader;

use std::{
    io::{self, IoSlice, Write},
    net::{Shutdown, TcpStream},
    sync::{
        Arc, Mutex, PoisonError, TryLockError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use super::{Farewell, Inbox, Part, Peer, Place, Stage, Transport, TransportKind, Watch};
use crate::rendezvous::LONGEST;
use crate::{
    error::{Error, Result},
    rendezvous::Meeting,
    topology::Topology,
    wire::frame::{FrameKind, Head},
};

/// One rank in a mesh of connections. A thread for each peer reads what comes into the inbox, so
/// a peer that sends never waits for this rank's engine.
#[derive(Debug)]
pub(crate) struct Tcp {
    rank: usize,
    peers: Vec<Peer>,
    links: Vec<Option<Link>>,
    inbox: Arc<Inbox>,
}

impl Tcp {
    /// Connects to all ranks of a meeting.
    pub(crate) fn connect(
        topology: &Topology,
        meeting: Meeting,
        patience: Duration,
    ) -> Result<Self> {
        let rank = topology.rank();
        let streams = mesh::connect(rank, &meeting, Instant::now() + patience.min(LONGEST))?;
        let peers: Vec<Peer> = meeting
            .ranks
            .into_iter()
            .map(|x| Peer {
                rank: x.rank,
                place: Place::Process {
                    host: x.host,
                    pid: x.pid,
                },
            })
            .collect();
        let inbox = Arc::new(Inbox::new(peers.len()));
        let mut links = Vec::with_capacity(peers.len());
        for (peer, stream) in peers.iter().zip(streams) {
            let link = match stream {
                None => None,
                Some(stream) => {
                    let link = Link::new(stream)?;
                    reader::spawn(&link.control, peer.clone(), Arc::clone(&inbox))?;
                    Some(link)
                }
            };
            links.push(link);
        }
        Ok(Self {
            rank,
            peers,
            links,
            inbox,
        })
    }

    fn others(&self) -> impl Iterator<Item = (usize, &Link)> {
        let links = self.links.iter().enumerate();
        links.filter_map(|(rank, link)| Some((rank, link.as_ref()?)))
    }
}

impl Transport for Tcp {
    fn kind(&self) -> TransportKind {
        TransportKind::Tcp
    }

    fn peers(&self) -> &[Peer] {
        &self.peers
    }

    fn inbox(&self) -> &Inbox {
        &self.inbox
    }

    fn send(&self, to: usize, part: Part<'_>, watch: &mut Watch<'_>) -> Result<()> {
        let Some(link) = &self.links[to] else {
            return Err(watch.protocol(self.rank, "it sent a part to itself"));
        };
        let declaration = part.contract.map(|contract| contract.encode());
        let preamble = match &declaration {
            Some((bytes, len)) => &bytes[..*len],
            None => &[],
        };
        let kind = match part.tag.stage {
            Stage::Begin => FrameKind::Begin,
            Stage::Inward => FrameKind::Inward,
            Stage::Outward => FrameKind::Outward,
        };
        let (sequence, index) = (part.tag.sequence, part.tag.index);
        let head = Head::new(kind, sequence, index, preamble, part.payload);
        // After a failure the time to complete the frame is short; the failure is told then.
        let mut failure: Option<(Error, Instant)> = None;
        let outcome = link.write(&head.encode(), preamble, part.payload, |written| {
            if failure.is_none() {
                let check = self.inbox.check(to, &self.peers, watch);
                let check = check.and_then(|()| watch.tick(|| vec![to]).map(drop));
                if let Err(error) = check {
                    failure = Some((error, Instant::now() + LINGER));
                }
            }
            match &failure {
                Some((_, until)) => written > 0 && Instant::now() < *until,
                None => true,
            }
        });
        match (failure, outcome) {
            (Some((error, _)), _) => Err(error),
            (None, Ok(())) => Ok(()),
            (None, Err(error)) => {
                // The peer, or another one, has said why; else the broken connection is why.
                self.inbox.verdict(to, &self.peers, watch)?;
                let why = format!("its connection broke: {error}");
                Err(watch.lost(&self.peers[to], &why))
            }
        }
    }

    fn farewell(&self, farewell: &Farewell) {
        self.inbox.close();
        let (head, preamble) = match farewell {
            Farewell::Abort(abort) => {
                let preamble = abort.encode();
                let head = Head::new(FrameKind::Abort, abort.sequence, 0, &preamble, &[]);
                (head.encode(), preamble)
            }
            Farewell::Goodbye => {
                let head = Head::new(FrameKind::Goodbye, 0, 0, &[], &[]);
                (head.encode(), Vec::new())
            }
        };
        let until = Instant::now() + LINGER;
        for (_, link) in self.others() {
            link.part(&head, &preamble, until);
        }
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        // Usually the last word has been said; a second end of the sending side does nothing.
        self.inbox.close();
        for (_, link) in self.others() {
            let _ = link.control.shutdown(Shutdown::Write);
        }
    }
}

/// The connection to one peer.
#[derive(Debug)]
struct Link {
    writer: Mutex<TcpStream>,
    /// The same connection, for what must not wait for the writer.
    control: TcpStream,
    /// Whether a frame was left unfinished, after which nothing can be said any more.
    torn: AtomicBool,
}

impl Link {
    fn new(stream: TcpStream) -> Result<Self> {
        let prepared = stream
            .set_nodelay(true)
            .and_then(|()| stream.set_write_timeout(Some(TICK)))
            .and_then(|()| stream.set_read_timeout(Some(reader::TICK)))
            .and_then(|()| stream.try_clone());
        match prepared {
            Ok(control) => Ok(Self {
                writer: Mutex::new(stream),
                control,
                torn: AtomicBool::new(false),
            }),
            Err(error) => Err(Error::io("a connection cannot be set up", error)),
        }
    }

    /// Writes a frame. While the peer takes nothing, `go_on` is asked from time to time, with
    /// the number of bytes written so far, whether to keep trying.
    fn write(
        &self,
        head: &[u8],
        preamble: &[u8],
        payload: &[u8],
        go_on: impl FnMut(usize) -> bool,
    ) -> io::Result<()> {
        // A writer that panicked has left its frame torn, which is noted.
        let mut stream = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        self.write_to(&mut stream, [head, preamble, payload], go_on)
    }

    fn write_to(
        &self,
        stream: &mut TcpStream,
        pieces: [&[u8]; 3],
        mut go_on: impl FnMut(usize) -> bool,
    ) -> io::Result<()> {
        if self.torn.swap(true, Ordering::AcqRel) {
            return Err(io::Error::other("an earlier frame was left unfinished"));
        }
        let total: usize = pieces.iter().map(|piece| piece.len()).sum();
        let mut slices = pieces.map(IoSlice::new);
        let mut slices = &mut slices[..];
        let mut written = 0;
        while written < total {
            match stream.write_vectored(slices) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => {
                    written += count;
                    IoSlice::advance_slices(&mut slices, count);
                }
                Err(error) => match error.kind() {
                    io::ErrorKind::Interrupted => {}
                    io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                        if !go_on(written) {
                            self.torn.store(written > 0, Ordering::Release);
                            return Err(io::ErrorKind::TimedOut.into());
                        }
                    }
                    _ => return Err(error),
                },
            }
        }
        self.torn.store(false, Ordering::Release);
        Ok(())
    }

    /// Says the last word, if that is possible in time, and ends the sending side.
    fn part(&self, head: &[u8], preamble: &[u8], until: Instant) {
        loop {
            match self.writer.try_lock() {
                Ok(mut stream) => {
                    // A peer that takes nothing will see the connection end.
                    let _ = self.write_to(&mut stream, [head, preamble, &[]], |_| {
                        Instant::now() < until
                    });
                    break;
                }
                Err(TryLockError::Poisoned(_)) => break,
                Err(TryLockError::WouldBlock) if Instant::now() < until => {
                    thread::sleep(Duration::from_millis(5));
                }
                Err(TryLockError::WouldBlock) => break,
            }
        }
        let _ = self.control.shutdown(Shutdown::Write);
    }
}

/// How often a writer that waits asks whether to go on.
const TICK: Duration = Duration::from_millis(100);

/// How long the last words take at most, to all peers together.
const LINGER: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests;
