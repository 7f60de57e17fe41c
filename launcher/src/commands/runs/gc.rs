//! `accel-launch runs gc`.

use std::io::{self, BufRead, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use accelerator_track::{
    ArtifactId, RunStatus, RunSummary, Runs,
    internal::{
        Leftover, ListedRun, PruneReport, leftovers, remove_artifacts, remove_leftovers,
        remove_unfinished, unfinished, unneeded_artifacts,
    },
};
use clap::Args;

use super::list::RunFilter;
use super::{RunsFolder, failed, label, row};
use crate::error::{Error, Result, chain};
use crate::text::{age, columns, duration, note, plain, print, size};

#[derive(Args, Clone, Debug)]
pub(super) struct GcArgs {
    #[command(flatten)]
    place: RunsFolder,

    #[command(flatten)]
    filter: RunFilter,

    /// Remove runs that have written nothing for this long, such as `30d` or `12h`. Also remove leftovers of this age
    /// from runs that never began and uploads that did not finish.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    older_than: Option<Duration>,

    /// Keep this many of the newest runs.
    #[arg(long, value_name = "NUMBER")]
    keep_last: Option<usize>,

    /// Also remove artifact versions made by runs that no longer exist, unless another run uses the version, it has an
    /// alias, or it is the latest.
    #[arg(long)]
    artifacts: bool,

    /// Only print what would be removed.
    #[arg(long)]
    dry_run: bool,

    /// Remove without asking. Required if standard input is not a terminal.
    #[arg(short, long)]
    yes: bool,
}

/// The runs and files to remove.
struct Garbage {
    runs: Vec<(ListedRun, RunSummary)>,
    leftovers: Vec<Leftover>,
    /// The remains of a start or an upload that was cut off.
    unfinished: Vec<Leftover>,
    artifacts: PruneReport,
    bytes: u64,
}

pub(super) fn run(arguments: &GcArgs) -> Result<ExitCode> {
    let runs = arguments.place.open()?;
    let garbage = Garbage::find(arguments, &runs)?;
    if garbage.is_empty() {
        return print("nothing to remove\n");
    }
    print(&garbage.text())?;
    if arguments.dry_run {
        return print(&format!("would free {}\n", size(garbage.bytes)));
    }
    if !arguments.yes && !is_agreed(&garbage)? {
        return print("nothing was removed\n");
    }
    let (freed, is_complete) = garbage.remove(&runs)?;
    print(&format!("freed {}\n", size(freed)))?;
    match is_complete {
        true => Ok(ExitCode::SUCCESS),
        false => Err(Error::system("not everything was removed")),
    }
}

impl Garbage {
    fn find(arguments: &GcArgs, folder: &Runs) -> Result<Self> {
        let mut runs = Vec::new();
        let mut are_all_read = true;
        for run in folder.list().map_err(failed)? {
            match RunSummary::read(&run.folder) {
                Ok(summary) => runs.push((run, summary)),
                Err(error) => {
                    are_all_read = false;
                    note(&format!("{} is left alone: {error}", label(&run.folder)));
                }
            }
        }
        let is_asked = arguments.older_than.is_some()
            || arguments.keep_last.is_some()
            || !arguments.filter.is_empty();
        // They come the oldest first.
        let newest = arguments.keep_last.unwrap_or(0);
        runs.truncate(runs.len().saturating_sub(newest));
        runs.retain(|(_, run)| is_asked && arguments.takes(run));
        let mut leftovers = leftovers(folder).map_err(failed)?;
        let is_of_removed =
            |x: &Leftover| runs.iter().any(|(run, _)| x.path.starts_with(&run.folder));
        leftovers.retain(|x| !is_of_removed(x));
        let unfinished = unfinished(folder).map_err(failed)?;
        let (unfinished, young): (Vec<_>, Vec<_>) = unfinished
            .into_iter()
            .partition(|x| arguments.is_abandoned(x));
        for folder in &young {
            note(&unfinished_text(folder));
        }
        let of_runs = runs.iter().map(|(run, _)| run.bytes());
        let of_others = leftovers.iter().chain(&unfinished).map(|x| x.bytes);
        let bytes: u64 = of_runs.chain(of_others).sum();
        let artifacts = match (arguments.artifacts, are_all_read) {
            (false, _) => PruneReport::default(),
            (true, true) => {
                let removed: Vec<_> = runs.iter().map(|(run, _)| run.clone()).collect();
                unneeded_artifacts(folder, &removed).map_err(failed)?
            }
            (true, false) => {
                note("artifacts are left alone: it is not known which ones a damaged run uses");
                PruneReport::default()
            }
        };
        Ok(Self {
            runs,
            leftovers,
            unfinished,
            bytes: bytes + artifacts.bytes,
            artifacts,
        })
    }

    fn is_empty(&self) -> bool {
        self.runs.is_empty() && self.leftovers().next().is_none() && self.versions().is_empty()
    }

    fn leftovers(&self) -> impl Iterator<Item = &Leftover> {
        self.leftovers.iter().chain(&self.unfinished)
    }

    fn versions(&self) -> &[ArtifactId] {
        &self.artifacts.versions
    }

    fn text(&self) -> String {
        let mut table = Vec::new();
        for (run, summary) in &self.runs {
            table.push(vec![
                "run".to_owned(),
                label(&run.folder),
                summary.status.to_string(),
                duration(age(summary.last_ms / 1000)),
                size(run.bytes()),
            ]);
        }
        for leftover in self.leftovers() {
            let path = plain(&leftover.path.display().to_string());
            let mut cells = row(["leftover", &path, "", ""]);
            cells.push(size(leftover.bytes));
            table.push(cells);
        }
        for artifact in self.versions() {
            let name = format!("{}:v{}", plain(&artifact.name), artifact.version);
            table.push(row(["artifact", &name]));
        }
        columns(&table)
    }

    /// Removes the garbage; returns the number of bytes freed, and `true` if everything could be removed.
    fn remove(&self, folder: &Runs) -> Result<(u64, bool)> {
        let mut freed = 0;
        let mut is_complete = true;
        let mut count =
            |path: &Path, bytes: u64, removed: accelerator_track::Result<Vec<PathBuf>>| {
                match removed.map_err(failed) {
                    Ok(foreign) => {
                        freed += bytes;
                        for path in foreign {
                            let path = plain(&path.display().to_string());
                            note(&format!("{path} stays: the run did not write it"));
                        }
                    }
                    // It has been written since it was listed, or belongs to another user.
                    Err(error) => {
                        is_complete = false;
                        note(&format!(
                            "{} is not removed: {}",
                            label(path),
                            chain(&error)
                        ));
                    }
                }
            };
        for (run, _) in &self.runs {
            let bytes = run.bytes();
            count(&run.folder, bytes, folder.remove(run));
        }
        for found in &self.unfinished {
            let removed = remove_unfinished(found);
            count(&found.path, found.bytes, removed.map(|()| Vec::new()));
        }
        let leftovers = remove_leftovers(folder, &self.leftovers).map_err(failed)?;
        freed += leftovers.iter().map(|x| x.bytes).sum::<u64>();
        if !self.versions().is_empty() {
            let removed = remove_artifacts(folder, &self.artifacts).map_err(failed)?;
            freed += removed.bytes;
        }
        Ok((freed, is_complete))
    }
}

impl GcArgs {
    fn takes(&self, run: &RunSummary) -> bool {
        let since = Duration::from_secs(age(run.last_ms / 1000));
        let is_old = self.older_than.is_none_or(|least| since >= least);
        let is_kept = run.status == RunStatus::Running || run.tags.contains_key("keep");
        is_old && !is_kept && self.filter.takes(run)
    }

    /// Checks if a leftover is old enough to remove. It has no status or tags, so a filter by them never selects it.
    fn is_abandoned(&self, found: &Leftover) -> bool {
        let age = found.modified.elapsed().unwrap_or_default();
        self.filter.is_empty() && self.older_than.is_some_and(|least| age >= least)
    }
}

fn unfinished_text(found: &Leftover) -> String {
    let name = found.path.file_name().unwrap_or_default();
    let what = match name.to_string_lossy().starts_with('.') {
        true => "is of an upload that did not end",
        false => "has no journal, as of a run that never began",
    };
    let path = plain(&found.path.display().to_string());
    format!("{path} {what}: --older-than removes it when nothing was written to it for that long")
}

fn is_agreed(garbage: &Garbage) -> Result<bool> {
    let stdin = io::stdin();
    if !stdin.is_terminal() {
        return Err(Error::usage(
            "standard input is no terminal, so nobody can be asked: add --yes to remove this, or --dry-run to see it",
        ));
    }
    let mut stderr = io::stderr();
    // A question that cannot be seen is not answered.
    let _ = write!(
        stderr,
        "Remove {} runs, {} leftovers and {} artifacts, {}? [y/N] ",
        garbage.runs.len(),
        garbage.leftovers().count(),
        garbage.versions().len(),
        size(garbage.bytes)
    );
    let mut answer = String::new();
    let read = stdin.lock().read_line(&mut answer);
    read.map_err(|error| Error::system("the answer cannot be read").with_source(error))?;
    Ok(["y", "yes"].contains(&answer.trim().to_lowercase().as_str()))
}
