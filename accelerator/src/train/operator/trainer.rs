//! The trainer of an operator.

use core::fmt;
use std::path::{Path, PathBuf};

use super::workers::{self, Answer, Command, Runner, WorkerProcesses};
use super::{OperatorWorker, TrainingOperator};
use crate::accelerator::{Accelerator, AcceleratorBuilder, ProcessRole};
use crate::core::error::{Error, Result};
use crate::train::state::Metrics;

/// Trains a [`TrainingOperator`] on several processes of this host, which it starts: Ray SGD's `TorchTrainer`.
///
/// With several workers, this program is started again for each of them, with the same arguments. It comes to the same
/// call of [`new`](Self::new) again, where it serves as a worker and exits. What stands before the call runs in each worker,
/// too; what stands after it runs once, in the process that the user has started. The configuration travels to the
/// workers; [settings](Self::with_accelerator) are made by each. Workers end when that process does, however that is. A
/// program may make several trainers of one operator, one after the other, unless it is a rank of a launcher, which joins
/// its job once: see [`on`](Self::on).
///
/// With one worker, no process is started. Nor is one under `accel-launch`, torchrun, `mpirun`, `srun` or a cluster that has
/// started the program as a rank: there it trains on the ranks that are there, whatever `num_workers` says. Each rank
/// runs the whole program and gets the same metrics; [`print`](Self::print) prints once.
///
/// If a worker fails or dies, the call returns an error that names its rank, the others are ended, and the trainer is
/// of no more use: a program continues with another one that [loads](Self::load) a checkpoint.
///
/// ```no_run
/// # use accelerator::prelude::*;
/// # use accelerator::train::{OperatorTrainer, TrainingOperator};
/// # fn program<MnistOperator: TrainingOperator>(config: MnistOperator::Config) -> Result<()> {
/// let mut trainer = OperatorTrainer::<MnistOperator>::new(8, config)?;
/// for _ in 0..10 {
///     let metrics = trainer.train(None)?;
///     let val_metrics = trainer.validate()?;
///     trainer.print(format_args!("{metrics} {val_metrics}"));
///     trainer.save("checkpoints")?;
/// }
/// trainer.shutdown()
/// # }
/// ```
pub struct OperatorTrainer<T: TrainingOperator>(TrainerRanks<T>);

enum TrainerRanks<T: TrainingOperator> {
    /// This process is a rank; `None` when it is lost.
    Here(Box<Option<Runner<T>>>, FinishedBy),
    /// The ranks are workers of this process; `None` when they have ended.
    OfProcesses(Option<WorkerProcesses>),
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum FinishedBy {
    Program,
    Trainer,
}

impl<T: TrainingOperator> OperatorTrainer<T> {
    /// Starts `num_workers` workers, and sets up an operator on each.
    ///
    /// # Errors
    ///
    /// [`Error::is_config`] for 0 workers; those of [`setup`](TrainingOperator::setup), of
    /// [`AcceleratorBuilder::build`], and of starting the program again; one that names its rank where a worker ends
    /// before it comes to this call.
    pub fn new(num_workers: usize, config: T::Config) -> Result<Self> {
        Self::with_accelerator(Accelerator::builder(), num_workers, config)
    }

    /// Does the same as [`new`](Self::new), with settings of the ranks such as device, precision and accumulation.
    ///
    /// # Errors
    ///
    /// See [`new`](Self::new).
    pub fn with_accelerator(
        builder: AcceleratorBuilder,
        num_workers: usize,
        config: T::Config,
    ) -> Result<Self> {
        match (ProcessRole::of(workers::JOB)?, num_workers) {
            (ProcessRole::Started, _) => workers::serve::<T>(builder),
            (ProcessRole::Placed, _) | (ProcessRole::Parent, 1) => {
                Self::here(builder.build()?, config, FinishedBy::Trainer)
            }
            (ProcessRole::Parent, _) => {
                let workers = WorkerProcesses::start::<T>(num_workers, &config)?;
                Ok(Self(TrainerRanks::OfProcesses(Some(workers))))
            }
        }
    }

    /// Makes a trainer on existing ranks: each of them calls this, and then the methods of the trainer. The program
    /// still owns the accelerator and finishes it; it may make several trainers with clones of it.
    ///
    /// # Errors
    ///
    /// The errors of [`setup`](TrainingOperator::setup).
    pub fn on(accelerator: Accelerator, config: T::Config) -> Result<Self> {
        Self::here(accelerator, config, FinishedBy::Program)
    }

