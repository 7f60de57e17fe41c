#[cfg(loom)]
mod model;

use std::{sync::Arc, thread};

use super::*;

const LONG: Duration = Duration::from_secs(60);
const SPIN: Spin = Spin::new(Duration::from_micros(20), 2);

#[test]
fn counts_are_ordered_across_the_end_of_their_range() {
    let counter = SeqCounter::new();
    assert!(counter.reached(0) && !counter.reached(1));
    for base in [7, i32::MAX.cast_unsigned() - 1, u32::MAX - 1] {
        counter.word.store(base << 1, Ordering::Relaxed);
        assert!(counter.reached(base) && counter.reached(base.wrapping_sub(5)));
        assert!(!counter.reached(base.wrapping_add(1)));
        counter.publish(base.wrapping_add(3));
        assert!(counter.reached(base.wrapping_add(3)));
        assert!(!counter.reached(base.wrapping_add(4)));
    }
}

#[test]
fn who_waits_gives_up_after_the_slice() {
    let counter = SeqCounter::new();
    for spin in [Spin::NONE, SPIN] {
        let began = Instant::now();
        assert!(!counter.wait(1, spin, Duration::from_millis(20)));
        assert!(began.elapsed() >= Duration::from_millis(20));
        assert!(!counter.wait(1, spin, Duration::ZERO));
    }
    // The bit that the waiter left does not count, and the next publish clears it.
    assert!(!counter.reached(1));
    counter.publish(1);
    assert!(counter.wait(1, Spin::NONE, Duration::ZERO));
    assert_eq!(counter.word.load(Ordering::Relaxed), 2);
}

#[test]
fn sleepers_are_woken_long_before_the_slice_is_over() {
    for spin in [Spin::NONE, SPIN] {
        let signals = Arc::new([SeqCounter::new(), SeqCounter::new()]);
        let began = Instant::now();
        let partner = Arc::clone(&signals);
        let player = thread::spawn(move || {
            for count in 1..=2000 {
                assert!(partner[0].wait(count, spin, LONG));
                partner[1].publish(count);
            }
        });
        for count in 1..=2000 {
            signals[0].publish(count);
            assert!(signals[1].wait(count, spin, LONG));
        }
        player.join().expect("the partner");
        assert!(began.elapsed() < LONG);
    }
}
