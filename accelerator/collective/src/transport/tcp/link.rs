//! The connection to one peer.

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

use rustix::event::{PollFd, PollFlags, poll};

use super::frame_reader::{FrameReader, PeerLiveness};
use crate::error::{Error, Result};
use crate::socket::{await_ready, limit_backoff, timespec, unconfirmed, unsent};
use crate::transport::Inbox;

/// The connection to one peer: whole frames go out, one at a time.
#[derive(Debug)]
pub(super) struct Link {
    writer: Mutex<TcpStream>,
    /// The same connection, for what must not wait for the writer.
    control: TcpStream,
    /// Set if the peer is on this host, so that everything sent to it has arrived.
    pub(super) is_local: bool,
    /// The reader of the connection; a thread that reads holds the lock for a few frames.
    pub(super) reader: Arc<Mutex<FrameReader<TcpStream>>>,
    /// The record of when bytes came in.
    pub(super) liveness: Arc<PeerLiveness>,
    /// Set once a frame was left unfinished or the final message was sent, after which nothing can be
    /// sent any more.
    torn: AtomicBool,
    /// Set if something was sent since [`heartbeat`](Self::heartbeat) last asked.
    used: AtomicBool,
}

impl Link {
    /// The connection to a rank, whose parts go to an inbox.
    pub(super) fn new(stream: TcpStream, rank: usize, inbox: &Arc<Inbox>) -> Result<Self> {
        let liveness = Arc::new(PeerLiveness::new());
        let prepared = stream
            .set_nodelay(true)
            .and_then(|()| stream.set_nonblocking(true))
            .and_then(|()| Ok((stream.try_clone()?, stream.try_clone()?)));
        match prepared {
            Ok((control, source)) => {
                let is_local = is_local(&control);
                if is_local {
                    set_local_congestion_control(&control);
                } else {
                    limit_backoff(&control);
                }
                let reader =
                    FrameReader::new(source, rank, Arc::clone(inbox), Arc::clone(&liveness));
                Ok(Self {
                    writer: Mutex::new(stream),
                    control,
                    is_local,
                    reader: Arc::new(Mutex::new(reader)),
                    liveness,
                    torn: AtomicBool::new(false),
                    used: AtomicBool::new(false),
                })
            }
            Err(error) => Err(Error::io("a connection cannot be set up", error)),
        }
    }

    /// The connection, to wait for it.
    pub(super) fn stream(&self) -> &TcpStream {
        &self.control
    }

    /// Another handle on the connection, for its reader.
    pub(super) fn source(&self) -> io::Result<TcpStream> {
        self.control.try_clone()
    }

    /// Writes a frame. Where the connection has no room, `go_on` waits for some, and says whether
    /// to keep trying; it is told the number of bytes written so far.
    pub(super) fn write(
        &self,
        head: &[u8],
        preamble: &[u8],
        payload: &[u8],
        go_on: impl FnMut(usize) -> bool,
    ) -> io::Result<()> {
        // A writer that panicked has left its frame torn, which is noted.
        let mut stream = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        self.used.store(true, Ordering::Relaxed);
        self.write_to(&mut stream, [head, preamble, payload], go_on)
    }

    /// Writes a short frame where nothing was written since the last call. Never waits: where a
    /// frame is under way the link is not idle, and a peer that takes nothing is not reading.
    pub(super) fn heartbeat(&self, frame: &[u8]) {
        if self.used.swap(false, Ordering::Relaxed) {
            return;
        }
        if let Ok(mut stream) = self.writer.try_lock()
            && is_ready(&stream, PollFlags::OUT)
        {
            // A connection that says it is writable has room for some kilobytes; who else writes
            // holds the lock.
            let until = Instant::now() + WRITER_CHECK_INTERVAL;
            let _ = self.write_to(&mut stream, [frame, &[], &[]], |written| {
                written > 0 && self.has_room_by(until)
            });
        }
    }

    /// Writes a short frame, if the peer takes it in time.
    pub(super) fn write_until(&self, frame: &[u8], until: Instant) {
        // A peer that takes nothing is found silent, or ends.
        let _ = self.write(frame, &[], &[], |_| self.has_room_by(until));
    }

    /// Checks if bytes, or the end of the connection, wait to be read.
    pub(super) fn has_unread(&self) -> bool {
        is_ready(&self.control, PollFlags::IN)
    }

    /// Sends the final message, if that is possible in time, and ends the sending side.
    pub(super) fn part(&self, head: &[u8], preamble: &[u8], until: Instant) {
        loop {
            match self.writer.try_lock() {
                Ok(mut stream) => {
                    // A peer that takes nothing will see the connection end.
                    let _ = self.write_to(&mut stream, [head, preamble, &[]], |_| {
                        self.has_room_by(until)
                    });
                    self.torn.store(true, Ordering::Release);
                    break;
                }
                Err(TryLockError::Poisoned(_)) => break,
                Err(TryLockError::WouldBlock) if Instant::now() < until => {
                    thread::sleep(Duration::from_millis(5));
                }
                Err(TryLockError::WouldBlock) => break,
            }
        }
        self.hang_up();
    }

    /// Checks if written data would be lost if this process ended and the peer then sent something: it waits here for
    /// the peer to take what came before, or is on its way over a network, which may lose it.
    pub(super) fn has_unsent(&self) -> bool {
        let mut fds = [PollFd::new(&self.control, PollFlags::empty())];
        let over = PollFlags::ERR | PollFlags::HUP;
        match poll(&mut fds, Some(&timespec(Duration::ZERO))) {
            // The connection has ended, or both have sent their final message.
            Ok(_) if fds[0].revents().intersects(over) => false,
            _ if self.is_local => unsent(&self.control) > 0,
            _ => unconfirmed(&self.control) > 0,
        }
    }

    /// Ends the sending side.
    pub(super) fn hang_up(&self) {
        let _ = self.control.shutdown(Shutdown::Write);
    }

    pub(super) fn cut(&self) {
        let _ = self.control.shutdown(Shutdown::Both);
    }

    /// Waits a while for room to write, and says whether there is time left.
    fn has_room_by(&self, until: Instant) -> bool {
        let left = until.saturating_duration_since(Instant::now());
        await_ready(&self.control, PollFlags::OUT, left);
        Instant::now() < until
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
}

/// Lets a connection that stays on this host go as fast as memory does. Where the system's choice is
/// a congestion control that paces what is sent, such as BBR, a wait of the program would be taken
/// for a slow network. What goes over a network keeps the system's choice.
fn set_local_congestion_control(stream: &TcpStream) {
    #[cfg(target_os = "linux")]
    {
        // Every system has this one; a connection without it is slower, and as good.
        let _ = rustix::net::sockopt::set_tcp_congestion(stream, "reno");
    }
    #[cfg(not(target_os = "linux"))]
    let _ = stream;
}

/// Checks if both ends of a connection have the same address.
fn is_local(stream: &TcpStream) -> bool {
    match (stream.local_addr(), stream.peer_addr()) {
        (Ok(here), Ok(there)) => here.ip() == there.ip(),
        _ => false,
    }
}

/// Checks if a connection is ready at this moment; an error or an end counts as being so.
fn is_ready(stream: &TcpStream, flags: PollFlags) -> bool {
    await_ready(stream, flags, Duration::ZERO)
}

/// The interval at which a waiting writer checks if it should continue.
pub(super) const WRITER_CHECK_INTERVAL: Duration = Duration::from_millis(100);
