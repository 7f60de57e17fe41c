//! Ranks as processes, from the side that commands them, and from their own.

use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::models::{RegisteredData, RegisteredModels};
use super::{
    BatchOf, EpochCursor, EpochInfo, OperatorWorker, Registered, Setup, TrainBatches,
    TrainingOperator,
};
use crate::accelerator::{
    Accelerator, AcceleratorBuilder, GRACE, RankProcesses, receive_from_parent, send,
    send_to_parent,
};
use crate::checkpoint::Object;
use crate::core::agreement::Failure;
use crate::core::error::{Error, Result};
use crate::train::state::Metrics;

/// The job of ranks that a trainer has started, by which they know it.
pub(super) const JOB: &str = "operator_trainer";

/// The workers of a trainer, which runs beside them.
pub(super) struct WorkerProcesses {
    events: Receiver<(usize, WorkerEvent)>,
    /// Set while all workers answer.
    is_usable: bool,
    processes: RankProcesses,
}

enum WorkerEvent {
    Answered(WorkerAnswer),
    /// The worker has ended, or is about to.
    Closed,
}

#[derive(Deserialize, Serialize)]
enum WorkerAnswer {
    Failed(Failure),
    Succeeded(Answer),
}

impl WorkerProcesses {
    pub(super) fn start<T: TrainingOperator>(
        num_workers: usize,
        config: &T::Config,
    ) -> Result<Self> {
        let mut bytes = Vec::new();
        ciborium::into_writer(config, &mut bytes).map_err(Error::other)?;
        let processes = RankProcesses::start(num_workers, JOB)?;
        let (sender, events) = channel();
        for rank in 0..num_workers {
            let link = BufReader::new(processes.link(rank).try_clone()?);
            let sender = sender.clone();
            std::thread::Builder::new()
                .name(format!("worker {rank}"))
                .spawn(move || forward_answers(rank, link, &sender))?;
        }
        let mut workers = Self {
            events,
            is_usable: true,
            processes,
        };
        workers.call(&Command::Setup(operator_name::<T>(), bytes))?;
        Ok(workers)
    }

    /// Lets all do that, and returns what rank 0 answers. Where one dies or fails, the error is of the one that did so
    /// first: others that lose it in a collective say so by errors of their own.
    pub(super) fn call(&mut self, command: &Command) -> Result<Answer> {
        let answer = self.answer(command);
        self.is_usable &= answer.is_ok() || command.is_recoverable();
        answer
    }

    pub(super) fn is_usable(&self) -> bool {
        self.is_usable
    }

    fn answer(&mut self, command: &Command) -> Result<Answer> {
        let world_size = self.processes.world_size();
        for rank in 0..world_size {
            // Of one that is gone, its reader tells.
            let _ = send(self.processes.link(rank), command);
        }
        let mut answers: Vec<Option<WorkerAnswer>> = Vec::new();
        answers.resize_with(world_size, || None);
        let mut failures = Vec::new();
        let mut deadline = None;
        while answers.iter().any(Option::is_none) {
            let event = match deadline {
                None => self.events.recv().ok(),
                Some(deadline) => {
                    let left = Instant::saturating_duration_since(&deadline, Instant::now());
                    self.events.recv_timeout(left).ok()
                }
            };
            match event {
                Some((rank, WorkerEvent::Answered(answer))) => {
                    if let WorkerAnswer::Failed(failure) = &answer {
                        failures.push(failure.clone().into_error(rank, command.action()));
                        deadline.get_or_insert_with(|| Instant::now() + GRACE);
                    }
                    answers[rank] = Some(answer);
                }
                // One that has answered why may end.
                Some((rank, WorkerEvent::Closed)) if answers[rank].is_none() => {
                    self.is_usable = false;
                    return Err(self.processes.failure(rank));
                }
                Some((_, WorkerEvent::Closed)) => {}
                None => {
                    self.is_usable = false;
                    break;
                }
            }
        }
        let cause = failures.iter().position(|error| !error.is_collective());
        if !failures.is_empty() {
            return Err(failures.swap_remove(cause.unwrap_or(0)));
        }
        match answers.into_iter().next().flatten() {
            Some(WorkerAnswer::Succeeded(answer)) => Ok(answer),
            _ => Err(self.processes.failure(0)),
        }
    }

