//! The counter by which a rank tells the others how far it is, and on which they wait.
//!
//! A [`SeqCounter`] is one word in shared memory that counts what its owner has done. Only the owner
//! advances it, so there is no lock, and nothing that a dead rank could leave locked.
//!
//! The word's lowest bit says that somebody sleeps; the count is above it:
//!
//! ```text
//!   sleeper:  count·0 ── sets the bit, if the count is still the same ──► count·1 ── sleeps while
//!                                                                         the word is count·1
//!   owner:    swaps in (count+1)·0; if the bit was set, wakes all that sleep
//! ```
//!
//! Count and bit change in one atomic step, so their order needs no fence: either the sleeper's
//! step fails since the count has moved on, or the owner's step sees the bit. The futex itself
//! compares the word before it sleeps. Every step of the owner clears the bit, so a sleeper that
//! died costs one needless wake-up and no more.
//!
//! The steps are generic over the word and over what waiting is made of; `tests/model.rs`
//! runs them in loom, which tries the orders of steps that the memory model allows.

use std::{
    fmt,
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

/// The progress of its owner, for others to wait for.
///
/// It may lie in memory that several processes map, each at an address of its own; zeroed memory is
/// a counter that was never published. It has a cache line, and the adjacent one that processors
/// prefetch, for itself.
///
/// Counts wrap around. They have 31 bits: of a count that is given as a `u32` the highest bit falls
/// away, so a caller's counter may wrap where a `u32` does. Of two counts the later one is that
/// which is ahead by less than 2³⁰.
#[repr(C, align(128))]
pub(crate) struct SeqCounter {
    word: AtomicU32,
}

impl SeqCounter {
    /// A counter at 0.
    #[cfg(test)]
    pub(crate) const fn new() -> Self {
        Self {
            word: AtomicU32::new(0),
        }
    }

    /// Publishes that the owner is at `to`; whoever has seen the count can read what the owner wrote before.
    ///
    /// Only the owner may call this, with counts that never go back.
    pub(crate) fn publish(&self, to: u32) {
        publish(&self.word, to, wake_all);
    }

    /// Returns `true` if the owner is at `target` or beyond.
    pub(crate) fn reached(&self, target: u32) -> bool {
        is_reached(SharedWord::load(&self.word), target)
    }

    /// Waits until the owner is at `target` or beyond, but no longer than about `slice`, and says
    /// whether it is.
    ///
    /// It spins as `spin` says, then sleeps. Time in which it spins counts as part of the slice;
    /// a slice of zero still spins.
    pub(crate) fn wait(&self, target: u32, spin: Spin, slice: Duration) -> bool {
        wait(&self.word, target, &mut Backoff::new(spin, slice))
    }

    /// The count, without its highest bit: for messages.
    pub(crate) fn count(&self) -> u32 {
        SharedWord::load(&self.word) >> 1
    }
}

impl fmt::Debug for SeqCounter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SeqCounter").field(&self.count()).finish()
    }
}

/// The wait of a rank before it goes to sleep: the time for which it keeps the core, and then the number of times
/// that it offers the core to others.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Spin {
    busy: Duration,
    yields: u32,
}

impl Spin {
    /// Sleeps at once.
    pub(crate) const NONE: Self = Self::new(Duration::ZERO, 0);

    /// Keeps the core for `busy`, then offers it `yields` times.
    pub(crate) const fn new(busy: Duration, yields: u32) -> Self {
        Self { busy, yields }
    }

    /// Returns the values that suit `ranks` ranks on `cores` cores.
    ///
    /// With a core for each rank, a wait that is shorter than two switches to and from sleep costs
    /// nothing but what the core would have idled. With fewer cores, the rank that is waited for may
    /// need this very core.
    pub(crate) const fn for_ranks(ranks: usize, cores: usize) -> Self {
        if ranks <= cores {
            Self::new(Duration::from_micros(100), 0)
        } else {
            Self::new(Duration::ZERO, 20)
        }
    }
}

/// The bit of a word that says that somebody sleeps until it changes.
const ASLEEP: u32 = 1;

/// Moves the owner's word to `to`, and wakes those that sleep on it.
fn publish<W: SharedWord>(word: &W, to: u32, wake_all: impl FnOnce(&W)) {
    let before = word.swap(to << 1);
    debug_assert!(is_reached(to << 1, before >> 1), "a count went back");
    if before & ASLEEP != 0 {
        wake_all(word);
    }
}

/// Waits until the word is at `target`, or until the strategy gives up.
fn wait<W: SharedWord>(word: &W, target: u32, strategy: &mut impl WaitStrategy<W>) -> bool {
    loop {
        let seen = word.load();
        if is_reached(seen, target) {
            return true;
        }
        if strategy.spin() {
            continue;
        }
        let asleep = seen | ASLEEP;
        if seen != asleep && !word.replace(seen, asleep) {
            continue;
        }
        if !strategy.sleep(word, asleep) {
            return is_reached(word.load(), target);
        }
    }
}

