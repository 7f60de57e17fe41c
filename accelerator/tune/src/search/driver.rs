//! The loop of a search: it carries out what the core decides, and journals what comes of it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use std::{fs, io};

use super::backoff::Backoff;
use super::decisions::DecisionLog;
use super::replay::{ask, tell_result};
use crate::core::{
    Action, Branch, CheckpointKey, CheckpointSettings, Core, Event, TrialState, prunable,
    result_after,
};
use crate::error::{Error, Result};
use crate::journal::Journal;
use crate::metrics::Metrics;
use crate::output::SearchEnd;
use crate::runner::{Answer, Location, Restore, RunnerEvent, TrialRunner, TrialStart};
use crate::searcher::Searcher;
use crate::trial_id::TrialId;
use crate::view::{TrialResult, TrialStatus};

/// The files of trials.
pub(crate) trait TrialLogger {
    /// The trial's folder, whether it is there or not.
    fn path(&self, trial: &TrialState) -> PathBuf;

    /// Makes the trial's folder, where it is not there.
    fn log_trial_start(&mut self, trial: &TrialState) -> Result<()>;

    /// A result counts, of that branch of the trial.
    fn log_trial_result(
        &mut self,
        trial: &TrialState,
        branch: Branch,
        result: &TrialResult,
    ) -> Result<()>;

    /// A trial has ended, or an attempt at it has failed.
    fn log_trial_end(&mut self, trial: &TrialState) -> Result<()>;
}

/// How far a search may go.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Limits {
    /// When it pauses.
    pub(crate) deadline: Option<Instant>,
    /// How long a trial may take for one iteration.
    pub(crate) report_timeout: Option<Duration>,
}

/// A search that runs.
pub(crate) struct Driver<'a, F> {
    pub(crate) core: Core,
    pub(crate) journal: Journal,
    pub(crate) decisions: DecisionLog,
    pub(crate) runner: &'a mut dyn TrialRunner,
    pub(crate) searcher: &'a mut dyn Searcher,
    pub(crate) files: &'a mut F,
    pub(crate) settings: CheckpointSettings,
    pub(crate) limits: Limits,
    pub(crate) attempts: BTreeMap<TrialId, Attempt>,
    /// Trials that cannot start before a checkpoint is saved.
    pub(crate) blocked: BTreeSet<TrialId>,
    pub(crate) backoff: Backoff,
    pub(crate) closing: Option<Instant>,
    /// The searcher is still to be asked for this trial.
    pub(crate) asked: Option<TrialId>,
}

/// What runs for a trial.
#[derive(Debug)]
pub(crate) struct Attempt {
    /// Whose configuration it has: the trial's branch, or one that it goes back to.
    branch: Branch,
    /// The iteration at which it is to save and end: where the next branch begins.
    until: Option<u64>,
    state: AttemptState,
    since: Instant,
    pub(crate) location: Option<Location>,
    /// What it loads, until it has reported.
    restores: Option<CheckpointKey>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum AttemptState {
    Computing,
    /// It has reported this iteration, and waits.
    Waiting(u64),
    /// It saves what it has after its last iteration, or ends.
    Stopping,
}

impl<F: TrialLogger> Driver<'_, F> {
    /// Carries the search out until it ends. `interrupted` is asked often; `refresh` may draw.
    pub(crate) fn run(
        &mut self,
        interrupted: &dyn Fn() -> u32,
        refresh: &mut dyn FnMut(&Self) -> Result<()>,
    ) -> Result<SearchEnd> {
        if let Some(trial) = self.asked.take() {
            let config = ask(self.searcher, trial)?;
            self.apply(Event::Suggested { trial, config })?;
        }
        let slots = self.runner.slots();
        self.apply(Event::Opened { slots })?;
        let mut ending = SearchEnd::Finished;
        while !self.core.is_finished() {
            refresh(self)?;
            let event = self.runner.next(TICK)?;
            // Before the event is taken: what ended this process's trials may have told it so.
            if self.closing.is_none() {
                let is_over = self.limits.deadline.is_some_and(|at| Instant::now() >= at);
                if interrupted() > 0 || is_over {
                    ending = match is_over {
                        true => SearchEnd::OutOfTime,
                        false => SearchEnd::Interrupted,
                    };
                    self.close()?;
                }
            }
            if let Some(event) = event {
                self.handle(event)?;
            }
            if let Some(until) = self.closing
                && (self.attempts.is_empty() || Instant::now() >= until || interrupted() > 1)
            {
                break;
            }
            self.check_timeouts()?;
            self.journal.sync_if_due()?;
            for trial in self.backoff.due(Instant::now()) {
                self.reconcile(trial)?;
            }
        }
        if self.core.is_finished() {
            // Trials that were told to save as they end.
            let until = Instant::now() + GRACE;
            while !self.attempts.is_empty() && Instant::now() < until && interrupted() == 0 {
                if let Some(event) = self.runner.next(TICK)? {
                    self.handle(event)?;
                }
            }
            self.journal.append(&Event::Finished)?;
            ending = SearchEnd::Finished;
        }
        self.journal.sync()?;
        refresh(self)?;
        Ok(ending)
    }

