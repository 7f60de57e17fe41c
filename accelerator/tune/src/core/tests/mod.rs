use std::collections::BTreeMap;

use serde_json::json;

use super::{
    Branch, CheckpointKey, CheckpointSettings, Core, Decision, Event, Rules, SearchOrder, prunable,
};
use crate::config::{Config, TrialId};
use crate::objective::{Mode, Objective};
use crate::scheduler::{Scheduler, TrialScheduler};
use crate::stop::Stop;
use crate::value::Metrics;
use crate::view::TrialResult;
use simulation::{Chance, SimulatedSearch, check, logged, rules, simulate};

mod schedulers;
mod simulation;

const UNDISTURBED: Chance = Chance {
    seed: 0,
    slots: 4,
    failures: 0,
    crashes: 0,
};

fn fifo() -> Box<dyn TrialScheduler> {
    let objective = Objective::new("score", Mode::Max);
    Scheduler::Fifo.build(&objective, 0).unwrap()
}

/// Rules by which trials share what they begin with.
fn shared() -> Rules {
    Rules {
        shares_prefixes: true,
        lookahead: usize::MAX,
        ..separate()
    }
}

fn separate() -> Rules {
    rules(SearchOrder::Ordered { workers: 2 }, 6)
}

/// Returns schedules with one rate at first, two from iteration 2 on, and three for each of them from iteration 4 on.
fn schedules() -> Vec<Config> {
    let rates = [0.1, 0.2].map(|second| [1.0, 2.0, 3.0].map(|third| (second, third)));
    let config = |(second, third)| {
        let config = json!({"lr": {"schedule": [[0, 0.5], [2, second], [4, third]]}});
        serde_json::from_value(config).unwrap()
    };
    rates.concat().into_iter().map(config).collect()
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
    let configs = schedules();
    let outcome = simulate(&shared, &fifo, &configs, &scheduled_score, UNDISTURBED);
    check(&outcome);
    let apart = simulate(&separate, &fifo, &configs, &scheduled_score, UNDISTURBED);
    for (one, other) in outcome.core.trials().iter().zip(apart.core.trials()) {
        assert_eq!(one.last, other.last, "{}", one.id);
    }
    let computed = |outcome: &SimulatedSearch| {
        let events = outcome.events.iter();
        events
            .filter(|event| matches!(event, Event::Reported { .. }))
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
    let configs = schedules();
    // Trials 1 and 5 share four iterations with other trials.
    let ends = |trial: u32| match trial {
        0 => 5,
        1 => 3,
        5 => 1,
        _ => u64::MAX,
    };
    let of_closure = || Rules {
        stop: Stop::new()
            .iterations(6)
            .when(move |trial, result| result.training_iteration >= ends(trial.number())),
        ..shared()
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
        let mut reader = Core::new(shared(), fifo());
        logged(&mut reader, events.cloned());
        last(&reader)
    };
    let events = &outcome.events;
    assert_eq!(read(&mut events.iter()), last(&outcome.core));
    let earlier = || {
        let events = events.iter();
        events.filter(|event| !matches!(event, Event::Shared { .. }))
    };
    assert_ne!(read(&mut earlier()), last(&outcome.core));
    // The search itself has the closures, and resumes from a journal of an earlier version.
    let mut resumed = Core::new(of_closure(), fifo());
    let decisions = logged(&mut resumed, earlier().cloned());
    assert_eq!(decisions, outcome.decisions);
    assert_eq!(last(&resumed), last(&outcome.core));
}

/// Other trials may continue from a requested checkpoint, however many this trial reports by itself.
#[test]
fn checkpoints_that_a_trial_reports_take_no_place_of_those_that_were_asked_for() {
    let rules = Rules {
        checkpoint_frequency: Some(2),
        ..rules(SearchOrder::Eager, 9)
    };
    let mut core = one_trial(rules);
    for iteration in 1..=3 {
        report(&mut core, iteration, iteration as f64);
        save(&mut core, iteration);
    }
    let settings = CheckpointSettings::default();
    assert_eq!(prunable(&core, &settings), [key(1)]);
    core.step(Event::Ended {
        trial: TrialId::new(0),
    });
    assert_eq!(prunable(&core, &settings), [key(1), key(2)]);
}

/// The best one is the best of those that were saved. It goes last if there is no room.
#[test]
fn a_trial_keeps_the_checkpoint_of_its_best_result() {
    let mut core = one_trial(rules(SearchOrder::Eager, 9));
    for (iteration, score, is_saved) in [
        (1, 1.0, true),
        (2, 3.0, true),
        (3, 4.0, false),
        (4, 2.0, true),
        (5, 1.0, true),
    ] {
        report(&mut core, iteration, score);
        if is_saved {
            save(&mut core, iteration);
        }
    }
    core.step(Event::Ended {
        trial: TrialId::new(0),
    });
    let settings = CheckpointSettings::default();
    assert_eq!(prunable(&core, &settings), [key(1), key(4)]);
    for checkpoint in [key(1), key(4)] {
        core.step(Event::Deleted { checkpoint });
    }
    assert_eq!(prunable(&core, &settings), []);
    core.step(Event::Deleted { checkpoint: key(2) });
    assert!(core.trials()[0].best_saved.is_none());
}

/// Returns a search with one trial, which runs.
fn one_trial(rules: Rules) -> Core {
    let mut core = Core::new(rules, fifo());
    core.step(Event::Opened { slots: 1 });
    for (trial, config) in [(0, Some(Config::default())), (1, None)] {
        let trial = TrialId::new(trial);
        core.step(Event::Suggested { trial, config });
    }
    core
}

fn report(core: &mut Core, iteration: u64, score: f64) {
    let metrics = Metrics::from([("score", score)]);
    core.step(Event::Reported {
        trial: TrialId::new(0),
        result: TrialResult::next(None, iteration, metrics, 1.0, 0),
        stop: false,
    });
}

fn save(core: &mut Core, iteration: u64) {
    core.step(Event::Saved {
        checkpoint: key(iteration),
        bytes: 1,
    });
}

/// The key of a checkpoint of the only trial.
fn key(iteration: u64) -> CheckpointKey {
    CheckpointKey {
        branch: Branch {
            trial: TrialId::new(0),
            generation: 0,
        },
        iteration,
    }
}
