//! The core of a search: events in, actions out.
//!
//! It has no clock and does no I/O, so the journal of its events is all that there is to know about a search.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::config::Config;
use crate::error::Result;
use crate::metrics::Metrics;
use crate::scheduler::{Observation, OtherTrials, SchedulerDecision, TrialScheduler};
use crate::searcher::TrialEnd;
use crate::trial_id::TrialId;
use crate::view::{TrialResult, TrialStatus};
use event::Origin;
use trial_state::{BranchState, Pending};

pub use checkpoints::CheckpointSettings;
pub(crate) use checkpoints::prunable;
pub(crate) use event::{Action, Branch, CheckpointKey, Decision, EndReason, Event};
pub(crate) use rules::Rules;
pub use rules::SearchOrder;
pub(crate) use trial_state::TrialState;

mod checkpoints;
mod event;
mod prefix;
mod rules;
#[cfg(test)]
mod scheduler_tests;
#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;
mod trial_state;

/// A search in progress.
#[derive(Debug)]
pub(crate) struct Core {
    rules: Rules,
    scheduler: Box<dyn TrialScheduler>,
    trials: Vec<TrialState>,
    /// Trials that have not begun, and those that are paused.
    waiting: BTreeSet<TrialId>,
    paused: BTreeSet<TrialId>,
    running: BTreeSet<TrialId>,
    /// Running trials with something to decide, as it arrived.
    arrived: VecDeque<TrialId>,
    workers: usize,
    /// Virtual time: that of the newest decision.
    now: u64,
    is_asking: bool,
    is_exhausted: bool,
    is_finished: bool,
    checkpoints: BTreeMap<CheckpointKey, u64>,
    actions: Vec<Action>,
}

impl Core {
    pub(crate) fn new(rules: Rules, scheduler: Box<dyn TrialScheduler>) -> Self {
        let workers = match rules.order {
            // Until it is opened.
            SearchOrder::Eager => 0,
            SearchOrder::Ordered { workers } => workers,
        };
        Self {
            rules,
            scheduler,
            trials: Vec::new(),
            waiting: BTreeSet::new(),
            paused: BTreeSet::new(),
            running: BTreeSet::new(),
            arrived: VecDeque::new(),
            workers,
            now: 0,
            is_asking: false,
            is_exhausted: false,
            is_finished: false,
            checkpoints: BTreeMap::new(),
            actions: Vec::new(),
        }
    }

    /// Takes an event. An event that cannot be, such as a report of a trial that has ended, changes nothing.
    pub(crate) fn step(&mut self, event: Event) -> Vec<Action> {
        match event {
            Event::Opened { slots } => {
                if self.rules.order == SearchOrder::Eager {
                    self.workers = slots;
                }
                let running = self.running.iter().copied().map(Action::Reconcile);
                self.actions.extend(running);
            }
            Event::Suggested { trial, config } => self.suggested(trial, config),
            Event::Reported {
                trial,
                result,
                stop,
            } => {
                if self.trial(trial).is_some_and(|trial| {
                    trial.is_awaited() && result.training_iteration == trial.decided + 1
                }) {
                    self.trial_mut(trial).is_told_to_stop = stop;
                    self.arrive(trial, Pending::Reported(result));
                }
            }
            Event::Ended { trial } => {
                if self.trial(trial).is_some_and(TrialState::is_awaited) {
                    self.arrive(trial, Pending::Ended);
                }
            }
            Event::Failed { trial, message } => self.failed(trial, message),
            Event::Saved { checkpoint, bytes } => {
                self.checkpoints.insert(checkpoint, bytes);
            }
            Event::Deleted { checkpoint } => {
                self.checkpoints.remove(&checkpoint);
            }
            Event::Finished => {}
        }
        self.advance();
        std::mem::take(&mut self.actions)
    }

