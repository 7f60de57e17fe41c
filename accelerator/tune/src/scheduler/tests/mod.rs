use std::collections::BTreeMap;

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::config::{Config, TrialId};

mod ray;

fn report(
    scheduler: &mut dyn TrialScheduler,
    trial: u32,
    iteration: u64,
    value: f64,
) -> SchedulerDecision {
    scheduler.on_trial_result(observation(trial, iteration, value), false)
}

fn observation(trial: u32, iteration: u64, value: f64) -> Observation {
    Observation {
        trial: TrialId::new(trial),
        iteration,
        time: iteration as f64,
        value: Some(value),
    }
}

fn promotion(eta: u64, max_t: u64) -> Box<dyn TrialScheduler> {
    let settings = AshaPromotion {
        reduction_factor: eta,
        max_t,
        ..AshaPromotion::default()
    };
    settings.build(Mode::Max).unwrap()
}

fn added(mut scheduler: Box<dyn TrialScheduler>, trials: u32) -> Box<dyn TrialScheduler> {
    for trial in 0..trials {
        scheduler.on_trial_add(TrialId::new(trial), &Config::default());
    }
    scheduler
}

#[test]
fn the_paper_promotes_after_each_report_as_in_its_examples() {
    for (values, eta, promoted) in [
        (
            vec![0.05, 0.06, 0.04, 0.12, 0.11, 0.03, 0.13, 0.12],
            4,
            "---d--g-",
        ),
        (vec![0.5, 0.4, 0.45, 0.6, 0.1, 0.55], 2, "-a-d-f"),
        (
            vec![0.3, 0.9, 0.2, 0.8, 0.7, 0.85, 0.1, 0.95, 0.6],
            3,
            "--b--f-h-",
        ),
    ] {
        let mut scheduler = added(promotion(eta, eta * eta), values.len() as u32);
        let mut paused = Vec::new();
        let mut found = String::new();
        for (trial, value) in values.iter().enumerate() {
            assert_eq!(
                report(&mut *scheduler, trial as u32, 1, *value),
                SchedulerDecision::Pause
            );
            paused.push(TrialId::new(trial as u32));
            let next = scheduler.choose_trial_to_run(&paused, OtherTrials::Pending);
            found.push(next.map_or('-', |trial| (b'a' + trial.number() as u8) as char));
            paused.retain(|trial| Some(*trial) != next);
        }
        assert_eq!(found, promoted);
    }
}

/// Runs trials with these values on some workers, with equally long iterations. Returns the number of iterations and
/// the trials that reached each rung.
fn run_on(workers: usize, eta: u64, max_t: u64, values: &[f64]) -> (u64, Vec<Vec<u32>>) {
    let mut scheduler = added(promotion(eta, max_t), values.len() as u32);
    let (mut next, mut paused, mut iterations) = (0, Vec::new(), 0);
    // The running trials, and the number of iterations that each has done.
    let mut running: BTreeMap<u32, u64> = BTreeMap::new();
    let mut done: BTreeMap<u32, u64> = BTreeMap::new();
    loop {
        while running.len() < workers {
            let others = match (next < values.len() as u32, running.is_empty()) {
                (true, _) => OtherTrials::Pending,
                (false, false) => OtherTrials::Running,
                (false, true) => OtherTrials::None,
            };
            if let Some(trial) = scheduler.choose_trial_to_run(&paused, others) {
                paused.retain(|other| *other != trial);
                running.insert(trial.number(), done[&trial.number()]);
            } else if others == OtherTrials::Pending {
                running.insert(next, 0);
                next += 1;
            } else {
                break;
            }
        }
        if running.is_empty() {
            break;
        }
        for (trial, iteration) in std::mem::take(&mut running) {
            iterations += 1;
            let value = values[trial as usize];
            match report(&mut *scheduler, trial, iteration + 1, value) {
                SchedulerDecision::Continue => {
                    running.insert(trial, iteration + 1);
                }
                SchedulerDecision::Pause => {
                    done.insert(trial, iteration + 1);
                    paused.push(TrialId::new(trial));
                    paused.sort();
                }
                _ => scheduler.on_trial_complete(observation(trial, iteration + 1, value)),
            }
        }
    }
    let rungs = scheduler.rungs().into_iter().map(|rung| {
        let mut trials: Vec<_> = rung
            .entries
            .iter()
            .map(|(trial, _)| trial.number())
            .collect();
        trials.sort_unstable();
        trials
    });
    (iterations, rungs.collect())
}

