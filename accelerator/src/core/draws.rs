//! The random number generator of a device, which all threads of the process share.

use core::cell::Cell;
use std::sync::OnceLock;

use accelerator_host::sync::{Mutex, MutexGuard};
use accelerator_plan::mix;
use burn::tensor::{Device, Distribution, Int, Tensor};

use super::scoped::Scoped;

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
    DEFAULT.get_or_init(|| seed);
    UNITS.set(Some(UnitSeeds::new(seed)));
}

/// Returns the seed of the next unit of a model that this thread runs. A generator's state can be set but not read,
/// so a unit that must draw the same numbers twice gets its own seed. It is derived from the last [`seed`], or from
/// the seed of the enclosing unit, and from the number of units since then. In a program without an accelerator, it is
/// drawn from the generator, which the program may have seeded.
pub(crate) fn next_unit_seed(device: &Device) -> u64 {
    let default = || DEFAULT.get().copied().map(UnitSeeds::new);
    let Some(mut seeds) = UNITS.get().or_else(default) else {
        let numbers = Distribution::Uniform(0.0, f64::from(i32::MAX));
        let drawn = Tensor::<1, Int>::random([2], numbers, &device.clone().inner());
        let drawn: Vec<u64> = drawn.into_data().iter::<u64>().collect();
        return mix(&drawn);
    };
    seeds.given += 1;
    UNITS.set(Some(seeds));
    mix(&[seeds.seed, seeds.given])
}

/// Runs the body of a unit with the generator set to `seed`. The seeds of nested units are derived from it.
pub(crate) fn in_unit<T>(seed: u64, device: &Device, body: impl FnOnce() -> T) -> T {
    UNIT_HAS_RUN.set(true);
    let _nested = Scoped::set(&UNITS, Some(UnitSeeds::new(seed)));
    device.seed(seed);
    body()
}

/// Seeds the generator again if units have run since the last backward pass. They may have run in backward, too, and
/// what is drawn next must not depend on that.
pub(crate) fn seed_after_backward(device: &Device) {
    if UNIT_HAS_RUN.take() {
        let _turn = drawing();
        device.seed(next_unit_seed(device));
    }
}

/// The seed of the program's first accelerator.
static DEFAULT: OnceLock<u64> = OnceLock::new();

thread_local! {
    static UNITS: Cell<Option<UnitSeeds>> = const { Cell::new(None) };
    static UNIT_HAS_RUN: Cell<bool> = const { Cell::new(false) };
}

/// The seeds of units within a step, or within another unit.
#[derive(Clone, Copy)]
struct UnitSeeds {
    seed: u64,
    /// The number of seeds given out so far.
    given: u64,
}

impl UnitSeeds {
    fn new(seed: u64) -> Self {
        Self { seed, given: 0 }
    }
}
