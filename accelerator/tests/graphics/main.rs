//! Training on a graphics device, if there is one. Mesa's `lavapipe` is one that computes on the CPU:
//!
//! ```text
//! cargo test --release -p burn-accelerate --features wgpu,fusion,ops --test graphics -- --nocapture
//! ```
//!
//! The results are compared with the CPU's if `flex` is compiled in as well.

#![allow(clippy::unwrap_used, reason = "these are tests, helpers included")]

#[path = "../common/mod.rs"]
mod common;
mod harness;

mod clipping;
#[cfg(feature = "ops")]
mod ops;
mod overlap;
mod precision;
mod resuming;
mod units;
mod world_size;