#[test]
fn six_trials_on_two_workers_take_eleven_iterations() {
    let (iterations, rungs) = run_on(2, 2, 4, &[0.5, 0.7, 0.4, 0.9, 0.6, 0.8]);
    assert_eq!(iterations, 11);
    assert_eq!(rungs, [vec![0, 1, 2, 3, 4, 5], vec![1, 3, 5], vec![3]]);
}

#[test]
fn the_best_of_few_trials_reaches_the_end() {
    let (_, rungs) = run_on(1, 4, 64, &[0.1, 0.3, 0.2]);
    assert_eq!(rungs[1..], [vec![1], vec![1], vec![1]]);
}

#[test]
fn a_promoted_trial_that_fails_leaves_its_place_to_the_next_best() {
    let mut scheduler = added(promotion(4, 16), 3);
    for (trial, value) in [0.1, 0.3, 0.2].into_iter().enumerate() {
        report(&mut *scheduler, trial as u32, 1, value);
    }
    let all = [0, 1, 2].map(TrialId::new);
    assert_eq!(
        scheduler.choose_trial_to_run(&all, OtherTrials::None),
        Some(all[1])
    );
    scheduler.on_trial_error(all[1]);
    let rest = [all[0], all[2]];
    assert_eq!(
        scheduler.choose_trial_to_run(&rest, OtherTrials::None),
        Some(all[2])
    );
    assert_eq!(report(&mut *scheduler, 2, 4, 0.2), SchedulerDecision::Pause);
    assert_eq!(
        scheduler.choose_trial_to_run(&rest, OtherTrials::None),
        Some(all[2])
    );
    assert_eq!(report(&mut *scheduler, 2, 16, 0.2), SchedulerDecision::Stop);
    scheduler.on_trial_complete(observation(2, 16, 0.2));
    assert_eq!(
        scheduler.choose_trial_to_run(&[all[0]], OtherTrials::None),
        None
    );
}

