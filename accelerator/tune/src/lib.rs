//! Hyperparameter search, as Ray Tune has it: a space of configurations, trials that try them, and schedulers that stop the
//! bad ones early.

pub use config::Config;
pub use core::CheckpointSettings;
pub use error::{Error, Result};
pub use metrics::Metrics;
pub use objective::{Mode, Objective};
pub use scheduler::{Asha, AshaPromotion, Compatibility, MedianStopping, Pbt, Scheduler};
pub use searcher::{Searcher, Suggestion, TrialEnd, VariantGenerator};
pub use space::{
    Domain, Parameter, Space, choice, grid_search, lograndint, loguniform, qlograndint,
    qloguniform, qrandint, qrandn, quniform, randint, randn, sample_from, uniform,
};
pub use stop::{Plateau, Stop};
pub use trial::TrialId;
pub use view::{TrialResult, TrialStatus};

mod config;
#[allow(dead_code)]
mod core;
mod error;
#[allow(dead_code)]
mod journal;
mod metrics;
mod objective;
#[allow(dead_code)]
mod runner;
#[allow(dead_code)]
mod scheduler;
#[allow(dead_code)]
mod search;
mod searcher;
#[allow(dead_code)]
mod space;
mod stop;
mod trial;
#[allow(dead_code)]
mod view;
