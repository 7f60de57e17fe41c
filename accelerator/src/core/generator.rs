use core::cell::Cell;

use accelerator_host::sync::{Mutex, MutexGuard};

/// Waits for this thread's turn to set the device's generator and draw from it: one thread of the process at a time. A
/// thread that has the turn already continues.
pub(crate) fn drawing() -> Drawing {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let turn = (!is_drawing()).then(|| ONE_AT_A_TIME.lock());
    DRAWING.set(true);
    Drawing { turn }
}

/// Returns `true` if it is this thread's turn to draw.
pub(crate) fn is_drawing() -> bool {
    DRAWING.get()
}

thread_local! {
    static DRAWING: Cell<bool> = const { Cell::new(false) };
}

/// A turn to draw, or a part of one.
pub(crate) struct Drawing {
    /// `None` for a part.
    turn: Option<MutexGuard<'static, ()>>,
}

impl Drop for Drawing {
    fn drop(&mut self) {
        if self.turn.is_some() {
            DRAWING.set(false);
        }
    }
}
