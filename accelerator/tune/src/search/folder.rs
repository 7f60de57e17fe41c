use std::path::{Path, PathBuf};

use rustix::process::Signal;

use super::lock::SearchLock;
use super::run::read;
use super::spec::SearchSpec;
use crate::error::{Error, Result};
use crate::output::Results;

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
        let (spec, results, directory) = read(path)?;
        Ok(Self {
            path: path.to_owned(),
            spec,
            results,
            directory,
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