proptest! {
    #[test]
    fn promoted_trials_were_among_the_best_of_their_rung(
        values in prop::collection::vec(0_u32..40, 1..40),
        eta in 2_u64..5,
        order in prop::collection::vec(any::<prop::sample::Index>(), 200),
        missing in prop::collection::vec(any::<prop::sample::Index>(), 0..4),
    ) {
        let value = |trial: TrialId| {
            let index = trial.index();
            let is_missing = missing.iter().any(|at| at.index(values.len()) == index);
            if is_missing { f64::NAN } else { f64::from(values[index]) }
        };
        let times = [1, eta, eta * eta];
        let mut scheduler = added(promotion(eta, eta * eta), values.len() as u32);
        // The contents of the rungs, kept apart from the scheduler.
        let mut rungs: Vec<Vec<TrialId>> = vec![Vec::new(); times.len()];
        let mut promoted: Vec<Vec<TrialId>> = vec![Vec::new(); times.len()];
        let mut running: Vec<(TrialId, usize)> = (0..values.len()).map(|trial| (TrialId::new(trial as u32), 0)).collect();
        let mut paused: Vec<TrialId> = Vec::new();
        let best = |rung: &[TrialId]| {
            let mut sorted: Vec<_> = rung.iter().copied().filter(|trial| !value(*trial).is_nan()).collect();
            sorted.sort_by(|left, right| value(*right).total_cmp(&value(*left)));
            sorted.truncate(rung.len() / eta as usize);
            sorted
        };
        for pick in order {
            if running.is_empty() {
                break;
            }
            let (trial, rung) = running.swap_remove(pick.index(running.len()));
            let observed = Observation { trial, iteration: times[rung], time: times[rung] as f64, value: Some(value(trial)) };
            let decision = scheduler.on_trial_result(observed, false);
            rungs[rung].push(trial);
            if rung + 1 == times.len() {
                prop_assert_eq!(decision, SchedulerDecision::Stop);
                scheduler.on_trial_complete(observed);
                continue;
            }
            prop_assert_eq!(decision, SchedulerDecision::Pause);
            paused.push(trial);
            paused.sort();
            while let Some(next) = scheduler.choose_trial_to_run(&paused, OtherTrials::Pending) {
                let from = rungs.iter().rposition(|rung| rung.contains(&next)).unwrap();
                prop_assert!(best(&rungs[from]).contains(&next), "{next} of {:?}", rungs[from]);
                prop_assert!(!promoted[from].contains(&next));
                // Higher rungs come first.
                for above in from + 1..times.len() - 1 {
                    prop_assert!(best(&rungs[above]).iter().all(|trial| promoted[above].contains(trial)));
                }
                promoted[from].push(next);
                paused.retain(|other| *other != next);
                running.push((next, from + 1));
            }
            for (rung, promoted) in rungs.iter().zip(&promoted).take(times.len() - 1) {
                prop_assert!(best(rung).iter().all(|trial| promoted.contains(trial)));
            }
        }
    }

    #[test]
    fn a_better_value_is_never_worse_off_and_a_strict_maximum_continues(
        before in prop::collection::vec(0.0_f64..1.0, 0..20),
        low in 0.0_f64..1.0,
        gain in 0.0_f64..1.0,
        eta in 2_u64..5,
    ) {
        let asha = Asha { reduction_factor: eta, max_t: 100, ..Asha::default() };
        let decision = |value: f64| {
            let mut scheduler = added(asha.build(Mode::Max, 0).unwrap(), before.len() as u32 + 1);
            for (trial, before) in before.iter().enumerate() {
                report(&mut *scheduler, trial as u32, 1, *before);
            }
            report(&mut *scheduler, before.len() as u32, 1, value)
        };
        if decision(low) == SchedulerDecision::Continue {
            prop_assert_eq!(decision(low + gain), SchedulerDecision::Continue);
        }
        prop_assert_eq!(decision(2.0), SchedulerDecision::Continue);
    }

    #[test]
    fn trials_have_at_most_one_entry_a_rung_and_none_runs_longer_than_the_longest(
        events in prop::collection::vec((0_u32..6, 0.0_f64..1.0, any::<bool>()), 1..200),
        eta in 2_u64..4,
        grace in 1_u64..3,
    ) {
        let asha = Asha { reduction_factor: eta, max_t: 9, grace_period: grace, ..Asha::default() };
        let mut scheduler = added(asha.build(Mode::Min, 0).unwrap(), 6);
        let mut iterations = [0_u64; 6];
        let mut ended = [false; 6];
        for (trial, value, fails) in events {
            let index = trial as usize;
            if ended[index] {
                continue;
            }
            if fails && value < 0.1 {
                scheduler.on_trial_error(TrialId::new(trial));
                ended[index] = true;
                continue;
            }
            iterations[index] += 1;
            if report(&mut *scheduler, trial, iterations[index], value) == SchedulerDecision::Stop {
                prop_assert!(iterations[index] >= grace);
                scheduler.on_trial_complete(observation(trial, iterations[index], value));
                ended[index] = true;
            }
            prop_assert!(iterations[index] <= 9 && (ended[index] || iterations[index] < 9));
        }
        let rungs = scheduler.rungs();
        for rung in &rungs {
            let mut trials: Vec<_> = rung.entries.iter().map(|(trial, _)| trial).collect();
            trials.sort();
            let count = trials.len();
            trials.dedup();
            prop_assert_eq!(count, trials.len());
        }
        for (below, above) in rungs.iter().zip(&rungs[1..]) {
            let is_below = |trial| below.entries.iter().any(|(other, _)| *other == trial);
            prop_assert!(above.entries.iter().all(|(trial, _)| is_below(*trial)));
        }
    }

    #[test]
    fn a_population_is_replaced_by_its_best_within_bounds(
        scores in prop::collection::vec(0.0_f64..1.0, 4..12),
        seed: u64,
        rounds in 2_u64..8,
    ) {
        let space: crate::space::Space = serde_json::from_value(json!({
            "lr": {"loguniform": [0.01, 1.0]}, "layers": {"randint": [1, 5]}, "batch": [16, 32, 64],
        })).unwrap();
        let pbt = Pbt::new(2.0, space);
        let mut scheduler = pbt.build(Mode::Max, seed).unwrap();
        let mut configs = Vec::new();
        for trial in 0..scores.len() {
            let config: Config = serde_json::from_value(json!({"lr": 0.9, "layers": 4, "batch": 64, "other": 1})).unwrap();
            scheduler.on_trial_add(TrialId::new(trial as u32), &config);
            configs.push(config);
        }
        let mut saved: BTreeMap<TrialId, u64> = BTreeMap::new();
        let mut times = vec![0_u64; scores.len()];
        for _ in 0..rounds * 2 {
            for (index, score) in scores.iter().enumerate() {
                times[index] += 1;
                let trial = TrialId::new(index as u32);
                match report(&mut *scheduler, index as u32, times[index], *score) {
                    SchedulerDecision::Save => {
                        saved.insert(trial, times[index]);
                    }
                    SchedulerDecision::Exploit { donor, iteration, config } => {
                        prop_assert!(scores[donor.index()] >= *score);
                        prop_assert_eq!(saved.get(&donor), Some(&iteration));
                        let lr: f64 = config.parse("lr").unwrap();
                        let layers: i64 = config.parse("layers").unwrap();
                        let batch: i64 = config.parse("batch").unwrap();
                        prop_assert!((0.01..1.0).contains(&lr));
                        prop_assert!((1..5).contains(&layers));
                        prop_assert!([16, 32, 64].contains(&batch));
                        prop_assert_eq!(config.value("other"), Some(&json!(1)));
                        times[index] = iteration;
                        configs[index] = config;
                    }
                    SchedulerDecision::Continue => {}
                    other => prop_assert!(false, "{other:?}"),
                }
            }
        }
    }
}

