//! `accel-jobs` as its users run it, with the local engine.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod local;
#[cfg(feature = "ray")]
mod ray;
#[cfg(feature = "slurm")]
mod slurm;
mod support;
mod usage;
#[cfg(all(feature = "kubernetes", feature = "ray", feature = "slurm"))]
mod values;
