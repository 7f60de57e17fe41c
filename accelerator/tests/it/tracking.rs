//! One run for all ranks, across checkpoints, failures and changes.

use std::path::Path;

use accelerator::Tracker;
use accelerator::collective::Launch;
use accelerator::prelude::*;
use accelerator::track::{MediaContent, RunHistory, RunStatus};
use burn::nn::{Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::tensor::Tensor;

use crate::common::checkpoints::{batch_is_cursed, prepared, train};
use crate::common::linear;

fn builder(folder: &Path) -> accelerator::AcceleratorBuilder {
    Accelerator::builder().runs_folder(folder.join("runs"))
}

fn run(folder: &Path, name: &str) -> RunHistory {
    RunHistory::read(folder.join("runs").join(name)).unwrap()
}

fn runs(folder: &Path) -> usize {
    std::fs::read_dir(folder.join("runs")).unwrap().count()
}

fn losses(run: &RunHistory) -> Vec<(u64, f64)> {
    let series = run.series("train/loss").unwrap();
    series.points.iter().map(|x| (x.step, x.value)).collect()
}

#[test]
fn c23_ranks_write_one_run_and_measure_each_its_own_system() {
    let folder = tempfile::tempdir().unwrap();
    let builder = builder(folder.path()).seed(7).log_with([Tracker::Csv]);
    builder
        .launch(3, |accelerator| {
            accelerator.init_trackers("a", &serde_json::json!({ "lr": 0.1 }))?;
            let value = 1.0 + accelerator.rank() as f64;
            accelerator.log("train", [("loss", value)], 1, 0.5);
            accelerator.tracker(|run| run.set_tag("rank", &accelerator.rank().to_string()));
            accelerator.finish()
        })
        .unwrap();
    assert_eq!(runs(folder.path()), 1);
    let run = run(folder.path(), "a");
    assert_eq!(losses(&run), [(1, 1.0)]);
    assert_eq!(run.tags["rank"], "0");
    assert_eq!(run.hyperparameters["lr"].value, 0.1);
    assert_eq!(run.status(), RunStatus::Finished);
    let attempt = &run.attempts[0];
    assert_eq!(attempt.world, 3);
    assert_eq!(attempt.provenance["seeds"]["accelerator"], 7);
    assert_eq!(attempt.provenance["plan"]["accumulation_steps"], 1);
    if cfg!(target_os = "linux") {
        let ranks: Vec<_> = run.system.keys().copied().collect();
        assert_eq!(ranks, [0, 1, 2]);
        assert!(run.system[&2]["memory"].len() >= 2);
    }
    assert!(run.folder.join("metrics.csv").exists());
}

#[test]
fn c23_without_a_run_nothing_is_written_and_nothing_fails() {
    let folder = tempfile::tempdir().unwrap();
    let accelerator = builder(folder.path()).build().unwrap();
    accelerator.log("train", [("loss", 1.0)], 1, None);
    accelerator.log_means("train", [("loss", 1.0, 2)], 1, None);
    assert_eq!(accelerator.tracker(|_| ()), None);
    accelerator.end_training();
    accelerator.finish().unwrap();
    assert!(!folder.path().join("runs").exists());
}

/// Returns step, number of elements, minimum and maximum of the histograms of a parameter's gradient.
fn gradients(run: &RunHistory, path: &str) -> Vec<(u64, f64, f64, f64)> {
    let key = format!("gradients/{path}");
    let media = run.media.iter().filter(|media| media.key == key);
    let found = media.map(|media| {
        let MediaContent::Histogram(bins) = &media.content else {
            panic!("{media:?}");
        };
        let count = bins.iter().map(|bin| bin[2]).sum();
        (media.step, count, bins[0][0], bins[bins.len() - 1][1])
    });
    found.collect()
}

#[test]
fn histograms_of_gradients_are_of_what_the_optimizer_gets() {
    // On a single rank, summed in place, and summed on the device.
    let auto = GradientReduction::Auto;
    for (ranks, reduction) in [(1, auto), (2, auto), (2, GradientReduction::Staged)] {
        let folder = tempfile::tempdir().unwrap();
        let builder = builder(folder.path()).gradient_reduction(reduction);
        let clipped = builder.launch(ranks, |accelerator| {
            accelerator.init_trackers("a", &())?;
            let device = accelerator.device();
            let model: Linear = accelerator.prepare(LinearConfig::new(3, 1).init(&device))?;
            // The mean over both ranks' samples is 2, 3, 5.
            let (samples, input) = match (accelerator.world_size(), accelerator.rank()) {
                (1, _) => (4, [2.0, 3.0, 5.0]),
                (_, 0) => (4, [1.0, 2.0, 4.0]),
                _ => (2, [4.0, 5.0, 7.0]),
            };
            let input = Tensor::<2>::from_floats([input], &device).repeat_dim(0, samples);
            let loss = model.forward(input).mean();
            let gradients = accelerator.backward(loss, &model, samples)?;
            accelerator.log_gradient_histograms(&gradients, 1);
            let gradients = gradients.clip_norm(1.0);
            accelerator.log_gradient_histograms(&gradients, 2);
            let gradients = gradients.into_params().unwrap();
            let mean = gradients.get::<2>(model.weight.id).unwrap();
            accelerator.finish()?;
            Ok(mean.into_data().try_to_vec::<f32>().unwrap())
        });
        let clipped = &clipped.unwrap()[0];
        let run = run(folder.path(), "a");
        let (least, greatest) = (f64::from(clipped[0]), f64::from(clipped[2]));
        let weight = [(1, 3.0, 2.0, 5.0), (2, 3.0, least, greatest)];
        assert!(greatest < 1.0);
        assert_eq!(gradients(&run, "weight"), weight, "{ranks} {reduction:?}");
        assert_eq!(gradients(&run, "bias")[0], (1, 1.0, 1.0, 1.0));
    }
}

#[test]
fn parts_of_gradients_are_not_logged() {
    let folder = tempfile::tempdir().unwrap();
    let outcome = builder(folder.path()).launch(2, |accelerator| {
        accelerator.init_trackers("a", &())?;
        let device = accelerator.device();
        let parts = (
            LinearConfig::new(3, 1).init(&device),
            Sharded(SgdConfig::new().init()),
        );
        let (mut model, mut optimizer): (Linear, _) = accelerator.prepare(parts)?;
        for step in 1..=3 {
            let loss = model.forward(Tensor::<2>::ones([2, 3], &device)).mean();
            let gradients = accelerator.backward(loss, &model, 2)?;
            accelerator.log_gradient_histograms(&gradients, step);
            model = optimizer.step(0.1, model, gradients);
        }
        accelerator.finish()
    });
    outcome.unwrap();
    let run = run(folder.path(), "a");
    assert_eq!(gradients(&run, "weight"), [(1, 3.0, 1.0, 1.0)]);
}

/// The program may begin the run before or after it resumes.
#[test]
fn a_checkpoint_knows_its_run() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = folder.path().join("checkpoints");
    let live = |begins_first: bool, in_background: bool, steps: u64| {
        let life = builder(folder.path()).launch(2, |accelerator| {
            if begins_first {
                accelerator.init_trackers("a", &())?;
            }
            let (Object(done), _) = accelerator.resume(&checkpoints, Object(0))?;
            if !begins_first {
                accelerator.init_trackers("a", &())?;
            }
            for step in done + 1..=steps {
                accelerator.log("train", [("loss", step as f64)], step, None);
                if step % 2 == 1 {
                    continue;
                }
                match in_background {
                    true => drop(accelerator.save_state_async(&checkpoints, Object(&step))?),
                    false => drop(accelerator.save_state(&checkpoints, Object(&step))?),
                }
            }
            // The run ends without `finish`, and the steps after the last checkpoint are repeated.
            Ok(())
        });
        life.unwrap();
    };
    let lives = [(true, false), (false, false), (true, true), (false, true)];
    for (life, (begins_first, in_background)) in lives.into_iter().enumerate() {
        let steps = 3 + 2 * life as u64;
        live(begins_first, in_background, steps);
        let run = run(folder.path(), "a");
        assert_eq!(run.status(), RunStatus::Failed);
        let expected: Vec<_> = (1..=steps).map(|step| (step, step as f64)).collect();
        assert_eq!(losses(&run), expected, "life {life}");
        assert_eq!((run.attempts.len(), runs(folder.path())), (life + 1, 1));
        assert_eq!(run.checkpoints.last(), Some(&Some(steps - 1)));
    }
}

