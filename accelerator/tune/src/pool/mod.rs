//! Trials as processes.
//!
//! A slot is what one trial runs on. Where more trials are under way than there are slots, those of a slot take turns, from
//! report to report: a trial that waits for an answer keeps its process, and computes nothing.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::host::{Hosts, ProcessProgram, ProcessSpec};
use crate::runner::{Answer, RunnerEvent, TrialRunner, TrialStart};
use crate::trial::protocol::{FromWorker, ToWorker};
use crate::trial_id::TrialId;
use listener::Listener;
pub use slots::Resources;
pub(crate) use slots::{Slot, Slots};
use worker::Worker;

pub(crate) mod checkpoint;
mod joint;
mod listener;
mod slots;
mod worker;

/// Whether a process carries out several trials, one after the other.
///
/// ```
/// use accelerator_tune::WorkerReuse;
///
/// assert_eq!(WorkerReuse::default(), WorkerReuse::Fresh);
/// ```
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkerReuse {
    /// Each trial has a process of its own.
    #[default]
    Fresh,
    /// A process takes another trial when one has ended, where the trial allows it: a function does, a
    /// [`Trainable`](crate::Trainable) by [`reset_config`](crate::Trainable::reset_config).
    Warm,
}

/// Processes of this program that carry out trials.
#[derive(Debug)]
pub(crate) struct Pool {
    hosts: Hosts,
    slots: Slots,
    /// How many processes a trial has.
    ranks: usize,
    reuse: WorkerReuse,
    logs: PathBuf,
    listener: Listener,
    workers: BTreeMap<u32, Worker>,
    next_worker: u32,
    of_trial: BTreeMap<TrialId, u32>,
    home: BTreeMap<TrialId, usize>,
    /// Trials that were told to end, and do not count for their slot any more.
    leaving: BTreeSet<TrialId>,
    events: Receiver<PoolEvent>,
    sender: Sender<PoolEvent>,
    ready: VecDeque<RunnerEvent>,
}

/// What happened to a worker.
#[derive(Debug)]
enum PoolEvent {
    Connected(listener::Connection),
    Said {
        worker: u32,
        rank: usize,
        said: FromWorker,
    },
    Closed {
        worker: u32,
    },
    Exited {
        worker: u32,
    },
}

impl Pool {
    pub(crate) fn new(
        hosts: Hosts,
        resources: &Resources,
        slots: Option<usize>,
        reuse: WorkerReuse,
        folder: &Path,
    ) -> Result<Self> {
        let (sender, events) = channel();
        let logs = folder.join("logs");
        fs::create_dir_all(&logs).map_err(|error| Error::io("make", &logs, error))?;
        Ok(Self {
            slots: Slots::new(resources, slots, &hosts.resources())?,
            ranks: resources.processes,
            reuse,
            logs,
            listener: Listener::bind(hosts.address(), sender.clone())?,
            hosts,
            workers: BTreeMap::new(),
            next_worker: 0,
            of_trial: BTreeMap::new(),
            home: BTreeMap::new(),
            leaving: BTreeSet::new(),
            events,
            sender,
            ready: VecDeque::new(),
        })
    }

    /// Lets a slot without a trial that computes take the next turn.
    fn pump(&mut self, slot: usize) -> Result<()> {
        while self.slots[slot].active.is_none() {
            let Some(turn) = self.slots[slot].turns.pop_front() else {
                return Ok(());
            };
            match turn {
                Turn::Start(start) => {
                    self.slots[slot].active = Some(start.trial);
                    self.begin(slot, start)?;
                }
                Turn::Answer(trial, answer) => {
                    self.slots[slot].active = Some(trial);
                    self.tell_answer(trial, answer);
                }
            }
        }
        Ok(())
    }