#[test]
fn settings_that_cannot_be_are_refused_with_their_names() {
    let objective = Objective::new("loss", Mode::Min);
    let refusals = r#"
{"type": "asha", "max_t": 0} => `max_t`
{"type": "asha", "grace_period": 200} => `grace_period` is 200
{"type": "asha", "reduction_factor": 1} => `reduction_factor`
{"type": "asha", "brackets": 9} => `brackets` is 9
{"type": "asha_promotion", "grace_period": 0} => `grace_period`
{"type": "pbt", "perturbation_interval": 0.0, "hyperparam_mutations": {}} => `perturbation_interval`
{"type": "pbt", "perturbation_interval": 1.0, "hyperparam_mutations": {}} => is empty
{"type": "pbt", "perturbation_interval": 1.0, "hyperparam_mutations": {"lr": 3}} => `lr`"#;
    for refusal in refusals.trim().lines() {
        let (settings, expected) = refusal.split_once(" => ").unwrap();
        let scheduler: Scheduler = serde_json::from_str(settings).unwrap();
        let error = scheduler.build(&objective, 0).unwrap_err();
        assert!(error.is_misuse());
        assert!(error.to_string().contains(expected), "{refusal}: {error}");
    }
    let unknown = serde_json::from_value::<Scheduler>(json!({"type": "asha", "max_time": 3}));
    assert!(unknown.unwrap_err().to_string().contains("max_time"));
}

#[test]
fn brackets_are_drawn_as_often_as_ray_draws_them() {
    let asha = Asha {
        brackets: 3,
        max_t: 64,
        ..Asha::default()
    };
    let mut scheduler = added(asha.build(Mode::Max, 0).unwrap(), 3000);
    for trial in 0..3000 {
        report(&mut *scheduler, trial, 1, f64::from(trial));
    }
    // Only the first bracket has a rung at 1. The brackets have the softmax of 4, 3 and 2 rungs.
    let first = scheduler.rungs()[0].entries.len() as f64 / 3000.0;
    assert!((first - 0.665).abs() < 0.03, "{first}");
}

/// Ray 2.60 ignores such means. In earlier versions, one of them stopped every trial.
#[test]
fn the_median_of_ray_is_of_means_that_are_numbers() {
    for (required, own, stops) in [(1, 0.9, false), (1, 0.1, true), (2, 0.1, false)] {
        let settings = MedianStopping {
            min_samples_required: required,
            compatibility: Compatibility::Ray,
            ..MedianStopping::default()
        };
        let mut median = added(settings.build(Mode::Max).unwrap(), 3);
        report(&mut *median, 0, 1, 0.5);
        report(&mut *median, 1, 1, f64::NAN);
        let decision = report(&mut *median, 2, 1, own);
        let is_stopped = decision == SchedulerDecision::Stop;
        assert_eq!(is_stopped, stops, "{required} {own}");
    }
}
