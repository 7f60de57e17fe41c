//! The runs of a folder, read again as they change.

use std::collections::{BTreeMap, VecDeque};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, SystemTime};

use serde::Serialize;

use crate::error::Result;
use crate::history::{HistoryReader, RunHistory, RunStatus};
use crate::journal::{JOURNAL, RunLock, rank_journals};
use crate::report::{Columns, ImageSource, MOST_POINTS, PageDetail, PageRun};

/// The runs of a folder. Of those that are not being written only what a page shows is kept.
#[derive(Debug)]
pub(super) struct WatchedRuns {
    folder: PathBuf,
    known: Mutex<Known>,
}

/// What a page shows of a run.
#[derive(Debug)]
pub(super) struct WatchedRun {
    folder: PathBuf,
    summary: PageRun,
    detail: PageDetail,
    series: Vec<(String, Columns)>,
}

/// What has changed since a page asked last.
#[derive(Debug, Serialize)]
pub(super) struct RunChanges {
    /// To be given with the next question.
    version: u64,
    /// How many runs are still to be read.
    reading: usize,
    /// The numbers of all runs.
    ids: Vec<usize>,
    runs: Vec<VersionedRun>,
    /// Why runs cannot be read.
    refused: Vec<String>,
}

#[derive(Debug, Serialize)]
struct VersionedRun {
    version: u64,
    #[serde(flatten)]
    summary: PageRun,
}

#[derive(Debug, Default)]
struct Known {
    /// Counts the changes.
    version: u64,
    reading: usize,
    /// By number; numbers are not used again.
    slots: Vec<RunSlot>,
}

#[derive(Debug)]
struct RunSlot {
    folder: PathBuf,
    version: u64,
    content: Option<Result<Arc<WatchedRun>>>,
}

impl WatchedRuns {
    pub(super) fn new(folder: PathBuf) -> Self {
        Self {
            folder,
            known: Mutex::default(),
        }
    }

    /// What the page is called.
    pub(super) fn title(&self) -> String {
        let folder = self.folder.canonicalize();
        let folder = folder.as_ref().unwrap_or(&self.folder);
        let name = folder.file_name().unwrap_or(folder.as_os_str());
        name.to_string_lossy().into_owned()
    }

    pub(super) fn get(&self, i: usize) -> Option<Arc<WatchedRun>> {
        match self.known().slots.get(i)?.content.as_ref()? {
            Ok(run) => Some(Arc::clone(run)),
            Err(_) => None,
        }
    }

    /// Of the runs that have been read.
    pub(super) fn numbers(&self) -> Vec<usize> {
        self.known().numbers()
    }

    pub(super) fn changes(&self, since: u64) -> RunChanges {
        let known = self.known();
        let ids = known.numbers();
        let mut changes = RunChanges {
            version: known.version,
            reading: known.reading,
            ids,
            runs: Vec::new(),
            refused: Vec::new(),
        };
        for slot in &known.slots {
            match &slot.content {
                Some(Ok(run)) if slot.version > since => changes.runs.push(VersionedRun {
                    version: slot.version,
                    summary: run.summary.clone(),
                }),
                Some(Err(error)) => changes.refused.push(error.to_string()),
                _ => {}
            }
        }
        changes
    }

    /// Reads what changes, until the process ends.
    pub(super) fn watch(&self) {
        let mut seen = BTreeMap::new();
        loop {
            self.look(&mut seen);
            thread::sleep(PAUSE);
        }
    }

    /// Reads the runs that changed since the last look, several at a time, the newest first.
    pub(super) fn look(&self, seen: &mut BTreeMap<PathBuf, Seen>) {
        let found = run_folders(&self.folder);
        seen.retain(|folder, _| found.contains(folder));
        self.forget_all_but(&found);
        let mut due: Vec<Due> = Vec::new();
        for folder in found {
            let stamp = RunStamp::of(&folder);
            let before = seen.remove(&folder);
            match before {
                Some(before) if before.stamp == stamp => {
                    seen.insert(folder, before);
                }
                before => due.push(Due {
                    reader: before.and_then(|seen| seen.reader),
                    folder,
                    stamp,
                }),
            }
        }
        due.sort_by_key(|due| std::cmp::Reverse(due.stamp.modified));
        self.known().reading = due.len();
        let workers = thread::available_parallelism()
            .map_or(2, usize::from)
            .min(due.len());
        let queue = Mutex::new(VecDeque::from(due));
        let read = Mutex::new(Vec::new());
        let work = || {
            while let Some(due) = { lock(&queue).pop_front() } {
                lock(&read).push(self.read(due));
            }
        };
        thread::scope(|scope| {
            for _ in 1..workers {
                scope.spawn(work);
            }
            work();
        });
        seen.extend(read.into_inner().unwrap_or_else(PoisonError::into_inner));
    }

