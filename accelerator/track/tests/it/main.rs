//! What is tracked, as the programs show it that people look with.

#![allow(clippy::unwrap_used, reason = "these are tests, helpers included")]

mod kills;
mod tensorboard;
mod venv;
