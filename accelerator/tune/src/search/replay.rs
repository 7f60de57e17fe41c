//! Replays a journal to the state that it leads to.

use std::collections::BTreeMap;
use std::path::Path;
use std::{fs, io};

use accelerator_host::fs::Durability;

use crate::appended::{AppendedFile, json_lines};
use crate::config::{Config, TrialId};
use crate::core::{Action, Branch, Core, Decision, Event};
use crate::error::{Error, Kind, Result};
use crate::searcher::Searcher;
use crate::view::TrialResult;

pub(super) struct Replayed {
    pub(super) decisions: Vec<Decision>,
    /// Results that count, by trial.
    pub(super) results: BTreeMap<TrialId, Vec<(Branch, TrialResult)>>,
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
    };
    for event in events {
        if let Event::Suggested { trial, config } = &event {
            let again = searcher.ask(*trial)?;
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
                Action::Log(decision) => replayed.decisions.push(decision),
                Action::Record { branch, result } => {
                    tell_result(searcher, core, branch.trial, &result)?;
                    let results = replayed.results.entry(branch.trial).or_default();
                    results.push((branch, result));
                }
                Action::Tell(trial, end) => searcher.tell(trial, end)?,
                Action::Reconcile(_) => {}
            }
        }
    }
    Ok(replayed)
}

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

/// The log of decisions, while it is written.
#[derive(Debug)]
pub(crate) struct DecisionLog(AppendedFile);

impl DecisionLog {
    /// Opens the log of a search that has come to these decisions.
    ///
    /// # Errors
    /// [`Error::is_conflict`] where it holds others.
    pub(crate) fn open(folder: &Path, decisions: &[Decision]) -> Result<Self> {
        let path = folder.join("decisions.jsonl");
        let before = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(Error::io("read", &path, error)),
        };
        let text = json_lines("the decisions", decisions)?;
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
        AppendedFile::replace(path, &text, Durability::Cached).map(Self)
    }

    pub(crate) fn append(&mut self, decision: &Decision) -> Result<()> {
        self.0.append(&json_lines("a decision", [decision])?)
    }
}
