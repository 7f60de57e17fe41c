//! Hyperparameter search, as Ray Tune has it: a space of configurations, trials that try them, and schedulers that stop the
//! bad ones early.

pub use crate::config::TrialId;
pub use crate::value::Metrics;
pub use config::Config;
pub use core::{CheckpointSettings, SearchOrder};
pub use error::{Error, Result};
pub use objective::{Mode, Objective};
pub use output::{DataFrame, Display, Results, Scope};
pub use pool::WorkerReuse;
pub use scheduler::{Asha, AshaPromotion, Compatibility, MedianStopping, Pbt, Scheduler};
pub use search::{MaxFailures, Search, SearchAlgorithm, SearchFolder, SearchSpec};
pub use searcher::{Optuna, Searcher, Suggestion, TrialEnd};
pub use slots::Resources;
pub use space::{
    Domain, Parameter, Space, choice, grid_search, lograndint, loguniform, qlograndint,
    qloguniform, qrandint, qrandn, quniform, randint, randn, sample_from, uniform,
};
pub use stop::{Plateau, Stop};
pub use trial::{BoxError, Reset, Trainable, TrialContext, TrialSession};
pub use value::{IntoValue, Number};
pub use view::{Rung, SearchEnd, Trial, TrialResult, TrialStatus};

mod checkpoint_folder;
mod config;
mod core;
mod error;
mod fields;
mod host;
mod journal;
mod objective;
mod output;
mod pool;
mod program;
mod runner;
mod scheduler;
mod search;
mod searcher;
mod slots;
mod space;
mod stop;
mod trial;
mod value;
mod view;
