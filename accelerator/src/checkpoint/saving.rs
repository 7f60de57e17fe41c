//! Saves under way in the background, and the state that a rank keeps between saves.

use core::fmt;
use std::collections::{HashMap, HashSet};
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

use accelerator_host::sync::Mutex;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::state_file::LiveState;
use crate::context::Context;
use crate::core::error::{self, Error, Kind, Result, panic_text};
use crate::reduce::{ReduceContext, SaveProgress, WatchedSave};
use crate::tracking::Tracking;

/// A checkpoint that is being written while training continues; from
/// [`Accelerator::save_state_async`](crate::Accelerator::save_state_async).
///
/// Dropping it changes nothing: the checkpoint is completed all the same. How it went is told by
/// [`wait`](Self::wait), by the next save, or by [`finish`](crate::Accelerator::finish), whichever
/// comes first; a program that ends without any of them still waits, on rank 0, for the writing.
///
/// ```
/// use accelerator::checkpoint::Saving;
/// use accelerator::prelude::*;
/// # let folder = tempfile::tempdir().unwrap();
/// # let folder = folder.path();
///
/// let numbers = launch(2, |accelerator| {
///     let saving: Saving = accelerator.save_state_async(folder, Object(&"state"))?;
///     while !saving.is_done()? {
///         // Train on: a step here.
///         std::thread::yield_now();
///     }
///     Ok(saving.wait()?.number())
/// })?;
/// assert_eq!(numbers, [1, 1]);
/// # Ok::<(), Error>(())
/// ```
#[must_use = "`wait` tells how it went; so do the next save and `finish`"]
pub struct Saving {
    context: Arc<CheckpointContext>,
    work: Arc<BackgroundSave>,
}

impl Saving {
    pub(super) fn new(context: Arc<CheckpointContext>, work: Arc<BackgroundSave>) -> Self {
        Self { context, work }
    }

    /// Waits until the checkpoint is complete. Every rank must call it.
    ///
    /// # Errors
    ///
    /// The errors of [`save_state`](crate::Accelerator::save_state), on every rank.
    #[track_caller]
    pub fn wait(self) -> Result<Saved> {
        let outcome = self.work.settle(&self.context);
        self.context.forget(&self.work);
        outcome
    }

    /// Returns `true` if rank 0 has written the checkpoint or failed to, so [`wait`](Self::wait) will not take long:
    /// the same answer on every rank. Every rank must call it at the same point of the loop, so that all leave the
    /// loop at the same step.
    ///
    /// It costs nothing where gradients travel anyhow:
    ///
    /// - If a window of gradients was reduced since the last call, the answer is what came with it: whether
    ///   rank 0 was done at the end of its backward pass.
    /// - Otherwise rank 0 tells the others, which is a broadcast of one byte; so it does where the call comes
    ///   right after another one.
    /// - After the answer was "yes" it stays so, and nothing is asked.
    ///
    /// # Errors
    ///
    /// [`Error::is_collective`](crate::Error::is_collective) when rank 0 has to be asked and a rank is lost.
    #[track_caller]
    pub fn is_done(&self) -> Result<bool> {
        let (group, work) = (self.context.group(), &self.work);
        if group.world_size() == 1 {
            return Ok(work.has_ended());
        }
        match work.progress() {
            SaveProgress::Done => Ok(true),
            SaveProgress::Writing => {
                work.hear(SaveProgress::Unknown);
                Ok(false)
            }
            SaveProgress::Unknown => {
                let mut done = [u8::from(work.has_ended())];
                let asking = group.for_purpose("whether the checkpoint is written");
                asking.broadcast(&mut done, 0)?;
                if done == [1] {
                    work.hear(SaveProgress::Done);
                }
                Ok(done == [1])
            }
        }
    }
}

impl fmt::Debug for Saving {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Saving").finish_non_exhaustive()
    }
}

/// A checkpoint that was saved; for the hook of [`Checkpoints::before_save`](super::Checkpoints::before_save), the one
/// that is about to be complete.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Saved {
    pub(super) number: u64,
    pub(super) path: PathBuf,
    pub(super) step: u64,
}

impl Saved {
    /// Returns its number: 1 for the first in a folder.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Returns its folder, on the host of the rank that wrote it: for
    /// [`before_save`](super::Checkpoints::before_save), the one in which it lies until it is complete.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the number of optimizer steps done.
    pub fn step(&self) -> u64 {
        self.step
    }
}