    fn begin(&mut self, slot: usize, start: TrialStart) -> Result<()> {
        let idle = self.workers.iter().find(|(_, worker)| {
            worker.slot == slot && worker.start.is_none() && worker.is_connected()
        });
        let number = match idle {
            Some((number, _)) => *number,
            None => self.spawn(slot)?,
        };
        self.of_trial.insert(start.trial, number);
        if let Some(worker) = self.workers.get_mut(&number) {
            worker.assign(start);
        }
        Ok(())
    }

    fn spawn(&mut self, slot: usize) -> Result<u32> {
        let number = self.next_worker;
        self.next_worker += 1;
        let Slot {
            host, cores, gpus, ..
        } = &self.slots[slot];
        let spec = ProcessSpec {
            program: ProcessProgram::Worker(self.listener.place(number, cores.clone())),
            ranks: self.ranks,
            cores: cores.clone(),
            gpus: gpus.clone(),
            log: self.logs.join(match self.hosts.address() {
                Some(_) => format!("worker-{number:05}.{}.log", self.hosts.name(*host)),
                None => format!("worker-{number:05}.log"),
            }),
        };
        let sender = self.sender.clone();
        let exited = move || {
            // Nobody listens once the search has ended.
            let _ = sender.send(PoolEvent::Exited { worker: number });
        };
        let (process, _) = self.hosts.start(*host, &spec, number, exited)?;
        let worker = Worker::new(process, slot, self.ranks);
        self.workers.insert(number, worker);
        Ok(number)
    }

    fn tell_answer(&mut self, trial: TrialId, answer: Answer) {
        let Some(worker) = self.worker_of(trial) else {
            return;
        };
        let message = match answer {
            Answer::Continue => ToWorker::Continue,
            Answer::Stop => ToWorker::Stop,
            Answer::Save(folder) | Answer::Pause(folder) if checkpoint::begin(&folder).is_err() => {
                // Left out: a trial that cannot save goes on, or begins anew.
                tracing::warn!("{} cannot be made", folder.display());
                ToWorker::Continue
            }
            Answer::Save(folder) => worker.save(folder, |folder| ToWorker::Save { folder }),
            Answer::Pause(folder) => worker.save(folder, |folder| ToWorker::Pause { folder }),
        };
        worker.tell(&message);
    }

    fn worker_of(&mut self, trial: TrialId) -> Option<&mut Worker> {
        let number = self.of_trial.get(&trial)?;
        self.workers.get_mut(number)
    }

    fn handle(&mut self, event: PoolEvent) -> Result<()> {
        match event {
            PoolEvent::Connected(connection) => {
                if let Some(worker) = self.workers.get_mut(&connection.worker) {
                    worker.connect(connection);
                }
                Ok(())
            }
            PoolEvent::Said { worker, rank, said } => self.said(worker, rank, said),
            PoolEvent::Closed { worker } => {
                if let Some(worker) = self.workers.get_mut(&worker) {
                    worker.closed = worker.closed.or(Some(Instant::now()));
                    worker.open -= 1;
                }
                self.end_exited(worker)
            }
            PoolEvent::Exited { worker } => {
                if let Some(worker) = self.workers.get_mut(&worker) {
                    worker.has_exited = true;
                }
                self.end_exited(worker)
            }
        }
    }

    fn said(&mut self, number: u32, rank: usize, said: FromWorker) -> Result<()> {
        let ranks = self.ranks;
        let Some(worker) = self.workers.get_mut(&number) else {
            return Ok(());
        };
        let Some(trial) = worker.start.as_ref().map(|start| start.trial) else {
            return Ok(());
        };
        match said {
            FromWorker::Started if rank == 0 => {
                if let Some(location) = worker.location.clone() {
                    self.ready
                        .push_back(RunnerEvent::Started { trial, location });
                }
            }
            FromWorker::Started => {}
            FromWorker::Reported {
                iteration,
                metrics,
                seconds,
            } => {
                if rank == 0 {
                    worker.iteration = iteration;
                    self.ready.push_back(RunnerEvent::Reported {
                        trial,
                        iteration,
                        metrics,
                        seconds,
                    });
                    return self.free(trial);
                }
            }
            FromWorker::Failed { message } => {
                let message = match ranks {
                    1 => message,
                    _ => format!("rank {rank}: {message}"),
                };
                worker.failure.get_or_insert(message);
            }
            said => {
                if let Some(said) = worker.joint.push(rank, said) {
                    return self.all_said(number, trial, said);
                }
            }
        }
        Ok(())
    }

