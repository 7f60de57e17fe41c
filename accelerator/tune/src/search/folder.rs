use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use rustix::process::Signal;

use super::files::TrialFiles;
use super::lock::SearchLock;
use super::run::{new_core, view};
use super::spec::SearchSpec;
use crate::error::{Error, Kind, Result};
use crate::fields;
use crate::journal::{self, JOURNAL};
use crate::output::Results;
use crate::view::{SearchEnd, TrialStatus};

/// A search that is on the disk, whether it runs or not.
///
/// ```
/// use accelerator_tune::SearchFolder;
///
/// fn best(folder: &str) -> accelerator_tune::Result<Option<String>> {
///     let search = SearchFolder::open(folder)?;
///     let objective = search.spec().objective();
///     let best = search.results().best_config(&objective.metric, objective.mode);
///     Ok(best.map(|best| best.to_string()))
/// }
/// assert!(best("no/such/search").unwrap_err().is_not_found());
/// ```
#[derive(Debug)]
pub struct SearchFolder {
    path: PathBuf,
    spec: SearchSpec,
    results: Results,
    directory: Option<PathBuf>,
}

impl SearchFolder {
    /// Reads it as far as its journal goes.
    ///
    /// # Errors
    /// [`Error::is_not_found`] where the folder has no search; [`Error::is_corrupt`] where its journal is damaged.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let Some(journaled) = journal::read(path)? else {
            return Err(Error::new(
                Kind::NotFound,
                format!("{} has no search: it has no {JOURNAL}", path.display()),
            ));
        };
        let head = journaled.head;
        let spec: SearchSpec = fields::parse(head.spec).map_err(|error| {
            let journal = path.join(JOURNAL);
            let what = format!("the specification in {}: {error}", journal.display());
            Error::new(Kind::Corrupt, what).with_source(error)
        })?;
        let mut core = new_core(&spec, head.asks)?;
        for event in journaled.events {
            core.step(event);
        }
        let parameters = spec.space.parameters();
        let replayed = BTreeMap::new();
        let files = TrialFiles::new(path, &spec.name, &head.id, parameters, replayed, None);
        let mut view = view(&spec, path, &core, &files, None, None, &|_| None);
        if SearchLock::holder(path).is_none() {
            // What ran has ended with the search, and waits for the next.
            for trial in &mut view.trials {
                if trial.status == TrialStatus::Running {
                    trial.status = TrialStatus::Paused;
                }
            }
        }
        let ending = match core.is_finished() {
            true => SearchEnd::Finished,
            false => SearchEnd::Interrupted,
        };
        Ok(Self {
            path: path.to_owned(),
            spec,
            results: Results::new(view, ending),
            directory: head.directory,
        })
    }

    /// Returns its specification.
    #[must_use]
    pub fn spec(&self) -> &SearchSpec {
        &self.spec
    }

    /// The working directory of the process that began it: where its program is to be resumed, too.
    #[must_use]
    pub fn directory(&self) -> Option<&Path> {
        self.directory.as_deref()
    }

    /// Returns its results.
    #[must_use]
    pub fn results(&self) -> &Results {
        &self.results
    }

    /// The process of this host that carries it out at present.
    #[must_use]
    pub fn process(&self) -> Option<u32> {
        SearchLock::holder(&self.path)
    }

    /// Asks that process to pause the search, as Ctrl-C does; whether there is one.
    ///
    /// # Errors
    /// [`Error::is_io`] where this user may not.
    pub fn interrupt(&self) -> Result<bool> {
        let signaled = SearchLock::signal(&self.path, Signal::INT);
        signaled.map_err(|error| Error::io("interrupt the search in", &self.path, error))
    }
}
