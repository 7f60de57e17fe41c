//! Tests in f64, apart since Burn fixes a device's float type once per process.

#![allow(clippy::unwrap_used, reason = "these are tests, helpers included")]

#[path = "../common/mod.rs"]
mod common;

mod huggingface;
mod local_sgd;
mod regroup;
mod sync_batch_norm;
mod trainer;