    /// Where a trial runs.
    pub(crate) fn location(&self, trial: TrialId) -> Option<Location> {
        self.attempts.get(&trial)?.location.clone()
    }

    /// An event takes effect.
    fn apply(&mut self, event: Event) -> Result<()> {
        self.journal.append(&event)?;
        let mut actions = self.core.step(event);
        loop {
            let mut asked = None;
            for action in actions {
                match action {
                    Action::Ask(trial) => asked = Some(trial),
                    action => self.act(action)?,
                }
            }
            let Some(trial) = asked else {
                return Ok(());
            };
            let config = ask(self.searcher, trial)?;
            let event = Event::Suggested { trial, config };
            self.journal.append(&event)?;
            actions = self.core.step(event);
        }
    }

    fn act(&mut self, action: Action) -> Result<()> {
        match action {
            // By `apply`.
            Action::Ask(_) => {}
            Action::Log(decision) => self.decisions.append(&decision)?,
            Action::Record { branch, result } => {
                if let Some(state) = self.core.trial(branch.trial) {
                    self.files.log_trial_result(state, branch, &result)?;
                }
                tell_result(self.searcher, &self.core, branch.trial, &result)?;
            }
            Action::Tell(trial, end) => {
                self.searcher.tell(trial, end)?;
                if let Some(state) = self.core.trial(trial) {
                    self.files.log_trial_end(state)?;
                }
            }
            Action::Reconcile(trial) => self.reconcile(trial)?,
            Action::Finish => {}
        }
        Ok(())
    }

    fn handle(&mut self, event: RunnerEvent) -> Result<()> {
        match event {
            RunnerEvent::Started { trial, location } => {
                if let Some(attempt) = self.attempts.get_mut(&trial) {
                    attempt.location = Some(location);
                    attempt.since = Instant::now();
                }
            }
            RunnerEvent::Reported {
                trial,
                iteration,
                metrics,
                seconds,
            } => self.reported(trial, iteration, metrics, seconds)?,
            RunnerEvent::Saved {
                trial,
                iteration,
                bytes,
            } => {
                if let Some(attempt) = self.attempts.get(&trial) {
                    let checkpoint = CheckpointKey {
                        branch: attempt.branch,
                        iteration,
                    };
                    self.apply(Event::Saved { checkpoint, bytes })?;
                    self.prune()?;
                    self.unblock()?;
                }
            }
            RunnerEvent::Stopped { trial } => {
                self.attempts.remove(&trial);
                self.reconcile(trial)?;
                self.unblock()?;
            }
            RunnerEvent::Ended { trial } => {
                let attempt = self.attempts.remove(&trial);
                if attempt.is_some_and(|attempt| attempt.until.is_some()) {
                    let message = "it ended earlier than the time before".to_owned();
                    self.apply(Event::Failed { trial, message })?;
                } else {
                    self.apply(Event::Ended { trial })?;
                }
                self.unblock()?;
            }
            RunnerEvent::Failed { trial, message } => self.failed(trial, message)?,
        }
        Ok(())
    }

    fn reported(
        &mut self,
        trial: TrialId,
        iteration: u64,
        metrics: Metrics,
        seconds: f64,
    ) -> Result<()> {
        let Some(attempt) = self.attempts.get_mut(&trial) else {
            return Ok(());
        };
        attempt.state = AttemptState::Waiting(iteration);
        attempt.restores = None;
        let is_own = attempt.until.is_none();
        let branch = attempt.branch;
        let Some(state) = self.core.trial(trial) else {
            return Ok(());
        };
        if is_own && branch == state.branch() && state.is_awaited() && iteration > state.decided {
            if iteration != state.decided + 1 {
                let message = format!(
                    "it reported iteration {iteration} after {}; iterations are counted from the checkpoint that it loads",
                    state.decided
                );
                self.runner.kill(trial);
                return self.failed(trial, message);
            }
            let last = state.last.as_ref();
            let result = result_after(last, iteration, metrics, seconds, unix_time());
            // Before it is journaled: a search without results may be corrected.
            self.core.check_metrics(trial, &result)?;
            let stop = self.core.closures_stop(trial, &result);
            let event = Event::Reported {
                trial,
                result,
                stop,
            };
            self.apply(event)?;
            if self.closing.is_none() {
                return Ok(());
            }
        }
        self.reconcile(trial)
    }

