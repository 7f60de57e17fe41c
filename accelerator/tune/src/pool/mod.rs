//! Trials as processes.
//!
//! A slot is what one trial runs on. Where more trials are under way than there are slots, those of a slot take turns, from
//! report to report: a trial that waits for an answer keeps its process, and computes nothing.

mod events;
mod worker;

use std::collections::{BTreeMap, VecDeque};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::checkpoint_folder;
use crate::config::TrialId;
use crate::error::{Error, Result};
use crate::host::{Hosts, ProcessProgram};
use crate::runner::{Answer, RunnerEvent, TrialRunner, TrialStart};
use crate::slots::{Resources, Slots};
use crate::trial::protocol::{ToWorker, WorkerPlace};
use worker::{PoolEvent, Worker, WorkerEvent, listen};

/// The choice whether a process carries out several trials, one after the other.
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
pub(crate) struct Pool {
    hosts: Hosts,
    placements: Placements,
    ranks: usize,
    reuse: WorkerReuse,
    logs: PathBuf,
    /// The address to which workers connect.
    address: String,
    workers: BTreeMap<u32, Worker>,
    next_worker: u32,
    events: Receiver<PoolEvent>,
    sender: Sender<PoolEvent>,
    ready: VecDeque<RunnerEvent>,
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
        let slots = Slots::new(resources, slots, &hosts.resources())?;
        let most = slots.len().saturating_mul(resources.processes);
        Ok(Self {
            placements: Placements::new(slots),
            ranks: resources.processes,
            reuse,
            logs,
            address: listen(hosts.address(), hosts.token(), most, sender.clone())?,
            hosts,
            workers: BTreeMap::new(),
            next_worker: 0,
            events,
            sender,
            ready: VecDeque::new(),
        })
    }

    /// Lets the next trial of a slot compute, where none does.
    fn run_next(&mut self, slot: usize) -> Result<()> {
        match self.placements.next_turn(slot) {
            Some(Turn::Start(start)) => self.begin(slot, start),
            Some(Turn::Answer(trial, answer)) => {
                self.send_answer(trial, answer);
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn end_turn(&mut self, trial: TrialId) -> Result<()> {
        let slot = self.placements.end_turn(trial);
        slot.map_or(Ok(()), |slot| self.run_next(slot))
    }

    /// No attempt at the trial runs any more.
    fn remove(&mut self, trial: TrialId) -> Result<()> {
        let slot = self.placements.remove(trial);
        slot.map_or(Ok(()), |slot| self.run_next(slot))
    }

    fn begin(&mut self, slot: usize, start: TrialStart) -> Result<()> {
        let idle = self.workers.iter().find(|(_, worker)| {
            worker.slot == slot && worker.start.is_none() && worker.is_connected()
        });
        let number = match idle {
            Some((number, _)) => *number,
            None => self.spawn(slot)?,
        };
        if let Some(worker) = self.workers.get_mut(&number) {
            worker.assign(start);
        }
        Ok(())
    }

    fn spawn(&mut self, slot_number: usize) -> Result<u32> {
        let number = self.next_worker;
        self.next_worker += 1;
        let slot = &self.placements.slots()[slot_number];
        let log = self.logs.join(match self.hosts.address() {
            Some(_) => format!("worker-{number:05}.{}.log", self.hosts.name(slot.host)),
            None => format!("worker-{number:05}.log"),
        });
        let place = WorkerPlace {
            address: self.address.clone(),
            worker: number,
        };
        let spec = slot.process(ProcessProgram::Worker(place), self.ranks, log);
        let sender = self.sender.clone();
        let exited = move || {
            // Nobody listens once the search has ended.
            let _ = sender.send((number, WorkerEvent::Exited));
        };
        let (process, _) = self.hosts.start(slot.host, &spec, number, exited)?;
        let worker = Worker::new(process, slot_number, self.ranks);
        self.workers.insert(number, worker);
        Ok(number)
    }

    fn send_answer(&mut self, trial: TrialId, answer: Answer) {
        let Some(worker) = self.worker_of(trial) else {
            return;
        };
        let message = match answer {
            Answer::Continue => ToWorker::Continue,
            Answer::Stop => ToWorker::Stop,
            Answer::Save(folder) | Answer::Pause(folder)
                if checkpoint_folder::begin(&folder).is_err() =>
            {
                // Left out: a trial that cannot save continues, or begins anew.
                tracing::warn!("{} cannot be made", folder.display());
                ToWorker::Continue
            }
            Answer::Save(folder) => worker.save(folder, |folder| ToWorker::Save { folder }),
            Answer::Pause(folder) => worker.save(folder, |folder| ToWorker::Pause { folder }),
        };
        worker.send(&message);
    }

    fn worker_of(&mut self, trial: TrialId) -> Option<&mut Worker> {
        let mut workers = self.workers.values_mut();
        workers.find(|worker| worker.trial() == Some(trial))
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
        self.placements.slots().len()
    }

    fn is_computing(&self, trial: TrialId) -> bool {
        self.placements.is_computing(trial)
    }

    fn requested(&self) -> Option<String> {
        Some(self.placements.slots().requested())
    }

    fn start(&mut self, start: TrialStart) -> Result<()> {
        let slot = self.placements.place(start);
        self.run_next(slot)
    }

    fn answer(&mut self, trial: TrialId, answer: Answer) -> Result<()> {
        let slot = self.placements.answer(trial, answer);
        slot.map_or(Ok(()), |slot| self.run_next(slot))
    }

    fn kill(&mut self, trial: TrialId) {
        if let Some(worker) = self.worker_of(trial) {
            worker.start = None;
            worker.on_exit = None;
            worker.process.kill();
            // It takes no other trial.
            worker.closed = Some(Instant::now());
            if let Some((folder, _)) = worker.saving.take() {
                checkpoint_folder::abandon(&folder);
            }
        }
        self.ready.retain(|event| event.trial() != trial);
        if let Err(error) = self.remove(trial) {
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
            worker.send(&ToWorker::Exit);
            unfinished.extend(worker.saving.take().map(|(folder, _)| folder));
        }
        for round in 0..3 {
            let until = Instant::now() + PATIENCE;
            while !self.workers.is_empty() && Instant::now() < until {
                let left = until.saturating_duration_since(Instant::now());
                if let Ok((number, WorkerEvent::Exited)) = self.events.recv_timeout(left)
                    && let Some(mut worker) = self.workers.remove(&number)
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
            checkpoint_folder::abandon(&folder);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.close();
    }
}

/// The time that a worker may continue after its connection has closed.
const CLOSED: Duration = Duration::from_secs(5);
/// The time that workers have to end, before each of two signals.
const PATIENCE: Duration = Duration::from_secs(2);

/// The slot of each trial, and the turns in each slot.
#[derive(Debug)]
struct Placements {
    slots: Slots,
    trials: BTreeMap<TrialId, Placement>,
    /// The turns that wait, by slot.
    turns: Vec<VecDeque<Turn>>,
}

#[derive(Debug)]
struct Placement {
    slot: usize,
    /// It was told to end, and does not count for its slot any more.
    is_stopping: bool,
}

/// A trial's turn in its slot.
#[derive(Debug)]
enum Turn {
    Start(TrialStart),
    Answer(TrialId, Answer),
}

impl Placements {
    fn new(slots: Slots) -> Self {
        Self {
            turns: (0..slots.len()).map(|_| VecDeque::new()).collect(),
            trials: BTreeMap::new(),
            slots,
        }
    }

    fn slots(&self) -> &Slots {
        &self.slots
    }

    fn is_computing(&self, trial: TrialId) -> bool {
        let placement = self.trials.get(&trial);
        placement.is_some_and(|placement| self.slots[placement.slot].active == Some(trial))
    }

    /// Gives a trial the slot with the fewest; it waits for its turn there.
    fn place(&mut self, start: TrialStart) -> usize {
        let mut counts = vec![0; self.slots.len()];
        for placement in self.trials.values().filter(|trial| !trial.is_stopping) {
            counts[placement.slot] += 1;
        }
        let slots = counts.iter().enumerate();
        let fewest = slots.min_by_key(|(_, count)| **count);
        let slot = fewest.map_or(0, |(slot, _)| slot);
        let placement = Placement {
            slot,
            is_stopping: false,
        };
        self.trials.insert(start.trial, placement);
        self.turns[slot].push_back(Turn::Start(start));
        slot
    }

    /// A trial waits for its turn to continue as it is told; its slot.
    fn answer(&mut self, trial: TrialId, answer: Answer) -> Option<usize> {
        let placement = self.trials.get_mut(&trial)?;
        placement.is_stopping |= matches!(answer, Answer::Pause(_) | Answer::Stop);
        let turns = &mut self.turns[placement.slot];
        match answer {
            // It takes no time, and its worker may take the next trial.
            Answer::Stop => turns.push_front(Turn::Answer(trial, answer)),
            answer => turns.push_back(Turn::Answer(trial, answer)),
        }
        Some(placement.slot)
    }

    /// The next turn of a slot, where none is under way.
    fn next_turn(&mut self, slot: usize) -> Option<Turn> {
        if self.slots[slot].active.is_some() {
            return None;
        }
        let turn = self.turns[slot].pop_front()?;
        self.slots[slot].active = Some(turn.trial());
        Some(turn)
    }

    /// A trial's turn is over: it does not compute at present. Its slot.
    fn end_turn(&mut self, trial: TrialId) -> Option<usize> {
        let slot = self.trials.get(&trial)?.slot;
        let active = &mut self.slots[slot].active;
        if *active == Some(trial) {
            *active = None;
        }
        Some(slot)
    }

    /// A trial is not one of its slot's any more; the slot.
    fn remove(&mut self, trial: TrialId) -> Option<usize> {
        let slot = self.end_turn(trial)?;
        self.trials.remove(&trial);
        self.turns[slot].retain(|turn| turn.trial() != trial);
        Some(slot)
    }
}

impl Turn {
    fn trial(&self) -> TrialId {
        match self {
            Self::Start(start) => start.trial,
            Self::Answer(trial, _) => *trial,
        }
    }
}
