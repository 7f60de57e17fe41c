//! Comparison with the decisions of Ray Tune's own schedulers on recorded sequences. `tests/tune/reference.py` writes
//! the fixture.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::config::{Config, TrialId};
use crate::objective::Mode;
use crate::scheduler::asha::Halving;
use crate::scheduler::pbt::quantiles;
use crate::scheduler::{
    Asha, MedianStopping, Observation, OtherTrials, Pbt, SchedulerDecision, TrialScheduler,
};

#[derive(Deserialize)]
struct Fixture {
    sequences: Vec<Sequence>,
    populations: Vec<RecordedPopulation>,
}

#[derive(Deserialize)]
struct Sequence {
    name: String,
    scheduler: String,
    settings: Map<String, Value>,
    #[serde(default)]
    rungs: Vec<u64>,
    /// The bracket that each trial was drawn into.
    #[serde(default)]
    brackets: Vec<(Value, usize)>,
    /// The number of trials of PBT.
    #[serde(default)]
    trials: u32,
    events: Vec<Vec<Value>>,
    decisions: Vec<String>,
    #[serde(default)]
    cutoffs: Vec<Vec<Value>>,
    #[serde(default)]
    status: Vec<String>,
}

#[derive(Deserialize)]
struct RecordedPopulation {
    scores: Vec<Value>,
    fraction: f64,
    mode: Mode,
    lower: Vec<u32>,
    upper: Vec<u32>,
}

fn fixture() -> Fixture {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/fixtures/tune/ray.json"
    );
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn number(value: &Value) -> Option<f64> {
    match value.as_str() {
        Some("NaN") => Some(f64::NAN),
        Some("Infinity") => Some(f64::INFINITY),
        Some("-Infinity") => Some(f64::NEG_INFINITY),
        _ => value.as_f64(),
    }
}

/// Returns the scheduler and the mode of a sequence.
fn settings<T: for<'de> Deserialize<'de>>(sequence: &Sequence, compatibility: &str) -> (T, Mode) {
    let mut settings = sequence.settings.clone();
    let mode = settings.remove("mode").unwrap_or_else(|| "max".into());
    settings.insert("compatibility".to_owned(), compatibility.into());
    let settings = serde_json::from_value(Value::Object(settings)).unwrap();
    (settings, serde_json::from_value(mode).unwrap())
}

/// Gives a scheduler a sequence's events and returns its decisions, with `None` for events that it does not see.
fn decide<P: TrialScheduler + ?Sized>(
    scheduler: &mut P,
    sequence: &Sequence,
    mut after: impl FnMut(&P, usize),
) -> Vec<Option<&'static str>> {
    let names = names(sequence);
    let mut stopped = Vec::new();
    let mut decisions = Vec::new();
    for (index, event) in sequence.events.iter().enumerate() {
        let trial = names[&event[0].to_string()];
        if event[1] == "fail" || stopped.contains(&trial) {
            // Schedulers here do not decide whether a failed attempt is repeated.
            decisions.push(None);
            after(scheduler, index);
            continue;
        }
        let observation = Observation {
            trial,
            iteration: event[2].as_u64().unwrap(),
            time: event[2].as_f64().unwrap(),
            value: number(&event[3]),
        };
        let stops = event[1] == "end"
            || scheduler.on_trial_result(observation, false) == SchedulerDecision::Stop;
        if stops {
            scheduler.on_trial_complete(observation);
            stopped.push(trial);
        }
        decisions.push(Some(if stops { "STOP" } else { "CONTINUE" }));
        after(scheduler, index);
    }
    decisions
}

/// Returns the trials of a sequence.
fn names(sequence: &Sequence) -> BTreeMap<String, TrialId> {
    let names: BTreeSet<_> = sequence
        .events
        .iter()
        .map(|event| event[0].to_string())
        .collect();
    names.into_iter().zip((0..).map(TrialId::new)).collect()
}

fn halving(sequence: &Sequence, compatibility: &str) -> Halving {
    let (asha, mode) = settings::<Asha>(sequence, compatibility);
    let mut halving = asha.halving(mode, 0).unwrap();
    let names = names(sequence);
    for trial in names.values() {
        halving.on_trial_add(*trial, &Config::default());
    }
    for (name, bracket) in &sequence.brackets {
        halving.set_bracket(names[&name.to_string()], *bracket);
    }
    halving
}

fn assert_same(sequence: &Sequence, decisions: &[Option<&str>]) {
    assert_eq!(decisions.len(), sequence.decisions.len());
    for (index, (ours, rays)) in decisions.iter().zip(&sequence.decisions).enumerate() {
        if let Some(ours) = ours {
            assert_eq!(
                ours, rays,
                "{}, event {index}: {:?}",
                sequence.name, sequence.events[index]
            );
        }
    }
}

#[test]
fn asha_decides_as_ray_on_every_recorded_sequence() {
    let mut events = 0;
    for sequence in fixture().sequences {
        if sequence.scheduler != "asha" {
            continue;
        }
        let mut asha = halving(&sequence, "ray");
        let times: Vec<_> = asha.rungs().iter().map(|rung| rung.time as u64).collect();
        assert_eq!(times, sequence.rungs, "{}", sequence.name);
        let decisions = decide(&mut asha, &sequence, |asha, index| {
            let cutoffs = asha.cutoffs();
            assert_eq!(cutoffs.len(), sequence.cutoffs[index].len());
            for (ours, rays) in cutoffs.iter().zip(&sequence.cutoffs[index]) {
                match (ours, number(rays)) {
                    (Some(ours), Some(rays)) => assert!(
                        (ours - rays).abs() < 1e-12
                            || ours.to_bits() == rays.to_bits()
                            || ours.is_nan() && rays.is_nan(),
                        "{}, event {index}: {ours} and {rays}",
                        sequence.name
                    ),
                    (ours, rays) => assert_eq!(ours.is_some(), rays.is_some(), "{}", sequence.name),
                }
            }
        });
        assert_same(&sequence, &decisions);
        assert_eq!(asha.status(), sequence.status, "{}", sequence.name);
        events += decisions.len();
    }
    assert!(events > 500, "{events} events");
}

