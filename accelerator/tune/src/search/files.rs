//! The folders of trials.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::{Path, PathBuf};

use accelerator_host::machine::unix_time;
use accelerator_track::EndStatus;

use crate::checkpoint_folder;
use crate::config::TrialId;
use crate::core::{Branch, TrialState};
use crate::error::Result;
use crate::output::{TrialEvents, TrialFolder, folder_name};
use crate::view::{TrialResult, TrialStatus};

/// Writes the files of each trial.
#[derive(Debug)]
pub(crate) struct TrialFiles {
    root: PathBuf,
    /// The search's name, and its part of trials' names.
    search: String,
    id: String,
    parameters: Vec<String>,
    /// Results of the journal, until the trial's files are opened.
    replayed: BTreeMap<TrialId, Vec<(Branch, TrialResult)>>,
    open: BTreeMap<TrialId, OpenTrial>,
    tensorboard: Option<PathBuf>,
}

#[derive(Debug)]
struct OpenTrial {
    folder: TrialFolder,
    events: Option<TrialEvents>,
}

impl TrialFiles {
    pub(crate) fn new(
        root: &Path,
        search: &str,
        id: &str,
        parameters: Vec<String>,
        replayed: BTreeMap<TrialId, Vec<(Branch, TrialResult)>>,
        tensorboard: Option<PathBuf>,
    ) -> Self {
        Self {
            root: root.to_owned(),
            search: search.to_owned(),
            id: id.to_owned(),
            parameters,
            replayed,
            open: BTreeMap::new(),
            tensorboard,
        }
    }

    /// Returns a name such as `MnistTrainable_358bb_00006`.
    pub(crate) fn name(&self, trial: TrialId) -> String {
        format!("{}_{}_{trial}", self.search, self.id)
    }

    /// Brings the files of trials that have ended in line with the journal.
    pub(crate) fn restore(&mut self, trials: &[TrialState]) -> Result<()> {
        for state in trials {
            if self.replayed.contains_key(&state.id) {
                self.files_of(state)?;
                self.close_ended(state)?;
            }
        }
        Ok(())
    }

    /// Removes what attempts have left in trials' folders that ended while they saved. No attempt runs at that time.
    pub(crate) fn remove_partial_checkpoints(&self, trials: &[TrialState]) {
        for state in trials {
            checkpoint_folder::remove_partial(&self.path(state));
        }
    }

    /// The trial's folder, whether it is there or not.
    pub(crate) fn path(&self, state: &TrialState) -> PathBuf {
        // The folder keeps its name when the trial takes another configuration.
        let first = &state.branches[0].config;
        let name = folder_name(&self.name(state.id), state.id, &self.parameters, first);
        self.root.join(name)
    }

    pub(crate) fn log_trial_start(&mut self, state: &TrialState) -> Result<()> {
        self.files_of(state).map(|_| ())
    }

    /// A result counts, of that branch of the trial.
    pub(crate) fn log_trial_result(
        &mut self,
        state: &TrialState,
        branch: Branch,
        result: &TrialResult,
    ) -> Result<()> {
        let open = self.files_of(state)?;
        open.folder.append(result, state.config_of(branch))?;
        if let Some(events) = &mut open.events {
            events.report(result, state.config_of(branch))?;
            events.flush()?;
        }
        Ok(())
    }

    /// A trial has ended, or an attempt at it has failed.
    pub(crate) fn log_trial_end(&mut self, state: &TrialState) -> Result<()> {
        if let Some(error) = &state.error {
            self.files_of(state)?.folder.fail(error)?;
        }
        self.close_ended(state)
    }

    fn files_of(&mut self, state: &TrialState) -> Result<&mut OpenTrial> {
        let (path, name) = (self.path(state), self.name(state.id));
        match self.open.entry(state.id) {
            Entry::Occupied(open) => Ok(open.into_mut()),
            Entry::Vacant(place) => {
                let before = self.replayed.remove(&state.id).unwrap_or_default();
                let with_config = |(branch, result)| (result, state.config_of(branch).clone());
                let before: Vec<_> = before.into_iter().map(with_config).collect();
                let folder = TrialFolder::open(&path, &name, state.config(), &before)?;
                let mut events = match &self.tensorboard {
                    Some(logs) => {
                        let created = before.first().map(|(result, _)| result.timestamp);
                        let created = created.unwrap_or_else(|| unix_time().as_secs());
                        Some(TrialEvents::begin(
                            logs,
                            &name,
                            &state.branches[0].config,
                            created,
                        )?)
                    }
                    None => None,
                };
                if let Some(events) = &mut events {
                    for (result, config) in &before {
                        events.report(result, config)?;
                    }
                    events.flush()?;
                }
                Ok(place.insert(OpenTrial { folder, events }))
            }
        }
    }

    fn close_ended(&mut self, state: &TrialState) -> Result<()> {
        if state.end.is_none() {
            return Ok(());
        }
        let open = self.open.remove(&state.id);
        if let Some(mut events) = open.and_then(|open| open.events) {
            let status = match state.status {
                TrialStatus::Error => EndStatus::Failed,
                _ => EndStatus::Finished,
            };
            let at = state.last.as_ref().map(|result| result.timestamp);
            events.end(status, at.unwrap_or_else(|| unix_time().as_secs()))?;
        }
        Ok(())
    }
}
