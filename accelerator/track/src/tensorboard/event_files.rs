//! The event files of a run in a folder: their names, and how new ones take the place of old ones.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use super::event::{Event, EventKind, SummaryValue};
use super::protobuf::Message;
use super::record_file::RecordFile;
use crate::error::{Error, Result};
use crate::run_id::RunId;
use crate::sink::RunInfo;

/// What makes a file one of events, to TensorBoard.
const PREFIX: &str = "events.out.tfevents.";

/// A file that grows, and one that is read before it.
///
/// Readers take files in the order of their names, and keep the first word about a run's hyperparameters and end. So what
/// becomes known later is written to a file that comes before: a reader that starts then finds the last word first.
#[derive(Debug)]
pub(super) struct EventFiles {
    folder: PathBuf,
    run: RunId,
    created_ms: u64,
    /// In names where others have the time of their creation: greater than in every name that is there.
    order: u64,
    events: RecordFile<File>,
    message: Message,
    is_visible: bool,
}

impl EventFiles {
    /// Begins the run anew, in a file that no reader sees before it is flushed.
    pub(super) fn create(folder: &Path, run: &RunInfo) -> Result<Self> {
        fs::create_dir_all(folder).map_err(|e| Error::io("create the folder", folder, e))?;
        let names = names(folder)?;
        let greatest = names.iter().filter_map(|name| order(name)).max();
        let created = run.created_ms / 1000;
        let path = folder.join(hidden_name(run.id));
        let file = File::create(&path).map_err(|e| Error::io("create the file", &path, e))?;
        let mut files = Self {
            folder: folder.to_owned(),
            run: run.id,
            created_ms: run.created_ms,
            order: greatest.map_or(created, |greatest| created.max(greatest + 1)),
            events: RecordFile::new(file),
            message: Message::default(),
            is_visible: false,
        };
        files.write(run.created_ms, 0, EventKind::FileVersion)?;
        // One reader needs this to give up what it holds, and passes over the first of them that it sees.
        files.write(run.created_ms, 0, EventKind::SessionStart)?;
        Ok(files)
    }

    pub(super) fn write(&mut self, ms: u64, step: u64, kind: EventKind<'_>) -> Result<()> {
        Event { ms, step, kind }.encode(&mut self.message);
        self.events
            .write(self.message.bytes())
            .map_err(|e| Error::io("write event files in", &self.folder, e))
    }

    /// Makes what was written visible; the first time, instead of what was there of this run.
    pub(super) fn flush(&mut self) -> Result<()> {
        self.events
            .flush()
            .map_err(|e| Error::io("write event files in", &self.folder, e))?;
        if !self.is_visible {
            self.rename(&self.path_of_events())?;
            self.is_visible = true;
            self.remove_older()?;
        }
        Ok(())
    }

    /// Says something that is read before what was written here earlier, and instead of what this said earlier.
    pub(super) fn write_before(&self, values: &[SummaryValue<'_>]) -> Result<()> {
        let path = self.folder.join(format!("{}.first", hidden_name(self.run)));
        let write = || {
            let mut file = RecordFile::new(File::create(&path)?);
            let mut message = Message::default();
            for kind in [EventKind::FileVersion, EventKind::Summary(values)] {
                let (ms, step) = (self.created_ms, 0);
                Event { ms, step, kind }.encode(&mut message);
                file.write(message.bytes())?;
            }
            file.flush()?;
            fs::rename(&path, self.path_before())
        };
        write().map_err(|e| Error::io("write", &path, e))
    }

    fn path_before(&self) -> PathBuf {
        self.path("0")
    }

    fn path_of_events(&self) -> PathBuf {
        self.path("1")
    }

    fn path(&self, place: &str) -> PathBuf {
        let Self { order, run, .. } = self;
        self.folder
            .join(format!("{PREFIX}{order:010}.{place}.{run}"))
    }

    fn rename(&self, path: &Path) -> Result<()> {
        let hidden = self.folder.join(hidden_name(self.run));
        fs::rename(&hidden, path).map_err(|e| Error::io("rename", &hidden, e))
    }

    /// Removes this run's files of earlier times. Other programs' stay, and so do those of other runs.
    fn remove_older(&self) -> Result<()> {
        let end = format!(".{}", self.run);
        let kept = [self.path_before(), self.path_of_events()];
        for name in names(&self.folder)? {
            let path = self.folder.join(&name);
            if !name.starts_with(PREFIX) || !name.ends_with(&end) || kept.contains(&path) {
                continue;
            }
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => tracing::warn!(
                    "cannot remove {}: {error}; until it is removed, TensorBoard may show what was taken back",
                    path.display()
                ),
                _ => {}
            }
        }
        Ok(())
    }
}

/// The name of a file that is not to be read yet. There is one a run, so none is left behind for ever.
fn hidden_name(run: RunId) -> String {
    format!(".accel-{run}")
}

fn order(name: &str) -> Option<u64> {
    let (order, _) = name.strip_prefix(PREFIX)?.split_once('.')?;
    // Ten digits sort as numbers do.
    order.parse().ok().filter(|order| *order < 9_999_999_999)
}

fn names(folder: &Path) -> Result<Vec<String>> {
    let read = || {
        fs::read_dir(folder)?
            .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
            .collect::<io::Result<_>>()
    };
    read().map_err(|e| Error::io("read the folder", folder, e))
}
