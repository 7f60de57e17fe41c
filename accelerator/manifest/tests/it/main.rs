//! Tests of checkpoints, one module per subject.

#![allow(clippy::unwrap_used, reason = "these are tests, helpers included")]

mod damage;
mod draft;
mod folder;
mod processes;
mod support;
