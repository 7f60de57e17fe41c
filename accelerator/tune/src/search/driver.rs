//! The loop of a search: it carries out what the core decides, and journals what comes of it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{fs, io};

use accelerator_host::machine::unix_time;

use super::attempt::{Attempt, AttemptState, Backoff};
use super::files::TrialFiles;
use super::replay::{DecisionLog, tell_result};
use crate::config::TrialId;
use crate::core::{Action, CheckpointKey, CheckpointSettings, Core, Event, prunable};
use crate::error::{Error, Result};
use crate::journal::Journal;
use crate::runner::{Location, Offer, Report, Restore, RunnerEvent, TrialRunner, TrialStart};
use crate::searcher::Searcher;
use crate::view::{SearchEnd, TrialResult};

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Limits {
    /// The time at which it pauses.
    pub(crate) deadline: Option<Instant>,
    /// The time that a trial may take for one iteration.
    pub(crate) report_timeout: Option<Duration>,
}

pub(crate) struct Driver<'a> {
    pub(crate) core: Core,
    pub(crate) journal: Journal,
    pub(crate) decisions: DecisionLog,
    pub(crate) runner: &'a mut dyn TrialRunner,
    pub(crate) searcher: &'a mut dyn Searcher,
    pub(crate) files: &'a mut TrialFiles,
    pub(crate) checkpoints: CheckpointSettings,
    pub(crate) limits: Limits,
    pub(crate) attempts: BTreeMap<TrialId, Attempt>,
    /// Trials that cannot start before a checkpoint is saved.
    pub(crate) blocked: BTreeSet<TrialId>,
    pub(crate) backoff: Backoff,
    pub(crate) closing: Option<Instant>,
}

impl Driver<'_> {
    /// Carries the search out until it ends. `interrupted` is asked often; `refresh` may draw.
    pub(crate) fn run(
        &mut self,
        interrupted: &dyn Fn() -> u32,
        refresh: &mut dyn FnMut(&Self) -> Result<()>,
    ) -> Result<SearchEnd> {
        if let Some(trial) = self.core.asking() {
            let config = self.searcher.ask(trial)?;
            self.apply(Event::Suggested { trial, config })?;
        }
        if let Some(event) = self.core.shared() {
            self.apply(event)?;
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
            for trial in self.backoff.take_due(Instant::now()) {
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
            self.prune()?;
            self.journal.append(&Event::Finished)?;
            ending = SearchEnd::Finished;
        }
        self.journal.sync()?;
        refresh(self)?;
        Ok(ending)
    }

    pub(crate) fn location(&self, trial: TrialId) -> Option<Location> {
        self.attempts.get(&trial)?.location.clone()
    }

    fn apply(&mut self, event: Event) -> Result<()> {
        self.journal.append(&event)?;
        let mut actions = self.core.step(event);
        loop {
            for action in actions {
                self.act(action)?;
            }
            let event = match self.core.asking() {
                Some(trial) => {
                    let config = self.searcher.ask(trial)?;
                    Event::Suggested { trial, config }
                }
                None => match self.core.shared() {
                    Some(event) => event,
                    None => return Ok(()),
                },
            };
            self.journal.append(&event)?;
            actions = self.core.step(event);
        }
    }

    fn act(&mut self, action: Action) -> Result<()> {
        match action {
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
            RunnerEvent::Reported { trial, report } => {
                if let Some(attempt) = self.attempts.get_mut(&trial) {
                    let offer = match self.checkpoints.frequency {
                        None => report.offer,
                        Some(_) => Offer::Nothing,
                    };
                    attempt.reported(report.iteration, offer);
                }
                self.reported(trial, report)?;
            }
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

    fn reported(&mut self, trial: TrialId, report: Report) -> Result<()> {
        let Report {
            iteration,
            metrics,
            seconds,
            ..
        } = report;
        let Some(attempt) = self.attempts.get(&trial) else {
            return Ok(());
        };
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
            let result =
                TrialResult::next(last, iteration, metrics, seconds, unix_time().as_secs());
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
                && !self.backoff.is_waiting(trial, Instant::now())
            {
                return self.start(trial);
            }
            return Ok(());
        };
        match attempt.state {
            AttemptState::Waiting(iteration) => {
                let folder = |key| self.checkpoint_folder(key);
                let is_closing = self.closing.is_some();
                let answer = attempt.answer(&self.core, state, iteration, is_closing, &folder);
                let Some(answer) = answer else {
                    return Ok(());
                };
                if let Some(attempt) = self.attempts.get_mut(&trial) {
                    attempt.answered(&answer);
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

    /// Starts an attempt from the nearest checkpoint.
    fn start(&mut self, trial: TrialId) -> Result<()> {
        let Some(state) = self.core.trial(trial) else {
            return Ok(());
        };
        let plan = self.core.plan_attempt(state);
        if let Some(until) = plan.until {
            let mut attempts = self.attempts.values();
            if attempts.any(|attempt| attempt.will_save(&self.core, plan.branch, until)) {
                self.blocked.insert(trial);
                return Ok(());
            }
        }
        let Some(config) = self
            .core
            .branch(plan.branch)
            .map(|state| state.config.clone())
        else {
            return Ok(());
        };
        let restore = plan.checkpoint.map(|key| Restore {
            folder: self.checkpoint_folder(key),
            iteration: key.iteration,
        });
        self.files.log_trial_start(state)?;
        let start = TrialStart {
            trial,
            config,
            folder: self.files.path(state),
            restore,
        };
        self.attempts.insert(trial, Attempt::new(plan));
        self.runner.start(start)
    }

    fn unblock(&mut self) -> Result<()> {
        for trial in std::mem::take(&mut self.blocked) {
            self.reconcile(trial)?;
        }
        Ok(())
    }

    fn prune(&mut self) -> Result<()> {
        for checkpoint in prunable(&self.core, &self.checkpoints) {
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
            .filter(|(_, attempt)| attempt.is_late(most))
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
        let name = key.folder_name();
        match self.core.trial(key.branch.trial) {
            Some(trial) => self.files.path(trial).join(name),
            None => name.into(),
        }
    }
}

const TICK: Duration = Duration::from_millis(100);
/// The time that trials have to save when a search is interrupted, or has ended.
const GRACE: Duration = Duration::from_secs(30);

fn remove(folder: &Path) -> Result<()> {
    match fs::remove_dir_all(folder) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(Error::io("delete", folder, error)),
    }
}
