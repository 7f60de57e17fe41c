//! Runs the same training as a `Learner` of burn-train and as a loop.

use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use accelerator::learner;
use accelerator::metric::Accuracy;
use accelerator::prelude::*;
use burn::data::dataset::DatasetError;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::lr_scheduler::step::StepLrSchedulerConfig;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{ModuleOptimizer, SgdConfig};
use burn_train::metric::store::{Aggregate, Direction, Split};
use burn_train::metric::{AccuracyMetric, ClassReduction, FBetaScoreMetric, LossMetric};
use burn_train::{
    ClassificationOutput, InferenceStep, Interrupter, Learner, MetricEarlyStoppingStrategy,
    StoppingCondition, TrainOutput, TrainStep,
};
use serde::{Deserialize, Serialize};

use crate::problems::flat;
use crate::resumable::{Net, RowBatch, RowBatcher, Rows};

#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct LearnerJob {
    /// The folder of burn-train's files; ranks other than 0 have their own, unless they read a checkpoint.
    pub folder: PathBuf,
    pub way: Way,
    pub samples: usize,
    pub epochs: usize,
    pub rate: f64,
    /// The probability of dropout; 0 also removes the normalisation.
    pub dropout: f64,
    pub accumulation: usize,
    /// The patience of early stopping, in epochs.
    pub patience: Option<usize>,
    pub saves: bool,
    /// The epoch whose checkpoint is resumed.
    pub resumes: Option<usize>,
    /// The rank and the step in which the training is stopped, and how.
    pub stops: Option<(usize, usize, Stop)>,
}

#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub enum Way {
    Learner,
    Loop,
}

#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub enum Stop {
    Interrupt,
    Fail,
}

#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct LearnerOutcome {
    /// The bits of parameters and running statistics.
    pub parameters: Vec<u64>,
    /// The forward passes of training, including those of idle batches.
    pub steps: usize,
    /// The accuracy of the last validation in percent, if this rank learns it.
    pub accuracy: Option<f64>,
    pub error: Option<String>,
    /// The rank that was lost.
    pub lost: Option<usize>,
    pub interrupted: Option<String>,
    pub seconds: f64,
}

/// Trains on this rank.
///
/// # Errors
///
/// The errors of the library, except for those that end the training of a learner: they are in its outcome.
pub fn train(job: &LearnerJob) -> Result<LearnerOutcome> {
    let accelerator = Accelerator::builder()
        .device(BackendKind::Flex)
        .accumulation_steps(job.accumulation)
        .seed(5)
        .build()?;
    let model = Net::new(&accelerator.device(), job.dropout);
    let momentum = MomentumConfig::new();
    let optimizer = SgdConfig::new().with_momentum(Some(momentum)).init();
    let schedule = StepLrSchedulerConfig::new(job.rate, 7).with_gamma(0.5);
    let schedule = schedule.init().expect("a valid schedule");
    let build = |count, seed: Option<u64>| {
        let builder = LoaderBuilder::new(RowBatcher).batch_size(8);
        let builder = match seed {
            Some(seed) => builder.shuffle(seed).num_workers(2),
            None => builder,
        };
        builder.build(Rows { count })
    };
    let loaders = (build(job.samples, Some(11)), build(17, None));
    let loaders = accelerator.prepare(loaders)?;
    match job.way {
        Way::Learner => {
            let begun = Instant::now();
            let outcome = learn(&accelerator, job, model, optimizer, schedule, loaders);
            let seconds = begun.elapsed().as_secs_f64();
            if outcome.error.is_none() {
                accelerator.finish()?;
            }
            Ok(LearnerOutcome { seconds, ..outcome })
        }
        Way::Loop => run_loop(&accelerator, job, model, (optimizer, schedule), loaders),
    }
}

type Loaders = (PreparedLoader<RowBatch>, PreparedLoader<RowBatch>);

