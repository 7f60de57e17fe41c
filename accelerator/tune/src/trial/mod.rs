//! Trials.

pub use id::TrialId;

mod id;