    pub(super) fn shutdown(mut self) -> Result<()> {
        self.call(&Command::Shutdown)?;
        self.processes.wait()
    }
}

/// Does what the trainer says, in the process of a worker, which ends with it.
pub(super) fn serve<T: TrainingOperator>(builder: AcceleratorBuilder) -> ! {
    let (sender, commands) = channel::<Command>();
    let received = receive_from_parent(move |command| {
        // Where nobody receives, this process ends.
        let _ = sender.send(command);
    });
    let served = received.and_then(|()| serve_commands::<T>(builder, &commands));
    if let Err(error) = &served {
        eprintln!("Error: {error:?}");
    }
    std::process::exit(i32::from(served.is_err()))
}

/// Serves commands until one shuts it down, or until one fails, after the answer that says so.
fn serve_commands<T: TrainingOperator>(
    builder: AcceleratorBuilder,
    commands: &Receiver<Command>,
) -> Result<()> {
    let mut builder = Some(builder);
    let mut runner: Option<Runner<T>> = None;
    while let Ok(command) = commands.recv() {
        let outcome = match (&command, builder.take()) {
            (Command::Setup(operator, config), Some(builder)) => set_up(builder, operator, config)
                .map(|made| {
                    runner = Some(made);
                    Answer::Done
                }),
            _ => Runner::run(&mut runner, &command),
        };
        let answer = match &outcome {
            Ok(answer) => WorkerAnswer::Succeeded(answer.clone()),
            Err(error) => WorkerAnswer::Failed(Failure::of(error)),
        };
        if let (Err(error), Some(runner)) = (&outcome, &runner)
            && !command.is_recoverable()
        {
            let group = runner.worker.accelerator.group();
            group.abort(format!("it returned an error: {error:?}"));
        }
        send_to_parent(&answer)?;
        match (outcome, &command) {
            (Ok(_), Command::Shutdown) => return Ok(()),
            (Err(error), _) if !command.is_recoverable() => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

fn set_up<T: TrainingOperator>(
    builder: AcceleratorBuilder,
    operator: &str,
    config: &[u8],
) -> Result<Runner<T>> {
    if operator != operator_name::<T>() {
        return Err(Error::misuse(format!(
            "a worker of `{operator}` has come to the `OperatorTrainer` of `{}` first: workers are this program, started \
             again, and serve where it makes its first trainer; make trainers of one operator in a program",
            operator_name::<T>()
        )));
    }
    let config = ciborium::from_reader(config).map_err(|error| {
        Error::config(format!(
            "the configuration of an operator does not come back as it was written: {error}"
        ))
    })?;
    Runner::new(builder.build()?, config)
}

fn operator_name<T>() -> String {
    core::any::type_name::<T>().to_owned()
}

fn forward_answers(
    rank: usize,
    mut link: impl std::io::Read,
    events: &Sender<(usize, WorkerEvent)>,
) {
    loop {
        let event = match ciborium::from_reader(&mut link) {
            Ok(answer) => WorkerEvent::Answered(answer),
            Err(_) => WorkerEvent::Closed,
        };
        let is_last = matches!(event, WorkerEvent::Closed);
        if events.send((rank, event)).is_err() || is_last {
            return;
        }
    }
}

/// An operator on its rank.
pub(super) struct Runner<T: TrainingOperator> {
    data: RegisteredData<BatchOf<T>>,
    operator: T,
    cursor: EpochCursor<BatchOf<T>>,
    pub(super) worker: OperatorWorker<T>,
}

#[derive(Debug, Default, Deserialize, Serialize)]
struct OperatorProgress {
    global_step: u64,
    state_dict: serde_json::Value,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) enum Command {
    Setup(String, Vec<u8>),
    Train(Option<u64>),
    Validate,
    Save(PathBuf),
    Load(PathBuf),
    Shutdown,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) enum Answer {
    Done,
    Metrics(Metrics),
    Saved(PathBuf),
}

impl Command {
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
