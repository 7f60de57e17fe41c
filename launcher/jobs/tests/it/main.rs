//! `accel-jobs` as its users run it, with the local engine.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod local;
mod support;
mod usage;
