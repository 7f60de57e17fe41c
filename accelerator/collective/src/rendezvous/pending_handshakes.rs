//! Connections whose handshake is not over.

use std::{
    collections::BTreeMap,
    fmt,
    net::{Shutdown, TcpStream},
    sync::Arc,
    time::{Duration, Instant},
};

use crate::error::stderr_fallback;
use accelerator_host::sync::Mutex;

/// Connections that have not completed the handshake. Their number is bounded: each further connection evicts the
/// oldest. Ranks and hosts of the job complete the handshake at once; idle connections never do.
///
/// ```
/// use std::{net::{TcpListener, TcpStream}, sync::Arc};
///
/// use accelerator_collective::internal::PendingHandshakes;
///
/// # fn main() -> std::io::Result<()> {
/// let listener = TcpListener::bind("127.0.0.1:0")?;
/// let pending = PendingHandshakes::new(1, |text| eprintln!("{text}"));
/// let mut enter = || -> std::io::Result<_> {
///     let stream = Arc::new(TcpStream::connect(listener.local_addr()?)?);
///     Ok(pending.enter(&stream))
/// };
/// let (first, second, third) = (enter()?, enter()?, enter()?);
/// assert!(!first.leave() && !second.leave(), "both had to make room");
/// // The other end has this long to prove who it is.
/// println!("{} s", PendingHandshakes::TIMEOUT.as_secs());
/// assert!(third.leave());
///
/// // `logged` writes its line to the log; `clear` closes whatever still waits.
/// PendingHandshakes::logged(64).clear();
/// # Ok(())
/// # }
/// ```
pub struct PendingHandshakes {
    limit: usize,
    tell: fn(&str),
    map: Mutex<PendingMap>,
}

impl PendingHandshakes {
    /// The longest time that a handshake may take to identify itself.
    pub const TIMEOUT: Duration = Duration::from_secs(10);

    /// Admits `limit` connections at a time, at least one. Calls `tell` with a line of text when it evicts connections,
    /// at most once a minute.
    pub fn new(limit: usize, tell: fn(&str)) -> Arc<Self> {
        Arc::new(Self {
            limit: limit.max(1),
            tell,
            map: Mutex::default(),
        })
    }

    /// Like [`new`](Self::new), and logs the line as a warning.
    pub fn logged(limit: usize) -> Arc<Self> {
        Self::new(limit, |text| {
            tracing::warn!("{text}");
            stderr_fallback(text);
        })
    }

    /// Admits a connection; evicts the oldest one if there is no room.
    pub fn enter(self: &Arc<Self>, stream: &Arc<TcpStream>) -> PendingHandshake {
        let mut is_full = false;
        let mut map = self.map.lock();
        while map.present.len() >= self.limit
            && let Some((_, oldest)) = map.present.pop_first()
        {
            // Its thread sees the end of the connection.
            let _ = oldest.shutdown(Shutdown::Both);
            is_full = true;
        }
        let number = map.next;
        map.next += 1;
        map.present.insert(number, Arc::clone(stream));
        let is_due = is_full && map.told.is_none_or(|at| at.elapsed() >= TELL_EVERY);
        if is_due {
            map.told = Some(Instant::now());
        }
        drop(map);
        if is_due {
            (self.tell)(&format!(
                "{} connections at once have not proved who they are; the oldest are closed for new ones: something \
                 scans this port, or keeps it busy",
                self.limit
            ));
        }
        PendingHandshake {
            pending: Arc::clone(self),
            number,
        }
    }

    /// Closes all of them.
    pub fn clear(&self) {
        for (_, stream) in std::mem::take(&mut self.map.lock().present) {
            // The other end may be gone already.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl fmt::Debug for PendingHandshakes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PendingHandshakes")
            .field("limit", &self.limit)
            .finish_non_exhaustive()
    }
}

/// The place of one connection among [`PendingHandshakes`]; dropping it frees the place.
#[derive(Debug)]
pub struct PendingHandshake {
    pending: Arc<PendingHandshakes>,
    number: u64,
}

impl PendingHandshake {
    /// Frees the place of a connection that has completed the handshake; returns false if it was evicted before.
    pub fn leave(self) -> bool {
        self.pending
            .map
            .lock()
            .present
            .remove(&self.number)
            .is_some()
    }
}

impl Drop for PendingHandshake {
    fn drop(&mut self) {
        self.pending.map.lock().present.remove(&self.number);
    }
}

#[derive(Debug, Default)]
struct PendingMap {
    next: u64,
    /// The time of the latest line about evictions.
    told: Option<Instant>,
    present: BTreeMap<u64, Arc<TcpStream>>,
}

/// The least time between two lines about evictions.
const TELL_EVERY: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use std::{
        io::Read,
        net::TcpListener,
        sync::atomic::{AtomicUsize, Ordering},
    };

    use super::*;

    #[test]
    fn the_oldest_makes_room() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        static TOLD: AtomicUsize = AtomicUsize::new(0);
        let pending = PendingHandshakes::new(2, |text| {
            assert!(text.starts_with("2 connections at once"), "{text}");
            TOLD.fetch_add(1, Ordering::Relaxed);
        });
        let mut visits = Vec::new();
        for _ in 0..4 {
            let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let far = Arc::new(listener.accept().unwrap().0);
            visits.push((near, pending.enter(&far)));
        }
        for _ in 0..2 {
            let (mut oldest, evicted) = visits.remove(0);
            assert_eq!(oldest.read(&mut [0]).unwrap(), 0, "the connection ended");
            assert!(!evicted.leave());
        }
        assert_eq!(TOLD.load(Ordering::Relaxed), 1, "one line a minute");
        let (_, second) = visits.remove(0);
        assert!(second.leave());
        pending.clear();
        let (mut last, _guest) = visits.remove(0);
        assert_eq!(last.read(&mut [0]).unwrap(), 0);
    }
}
