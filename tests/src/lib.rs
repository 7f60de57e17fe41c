//! The basis of tests that need several processes or more than one device: fixtures, small training problems, and ranks
//! as processes. The tests start the program `rank`.

#![allow(
    missing_docs,
    reason = "field names are those of the fixtures and speak for themselves"
)]
#![allow(
    clippy::expect_used,
    clippy::missing_panics_doc,
    clippy::unwrap_used,
    reason = "this crate is tests; a panic is how they fail"
)]

pub mod fixtures;
pub mod learner;
pub mod matrix;
pub mod operator;
pub mod ports;
pub mod problems;
pub mod processes;
pub mod resumable;
pub mod searches;
pub mod trainers;
pub mod trajectory;
