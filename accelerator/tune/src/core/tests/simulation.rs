//! A search without processes: trials report when a seeded generator says so.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::json;

use crate::config::{Config, TrialId};
use crate::core::{Action, Core, Decision, Event, Rules, SearchOrder};
use crate::objective::{Mode, Objective};
use crate::scheduler::TrialScheduler;
use crate::space::Random;
use crate::stop::Stop;
use crate::value::Metrics;
use crate::view::{TrialResult, TrialStatus};

/// The random part of a simulation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chance {
    pub(super) seed: u64,
    pub(super) slots: usize,
    /// The number of events in a thousand at which an attempt fails.
    pub(super) failures: u64,
    /// The number of events in a thousand at which everything ends, and is resumed from the journal.
    pub(super) crashes: u64,
}

/// The outcome of a simulated search.
#[derive(Debug)]
pub(super) struct SimulatedSearch {
    pub(super) decisions: Vec<Decision>,
    pub(super) core: Core,
    pub(super) events: Vec<Event>,
}

pub(super) fn rules(order: SearchOrder, iterations: u32) -> Rules {
    Rules {
        objective: Objective::new("score", Mode::Max),
        scheduler_metric: "score".to_owned(),
        scheduler_time: "training_iteration".to_owned(),
        stop: Stop::new().iterations(iterations),
        order,
        max_failures: None,
        checkpoint_frequency: None,
        checkpoint_at_end: false,
        max_trials: None,
        lookahead: 3,
        shares_prefixes: false,
        are_metrics_strict: true,
    }
}

/// Runs a search to its end, and replays its journal. Trial n has `configs[n]`, and after iteration t the score
/// `score(config, t)`.
pub(super) fn simulate(
    rules: &dyn Fn() -> Rules,
    scheduler: &dyn Fn() -> Box<dyn TrialScheduler>,
    configs: &[Config],
    score: &dyn Fn(&Config, u64) -> f64,
    chance: Chance,
) -> SimulatedSearch {
    let mut random = Random::of(chance.seed, &[]);
    let mut events = Vec::new();
    let mut decisions = Vec::new();
    let mut core = Core::new(rules(), scheduler());
    let step =
        |core: &mut Core, event: Event, decisions: &mut Vec<Decision>, events: &mut Vec<Event>| {
            let mut next = Some(event);
            while let Some(event) = next.take() {
                events.push(event.clone());
                decisions.extend(logged(core, [event]));
                let suggested = core.asking().map(|trial| {
                    let config = configs.get(trial.index()).cloned();
                    Event::Suggested { trial, config }
                });
                next = suggested.or_else(|| core.shared());
            }
        };
    let replay = |events: &[Event], decisions: &[Decision]| {
        let mut core = Core::new(rules(), scheduler());
        let again = logged(&mut core, events.iter().cloned());
        assert_eq!(again, decisions, "the journal leads to other decisions");
        core
    };
    let opened = Event::Opened {
        slots: chance.slots,
    };
    step(&mut core, opened.clone(), &mut decisions, &mut events);
    // Attempts, each with the iteration it computes next.
    let mut computing: BTreeMap<TrialId, u64> = BTreeMap::new();
    for _ in 0..1_000_000 {
        if core.is_finished() {
            replay(&events, &decisions);
            return SimulatedSearch {
                decisions,
                core,
                events,
            };
        }
        if random.below(1000) < chance.crashes {
            computing.clear();
            core = replay(&events, &decisions);
            step(&mut core, opened.clone(), &mut decisions, &mut events);
            continue;
        }
        let awaited = core.trials().iter().filter(|trial| trial.is_awaited());
        let awaited: Vec<_> = awaited.map(|trial| (trial.id, trial.decided)).collect();
        computing.retain(|trial, _| awaited.iter().any(|(awaited, _)| awaited == trial));
        for (trial, decided) in &awaited {
            // As many as there are slots compute; the others wait for their turn.
            if computing.len() < chance.slots {
                computing.entry(*trial).or_insert(decided + 1);
            }
        }
        let all_are_begun = core.trials().len() == configs.len();
        assert!(
            computing.len() == chance.slots || all_are_begun || rules().order != SearchOrder::Eager,
            "a slot is idle: {:?}",
            core.trials()
        );
        let nth = random.index(computing.len());
        let trial = *computing.keys().nth(nth).unwrap();
        computing.remove(&trial);
        let state = core.trial(trial).unwrap();
        let event = if random.below(1000) < chance.failures {
            let message = "killed".to_owned();
            Event::Failed { trial, message }
        } else {
            let iteration = state.decided + 1;
            let metrics = Metrics::from([("score", score(state.config(), iteration))]);
            let result = TrialResult::next(state.last.as_ref(), iteration, metrics, 1.0, 0);
            let stop = core.closures_stop(trial, &result);
            Event::Reported {
                trial,
                result,
                stop,
            }
        };
        step(&mut core, event, &mut decisions, &mut events);
    }
    panic!("the search does not end: {:?}", core.trials());
}

/// Returns what the core decides at these events.
pub(super) fn logged(core: &mut Core, events: impl IntoIterator<Item = Event>) -> Vec<Decision> {
    let actions = events.into_iter().flat_map(|event| core.step(event));
    let decisions = actions.filter_map(|action| match action {
        Action::Log(decision) => Some(decision),
        _ => None,
    });
    decisions.collect()
}

/// Configurations with a quality each.
pub(super) fn configs(count: u64, seed: u64) -> Vec<Config> {
    let mut random = Random::of(seed, &[]);
    let config = |quality: u64| serde_json::from_value(json!({ "quality": quality })).unwrap();
    (0..count).map(|_| config(random.below(1000))).collect()
}

pub(super) fn quality(config: &Config) -> f64 {
    config.parse("quality").unwrap()
}

/// Every trial has ended once, and nothing is decided of it afterwards.
pub(super) fn check(outcome: &SimulatedSearch) {
    let mut ended = BTreeSet::new();
    for decision in &outcome.decisions {
        let (trial, is_end) = match decision {
            Decision::End { trial, .. } => (trial, true),
            Decision::Start { trial, .. }
            | Decision::Continue { trial, .. }
            | Decision::Save { trial, .. }
            | Decision::Pause { trial, .. }
            | Decision::Resume { trial, .. }
            | Decision::Exploit { trial, .. } => (trial, false),
        };
        assert!(!ended.contains(trial), "{decision:?}");
        if is_end {
            ended.insert(*trial);
        }
    }
    for state in outcome.core.trials() {
        let has_ended = matches!(state.status, TrialStatus::Terminated | TrialStatus::Error);
        assert!(has_ended && ended.contains(&state.id), "{state:?}");
    }
}
