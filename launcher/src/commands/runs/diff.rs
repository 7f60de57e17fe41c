//! `accel-launch runs diff`.

use std::process::ExitCode;

use accelerator_track::{Difference, Provenance};
use clap::Args;
use serde::Serialize;

use super::{RunsFolder, label, row};
use crate::error::Result;
use crate::text::{columns, json, note, plain, print, short};

#[derive(Args, Clone, Debug)]
pub(super) struct DiffArgs {
    /// The one run: its folder's name, its id or the beginning of that, its name, or a path.
    #[arg(value_name = "A")]
    a: String,

    /// The other run.
    #[arg(value_name = "B")]
    b: String,

    #[command(flatten)]
    place: RunsFolder,

    /// End with exit code 1 if the inputs differ.
    #[arg(long)]
    exit_code: bool,

    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// The fields are those of the JSON object.
#[derive(Serialize)]
struct InputDiff {
    a: String,
    b: String,
    differences: Vec<Difference>,
}

pub(super) fn run(arguments: &DiffArgs) -> Result<ExitCode> {
    let a = arguments.place.history(&arguments.a)?;
    let b = arguments.place.history(&arguments.b)?;
    let diff = InputDiff {
        a: label(&a.folder),
        b: label(&b.folder),
        differences: accelerator_track::diff(&a, &b),
    };
    for run in [&a, &b] {
        if Provenance::of(run) == Provenance::default() {
            note(&format!(
                "the run {} does not record where it came from: only its hyperparameters and artifacts are compared",
                label(&run.folder)
            ));
        }
    }
    let code = print(&match arguments.json {
        true => json(&diff)?,
        false => diff.text(),
    })?;
    Ok(match arguments.exit_code && !diff.differences.is_empty() {
        true => ExitCode::from(1),
        false => code,
    })
}

impl InputDiff {
    fn text(&self) -> String {
        if self.differences.is_empty() {
            return "the same inputs\n".to_owned();
        }
        let mut table = vec![row(["input", &*self.a, &*self.b])];
        let cell = |side: &Option<String>| match side {
            Some(text) => short(&plain(text)),
            None => "-".to_owned(),
        };
        table.extend(
            self.differences
                .iter()
                .map(|x| vec![plain(&x.what), cell(&x.a), cell(&x.b)]),
        );
        columns(&table)
    }
}
