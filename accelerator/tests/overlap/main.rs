//! Gradients that are sent while backward runs: the same bits, whatever the graph does.

#![allow(clippy::unwrap_used, reason = "these are tests, helpers included")]

#[path = "../common/mod.rs"]
mod common;
mod graphs;
mod harness;
mod models;
mod precision;
mod ranks;
mod reductions;
mod repair;
mod settings;
mod windows;
