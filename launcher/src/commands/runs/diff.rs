//! `accel-launch runs diff`.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::ExitCode;

use accelerator_track::{ArtifactRole, Difference, Provenance, RunHistory, diff_with_git};
use clap::Args;
use serde::Serialize;

use super::{RunsFolder, label, row, value_text};
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
        differences: differences(&a, &b),
    };
    for run in [&a, &b] {
        if provenance(run) == Provenance::default() {
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

/// What two runs were given differently, the sources first.
pub(super) fn differences(a: &RunHistory, b: &RunHistory) -> Vec<Difference> {
    let (of_a, of_b) = (provenance(a), provenance(b));
    let roots = [&of_b, &of_a].map(|x| x.commit.as_ref().map(|x| Path::new(&x.root)));
    let mut roots = roots.into_iter().flatten();
    let repository = roots.find(|x| x.is_dir()).unwrap_or(Path::new("."));
    let mut found = diff_with_git(&of_a, &of_b, repository);
    found.extend(differing(
        "hyperparameter",
        &hyperparameters(a),
        &hyperparameters(b),
    ));
    found.extend(differing("artifact", &inputs(a), &inputs(b)));
    found
}

/// That of the last attempt, whose results count.
pub(super) fn provenance(run: &RunHistory) -> Provenance {
    let recorded = run.attempts.last().map(|x| x.provenance.clone());
    // A program may record something of its own.
    recorded
        .and_then(|value| serde_json::from_value(value).ok())
        .unwrap_or_default()
}

fn hyperparameters(run: &RunHistory) -> BTreeMap<String, String> {
    let parameters = run.hyperparameters.iter();
    let texts = parameters.map(|(key, x)| (key.clone(), value_text(&x.value)));
    texts.collect()
}

/// The artifacts that it used, by name.
fn inputs(run: &RunHistory) -> BTreeMap<String, String> {
    let used = run.artifacts.iter();
    let used = used.filter(|x| x.role == ArtifactRole::Input);
    used.map(|x| (x.name.clone(), format!("v{} {}", x.version, x.digest)))
        .collect()
}

fn differing(
    kind: &str,
    a: &BTreeMap<String, String>,
    b: &BTreeMap<String, String>,
) -> Vec<Difference> {
    let keys: BTreeMap<&String, ()> = a.keys().chain(b.keys()).map(|x| (x, ())).collect();
    let different = keys.into_keys().filter(|&key| a.get(key) != b.get(key));
    let named = different.map(|key| Difference {
        what: format!("{kind} {key}"),
        a: a.get(key).cloned(),
        b: b.get(key).cloned(),
    });
    named.collect()
}
