//! A `Learner` of burn-train on two processes.

use std::path::Path;

use accelerator_tests::learner::{LearnerJob, LearnerOutcome, Stop, Way};
use accelerator_tests::processes::{Ended, run_ranks};

/// A job of six full steps of two ranks, and one sample for rank 0 alone.
fn job(folder: &Path) -> LearnerJob {
    LearnerJob {
        folder: folder.join("files"),
        way: Way::Learner,
        samples: 97,
        epochs: 3,
        rate: 0.05,
        dropout: 0.2,
        accumulation: 1,
        patience: None,
        saves: false,
        resumes: None,
        stops: None,
    }
}

fn start(job: &LearnerJob, ranks: usize, faults: &str) -> Vec<Ended> {
    let text = serde_json::to_string(job).unwrap();
    let program = Path::new(env!("CARGO_BIN_EXE_rank"));
    run_ranks(program, &["learner", &text], ranks, |_, command| {
        command.env("ACCEL_FAULTS", faults);
    })
}

fn outcome(ended: &Ended) -> LearnerOutcome {
    let last = ended.succeeded().lines().last().unwrap();
    serde_json::from_str(last).unwrap_or_else(|error| panic!("{error}: {}", ended.stdout))
}

fn run(job: &LearnerJob, ranks: usize) -> Vec<LearnerOutcome> {
    start(job, ranks, "").iter().map(outcome).collect()
}

#[test]
fn a_learner_on_two_processes_ends_with_the_bits_of_a_loop() {
    for accumulation in [1, 3] {
        let folder = tempfile::tempdir().unwrap();
        let learner = LearnerJob {
            accumulation,
            ..job(folder.path())
        };
        let ended = start(&learner, 2, "");
        let learnt: Vec<_> = ended.iter().map(outcome).collect();
        let looped = LearnerJob {
            way: Way::Loop,
            ..learner.clone()
        };
        let looped = run(&looped, 2);
        assert_eq!(learnt[0].error, None);
        assert_eq!(looped[0].parameters, looped[1].parameters);
        assert_eq!(learnt[0].parameters, looped[0].parameters);
        assert_eq!(learnt[1].parameters, looped[0].parameters);
        assert_eq!((learnt[0].steps, learnt[1].steps), (21, 21));
        let (ours, loops) = (learnt[0].accuracy.unwrap(), looped[0].accuracy.unwrap());
        assert!((ours - loops).abs() < 1e-4, "{ours} and {loops}");
        // Only rank 0 writes files and shows anything.
        assert!(!learner.folder.with_extension("others").exists());
        assert!(ended[0].stdout.contains("Starting training for 3 epochs"));
        assert_eq!(ended[1].stdout.lines().count(), 1, "{}", ended[1].stdout);
    }
}

#[test]
fn units_of_a_learners_model_are_recomputed_and_cannot_be_sharded() {
    let [plain, recomputed, sharded] = ["plain", "recompute", "shard"].map(|units| {
        let folder = tempfile::tempdir().unwrap();
        let text = serde_json::to_string(&job(folder.path())).unwrap();
        let program = Path::new(env!("CARGO_BIN_EXE_rank"));
        let ended = run_ranks(program, &["learner", &text], 2, |_, command| {
            command.env("ACCEL_UNITS", units);
        });
        ended.iter().map(outcome).collect::<Vec<_>>()
    });
    assert_eq!(recomputed[0].error, None);
    assert!(recomputed[0].parameters == plain[0].parameters);
    for outcome in sharded {
        let error = outcome.error.unwrap();
        assert!(error.contains("set `units` to `recompute`"), "{error}");
    }
}

