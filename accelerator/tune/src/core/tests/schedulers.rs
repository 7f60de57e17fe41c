//! Properties that a search has with every scheduler, however its trials end.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::simulation::{Chance, SimulatedSearch, check, configs, quality, rules, simulate};
use crate::config::Config;
use crate::core::{Decision, Event, Rules, SearchOrder};
use crate::objective::{Mode, Objective};
use crate::scheduler::{Asha, AshaPromotion, MedianStopping, Pbt, Scheduler};
use crate::space::{Space, uniform};

const ITERATIONS: u32 = 9;

fn schedulers() -> impl Strategy<Value = Scheduler> {
    let max_t = u64::from(ITERATIONS);
    let of_grace = 1_u64..4;
    let of_factor = 2_u64..5;
    prop_oneof![
        Just(Scheduler::Fifo),
        (of_grace.clone(), of_factor.clone(), 1_u32..3).prop_map(
            move |(grace_period, reduction_factor, brackets)| {
                Asha {
                    max_t,
                    grace_period,
                    reduction_factor,
                    brackets,
                    ..Asha::default()
                }
                .into()
            }
        ),
        (of_grace, of_factor).prop_map(move |(grace_period, reduction_factor)| {
            AshaPromotion {
                max_t,
                grace_period,
                reduction_factor,
                ..AshaPromotion::default()
            }
            .into()
        }),
        Just(
            MedianStopping {
                grace_period: 2.0,
                ..MedianStopping::default()
            }
            .into()
        ),
        (1_u32..4).prop_map(|interval| {
            Pbt::new(
                f64::from(interval),
                Space::new([("quality", uniform(0.0, 1000.0))]),
            )
            .into()
        }),
    ]
}

fn chances() -> impl Strategy<Value = Chance> {
    (any::<u64>(), 1_usize..6, 0_u64..150, 0_u64..40).prop_map(
        |(seed, slots, failures, crashes)| Chance {
            seed,
            slots,
            failures,
            crashes,
        },
    )
}

const TRIALS: u64 = 14;

fn run(
    scheduler: &Scheduler,
    order: SearchOrder,
    max_failures: Option<u32>,
    chance: Chance,
) -> SimulatedSearch {
    let objective = Objective::new("score", Mode::Max);
    let outcome = simulate(
        &|| Rules {
            max_failures,
            ..rules(order, ITERATIONS)
        },
        &|| scheduler.build(&objective, 5).unwrap(),
        &configs(TRIALS, 3),
        &|config: &Config, iteration| quality(config) + (iteration as f64).sqrt(),
        chance,
    );
    check(&outcome);
    assert_eq!(outcome.core.trials().len() as u64, TRIALS);
    outcome
}

fn reports(outcome: &SimulatedSearch) -> BTreeMap<u32, u64> {
    let mut reports = BTreeMap::new();
    for event in &outcome.events {
        if let Event::Reported { trial, .. } = event {
            *reports.entry(trial.number()).or_default() += 1;
        }
    }
    reports
}

/// Trials that exploited others report their best values with configurations that they do not have any more.
#[test]
fn a_best_value_is_of_the_configuration_that_reported_it() {
    let space = Space::new([("quality", uniform(0.0, 1000.0))]);
    let chance = Chance {
        seed: 1,
        slots: 3,
        failures: 0,
        crashes: 20,
    };
    let outcome = run(
        &Pbt::new(1.0, space).into(),
        SearchOrder::Eager,
        None,
        chance,
    );
    let mut earlier = 0;
    for state in outcome.core.trials() {
        let best = state.best.as_ref().unwrap();
        let config = state.config_of(state.best_branch);
        let score = quality(config) + (best.training_iteration as f64).sqrt();
        assert_eq!(best.value("score"), Some(score), "{state:?}");
        earlier += u32::from(state.best_branch != state.branch());
    }
    assert!(earlier > 0);
}

#[test]
fn order_matters_to_decisions_in_eager_mode() {
    let run_with = |seed| {
        let chance = Chance {
            seed,
            slots: 4,
            failures: 0,
            crashes: 0,
        };
        let scheduler = MedianStopping::default().into();
        let ended = run(&scheduler, SearchOrder::Eager, None, chance).core;
        let trials = ended.trials().iter();
        trials.map(|trial| trial.decided).collect::<Vec<_>>()
    };
    assert_ne!(run_with(1), run_with(2));
}

proptest! {
    /// No trial is lost or counted twice, and one that fails for good blocks no other, on any rung.
    #[test]
    fn every_search_ends_with_all_its_trials(scheduler in schedulers(), chance in chances(), most in 0_u32..3) {
        for order in [SearchOrder::Eager, SearchOrder::Ordered { workers: 3 }] {
            for max_failures in [None, Some(most)] {
                run(&scheduler, order, max_failures, chance);
            }
        }
    }

    #[test]
    fn no_scheduler_takes_more_iterations_than_random_search(scheduler in schedulers(), seed: u64, slots in 1_usize..6) {
        // A clone of PBT may return to the iteration of a donor that reports later.
        prop_assume!(!matches!(scheduler, Scheduler::Pbt(_)));
        let chance = Chance { seed, slots, failures: 0, crashes: 0 };
        let outcome = run(&scheduler, SearchOrder::Eager, None, chance);
        let reports = reports(&outcome);
        prop_assert_eq!(reports.len() as u64, TRIALS);
        prop_assert!(reports.values().all(|count| *count <= u64::from(ITERATIONS)), "{:?}", reports);
    }

    #[test]
    fn in_ordered_mode_no_scheduler_sees_slots_timing_or_kills(
        scheduler in schedulers(),
        chance in chances(),
        workers in 1_usize..6,
    ) {
        let order = SearchOrder::Ordered { workers };
        let calm = Chance { seed: 0, slots: 3, failures: 0, crashes: 0 };
        let undisturbed = run(&scheduler, order, None, calm);
        prop_assert_eq!(undisturbed.decisions, run(&scheduler, order, None, chance).decisions);
    }

    /// The donor is another trial, which has reached the iteration that the clone continues from.
    #[test]
    fn a_clone_continues_from_what_its_donor_has_done(interval in 1_u32..4, chance in chances()) {
        let mutations = Space::new([("quality", uniform(0.0, 1000.0))]);
        let scheduler = Pbt::new(f64::from(interval), mutations).into();
        let outcome = run(&scheduler, SearchOrder::Eager, None, chance);
        let mut done = BTreeMap::new();
        let mut clones = 0;
        for decision in &outcome.decisions {
            match decision {
                Decision::Continue { trial, iteration }
                | Decision::Save { trial, iteration }
                | Decision::Pause { trial, iteration } => {
                    done.insert(*trial, *iteration);
                }
                Decision::Exploit { trial, from, .. } => {
                    clones += 1;
                    prop_assert!(from.trial != *trial);
                    prop_assert!(done.get(&from.trial).is_some_and(|done| *done >= from.iteration));
                    done.insert(*trial, from.iteration);
                }
                _ => {}
            }
        }
        prop_assert!(clones > 0 || chance.slots == 1);
    }
}
