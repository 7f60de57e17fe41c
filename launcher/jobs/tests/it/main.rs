//! `accel-jobs` as its users run it, with the local engine.

mod local;
mod support;
mod usage;
