//! Searches with real processes: the example `quadratic` and programs, started, killed and resumed.

#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

#[path = "../../../../tests/src/copies.rs"]
mod copies;
mod faults;
mod kills;
mod optuna;
mod programs;
mod support;
mod tensorboard;
mod trials;
mod values;