    /// Trains on the rest of the epoch (`None`), or on `num_steps` batches of each worker. They continue where the
    /// last call ended, and go on into the next epoch when one ends.
    ///
    /// The metrics are those of [`train_epoch`](TrainingOperator::train_epoch): by default `batch_count`, `num_samples`,
    /// `train_loss` and `last_train_loss`, over all workers, with `epoch`, that of the last batch, from 1.
    ///
    /// # Errors
    ///
    /// [`Error::is_config`] for 0 batches; those of the operator; one that names the rank where a worker has ended.
    pub fn train(&mut self, num_steps: impl Into<Option<u64>>) -> Result<Metrics> {
        let num_steps = num_steps.into();
        if num_steps == Some(0) {
            return Err(Error::config(
                "0 batches are to be trained on; at least 1 is needed, or `None` for the rest of the epoch",
            ));
        }
        self.metrics(&Command::Train(num_steps))
    }

    /// Validates on all samples of the validation data, each once. By default, returns `batch_count`, `num_samples`,
    /// `val_loss` and `last_val_loss`, and if the criterion gives logits and targets, `val_accuracy` and
    /// `last_val_accuracy`.
    ///
    /// # Errors
    ///
    /// [`Error::is_config`] without validation data; as [`train`](Self::train).
    pub fn validate(&mut self) -> Result<Metrics> {
        self.metrics(&Command::Validate)
    }

    /// Saves a checkpoint in the folder `path`, as [`Accelerator::save_state`] does, and returns its path. It has the
    /// models, optimizers with their schedules, the position in the data, and the operator's
    /// [state](TrainingOperator::state_dict).
    ///
    /// # Errors
    ///
    /// The errors of [`Accelerator::save_state`], as in the middle of an accumulation window; the trainer can continue.
    pub fn save(&mut self, path: impl AsRef<Path>) -> Result<PathBuf> {
        match self.run(&Command::Save(absolute(path.as_ref())?))? {
            Answer::Saved(path) => Ok(path),
            _ => Err(unexpected()),
        }
    }

    /// Continues from the newest checkpoint in a folder, or from one that [`save`](Self::save) has returned, on any
    /// number of workers.
    ///
    /// # Errors
    ///
    /// [`Error::is_config`] if there is none; those of [`Accelerator::resume`]. The trainer is of no more use.
    pub fn load(&mut self, path: impl AsRef<Path>) -> Result<()> {
        self.run(&Command::Load(absolute(path.as_ref())?)).map(drop)
    }

    /// Ends the training, as [`Accelerator::finish`] does, and waits for the workers to end. If you drop a trainer
    /// without this call, its workers are killed. A trainer [on existing ranks](Self::on) leaves them as they are.
    ///
    /// # Errors
    ///
    /// The errors of [`Accelerator::finish`]; one that names the rank where a worker failed to end.
    pub fn shutdown(mut self) -> Result<()> {
        match &mut self.0 {
            TrainerRanks::OfProcesses(workers) => {
                workers.take().map_or(Ok(()), WorkerProcesses::shutdown)
            }
            TrainerRanks::Here(_, FinishedBy::Program) => Ok(()),
            TrainerRanks::Here(_, FinishedBy::Trainer) => self.run(&Command::Shutdown).map(drop),
        }
    }

    /// Returns the rank that this process or thread is; `None` if the trainer has workers.
    pub fn worker(&self) -> Option<&OperatorWorker<T>> {
        match &self.0 {
            TrainerRanks::Here(runner, _) => Some(&Option::as_ref(runner)?.worker),
            TrainerRanks::OfProcesses(_) => None,
        }
    }

    /// Prints a line once, however the ranks were started.
    pub fn print(&self, line: impl fmt::Display) {
        match self.worker() {
            Some(worker) => worker.accelerator.print(line),
            None => println!("{line}"),
        }
    }

    fn here(accelerator: Accelerator, config: T::Config, finished_by: FinishedBy) -> Result<Self> {
        let runner = Runner::new(accelerator, config)?;
        Ok(Self(TrainerRanks::Here(
            Box::new(Some(runner)),
            finished_by,
        )))
    }

    fn metrics(&mut self, command: &Command) -> Result<Metrics> {
        match self.run(command)? {
            Answer::Metrics(metrics) => Ok(metrics),
            _ => Err(unexpected()),
        }
    }

    fn run(&mut self, command: &Command) -> Result<Answer> {
        match &mut self.0 {
            TrainerRanks::Here(runner, _) => Runner::run(runner, command),
            TrainerRanks::OfProcesses(None) => Err(Error::misuse(
                "the workers have ended, since an earlier call failed: make another `OperatorTrainer`",
            )),
            TrainerRanks::OfProcesses(Some(workers)) => {
                let answer = workers.call(command);
                if !workers.is_usable() {
                    self.0 = TrainerRanks::OfProcesses(None);
                }
                answer
            }
        }
    }
}

impl<T: TrainingOperator> fmt::Debug for OperatorTrainer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OperatorTrainer")
            .field("operator", &core::any::type_name::<T>())
            .field("rank", &self.worker().map(OperatorWorker::world_rank))
            .finish_non_exhaustive()
    }
}

/// Workers may have another working folder.
fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).map_err(|error| Error::io("find", path, error))
}

fn unexpected() -> Error {
    Error::misuse(
        "a worker has answered something else than it was asked: is it another build of this program?",
    )
}
