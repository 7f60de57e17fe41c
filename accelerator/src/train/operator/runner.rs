//! The work of a rank with its operator.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::models::{RegisteredData, RegisteredModels};
use super::{
    BatchOf, EpochCursor, EpochInfo, OperatorWorker, Registered, Setup, TrainBatches,
    TrainingOperator,
};
use crate::accelerator::Accelerator;
use crate::checkpoint::Object;
use crate::core::error::{Error, Result};
use crate::train::state::Metrics;

/// An operator on its rank.
pub(super) struct Runner<T: TrainingOperator> {
    data: RegisteredData<BatchOf<T>>,
    operator: T,
    cursor: EpochCursor<BatchOf<T>>,
    pub(super) worker: OperatorWorker<T>,
}

/// The state that is saved beside models, optimizers and loader.
#[derive(Debug, Default, Deserialize, Serialize)]
struct OperatorProgress {
    global_step: u64,
    state_dict: serde_json::Value,
}

/// The commands of a trainer to its ranks.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) enum Command {
    /// The type of the operator, and its configuration.
    Setup(String, Vec<u8>),
    Train(Option<u64>),
    Validate,
    Save(PathBuf),
    Load(PathBuf),
    Shutdown,
}

/// The answers of the ranks.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) enum Answer {
    Done,
    Metrics(Metrics),
    Saved(PathBuf),
}

impl Command {
    /// Names the action that failed, in the words of an error.
    pub(super) fn action(&self) -> &'static str {
        match self {
            Self::Setup(..) => "set up",
            Self::Train(_) => "train",
            Self::Validate => "validate",
            Self::Save(_) => "save",
            Self::Load(_) => "load",
            Self::Shutdown => "finish",
        }
    }

    /// Tells if ranks that fail to do it all return the error, and are as they were.
    pub(super) fn is_recoverable(&self) -> bool {
        matches!(self, Self::Save(_))
    }
}

impl<T: TrainingOperator> Runner<T> {
    pub(super) fn new(accelerator: Accelerator, config: T::Config) -> Result<Self> {
        let registered = T::setup(&Setup::new(accelerator.clone()), &config)?;
        let Registered {
            operator,
            models,
            data,
        } = registered;
        Ok(Self {
            data,
            operator,
            cursor: EpochCursor::at(0, 0),
            worker: OperatorWorker {
                accelerator,
                config,
                models,
            },
        })
    }

    /// Does what is commanded; one whose `load` failed is gone.
    pub(super) fn run(this: &mut Option<Self>, command: &Command) -> Result<Answer> {
        let Some(runner) = this.as_mut() else {
            return Err(Error::misuse(
                "the operator is gone, since an earlier call failed: make another `OperatorTrainer`",
            ));
        };
        Ok(match command {
            Command::Train(num_steps) => Answer::Metrics(runner.train(*num_steps)?),
            Command::Validate => Answer::Metrics(runner.validate()?),
            Command::Save(path) => Answer::Saved(runner.save(path)?),
            Command::Load(path) => {
                *this = this.take().map(|runner| runner.load(path)).transpose()?;
                Answer::Done
            }
            Command::Shutdown => {
                runner.worker.accelerator.finish()?;
                Answer::Done
            }
            Command::Setup(..) => Answer::Done,
        })
    }

    fn train(&mut self, num_steps: Option<u64>) -> Result<Metrics> {
        let info = EpochInfo {
            epoch_idx: self.cursor.epoch,
            global_step: self.cursor.global_step,
            num_steps,
        };
        let mut batches = TrainBatches {
            has_ended: false,
            last_epoch: self.cursor.epoch,
            loader: &self.data.train,
            cursor: &mut self.cursor,
            remaining: num_steps,
        };
        let trained = self
            .operator
            .train_epoch(&mut self.worker, &mut batches, &info);
        let last_epoch = batches.last_epoch;
        self.cursor.close_at_end();
        let mut metrics = trained?;
        metrics.push("epoch", (last_epoch + 1) as f64);
        Ok(metrics)
    }

    fn validate(&mut self) -> Result<Metrics> {
        let Some(loader) = &self.data.validation else {
            return Err(Error::config(
                "there is no data to validate on: pass it to `register_data` in `setup`",
            ));
        };
        let worker = &mut self.worker;
        worker.models.eval(&worker.accelerator)?;
        let info = EpochInfo {
            epoch_idx: self.cursor.epoch,
            global_step: self.cursor.global_step,
            num_steps: None,
        };
        let validated = self.operator.validate(worker, loader.eval(), &info);
        worker.models.train();
        validated
    }

    fn save(&self, path: &Path) -> Result<PathBuf> {
        let progress = OperatorProgress {
            global_step: self.cursor.global_step,
            state_dict: self.operator.state_dict()?,
        };
        let worker = &self.worker;
        let parts = (worker.models.parts(), &self.data.train, Object(&progress));
        let saved = worker.accelerator.save_state(path, parts)?;
        Ok(saved.path().to_owned())
    }

    fn load(self, path: &Path) -> Result<Self> {
        let Self {
            data: RegisteredData { train, validation },
            mut operator,
            cursor,
            worker,
        } = self;
        // What it has read ahead is of the old position.
        drop(cursor);
        let parts = (worker.models, train, Object(OperatorProgress::default()));
        let ((models, train, Object(progress)), position) =
            worker.accelerator.resume(path, parts)?;
        if position.is_start() {
            return Err(Error::config(format!(
                "there is no checkpoint in `{}`",
                path.display()
            )));
        }
        operator.load_state_dict(progress.state_dict)?;
        Ok(Self {
            data: RegisteredData { train, validation },
            operator,
            cursor: EpochCursor::at(position.epoch(), progress.global_step),
            worker: OperatorWorker { models, ..worker },
        })
    }
}