    /// Fails where the first result of the search has not all metrics that are looked at.
    pub(crate) fn check_metrics(&self, trial: TrialId, result: &TrialResult) -> Result<()> {
        match self.trials.iter().all(|trial| trial.last.is_none()) {
            true => self.rules.check_metrics(trial, result),
            false => Ok(()),
        }
    }

    pub(crate) fn trials(&self) -> &[TrialState] {
        &self.trials
    }

    pub(crate) fn trial(&self, trial: TrialId) -> Option<&TrialState> {
        self.trials.get(trial.index())
    }

    pub(crate) fn scheduler(&self) -> &dyn TrialScheduler {
        &*self.scheduler
    }

    pub(crate) fn is_finished(&self) -> bool {
        self.is_finished
    }

    /// Whether a closure of the search ends a trial with this result.
    pub(crate) fn closures_stop(&self, trial: TrialId, result: &TrialResult) -> bool {
        self.rules.stop.closures_say(trial, result)
    }

    /// The metric of the objective.
    pub(crate) fn metric(&self) -> &str {
        &self.rules.objective.metric
    }

    /// Whether the searcher's reply is the next event.
    pub(crate) fn is_asking(&self) -> bool {
        self.is_asking
    }

    /// How many trials there will be, once that is known.
    pub(crate) fn expected(&self) -> Option<usize> {
        self.is_exhausted.then_some(self.trials.len())
    }

    /// Checkpoints on the disk and their bytes.
    pub(crate) fn checkpoints(&self) -> &BTreeMap<CheckpointKey, u64> {
        &self.checkpoints
    }

    /// The checkpoint from which iteration `iteration` of a branch is reached soonest: the newest of the branch or of
    /// what it goes back to. `None` where there is none, and it begins anew.
    pub(crate) fn nearest_checkpoint(
        &self,
        branch: Branch,
        iteration: u64,
    ) -> Option<CheckpointKey> {
        let (mut branch, mut iteration) = (branch, iteration);
        loop {
            let first = CheckpointKey {
                branch,
                iteration: 0,
            };
            let last = CheckpointKey { branch, iteration };
            if let Some((key, _)) = self.checkpoints.range(first..=last).next_back() {
                return Some(*key);
            }
            (branch, iteration) = match self.branch(branch)?.origin {
                Some((parent, origin)) => (parent, origin.iteration.min(iteration)),
                None => return None,
            };
        }
    }

    /// The branches from the one that a checkpoint (or nothing) is of to `branch`, each with the iteration at which it ends.
    pub(crate) fn lineage(&self, branch: Branch) -> Vec<Branch> {
        let mut line = vec![branch];
        let mut at = branch;
        while let Some((parent, _)) = self.branch(at).and_then(|state| state.origin) {
            line.push(parent);
            at = parent;
        }
        line.reverse();
        line
    }

    pub(crate) fn branch(&self, branch: Branch) -> Option<&BranchState> {
        let trial = self.trial(branch.trial)?;
        trial.branches.get(branch.generation as usize)
    }

    fn trial_mut(&mut self, trial: TrialId) -> &mut TrialState {
        &mut self.trials[trial.index()]
    }

    fn suggested(&mut self, trial: TrialId, config: Option<Config>) {
        if !self.is_asking || trial.index() != self.trials.len() {
            return;
        }
        self.is_asking = false;
        match config {
            Some(config) => {
                self.trials.push(TrialState::new(trial, config));
                self.waiting.insert(trial);
            }
            None => self.is_exhausted = true,
        }
    }

    fn arrive(&mut self, trial: TrialId, pending: Pending) {
        self.trial_mut(trial).pending = Some(pending);
        self.arrived.push_back(trial);
    }

