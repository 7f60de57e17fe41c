//! The core of a search: events in, actions out.
//!
//! It has no clock and does no I/O, so the journal of its events is all that there is to know about a search.

mod checkpoints;
mod decide;
mod event;
mod prefix;
#[cfg(test)]
mod tests;
mod trial_state;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use serde::{Deserialize, Serialize};

use crate::config::{Config, TrialId};
use crate::error::{Error, Result};
use crate::fields;
use crate::objective::Objective;
use crate::scheduler::{OtherTrials, TrialScheduler};
use crate::stop::Stop;
use crate::view::{TrialResult, TrialStatus};

pub use checkpoints::CheckpointSettings;
pub(crate) use checkpoints::prunable;
pub(crate) use decide::AttemptPlan;
use event::Origin;
pub(crate) use event::{Action, Branch, CheckpointKey, Decision, EndReason, Event};
pub(crate) use trial_state::TrialState;
use trial_state::TrialUpdate;

#[derive(Debug)]
pub(crate) struct Core {
    rules: Rules,
    scheduler: Box<dyn TrialScheduler>,
    trials: Vec<TrialState>,
    /// The trials by status: this field and the next two.
    pending: BTreeSet<TrialId>,
    paused: BTreeSet<TrialId>,
    running: BTreeSet<TrialId>,
    /// Running trials with an update, as these arrived.
    arrived: VecDeque<TrialId>,
    workers: usize,
    /// Virtual time: that of the newest decision.
    now: u64,
    is_asking: bool,
    /// A trial that begins with results of another, until closures have judged these results.
    sharing: Option<(TrialId, Vec<TrialResult>)>,
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
            pending: BTreeSet::new(),
            paused: BTreeSet::new(),
            running: BTreeSet::new(),
            arrived: VecDeque::new(),
            workers,
            now: 0,
            is_asking: false,
            sharing: None,
            is_exhausted: false,
            is_finished: false,
            checkpoints: BTreeMap::new(),
            actions: Vec::new(),
        }
    }

    /// Takes an event. An event that cannot be, such as a report of a trial that has ended, changes nothing.
    pub(crate) fn step(&mut self, event: Event) -> Vec<Action> {
        if !matches!(event, Event::Shared { .. }) {
            // A journal of an earlier version has no judgements: the closures of this process give them, if it has any.
            while let Some(Event::Shared { stop, .. }) = self.shared() {
                self.share(stop);
                self.advance();
            }
        }
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
                    self.arrive(trial, TrialUpdate::Reported(result));
                }
            }
            Event::Shared { trial, stop } => {
                if self
                    .sharing
                    .as_ref()
                    .is_some_and(|(next, _)| *next == trial)
                {
                    self.share(stop);
                }
            }
            Event::Ended { trial } => {
                if self.trial(trial).is_some_and(TrialState::is_awaited) {
                    self.arrive(trial, TrialUpdate::Ended);
                }
            }
            Event::Failed { trial, message } => self.failed(trial, message),
            Event::Saved { checkpoint, bytes } => {
                self.checkpoints.insert(checkpoint, bytes);
                if let Some(state) = self.trials.get_mut(checkpoint.branch.trial.index()) {
                    state.saved(checkpoint, &self.rules.objective);
                }
            }
            Event::Deleted { checkpoint } => {
                self.checkpoints.remove(&checkpoint);
                if let Some(state) = self.trials.get_mut(checkpoint.branch.trial.index()) {
                    state.best_saved.take_if(|(best, _)| *best == checkpoint);
                }
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

    /// Returns `true` if a closure of the search ends a trial with this result.
    pub(crate) fn closures_stop(&self, trial: TrialId, result: &TrialResult) -> bool {
        self.rules.stop.closures_say(trial, result)
    }

    /// Returns the judgement of closures about results that a trial shares, if that is the next event.
    pub(crate) fn shared(&self) -> Option<Event> {
        let (trial, results) = self.sharing.as_ref()?;
        let mut results = results.iter();
        let stop = results.find(|result| self.closures_stop(*trial, result));
        Some(Event::Shared {
            trial: *trial,
            stop: stop.map(|result| result.training_iteration),
        })
    }

    pub(crate) fn metric(&self) -> &str {
        &self.rules.objective.metric
    }

    /// Returns the trial for which the searcher's reply is the next event.
    pub(crate) fn asking(&self) -> Option<TrialId> {
        #[expect(clippy::cast_possible_truncation, reason = "fewer than 2^32 trials")]
        let next = TrialId::new(self.trials.len() as u32);
        self.is_asking.then_some(next)
    }

    /// Returns the number of trials that there will be, once it is known.
    pub(crate) fn expected(&self) -> Option<usize> {
        self.is_exhausted.then_some(self.trials.len())
    }

    /// Checkpoints on the disk and their bytes.
    pub(crate) fn checkpoints(&self) -> &BTreeMap<CheckpointKey, u64> {
        &self.checkpoints
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
                self.pending.insert(trial);
            }
            None => self.is_exhausted = true,
        }
    }

    fn arrive(&mut self, trial: TrialId, update: TrialUpdate) {
        self.trial_mut(trial).update = Some(update);
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
            false => self.arrive(trial, TrialUpdate::Failed),
        }
    }

    /// Starts what can start, and decides about what has arrived.
    fn advance(&mut self) {
        while !self.is_asking && self.sharing.is_none() && !self.is_finished {
            if self.start_next() {
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
        let awaits_event = self.is_asking || self.sharing.is_some();
        if awaits_event || self.is_finished || !self.running.is_empty() || self.workers == 0 {
            return;
        }
        // Nothing runs, and nothing could begin.
        for trial in std::mem::take(&mut self.paused) {
            self.end(trial, EndReason::Scheduler);
        }
        self.is_finished = true;
    }

    /// Gives a worker without a trial one, or asks the searcher; whether a trial has begun or was resumed.
    fn start_next(&mut self) -> bool {
        let can_ask = !self.is_exhausted
            && self
                .rules
                .max_trials
                .is_none_or(|most| self.trials.len() < most as usize);
        if !can_ask {
            self.is_exhausted = true;
        }
        if can_ask && self.workers > 0 && self.pending.len() < self.rules.lookahead {
            self.is_asking = true;
            return false;
        }
        if self.running.len() >= self.workers {
            return false;
        }
        let others = match (self.pending.is_empty() && !can_ask, self.running.is_empty()) {
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
        match self.next_pending() {
            Some((trial, origin)) => {
                self.pending.remove(&trial);
                self.start(trial, origin);
                true
            }
            None => {
                self.is_asking = can_ask;
                false
            }
        }
    }

    /// The next trial to begin, and what it continues from.
    fn next_pending(&self) -> Option<(TrialId, Option<Origin>)> {
        if !self.rules.shares_prefixes {
            return self.pending.first().map(|trial| (*trial, None));
        }
        self.pending.iter().find_map(|trial| {
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
        let results = parent.recent.iter();
        let shared = results.take_while(|result| result.training_iteration <= origin.iteration);
        self.sharing = Some((trial, shared.cloned().collect()));
        self.trial_mut(trial).branch_state_mut().origin = Some((from, origin));
    }

    /// Begins the trial that shares results: they count as its reports, too.
    fn share(&mut self, stop: Option<u64>) {
        let Some((trial, results)) = self.sharing.take() else {
            return;
        };
        self.run(trial);
        for result in results {
            if !self.running.contains(&trial) {
                break;
            }
            let state = self.trial_mut(trial);
            state.is_told_to_stop = stop == Some(result.training_iteration);
            state.update = Some(TrialUpdate::Reported(result));
            self.decide(trial);
        }
        let now = self.now;
        self.trial_mut(trial).due = now + 1;
    }

    /// The trial to decide about now; `None` where one that still computes may come first.
    fn next_arrived(&mut self) -> Option<TrialId> {
        if self.rules.order == SearchOrder::Eager {
            return self.arrived.pop_front();
        }
        let next = self.running.iter().copied();
        let next = next.min_by_key(|trial| (self.trials[trial.index()].due, *trial))?;
        let state = &self.trials[next.index()];
        state.update.as_ref()?;
        self.now = state.due;
        self.arrived.retain(|trial| *trial != next);
        Some(next)
    }

    fn run(&mut self, trial: TrialId) {
        let state = self.trial_mut(trial);
        state.status = TrialStatus::Running;
        self.running.insert(trial);
        self.go_on(trial);
    }

    /// A running trial computes to its next report.
    fn go_on(&mut self, trial: TrialId) {
        let now = self.now;
        self.trial_mut(trial).due = now + 1;
        self.actions.push(Action::Reconcile(trial));
    }

    fn log(&mut self, decision: Decision) {
        self.actions.push(Action::Log(decision));
    }
}

/// The order in which reports are decided about.
///
/// ```
/// use accelerator_tune::SearchOrder;
///
/// let ordered: SearchOrder = serde_json::from_str(r#"{"ordered": {"workers": 4}}"#)?;
/// assert_eq!(ordered, SearchOrder::Ordered { workers: 4 });
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum SearchOrder {
    /// The order in which they arrive: no slot waits for another, and another run may decide otherwise.
    #[default]
    Eager,
    /// The order in which that many workers would give them if each iteration took the same time. Decisions then follow
    /// from the specification and what trials report: they are the same at any number of slots, at any speed, and after
    /// any interruption. A trial that is faster than others waits for them.
    Ordered {
        /// The number of trials that are under way at a time. If there are fewer slots, they take turns.
        workers: usize,
    },
}

#[derive(Debug)]
pub(crate) struct Rules {
    pub(crate) objective: Objective,
    /// The metric and the time that the scheduler looks at.
    pub(crate) scheduler_metric: String,
    pub(crate) scheduler_time: String,
    pub(crate) stop: Stop,
    pub(crate) order: SearchOrder,
    /// The number of failed attempts at a trial that are repeated; `None` for no limit.
    pub(crate) max_failures: Option<u32>,
    /// A checkpoint after every so many iterations.
    pub(crate) checkpoint_frequency: Option<u64>,
    pub(crate) checkpoint_at_end: bool,
    pub(crate) max_trials: Option<u32>,
    /// The number of trials that the searcher is asked for before they can begin.
    pub(crate) lookahead: usize,
    /// Set if trials continue from those whose configurations were the same up to there.
    pub(crate) shares_prefixes: bool,
    /// Set if trials have to report every metric that is named here.
    pub(crate) are_metrics_strict: bool,
}

impl Rules {
    /// Fails where the result has not all metrics that are looked at.
    fn check_metrics(&self, trial: TrialId, result: &TrialResult) -> Result<()> {
        let own = [
            ("metric", &*self.objective.metric),
            ("scheduler.metric", &self.scheduler_metric),
            ("scheduler.time_attr", &self.scheduler_time),
        ];
        let of_stop = self.stop.metrics().map(|metric| ("stop", metric));
        let mut named = own.into_iter().chain(of_stop);
        let missing = named.find(|(_, metric)| result.value(metric).is_none());
        let Some((place, metric)) = missing.filter(|_| self.are_metrics_strict) else {
            return Ok(());
        };
        let reported: Vec<_> = result.metrics.iter().map(|(name, _)| name).collect();
        let meant = fields::nearest(metric, reported.iter().copied());
        let meant = meant.map(|name| format!("; did you mean `{name}`?"));
        Err(Error::misuse(format!(
            "`{place}` names the metric `{metric}`, and trial {trial} has reported without it: {}{} Correct the name, report it \
             from the first iteration on, or, where trials measure it later, set `disable_strict_metric_checking`",
            match reported.is_empty() {
                true => "nothing".to_owned(),
                false => reported.join(", "),
            },
            meant.as_deref().unwrap_or(".")
        )))
    }
}
