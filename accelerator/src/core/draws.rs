//! The random number generator of a device, which all threads of the process share.

use core::cell::Cell;

use accelerator_host::sync::{Mutex, MutexGuard};
use accelerator_plan::mix;
use burn::tensor::Device;

/// Waits for this thread's turn to set the device's generator and draw from it. Only one thread of the process has
/// the turn at a time; a thread that already has it continues at once.
pub(crate) fn drawing() -> Drawing {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let turn = (!is_drawing()).then(|| ONE_AT_A_TIME.lock());
    DRAWING.set(true);
    Drawing { turn }
}

pub(crate) fn is_drawing() -> bool {
    DRAWING.get()
}

thread_local! {
    static DRAWING: Cell<bool> = const { Cell::new(false) };
}

/// A turn to draw, or a nested part of one.
pub(crate) struct Drawing {
    /// `None` for a nested part, whose end does not end the turn.
    turn: Option<MutexGuard<'static, ()>>,
}

impl Drop for Drawing {
    fn drop(&mut self) {
        if self.turn.is_some() {
            DRAWING.set(false);
        }
    }
}

/// Seeds the generator of a device, and so determines the seeds of the units that this thread runs next.
pub(crate) fn seed(device: &Device, seed: u64) {
    device.seed(seed);
    UNITS.set(UnitSeeds { seed, drawn: 0 });
}

/// Returns the seed of the next unit of a model that this thread runs. A generator's state can be set but not read,
/// so a unit that must draw the same numbers twice gets its own seed. It is derived from the last [`seed`], or from
/// the seed of the enclosing unit, and from the number of units since then.
pub(crate) fn next_unit_seed() -> u64 {
    let UnitSeeds { seed, drawn } = UNITS.get();
    let drawn = drawn + 1;
    UNITS.set(UnitSeeds { seed, drawn });
    mix(&[seed, drawn])
}

/// Runs the body of a unit with the generator set to `seed`. The seeds of nested units are derived from it.
pub(crate) fn in_unit<T>(seed: u64, device: &Device, body: impl FnOnce() -> T) -> T {
    struct Restore(UnitSeeds);
    impl Drop for Restore {
        fn drop(&mut self) {
            UNITS.set(self.0);
        }
    }
    let _restore = Restore(UNITS.replace(UnitSeeds { seed, drawn: 0 }));
    device.seed(seed);
    body()
}

thread_local! {
    static UNITS: Cell<UnitSeeds> = const { Cell::new(UnitSeeds { seed: 0, drawn: 0 }) };
}

/// The seeds of units within a step, or within another unit.
#[derive(Clone, Copy)]
struct UnitSeeds {
    seed: u64,
    /// The number of seeds given out so far.
    drawn: u64,
}
