//! `accel-launch runs reproduce`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use accelerator_track::{
    ArtifactRole, Point, RunHistory, RunStatus, RunSummary, Runs, Series, WeightsDigest,
    internal::{Provenance, Reproduction, diff},
};
use clap::Args;

use super::{RunsFolder, label};
use crate::error::{Error, Result};
use crate::text::{note, plain, print, shell_line, short};

#[derive(Args, Clone, Debug)]
pub(super) struct ReproduceArgs {
    /// The run: its name, its folder's name or path, or its id or the beginning of its id.
    #[arg(value_name = "RUN")]
    run: String,

    #[command(flatten)]
    place: RunsFolder,

    /// A metric that may differ, such as a throughput; `time/*` stands for all metrics that begin with `time/`. Can be
    /// repeated.
    #[arg(long = "ignore", value_name = "KEY")]
    ignored: Vec<String>,

    /// Print only the command that would be run.
    #[arg(long)]
    dry_run: bool,
}

pub(super) fn run(arguments: &ReproduceArgs) -> Result<ExitCode> {
    let original = arguments.place.history(&arguments.run)?;
    let command = command(&original)?;
    if arguments.dry_run {
        let words = std::iter::once(command.get_program()).chain(command.get_args());
        return print(&format!("{}\n", shell_line(words)));
    }
    let again = run_again(&original, command)?;
    let again_label = label(&again.folder);
    print(&format!(
        "{} was run again as {again_label}\n",
        label(&original.folder)
    ))?;
    let different = Results::of(&original, arguments).differences(&Results::of(&again, arguments));
    let inputs = diff(&original, &again);
    if different.is_empty() {
        let by = match inputs.iter().any(|input| input.what == "binary") {
            true => ", by another binary",
            false => "",
        };
        print(&format!("{}{by}\n", same_text(&original, arguments)))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut text = String::new();
    for line in different {
        text.push_str(&format!("different: {line}\n"));
    }
    for input in inputs {
        text.push_str(&format!(
            "another input: {}\n",
            short(&plain(&input.to_string()))
        ));
    }
    print(&text)?;
    Ok(ExitCode::from(1))
}

/// Returns the command that starts the program again, with a tag for its run. Notes the changes since.
fn command(original: &RunHistory) -> Result<Command> {
    if original.status() == RunStatus::Running {
        return Err(Error::usage(format!(
            "the run in {} is still being written: reproduce it when it has ended",
            original.folder.display()
        )));
    }
    let provenance = Provenance::of(original);
    let cannot = |error: accelerator_track::Error| {
        Error::usage(format!("{} cannot be run again", label(&original.folder))).with_source(error)
    };
    let mut reproduction = Reproduction::of(&provenance).map_err(cannot)?;
    if let Ok(launcher) = std::env::current_exe() {
        reproduction = reproduction.with_launcher(launcher);
    }
    for warning in reproduction.warnings() {
        note(&plain(warning));
    }
    let mut command = reproduction.command();
    let tag = format!("{TAG}={}", original.id);
    let name = accelerator_host::RUN_TAGS.name;
    let tags = match std::env::var(name) {
        Ok(others) if !others.is_empty() => format!("{others},{tag}"),
        _ => tag,
    };
    command.env(name, tags);
    Ok(command)
}

/// Runs the program to its end, and finds its run.
fn run_again(original: &RunHistory, mut command: Command) -> Result<RunHistory> {
    // The program writes its runs where it did before; if the run was copied from there, in the folder of the copy.
    let beside = original.folder.canonicalize();
    let beside = beside.ok().and_then(|x| x.parent().map(Path::to_owned));
    let its_own = command.get_current_dir().map(|x| x.join("runs"));
    let its_own = its_own.map(|x| x.canonicalize().unwrap_or(x));
    let mut places: Vec<PathBuf> = beside.into_iter().chain(its_own).collect();
    places.dedup();
    let runs = || {
        let folders = places
            .iter()
            .filter_map(|x| Runs::open(x).ok()?.list().ok());
        folders.flatten().map(|run| run.folder).collect::<Vec<_>>()
    };
    let before = runs();
    let status = command.status().map_err(|error| {
        let program = command.get_program().to_string_lossy().into_owned();
        Error::usage(format!("{program} cannot be started")).with_source(error)
    })?;
    if !status.success() {
        return Err(Error::usage(format!(
            "the program could not be run again: it ended with {status}"
        )));
    }
    let id = original.id.to_string();
    let is_its = |folder: &PathBuf| {
        let tags = RunSummary::read(folder).map(|run| run.tags);
        tags.is_ok_and(|tags| tags.get(TAG) == Some(&id))
    };
    let new = runs().into_iter().filter(|x| !before.contains(x));
    let found = new.filter(is_its).find_map(|x| RunHistory::read(x).ok());
    found.ok_or_else(|| {
        let now = RunHistory::read(&original.folder);
        if now.is_ok_and(|now| now.attempts.len() > original.attempts.len()) {
            return Error::usage(format!(
                "the program resumed from its checkpoints and continued the run in {}, so nothing was reproduced: move \
                 the checkpoints away before you reproduce a run",
                original.folder.display()
            ));
        }
        let places: Vec<_> = places.iter().map(|x| x.display().to_string()).collect();
        Error::usage(format!(
            "the program ended, and left no run with the tag {TAG}={id} in {}: it must record a run there, as it did before",
            places.join(" or ")
        ))
    })
}

/// The results of a run, by name.
struct Results<'a> {
    /// The digests of the latest versions.
    artifacts: BTreeMap<&'a str, &'a str>,
    weights: &'a [WeightsDigest],
    metrics: BTreeMap<&'a str, Vec<Point>>,
}

