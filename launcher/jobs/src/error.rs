//! The error of the program, and its exit code.

pub(crate) use accelerator_host::cli::{Error, Result, chain};
