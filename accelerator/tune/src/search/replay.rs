//! Replays a journal to the state that it leads to.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use accelerator_host::fs::{Durability, Replace};

use crate::config::{Config, TrialId};
use crate::core::{Action, Branch, Core, Decision, Event};
use crate::error::{Error, Kind, Result};
use crate::searcher::{Searcher, Suggestion};
use crate::view::TrialResult;

/// The outcome of a journal.
pub(super) struct Replayed {
    pub(super) decisions: Vec<Decision>,
    /// Results that count, by trial.
    pub(super) results: BTreeMap<TrialId, Vec<(Branch, TrialResult)>>,
    /// The searcher was to be asked.
    pub(super) asked: Option<TrialId>,
}

/// Brings a new core, and its searcher, to where the events of a journal have left them. The search began with that version
/// of the searcher.
pub(super) fn replay(
    core: &mut Core,
    searcher: &mut dyn Searcher,
    version: Option<&str>,
    events: Vec<Event>,
) -> Result<Replayed> {
    let mut replayed = Replayed {
        decisions: Vec::new(),
        results: BTreeMap::new(),
        asked: None,
    };
    for event in events {
        if let Event::Suggested { trial, config } = &event {
            let again = ask(searcher, *trial)?;
            if again != *config {
                let shown = |config: &Option<Config>| match config {
                    Some(config) => config.to_string(),
                    None => "nothing".to_owned(),
                };
                let versions = match (version, searcher.version()) {
                    (Some(before), Some(now)) => format!(" (it was {before}, and is {now})"),
                    _ => String::new(),
                };
                return Err(Error::new(
                    Kind::Conflict,
                    format!(
                        "the searcher suggests {} for trial {trial}, and suggested {} before: it is of another version{versions}, \
                         or not deterministic; use the one that began the search, or another folder",
                        shown(&again),
                        shown(config)
                    ),
                ));
            }
        }
        for action in core.step(event) {
            match action {
                Action::Ask(trial) => replayed.asked = Some(trial),
                Action::Log(decision) => replayed.decisions.push(decision),
                Action::Record { branch, result } => {
                    tell_result(searcher, core, branch.trial, &result)?;
                    let results = replayed.results.entry(branch.trial).or_default();
                    results.push((branch, result));
                }
                Action::Tell(trial, end) => searcher.tell(trial, end)?,
                Action::Reconcile(_) | Action::Finish => {}
            }
        }
        if !core.is_asking() {
            replayed.asked = None;
        }
    }
    Ok(replayed)
}

/// Returns the searcher's suggestion; `None` if it has no more.
pub(super) fn ask(searcher: &mut dyn Searcher, trial: TrialId) -> Result<Option<Config>> {
    Ok(match searcher.ask(trial)? {
        Suggestion::Config(config) => Some(config),
        Suggestion::Exhausted => None,
    })
}

/// Tells the searcher what a trial has reported.
pub(super) fn tell_result(
    searcher: &mut dyn Searcher,
    core: &Core,
    trial: TrialId,
    result: &TrialResult,
) -> Result<()> {
    match result.value(core.metric()) {
        Some(value) => searcher.report(trial, result.training_iteration, value),
        None => Ok(()),
    }
}

/// The file of decisions in a search's folder.
pub(crate) const DECISIONS: &str = "decisions.jsonl";

/// The log, while it is written.
#[derive(Debug)]
pub(crate) struct DecisionLog {
    file: File,
    path: PathBuf,
}

impl DecisionLog {
    /// Opens the log of a search that has come to these decisions.
    ///
    /// # Errors
    /// [`Error::is_conflict`] where it holds others.
    pub(crate) fn open(folder: &Path, decisions: &[Decision]) -> Result<Self> {
        let path = folder.join(DECISIONS);
        let before = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(Error::io("read", &path, error)),
        };
        let mut text = Vec::new();
        for decision in decisions {
            add_line(&mut text, decision)?;
        }
        let common = before.len().min(text.len());
        if let Some(at) = (0..common).find(|at| before[*at] != text[*at]) {
            let line = text[..at].iter().filter(|byte| **byte == b'\n').count() + 1;
            return Err(Error::new(
                Kind::Conflict,
                format!(
                    "decision {line} of {} differs from what its journal leads to now: the program was changed, or a closure of \
                     it is not deterministic; resume with the program that began the search, or use another folder",
                    path.display()
                ),
            ));
        }
        let write = || {
            Replace::new(&path, Durability::Cached)
                .draft(folder.join("decisions.new"))
                .write(|file| file.write_all(&text))?;
            OpenOptions::new().append(true).open(&path)
        };
        let file = write().map_err(|error| Error::io("write", &path, error))?;
        Ok(Self { file, path })
    }

    pub(crate) fn append(&mut self, decision: &Decision) -> Result<()> {
        let mut line = Vec::new();
        add_line(&mut line, decision)?;
        let written = self.file.write_all(&line);
        written.map_err(|error| Error::io("write", &self.path, error))
    }
}

fn add_line(text: &mut Vec<u8>, decision: &Decision) -> Result<()> {
    serde_json::to_writer(&mut *text, decision).map_err(|error| {
        Error::new(Kind::Io, format!("the decision log's line: {error}")).with_source(error)
    })?;
    text.push(b'\n');
    Ok(())
}
