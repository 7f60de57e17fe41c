//! Tests that draw: Burn has one CPU generator per process, and every batch that is taken seeds it.

#![allow(clippy::unwrap_used, reason = "these are tests, helpers included")]

#[path = "../common/mod.rs"]
mod common;

mod draws;
mod resume_exact;
mod units;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Keeps other tests from drawing from the generator.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}
