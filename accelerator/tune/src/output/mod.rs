//! The output of a search: tables, files, results.

pub(crate) use console::Console;
pub use console::Display;
pub use results::{BestResult, DataFrame, Results, Scope};
pub(crate) use trial_folder::{TrialEvents, TrialFolder, folder_name};

mod console;
mod report;
mod results;
mod table;
#[cfg(test)]
mod tests;
mod trial_folder;
