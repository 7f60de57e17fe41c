//! Hyperparameter search, as Ray Tune has it: a space of configurations, trials that try them, and schedulers that stop the
//! bad ones early.

pub use config::{Config, TrialId};
pub use core::{CheckpointSettings, SearchOrder};
pub use error::{Error, Result};
pub use objective::{Mode, Objective};
pub use output::{BestResult, DataFrame, Display, Results, Scope};
pub use pool::WorkerReuse;
pub use scheduler::{Asha, AshaPromotion, Compatibility, MedianStopping, Pbt, Scheduler};
pub use search::{MaxFailures, Search, SearchAlgorithm, SearchFolder, SearchSpec};
pub use searcher::{Optuna, Searcher, TrialEnd};
pub use slots::Resources;
pub use space::{
    Parameter, Space, choice, grid_search, lograndint, loguniform, qlograndint, qloguniform,
    qrandint, qrandn, quniform, randint, randn, sample_from, uniform,
};
pub use stop::{Plateau, Stop};
pub use trial::{BoxError, Reset, Trainable, TrialContext, TrialSession};
pub use value::{IntoValue, Metrics, Number};
pub use view::{SearchEnd, Trial, TrialResult, TrialStatus};

mod appended;
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