#[test]
fn what_survivors_save_knows_the_run_that_rank_0_wrote() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = folder.path().join("checkpoints");
    let lost = builder(folder.path()).launch(2, |accelerator| {
        accelerator.init_trackers("a", &())?;
        let mut parts = train(&accelerator, prepared(&accelerator), 2);
        for step in 1..=2 {
            accelerator.log("train", [("loss", 1.0)], step, None);
        }
        if accelerator.is_main_process() {
            // This step is logged but is in no checkpoint.
            accelerator.log("train", [("loss", 1.0)], 3, None);
            accelerator.tracker(|run| run.flush()).transpose().unwrap();
            return Err(batch_is_cursed());
        }
        let error = accelerator.wait_for_everyone().unwrap_err();
        let (model, optimizer, train) = &mut parts;
        let saved = accelerator.save_emergency(&checkpoints, (&*model, &*optimizer, &*train))?;
        assert!(saved.is_some());
        Err::<(), _>(error)
    });
    lost.unwrap_err();
    let run_before = run(folder.path(), "a");

    let accelerator = builder(folder.path()).build().unwrap();
    accelerator.init_trackers("a", &()).unwrap();
    accelerator
        .resume(&checkpoints, prepared(&accelerator))
        .unwrap();
    accelerator.log("train", [("loss", 2.0)], 3, None);
    accelerator.finish().unwrap();
    let run = run(folder.path(), "a");
    assert_eq!(run.id, run_before.id);
    assert_eq!(losses(&run), [(1, 1.0), (2, 1.0), (3, 2.0)]);
    assert_eq!(runs(folder.path()), 1);
}