    /// Takes what all ranks of a worker have said.
    fn all_said(&mut self, number: u32, trial: TrialId, said: FromWorker) -> Result<()> {
        let Some(worker) = self.workers.get_mut(&number) else {
            return Ok(());
        };
        match said {
            FromWorker::Saved => {
                if let Some((folder, iteration)) = worker.saving.take() {
                    let bytes = checkpoint::commit(&folder)?;
                    self.ready.push_back(RunnerEvent::Saved {
                        trial,
                        iteration,
                        bytes,
                    });
                }
            }
            FromWorker::Skipped => {
                if let Some((folder, _)) = worker.saving.take() {
                    checkpoint::abandon(&folder);
                }
            }
            FromWorker::Refused => {
                if let Some(start) = worker.start.take() {
                    worker.tell(&ToWorker::Exit);
                    let slot = worker.slot;
                    self.of_trial.remove(&trial);
                    let number = self.spawn(slot)?;
                    self.of_trial.insert(trial, number);
                    if let Some(worker) = self.workers.get_mut(&number) {
                        worker.assign(start);
                    }
                }
            }
            FromWorker::Left => {
                return self.over(RunnerEvent::Left { trial }, number);
            }
            FromWorker::Ended => {
                return self.over(RunnerEvent::Ended { trial }, number);
            }
            FromWorker::Started | FromWorker::Reported { .. } | FromWorker::Failed { .. } => {}
        }
        Ok(())
    }

    /// An attempt is over, and its worker lives.
    fn over(&mut self, event: RunnerEvent, number: u32) -> Result<()> {
        let trial = event.trial();
        if let Some(worker) = self.workers.get_mut(&number) {
            worker.start = None;
            if self.reuse == WorkerReuse::Fresh {
                worker.tell(&ToWorker::Exit);
                worker.closed = Some(Instant::now());
                if self.slots.have_gpus() {
                    // A device is free when its process has ended.
                    worker.on_exit = Some(event);
                    return Ok(());
                }
            }
        }
        self.of_trial.remove(&trial);
        self.ready.push_back(event);
        self.leave(trial)
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
            self.of_trial.remove(&trial);
            self.ready.push_back(event);
            return self.leave(trial);
        }
        let Some(start) = worker.start.take() else {
            return Ok(());
        };
        if let Some((folder, _)) = worker.saving.take() {
            checkpoint::abandon(&folder);
        }
        let message = worker.failure.take();
        let message = message.unwrap_or_else(|| worker.process.failure(status));
        let trial = start.trial;
        self.of_trial.remove(&trial);
        self.ready.push_back(RunnerEvent::Failed { trial, message });
        self.leave(trial)
    }

    /// The trial does not compute at present.
    fn free(&mut self, trial: TrialId) -> Result<()> {
        let Some(&slot) = self.home.get(&trial) else {
            return Ok(());
        };
        if self.slots[slot].active == Some(trial) {
            self.slots[slot].active = None;
        }
        self.pump(slot)
    }

    /// The trial is no longer one of its slot's.
    fn leave(&mut self, trial: TrialId) -> Result<()> {
        if let Some(slot) = self.home.get(&trial).copied() {
            if !self.leaving.remove(&trial) {
                self.slots[slot].trials -= 1;
            }
            let turns = &mut self.slots[slot].turns;
            turns.retain(|turn| turn.trial() != trial);
        }
        self.free(trial)?;
        self.home.remove(&trial);
        Ok(())
    }

    /// Ends workers whose connections are closed and which do not end.
    fn end_closed(&mut self) {
        for worker in self.workers.values_mut() {
            if worker.closed.is_some_and(|since| since.elapsed() > CLOSED) {
                worker.process.kill();
            }
        }
    }
}