    fn failed(&mut self, trial: TrialId, message: String) {
        let most = self.rules.max_failures;
        let Some(state) = self.trials.get_mut(trial.index()) else {
            return;
        };
        state.failures += 1;
        state.error = Some(message);
        if !state.is_awaited() {
            // It was re-run for a checkpoint, or waits: it will be started again where that is needed.
            self.actions.push(Action::Reconcile(trial));
            return;
        }
        match most.is_none_or(|most| state.failures <= most) {
            true => self.actions.push(Action::Reconcile(trial)),
            false => self.arrive(trial, Pending::Failed),
        }
    }

    /// Begins what can begin, and decides about what has arrived.
    fn advance(&mut self) {
        while !self.is_asking && !self.is_finished {
            if self.begin() {
                continue;
            }
            if self.is_asking {
                return;
            }
            let Some(trial) = self.next_arrived() else {
                break;
            };
            self.decide(trial);
        }
        if self.is_asking || self.is_finished || !self.running.is_empty() || self.workers == 0 {
            return;
        }
        // Nothing runs, and nothing could begin.
        for trial in std::mem::take(&mut self.paused) {
            self.end(trial, EndReason::Scheduler);
        }
        self.is_finished = true;
        self.actions.push(Action::Finish);
    }

    /// Lets a worker without a trial begin one, or asks the searcher; whether anything has begun.
    fn begin(&mut self) -> bool {
        let can_ask = !self.is_exhausted
            && self
                .rules
                .max_trials
                .is_none_or(|most| self.trials.len() < most as usize);
        if !can_ask {
            self.is_exhausted = true;
        }
        if can_ask && self.workers > 0 && self.waiting.len() < self.rules.lookahead {
            self.ask();
            return false;
        }
        if self.running.len() >= self.workers {
            return false;
        }
        let others = match (self.waiting.is_empty() && !can_ask, self.running.is_empty()) {
            (false, _) => OtherTrials::Pending,
            (true, false) => OtherTrials::Running,
            (true, true) => OtherTrials::None,
        };
        if !self.paused.is_empty() || others == OtherTrials::None {
            let paused: Vec<_> = self.paused.iter().copied().collect();
            if let Some(trial) = self.scheduler.choose_trial_to_run(&paused, others)
                && self.paused.remove(&trial)
            {
                let iteration = self.trials[trial.index()].decided;
                self.run(trial);
                self.log(Decision::Resume { trial, iteration });
                return true;
            }
        }
        match self.next_waiting() {
            Some((trial, origin)) => {
                self.waiting.remove(&trial);
                self.start(trial, origin);
                true
            }
            None if can_ask => {
                self.ask();
                false
            }
            None => false,
        }
    }

    fn ask(&mut self) {
        self.is_asking = true;
        #[expect(clippy::cast_possible_truncation, reason = "fewer than 2^32 trials")]
        let next = TrialId::new(self.trials.len() as u32);
        self.actions.push(Action::Ask(next));
    }

    /// The next trial to begin, and what it goes on from.
    fn next_waiting(&self) -> Option<(TrialId, Option<Origin>)> {
        if !self.rules.shares_prefixes {
            return self.waiting.first().map(|trial| (*trial, None));
        }
        self.waiting.iter().find_map(|trial| {
            let origin = prefix::origin(&self.trials, *trial)?;
            Some((*trial, origin))
        })
    }

    fn start(&mut self, trial: TrialId, origin: Option<Origin>) {
        let config = self.trials[trial.index()].config().clone();
        self.scheduler.on_trial_add(trial, &config);
        self.log(Decision::Start {
            trial,
            config,
            from: origin,
        });
        let Some(origin) = origin else {
            self.run(trial);
            return;
        };
        let parent = &self.trials[origin.trial.index()];
        let from = parent.branch();
        let shared: Vec<_> = parent.recent.iter().cloned().collect();
        self.trial_mut(trial).branch_state_mut().origin = Some((from, origin));
        self.run(trial);
        // What is shared counts as reported by this trial too.
        for result in shared {
            if result.training_iteration > origin.iteration || !self.running.contains(&trial) {
                break;
            }
            self.trial_mut(trial).pending = Some(Pending::Reported(result));
            self.decide(trial);
        }
        let now = self.now;
        self.trial_mut(trial).due = now + 1;
    }