fn learn(
    accelerator: &Accelerator,
    job: &LearnerJob,
    model: Net,
    optimizer: ModuleOptimizer,
    schedule: ModuleLrScheduler,
    (train, valid): Loaders,
) -> LearnerOutcome {
    let folder = match accelerator.is_main_process() || job.resumes.is_some() {
        true => job.folder.clone(),
        false => job.folder.with_extension("others"),
    };
    let training = accelerator
        .supervised_training(&folder, train, valid)
        .metrics((AccuracyMetric::new(), LossMetric::new()))
        // Not a mean over batches.
        .metrics((FBetaScoreMetric::multiclass(1.0, 1, ClassReduction::Macro),))
        .num_epochs(job.epochs)
        .summary();
    let training = match job.patience {
        Some(n_epochs) => training.early_stopping(MetricEarlyStoppingStrategy::new(
            &LossMetric::new(),
            Aggregate::Mean,
            Direction::Lowest,
            Split::Valid,
            StoppingCondition::NoImprovementSince { n_epochs },
        )),
        None => training,
    };
    let training = match job.saves {
        true => training.with_default_checkpointers(),
        false => training,
    };
    let training = match job.resumes {
        Some(epoch) => training.checkpoint(epoch),
        None => training,
    };
    if let Some((rank, step, stop)) = job.stops
        && rank == accelerator.rank()
    {
        // It is set only once.
        let _ = STOP.set((step, stop, training.interrupter()));
    }
    let result = training.launch(Learner::new(model, optimizer, schedule));
    let mut outcome = LearnerOutcome {
        steps: STEPS.load(Ordering::Relaxed),
        interrupted: result.interrupted.clone().and_then(|stop| stop.reason),
        ..LearnerOutcome::default()
    };
    match learner::into_result(result) {
        Ok(result) => outcome.parameters = parameters(&result.model),
        Err(error) => {
            outcome.lost = error.culprit().map(|culprit| culprit.rank());
            outcome.error = Some(format!("{error:?}"));
        }
    }
    let last = folder.join(format!("valid/epoch-{}/Accuracy.log", job.epochs));
    if let Ok(text) = std::fs::read_to_string(last) {
        let mut figures = text.lines().filter_map(|line| line.strip_suffix(",final"));
        outcome.accuracy = figures.next_back().map(|figure| figure.parse().unwrap());
    }
    outcome
}

fn run_loop(
    accelerator: &Accelerator,
    job: &LearnerJob,
    model: Net,
    optimizer: (ModuleOptimizer, ModuleLrScheduler),
    (train, valid): Loaders,
) -> Result<LearnerOutcome> {
    let (mut model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    let mut last = 0.0;
    for epoch in 0..job.epochs {
        for batch in train.epoch(epoch as u64) {
            let batch = batch?;
            let loss = classify(&model, &batch).loss;
            let gradients = accelerator.backward(loss, &model, &batch)?;
            model = optimizer.step(model, gradients);
        }
        let evaluated = accelerator.valid(&model)?;
        let mut accuracy = Accuracy::new();
        for batch in valid.eval() {
            let batch = batch?;
            let output = classify(&evaluated, &batch);
            accuracy.update(output.output, output.targets, batch.real());
        }
        last = 100.0 * accelerator.reduce_metric(accuracy)?.value();
    }
    let parameters = parameters(&accelerator.valid(&model)?);
    accelerator.finish()?;
    Ok(LearnerOutcome {
        parameters,
        accuracy: Some(last),
        ..LearnerOutcome::default()
    })
}

fn parameters(model: &Net) -> Vec<u64> {
    let mut values = Vec::new();
    flat(model, &mut values);
    values.into_iter().map(f64::to_bits).collect()
}

/// The forward passes of training on this rank.
static STEPS: AtomicUsize = AtomicUsize::new(0);

static STOP: OnceLock<(usize, Stop, Interrupter)> = OnceLock::new();

fn classify(model: &Net, batch: &RowBatch) -> ClassificationOutput {
    let (output, targets) = (model.forward(batch.rows.clone()), batch.targets.clone());
    let loss = CrossEntropyLossConfig::new().init(&batch.rows.device());
    let loss = loss.forward(output.clone(), targets.clone());
    ClassificationOutput::new(loss, output, targets)
}

impl TrainStep for Net {
    type Input = RowBatch;
    type Output = ClassificationOutput;

    fn step(&self, batch: RowBatch) -> TrainOutput<ClassificationOutput> {
        let step = STEPS.fetch_add(1, Ordering::Relaxed) + 1;
        if let Some((_, stop, interrupter)) = STOP.get().filter(|(at, ..)| *at == step) {
            match stop {
                Stop::Interrupt => interrupter.stop(Some("the program says so")),
                Stop::Fail => {
                    let error = std::io::Error::other("no labels");
                    interrupter.fail(DatasetError::new(error));
                }
            }
        }
        let item = classify(self, &batch);
        TrainOutput::new(self, item.loss.backward(), item)
    }
}

impl InferenceStep for Net {
    type Input = RowBatch;
    type Output = ClassificationOutput;

    fn step(&self, batch: RowBatch) -> ClassificationOutput {
        classify(self, &batch)
    }
}
