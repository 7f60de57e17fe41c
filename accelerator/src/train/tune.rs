//! Trainers as trials of a hyperparameter search.

use std::path::{Path, PathBuf};
use std::{fmt, fs, io};

use accelerator_tune::{BoxError, Config, Trainable, TrialContext, TrialSession};

use super::arguments::ResumeFrom;
use super::callback::{CallbackContext, TrainerCallback};
use super::operator::{OperatorTrainer, TrainingOperator};
use super::state::{Metrics, TrainerControl};
use crate::accelerator::Accelerator;
use crate::checkpoint::Saved;
use crate::core::error::{Error, Result};

/// Makes a [`TrainingOperator`] tunable by a search, as Ray's `TorchTrainer.as_trainable` does.
///
/// An iteration is an epoch of training and a validation, with the metrics of both: the operator has validation data. The
/// operator's configuration is read from that of the trial, so its names are those of the search space, and what is not
/// searched is a constant there. With [`Resources::processes`](crate::tune::Resources) above 1, a trial's ranks are its
/// workers.
///
/// ```no_run
/// use accelerator::train::{OperatorTrainable, TrainingOperator};
/// use accelerator::tune::{Asha, Mode, Objective, Resources, Results, Search, Space, Stop, loguniform};
///
/// fn tune<MnistOperator: TrainingOperator>() -> accelerator::tune::Result<Results> {
///     Search::new("MnistOperator", Objective::new("val_accuracy", Mode::Max))
///         .space(Space::new([("lr", loguniform(1e-3, 1.0)), ("batch_size", 16.into())]))
///         .num_samples(8)
///         .scheduler(Asha { max_t: 16, ..Asha::default() })
///         .stop(Stop::new().iterations(16))
///         .resources_per_trial(Resources { processes: 2, ..Resources::default() })
///         .run::<OperatorTrainable<MnistOperator>>()
/// }
/// ```
pub struct OperatorTrainable<T: TrainingOperator> {
    trainer: OperatorTrainer<T>,
    accelerator: Accelerator,
}

impl<T: TrainingOperator> fmt::Debug for OperatorTrainable<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("OperatorTrainable")
            .finish_non_exhaustive()
    }
}

impl<T: TrainingOperator> Trainable for OperatorTrainable<T> {
    fn setup(config: &Config, _context: &TrialContext) -> Result<Self, BoxError> {
        let accelerator = Accelerator::new()?;
        let trainer = OperatorTrainer::on(accelerator.clone(), config.parse_all()?)?;
        Ok(Self {
            trainer,
            accelerator,
        })
    }

    fn step(&mut self) -> Result<accelerator_tune::Metrics, BoxError> {
        let trained = self.trainer.train(None)?;
        let validated = self.trainer.validate()?;
        Ok(trained.iter().chain(validated.iter()).collect())
    }

    fn save_checkpoint(&mut self, folder: &Path) -> Result<(), BoxError> {
        self.trainer.save(folder)?;
        Ok(())
    }

    fn load_checkpoint(&mut self, folder: &Path) -> Result<(), BoxError> {
        Ok(self.trainer.load(folder)?)
    }

    fn cleanup(&mut self) -> Result<(), BoxError> {
        Ok(self.accelerator.clone().finish()?)
    }
}

/// Reports the evaluations of a [`Trainer`](super::Trainer) to the search of which it is a trial.
///
/// Each evaluation is an iteration, and a checkpoint of the trainer follows it, of which the search takes the files
/// that it needs; the evaluation of `eval_on_start` is not reported. The training ends when the search stops the trial.
///
/// ```no_run
/// use accelerator::train::{TrainingArguments, TuneCallback};
/// use accelerator::tune::{BoxError, Config, TrialSession};
///
/// /// A trial, as `Search::run_fn` takes it.
/// fn trial(session: &mut TrialSession, config: &Config) -> Result<(), BoxError> {
///     let callback = TuneCallback::new(session);
///     let arguments = TrainingArguments {
///         learning_rate: config.parse("lr")?,
///         output_dir: session.folder().join("trainer"),
///         resume_from_checkpoint: callback.resume_from()?,
///         ..TrainingArguments::default()
///     };
///     // Trainer::builder(arguments, …).callback(callback).build()?.train()?;
///     Ok(())
/// }
/// ```
#[derive(Debug)]
pub struct TuneCallback {
    session: TrialSession,
    /// The metrics of an evaluation that is to be reported once its checkpoint is saved.
    evaluated: Option<accelerator_tune::Metrics>,
}

impl TuneCallback {
    /// Makes a callback for the trial of a session.
    pub fn new(session: &TrialSession) -> Self {
        Self {
            session: session.clone(),
            evaluated: None,
        }
    }

    /// Returns the value for the trainer's `resume_from_checkpoint`.
    ///
    /// # Errors
    ///
    /// [`Error::is_io`] if the trial's checkpoint cannot be read.
    pub fn resume_from(&self) -> Result<ResumeFrom> {
        let Some(folder) = self.session.checkpoint() else {
            return Ok(ResumeFrom::No);
        };
        let entry = folder.read_dir()?.next().transpose()?;
        Ok(entry.map_or(ResumeFrom::No, |entry| ResumeFrom::Path(entry.path())))
    }
}

impl<M> TrainerCallback<M> for TuneCallback {
    fn on_evaluate(
        &mut self,
        at: &CallbackContext<'_, M>,
        metrics: &Metrics,
        control: &mut TrainerControl,
    ) -> Result<()> {
        if at.state.has_begun() {
            self.evaluated = Some(metrics.iter().collect());
            control.should_save = true;
        }
        Ok(())
    }

    fn on_save(
        &mut self,
        at: &CallbackContext<'_, M>,
        saved: &Saved,
        control: &mut TrainerControl,
    ) -> Result<()> {
        let Some(metrics) = self.evaluated.take() else {
            return Ok(());
        };
        let is_main = at.accelerator.is_main_process();
        let answer = self.session.report_with(metrics, |folder| {
            let name = saved.path().file_name().unwrap_or_default();
            match is_main {
                true => Ok(copy(saved.path(), &folder.join(name))?),
                false => Ok(()),
            }
        });
        match answer {
            Err(_) if self.session.is_over() => control.should_training_stop = true,
            answer => answer.map_err(Error::other)?,
        }
        Ok(())
    }
}

fn copy(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in from.read_dir()? {
        let entry = entry?;
        let target: PathBuf = to.join(entry.file_name());
        match entry.file_type()?.is_dir() {
            true => copy(&entry.path(), &target)?,
            false => fs::copy(entry.path(), target).map(drop)?,
        }
    }
    Ok(())
}
