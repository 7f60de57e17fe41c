//! Tracked data as other programs show it.

#![allow(clippy::unwrap_used, reason = "these are tests, helpers included")]

mod kills;
#[cfg(feature = "mlflow")]
mod mlflow;
#[cfg(feature = "mlflow")]
#[path = "../../../../tests/src/ports.rs"]
mod ports;
mod records;
mod tensorboard;
mod venv;
