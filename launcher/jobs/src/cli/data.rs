//! `accel-jobs data`.

use std::process::ExitCode;

use clap::Subcommand;

use super::JobsLocation;
use super::top::TopArgs;
use crate::error::Result;
use crate::output::{age, columns, now};

#[derive(Debug, Subcommand)]
pub(super) enum DataCommand {
    /// List them.
    List(TopArgs),
}

pub(super) fn run(command: &DataCommand, location: &JobsLocation) -> Result<ExitCode> {
    let DataCommand::List(arguments) = command;
    let volumes = arguments.engine(location)?.volumes()?;
    arguments.show(&volumes, || {
        let mut rows =
            vec![["NAME", "ACCESSMODE", "DESCRIPTION", "OWNER", "AGE"].map(str::to_owned)];
        rows.extend(volumes.iter().map(|volume| {
            let since = volume
                .created
                .map(|created| age(now().saturating_sub(created)));
            [
                volume.name.clone(),
                volume.access_mode.clone(),
                volume.description.clone(),
                volume.owner.clone(),
                since.unwrap_or_default(),
            ]
        }));
        columns(&rows)
    })
}
