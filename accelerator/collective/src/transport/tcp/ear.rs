//! When a peer was heard, and when it is silent.

use std::{
    sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    time::{Duration, Instant},
};

/// What the reader of a connection notes for the one who judges silence.
#[derive(Debug)]
pub(super) struct Ear {
    since: Instant,
    /// When bytes were read last, in milliseconds after `since`.
    heard: AtomicU64,
    /// Whether anything was read at all.
    known: AtomicBool,
    /// Whether nobody is reading, since there is no room.
    shut: AtomicBool,
    /// After how many milliseconds of silence the peer gives others up; 0 while unknown.
    wish: AtomicU32,
}

impl Ear {
    pub(super) fn new() -> Self {
        Self {
            since: Instant::now(),
            heard: AtomicU64::new(0),
            known: AtomicBool::new(false),
            shut: AtomicBool::new(false),
            wish: AtomicU32::new(0),
        }
    }

    /// Notes that bytes were read.
    pub(super) fn hear(&self) {
        self.refresh(Instant::now());
        self.known.store(true, Ordering::Relaxed);
    }

    /// Takes so much off the silence; none is left at most.
    pub(super) fn forgive(&self, silence: Duration, now: Instant) {
        let heard = Duration::from_millis(self.heard.load(Ordering::Acquire));
        let heard = self.since + heard.min(LONGEST) + silence.min(LONGEST);
        self.refresh(heard.min(now));
    }

    /// Starts the clock again.
    fn refresh(&self, now: Instant) {
        let heard = now.saturating_duration_since(self.since).as_millis();
        self.heard.fetch_max(heard as u64, Ordering::AcqRel);
    }

    /// Notes that reading stops for want of room.
    pub(super) fn shut(&self) {
        self.shut.store(true, Ordering::Release);
    }

    /// Notes that reading goes on; silence is counted from here.
    pub(super) fn open(&self) {
        self.refresh(Instant::now());
        self.shut.store(false, Ordering::Release);
    }

    pub(super) fn is_shut(&self) -> bool {
        self.shut.load(Ordering::Acquire)
    }

    /// Whether the peer has said anything since the connection was made.
    pub(super) fn is_known(&self) -> bool {
        self.known.load(Ordering::Relaxed)
    }

    /// Notes after how long a silence the peer gives others up.
    pub(super) fn wish(&self, milliseconds: u32) {
        self.wish.store(milliseconds, Ordering::Relaxed);
    }

    /// After how long a silence the peer gives others up, where it has said so.
    pub(super) fn wished(&self) -> Option<Duration> {
        match self.wish.load(Ordering::Relaxed) {
            0 => None,
            milliseconds => Some(Duration::from_millis(milliseconds.into())),
        }
    }

    /// For how long nothing came; nothing where nobody was listening.
    pub(super) fn silence(&self, now: Instant) -> Duration {
        if self.is_shut() {
            return Duration::ZERO;
        }
        let heard = Duration::from_millis(self.heard.load(Ordering::Acquire));
        now.saturating_duration_since(self.since)
            .saturating_sub(heard)
    }
}

/// A bound that keeps the arithmetic of clocks from overflowing.
const LONGEST: Duration = Duration::from_secs(1 << 40);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_counts_only_while_somebody_listens() {
        let ear = Ear::new();
        let later = |seconds| ear.since + Duration::from_secs(seconds);
        assert!(!ear.is_known());
        assert_eq!(ear.silence(later(3)), Duration::from_secs(3));
        ear.refresh(later(2));
        assert_eq!(ear.silence(later(3)), Duration::from_secs(1));
        ear.shut();
        assert_eq!(ear.silence(later(9)), Duration::ZERO);
        ear.refresh(later(9));
        ear.open();
        assert_eq!(ear.silence(later(10)), Duration::from_secs(1));
        ear.hear();
        assert!(ear.is_known());
        // The clock never runs backwards.
        assert_eq!(ear.silence(later(10)), Duration::from_secs(1));
    }

    #[test]
    fn silence_can_be_forgiven() {
        let ear = Ear::new();
        let later = |seconds| ear.since + Duration::from_secs(seconds);
        ear.forgive(Duration::from_secs(2), later(5));
        assert_eq!(ear.silence(later(5)), Duration::from_secs(3));
        ear.forgive(Duration::MAX, later(6));
        assert_eq!(ear.silence(later(6)), Duration::ZERO);
        assert_eq!(ear.silence(later(7)), Duration::from_secs(1));
    }

    #[test]
    fn a_wish_is_unknown_until_it_is_told() {
        let ear = Ear::new();
        assert_eq!(ear.wished(), None);
        ear.wish(1500);
        assert_eq!(ear.wished(), Some(Duration::from_millis(1500)));
    }
}