#[test]
fn a_job_that_fails_or_is_preempted_ends_its_run_as_such() {
    let folder = tempfile::tempdir().unwrap();
    let failed = builder(folder.path()).launch(2, |accelerator| {
        accelerator.init_trackers("a", &())?;
        if accelerator.rank() == 1 {
            return Err(batch_is_cursed());
        }
        accelerator.wait_for_everyone()
    });
    failed.unwrap_err();
    let run_a = run(folder.path(), "a");
    assert_eq!(run_a.status(), RunStatus::Failed);
    let why = run_a.end.unwrap().failure.unwrap().to_string();
    assert!(why.contains("rank 1"), "{why}");

    let failed = builder(folder.path()).launch(1, |accelerator| {
        accelerator.init_trackers("d", &())?;
        Err::<(), _>(batch_is_cursed())
    });
    let why = failed.unwrap_err().to_string();
    let end = run(folder.path(), "d").end.unwrap();
    assert!(end.failure.unwrap().to_string().contains(&why), "{why}");

    let panicked = builder(folder.path()).launch(2, |accelerator| {
        accelerator.init_trackers("b", &())?;
        assert!(!accelerator.is_main_process(), "no labels");
        accelerator.wait_for_everyone()
    });
    panicked.unwrap_err();
    let why = run(folder.path(), "b").end.unwrap().failure.unwrap();
    assert!(why.to_string().contains("no labels"), "{why}");

    let accelerator = builder(folder.path()).build().unwrap();
    accelerator.init_trackers("c", &()).unwrap();
    accelerator.finish_preempted().unwrap();
    assert_eq!(run(folder.path(), "c").status(), RunStatus::Preempted);
}

#[test]
fn a_program_that_leaves_without_finish_has_failed() {
    let folder = tempfile::tempdir().unwrap();
    let program = || -> Result<()> {
        let accelerator = builder(folder.path()).build()?;
        accelerator.init_trackers("a", &())?;
        accelerator.log("train", [("loss", 1.0)], 1, None);
        Err(batch_is_cursed())
    };
    program().unwrap_err();
    let run = run(folder.path(), "a");
    assert_eq!(run.status(), RunStatus::Failed);
    let why = run.end.unwrap().failure.unwrap().to_string();
    assert!(why.contains("without `finish`"), "{why}");
}

