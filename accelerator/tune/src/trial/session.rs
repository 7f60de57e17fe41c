//! The session of a trial, and the trait `Trainable` by which a program implements one.

use std::net::TcpStream;
use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Instant;

use accelerator_host::sync::Mutex;

use super::protocol::{self, FromWorker, ToWorker};
use crate::config::{Config, TrialId};
use crate::error::{Error, Kind, Result};
use crate::runner::{Offer, Report, TrialStart};
use crate::value::Metrics;

/// An error of a trial's own work: `?` takes any error.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The trial that a process carries out.
#[derive(Clone, Debug)]
pub struct TrialContext(TrialStart);

impl TrialContext {
    /// The trial.
    #[must_use]
    pub fn trial(&self) -> TrialId {
        self.0.trial
    }

    /// The trial's own folder, for what it writes besides checkpoints.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.0.folder
    }

    /// The checkpoint that it continues from; none where it begins.
    #[must_use]
    pub fn checkpoint(&self) -> Option<&Path> {
        let restore = self.0.restore.as_ref();
        restore.map(|restore| restore.folder.as_path())
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
    pub(super) fn new(start: TrialStart, link: Link) -> Self {
        let restore = start.restore.as_ref();
        let iteration = restore.map_or(0, |restore| restore.iteration);
        Self {
            context: TrialContext(start),
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

    /// Reports what an iteration has measured, and waits until the search says how to continue.
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
        let report = {
            let mut progress = self.progress.lock();
            if progress.is_over {
                return Err(over());
            }
            progress.iteration += 1;
            Report {
                iteration: progress.iteration,
                metrics,
                seconds: progress.since.elapsed().as_secs_f64(),
                offer,
            }
        };
        let iteration = report.iteration;
        self.link.send(&FromWorker::Reported(report))?;
        let answer = self.link.next()?;
        if let ToWorker::Save { folder } | ToWorker::Pause { folder } = &answer {
            let message = match &mut save {
                Some(save) => {
                    save(folder).map_err(|error| {
                        let what = format!(
                            "the checkpoint after iteration {iteration} cannot be saved: {error}"
                        );
                        Error::new(Kind::Trial, what)
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

type Save<'a> = dyn FnMut(&Path) -> Result<(), BoxError> + 'a;

fn over() -> Error {
    Error::new(Kind::Trial, "the search has ended this trial")
}

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

    pub(super) fn next(&self) -> Result<ToWorker> {
        let messages = self.0.messages.lock();
        // The other end is a thread that ends with this process.
        messages
            .recv()
            .map_err(|_| Error::connection("the connection to the search has ended"))
    }
}

/// A training that a search carries out in steps: Ray Tune's `Trainable`.
///
/// ```
/// use std::path::Path;
///
/// use accelerator_tune::{BoxError, Config, Metrics, Trainable, TrialContext};
///
/// struct Line { x: f64, lr: f64 }
///
/// impl Trainable for Line {
///     fn setup(config: &Config, _context: &TrialContext) -> Result<Self, BoxError> {
///         Ok(Self { x: 5.0, lr: config.parse("lr")? })
///     }
///
///     fn step(&mut self) -> Result<Metrics, BoxError> {
///         self.x -= self.lr * 2.0 * self.x;
///         Ok(Metrics::from([("loss", self.x * self.x)]))
///     }
///
///     fn save_checkpoint(&mut self, folder: &Path) -> Result<(), BoxError> {
///         Ok(std::fs::write(folder.join("x"), self.x.to_string())?)
///     }
///
///     fn load_checkpoint(&mut self, folder: &Path) -> Result<(), BoxError> {
///         self.x = std::fs::read_to_string(folder.join("x"))?.parse()?;
///         Ok(())
///     }
/// }
/// ```
pub trait Trainable: Sized {
    /// Makes what is to be trained: model, data and optimizer. Called once for each attempt at a trial.
    ///
    /// Several trials run at the same time, so a data set that is downloaded here needs a lock.
    ///
    /// # Errors
    /// Any: the attempt fails.
    fn setup(config: &Config, context: &TrialContext) -> Result<Self, BoxError>;

    /// Trains for one iteration, such as an epoch, and measures.
    ///
    /// # Errors
    /// Any: the attempt fails.
    fn step(&mut self) -> Result<Metrics, BoxError>;

    /// Saves all that later steps depend on to a folder, which is empty. On several ranks each is called, with the same
    /// folder.
    ///
    /// # Errors
    /// Any: the attempt fails.
    fn save_checkpoint(&mut self, folder: &Path) -> Result<(), BoxError>;

    /// Continues from what was saved, perhaps by another trial with another configuration.
    ///
    /// # Errors
    /// Any: the attempt fails.
    fn load_checkpoint(&mut self, folder: &Path) -> Result<(), BoxError>;

    /// Returns `true` if the last step was the final one.
    fn is_done(&self) -> bool {
        false
    }

    /// Gives back what it holds, when the trial has ended or pauses.
    ///
    /// # Errors
    /// Any: the attempt fails.
    fn cleanup(&mut self) -> Result<(), BoxError> {
        Ok(())
    }

    /// Becomes what [`setup`](Self::setup) would make of another configuration, where workers are
    /// [reused](crate::WorkerReuse::Warm). A trial then costs no process, and its data stays loaded.
    ///
    /// # Errors
    /// Any: the attempt fails.
    fn reset_config(
        &mut self,
        _config: &Config,
        _context: &TrialContext,
    ) -> Result<Reset, BoxError> {
        Ok(Reset::Refused)
    }
}

/// The answer of a [`Trainable`] to another configuration.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Reset {
    /// It has taken the configuration.
    Done,
    /// It has not taken it: another process takes the trial.
    Refused,
}

/// The outcome of an attempt that did not fail.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Outcome {
    /// It has nothing more to do, or was told to end.
    Done,
    /// It has not begun: another process is to do it.
    Refused,
}

/// Makes an attempt at a trial of a class. `reused` is what the trial before has left, and is left for the next.
pub(super) fn run_class<T: Trainable>(
    reused: &mut Option<T>,
    session: &mut TrialSession,
    config: &Config,
) -> Result<Outcome, BoxError> {
    // Taken, so that one that fails is not reused.
    let mut trained = match reused.take() {
        None => T::setup(config, session)?,
        Some(mut before) => match before.reset_config(config, session)? {
            Reset::Done => before,
            Reset::Refused => return Ok(Outcome::Refused),
        },
    };
    if let Some(folder) = session.checkpoint() {
        trained.load_checkpoint(folder)?;
    }
    loop {
        let metrics = trained.step()?;
        let answer = session.report_step(metrics, |folder| trained.save_checkpoint(folder));
        match answer {
            Err(_) if session.is_over() => break,
            answer => answer?,
        }
        if trained.is_done() {
            break;
        }
    }
    trained.cleanup()?;
    *reused = Some(trained);
    Ok(Outcome::Done)
}
