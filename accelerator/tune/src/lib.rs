//! Hyperparameter search, as Ray Tune has it: a space of configurations, trials that try them, and schedulers that stop the
//! bad ones early.

pub use config::Config;
pub use error::{Error, Result};
pub use metrics::Metrics;
pub use objective::{Mode, Objective};
pub use searcher::{Searcher, Suggestion, TrialEnd};
pub use trial::TrialId;
pub use view::{TrialResult, TrialStatus};

mod config;
mod error;
mod metrics;
mod objective;
#[allow(dead_code)]
mod runner;
#[allow(dead_code)]
mod scheduler;
mod searcher;
mod trial;
#[allow(dead_code)]
mod view;