/// Trains, and returns the digests of the weights that were recorded.
fn weights(folder: &Path, name: &str, ranks: usize, rate: f64) -> Vec<(u64, String)> {
    let trained = builder(folder).seed(7).launch(ranks, |accelerator| {
        accelerator.init_trackers(name, &())?;
        let device = accelerator.device();
        let model = linear(2, 1, &device);
        let (mut model, mut optimizer) = accelerator.prepare((model, SgdConfig::new().init()))?;
        for step in 1..=3 {
            let loss = model.forward(Tensor::<2>::ones([4, 2], &device)).mean();
            let gradients = accelerator.backward(loss, &model, 4)?;
            accelerator.log("train", [("step", step as f64)], step, None);
            model = optimizer.step(rate, model, gradients);
            match step {
                1 => drop(accelerator.valid(&model)?),
                2 => drop(accelerator.save_state(folder.join(format!("{name}-{ranks}")), &model)?),
                _ => accelerator.save_model(&model, folder.join("model.safetensors"))?,
            }
        }
        // These are the same weights again.
        accelerator.valid(&model)?;
        accelerator.finish()
    });
    trained.unwrap();
    let run = run(folder, name);
    run.weights
        .iter()
        .map(|x| (x.step, x.digest.clone()))
        .collect()
}

#[test]
fn what_the_weights_are_is_recorded_wherever_the_model_leaves() {
    let folder = tempfile::tempdir().unwrap();
    let alone = weights(folder.path(), "a", 1, 0.1);
    let steps: Vec<_> = alone.iter().map(|&(step, _)| step).collect();
    assert_eq!(steps, [1, 2, 3]);
    assert!(alone.windows(2).all(|x| x[0].1 != x[1].1), "{alone:?}");
    assert_eq!(weights(folder.path(), "b", 1, 0.1), alone);
    let both = weights(folder.path(), "c", 2, 0.1);
    assert_eq!(both, alone, "the mean of two that are the same");
    let other = weights(folder.path(), "d", 2, 0.2);
    assert!(
        other.iter().zip(&both).all(|(x, y)| x.1 != y.1),
        "{other:?}"
    );
}

#[test]
fn where_the_folder_cannot_be_written_all_ranks_train_without_a_run() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("runs"), "no folder").unwrap();
    let checkpoints = folder.path().join("checkpoints");
    let trained = builder(folder.path()).launch(2, |accelerator| {
        accelerator.init_trackers("a", &())?;
        accelerator.log("train", [("loss", 1.0)], 1, None);
        assert!(accelerator.tracker(|_| ()).is_none());
        accelerator.save_state(&checkpoints, Object(&1))?;
        accelerator.finish()
    });
    trained.unwrap();
    let launch = Launch::from_vars(|name| (name == "ACCEL_RESTART").then(|| "1".to_owned()));
    let restarted = builder(folder.path()).launched_as(launch.unwrap());
    let accelerator = restarted.build().unwrap();
    accelerator.init_trackers("a", &()).unwrap();
    accelerator.log("train", [("loss", 1.0)], 1, None);
    accelerator
        .save_state(folder.path().join("restarted"), Object(&1))
        .unwrap();
    accelerator.finish().unwrap();

    let accelerator = builder(folder.path()).build().unwrap();
    let error = accelerator.init_trackers("", &()).unwrap_err();
    assert!(error.is_misuse(), "{error}");
    let error = accelerator.init_trackers("a", &[1]).unwrap_err();
    assert!(error.is_misuse(), "{error}");
}

#[test]
fn c23_runs_of_a_program_follow_one_another() {
    let folder = tempfile::tempdir().unwrap();
    let accelerator = builder(folder.path()).build().unwrap();
    for name in ["a", "b", "b"] {
        accelerator.init_trackers(name, &()).unwrap();
        accelerator.log("train", [("loss", 1.0)], 1, None);
    }
    accelerator.finish().unwrap();
    assert_eq!(runs(folder.path()), 2);
    for name in ["a", "b"] {
        let run = run(folder.path(), name);
        assert_eq!((run.status(), run.attempts.len()), (RunStatus::Finished, 1));
    }
}

#[test]
fn a_run_is_not_ended_within_its_own_closure() {
    let folder = tempfile::tempdir().unwrap();
    let accelerator = builder(folder.path()).build().unwrap();
    accelerator.init_trackers("a", &()).unwrap();
    accelerator.tracker(|_| accelerator.end_training());
    accelerator.log("train", [("loss", 1.0)], 1, None);
    accelerator.finish().unwrap();
    let run = run(folder.path(), "a");
    assert_eq!(run.series("train/loss").unwrap().points.len(), 1);
}