    fn failed(&mut self, trial: TrialId, message: String) -> Result<()> {
        self.attempts.remove(&trial);
        if self.closing.is_none() {
            let done = self.core.trial(trial).map_or(0, |state| state.decided);
            self.backoff.failed(trial, done, Instant::now());
            self.apply(Event::Failed { trial, message })?;
            if let Some(state) = self.core.trial(trial) {
                self.files.log_trial_end(state)?;
            }
        }
        self.unblock()
    }

    /// Brings what runs for a trial in line with what was decided.
    fn reconcile(&mut self, trial: TrialId) -> Result<()> {
        let Some(state) = self.core.trial(trial) else {
            return Ok(());
        };
        let Some(attempt) = self.attempts.get(&trial) else {
            if state.is_awaited()
                && self.closing.is_none()
                && !self.backoff.keeps(trial, Instant::now())
            {
                return self.start(trial);
            }
            return Ok(());
        };
        match attempt.state {
            AttemptState::Waiting(iteration) => {
                let Some(answer) = self.answer(state, attempt, iteration) else {
                    return Ok(());
                };
                if let Some(attempt) = self.attempts.get_mut(&trial) {
                    attempt.since = Instant::now();
                    attempt.state = match answer {
                        Answer::Continue | Answer::Save(_) => AttemptState::Computing,
                        Answer::Pause(_) | Answer::Stop => AttemptState::Stopping,
                    };
                }
                self.runner.answer(trial, answer)
            }
            // It has ended while it computes: it failed in another attempt.
            AttemptState::Computing if state.end.is_some() => {
                self.runner.kill(trial);
                self.attempts.remove(&trial);
                Ok(())
            }
            AttemptState::Computing | AttemptState::Stopping => Ok(()),
        }
    }

    /// What a trial is told after an iteration; `None` while that is not decided.
    fn answer(&self, state: &TrialState, attempt: &Attempt, iteration: u64) -> Option<Answer> {
        let key = CheckpointKey {
            branch: attempt.branch,
            iteration,
        };
        let is_saved = self.core.checkpoints().contains_key(&key);
        let pause = || match is_saved {
            true => Answer::Stop,
            false => Answer::Pause(self.checkpoint_folder(key)),
        };
        if let Some(until) = attempt.until {
            return Some(match iteration < until {
                true => Answer::Continue,
                false => pause(),
            });
        }
        if attempt.branch != state.branch() {
            return Some(Answer::Stop);
        }
        if iteration > state.decided {
            return self.closing.map(|_| pause());
        }
        let is_wanted = state.branch_state().saves.contains(&iteration);
        let go_on = match is_wanted && !is_saved {
            true => Answer::Save(self.checkpoint_folder(key)),
            false => Answer::Continue,
        };
        if iteration < state.decided {
            return Some(go_on);
        }
        Some(match state.status {
            TrialStatus::Running if self.closing.is_some() => pause(),
            TrialStatus::Running | TrialStatus::Pending => go_on,
            TrialStatus::Paused => pause(),
            TrialStatus::Terminated | TrialStatus::Error if is_wanted => pause(),
            TrialStatus::Terminated | TrialStatus::Error => Answer::Stop,
        })
    }

