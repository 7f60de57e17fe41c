//! Connections whose handshake is not over.

use std::{
    collections::BTreeMap,
    net::{Shutdown, TcpStream},
    sync::Arc,
    time::Duration,
};

use crate::sync::{Mutex, MutexGuard};

/// Connections whose handshake is not over. Their number is bounded: when one more comes, the
/// oldest is evicted: ranks complete the handshake at once, idle connections never do.
///
/// ```
/// use std::net::{TcpListener, TcpStream};
/// use std::sync::Arc;
///
/// use accelerator_collective::rendezvous::PendingHandshakes;
///
/// # fn main() -> std::io::Result<()> {
/// let pending = PendingHandshakes::new(64);
/// let listener = TcpListener::bind(("127.0.0.1", 0))?;
/// let _other = TcpStream::connect(listener.local_addr()?)?;
/// let stream = Arc::new(listener.accept()?.0);
/// stream.set_read_timeout(Some(PendingHandshakes::TIMEOUT))?;
/// let handshake = pending.enter(&stream);
/// // Here the other end proves who it is.
/// assert!(handshake.leave());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct PendingHandshakes {
    limit: usize,
    map: Mutex<PendingMap>,
}

impl PendingHandshakes {
    /// How long a handshake may take to say who it is.
    pub const TIMEOUT: Duration = Duration::from_secs(10);

    /// Room for so many connections, at least one.
    pub fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self {
            limit: limit.max(1),
            map: Mutex::default(),
        })
    }

    /// Lets a connection in, at the cost of the oldest one where there is no room.
    pub fn enter(self: &Arc<Self>, stream: &Arc<TcpStream>) -> PendingHandshake {
        let mut map = self.map();
        while map.present.len() >= self.limit
            && let Some((_, oldest)) = map.present.pop_first()
        {
            // Its thread sees the end of the connection.
            let _ = oldest.shutdown(Shutdown::Both);
        }
        let number = map.next;
        map.next += 1;
        map.present.insert(number, Arc::clone(stream));
        PendingHandshake {
            pending: Arc::clone(self),
            number,
        }
    }

    /// Closes all of them.
    pub(crate) fn clear(&self) {
        for (_, stream) in std::mem::take(&mut self.map().present) {
            // The other end may be gone already.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    fn map(&self) -> MutexGuard<'_, PendingMap> {
        self.map.lock()
    }
}

/// A place in the pending, given up when dropped.
#[derive(Debug)]
pub struct PendingHandshake {
    pending: Arc<PendingHandshakes>,
    number: u64,
}

impl PendingHandshake {
    /// Leaves for the inside; false where the handshake had to make room before.
    pub fn leave(self) -> bool {
        self.pending.map().present.remove(&self.number).is_some()
    }
}

impl Drop for PendingHandshake {
    fn drop(&mut self) {
        self.pending.map().present.remove(&self.number);
    }
}

#[derive(Debug, Default)]
struct PendingMap {
    next: u64,
    present: BTreeMap<u64, Arc<TcpStream>>,
}

#[cfg(test)]
mod tests {
    use std::{io::Read, net::TcpListener};

    use super::*;

    #[test]
    fn the_oldest_makes_room() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let pending = PendingHandshakes::new(2);
        let mut visits = Vec::new();
        for _ in 0..3 {
            let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let far = Arc::new(listener.accept().unwrap().0);
            visits.push((near, pending.enter(&far)));
        }
        let (mut oldest, evicted) = visits.remove(0);
        assert_eq!(oldest.read(&mut [0]).unwrap(), 0, "the connection ended");
        assert!(!evicted.leave());
        let (_, second) = visits.remove(0);
        assert!(second.leave());
        pending.clear();
        let (mut last, _guest) = visits.remove(0);
        assert_eq!(last.read(&mut [0]).unwrap(), 0);
    }
}
