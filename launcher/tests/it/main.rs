//! Tests of `accel-launch`, one module per subject.

#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    reason = "these are tests, helpers included"
)]

mod bench;
mod board;
mod cargo;
#[cfg(feature = "faults")]
mod chaos;
mod checkpoint;
mod config;
#[path = "../../../tests/src/copies.rs"]
mod copies;
mod elastic;
mod env;
mod estimate;
mod failure;
mod flags;
mod gpus;
mod hosts;
mod inspect;
mod output;
#[path = "../../../tests/src/ports.rs"]
mod ports;
mod preemption;
mod ranks;
mod restarts;
mod root_cause;
mod runs;
mod security;
mod selftest;
mod shim;
mod signals;
mod store;
mod support;
mod terminal;
mod tune;
mod usage;
