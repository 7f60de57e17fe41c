//! Those who have come to a door and have not said yet who they are.

use std::{
    collections::BTreeMap,
    net::{Shutdown, TcpStream},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

/// Connections whose handshake is not over. Their number is bounded: when one more comes, the
/// oldest has to go, since ranks say who they are at once and idle strangers never do.
#[derive(Debug)]
pub(crate) struct Lobby {
    limit: usize,
    guests: Mutex<Guests>,
}

impl Lobby {
    /// How long a guest may take to say who it is.
    pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

    /// A lobby for so many guests, at least one.
    pub(crate) fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self {
            limit: limit.max(1),
            guests: Mutex::default(),
        })
    }

    /// Lets a connection in, at the cost of the oldest one where there is no room.
    pub(crate) fn enter(self: &Arc<Self>, stream: &Arc<TcpStream>) -> Guest {
        let mut guests = self.guests();
        while guests.present.len() >= self.limit
            && let Some((_, oldest)) = guests.present.pop_first()
        {
            // Its thread sees the end of the connection.
            let _ = oldest.shutdown(Shutdown::Both);
        }
        let number = guests.next;
        guests.next += 1;
        guests.present.insert(number, Arc::clone(stream));
        Guest {
            lobby: Arc::clone(self),
            number,
        }
    }

    /// Sends everybody away.
    pub(crate) fn clear(&self) {
        for (_, stream) in std::mem::take(&mut self.guests().present) {
            // The other end may be gone already.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    fn guests(&self) -> MutexGuard<'_, Guests> {
        // A map is whole between its operations.
        self.guests.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A place in the lobby, given up when dropped.
#[derive(Debug)]
pub(crate) struct Guest {
    lobby: Arc<Lobby>,
    number: u64,
}

impl Guest {
    /// Leaves for the inside; false where the guest had to make room before.
    pub(crate) fn leave(self) -> bool {
        self.lobby.guests().present.remove(&self.number).is_some()
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.lobby.guests().present.remove(&self.number);
    }
}

#[derive(Debug, Default)]
struct Guests {
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
        let lobby = Lobby::new(2);
        let mut visits = Vec::new();
        for _ in 0..3 {
            let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let far = Arc::new(listener.accept().unwrap().0);
            visits.push((near, lobby.enter(&far)));
        }
        let (mut oldest, evicted) = visits.remove(0);
        assert_eq!(oldest.read(&mut [0]).unwrap(), 0, "the connection ended");
        assert!(!evicted.leave());
        let (_, second) = visits.remove(0);
        assert!(second.leave());
        lobby.clear();
        let (mut last, _guest) = visits.remove(0);
        assert_eq!(last.read(&mut [0]).unwrap(), 0);
    }
}
