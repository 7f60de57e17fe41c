use std::path::Path;

use super::session::{BoxError, TrialContext, TrialSession};
use crate::config::Config;
use crate::metrics::Metrics;

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

    /// Goes on from what was saved, perhaps by another trial with another configuration.
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

/// Runs trials: a class or a function.
pub(super) trait RunTrial {
    /// Runs an attempt until it ends.
    fn run(&mut self, session: &mut TrialSession, config: &Config) -> Result<Outcome, BoxError>;
}

/// The outcome of an attempt that did not fail.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Outcome {
    /// It has nothing more to do, or was told to end.
    Done,
    /// It has not begun: another process is to do it.
    Refused,
}

/// The class API: a [`Trainable`], and what it made for the trial before.
#[derive(Debug)]
pub(super) struct ClassTrainable<T>(pub(super) Option<T>);

impl<T: Trainable> RunTrial for ClassTrainable<T> {
    fn run(&mut self, session: &mut TrialSession, config: &Config) -> Result<Outcome, BoxError> {
        // Taken, so that one that fails is not reused.
        let mut trained = match self.0.take() {
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
        self.0 = Some(trained);
        Ok(Outcome::Done)
    }
}

/// The function API.
#[derive(Debug)]
pub(super) struct FunctionTrainable<F>(pub(super) F);

impl<F> RunTrial for FunctionTrainable<F>
where
    F: FnMut(&mut TrialSession, &Config) -> Result<(), BoxError>,
{
    fn run(&mut self, session: &mut TrialSession, config: &Config) -> Result<Outcome, BoxError> {
        match (self.0)(session, config) {
            Err(_) if session.is_over() => Ok(Outcome::Done),
            ended => ended.map(|()| Outcome::Done),
        }
    }
}
