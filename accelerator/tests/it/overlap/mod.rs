//! Gradients that are sent while backward runs: the same bits, whatever the graph does.

mod graphs;
mod harness;
mod models;
mod precision;
mod ranks;
mod reductions;
mod repair;
mod settings;
mod windows;
