use core::cell::Cell;

use crate::core::scoped::Scoped;

thread_local! {
    /// The outermost unit that is being visited. A visitor sees only parameters.
    static VISITED: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Visits the block of the unit with this number, unless another unit is being visited.
pub(super) fn visit_unit(number: usize) -> Scoped<Option<usize>> {
    Scoped::set(&VISITED, Some(VISITED.get().unwrap_or(number)))
}

/// Returns the number of the outermost unit that is being visited; `None` outside units.
pub(super) fn visited_unit() -> Option<usize> {
    VISITED.get()
}