#[test]
fn the_exact_form_of_asha_differs_only_where_ray_has_a_defect() {
    let (mut equal, mut differing) = (0, BTreeMap::new());
    for sequence in fixture().sequences {
        if sequence.scheduler != "asha" {
            continue;
        }
        let mut exact = halving(&sequence, "exact");
        let last = exact.rungs().last().unwrap().time;
        let decisions = decide(&mut exact, &sequence, |_, _| {});
        let mut pairs = decisions.iter().zip(&sequence.decisions);
        let Some(event) = pairs.position(|(ours, rays)| ours.is_some_and(|ours| ours != rays))
        else {
            equal += 1;
            continue;
        };
        // Ray continues these trials.
        assert_eq!(sequence.decisions[event], "CONTINUE", "{}", sequence.name);
        let reported = &sequence.events[event];
        let has_last = sequence
            .rungs
            .last()
            .is_some_and(|time| *time as f64 == last);
        let cause = match number(&reported[3]).filter(|value| !value.is_nan()) {
            None => "no number",
            Some(_) if !has_last && reported[2].as_f64() == Some(last) => "last rung",
            Some(_) => panic!("{}, event {event}: {reported:?}", sequence.name),
        };
        *differing.entry(cause).or_insert(0) += 1;
    }
    assert_eq!(
        (equal, differing),
        (41, BTreeMap::from([("last rung", 1), ("no number", 8)]))
    );
}

#[test]
fn the_median_rule_decides_as_ray_on_every_recorded_sequence() {
    let mut stops = 0;
    for sequence in fixture().sequences {
        if sequence.scheduler != "median_stopping" {
            continue;
        }
        let (median, mode) = settings::<MedianStopping>(&sequence, "ray");
        let mut scheduler = median.build(mode).unwrap();
        let decisions = decide(&mut *scheduler, &sequence, |_, _| {});
        assert_same(&sequence, &decisions);
        assert_eq!(scheduler.status(), sequence.status, "{}", sequence.name);
        stops += decisions
            .iter()
            .filter(|decision| **decision == Some("STOP"))
            .count();
    }
    assert!(stops > 10, "{stops} stops");
}

#[test]
fn populations_save_pause_and_clone_as_those_of_ray() {
    let mut clones = 0;
    for sequence in fixture().sequences {
        if sequence.scheduler != "pbt" {
            continue;
        }
        let mut settings = sequence.settings.clone();
        let mode = serde_json::from_value(settings.remove("mode").unwrap()).unwrap();
        settings.insert("hyperparam_mutations".to_owned(), json!({"lr": [1, 2]}));
        let pbt: Pbt = serde_json::from_value(Value::Object(settings)).unwrap();
        let mut scheduler = pbt.build(mode, 0).unwrap();
        for trial in 0..sequence.trials {
            let config = serde_json::from_value(json!({"lr": 1})).unwrap();
            scheduler.on_trial_add(TrialId::new(trial), &config);
        }
        let mut paused = BTreeSet::new();
        for (index, event) in sequence.events.iter().enumerate() {
            let trial = TrialId::new(event[0].as_u64().unwrap() as u32);
            let place = format!("{}, event {index}: {event:?}", sequence.name);
            if event[1] == "resume" {
                let waiting: Vec<_> = paused.iter().copied().collect();
                let next = scheduler.choose_trial_to_run(&waiting, OtherTrials::Running);
                assert_eq!(next, Some(trial), "{place}");
                paused.remove(&trial);
                continue;
            }
            let observation = Observation {
                trial,
                iteration: event[2].as_u64().unwrap(),
                time: event[2].as_f64().unwrap(),
                value: number(&event[3]),
            };
            let decision = match scheduler.on_trial_result(observation, event[4].as_bool().unwrap())
            {
                SchedulerDecision::Continue => "CONTINUE".to_owned(),
                SchedulerDecision::Save => "SAVE".to_owned(),
                SchedulerDecision::Pause => {
                    paused.insert(trial);
                    "PAUSE".to_owned()
                }
                SchedulerDecision::Stop => "STOP".to_owned(),
                SchedulerDecision::Exploit {
                    donor, iteration, ..
                } => {
                    clones += 1;
                    format!("EXPLOIT {} AT {iteration}", donor.number())
                }
            };
            assert_eq!(decision, sequence.decisions[index], "{place}");
        }
        assert_eq!(scheduler.status(), sequence.status, "{}", sequence.name);
    }
    assert!(clones > 50, "{clones} clones");
}

#[test]
fn the_best_and_the_worst_of_a_population_are_those_of_ray() {
    for population in fixture().populations {
        let scores = population
            .scores
            .iter()
            .enumerate()
            .filter_map(|(index, score)| {
                let score = number(score).filter(|score| !score.is_nan())?;
                Some((TrialId::new(index as u32), score))
            });
        let (lower, upper) = quantiles(scores.collect(), population.mode, population.fraction);
        let numbers = |trials: &[TrialId]| {
            trials
                .iter()
                .map(|trial| trial.number())
                .collect::<Vec<_>>()
        };
        assert_eq!(numbers(&lower), population.lower, "{:?}", population.scores);
        assert_eq!(numbers(&upper), population.upper, "{:?}", population.scores);
    }
}