    fn read(&self, due: Due) -> (PathBuf, Seen) {
        let Due {
            folder,
            stamp,
            reader,
        } = due;
        let i = self.number_of(&folder);
        let read = match reader {
            Some(reader) => Ok(reader),
            None => HistoryReader::open(&folder),
        };
        let read = read.and_then(|mut reader| reader.poll().map(|_| reader));
        let mut is_running = false;
        let content = read.as_ref().map_err(Clone::clone).map(|reader| {
            let run = reader.history();
            is_running = run.status() == RunStatus::Running;
            Arc::new(WatchedRun::of(run, i))
        });
        let mut known = self.known();
        known.version += 1;
        known.reading -= 1;
        known.slots[i].version = known.version;
        known.slots[i].content = Some(content);
        let reader = read.ok().filter(|_| is_running);
        (folder, Seen { stamp, reader })
    }

    fn number_of(&self, folder: &Path) -> usize {
        let mut known = self.known();
        match known.slots.iter().position(|slot| slot.folder == folder) {
            Some(i) => i,
            None => {
                known.slots.push(RunSlot {
                    folder: folder.to_owned(),
                    version: 0,
                    content: None,
                });
                known.slots.len() - 1
            }
        }
    }

    fn forget_all_but(&self, folders: &[PathBuf]) {
        for slot in &mut self.known().slots {
            if !folders.contains(&slot.folder) {
                slot.content = None;
            }
        }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        lock(&self.known)
    }
}

impl Known {
    fn numbers(&self) -> Vec<usize> {
        let slots = self.slots.iter().enumerate();
        slots
            .filter(|(_, slot)| matches!(slot.content, Some(Ok(_))))
            .map(|(i, _)| i)
            .collect()
    }
}

impl WatchedRun {
    fn of(run: &RunHistory, i: usize) -> Self {
        let images = format!("api/blob?run={i}&hash=");
        let series = run.series.iter().map(|series| {
            let columns = Columns::of(&series.points, run.created_ms, MOST_POINTS);
            (series.key.clone(), columns)
        });
        Self {
            folder: run.folder.clone(),
            summary: PageRun::of(run, i),
            detail: PageDetail::of(run, ImageSource::Address(&images)),
            series: series.collect(),
        }
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    pub(super) fn detail(&self) -> &PageDetail {
        &self.detail
    }

    pub(super) fn columns(&self, key: &str) -> Option<&Columns> {
        let mut found = self.series.iter().filter(|(name, _)| name == key);
        found.next().map(|(_, columns)| columns)
    }
}

/// A run as it was when it was read.
#[derive(Debug)]
pub(super) struct Seen {
    stamp: RunStamp,
    /// Of a run that is being written.
    reader: Option<HistoryReader>,
}

/// What is different when a run has changed.
#[derive(Clone, Debug, PartialEq)]
struct RunStamp {
    modified: Option<SystemTime>,
    lengths: Vec<u64>,
    is_written_now: bool,
}

#[derive(Debug)]
struct Due {
    folder: PathBuf,
    stamp: RunStamp,
    reader: Option<HistoryReader>,
}

impl RunStamp {
    fn of(folder: &Path) -> Self {
        let journal = fs::metadata(folder.join(JOURNAL)).ok();
        let mut ranks = rank_journals(folder);
        ranks.sort();
        let ranks = ranks
            .iter()
            .map(|(_, path)| fs::metadata(path).map_or(0, |file| file.len()));
        let length = journal.as_ref().map_or(0, fs::Metadata::len);
        Self {
            modified: journal.and_then(|file| file.modified().ok()),
            lengths: std::iter::once(length).chain(ranks).collect(),
            is_written_now: RunLock::is_held(folder),
        }
    }
}

const PAUSE: Duration = Duration::from_secs(1);

/// The folders of runs in a folder, or the folder itself if it is a run's.
fn run_folders(folder: &Path) -> Vec<PathBuf> {
    let is_run = |path: &Path| path.join(JOURNAL).is_file();
    if is_run(folder) {
        return vec![folder.to_owned()];
    }
    let Ok(inside) = folder.read_dir() else {
        return Vec::new();
    };
    let folders = inside.filter_map(|entry| Some(entry.ok()?.path()));
    folders.filter(|path| is_run(path)).collect()
}

/// What a thread that panicked has left is whole: it is replaced in one step.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