/// A rank that saves checkpoints: its [`ReduceContext`], with what it keeps between saves.
#[derive(Debug)]
pub(crate) struct CheckpointContext {
    /// The factor on learning rates since the number of ranks changed.
    factor: Mutex<f64>,
    /// The state that rank 0 has taken along from the group before, until the program resumes.
    live: Mutex<Option<Arc<LiveState>>>,
    /// The number of the last checkpoint that this rank has begun, by folder.
    numbers: Mutex<HashMap<PathBuf, u64>>,
    reduction: Arc<ReduceContext>,
    /// The folders that this rank was told to resume from.
    resumed: Mutex<HashSet<PathBuf>>,
    pub(super) tracking: Arc<Tracking>,
    /// The save whose outcome was not told yet.
    work: Mutex<Option<Arc<BackgroundSave>>>,
}

impl CheckpointContext {
    pub(crate) fn new(reduction: Arc<ReduceContext>, tracking: Arc<Tracking>) -> Self {
        Self {
            factor: Mutex::new(1.0),
            live: Mutex::default(),
            numbers: Mutex::default(),
            reduction,
            resumed: Mutex::default(),
            tracking,
            work: Mutex::default(),
        }
    }

    pub(crate) fn go_on_from(&self, live: Option<Arc<LiveState>>) {
        *self.live.lock() = live;
    }

    pub(crate) fn live(&self) -> Option<Arc<LiveState>> {
        self.live.lock().clone()
    }

    pub(super) fn factor(&self) -> f64 {
        *self.factor.lock()
    }

    pub(super) fn set_factor(&self, factor: f64) {
        *self.factor.lock() = factor;
    }

    pub(super) fn resumes(&self, folder: &Path) {
        self.resumed.lock().insert(absolute(folder));
    }

    /// Notes that the checkpoint of that number comes next in a folder, unless somebody else has saved
    /// there since this rank did.
    pub(super) fn comes_next(&self, folder: &Path, number: u64) -> Result<()> {
        let folder = absolute(folder);
        let mut numbers = self.numbers.lock();
        if number > 1 && !numbers.contains_key(&folder) && !self.resumed.lock().contains(&folder) {
            error::warn(&format!(
                "`{}` holds checkpoint {} of an earlier run, which this one did not resume: a later `resume` \
                 takes the newest of both; call `resume` first, or give each run a folder of its own",
                folder.display(),
                number - 1
            ));
        }
        if let Some(last) = numbers.get(&folder)
            && number > last + 1
        {
            return Err(Error::checkpoint(format!(
                "another job saves into `{}`: this one saved checkpoint {last}, and {} is there; a \
                     resume would continue from whichever is newer, so give each job a folder of its own",
                folder.display(),
                number - 1
            )));
        }
        numbers.insert(folder, number);
        Ok(())
    }

    pub(super) fn begin(&self, work: Arc<BackgroundSave>) {
        *self.work.lock() = Some(work);
    }

    /// Waits for a save that was begun, and tells every rank how it went.
    #[track_caller]
    pub(crate) fn settle(&self) -> Result<()> {
        match self.work.lock().take() {
            Some(work) => work.settle(self).map(drop),
            None => Ok(()),
        }
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
    pub(crate) fn complete(&self) {
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

impl Deref for CheckpointContext {
    type Target = ReduceContext;

    fn deref(&self) -> &ReduceContext {
        &self.reduction
    }
}

/// A thread that writes a checkpoint, on rank 0; on the others, the knowledge that there is one.
#[derive(Debug, Default)]
pub(crate) struct BackgroundSave {
    thread: Mutex<Option<JoinHandle<Result<Saved>>>>,
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
            self.join().unwrap_or_else(|| Err(none_begun()))
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

pub(super) fn none_begun() -> Error {
    Error::misuse("rank 0 writes checkpoints, and has begun none")
}

const CHUNK: usize = 64 << 20;

/// Runs `work` on rank 0 and returns its result on every rank; if it fails, every rank gets the error. Work that
/// takes long shows that it is alive.
#[track_caller]
pub(super) fn from_main<T: Serialize + DeserializeOwned>(
    context: &Context,
    action: &str,
    work: impl FnOnce() -> Result<T>,
) -> Result<T> {
    if context.world_size() == 1 {
        return work();
    }
    let mine = context.on_main(action, work)?;
    let reading = context.group().for_purpose(action);
    Ok(reading.broadcast_object(mine.as_ref(), 0)?)
}

#[track_caller]
pub(super) fn bytes_from_main(
    context: &Context,
    action: &str,
    read: impl FnOnce() -> Result<Vec<u8>>,
) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let length = from_main(context, action, || {
        bytes = read()?;
        Ok(bytes.len() as u64)
    })?;
    bytes.resize(length as usize, 0);
    if context.world_size() > 1 {
        for chunk in bytes.chunks_mut(CHUNK) {
            context.group().broadcast(chunk, 0)?;
        }
    }
    Ok(bytes)
}
