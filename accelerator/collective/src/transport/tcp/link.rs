//! The connections to the peers.

use std::{
    io::{self, IoSlice, IoSliceMut, Read, Write},
    net::{Shutdown, TcpStream},
    os::fd::AsFd,
    sync::{
        Arc, Mutex, PoisonError, TryLockError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, poll};

use super::frame_reader::{FrameReader, ReadOutcome, Stages, is_open, read_frames};
use super::peer_liveness::PeerLiveness;
#[cfg(target_os = "linux")]
use super::readable::{EpollState, ReadableSet};
use crate::error::{Error, Result};
use crate::socket::{await_ready, limit_backoff, timespec, unconfirmed, unsent};
use crate::transport::Inbox;
use crate::wire::Head;

/// The connection to one peer: whole frames go out, one at a time.
#[derive(Debug)]
pub(super) struct Link {
    stream: SharedStream,
    /// Held while a frame is written.
    writer: Mutex<()>,
    /// Set if the peer is on this host, so that everything sent to it has arrived.
    pub(super) is_local: bool,
    /// The reader of the connection; a thread that reads holds the lock for a few frames.
    pub(super) reader: Mutex<FrameReader<SharedStream>>,
    /// The registration in [`Links::readable`]; changed only while the reader is locked.
    #[cfg(target_os = "linux")]
    epoll_state: accelerator_host::sync::Mutex<EpollState>,
    /// The record of when the peer was last heard from.
    pub(super) liveness: Arc<PeerLiveness>,
    /// Set once a frame was left unfinished or the final message was sent, after which nothing can be
    /// sent any more.
    torn: AtomicBool,
    /// Short frames that are deferred because there was no room.
    deferred: accelerator_host::sync::Mutex<Vec<[u8; Head::LEN]>>,
    /// Set once a heartbeat was written. Until one arrives, the peer allows this rank the connect timeout in addition.
    has_sent_heartbeat: AtomicBool,
    /// Set if something was sent since the last call of [`heartbeat`](Self::heartbeat).
    used: AtomicBool,
}

impl Link {
    /// The connection to a rank, whose parts go to an inbox.
    fn new(
        stream: TcpStream,
        rank: usize,
        inbox: &Arc<Inbox>,
        stages: &Arc<Stages>,
    ) -> Result<Self> {
        let liveness = Arc::new(PeerLiveness::new());
        stream
            .set_nodelay(true)
            .and_then(|()| stream.set_nonblocking(true))
            .map_err(|error| Error::io("a connection cannot be set up", error))?;
        let is_local = is_local(&stream);
        if is_local {
            set_local_congestion_control(&stream);
        } else {
            limit_backoff(&stream);
        }
        let stream = SharedStream(Arc::new(stream));
        let (inbox, liveness_of_reader) = (Arc::clone(inbox), Arc::clone(&liveness));
        let stages = Arc::clone(stages);
        let reader = FrameReader::new(stream.clone(), rank, inbox, liveness_of_reader, stages);
        Ok(Self {
            stream,
            writer: Mutex::new(()),
            is_local,
            reader: Mutex::new(reader),
            #[cfg(target_os = "linux")]
            epoll_state: accelerator_host::sync::Mutex::default(),
            liveness,
            torn: AtomicBool::new(false),
            deferred: accelerator_host::sync::Mutex::default(),
            has_sent_heartbeat: AtomicBool::new(false),
            used: AtomicBool::new(false),
        })
    }

    /// The connection, to wait for it.
    pub(super) fn stream(&self) -> &TcpStream {
        &self.stream.0
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
        let _writing = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        self.used.store(true, Ordering::Relaxed);
        self.write_frame([head, preamble, payload], go_on)
    }

    /// Writes as many deferred frames as there is room for.
    pub(super) fn write_deferred(&self) {
        self.deferred
            .lock()
            .retain(|frame| !self.try_write_short(frame));
    }

    /// Writes a heartbeat if nothing was written since the last call, and the first one in any case. Never waits: a link
    /// with a frame in progress is not idle, and a peer whose socket is full is not reading.
    pub(super) fn heartbeat(&self, frame: &[u8; Head::LEN]) {
        let is_idle = !self.used.swap(false, Ordering::Relaxed);
        let is_first = !self.has_sent_heartbeat.load(Ordering::Relaxed);
        if (is_idle || is_first) && self.try_write_short(frame) {
            self.has_sent_heartbeat.store(true, Ordering::Relaxed);
        }
    }

    /// Writes a short frame, or defers it to the next [`write_deferred`](Self::write_deferred) if there is no room in
    /// time.
    pub(super) fn write_soon(&self, frame: &[u8; Head::LEN], until: Instant) {
        loop {
            if self.try_write_short(frame) {
                return;
            }
            if Instant::now() >= until {
                self.deferred.lock().push(*frame);
                return;
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Writes a short frame if nobody writes and there is room, and says whether it did.
    fn try_write_short(&self, frame: &[u8; Head::LEN]) -> bool {
        let Ok(_writing) = self.writer.try_lock() else {
            return false;
        };
        if !is_ready(self.stream(), PollFlags::OUT) {
            return false;
        }
        // A connection that says it is writable has room for some kilobytes.
        let until = Instant::now() + WRITER_CHECK_INTERVAL;
        let written = self.write_frame([frame, &[], &[]], |written| {
            written > 0 && self.has_room_by(until)
        });
        // If it is broken, the peer hears of that.
        written.is_ok() || self.torn.load(Ordering::Acquire)
    }

    /// Reads frames, and registers the connection of this rank as long as it can be read.
    #[cfg(target_os = "linux")]
    fn read_registered(&self, rank: usize, readable: &ReadableSet) -> ReadOutcome {
        let _unregister = UnregisterOnPanic {
            link: self,
            rank,
            readable,
        };
        let mut outcome = ReadOutcome::Ended;
        let mut again = true;
        while again {
            again = false;
            outcome = outcome.merge(read_frames(&self.reader, |reader| {
                let after = match (reader.has_ended(), reader.is_full()) {
                    (true, _) => EpollState::Ended,
                    (false, true) => EpollState::Unregistered,
                    (false, false) => EpollState::Registered,
                };
                let mut state = self.epoll_state.lock();
                let before = *state;
                *state = readable.set_state(rank, self.stream(), before, after);
                // A thread that made room before the state changed did not try this connection.
                again = before == EpollState::Registered && reader.can_continue();
            }));
        }
        outcome
    }

    /// Checks if bytes, or the end of the connection, wait to be read.
    pub(super) fn has_unread(&self) -> bool {
        is_ready(self.stream(), PollFlags::IN)
    }

    /// Sends the final message, if that is possible in time, and ends the sending side.
    pub(super) fn part(&self, head: &[u8], preamble: &[u8], until: Instant) {
        loop {
            match self.writer.try_lock() {
                Ok(_writing) => {
                    // A peer that takes nothing will see the connection end.
                    let _ = self.write_frame([head, preamble, &[]], |_| self.has_room_by(until));
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
        let mut fds = [PollFd::new(self.stream(), PollFlags::empty())];
        let over = PollFlags::ERR | PollFlags::HUP;
        match poll(&mut fds, Some(&timespec(Duration::ZERO))) {
            // The connection has ended, or both have sent their final message.
            Ok(_) if fds[0].revents().intersects(over) => false,
            _ if self.is_local => unsent(self.stream()) > 0,
            _ => unconfirmed(self.stream()) > 0,
        }
    }

    /// Ends the sending side.
    pub(super) fn hang_up(&self) {
        let _ = self.stream().shutdown(Shutdown::Write);
    }

    pub(super) fn cut(&self) {
        let _ = self.stream().shutdown(Shutdown::Both);
    }

    /// Waits a while for room to write, and says whether there is time left.
    fn has_room_by(&self, until: Instant) -> bool {
        let left = until.saturating_duration_since(Instant::now());
        await_ready(self.stream(), PollFlags::OUT, left);
        Instant::now() < until
    }

    /// Writes a frame; the caller holds the writer's lock.
    fn write_frame(
        &self,
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
        let mut stream = self.stream();
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

/// Lets every pass try a connection whose reader has panicked: epoll may have nothing to report of it.
#[cfg(target_os = "linux")]
struct UnregisterOnPanic<'a> {
    link: &'a Link,
    rank: usize,
    readable: &'a ReadableSet,
}

#[cfg(target_os = "linux")]
impl Drop for UnregisterOnPanic<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            let mut state = self.link.epoll_state.lock();
            let (stream, after) = (self.link.stream(), EpollState::Unregistered);
            *state = self.readable.set_state(self.rank, stream, *state, after);
        }
    }
}

/// The connections of a rank by the ranks of the peers; none to itself.
#[derive(Debug)]
pub(super) struct Links {
    links: Vec<Option<Link>>,
    /// Finds the readable connections; `None` if each is tried instead.
    #[cfg(target_os = "linux")]
    readable: Option<ReadableSet>,
}

impl Links {
    /// The connections, of which what comes goes to an inbox.
    pub(super) fn new(streams: Vec<Option<TcpStream>>, inbox: &Arc<Inbox>) -> Result<Self> {
        let stages = Arc::new(Stages::default());
        let links = streams.into_iter().enumerate().map(|(rank, stream)| {
            stream
                .map(|stream| Link::new(stream, rank, inbox, &stages))
                .transpose()
        });
        let links = Self {
            links: links.collect::<Result<_>>()?,
            #[cfg(target_os = "linux")]
            readable: None,
        };
        #[cfg(target_os = "linux")]
        let links = links.with_readable_set();
        Ok(links)
    }

    /// Registers the connections with epoll if that is cheaper than trying to read from each of them.
    #[cfg(target_os = "linux")]
    fn with_readable_set(self) -> Self {
        let readable = match self.links.len() > MAX_SCANNED_RANKS {
            // If epoll is unavailable, each connection is tried.
            true => ReadableSet::new().ok(),
            false => None,
        };
        if let Some(readable) = &readable {
            for (rank, link) in self.iter() {
                *link.epoll_state.lock() = readable.insert(rank, link.stream());
            }
        }
        Self { readable, ..self }
    }

    pub(super) fn get(&self, rank: usize) -> Option<&Link> {
        self.links.get(rank)?.as_ref()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (usize, &Link)> {
        let links = self.links.iter().enumerate();
        links.filter_map(|(rank, link)| Some((rank, link.as_ref()?)))
    }

    /// Reads at most a frame or two from each peer. If there was none, returns `Full` if a queue has no room, `Ended` if
    /// all connections have ended, and `Nothing` otherwise.
    pub(super) fn read_frames(&self) -> ReadOutcome {
        #[cfg(target_os = "linux")]
        if let Some(readable) = &self.readable {
            return self.read_ready(readable);
        }
        let links = self.iter();
        links.fold(ReadOutcome::Ended, |outcome, (_, link)| {
            outcome.merge(read_frames(&link.reader, |_| {}))
        })
    }

    /// Like [`read_frames`](Self::read_frames), but skips connections without bytes to read.
    #[cfg(target_os = "linux")]
    fn read_ready(&self, readable: &ReadableSet) -> ReadOutcome {
        let mut outcome = match readable.has_ended() {
            true => ReadOutcome::Ended,
            false => ReadOutcome::Nothing,
        };
        if readable.has_unregistered() {
            let is_unregistered =
                |link: &Link| *link.epoll_state.lock() == EpollState::Unregistered;
            for (rank, link) in self.iter().filter(|(_, link)| is_unregistered(link)) {
                outcome = outcome.merge(link.read_registered(rank, readable));
            }
        }
        let has_more = readable.for_each_ready(|rank| {
            if let Some(link) = self.get(rank) {
                outcome = outcome.merge(link.read_registered(rank, readable));
            }
        });
        match has_more {
            true => ReadOutcome::Frames,
            false => outcome,
        }
    }

    /// Waits for one of these, or for bytes from anyone whose bytes can be taken.
    pub(super) fn poll<const N: usize>(&self, these: [PollFd<'_>; N], pause: Duration) {
        let none = PollFd::from_borrowed_fd(
            match self.iter().next() {
                Some((_, link)) => link.stream().as_fd(),
                None => return thread::sleep(pause),
            },
            PollFlags::empty(),
        );
        let mut few = std::array::from_fn::<_, MAX_STACK_FDS, _>(|_| none.clone());
        let mut many = Vec::new();
        #[cfg(target_os = "linux")]
        let readable = self.readable.as_ref();
        #[cfg(not(target_os = "linux"))]
        let readable: Option<&std::os::fd::OwnedFd> = None;
        let fds = match readable.is_some() || self.links.len() + N <= MAX_STACK_FDS {
            true => &mut few[..],
            false => {
                many.resize(self.links.len() + N, none);
                &mut many[..]
            }
        };
        let mut count = 0;
        for these in these {
            fds[count] = these;
            count += 1;
        }
        if let Some(readable) = readable {
            fds[count] = PollFd::new(readable, PollFlags::IN);
            count += 1;
        }
        for (_, link) in self.iter().filter(|_| readable.is_none()) {
            if is_open(&link.reader) {
                fds[count] = PollFd::new(link.stream(), PollFlags::IN);
                count += 1;
            }
        }
        // No event tells of bytes on a connection that epoll refused.
        #[cfg(target_os = "linux")]
        let pause = match readable.is_some_and(ReadableSet::has_unregistered) {
            true => pause.min(ROOM_CHECK_INTERVAL),
            false => pause,
        };
        // One that failed is followed by another look.
        let _ = poll(&mut fds[..count], Some(&timespec(pause)));
    }
}

/// The largest world size at which every connection is tried on each pass, because epoll would not be cheaper.
#[cfg(target_os = "linux")]
const MAX_SCANNED_RANKS: usize = 8;

/// The interval at which a reader checks if a full queue has room.
pub(super) const ROOM_CHECK_INTERVAL: Duration = Duration::from_millis(20);

/// The most connections that are polled without allocating memory.
const MAX_STACK_FDS: usize = 64;

/// A connection that reads and writes through one descriptor.
#[derive(Clone, Debug)]
pub(super) struct SharedStream(Arc<TcpStream>);

impl Read for SharedStream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        (&*self.0).read(buffer)
    }

    fn read_vectored(&mut self, buffers: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        (&*self.0).read_vectored(buffers)
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
