use core::cell::Cell;

use burn::tensor::Device;

use crate::core::draws::{self, drawing};
use crate::core::scoped::Scoped;

/// A block that runs twice, and draws the same numbers each time.
pub(super) struct SeededRun {
    seed: u64,
    pub(super) device: Device,
}

impl SeededRun {
    pub(super) fn next(device: Device) -> Self {
        let _turn = drawing();
        Self {
            seed: draws::next_unit_seed(&device),
            device,
        }
    }

    pub(super) fn run<T>(&self, block: impl FnOnce() -> T) -> T {
        let _twice = Scoped::set(&RUNS_TWICE, true);
        // Another rank of this process may draw from the generator, too.
        let _turn = drawing();
        draws::in_unit(self.seed, &self.device, block)
    }
}

/// Returns `true` within a block that runs twice, in either run.
pub(crate) fn runs_twice() -> bool {
    RUNS_TWICE.get()
}

thread_local! {
    static RUNS_TWICE: Cell<bool> = const { Cell::new(false) };
}
