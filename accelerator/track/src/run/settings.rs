//! The settings of a run, and the folder that it gets by them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::worker::{Journal, Pace};
use crate::error::{Error, Kind, Result};
use crate::history::HistoryReader;
use crate::journal::{self, JOURNAL, JournalWriter, RunLock, now_ms};
use crate::provenance::Capture;
use crate::record::{Record, RunId};
use crate::run_files::{self, expect_no_checkpoints, folder_name};

/// The position of a run when a checkpoint was taken. It is saved with the checkpoint, and says which run continues,
/// and from where, when the program resumes from it.
///
/// ```
/// use accelerator_track::{Run, RunHistory, RunMark};
///
/// # fn main() -> accelerator_track::Result<()> {
/// # let temporary = tempfile::tempdir().unwrap();
/// # let runs = temporary.path();
/// let run = Run::builder("mnist").runs_folder(runs).start()?;
/// run.log("train", [("loss", 0.5)], 1, None);
/// let mark = run.mark()?;
/// let saved = serde_json::to_string(&mark).unwrap();      // with the checkpoint
/// run.checkpoint_saved(&mark);
/// run.log("train", [("loss", 0.4)], 2, None);
/// drop(run);                                              // the program is killed
///
/// let mark: RunMark = serde_json::from_str(&saved).unwrap();
/// let run = Run::builder("mnist").runs_folder(runs).resume(&mark).start()?;
/// run.log("train", [("loss", 0.3)], 2, None);
/// let folder = run.folder().to_owned();
/// run.finish()?;
/// let losses = RunHistory::read(folder)?.series("train/loss").unwrap().points.clone();
/// assert_eq!(losses.iter().map(|x| x.value).collect::<Vec<_>>(), [0.5, 0.3]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct RunMark {
    /// The run.
    pub run: RunId,
    /// The name of its folder.
    pub folder: String,
    /// The greatest step that was logged.
    pub step: Option<u64>,
    /// The number of the first entry of the journal that was not written yet.
    pub next: u64,
}

/// The settings with which a run starts.
#[derive(Clone, Debug)]
pub(super) struct Settings {
    pub(super) name: String,
    pub(super) runs: PathBuf,
    pub(super) hyperparameters: BTreeMap<String, Value>,
    pub(super) tags: BTreeMap<String, String>,
    pub(super) world: usize,
    pub(super) launch: Option<String>,
    pub(super) provenance: Value,
    pub(super) capture: Option<Capture>,
    pub(super) pace: Pace,
}

impl Settings {
    /// Returns true if the run of a mark exists, and no other process writes it.
    pub(super) fn can_reopen(&self, mark: &RunMark) -> bool {
        let Some(folder) = self.folder_of(mark) else {
            return false;
        };
        let found = HistoryReader::open(&folder);
        found.is_ok_and(|found| found.history().id == mark.run) && !RunLock::is_held(&folder)
    }

    /// Returns the folder of a mark's run; `None` if a checkpoint names something else.
    fn folder_of(&self, mark: &RunMark) -> Option<PathBuf> {
        let mut parts = Path::new(&mark.folder).components();
        let is_name = matches!(
            (parts.next(), parts.next()),
            (Some(Component::Normal(_)), None)
        );
        is_name.then(|| self.runs.join(&mark.folder))
    }

    /// Returns the program's origin, and writes its files into the folder of the run.
    pub(super) fn provenance(&self, folder: &Path) -> Value {
        let captured = self.capture.clone().map(|capture| capture.take(folder));
        // A captured provenance is a map of JSON.
        let captured = captured.and_then(|captured| serde_json::to_value(captured).ok());
        captured.unwrap_or_else(|| self.provenance.clone())
    }