    /// Starts an attempt from the nearest checkpoint.
    fn start(&mut self, trial: TrialId) -> Result<()> {
        let Some(state) = self.core.trial(trial) else {
            return Ok(());
        };
        let checkpoint = self.core.nearest_checkpoint(state.branch(), state.decided);
        let line = self.core.lineage(state.branch());
        // The first branch that the checkpoint is of, or begins.
        let mut at = match checkpoint {
            Some(key) => line
                .iter()
                .position(|branch| *branch == key.branch)
                .unwrap_or(0),
            None => 0,
        };
        let reached = checkpoint.map_or(0, |key| key.iteration);
        let starts = |branch: Branch| self.core.branch(branch).map_or(0, |state| state.start());
        while at + 1 < line.len() && starts(line[at + 1]) <= reached {
            at += 1;
        }
        let branch = line[at];
        let until = line.get(at + 1).map(|next| starts(*next));
        if until.is_some() && self.is_being_made(branch, until) {
            self.blocked.insert(trial);
            return Ok(());
        }
        let Some(config) = self.core.branch(branch).map(|state| state.config.clone()) else {
            return Ok(());
        };
        let restore = checkpoint.map(|key| Restore {
            folder: self.checkpoint_folder(key),
            iteration: key.iteration,
        });
        self.files.log_trial_start(state)?;
        let folder = self.files.path(state);
        let start = TrialStart {
            trial,
            config,
            folder,
            restore,
        };
        let attempt = Attempt {
            branch,
            until,
            state: AttemptState::Computing,
            since: Instant::now(),
            location: None,
            restores: checkpoint,
        };
        self.attempts.insert(trial, attempt);
        self.runner.start(start)
    }

    /// Whether an attempt that runs will save the checkpoint at which another branch begins.
    fn is_being_made(&self, branch: Branch, until: Option<u64>) -> bool {
        let Some(until) = until else {
            return false;
        };
        self.attempts.values().any(|attempt| {
            let reached = match attempt.state {
                AttemptState::Waiting(iteration) => iteration,
                _ => 0,
            };
            let saves = match attempt.until {
                Some(end) => end == until,
                None => self
                    .core
                    .branch(branch)
                    .is_some_and(|state| state.saves.contains(&until)),
            };
            attempt.branch == branch && saves && reached <= until
        })
    }

    fn unblock(&mut self) -> Result<()> {
        for trial in std::mem::take(&mut self.blocked) {
            self.reconcile(trial)?;
        }
        Ok(())
    }

    fn prune(&mut self) -> Result<()> {
        for checkpoint in prunable(&self.core, &self.settings) {
            let mut attempts = self.attempts.values();
            let is_in_use = attempts.any(|attempt| attempt.restores == Some(checkpoint));
            if is_in_use {
                continue;
            }
            self.apply(Event::Deleted { checkpoint })?;
            // A journal that names a checkpoint which is gone would be wrong.
            self.journal.sync()?;
            remove(&self.checkpoint_folder(checkpoint))?;
        }
        Ok(())
    }

    /// Attempts save at their next report, and end.
    fn close(&mut self) -> Result<()> {
        self.closing = Some(Instant::now() + GRACE);
        let trials: Vec<_> = self.attempts.keys().copied().collect();
        for trial in trials {
            self.reconcile(trial)?;
        }
        Ok(())
    }

    fn check_timeouts(&mut self) -> Result<()> {
        let Some(most) = self.limits.report_timeout else {
            return Ok(());
        };
        for (trial, attempt) in &mut self.attempts {
            if !self.runner.is_computing(*trial) {
                attempt.since = Instant::now();
            }
        }
        let late: Vec<_> = self
            .attempts
            .iter()
            .filter(|(_, attempt)| {
                attempt.location.is_some()
                    && !matches!(attempt.state, AttemptState::Waiting(_))
                    && attempt.since.elapsed() > most
            })
            .map(|(trial, _)| *trial)
            .collect();
        for trial in late {
            self.runner.kill(trial);
            let message = format!("it did not report within {most:?}, and was ended");
            self.failed(trial, message)?;
        }
        Ok(())
    }

    fn checkpoint_folder(&self, key: CheckpointKey) -> PathBuf {
        let name = checkpoint_name(key);
        let trial = self.core.trial(key.branch.trial);
        trial.map_or_else(
            || PathBuf::from(&name),
            |trial| self.files.path(trial).join(&name),
        )
    }
}

/// Such as `checkpoint_000004`.
pub(crate) fn checkpoint_name(key: CheckpointKey) -> String {
    let CheckpointKey { branch, iteration } = key;
    match branch.generation {
        0 => format!("checkpoint_{iteration:06}"),
        generation => format!("checkpoint_{iteration:06}.{generation}"),
    }
}

const TICK: Duration = Duration::from_millis(100);
/// How long trials have to save when a search is interrupted, or has ended.
const GRACE: Duration = Duration::from_secs(30);

fn remove(folder: &Path) -> Result<()> {
    match fs::remove_dir_all(folder) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(Error::io("delete", folder, error)),
    }
}

/// Seconds since 1970.
pub(super) fn unix_time() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |now| now.as_secs())
}