impl<'a> Results<'a> {
    fn of(run: &'a RunHistory, arguments: &ReproduceArgs) -> Self {
        let outputs = run.artifacts.iter();
        let outputs = outputs.filter(|x| x.role == ArtifactRole::Output);
        let artifacts = outputs.map(|x| (x.name.as_str(), x.digest.as_str()));
        let series = run.series.iter().filter(|x| arguments.counts(x));
        let metrics = series.map(|series| {
            let mut points = series.points.clone();
            points.sort_by_key(|x| x.step);
            (series.key.as_str(), points)
        });
        Self {
            artifacts: artifacts.collect(),
            weights: &run.weights,
            metrics: metrics.collect(),
        }
    }

    /// Describes the differences of another run: the first weights, artifacts, then for each metric the first step.
    fn differences(&self, other: &Self) -> Vec<String> {
        let mut lines = Vec::new();
        lines.extend(other_weights(self.weights, other.weights));
        for (name, digest, again) in pairs(&self.artifacts, &other.artifacts) {
            let line = match (digest, again) {
                (Some(a), Some(b)) if a == b => continue,
                (Some(a), Some(b)) => format!("artifact {name} was {a}, and is {b}"),
                (Some(_), None) => format!("artifact {name} was not made again"),
                (None, _) => format!("artifact {name} is new"),
            };
            lines.push(plain(&line));
        }
        let none = Vec::new();
        let mut of_metrics: Vec<(u64, String)> = Vec::new();
        for (key, points, again) in pairs(&self.metrics, &other.metrics) {
            let points = points.unwrap_or(&none);
            let again = again.unwrap_or(&none);
            if let Some((step, line)) = first_difference(points, again) {
                of_metrics.push((step, plain(&format!("metric {key} {line}"))));
            }
        }
        // The earliest step is where to look.
        of_metrics.sort_by_key(|&(step, _)| step);
        lines.extend(of_metrics.into_iter().map(|(_, line)| line));
        lines
    }
}

impl ReproduceArgs {
    fn counts(&self, series: &Series) -> bool {
        let is_ignored = |key: &String| match key.strip_suffix('*') {
            Some(prefix) => series.key.starts_with(prefix),
            None => series.key == *key,
        };
        !self.ignored.iter().any(is_ignored)
    }
}

fn pairs<'a, T>(
    a: &'a BTreeMap<&'a str, T>,
    b: &'a BTreeMap<&'a str, T>,
) -> impl Iterator<Item = (&'a str, Option<&'a T>, Option<&'a T>)> {
    let names: BTreeMap<&str, ()> = a.keys().chain(b.keys()).map(|&x| (x, ())).collect();
    names
        .into_keys()
        .map(|name| (name, a.get(name), b.get(name)))
}

/// The first step at which two series have not the same bits, and how.
fn first_difference(a: &[Point], b: &[Point]) -> Option<(u64, String)> {
    let is_same = |(x, y): (&Point, &Point)| {
        (x.step, x.value.to_bits(), x.count) == (y.step, y.value.to_bits(), y.count)
    };
    let at = a.iter().zip(b).take_while(|&pair| is_same(pair)).count();
    let missing = |x: &Point| (x.step, format!("has no value again at step {}", x.step));
    match (a.get(at), b.get(at)) {
        (None, None) => None,
        (Some(x), Some(y)) if x.step == y.step => Some((
            x.step,
            format!("at step {} was {}, and is {}", x.step, x.value, y.value),
        )),
        (Some(x), None) => Some(missing(x)),
        (Some(x), Some(y)) if x.step < y.step => Some(missing(x)),
        (_, Some(y)) => Some((y.step, format!("has a new value at step {}", y.step))),
    }
}

/// The first weights that have not the same bits, and how. A run of a version that recorded none is not told to differ.
fn other_weights(a: &[WeightsDigest], b: &[WeightsDigest]) -> Option<String> {
    if a.is_empty() {
        return None;
    }
    let at = a.iter().zip(b).take_while(|(x, y)| x == y).count();
    let line = match (a.get(at), b.get(at)) {
        (None, None) => return None,
        (Some(x), Some(y)) if x.step == y.step => format!(
            "weights after step {} were {}, and are {}",
            x.step, x.digest, y.digest
        ),
        (Some(x), _) => format!("weights after step {} were not recorded again", x.step),
        (None, Some(y)) => format!("weights after step {} are new", y.step),
    };
    Some(plain(&line))
}

fn same_text(run: &RunHistory, arguments: &ReproduceArgs) -> String {
    let results = Results::of(run, arguments);
    let points: usize = results.metrics.values().map(Vec::len).sum();
    let metrics = results.metrics.len();
    let mut same = Vec::new();
    if let Some(last) = results.weights.last() {
        same.push(format!("weights after step {}", last.step));
    }
    same.push(format!("{points} points of {metrics} metrics"));
    if !results.artifacts.is_empty() {
        let names: Vec<_> = results.artifacts.keys().copied().collect();
        same.push(format!("the artifacts {}", plain(&names.join(", "))));
    }
    let mut text = format!("the same bits: {}", same.join(", "));
    if results.weights.is_empty() && results.artifacts.is_empty() {
        text.push_str(
            "; the run recorded neither weights nor artifacts, so those cannot be compared",
        );
    }
    text
}

const TAG: &str = "reproduces";
