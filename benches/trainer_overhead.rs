//! Compares a `Trainer` on one process with the same loop by hand, in alternating rounds.
//!
//! `cargo bench -p accelerator-benches --bench trainer_overhead -- --help`

use std::sync::Arc;
use std::time::Instant;

use accelerator::prelude::*;
use accelerator::train::{
    CallbackContext, Inputs, IntervalStrategy, LrSchedulerType, SaveStrategy, Trainer,
    TrainerCallback, TrainerControl, TrainingArguments,
};
use accelerator_benches::{Interval, Model, Net, Pair, Samples};
use accelerator_host::sync::Mutex;
use burn::optim::AdamWConfig;
use clap::Parser;
use serde::Serialize;

/// Measure the overhead of a `Trainer` over a loop by hand
#[derive(Debug, Parser)]
struct Args {
    /// The networks
    #[arg(long, value_delimiter = ',', default_value = "small-mlp,transformer")]
    model: Vec<Model>,
    /// The number of rounds of each side
    #[arg(long, default_value_t = 20)]
    rounds: usize,
    /// The duration of a round, in seconds
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    #[arg(long, hide = true)]
    bench: bool,
}

/// The result for a network: the last line of its output, as JSON.
#[derive(Debug, Serialize)]
struct Line {
    model: Model,
    /// Milliseconds per step by hand.
    by_hand: Interval,
    /// Milliseconds per step of the trainer.
    trainer: Interval,
    /// The trainer over the loop by hand, round by round.
    ratio: Interval,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args = Args::parse();
    let accelerator = Accelerator::builder().device(BackendKind::Flex).build()?;
    for &model in &args.model {
        let line = measure(&args, &accelerator, model)?;
        println!("{}", serde_json::to_string(&line)?);
    }
    Ok(accelerator.finish()?)
}

fn measure(
    args: &Args,
    accelerator: &Accelerator,
    model: Model,
) -> Result<Line, Box<dyn std::error::Error>> {
    let steps = {
        let mut pair = Pair::new(accelerator, model, 5)?;
        pair.prepared()?;
        (args.seconds / pair.prepared()?.whole).ceil().max(1.0) as usize
    };
    let times = Arc::new(Mutex::new(Vec::new()));
    let rounds = Rounds {
        by_hand: Pair::new(accelerator, model, steps)?,
        steps,
        since: Instant::now(),
        times: times.clone(),
    };
    // The settings of the loop by hand: no clipping, no logs, a constant rate, Burn's own optimizer.
    let arguments = TrainingArguments {
        learning_rate: 1e-5,
        logging_strategy: IntervalStrategy::No,
        lr_scheduler_type: LrSchedulerType::Constant,
        max_grad_norm: 0.0,
        max_steps: ((args.rounds + 1) * steps) as i64,
        per_device_train_batch_size: model.batch_size(),
        save_strategy: SaveStrategy::No,
        disable_tqdm: true,
        ..TrainingArguments::default()
    };
    let loss = |net: &Net, inputs: &Inputs<'_, accelerator_benches::Batch>| net.loss(inputs);
    let mut trainer = Trainer::builder(
        arguments,
        |device| model.init(device),
        model.samples().batcher(),
        loss,
    )
    .accelerator(accelerator.clone())
    .train_dataset(Samples::dataset(steps * model.batch_size()))
    .optimizer(AdamWConfig::new().init())
    .callback(rounds)
    .build()?;
    trainer.train()?;

    // The first round is cold.
    let times = times.lock();
    let (trainer, by_hand): (Vec<f64>, Vec<f64>) = times.iter().skip(1).copied().unzip();
    Ok(Line {
        model,
        ratio: Interval::of_ratios(&trainer, &by_hand),
        by_hand: Interval::of(by_hand),
        trainer: Interval::of(trainer),
    })
}

/// The callback that runs a round by hand after each round of the trainer.
struct Rounds {
    by_hand: Pair,
    steps: usize,
    since: Instant,
    /// Milliseconds per step, of the trainer and by hand.
    times: Arc<Mutex<Vec<(f64, f64)>>>,
}

impl<M> TrainerCallback<M> for Rounds {
    fn on_step_end(&mut self, at: &CallbackContext<'_, M>, _: &mut TrainerControl) -> Result<()> {
        if at.state.global_step.is_multiple_of(self.steps as u64) {
            let trainer = self.since.elapsed().as_secs_f64() / self.steps as f64;
            let by_hand = self
                .by_hand
                .prepared()
                .map_err(|error| Error::other(error.to_string()))?;
            let mut times = self.times.lock();
            times.push((1e3 * trainer, 1e3 * by_hand.whole));
            self.since = Instant::now();
        }
        Ok(())
    }
}
