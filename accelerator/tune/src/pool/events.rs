//! Handles the events of workers, and tells what follows for trials.

use std::time::Instant;

use super::worker::{PoolEvent, Worker, WorkerEvent};
use super::{Pool, WorkerReuse};
use crate::checkpoint_folder;
use crate::config::TrialId;
use crate::error::Result;
use crate::runner::RunnerEvent;
use crate::trial::protocol::{FromWorker, ToWorker};

impl Pool {
    pub(super) fn handle(&mut self, (number, event): PoolEvent) -> Result<()> {
        let Some(worker) = self.workers.get_mut(&number) else {
            return Ok(());
        };
        match event {
            WorkerEvent::Connected(connection) => {
                worker.connect(connection);
                Ok(())
            }
            WorkerEvent::Message(rank, message) => self.on_message(number, rank, message),
            WorkerEvent::Closed => {
                worker.closed = worker.closed.or(Some(Instant::now()));
                worker.open -= 1;
                self.end_exited(number)
            }
            WorkerEvent::Exited => {
                worker.has_exited = true;
                self.end_exited(number)
            }
        }
    }

    fn on_message(&mut self, number: u32, rank: usize, message: FromWorker) -> Result<()> {
        let ranks = self.ranks;
        let Some(worker) = self.workers.get_mut(&number) else {
            return Ok(());
        };
        let Some(trial) = worker.start.as_ref().map(|start| start.trial) else {
            return Ok(());
        };
        match message {
            FromWorker::Started if rank == 0 => {
                if let Some(location) = worker.location.clone() {
                    self.ready
                        .push_back(RunnerEvent::Started { trial, location });
                }
            }
            FromWorker::Reported(report) if rank == 0 => {
                worker.iteration = report.iteration;
                self.ready
                    .push_back(RunnerEvent::Reported { trial, report });
                return self.end_turn(trial);
            }
            FromWorker::Started | FromWorker::Reported(_) => {}
            FromWorker::Failed { message } => {
                let message = match ranks {
                    1 => message,
                    _ => format!("rank {rank}: {message}"),
                };
                worker.failure.get_or_insert(message);
            }
            message => {
                if let Some(message) = worker.joint.push(rank, message) {
                    return self.on_joint_message(number, trial, message);
                }
            }
        }
        Ok(())
    }

    /// All ranks of a worker have sent the message.
    fn on_joint_message(&mut self, number: u32, trial: TrialId, message: FromWorker) -> Result<()> {
        let Some(worker) = self.workers.get_mut(&number) else {
            return Ok(());
        };
        match message {
            FromWorker::Saved => {
                if let Some((folder, iteration)) = worker.saving.take() {
                    let bytes = checkpoint_folder::commit(&folder)?;
                    self.ready.push_back(RunnerEvent::Saved {
                        trial,
                        iteration,
                        bytes,
                    });
                }
            }
            FromWorker::Skipped => {
                if let Some((folder, _)) = worker.saving.take() {
                    checkpoint_folder::abandon(&folder);
                }
            }
            FromWorker::Refused => {
                if let Some(start) = worker.start.take() {
                    worker.send(&ToWorker::Exit);
                    let slot = worker.slot;
                    let number = self.spawn(slot)?;
                    if let Some(worker) = self.workers.get_mut(&number) {
                        worker.assign(start);
                    }
                }
            }
            FromWorker::Stopped => {
                return self.end_attempt(RunnerEvent::Stopped { trial }, number);
            }
            FromWorker::Ended => {
                return self.end_attempt(RunnerEvent::Ended { trial }, number);
            }
            FromWorker::Started | FromWorker::Reported(_) | FromWorker::Failed { .. } => {}
        }
        Ok(())
    }

    /// An attempt is over, and its worker lives.
    fn end_attempt(&mut self, event: RunnerEvent, number: u32) -> Result<()> {
        let trial = event.trial();
        if let Some(worker) = self.workers.get_mut(&number) {
            worker.start = None;
            if self.reuse == WorkerReuse::Fresh {
                worker.send(&ToWorker::Exit);
                worker.closed = Some(Instant::now());
                if self.placements.slots().have_gpus() {
                    // A device is free when its process has ended.
                    worker.on_exit = Some(event);
                    return Ok(());
                }
            }
        }
        self.ready.push_back(event);
        self.remove(trial)
    }

    /// Takes the end of a process, once all that it said has arrived.
    fn end_exited(&mut self, number: u32) -> Result<()> {
        let is_over = |worker: &Worker| worker.has_exited && worker.open == 0;
        if !self.workers.get(&number).is_some_and(is_over) {
            return Ok(());
        }
        let Some(mut worker) = self.workers.remove(&number) else {
            return Ok(());
        };
        let status = worker.process.reap();
        if let Some(event) = worker.on_exit.take() {
            let trial = event.trial();
            self.ready.push_back(event);
            return self.remove(trial);
        }
        let Some(start) = worker.start.take() else {
            return Ok(());
        };
        if let Some((folder, _)) = worker.saving.take() {
            checkpoint_folder::abandon(&folder);
        }
        let message = worker.failure.take();
        let message = message.unwrap_or_else(|| worker.process.failure(status));
        let trial = start.trial;
        self.ready.push_back(RunnerEvent::Failed { trial, message });
        self.remove(trial)
    }
}
