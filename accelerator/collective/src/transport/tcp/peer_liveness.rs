//! Records when a peer was last heard from.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The record of when a peer was last heard from. Readers update it; the heartbeat thread checks it for silence.
#[derive(Debug)]
pub(super) struct PeerLiveness {
    since: Instant,
    /// The time at which the peer was last heard from, in milliseconds after `since`.
    heard: AtomicU64,
    /// Set once a heartbeat has arrived.
    has_sent_heartbeat: AtomicBool,
    /// Set while the connection is not read because the peer's queue is full.
    paused: AtomicBool,
    /// The liveness timeout of the peer, in milliseconds; 0 while unknown.
    peer_timeout_ms: AtomicU32,
}

impl PeerLiveness {
    pub(super) fn new() -> Self {
        Self {
            since: Instant::now(),
            heard: AtomicU64::new(0),
            has_sent_heartbeat: AtomicBool::new(false),
            paused: AtomicBool::new(false),
            peer_timeout_ms: AtomicU32::new(0),
        }
    }

    /// Records that bytes of the peer were read.
    pub(super) fn on_bytes(&self) {
        self.refresh(Instant::now());
    }

    /// Records a heartbeat of the peer, whose liveness timeout is `timeout`.
    pub(super) fn on_heartbeat(&self, timeout: Duration) {
        self.refresh(Instant::now());
        // After `heard`: silence from before the first heartbeat does not count.
        self.has_sent_heartbeat.store(true, Ordering::Release);
        let timeout = timeout.as_millis().try_into().unwrap_or(u32::MAX);
        self.peer_timeout_ms.store(timeout, Ordering::Relaxed);
    }

    /// Subtracts `silence` from the peer's silence, down to zero at `now`.
    pub(super) fn credit(&self, silence: Duration, now: Instant) {
        let heard = Duration::from_millis(self.heard.load(Ordering::Acquire));
        let heard = self.since + heard.min(MAX_SILENCE) + silence.min(MAX_SILENCE);
        self.refresh(heard.min(now));
    }

    fn refresh(&self, now: Instant) {
        let heard = now.saturating_duration_since(self.since).as_millis();
        self.heard.fetch_max(heard as u64, Ordering::AcqRel);
    }

    /// Records that reading stops because the peer's queue is full.
    pub(super) fn pause(&self) {
        self.paused.store(true, Ordering::Release);
    }

    /// Records that reading continues, and counts silence from now on.
    pub(super) fn resume(&self) {
        self.refresh(Instant::now());
        self.paused.store(false, Ordering::Release);
    }

    pub(super) fn is_paused(&self) -> bool {
        self.paused.load(Ordering::Acquire)
    }

    /// Returns `true` if the peer has sent a heartbeat since the connection was made.
    pub(super) fn has_sent_heartbeat(&self) -> bool {
        self.has_sent_heartbeat.load(Ordering::Acquire)
    }

    /// Returns the liveness timeout of the peer, or `None` before its first heartbeat.
    pub(super) fn peer_timeout(&self) -> Option<Duration> {
        match self.peer_timeout_ms.load(Ordering::Relaxed) {
            0 => None,
            milliseconds => Some(Duration::from_millis(milliseconds.into())),
        }
    }

    /// Returns how long the peer has been silent; zero while reading is paused.
    pub(super) fn silence(&self, now: Instant) -> Duration {
        if self.is_paused() {
            return Duration::ZERO;
        }
        let heard = Duration::from_millis(self.heard.load(Ordering::Acquire));
        now.saturating_duration_since(self.since)
            .saturating_sub(heard)
    }
}

/// A bound that keeps the arithmetic of clocks from overflowing.
const MAX_SILENCE: Duration = Duration::from_secs(1 << 40);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_does_not_count_while_reading_is_paused() {
        let liveness = PeerLiveness::new();
        let later = |seconds| liveness.since + Duration::from_secs(seconds);
        assert_eq!(liveness.silence(later(3)), Duration::from_secs(3));
        liveness.refresh(later(2));
        assert_eq!(liveness.silence(later(3)), Duration::from_secs(1));
        liveness.pause();
        assert_eq!(liveness.silence(later(9)), Duration::ZERO);
        liveness.refresh(later(9));
        liveness.resume();
        assert_eq!(liveness.silence(later(10)), Duration::from_secs(1));
        liveness.on_bytes();
        // The clock never runs backwards.
        assert_eq!(liveness.silence(later(10)), Duration::from_secs(1));
    }

    #[test]
    fn silence_can_be_forgiven() {
        let liveness = PeerLiveness::new();
        let later = |seconds| liveness.since + Duration::from_secs(seconds);
        liveness.credit(Duration::from_secs(2), later(5));
        assert_eq!(liveness.silence(later(5)), Duration::from_secs(3));
        liveness.credit(Duration::MAX, later(6));
        assert_eq!(liveness.silence(later(6)), Duration::ZERO);
        assert_eq!(liveness.silence(later(7)), Duration::from_secs(1));
    }

    #[test]
    fn the_timeout_of_a_peer_is_known_after_its_first_heartbeat() {
        let liveness = PeerLiveness::new();
        liveness.on_bytes();
        assert!(!liveness.has_sent_heartbeat());
        assert_eq!(liveness.peer_timeout(), None);
        liveness.on_heartbeat(Duration::from_millis(1500));
        assert!(liveness.has_sent_heartbeat());
        assert_eq!(liveness.peer_timeout(), Some(Duration::from_millis(1500)));
    }
}
