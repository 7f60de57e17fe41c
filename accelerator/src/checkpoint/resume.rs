use std::fs;
use std::path::Path;

use accelerator_collective::Activity;
use accelerator_manifest::{
    Checkpoint, CheckpointKind, FileName, Folder, VerifyLevel, VerifyReport, internal::Place,
};

use super::parts::Resume;
use super::position::{Origin, Position};
use super::restorer::{FoundCheckpoint, Restorer};
use super::saving::{CheckpointContext, Saved, from_main};
use super::settings::Checkpoints;
use super::state_file::{
    PartKind, Source, StateFile, decode, is_called_checkpoint, is_meant_as_checkpoint, list,
};
use crate::context::loader_name;
use crate::core::agreement::{self, Term};
use crate::core::error::{self, Error, Result};
use crate::data::PreparedLoader;

#[track_caller]
pub(crate) fn resume<K, P: Resume<K>>(
    context: &CheckpointContext,
    settings: &Checkpoints,
    parts: P,
) -> Result<(P, Position)> {
    let mut kinds = Vec::new();
    P::kinds(&mut kinds);
    let Some((found, source)) = find_of_kinds(context, settings, &kinds)? else {
        return Ok((parts, Position::start(context.world_size())));
    };
    let mut restorer = Restorer::new(context, &found, source.as_ref());
    let parts = parts.restore(&mut restorer)?;
    restorer.check_rates()?;
    Ok((parts, complete(context, settings, found)?))
}

/// Finds the checkpoint that holds parts of these kinds; `None` if there is none yet.
#[track_caller]
fn find_of_kinds(
    context: &CheckpointContext,
    settings: &Checkpoints,
    kinds: &[PartKind],
) -> Result<Option<(FoundCheckpoint, Option<Source>)>> {
    context.resumes(settings.path());
    let misfit = |found: &Candidate, _: &Folder| Ok(found.state.misfit(kinds));
    let Some((found, source)) = find(context, settings, "resume", list(kinds), &misfit)? else {
        if context.is_main_process() {
            report_absence(settings.path());
        }
        return Ok(None);
    };
    if context.is_main_process() && matches!(found.origin, Origin::Checkpoint(_)) {
        let trial = accelerator_host::variable(accelerator_host::TRIAL_FOLDER.name);
        let warning = trial.and_then(|trial| from_another_trial(trial.as_ref(), &found.path));
        warning.iter().for_each(|text| error::warn(text));
    }
    if let Some(misfit) = found.state.misfit(kinds) {
        return Err(found.unfit(&misfit));
    }
    if found.seed.is_some_and(|seed| seed != context.seed) {
        tracing::warn!(
            "the checkpoint was saved with the seed {}, and this program has {}: dropout will draw \
             otherwise than if it had gone on",
            found.seed.unwrap_or_default(),
            context.seed
        );
    }
    Ok(Some((found, source)))
}

/// Says that there is no checkpoint in the folder, and where there are some if they are one level below.
fn report_absence(path: &Path) {
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    // A folder of something else may have very many.
    let mut below = entries
        .take(100)
        .map(|entry| entry.path())
        .filter(|folder| {
            let entries = fs::read_dir(folder).into_iter().flatten().flatten();
            entries
                .map(|entry| entry.path())
                .any(|entry| is_called_checkpoint(&entry))
        });
    let path = path.display();
    match below.next() {
        None => tracing::info!("no checkpoint in `{path}`: nothing is resumed"),
        Some(folder) => error::warn(&format!(
            "no checkpoint in `{path}`: nothing is resumed; there are checkpoints in `{}`: name that folder to continue \
             from them",
            folder.display()
        )),
    }
}

/// The warning of a trial, with this folder, that continues from a checkpoint outside of the search's folder.
fn from_another_trial(trial: &Path, checkpoint: &Path) -> Option<String> {
    let search = trial.parent()?.canonicalize().ok()?;
    let place = checkpoint.canonicalize().ok()?;
    (!place.starts_with(&search)).then(|| {
        format!(
            "this trial resumed from `{}`, which is outside the folder of its search, `{}`: another trial may have saved that \
             checkpoint, and the result would mix the two; resume only from `{{checkpoint}}`, and save under `{{folder}}`",
            checkpoint.display(),
            search.display()
        )
    })
}

