//! The commands of `accel-launch`, one module each.

pub(crate) mod bench;
pub(crate) mod checkpoint;
pub(crate) mod config;
pub(crate) mod env;
pub(crate) mod estimate;
pub(crate) mod inspect;
pub(crate) mod launch;
pub(crate) mod plan;
pub(crate) mod runs;
pub(crate) mod selftest;
pub(crate) mod tune;