impl TrialRunner for Pool {
    fn slots(&self) -> usize {
        self.slots.len()
    }

    fn is_computing(&self, trial: TrialId) -> bool {
        let home = self.home.get(&trial);
        home.is_some_and(|slot| self.slots[*slot].active == Some(trial))
    }

    fn requested(&self) -> Option<String> {
        Some(self.slots.requested())
    }

    fn start(&mut self, start: TrialStart) -> Result<()> {
        let slot = self.slots.least_used();
        self.slots[slot].trials += 1;
        self.home.insert(start.trial, slot);
        self.slots[slot].turns.push_back(Turn::Start(start));
        self.pump(slot)
    }

    fn answer(&mut self, trial: TrialId, answer: Answer) -> Result<()> {
        let Some(&slot) = self.home.get(&trial) else {
            return Ok(());
        };
        if matches!(answer, Answer::Pause(_) | Answer::Stop) && self.leaving.insert(trial) {
            self.slots[slot].trials -= 1;
        }
        let turns = &mut self.slots[slot].turns;
        match answer {
            // It takes no time, and its worker may take the next trial.
            Answer::Stop => turns.push_front(Turn::Answer(trial, answer)),
            answer => turns.push_back(Turn::Answer(trial, answer)),
        }
        self.pump(slot)
    }

    fn kill(&mut self, trial: TrialId) {
        if let Some(number) = self.of_trial.remove(&trial)
            && let Some(worker) = self.workers.get_mut(&number)
        {
            worker.start = None;
            worker.on_exit = None;
            worker.process.kill();
            if let Some((folder, _)) = worker.saving.take() {
                checkpoint::abandon(&folder);
            }
        }
        self.ready.retain(|event| event.trial() != trial);
        if let Err(error) = self.leave(trial) {
            tracing::error!("{error}");
        }
    }

    fn next(&mut self, wait: Duration) -> Result<Option<RunnerEvent>> {
        let until = Instant::now() + wait;
        // Others may report all the time.
        self.end_closed();
        loop {
            self.hosts.check()?;
            if let Some(event) = self.ready.pop_front() {
                return Ok(Some(event));
            }
            let left = until.saturating_duration_since(Instant::now());
            match self.events.recv_timeout(left) {
                Ok(event) => self.handle(event)?,
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return Ok(None),
            }
        }
    }

    fn close(&mut self) {
        let mut unfinished = Vec::new();
        for worker in self.workers.values_mut() {
            worker.tell(&ToWorker::Exit);
            unfinished.extend(worker.saving.take().map(|(folder, _)| folder));
        }
        for round in 0..3 {
            let until = Instant::now() + PATIENCE;
            while !self.workers.is_empty() && Instant::now() < until {
                let left = until.saturating_duration_since(Instant::now());
                if let Ok(PoolEvent::Exited { worker }) = self.events.recv_timeout(left)
                    && let Some(mut worker) = self.workers.remove(&worker)
                {
                    worker.process.reap();
                }
            }
            for worker in self.workers.values_mut() {
                match round {
                    0 => worker.process.terminate(),
                    _ => worker.process.kill(),
                }
            }
        }
        for folder in unfinished {
            checkpoint::abandon(&folder);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.close();
    }
}

/// What waits for a slot.
#[derive(Debug)]
enum Turn {
    Start(TrialStart),
    Answer(TrialId, Answer),
}

impl Turn {
    fn trial(&self) -> TrialId {
        match self {
            Self::Start(start) => start.trial,
            Self::Answer(trial, _) => *trial,
        }
    }
}

/// How long a worker may go on whose connection is closed.
const CLOSED: Duration = Duration::from_secs(5);
/// How long workers have to end, before each of two signals.
const PATIENCE: Duration = Duration::from_secs(2);
