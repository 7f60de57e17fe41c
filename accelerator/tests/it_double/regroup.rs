//! Ranks leave their group between two steps and continue in one of another size.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use crate::common::{Column, ColumnBatcher, assert_contains, assert_errors, columns, linear};
use crate::values;
use accelerator::collective::Launch;
use accelerator::collective::internal::StoreServer;
use accelerator::prelude::*;
use accelerator::track::{RunHistory, RunStatus};
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::nn::Linear;
use burn::nn::loss::{MseLoss, Reduction};
use burn::optim::SgdConfig;
use burn::optim::momentum::MomentumConfig;
use burn::tensor::{FloatDType, Tensor};
use signal_hook::consts::SIGUSR2;

const SAMPLES: usize = 61;
const EPOCHS: u64 = 2;
/// The batch of all ranks together.
const BATCH: usize = 8;
const STEPS: u64 = 16;

/// Plays the launcher for ranks that are threads.
struct Job {
    /// The size and the store of each group, in turn.
    groups: Vec<(usize, StoreServer)>,
    folder: tempfile::TempDir,
}

impl Job {
    fn new(sizes: &[usize]) -> Self {
        let store = |size| StoreServer::bind(("127.0.0.1", 0), size, None).unwrap();
        Self {
            groups: sizes.iter().map(|&size| (size, store(size))).collect(),
            folder: tempfile::tempdir().unwrap(),
        }
    }

    fn variables(&self, group: usize, rank: usize) -> BTreeMap<String, String> {
        let (size, store) = &self.groups[group];
        let told = [
            ("RANK", rank.to_string()),
            ("WORLD_SIZE", size.to_string()),
            ("MASTER_ADDR", "127.0.0.1".to_owned()),
            ("ACCEL_PORT", store.local_addr().port().to_string()),
            ("ACCEL_STORE", "launcher".to_owned()),
            ("ACCEL_TRANSPORT", "tcp".to_owned()),
            ("ACCEL_ELASTIC", "running".to_owned()),
        ];
        told.map(|(name, value)| (name.to_owned(), value)).into()
    }

    fn build(&self, group: usize, rank: usize) -> Result<Accelerator> {
        let variables = self.variables(group, rank);
        let launch = Launch::from_vars(|name| variables.get(name).cloned())?;
        let builder = Accelerator::builder()
            .dtype(FloatDType::F64)
            .runs_folder(self.folder.path().join("runs"));
        builder.launched_as(launch).build()
    }

    /// Tells each rank of a group its place in the next one. Rank 0 calls it, and it returns when rank 0 has its place.
    /// If the group shrinks, rank 1 leaves and the others move up.
    fn tell(&self, group: usize, accelerator: &Accelerator) {
        let (size, store) = &self.groups[group];
        let shrinks = self.groups[group + 1].0 < *size;
        let mut places = 0..;
        for rank in 0..*size {
            let variables = match shrinks && rank == 1 {
                true => BTreeMap::new(),
                false => self.variables(group + 1, places.next().unwrap()),
            };
            store.tell_next_place(rank, variables);
        }
        until_told(accelerator);
    }

    /// Runs `body` in each process, beginning with the group in which the process is started.
    fn run<T: Send>(&self, body: impl Fn(Accelerator, usize) -> Result<T> + Sync) -> Vec<T> {
        let mut started = 0;
        let mut places = Vec::new();
        for (group, (size, _)) in self.groups.iter().enumerate() {
            places.extend((started..*size).map(|rank| (group, rank)));
            started = *size;
        }
        std::thread::scope(|scope| {
            let start = |(group, rank)| {
                let body = &body;
                scope.spawn(move || body(self.build(group, rank)?, group))
            };
            let threads: Vec<_> = places.into_iter().map(start).collect();
            let ended = threads.into_iter().map(|thread| thread.join().unwrap());
            ended.collect::<Result<_>>().unwrap()
        })
    }
}

