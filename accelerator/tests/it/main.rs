//! Tests of the library as programs use it, one module per subject.

#![allow(clippy::unwrap_used, reason = "these are tests, helpers included")]

#[path = "../common/mod.rs"]
mod common;

mod accumulation;
mod adapters;
mod clipping;
mod communication_hooks;
mod compression;
mod control;
mod emergencies;
mod freezing;
mod gathering;
mod huggingface;
mod loading;
mod local_rounds;
mod missteps;
mod model_files;
mod models;
mod offloading;
mod operator;
mod overlap;
mod peft;
mod places;
mod precision;
mod processes;
mod profiling;
mod replaced_parameters;
mod replicas;
mod resume;
#[cfg(all(feature = "faults", unix))]
mod resume_faults;
mod samplers;
mod saves;
mod schedules;
mod sharded_units;
mod spread_gradients;
mod statistics;
mod stragglers;
mod streams;
mod tied_parameters;
mod timeline;
mod tracking;
mod training;
mod units;
