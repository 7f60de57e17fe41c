use std::collections::BTreeMap;

use proptest::prelude::*;
use serde_json::json;

use super::simulation::{Chance, SimulatedSearch, check, configs, quality, rules, simulate};
use super::{
    Branch, CheckpointKey, CheckpointSettings, Core, Decision, Event, SearchOrder, prunable,
};
use crate::config::{Config, TrialId};
use crate::scheduler::{Observation, OtherTrials, SchedulerDecision, TrialScheduler};
use crate::stop::Stop;
use crate::value::Metrics;
use crate::view::TrialResult;

/// Stops trials that are worse than two thirds of the earlier reports. If others wait, pauses those in the worse half,
/// and resumes the best of them.
#[derive(Debug, Default)]
struct OrderSensitive {
    scores: Vec<f64>,
    paused: BTreeMap<TrialId, f64>,
}

impl TrialScheduler for OrderSensitive {
    fn on_trial_add(&mut self, _trial: TrialId, _config: &Config) {}

    fn on_trial_result(
        &mut self,
        observation: Observation,
        others_wait: bool,
    ) -> SchedulerDecision {
        let value = observation.value.unwrap();
        let rank = self.scores.iter().filter(|score| **score > value).count();
        self.scores.push(value);
        if rank * 3 > self.scores.len() * 2 {
            return SchedulerDecision::Stop;
        }
        if others_wait && rank * 2 > self.scores.len() {
            self.paused.insert(observation.trial, value);
            return SchedulerDecision::Pause;
        }
        SchedulerDecision::Continue
    }

    fn on_trial_complete(&mut self, _last: Observation) {}

    fn on_trial_error(&mut self, _trial: TrialId) {}

    fn choose_trial_to_run(&mut self, paused: &[TrialId], others: OtherTrials) -> Option<TrialId> {
        let best = paused
            .iter()
            .copied()
            .max_by(|left, right| self.paused[left].total_cmp(&self.paused[right]))?;
        (others != OtherTrials::Pending || self.paused[&best] > 500.0).then_some(best)
    }

    fn status(&self) -> Vec<String> {
        Vec::new()
    }
}

fn run(order: SearchOrder, trials: u64, chance: Chance) -> SimulatedSearch {
    let configs = configs(trials, 7);
    let outcome = simulate(
        &|| rules(order, 6),
        &|| Box::<OrderSensitive>::default(),
        &configs,
        &|config, iteration| quality(config) + iteration as f64,
        chance,
    );
    check(&outcome);
    assert_eq!(outcome.core.trials().len() as u64, trials);
    outcome
}

const UNDISTURBED: Chance = Chance {
    seed: 0,
    slots: 4,
    failures: 0,
    crashes: 0,
};

proptest! {
    #[test]
    fn in_ordered_mode_decisions_depend_on_neither_slots_nor_timing_nor_kills(
        seed: u64,
        slots in 1_usize..6,
        workers in 1_usize..6,
        failures in 0_u64..100,
        crashes in 0_u64..60,
    ) {
        let order = SearchOrder::Ordered { workers };
        let undisturbed = run(order, 20, UNDISTURBED);
        let chance = Chance { seed, slots, failures, crashes };
        let disturbed = run(order, 20, chance);
        prop_assert_eq!(undisturbed.decisions, disturbed.decisions);
    }

    #[test]
    fn in_eager_mode_the_journal_leads_to_the_same_decisions(
        seed: u64,
        slots in 1_usize..6,
        failures in 0_u64..100,
    ) {
        let chance = Chance { seed, slots, failures, crashes: 20 };
        let outcome = run(SearchOrder::Eager, 20, chance);
        let mut again = Core::new(rules(SearchOrder::Eager, 6), Box::<OrderSensitive>::default());
        let mut decisions = Vec::new();
        for event in outcome.events {
            for action in again.step(event) {
                if let super::Action::Log(decision) = action {
                    decisions.push(decision);
                }
            }
        }
        prop_assert_eq!(outcome.decisions, decisions);
    }
}