/// Makes what remains of a checkpoint, once its parts are restored, that of the program.
#[track_caller]
fn complete(
    context: &CheckpointContext,
    settings: &Checkpoints,
    found: FoundCheckpoint,
) -> Result<Position> {
    let factor = found.factor();
    context.set_factor(factor);
    let is_checkpoint = matches!(found.origin, Origin::Checkpoint(_));
    let run = from_main(context, "resume", || {
        let Origin::Checkpoint(number) = found.origin else {
            settings.pass_over_after_resume();
            return Ok(None);
        };
        let _busy = context.group().activity().busy();
        settings.run_after_resume(&Saved {
            number,
            path: found.path.clone(),
            step: found.step,
        })?;
        Ok(context.tracking.resume(found.state.run.clone()))
    })?;
    // What comes from the group before is in its run, which continues.
    if is_checkpoint {
        context.tracking.join(run);
    }
    if context.is_main_process() {
        let pause = context.live().map(|live| live.since.elapsed());
        let pause = pause.map(tracing::field::debug);
        tracing::info!(
            step = found.step,
            pause,
            "continuing from {}",
            found.path.display()
        );
        context.go_on_from(None);
    }
    Ok(Position {
        origin: found.origin,
        epoch: found
            .state
            .position()
            .map_or(0, |position| position.next_epoch()),
        factor,
        passed_over: found.passed_over.clone(),
        step: found.step,
        steps: found.state.optimizer_steps(),
        world_size_before: found.world_size,
    })
}

#[track_caller]
pub(crate) fn resume_loader<O: Send + 'static>(
    context: &CheckpointContext,
    settings: &Checkpoints,
    loader: PreparedLoader<O>,
) -> Result<PreparedLoader<O>> {
    let number = loader.number();
    let name = loader_name(number);
    let missing =
        format!("it has no {name}; prepare loaders in the order of the program that saved it");
    let Some(found) = find_of_loader(context, settings, number, &name, &missing)? else {
        return Ok(loader);
    };
    let Some((at, saved)) = found.state.loader(number) else {
        return Err(found.unfit(&missing));
    };
    found.resume_loader(context.world_size(), at, &name, saved, loader)
}

#[track_caller]
fn find_of_loader(
    context: &CheckpointContext,
    settings: &Checkpoints,
    number: u64,
    name: &str,
    missing: &str,
) -> Result<Option<FoundCheckpoint>> {
    let misfit = |found: &Candidate, folder: &Folder| match found.state.loader(number) {
        None => Ok(Some(missing.to_owned())),
        Some(_) => found.other_parts(folder),
    };
    let found = find(context, settings, "resume_loader", name.to_owned(), &misfit)?;
    Ok(found.map(|(found, _)| found))
}

/// Returns why a checkpoint of that folder does not fit the parts to resume, if it does not.
type Misfit<'a> = dyn Fn(&Candidate, &Folder) -> Result<Option<String>> + 'a;

/// Returns the state that rank 0 has taken along from the group before, or else finds in the folder, on every rank,
/// with its source on rank 0; `None` if there is none. Ranks compare what they are going to resume by that call.
#[track_caller]
fn find(
    context: &CheckpointContext,
    settings: &Checkpoints,
    call: &str,
    passed: String,
    misfit: &Misfit<'_>,
) -> Result<Option<(FoundCheckpoint, Option<Source>)>> {
    context.settle()?;
    let folder = settings.path().display();
    let terms = [
        Term::new(format!("what is passed to `{call}`"), passed),
        // Rank 0 alone reads, and the others' would not be looked into.
        Term::new("the folder of checkpoints", folder).shown_of_all(),
    ];
    agreement::check_all(context.group(), &terms)?;
    let mut source = None;
    let found = from_main(context, "find a checkpoint", || {
        // No checkpoint could be saved there.
        settings.check_folder()?;
        let mut passed_over = Vec::new();
        let newest = match context.live() {
            Some(live) => Some(Candidate::read(Source::Memory(live))?),
            None => {
                let activity = context.group().activity();
                newest(settings.path(), activity, misfit, &mut passed_over)?
            }
        };
        let Some(newest) = newest else {
            return Ok(None);
        };
        let path = newest.source.path();
        for what in &passed_over {
            let path = path.display();
            error::warn(&format!(
                "a checkpoint was passed over: {what}; going back to {path}"
            ));
        }
        let window = context.accumulation.window;
        let (ranks, state) = (context.world_size(), &newest.state);
        let found = FoundCheckpoint::read(&newest.source, state, ranks, window, settings)?;
        source = Some(newest.source);
        Ok(Some(FoundCheckpoint {
            passed_over,
            ..found
        }))
    })?;
    Ok(found.map(|found| (found, source)))
}

struct Candidate {
    source: Source,
    state: StateFile,
}

impl Candidate {
    fn read(source: Source) -> Result<Self> {
        let file: FileName = StateFile::FILE.parse()?;
        let state = decode("its state", &source.read(&file)?)?;
        Ok(Self { source, state })
    }

    /// Returns why the state does not fit, if it is that of an emergency: survivors leave out what they do not have, and
    /// an older checkpoint has all parts.
    fn lacks_parts(&self, folder: &Folder, misfit: &Misfit<'_>) -> Result<Option<String>> {
        match self.source.metadata()?.kind {
            CheckpointKind::Emergency => misfit(self, folder),
            _ => Ok(None),
        }
    }

