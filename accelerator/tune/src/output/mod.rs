//! The output of a search: tables, files, results.

pub(crate) use console::Console;
pub use console::Display;
pub use dataframe::DataFrame;
pub use results::{Results, Scope, SearchEnd};

pub(crate) use tensorboard::TrialEvents;
pub(crate) use trial_folder::{TrialFolder, folder_name, trial_name};

mod console;
mod csv;
mod dataframe;
mod report;
mod results;
mod table;
mod tensorboard;
mod trial_folder;
