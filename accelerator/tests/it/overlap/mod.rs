//! Gradients sent while backward runs have the same bits, whatever the graph.

mod graphs;
pub(crate) mod harness;
mod models;
mod precision;
mod ranks;
mod reductions;
mod repair;
mod settings;
mod units;
mod windows;