#[test]
fn metrics_of_a_validation_see_the_samples_of_all_ranks() {
    let finals = [1, 2].map(|ranks| {
        let folder = tempfile::tempdir().unwrap();
        let frozen = LearnerJob {
            rate: 0.0,
            dropout: 0.0,
            epochs: 1,
            ..job(folder.path())
        };
        assert_eq!(run(&frozen, ranks)[0].error, None);
        // The second is not a mean over batches.
        ["Accuracy", "FBetaScore"].map(|name| {
            let mut logs = std::fs::read_dir(frozen.folder.join("valid/epoch-1")).unwrap();
            let is_its = |path: &Path| {
                path.file_name()
                    .unwrap()
                    .to_str()
                    .unwrap()
                    .starts_with(name)
            };
            let log = logs.find_map(|log| Some(log.unwrap().path()).filter(|path| is_its(path)));
            let text = std::fs::read_to_string(log.unwrap()).unwrap();
            let last = text.lines().last().unwrap().strip_suffix(",final");
            last.unwrap().parse::<f64>().unwrap()
        })
    });
    for (alone, together) in finals[0].iter().zip(finals[1]) {
        assert!((alone - together).abs() < 1e-4, "{finals:?}");
    }
}

#[test]
fn early_stopping_ends_all_ranks_at_the_same_epoch() {
    let folder = tempfile::tempdir().unwrap();
    let job = LearnerJob {
        // The training diverges.
        rate: 30.0,
        epochs: 9,
        patience: Some(2),
        ..job(folder.path())
    };
    let outcomes = run(&job, 2);
    assert_eq!(outcomes[0].error, None);
    assert_eq!(outcomes[0].steps, outcomes[1].steps);
    assert!(outcomes[0].steps < 9 * 7, "{}", outcomes[0].steps);
    assert_eq!(outcomes[0].parameters, outcomes[1].parameters);
}

#[test]
fn an_interruption_of_one_rank_ends_all_at_the_same_step() {
    // Ranks stop at the end of the window; with accumulation, that is the first one of the second epoch.
    for (accumulation, steps) in [(1, 9), (3, 10)] {
        let folder = tempfile::tempdir().unwrap();
        let job = LearnerJob {
            accumulation,
            stops: Some((1, 9, Stop::Interrupt)),
            ..job(folder.path())
        };
        let outcomes = run(&job, 2);
        for outcome in &outcomes {
            assert_eq!(outcome.steps, steps);
            assert_eq!(outcome.interrupted.as_deref(), Some("the program says so"));
        }
        assert_eq!(outcomes[0].parameters, outcomes[1].parameters);
    }
}

#[test]
fn a_failure_of_one_rank_is_the_error_of_all() {
    let folder = tempfile::tempdir().unwrap();
    let job = LearnerJob {
        stops: Some((1, 9, Stop::Fail)),
        ..job(folder.path())
    };
    for (rank, outcome) in run(&job, 2).iter().enumerate() {
        let error = outcome.error.as_deref().unwrap();
        assert!(error.contains("no labels"), "{error}");
        assert_eq!(error.contains("rank 1 has failed"), rank == 0, "{error}");
    }
}

#[test]
fn a_killed_rank_is_the_error_of_the_others_within_seconds() {
    let folder = tempfile::tempdir().unwrap();
    let ended = start(&job(folder.path()), 2, "rank=1 step=9 kill");
    assert!(!ended[1].status.success());
    let outcome = outcome(&ended[0]);
    assert_eq!(outcome.lost, Some(1), "{outcome:?}");
    assert!(outcome.error.unwrap().contains("rank 1"));
    assert!(outcome.seconds < 60.0, "{}", outcome.seconds);
}

#[test]
fn a_training_continues_from_a_checkpoint_to_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let first = LearnerJob {
        saves: true,
        epochs: 2,
        ..job(folder.path())
    };
    assert_eq!(run(&first, 2)[0].error, None);
    let rest = LearnerJob {
        epochs: 4,
        resumes: Some(2),
        ..first
    };
    let resumed = run(&rest, 2);
    let whole = tempfile::tempdir().unwrap();
    let whole = LearnerJob {
        epochs: 4,
        ..job(whole.path())
    };
    let whole = run(&whole, 2);
    assert_eq!(resumed[0].error, None);
    assert_eq!((resumed[0].steps, whole[0].steps), (14, 28));
    assert_eq!(resumed[0].parameters, whole[0].parameters);
    assert_eq!(resumed[1].parameters, whole[0].parameters);
}