    fn run(&mut self, trial: TrialId) {
        let now = self.now;
        let state = self.trial_mut(trial);
        state.status = TrialStatus::Running;
        state.due = now + 1;
        self.running.insert(trial);
        self.actions.push(Action::Reconcile(trial));
    }

    /// The trial to decide about now; `None` where one that still computes may come first.
    fn next_arrived(&mut self) -> Option<TrialId> {
        if self.rules.order == SearchOrder::Eager {
            return self.arrived.pop_front();
        }
        let next = self.running.iter().copied();
        let next = next.min_by_key(|trial| (self.trials[trial.index()].due, *trial))?;
        let state = &self.trials[next.index()];
        state.pending.as_ref()?;
        self.now = state.due;
        self.arrived.retain(|trial| *trial != next);
        Some(next)
    }

    fn decide(&mut self, trial: TrialId) {
        match self.trial_mut(trial).pending.take() {
            Some(Pending::Reported(result)) => self.decide_report(trial, result),
            Some(Pending::Ended) => self.end(trial, EndReason::Completed),
            Some(Pending::Failed) => self.end(trial, EndReason::Failed),
            None => {}
        }
    }

    fn decide_report(&mut self, trial: TrialId, result: TrialResult) {
        let iteration = result.training_iteration;
        let observation = self.observation(trial, &result);
        self.record_result(trial, result);
        let state = &mut self.trials[trial.index()];
        let is_told = std::mem::take(&mut state.is_told_to_stop);
        let recent = state.recent.make_contiguous();
        if is_told || self.rules.stop.is_due(&self.rules.objective, trial, recent) {
            self.end(trial, EndReason::StopRule);
            return;
        }
        let waits = !self.waiting.is_empty() || !self.paused.is_empty() || !self.is_exhausted;
        let is_due = self.is_checkpoint_due(trial, iteration);
        match self.scheduler.on_trial_result(observation, waits) {
            SchedulerDecision::Continue if !is_due => {
                self.go_on(trial);
                self.log(Decision::Continue { trial, iteration });
            }
            SchedulerDecision::Continue | SchedulerDecision::Save => {
                self.trial_mut(trial)
                    .branch_state_mut()
                    .saves
                    .insert(iteration);
                self.go_on(trial);
                self.log(Decision::Save { trial, iteration });
            }
            SchedulerDecision::Pause => {
                let state = self.trial_mut(trial);
                state.branch_state_mut().saves.insert(iteration);
                state.status = TrialStatus::Paused;
                self.running.remove(&trial);
                self.paused.insert(trial);
                self.actions.push(Action::Reconcile(trial));
                self.log(Decision::Pause { trial, iteration });
            }
            SchedulerDecision::Stop => self.end(trial, EndReason::Scheduler),
            SchedulerDecision::Exploit {
                donor,
                iteration: at,
                config,
            } => self.exploit(trial, iteration, donor, at, config),
        }
    }

    fn exploit(&mut self, trial: TrialId, iteration: u64, donor: TrialId, at: u64, config: Config) {
        let from = Origin {
            trial: donor,
            iteration: at,
        };
        let parent = self.trials[donor.index()].branch();
        let state = self.trial_mut(trial);
        let branch = BranchState::new(config.clone(), Some((parent, from)));
        state.branches.push(branch);
        state.decided = at;
        state.recent.clear();
        self.run(trial);
        self.log(Decision::Exploit {
            trial,
            iteration,
            from,
            config,
        });
    }