fn is_reached(word: u32, target: u32) -> bool {
    // Both are counts shifted by one, so that the sign is that of the difference of 31-bit counts.
    (word & !ASLEEP).wrapping_sub(target << 1).cast_signed() >= 0
}

/// The operations on a word in shared memory.
trait SharedWord {
    /// Reads it; what its owner wrote before can be read after this.
    fn load(&self) -> u32;

    /// Writes it and returns what it was; whoever reads it can read what was written before this.
    fn swap(&self, value: u32) -> u32;

    /// Writes `to` if it is `from`, and says whether it was.
    fn replace(&self, from: u32, to: u32) -> bool;
}

macro_rules! word {
    ($atomic:ty, $ordering:ty) => {
        impl SharedWord for $atomic {
            fn load(&self) -> u32 {
                <$atomic>::load(self, <$ordering>::Acquire)
            }

            fn swap(&self, value: u32) -> u32 {
                <$atomic>::swap(self, value, <$ordering>::Release)
            }

            // A step that only sets the bit continues what the owner released: who reads the word
            // after it has seen the owner's writes as well.
            fn replace(&self, from: u32, to: u32) -> bool {
                <$atomic>::compare_exchange(
                    self,
                    from,
                    to,
                    <$ordering>::Relaxed,
                    <$ordering>::Relaxed,
                )
                .is_ok()
            }
        }
    };
}

word!(AtomicU32, Ordering);

/// The steps of which waiting is made.
trait WaitStrategy<W> {
    /// Lets a moment pass, or says that it is time to sleep.
    fn spin(&mut self) -> bool;

    /// Sleeps while the word is `value`, until woken, or until the time is over, and says whether
    /// there is time left. It may return early.
    fn sleep(&mut self, word: &W, value: u32) -> bool;
}

/// One wait by the clock.
struct Backoff {
    spin: Spin,
    slice: Duration,
    polls: u32,
    began: Option<Instant>,
}

impl Backoff {
    fn new(spin: Spin, slice: Duration) -> Self {
        Self {
            spin,
            slice,
            polls: 0,
            began: None,
        }
    }

    fn elapsed(&mut self) -> Duration {
        self.began.get_or_insert_with(Instant::now).elapsed()
    }
}

/// The polls between two looks at the clock, which costs as much as a few polls.
const POLLS: u32 = 16;

/// The wait after which a rank sleeps, so that it is woken rather than scheduled some time.
const AWAKE: Duration = Duration::from_micros(200);

impl WaitStrategy<AtomicU32> for Backoff {
    fn spin(&mut self) -> bool {
        if !self.spin.busy.is_zero() {
            self.polls += 1;
            if !self.polls.is_multiple_of(POLLS) || self.elapsed() < self.spin.busy {
                std::hint::spin_loop();
                return true;
            }
            self.spin.busy = Duration::ZERO;
        }
        // On a busy machine, each offer may cost a whole time slice.
        if self.spin.yields > 0 && self.elapsed() < AWAKE {
            self.spin.yields -= 1;
            std::thread::yield_now();
            return true;
        }
        false
    }

    fn sleep(&mut self, word: &AtomicU32, value: u32) -> bool {
        let left = self.slice.saturating_sub(self.elapsed());
        if left.is_zero() {
            return false;
        }
        sleep(word, value, left);
        self.elapsed() < self.slice
    }
}

/// Sleeps while the word is `value`, until woken or until `limit` has passed, or a bit less.
#[cfg(target_os = "linux")]
fn sleep(word: &AtomicU32, value: u32, limit: Duration) {
    use rustix::thread::futex;

    let limit = futex::Timespec {
        tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: limit.subsec_nanos().into(),
    };
    // Without the private flag: the sleeper may be in another process. Each way to return (woken,
    // the word is another, a signal, time over) leads to another look at the word.
    let _ = futex::wait(word, futex::Flags::empty(), value, Some(&limit));
}

#[cfg(target_os = "linux")]
fn wake_all(word: &AtomicU32) {
    use rustix::thread::futex;

    // It fails only for an address that is none.
    let _ = futex::wake(word, futex::Flags::empty(), i32::MAX.cast_unsigned());
}

/// Sleeps for a moment: without a futex, the sleeper looks at the word again by itself.
#[cfg(not(target_os = "linux"))]
fn sleep(_word: &AtomicU32, _value: u32, limit: Duration) {
    std::thread::sleep(limit.min(Duration::from_micros(50)));
}

#[cfg(not(target_os = "linux"))]
fn wake_all(_word: &AtomicU32) {}

#[cfg(test)]
mod tests;