#[test]
fn order_matters_to_decisions_in_eager_mode() {
    let run_with = |seed| {
        let chance = Chance {
            seed,
            ..UNDISTURBED
        };
        run(SearchOrder::Eager, 20, chance).decisions
    };
    assert_ne!(run_with(1), run_with(2));
}

/// Returns schedules with one rate at first, two from iteration 2 on, and three for each of them from iteration 4 on.
fn schedules() -> Vec<Config> {
    let mut configs = Vec::new();
    for second in [0.1, 0.2] {
        for third in [1.0, 2.0, 3.0] {
            let mut config = Config::default();
            config.insert(
                "lr",
                json!({"schedule": [[0, 0.5], [2, second], [4, third]]}),
            );
            configs.push(config);
        }
    }
    configs
}

/// Returns the score of a trial whose state is a hash of the rates that it has seen so far.
fn scheduled_score(config: &Config, iteration: u64) -> f64 {
    let steps: Vec<(u64, f64)> = config.parse("lr/schedule").unwrap();
    let rate = |at: u64| {
        let (_, rate) = steps.iter().rev().find(|(start, _)| *start <= at).unwrap();
        *rate
    };
    (0..iteration).fold(1.0, |state, at| state * 0.5 + rate(at))
}

#[test]
fn trials_that_begin_alike_train_what_they_share_once() {
    let shared = || super::Rules {
        shares_prefixes: true,
        lookahead: usize::MAX,
        ..rules(SearchOrder::Ordered { workers: 2 }, 6)
    };
    let fifo = || -> Box<dyn TrialScheduler> { Box::new(GoOn) };
    let configs = schedules();
    let outcome = simulate(&shared, &fifo, &configs, &scheduled_score, UNDISTURBED);
    check(&outcome);
    let separate = || rules(SearchOrder::Ordered { workers: 2 }, 6);
    let apart = simulate(&separate, &fifo, &configs, &scheduled_score, UNDISTURBED);
    for (one, other) in outcome.core.trials().iter().zip(apart.core.trials()) {
        assert_eq!(one.last, other.last, "{}", one.id);
    }
    let computed = |outcome: &SimulatedSearch| {
        let events = outcome.events.iter();
        events
            .filter(|event| matches!(event, super::Event::Reported { .. }))
            .count()
    };
    // The shared search computes 2 + 2·2 + 6·2 of 6·6 iterations.
    assert_eq!((computed(&outcome), computed(&apart)), (18, 36));
    let origins = outcome
        .decisions
        .iter()
        .filter_map(|decision| match decision {
            Decision::Start { trial, from, .. } => Some((
                trial.number(),
                from.map(|from| (from.trial.number(), from.iteration)),
            )),
            _ => None,
        });
    let origins: BTreeMap<_, _> = origins.collect();
    assert_eq!(origins[&3], Some((0, 2)));
    assert_eq!(origins[&1], Some((0, 4)));
    assert_eq!(origins[&5].map(|(_, iteration)| iteration), Some(4));
}

/// A reader of the journal does not have the closures.
#[test]
fn a_closure_stops_a_trial_at_what_it_shares_and_readers_of_the_journal_know() {
    let shared = |stop: Stop| super::Rules {
        shares_prefixes: true,
        lookahead: usize::MAX,
        stop,
        ..rules(SearchOrder::Ordered { workers: 2 }, 6)
    };
    let stop = || Stop::new().iterations(6);
    let fifo = || -> Box<dyn TrialScheduler> { Box::new(GoOn) };
    let configs = schedules();
    // Trials 1 and 5 share four iterations with other trials.
    let ends = |trial: u32| match trial {
        0 => 5,
        1 => 3,
        5 => 1,
        _ => u64::MAX,
    };
    let of_closure = || {
        shared(stop().when(move |trial, result| result.training_iteration >= ends(trial.number())))
    };
    let chance = Chance {
        crashes: 60,
        ..UNDISTURBED
    };
    let outcome = simulate(&of_closure, &fifo, &configs, &scheduled_score, chance);
    check(&outcome);
    let last = |core: &Core| {
        let trials = core.trials().iter();
        trials.map(|trial| trial.decided).collect::<Vec<_>>()
    };
    assert_eq!(last(&outcome.core), [5, 3, 6, 6, 6, 1]);
    let read = |events: &mut dyn Iterator<Item = &Event>| {
        let mut reader = Core::new(shared(stop()), fifo());
        for event in events {
            reader.step(event.clone());
        }
        last(&reader)
    };
    let events = &outcome.events;
    assert_eq!(read(&mut events.iter()), last(&outcome.core));
    let mut others = events
        .iter()
        .filter(|event| !matches!(event, Event::Shared { .. }));
    assert_ne!(read(&mut others), last(&outcome.core));
    // The search itself has the closures, and resumes from a journal of an earlier version.
    let mut resumed = Core::new(of_closure(), fifo());
    for event in events {
        if !matches!(event, Event::Shared { .. }) {
            resumed.step(event.clone());
        }
    }
    assert_eq!(last(&resumed), last(&outcome.core));
}

