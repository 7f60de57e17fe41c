//! The heartbeat of a rank in its arena.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::memory::Atomics;

/// The latest heartbeat of a rank, for the other ranks of its host to read. The threads of its
/// rank that write it take turns.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct SharedHeartbeat {
    /// The number of the latest heartbeat: zero before the first one, never zero afterwards.
    number: AtomicU32,
    timeout_ms: AtomicU32,
    content: AtomicU64,
}

// SAFETY: atomic integers, and padding that nobody reads.
unsafe impl Atomics for SharedHeartbeat {}

/// A heartbeat as it is stored in an arena.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct HeartbeatWords {
    /// The encoded [`Heartbeat`](crate::wire::Heartbeat).
    pub(crate) content: u64,
    /// The liveness timeout of the sender, in milliseconds.
    pub(crate) timeout_ms: u32,
}

impl SharedHeartbeat {
    /// Publishes the next heartbeat.
    pub(crate) fn publish(&self, words: HeartbeatWords) {
        self.content.store(words.content, Ordering::Relaxed);
        self.timeout_ms.store(words.timeout_ms, Ordering::Relaxed);
        let number = self.number.load(Ordering::Relaxed);
        let next = number.checked_add(1).unwrap_or(1);
        self.number.store(next, Ordering::Release);
    }

    /// Returns the latest heartbeat and sets `seen` to its number, or returns `None` if that number has not changed. If
    /// the owner publishes at the same time, some words may belong to the next heartbeat.
    pub(crate) fn read_new(&self, seen: &mut u32) -> Option<HeartbeatWords> {
        let number = self.number.load(Ordering::Acquire);
        if number == *seen {
            return None;
        }
        *seen = number;
        Some(HeartbeatWords {
            content: self.content.load(Ordering::Relaxed),
            timeout_ms: self.timeout_ms.load(Ordering::Relaxed),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_heartbeat_is_read_once_and_the_number_skips_zero() {
        let shared = SharedHeartbeat {
            number: AtomicU32::new(0),
            timeout_ms: AtomicU32::new(0),
            content: AtomicU64::new(0),
        };
        let mut seen = 0;
        assert_eq!(shared.read_new(&mut seen), None);
        let words = |content| HeartbeatWords {
            content,
            timeout_ms: 7,
        };
        for number in [1, 2, u32::MAX, 1] {
            shared.publish(words(number.into()));
            assert_eq!(shared.read_new(&mut seen), Some(words(number.into())));
            assert_eq!((seen, shared.read_new(&mut seen)), (number, None));
            if number == 2 {
                shared.number.store(u32::MAX - 1, Ordering::Relaxed);
            }
        }
    }
}
