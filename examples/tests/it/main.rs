//! Tests of the parts that the examples share, and of the documents that quote them.

mod documents;
mod double;
mod from_burn_train;
#[path = "../../../tests/src/documents.rs"]
#[allow(
    dead_code,
    clippy::unwrap_used,
    reason = "these are helpers of several tests"
)]
mod listing;
mod quicktour;
mod readme;