    /// Returns how its parts differ from those of the newest full checkpoint, for a call that does not know the
    /// arguments of `resume`: both must continue from the same one.
    fn other_parts(&self, folder: &Folder) -> Result<Option<String>> {
        let parts = self.source.metadata()?.extra.get("parts");
        for checkpoint in folder.checkpoints()?.iter().rev() {
            let metadata = match checkpoint.manifest() {
                Ok(manifest) => &manifest.metadata,
                Err(error) if error.is_io() => return Err(error.into()),
                // It is passed over, too.
                Err(_) => continue,
            };
            if metadata.kind == CheckpointKind::Full {
                let full = metadata.extra.get("parts");
                let shown = |parts: Option<&serde_json::Value>| {
                    parts.map_or_else(|| "none".to_owned(), ToString::to_string)
                };
                return Ok((parts != full).then(|| {
                    let (parts, full, number) = (shown(parts), shown(full), checkpoint.number());
                    format!("its parts are {parts}, and those of checkpoint {number} {full}")
                }));
            }
        }
        Ok(None)
    }
}

/// Finds the newest good checkpoint in the folder, skipping emergency ones that lack parts, or the checkpoint that the
/// path itself names; returns `None` if there is none at all. Adds the defects of newer ones to `passed_over`.
fn newest(
    path: &Path,
    activity: Activity,
    misfit: &Misfit<'_>,
    passed_over: &mut Vec<String>,
) -> Result<Option<Candidate>> {
    let progress = move || activity.keep_alive();
    let folder = match Place::open(path) {
        Ok(Place::Folder(folder)) => folder.with_progress(progress),
        Ok(Place::Checkpoint(checkpoint)) => {
            return named(checkpoint.with_progress(progress)).map(Some);
        }
        Err(error) if error.is_not_found() => {
            if !is_called_checkpoint(path) {
                return Ok(None);
            }
            let path = path.display();
            return Err(Error::checkpoint(format!(
                "there is no checkpoint `{path}`; {NAMED_HINT}"
            )));
        }
        Err(error) => return Err(error.into()),
    };
    let mut before = u64::MAX;
    loop {
        let search = folder.latest_good_before(before)?;
        passed_over.extend(search.rejected.iter().map(VerifyReport::to_string));
        let Some(checkpoint) = search.found else {
            break;
        };
        before = checkpoint.number();
        let path = checkpoint.path().to_owned();
        let found = Candidate::read(Source::Folder(Box::new(checkpoint)))?;
        match found.lacks_parts(&folder, misfit)? {
            None => return Ok(Some(found)),
            Some(misfit) => passed_over.push(format!(
                "{} was saved in an emergency, and does not fit: {misfit}",
                path.display()
            )),
        }
    }
    if !passed_over.is_empty() {
        return Err(Error::checkpoint(format!(
            "no checkpoint in `{}` is whole and fits, so training cannot continue: {}; restore one of them, or \
                 move the folder away to start afresh",
            path.display(),
            passed_over.join("; ")
        )));
    }
    if is_meant_as_checkpoint(path)? {
        return Err(Error::checkpoint(format!(
            "training cannot continue from `{}`: it has no manifest.json, as every checkpoint has; {NAMED_HINT}",
            path.display()
        )));
    }
    Ok(None)
}

/// Reads the checkpoint that the program has named, and no other.
fn named(checkpoint: Checkpoint) -> Result<Candidate> {
    let report = checkpoint.verify(VerifyLevel::Hashes);
    if let Some(defect) = report.unreadable() {
        return Err(defect.error.clone().into());
    }
    if !report.is_good() {
        let message = format!("training cannot continue from {report}; {NAMED_HINT}");
        return Err(Error::checkpoint(message));
    }
    Candidate::read(Source::Folder(Box::new(checkpoint)))
}

const NAMED_HINT: &str = "pass the folder that holds the checkpoints to continue from the newest one, or see \
                          `accel-launch checkpoint list` for their names";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trial_that_continues_from_outside_of_its_search_is_warned() {
        let base = tempfile::tempdir().unwrap();
        let trial = base.path().join("search/trial_1");
        let own = trial.join("epochs/checkpoint-7");
        // As population based training does.
        let other_trial = base.path().join("search/trial_2/checkpoint_000001");
        let elsewhere = base.path().join("checkpoints/checkpoint-7");
        for folder in [&own, &other_trial, &elsewhere] {
            fs::create_dir_all(folder).unwrap();
        }
        assert_eq!(from_another_trial(&trial, &own), None);
        assert_eq!(from_another_trial(&trial, &other_trial), None);
        let text = from_another_trial(&trial, &elsewhere).unwrap();
        assert!(text.contains("resume only from `{checkpoint}`"), "{text}");
    }
}
