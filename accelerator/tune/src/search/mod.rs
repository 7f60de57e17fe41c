//! Carries a search out.

pub use builder::Search;
pub use folder::SearchFolder;
pub use spec::{MaxFailures, SearchAlgorithm, SearchSpec};

mod attempt;
mod backoff;
mod builder;
mod decisions;
mod driver;
mod files;
mod folder;
mod interrupt;
mod lock;
mod replay;
mod run;
mod spec;
