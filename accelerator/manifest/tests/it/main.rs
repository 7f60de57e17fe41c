//! What happens to checkpoints, a module for each subject.

#![allow(clippy::unwrap_used, reason = "these are tests, helpers included")]

mod damage;
mod draft;
mod folder;
mod processes;
mod support;
