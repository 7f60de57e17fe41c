//! The folders of trials.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::driver::Files;
use crate::core::{Branch, TrialState};
use crate::error::Result;
use crate::output::{TrialFolder, folder_name, trial_name};
use crate::trial_id::TrialId;
use crate::view::TrialResult;

/// Writes the files of each trial.
#[derive(Debug)]
pub(crate) struct TrialFiles {
    root: PathBuf,
    /// The search's name, and its part of trials' names.
    search: String,
    id: String,
    parameters: Vec<String>,
    /// Results of the journal, until the trial's files are opened.
    before: BTreeMap<TrialId, Vec<(Branch, TrialResult)>>,
    open: BTreeMap<TrialId, TrialFolder>,
}

impl TrialFiles {
    pub(crate) fn new(
        root: &Path,
        search: &str,
        id: &str,
        parameters: Vec<String>,
        before: BTreeMap<TrialId, Vec<(Branch, TrialResult)>>,
    ) -> Self {
        Self {
            root: root.to_owned(),
            search: search.to_owned(),
            id: id.to_owned(),
            parameters,
            before,
            open: BTreeMap::new(),
        }
    }

    /// Such as `MnistTrainable_358bb_00006`.
    pub(crate) fn name(&self, trial: TrialId) -> String {
        trial_name(&self.search, &self.id, trial)
    }

    /// Brings the files of trials that have ended in line with the journal.
    pub(crate) fn restore(&mut self, trials: &[TrialState]) -> Result<()> {
        for state in trials {
            if self.before.contains_key(&state.id) {
                self.folder(state)?;
                if state.end.is_some() {
                    self.open.remove(&state.id);
                }
            }
        }
        Ok(())
    }

    fn folder(&mut self, state: &TrialState) -> Result<&mut TrialFolder> {
        let path = self.path(state);
        match self.open.entry(state.id) {
            std::collections::btree_map::Entry::Occupied(folder) => Ok(folder.into_mut()),
            std::collections::btree_map::Entry::Vacant(place) => {
                let before = self.before.remove(&state.id).unwrap_or_default();
                let with_config = |(branch, result)| (result, state.config_of(branch).clone());
                let before: Vec<_> = before.into_iter().map(with_config).collect();
                let name = trial_name(&self.search, &self.id, state.id);
                let folder = TrialFolder::open(&path, &name, state.config(), &before)?;
                Ok(place.insert(folder))
            }
        }
    }
}

impl Files for TrialFiles {
    fn path(&self, state: &TrialState) -> PathBuf {
        // The folder keeps its name when the trial takes another configuration.
        let first = &state.branches[0].config;
        let name = folder_name(&self.name(state.id), state.id, &self.parameters, first);
        self.root.join(name)
    }

    fn begin(&mut self, state: &TrialState) -> Result<()> {
        self.folder(state).map(|_| ())
    }

    fn take(&mut self, state: &TrialState, branch: Branch, result: &TrialResult) -> Result<()> {
        self.folder(state)?.append(result, state.config_of(branch))
    }

    fn end(&mut self, state: &TrialState) -> Result<()> {
        if let Some(error) = &state.error {
            self.folder(state)?.fail(error)?;
        }
        if state.end.is_some() {
            self.open.remove(&state.id);
        }
        Ok(())
    }
}
