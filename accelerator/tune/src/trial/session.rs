use std::net::TcpStream;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Instant;

use accelerator_host::sync::Mutex;

use super::protocol::{self, FromWorker, ToWorker};
use crate::error::{Error, Kind, Result};
use crate::metrics::Metrics;
use crate::runner::{Offer, Restore};
use crate::trial_id::TrialId;

/// An error of a trial's own work: `?` takes any error.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The trial that a process carries out, and its place.
#[derive(Clone, Debug)]
pub struct TrialContext {
    pub(super) trial: TrialId,
    pub(super) folder: PathBuf,
    pub(super) restore: Option<Restore>,
    pub(super) rank: usize,
    pub(super) world_size: usize,
}

impl TrialContext {
    /// The trial.
    #[must_use]
    pub fn trial(&self) -> TrialId {
        self.trial
    }

    /// The trial's own folder, for what it writes besides checkpoints.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The checkpoint that it goes on from; none where it begins.
    #[must_use]
    pub fn checkpoint(&self) -> Option<&Path> {
        self.restore
            .as_ref()
            .map(|restore| restore.folder.as_path())
    }

    /// Returns the rank of this process among the trial's.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the number of the trial's processes.
    #[must_use]
    pub fn world_size(&self) -> usize {
        self.world_size
    }
}

/// A handle by which a trial that is a function reports. It dereferences to its [`TrialContext`]. Clones are the same
/// session.
///
/// ```
/// use accelerator_tune::{BoxError, Config, TrialSession};
///
/// fn train(trial: &mut TrialSession, config: &Config) -> Result<(), BoxError> {
///     let mut x: f64 = match trial.checkpoint() {
///         Some(folder) => std::fs::read_to_string(folder.join("x"))?.parse()?,
///         None => 5.0,
///     };
///     let lr: f64 = config.parse("lr")?;
///     loop {
///         x -= lr * 2.0 * x;
///         trial.report_with([("loss", x * x)], |folder| {
///             Ok(std::fs::write(folder.join("x"), x.to_string())?)
///         })?;
///     }
/// }
/// ```
#[derive(Clone, Debug)]
pub struct TrialSession {
    context: TrialContext,
    link: Link,
    progress: Arc<Mutex<Progress>>,
}

#[derive(Debug)]
struct Progress {
    iteration: u64,
    since: Instant,
    is_over: bool,
}

impl TrialSession {
    pub(super) fn new(context: TrialContext, link: Link) -> Self {
        let iteration = context
            .restore
            .as_ref()
            .map_or(0, |restore| restore.iteration);
        Self {
            context,
            link,
            progress: Arc::new(Mutex::new(Progress {
                iteration,
                since: Instant::now(),
                is_over: false,
            })),
        }
    }

    /// Returns the number of iterations done, including those before the checkpoint.
    #[must_use]
    pub fn iteration(&self) -> u64 {
        self.progress.lock().iteration
    }

    /// Reports what an iteration has measured, and waits until the search says how to go on.
    ///
    /// A trial that reports so has no checkpoints: it begins anew where it is continued.
    ///
    /// # Errors
    /// If the trial is to end: return the error, after giving back what has to be given back.
    pub fn report(&mut self, metrics: impl Into<Metrics>) -> Result<()> {
        self.wait_for_answer(metrics.into(), None, Offer::Nothing)
    }

    /// Reports a checkpoint besides: `save` is called with an empty folder, after each such report, or as often as
    /// [`CheckpointSettings::frequency`](crate::CheckpointSettings::frequency) says. Schedulers may ask for more.
    ///
    /// # Errors
    /// If the trial is to end, or `save` fails: return the error.
    pub fn report_with(
        &mut self,
        metrics: impl Into<Metrics>,
        mut save: impl FnMut(&Path) -> Result<(), BoxError>,
    ) -> Result<()> {
        self.wait_for_answer(metrics.into(), Some(&mut save), Offer::Checkpoint)
    }

    /// Reports, and saves where the search asks for a checkpoint.
    pub(super) fn report_step(
        &mut self,
        metrics: Metrics,
        mut save: impl FnMut(&Path) -> Result<(), BoxError>,
    ) -> Result<()> {
        self.wait_for_answer(metrics, Some(&mut save), Offer::Nothing)
    }

    /// Returns `true` once the search has asked the trial to end.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.progress.lock().is_over
    }

    fn wait_for_answer(
        &mut self,
        metrics: Metrics,
        mut save: Option<&mut Save<'_>>,
        offer: Offer,
    ) -> Result<()> {
        let (iteration, seconds) = {
            let mut progress = self.progress.lock();
            if progress.is_over {
                return Err(over());
            }
            progress.iteration += 1;
            (progress.iteration, progress.since.elapsed().as_secs_f64())
        };
        self.link.send(&FromWorker::Reported {
            iteration,
            metrics,
            seconds,
            offer,
        })?;
        let answer = self.link.next()?;
        if let ToWorker::Save { folder } | ToWorker::Pause { folder } = &answer {
            let message = match &mut save {
                Some(save) => {
                    save(folder).map_err(|error| {
                        Error::trial(format!(
                            "the checkpoint after iteration {iteration} cannot be saved: {error}"
                        ))
                    })?;
                    FromWorker::Saved
                }
                None => FromWorker::Skipped,
            };
            self.link.send(&message)?;
        }
        let mut progress = self.progress.lock();
        progress.since = Instant::now();
        match answer {
            ToWorker::Continue | ToWorker::Save { .. } => Ok(()),
            _ => {
                progress.is_over = true;
                Err(over())
            }
        }
    }
}

impl Deref for TrialSession {
    type Target = TrialContext;

    fn deref(&self) -> &TrialContext {
        &self.context
    }
}

/// Saves to a folder.
type Save<'a> = dyn FnMut(&Path) -> Result<(), BoxError> + 'a;

fn over() -> Error {
    Error::new(Kind::Trial, "the search has ended this trial")
}

/// A connection to the search.
#[derive(Clone, Debug)]
pub(super) struct Link(Arc<LinkEnds>);

#[derive(Debug)]
struct LinkEnds {
    stream: TcpStream,
    messages: Mutex<Receiver<ToWorker>>,
}

impl Link {
    pub(super) fn new(stream: TcpStream, messages: Receiver<ToWorker>) -> Self {
        Self(Arc::new(LinkEnds {
            stream,
            messages: Mutex::new(messages),
        }))
    }

    pub(super) fn send(&self, message: &FromWorker) -> Result<()> {
        protocol::send(&self.0.stream, message)
    }

    /// The next message of the search.
    pub(super) fn next(&self) -> Result<ToWorker> {
        let messages = self.0.messages.lock();
        // The other end is a thread that ends with this process.
        messages
            .recv()
            .map_err(|_| Error::connection("the connection to the search has ended"))
    }
}
