use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

use accelerator_host::sync::Mutex;

use super::distribute::from_main;
use super::saved::Saved;
use crate::context::Context;
use crate::core::error::{Error, Kind, Result};
use crate::core::panic_text::panic_text;
use crate::core::user_message;
use crate::reduce::{SaveProgress, WatchedSave};

/// The state of saves that an accelerator keeps between them.
#[derive(Debug)]
pub(crate) struct Ongoing {
    factor: Mutex<f64>,
    /// The number of the last checkpoint that this rank has begun, by folder.
    numbers: Mutex<HashMap<PathBuf, u64>>,
    /// The folders that this rank was told to resume from.
    resumed: Mutex<HashSet<PathBuf>>,
    /// The save whose outcome was not told yet.
    work: Mutex<Option<Arc<BackgroundSave>>>,
}

impl Default for Ongoing {
    fn default() -> Self {
        Self {
            factor: Mutex::new(1.0),
            numbers: Mutex::default(),
            resumed: Mutex::default(),
            work: Mutex::new(None),
        }
    }
}

impl Ongoing {
    /// Returns the factor on learning rates since the number of ranks changed.
    pub(super) fn factor(&self) -> f64 {
        *self.factor.lock()
    }

    pub(super) fn set_factor(&self, factor: f64) {
        *self.factor.lock() = factor;
    }

    /// Notes that the program resumes what it finds in a folder.
    pub(super) fn resumes(&self, folder: &Path) {
        self.resumed.lock().insert(absolute(folder));
    }

    /// Notes that the checkpoint of that number comes next in a folder, unless somebody else has saved
    /// there since this rank did.
    pub(super) fn comes_next(&self, folder: &Path, number: u64) -> Result<()> {
        let folder = absolute(folder);
        let mut numbers = self.numbers.lock();
        if number > 1 && !numbers.contains_key(&folder) && !self.resumed.lock().contains(&folder) {
            user_message::warn(&format!(
                "`{}` holds checkpoint {} of an earlier run, which this one did not resume: a later `resume` \
                 takes the newest of both; call `resume` first, or give each run a folder of its own",
                folder.display(),
                number - 1
            ));
        }
        if let Some(last) = numbers.get(&folder)
            && number > last + 1
        {
            return Err(Error::new(
                Kind::Checkpoint,
                format!(
                    "another job saves into `{}`: this one saved checkpoint {last}, and {} is there; a \
                     resume would go on from whichever is newer, so give each job a folder of its own",
                    folder.display(),
                    number - 1
                ),
            ));
        }
        numbers.insert(folder, number);
        Ok(())
    }

    pub(super) fn begin(&self, work: Arc<BackgroundSave>) {
        *self.work.lock() = Some(work);
    }

    /// Waits for an earlier save, and tells every rank how it went.
    #[track_caller]
    pub(crate) fn settle(&self, context: &Context) -> Result<()> {
        let work = self.work.lock().take();
        work.map_or(Ok(()), |work| work.settle(context).map(|_| ()))
    }

    /// Waits, on this rank alone, for a save that it has begun.
    pub(super) fn join(&self) {
        if let Some(work) = &*self.work.lock()
            && let Some(Err(error)) = work.join()
        {
            tracing::error!("the checkpoint that was begun before could not be saved: {error:?}");
        }
    }

    /// The same, where how it went is told when the save is dropped.
    pub(super) fn complete(&self) {
        if let Some(work) = &*self.work.lock() {
            let _ = work.join();
        }
    }

    pub(super) fn forget(&self, settled: &Arc<BackgroundSave>) {
        let mut work = self.work.lock();
        if work.as_ref().is_some_and(|work| Arc::ptr_eq(work, settled)) {
            *work = None;
        }
    }
}

/// A thread that writes a checkpoint, on rank 0; on the others, the knowledge that there is one.
#[derive(Debug, Default)]
pub(crate) struct BackgroundSave {
    thread: Mutex<Option<JoinHandle<Result<Saved>>>>,
    /// The outcome of the thread.
    ended: OnceLock<Result<Saved>>,
    /// The outcome that rank 0 has sent to all ranks.
    told: OnceLock<Result<Saved>>,
    /// The progress that every rank knows before that.
    progress: Mutex<SaveProgress>,
}

impl BackgroundSave {
    /// Runs `write` on a thread of its own; where none can be had, that is the outcome.
    pub(super) fn start(write: impl FnOnce() -> Result<Saved> + Send + 'static) -> Arc<Self> {
        let work = Self::default();
        let thread = std::thread::Builder::new()
            .name("checkpoint".to_owned())
            .spawn(write);
        match thread {
            Ok(thread) => *work.thread.lock() = Some(thread),
            Err(error) => {
                let message = "the thread that writes the checkpoint could not be started";
                let error = Error::new(Kind::Io, message).with_source(error);
                let _ = work.ended.set(Err(error));
            }
        }
        Arc::new(work)
    }

    pub(super) fn progress(&self) -> SaveProgress {
        match self.told.get() {
            Some(_) => SaveProgress::Done,
            None => *self.progress.lock(),
        }
    }

    #[track_caller]
    pub(super) fn settle(&self, context: &Context) -> Result<Saved> {
        if let Some(told) = self.told.get() {
            return told.clone();
        }
        let outcome = from_main(context, "save the checkpoint", || {
            let none = || {
                Err(Error::misuse(
                    "rank 0 writes checkpoints, and has begun none",
                ))
            };
            self.join().unwrap_or_else(none)
        });
        self.told.get_or_init(|| outcome).clone()
    }

    /// Waits for the thread and returns its outcome; `None` if there never was one.
    pub(super) fn join(&self) -> Option<Result<Saved>> {
        if let Some(thread) = self.thread.lock().take() {
            let ended = thread.join().unwrap_or_else(|panic| {
                let what = panic_text(&*panic);
                let message = format!("writing the checkpoint panicked: {what}");
                Err(Error::new(Kind::Panic, message))
            });
            let _ = self.ended.set(ended);
        }
        self.ended.get().cloned()
    }
}

impl WatchedSave for BackgroundSave {
    fn has_ended(&self) -> bool {
        let thread = self.thread.lock();
        self.ended.get().is_some() || thread.as_ref().is_some_and(JoinHandle::is_finished)
    }

    /// Records the progress, unless the save is known to be done.
    fn hear(&self, progress: SaveProgress) {
        let mut known = self.progress.lock();
        if *known != SaveProgress::Done {
            *known = progress;
        }
    }
}

impl Drop for BackgroundSave {
    fn drop(&mut self) {
        if self.told.get().is_none()
            && let Some(Err(error)) = self.join()
        {
            tracing::error!("a checkpoint could not be saved: {error:?}");
        }
    }
}

fn absolute(folder: &Path) -> PathBuf {
    folder.canonicalize().unwrap_or_else(|_| folder.to_owned())
}
