//! Finds the connections that have bytes to read, with epoll instead of a read from each.

use std::io;
use std::mem::MaybeUninit;
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::event::{Timespec, epoll};

/// An epoll set of a rank's connections, with the number of those that are not registered in it.
#[derive(Debug)]
pub(super) struct ReadableSet {
    epoll: OwnedFd,
    connections: AtomicUsize,
    unregistered: AtomicUsize,
    ended: AtomicUsize,
}

/// The registration of a connection in a [`ReadableSet`].
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) enum EpollState {
    /// Epoll reports when the connection is readable.
    Registered,
    /// Epoll does not report it, so every pass tries to read: the peer's queue is full, or registration failed.
    #[default]
    Unregistered,
    /// The connection has ended and is not read again.
    Ended,
}

impl ReadableSet {
    /// Creates an empty set.
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            connections: AtomicUsize::new(0),
            unregistered: AtomicUsize::new(0),
            ended: AtomicUsize::new(0),
        })
    }

    /// Adds a connection and returns its state: unregistered if epoll refuses it.
    pub(super) fn insert(&self, rank: usize, stream: &TcpStream) -> EpollState {
        self.connections.fetch_add(1, Ordering::Relaxed);
        self.unregistered.fetch_add(1, Ordering::Relaxed);
        let (before, after) = (EpollState::Unregistered, EpollState::Registered);
        self.set_state(rank, stream, before, after)
    }

    /// Changes the state of a connection and returns the new one: unregistered instead of registered if epoll refuses
    /// it.
    pub(super) fn set_state(
        &self,
        rank: usize,
        stream: &TcpStream,
        before: EpollState,
        after: EpollState,
    ) -> EpollState {
        if before == after {
            return after;
        }
        if before == EpollState::Registered {
            // Cannot fail: the descriptor is open and registered.
            let _ = epoll::delete(&self.epoll, stream);
        }
        let after = match after {
            EpollState::Registered if self.register(rank, stream).is_err() => {
                EpollState::Unregistered
            }
            other => other,
        };
        if let Some(counter) = self.counter(after) {
            counter.fetch_add(1, Ordering::Relaxed);
        }
        if let Some(counter) = self.counter(before) {
            counter.fetch_sub(1, Ordering::Relaxed);
        }
        after
    }

    /// Returns `true` if any connection must be tried because it is unregistered.
    pub(super) fn has_unregistered(&self) -> bool {
        self.unregistered.load(Ordering::Relaxed) > 0
    }

    /// Returns `true` if all connections have ended.
    pub(super) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Relaxed) == self.connections.load(Ordering::Relaxed)
    }

    /// Calls `on_ready` with the rank of each readable connection, for at most [`MAX_EVENTS`] of them. Returns `true` if
    /// there may be more.
    pub(super) fn for_each_ready(&self, mut on_ready: impl FnMut(usize)) -> bool {
        let mut events = [const { MaybeUninit::uninit() }; MAX_EVENTS];
        // An interrupted wait is repeated by the next pass.
        let Ok((events, _)) = epoll::wait(&self.epoll, &mut events, Some(&NOW)) else {
            return false;
        };
        for event in &*events {
            on_ready(event.data.u64() as usize);
        }
        events.len() == MAX_EVENTS
    }

    fn register(&self, rank: usize, stream: &TcpStream) -> rustix::io::Result<()> {
        let data = epoll::EventData::new_u64(rank as u64);
        epoll::add(&self.epoll, stream, data, epoll::EventFlags::IN)
    }

    fn counter(&self, state: EpollState) -> Option<&AtomicUsize> {
        match state {
            EpollState::Registered => None,
            EpollState::Unregistered => Some(&self.unregistered),
            EpollState::Ended => Some(&self.ended),
        }
    }
}

/// The set can itself be polled: it is readable while any registered connection is.
impl AsFd for ReadableSet {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

const MAX_EVENTS: usize = 64;

const NOW: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 0,
};

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::time::{Duration, Instant};

    use super::*;

    /// Returns the ranks that are ready, once there are `count`.
    fn ready(set: &ReadableSet, count: usize) -> Vec<usize> {
        let end = Instant::now() + Duration::from_secs(30);
        loop {
            let mut ranks = Vec::new();
            let has_more = set.for_each_ready(|rank| ranks.push(rank));
            assert_eq!(has_more, ranks.len() == MAX_EVENTS);
            if ranks.len() >= count {
                ranks.sort_unstable();
                return ranks;
            }
            assert!(Instant::now() < end, "{ranks:?}");
        }
    }

    #[test]
    fn readable_connections_are_found_unless_they_are_full_or_have_ended() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let pair = |_| {
            let far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            (listener.accept().unwrap().0, far)
        };
        let mut pairs: Vec<_> = (0..MAX_EVENTS + 6).map(pair).collect();
        let set = ReadableSet::new().unwrap();
        for (rank, (near, _)) in pairs.iter().enumerate() {
            assert_eq!(set.insert(rank, near), EpollState::Registered);
        }
        assert!(!set.has_unregistered() && !set.has_ended());
        assert!(ready(&set, 0).is_empty());

        for rank in [2, 9] {
            pairs[rank].1.write_all(&[1]).unwrap();
        }
        assert_eq!(ready(&set, 2), [2, 9]);
        let (registered, unregistered) = (EpollState::Registered, EpollState::Unregistered);
        set.set_state(9, &pairs[9].0, registered, unregistered);
        assert!(set.has_unregistered());
        assert_eq!(ready(&set, 1), [2]);
        pairs[2].0.read_exact(&mut [0]).unwrap();
        assert!(ready(&set, 0).is_empty());
        // The byte that came before is reported.
        set.set_state(9, &pairs[9].0, unregistered, registered);
        assert!(!set.has_unregistered());
        assert_eq!(ready(&set, 1), [9]);

        for (_, far) in &mut pairs {
            far.write_all(&[1]).unwrap();
        }
        assert_eq!(ready(&set, MAX_EVENTS).len(), MAX_EVENTS);
        for (rank, (near, _)) in pairs.iter().enumerate() {
            assert!(!set.has_ended());
            set.set_state(rank, near, registered, EpollState::Ended);
        }
        assert!(set.has_ended());
        assert!(ready(&set, 0).is_empty());
    }
}
