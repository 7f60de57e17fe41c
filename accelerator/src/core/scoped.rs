//! Values of a thread that hold for a scope.

use core::cell::Cell;
use std::thread::LocalKey;

/// A value that this thread has for as long as the guard lives. The one before is put back then, also in a panic.
#[must_use]
pub(crate) struct Scoped<T: Copy + 'static> {
    cell: &'static LocalKey<Cell<T>>,
    before: T,
}

impl<T: Copy> Scoped<T> {
    pub(crate) fn set(cell: &'static LocalKey<Cell<T>>, value: T) -> Self {
        let before = cell.replace(value);
        Self { cell, before }
    }
}

impl<T: Copy> Drop for Scoped<T> {
    fn drop(&mut self) {
        self.cell.set(self.before);
    }
}