    /// The first of `name`, `name-2`, `name-3`… that is not there.
    pub(super) fn create(&self) -> Result<(Journal, (RunId, String))> {
        fs::create_dir_all(&self.runs).map_err(|error| self.unwritable(error))?;
        let name = folder_name(&self.name);
        for number in 1.. {
            let folder = self.runs.join(match number {
                1 => name.clone(),
                _ => format!("{name}-{number}"),
            });
            match fs::create_dir(&folder) {
                Ok(()) => {
                    let begun = RunLock::take(&folder)
                        .and_then(|lock| Ok((lock, JournalWriter::create(&folder.join(JOURNAL))?)));
                    let (lock, writer) = begun.inspect_err(|_| discard(&folder))?;
                    let mut journal = Journal::new(folder, lock, writer);
                    let id = RunId::new();
                    journal.append(
                        now_ms(),
                        Record::Head {
                            version: journal::VERSION,
                            run: id,
                            name: self.name.clone(),
                        },
                    );
                    return Ok((journal, (id, self.name.clone())));
                }
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
                    if !folder.join(JOURNAL).exists() {
                        expect_no_checkpoints(&folder)?;
                    }
                    if let Some(restarted) = self.restarted(&folder)? {
                        return Ok(restarted);
                    }
                }
                Err(error) => return Err(self.unwritable(error)),
            }
        }
        unreachable!("there are more numbers than folders")
    }

    fn unwritable(&self, error: std::io::Error) -> Error {
        let cause = match self.runs.is_file() {
            true => "it is a file".to_owned(),
            false => error.to_string(),
        };
        let runs = std::path::absolute(&self.runs).unwrap_or_else(|_| self.runs.clone());
        let message = format!(
            "no run can be begun in the folder {}: {cause}; make it a folder that this user may write, or choose another \
             one by `runs_folder`",
            runs.display()
        );
        Error::new(Kind::Io, message).with_source(error)
    }

    /// Opens the run in a folder, if its last attempt was of this launch and did not finish.
    fn restarted(&self, folder: &Path) -> Result<Option<(Journal, (RunId, String))>> {
        // A run of somebody else that cannot be read is not this one.
        let of = journal::unfinished_launch(&folder.join(JOURNAL)).unwrap_or_default();
        if self.launch.is_none() || of != self.launch || RunLock::is_held(folder) {
            return Ok(None);
        }
        expect_no_checkpoints(folder)?;
        let lock = RunLock::take(folder)?;
        let (journal, head) = Journal::reopen(folder.to_owned(), lock)?;
        Ok((head.1 == self.name).then_some((journal, head)))
    }

    /// Opens the run of a mark, if it exists.
    pub(super) fn reopen(&self, mark: &RunMark) -> Result<Option<(Journal, (RunId, String))>> {
        let folder = self.folder_of(mark);
        let Some(folder) = folder.filter(|folder| folder.join(JOURNAL).exists()) else {
            return Ok(None);
        };
        expect_no_checkpoints(&folder)?;
        let lock = RunLock::take(&folder)?;
        let (journal, head) = Journal::reopen(folder, lock)?;
        if head.0 != mark.run {
            return Ok(None);
        }
        if journal.next() < mark.next {
            tracing::warn!(
                run = head.1,
                "the journal of the run is shorter than when the checkpoint was saved: metrics before it are lost"
            );
        }
        Ok(Some((journal, head)))
    }
}

/// Removes a run to which nothing was logged.
pub(super) fn discard(folder: &Path) {
    match run_files::remove(folder) {
        Ok(foreign) if foreign.is_empty() => {}
        Ok(foreign) => tracing::warn!(
            folder = %folder.display(), ?foreign,
            "the folder of an empty run stays: it holds what the run did not write"
        ),
        Err(error) => {
            tracing::warn!(folder = %folder.display(), %error, "the folder of an empty run stays");
        }
    }
}

/// The name of a run's folder.
pub(super) fn folder_name_of(folder: &Path) -> String {
    let name = folder.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

/// The values of a map, those of maps within it with keys that are joined with dots. Lists stay as they are.
pub(crate) fn flatten(hyperparameters: &impl Serialize) -> Result<BTreeMap<String, Value>> {
    let value = serde_json::to_value(hyperparameters).map_err(|error| {
        Error::new(
            Kind::Misuse,
            format!("hyperparameters cannot be written as JSON: {error}"),
        )
        .with_source(error)
    })?;
    let mut flat = BTreeMap::new();
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                insert(&mut flat, key, value);
            }
        }
        Value::Null => {}
        other => {
            return Err(Error::new(
                Kind::Misuse,
                format!("hyperparameters must be a struct or a map, found {other}"),
            ));
        }
    }
    Ok(flat)
}

fn insert(flat: &mut BTreeMap<String, Value>, key: String, value: Value) {
    match value {
        Value::Object(map) if !map.is_empty() => {
            for (inner, value) in map {
                insert(flat, format!("{key}.{inner}"), value);
            }
        }
        value => {
            flat.insert(key, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nested_keys_are_joined_with_dots() {
        let flat = flatten(&serde_json::json!({
            "lr": 0.1, "model": { "layers": [1, 2], "conv": { "kernel": 3 }, "extra": {} }
        }));
        let expected = [
            ("lr", serde_json::json!(0.1)),
            ("model.conv.kernel", serde_json::json!(3)),
            ("model.extra", serde_json::json!({})),
            ("model.layers", serde_json::json!([1, 2])),
        ];
        let expected = expected.map(|(key, value)| (key.to_owned(), value));
        assert_eq!(flat.unwrap(), BTreeMap::from(expected));
        assert!(flatten(&3).unwrap_err().is_misuse());
        assert!(flatten(&()).unwrap().is_empty());
    }
}
