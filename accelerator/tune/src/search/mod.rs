//! Carries a search out.

pub use builder::Search;
pub use folder::SearchFolder;
pub use spec::{MaxFailures, SearchAlgorithm, SearchSpec};

mod attempt;
mod builder;
mod driver;
mod files;
mod folder;
mod lock;
mod replay;
mod run;
mod spec;