    fn record_result(&mut self, trial: TrialId, result: TrialResult) {
        let objective = &self.rules.objective;
        let keep = match self.rules.shares_prefixes {
            true => usize::MAX,
            false => self.rules.stop.window().max(1),
        };
        let state = &mut self.trials[trial.index()];
        state.decided = result.training_iteration;
        let value = result.value(&objective.metric);
        let best = state
            .best
            .as_ref()
            .and_then(|best| best.value(&objective.metric));
        if value.is_some_and(|value| best.is_none_or(|best| objective.mode.is_better(value, best)))
        {
            state.best = Some(result.clone());
            state.best_branch = state.branch();
        }
        state.last = Some(result.clone());
        state.recent.push_back(result.clone());
        if state.recent.len() > keep {
            state.recent.pop_front();
        }
        let branch = state.branch();
        self.actions.push(Action::Record { branch, result });
    }

    fn is_checkpoint_due(&self, trial: TrialId, iteration: u64) -> bool {
        let every = self.rules.checkpoint_frequency;
        let is_due = every.is_some_and(|every| iteration.is_multiple_of(every));
        is_due
            || self.rules.shares_prefixes
                && prefix::is_fork(&self.trials, &self.waiting, trial, iteration)
    }

    fn go_on(&mut self, trial: TrialId) {
        let now = self.now;
        self.trial_mut(trial).due = now + 1;
        self.actions.push(Action::Reconcile(trial));
    }

    /// Ends a trial that runs or is paused.
    fn end(&mut self, trial: TrialId, why: EndReason) {
        self.running.remove(&trial);
        self.paused.remove(&trial);
        let at_end = self.rules.checkpoint_at_end;
        let last = self.trials[trial.index()].last.clone();
        match &last {
            Some(_) if why == EndReason::Failed => self.scheduler.on_trial_error(trial),
            Some(last) => {
                let observation = self.observation(trial, last);
                self.scheduler.on_trial_complete(observation);
            }
            None => self.scheduler.on_trial_error(trial),
        }
        let value = self.value_of(trial);
        let state = self.trial_mut(trial);
        state.status = match why {
            EndReason::Failed => TrialStatus::Error,
            _ => TrialStatus::Terminated,
        };
        state.end = Some(why);
        state.pending = None;
        let iteration = state.decided;
        if at_end && matches!(why, EndReason::StopRule | EndReason::Scheduler) {
            state.branch_state_mut().saves.insert(iteration);
        }
        let told = match (why, value) {
            (EndReason::Failed, _) | (_, None) => TrialEnd::Failed,
            (_, Some(value)) if value.is_nan() => TrialEnd::Failed,
            (EndReason::Scheduler, Some(value)) => TrialEnd::Stopped(value),
            (_, Some(value)) => TrialEnd::Completed(value),
        };
        self.actions.push(Action::Tell(trial, told));
        self.actions.push(Action::Reconcile(trial));
        self.log(Decision::End {
            trial,
            iteration,
            why,
        });
    }

    /// The newest value of the objective.
    fn value_of(&self, trial: TrialId) -> Option<f64> {
        let last = self.trials[trial.index()].last.as_ref()?;
        last.value(&self.rules.objective.metric)
    }

    fn observation(&self, trial: TrialId, result: &TrialResult) -> Observation {
        #[expect(clippy::cast_precision_loss, reason = "fewer than 2^53 iterations")]
        let iteration = result.training_iteration as f64;
        Observation {
            trial,
            iteration: result.training_iteration,
            time: result
                .value(&self.rules.scheduler_time)
                .unwrap_or(iteration),
            value: result.value(&self.rules.scheduler_metric),
        }
    }

    fn log(&mut self, decision: Decision) {
        self.actions.push(Action::Log(decision));
    }
}

/// A result as it is journaled, after the one before it.
pub(crate) fn result_after(
    last: Option<&TrialResult>,
    iteration: u64,
    metrics: Metrics,
    seconds: f64,
    timestamp: u64,
) -> TrialResult {
    TrialResult {
        training_iteration: iteration,
        time_this_iter_s: seconds,
        time_total_s: last.map_or(0.0, |last| last.time_total_s) + seconds,
        timestamp,
        metrics,
    }
}