fn until_told(accelerator: &Accelerator) {
    while !accelerator.group().has_next_place() {
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[derive(Clone, Copy, Debug)]
enum OptimizerKind {
    Whole,
    Sharded,
}

/// The final state of a rank of the last group.
#[derive(Clone, Debug, PartialEq)]
struct End {
    weights: Vec<f64>,
    averages: Vec<f64>,
    sum_of_losses: f64,
    /// The ranks that this value was on.
    passed_on: Vec<usize>,
}

/// The end of a program's part in a group.
enum Turn {
    Ended(End),
    Left,
    Next(Accelerator),
}

/// The number of times that steps have used each sample of each epoch.
type Used = Mutex<BTreeMap<(u64, usize), usize>>;

/// Trains until the end, or until the ranks regroup after the step that `boundaries` has for the group.
fn train(
    job: &Job,
    accelerator: &Accelerator,
    group: usize,
    boundaries: &[u64],
    kind: OptimizerKind,
    used: &Used,
) -> Result<Turn> {
    let folder = job.folder.path().join("checkpoints");
    let ranks_at_first = job.groups[0].0;
    let train = LoaderBuilder::new(ColumnBatcher)
        .batch_size(BATCH / ranks_at_first)
        .shuffle(3)
        .build(columns(SAMPLES));
    let train = accelerator.resume_loader(&folder, accelerator.prepare(train)?)?;
    let steps = accelerator.plan(&train, EPOCHS).steps.unwrap();
    assert_eq!(steps, STEPS);
    let schedule = CosineAnnealingLrSchedulerConfig::new(0.1, steps as usize);
    let schedule = schedule.init().unwrap();
    let model = accelerator.prepare(linear(1, 5, &accelerator.device()))?;
    let momentum = MomentumConfig::new();
    let sgd = SgdConfig::new().with_momentum(Some(momentum)).init();
    let optimizer = match kind {
        OptimizerKind::Whole => accelerator.prepare((sgd, schedule))?,
        OptimizerKind::Sharded => accelerator.prepare((Sharded(sgd), schedule))?,
    };
    let ema = Ema::new(&model, 0.9);
    let parts = (
        model,
        optimizer,
        ema,
        train,
        Object(0.0),
        PerRank(Vec::new()),
    );
    let (parts, position) = accelerator.resume(&folder, parts)?;
    let (mut model, mut optimizer, mut ema, train, mut sum, mut passed_on) = parts;
    assert_eq!(position.is_start(), group == 0);
    assert_eq!(position.checkpoint(), None);
    if group > 0 {
        let text = position.to_string();
        assert!(text.ends_with("by the group before"), "{text}");
        assert_eq!(position.step(), boundaries[group - 1]);
        assert_eq!(position.world_size_before(), job.groups[group - 1].0);
    }
    passed_on.0.push(accelerator.rank());
    let boundary = boundaries.get(group).copied();
    for epoch in position.epoch()..EPOCHS {
        for batch in train.epoch(epoch) {
            let batch = batch?;
            let step = optimizer.steps() + 1;
            if Some(step) == boundary && accelerator.is_main_process() {
                job.tell(group, accelerator);
            }
            let loss = loss(&model, &batch);
            let gradients = accelerator.backward(loss, &model, &batch)?;
            sum.0 += gradients.loss().unwrap();
            model = optimizer.step(model, gradients);
            ema.update(&model);
            for number in &batch.numbers[..batch.real()] {
                *used.lock().unwrap().entry((epoch, *number)).or_default() += 1;
            }
            let is_pending = accelerator.regroup_pending()?;
            assert_eq!(is_pending, Some(step) == boundary);
            if step == 2 {
                // Only `regroup` or `finish` waits for this save.
                let _ = accelerator.save_state_async(&folder, (&model, &optimizer))?;
            }
            if is_pending {
                assert!(accelerator.preempted()?, "of who knows preemptions only");
                let parts = (
                    &model,
                    &optimizer,
                    &ema,
                    &train,
                    Object(&sum.0),
                    PerRank(&passed_on.0),
                );
                let next = accelerator.regroup(parts)?;
                return Ok(next.map_or(Turn::Left, Turn::Next));
            }
        }
    }
    accelerator.finish()?;
    Ok(Turn::Ended(End {
        weights: values(&model),
        averages: values(ema.model()),
        sum_of_losses: sum.0,
        passed_on: passed_on.0,
    }))
}

fn loss(model: &Linear, batch: &Column) -> Tensor<1> {
    let wanted = (batch.values.clone() * 3.0 - 1.0).repeat(&[1, 5]);
    MseLoss::new().forward(model.forward(batch.values.clone()), wanted, Reduction::Mean)
}

/// Returns the final state of all ranks of the last group, after groups of these sizes.
fn run(sizes: &[usize], boundaries: &[u64], kind: OptimizerKind) -> Vec<End> {
    let (job, used) = (Job::new(sizes), Used::default());
    let ended = job.run(|mut accelerator, first| {
        for group in first.. {
            match train(&job, &accelerator, group, boundaries, kind, &used)? {
                Turn::Ended(end) => return Ok(Some(end)),
                Turn::Left => break,
                Turn::Next(next) => accelerator = next,
            }
        }
        Ok(None)
    });
    let used = used.into_inner().unwrap();
    assert_eq!(used.len(), SAMPLES * EPOCHS as usize);
    assert!(used.values().all(|times| *times == 1), "{used:?}");
    assert!(
        job.folder
            .path()
            .join("checkpoints/checkpoint-000001")
            .is_dir()
    );
    let ended: Vec<_> = ended.into_iter().flatten().collect();
    assert_eq!(Some(ended.len()), sizes.last().copied());
    ended
}

#[test]
fn two_ranks_become_four_and_then_three_and_train_as_one() {
    let alone = &run(&[1], &[], OptimizerKind::Whole)[0];
    for kind in [OptimizerKind::Whole, OptimizerKind::Sharded] {
        // In the middle of the first epoch, after its last step, and in the middle of the second.
        for boundaries in [[3, 11], [8, 9]] {
            let ended = run(&[2, 4, 3], &boundaries, kind);
            for end in &ended {
                assert_eq!(end.weights, ended[0].weights);
                assert_close(&end.weights, &alone.weights);
                assert_close(&end.averages, &alone.averages);
                assert_close(&[end.sum_of_losses], &[alone.sum_of_losses]);
            }
            // Per-rank values follow the rank numbers. Rank 2 of four is new, and keeps the value that it passes.
            let mut passed_on: Vec<_> = ended.into_iter().map(|end| end.passed_on).collect();
            passed_on.sort();
            assert_eq!(passed_on, [vec![0, 0, 0], vec![1, 1, 1], vec![2, 2]]);
        }
    }
}

fn assert_close(ours: &[f64], theirs: &[f64]) {
    assert_eq!(ours.len(), theirs.len());
    for (ours, theirs) in ours.iter().zip(theirs) {
        assert!((ours - theirs).abs() < 1e-9, "{ours} is not {theirs}");
    }
}

/// One process becomes two without a step in between, and then a signal arrives.
#[test]
fn a_watched_preemption_moves_to_the_next_group() {
    let job = Job::new(&[1, 2]);
    let states = job.run(|accelerator, group| {
        let mut accelerator = accelerator;
        if group == 0 {
            let signal = [accelerator::PreemptionSignal::Usr2];
            accelerator.on_preemption(Preemption::new().with_signals(signal))?;
            assert!(!accelerator.regroup_pending()? && !accelerator.preempted()?);
            job.tell(0, &accelerator);
            assert!(accelerator.regroup_pending()? && accelerator.preempted()?);
            accelerator = accelerator.regroup(Object(&"live"))?.unwrap();
        }
        assert!(!accelerator.preempted()?);
        if group == 0 {
            signal_hook::low_level::raise(SIGUSR2)?;
        }
        assert!(accelerator.preempted()? && !accelerator.regroup_pending()?);
        let nowhere = Path::new("not/there");
        let (Object(state), _) = accelerator.resume(nowhere, Object(String::new()))?;
        let (Object(again), position) = accelerator.resume(nowhere, Object(state.clone()))?;
        assert!(position.is_start() && again == state, "once");
        accelerator.finish()?;
        Ok(state)
    });
    assert_eq!(states, ["live", "live"]);
}

#[test]
fn a_run_continues_in_the_next_group() {
    let job = Job::new(&[1, 3, 2]);
    let log = |accelerator: &Accelerator, step| {
        accelerator.init_trackers("a", &serde_json::json!({ "lr": 0.1 }))?;
        accelerator.log("train", [("loss", step as f64)], step, None);
        accelerator.wait_for_everyone()
    };
    job.run(|mut accelerator, first| {
        for group in first.. {
            let parts = Object(group);
            let (_, position) = accelerator.resume(job.folder.path().join("none"), parts)?;
            assert_eq!(position.is_start(), group == 0);
            log(&accelerator, group as u64)?;
            if group == 2 {
                return accelerator.finish();
            }
            if accelerator.is_main_process() {
                job.tell(group, &accelerator);
            }
            while !accelerator.regroup_pending()? {}
            match accelerator.regroup(Object(&group))? {
                Some(next) => accelerator = next,
                None => break,
            }
        }
        Ok(())
    });
    let run = RunHistory::read(job.folder.path().join("runs/a")).unwrap();
    let points = run.series("train/loss").unwrap().points.iter();
    assert_eq!(
        points.map(|point| point.step).collect::<Vec<_>>(),
        [0, 1, 2]
    );
    assert_eq!((run.status(), run.attempts.len()), (RunStatus::Finished, 1));
    assert_eq!(run.tags["world"], "2");
    if cfg!(target_os = "linux") {
        assert_eq!(run.system.keys().copied().collect::<Vec<_>>(), [0, 1, 2]);
    }
}

#[test]
fn what_cannot_be_regrouped_is_an_error_and_the_group_continues() {
    let errors = accelerator::launch(2, |accelerator| {
        let error = accelerator.regroup(Object(&1)).unwrap_err();
        accelerator.wait_for_everyone()?;
        Ok(error)
    });
    assert_errors(errors.unwrap(), Error::is_misuse, &["`regroup_pending`"]);
    let builder = Accelerator::builder()
        .dtype(FloatDType::F64)
        .accumulation_steps(2);
    let accelerator = builder.build().unwrap();
    let model = accelerator
        .prepare(linear(1, 5, &accelerator.device()))
        .unwrap();
    let output = model.forward(Tensor::<2>::ones([4, 1], &accelerator.device()));
    drop(accelerator.backward(output.mean(), &model, 4).unwrap());
    assert!(!accelerator.regroup_pending().unwrap());
    assert!(accelerator.regroup(&model).unwrap_err().is_misuse());
}

/// The state would be left behind.
#[test]
fn a_launcher_that_moves_rank_0_is_refused() {
    let job = Job::new(&[2, 2]);
    let errors = job.run(|accelerator, _| {
        let rank = accelerator.rank();
        let store = &job.groups[0].1;
        store.tell_next_place(rank, job.variables(1, 1 - rank));
        until_told(&accelerator);
        assert!(accelerator.regroup_pending()?);
        Ok(accelerator.regroup(Object(&1)).unwrap_err().to_string())
    });
    assert_contains(&errors[0], &["has not made it rank 0"]);
    assert_contains(&errors[1], &["rank 0"]);
}
