//! The record of when a peer was heard, from which its silence is measured.

use std::{
    sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    time::{Duration, Instant},
};

/// Notes of a connection's reader for the thread that judges silence.
#[derive(Debug)]
pub(super) struct PeerLiveness {
    since: Instant,
    /// The time at which bytes were last read, in milliseconds after `since`.
    heard: AtomicU64,
    /// Set once anything was read.
    spoken: AtomicBool,
    /// Set while reading is stopped for want of room.
    paused: AtomicBool,
    /// The milliseconds of silence after which the peer gives others up; 0 while unknown.
    peer_limit_ms: AtomicU32,
}

impl PeerLiveness {
    pub(super) fn new() -> Self {
        Self {
            since: Instant::now(),
            heard: AtomicU64::new(0),
            spoken: AtomicBool::new(false),
            paused: AtomicBool::new(false),
            peer_limit_ms: AtomicU32::new(0),
        }
    }

    /// Notes that bytes were read.
    pub(super) fn on_bytes(&self) {
        self.refresh(Instant::now());
        self.spoken.store(true, Ordering::Relaxed);
    }

    /// Takes so much off the silence; none is left at most.
    pub(super) fn credit(&self, silence: Duration, now: Instant) {
        let heard = Duration::from_millis(self.heard.load(Ordering::Acquire));
        let heard = self.since + heard.min(MAX_SILENCE) + silence.min(MAX_SILENCE);
        self.refresh(heard.min(now));
    }

    /// Starts the clock again.
    fn refresh(&self, now: Instant) {
        let heard = now.saturating_duration_since(self.since).as_millis();
        self.heard.fetch_max(heard as u64, Ordering::AcqRel);
    }

    /// Notes that reading stops for want of room.
    pub(super) fn pause(&self) {
        self.paused.store(true, Ordering::Release);
    }

    /// Notes that reading goes on; silence is counted from here.
    pub(super) fn resume(&self) {
        self.refresh(Instant::now());
        self.paused.store(false, Ordering::Release);
    }

    pub(super) fn is_paused(&self) -> bool {
        self.paused.load(Ordering::Acquire)
    }

    /// Returns `true` if the peer has said anything since the connection was made.
    pub(super) fn has_spoken(&self) -> bool {
        self.spoken.load(Ordering::Relaxed)
    }

    /// Notes after how long a silence the peer gives others up.
    pub(super) fn set_peer_limit(&self, milliseconds: u32) {
        self.peer_limit_ms.store(milliseconds, Ordering::Relaxed);
    }

    /// The length of silence after which the peer gives others up, once it has told.
    pub(super) fn peer_limit(&self) -> Option<Duration> {
        match self.peer_limit_ms.load(Ordering::Relaxed) {
            0 => None,
            milliseconds => Some(Duration::from_millis(milliseconds.into())),
        }
    }

    /// The time for which nothing came; zero while nobody is reading.
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
    fn silence_counts_only_while_somebody_listens() {
        let liveness = PeerLiveness::new();
        let later = |seconds| liveness.since + Duration::from_secs(seconds);
        assert!(!liveness.has_spoken());
        assert_eq!(liveness.silence(later(3)), Duration::from_secs(3));
        liveness.refresh(later(2));
        assert_eq!(liveness.silence(later(3)), Duration::from_secs(1));
        liveness.pause();
        assert_eq!(liveness.silence(later(9)), Duration::ZERO);
        liveness.refresh(later(9));
        liveness.resume();
        assert_eq!(liveness.silence(later(10)), Duration::from_secs(1));
        liveness.on_bytes();
        assert!(liveness.has_spoken());
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
    fn a_wish_is_unknown_until_it_is_told() {
        let liveness = PeerLiveness::new();
        assert_eq!(liveness.peer_limit(), None);
        liveness.set_peer_limit(1500);
        assert_eq!(liveness.peer_limit(), Some(Duration::from_millis(1500)));
    }
}