/// Journals of earlier versions have no such events.
#[test]
fn a_journal_without_judgements_of_shared_results_leads_to_the_same() {
    let shared = || super::Rules {
        shares_prefixes: true,
        lookahead: usize::MAX,
        ..rules(SearchOrder::Ordered { workers: 2 }, 6)
    };
    let fifo = || -> Box<dyn TrialScheduler> { Box::new(GoOn) };
    let outcome = simulate(&shared, &fifo, &schedules(), &scheduled_score, UNDISTURBED);
    let mut again = Core::new(shared(), fifo());
    let mut decisions = Vec::new();
    for event in outcome.events {
        if !matches!(event, Event::Shared { .. }) {
            let logged = again
                .step(event)
                .into_iter()
                .filter_map(|action| match action {
                    super::Action::Log(decision) => Some(decision),
                    _ => None,
                });
            decisions.extend(logged);
        }
    }
    assert_eq!(decisions, outcome.decisions);
}

#[derive(Debug)]
struct GoOn;

impl TrialScheduler for GoOn {
    fn on_trial_add(&mut self, _trial: TrialId, _config: &Config) {}

    fn on_trial_result(
        &mut self,
        _observation: Observation,
        _others_wait: bool,
    ) -> SchedulerDecision {
        SchedulerDecision::Continue
    }

    fn on_trial_complete(&mut self, _last: Observation) {}

    fn on_trial_error(&mut self, _trial: TrialId) {}

    fn choose_trial_to_run(&mut self, paused: &[TrialId], _supply: OtherTrials) -> Option<TrialId> {
        paused.first().copied()
    }

    fn status(&self) -> Vec<String> {
        Vec::new()
    }
}

/// Other trials may continue from a requested checkpoint, however many this trial reports by itself.
#[test]
fn checkpoints_that_a_trial_reports_take_no_place_of_those_that_were_asked_for() {
    let rules = super::Rules {
        checkpoint_frequency: Some(2),
        ..rules(SearchOrder::Eager, 9)
    };
    let mut core = Core::new(rules, Box::<OrderSensitive>::default());
    core.step(Event::Opened { slots: 1 });
    let trial = TrialId::new(0);
    let config = Some(Config::default());
    core.step(Event::Suggested { trial, config });
    let config = None;
    let trial_1 = TrialId::new(1);
    core.step(Event::Suggested {
        trial: trial_1,
        config,
    });
    let key = |iteration| CheckpointKey {
        branch: Branch {
            trial,
            generation: 0,
        },
        iteration,
    };
    for iteration in 1..=3 {
        let metrics = Metrics::from([("score", 1.0)]);
        let result = TrialResult::next(None, iteration, metrics, 1.0, 0);
        core.step(Event::Reported {
            trial,
            result,
            stop: false,
        });
        let checkpoint = key(iteration);
        core.step(Event::Saved {
            checkpoint,
            bytes: 1,
        });
    }
    let settings = CheckpointSettings::default();
    assert_eq!(prunable(&core, &settings), [key(1)]);
    core.step(Event::Ended { trial });
    assert_eq!(prunable(&core, &settings), [key(1), key(2)]);
}
