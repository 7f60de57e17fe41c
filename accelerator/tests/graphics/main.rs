//! Training on a graphics device, where there is one. Mesa's `lavapipe` is one that computes on the CPU:
//!
//! ```text
//! cargo test --release -p burn-accelerate --features wgpu,fusion --test graphics -- --nocapture
//! ```
//!
//! What it computes is compared with the CPU's where `flex` is there as well.

#![allow(clippy::unwrap_used, reason = "these are tests, helpers included")]

#[path = "../common/mod.rs"]
mod common;
mod harness;

mod clipping;
mod overlap;
mod precision;
mod resuming;
mod world_size;
