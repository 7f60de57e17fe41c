//! Tests that draw: Burn's CPU generator is one for the whole process, and every batch that is taken seeds it.

#![allow(clippy::unwrap_used, reason = "these are tests, helpers included")]

#[path = "../common/mod.rs"]
mod common;

mod draws;
mod resume_exact;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Tests would draw from each other's generator.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}
