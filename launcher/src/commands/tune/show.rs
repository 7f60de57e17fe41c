//! `accel-launch tune show`.

use std::path::PathBuf;
use std::process::ExitCode;

use accelerator_tune::SearchFolder;
use clap::{Args, ValueEnum};

use super::of_tune;
use crate::error::Result;
use crate::text::{json, print};

#[derive(Args, Clone, Debug)]
pub(super) struct ShowSearchArgs {
    /// The search's folder.
    folder: PathBuf,

    /// How: the table that is shown while it runs, comma-separated values, or JSON.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,

    /// Print JSON: the same as `--format json`.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    Table,
    Csv,
    Json,
}

pub(super) fn run(arguments: &ShowSearchArgs) -> Result<ExitCode> {
    let search = SearchFolder::open(&arguments.folder).map_err(of_tune)?;
    let results = search.results();
    print(&match (arguments.json, arguments.format) {
        (true, _) | (_, Format::Json) => json(&results.dataframe().json())?,
        (_, Format::Csv) => results.dataframe().to_string(),
        (_, Format::Table) => results.status(),
    })
}
