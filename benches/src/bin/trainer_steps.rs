//! The [`Trainer`] side of `benches/compare/trainer.py`: the same transformer, data, batches and arguments, and the
//! same keys in the last line of the output.
//!
//! `accel-launch --nproc-per-node 2 target/release/trainer_steps --steps 200 --batch 16`

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use accelerator::prelude::*;
use accelerator::train::{
    CallbackContext, Inputs, IntervalStrategy, OptimizerName, SaveStrategy, TrainSamplingStrategy,
    Trainer, TrainerCallback, TrainerControl, TrainingArguments,
};
use accelerator_benches::Samples;
use accelerator_examples::cross_entropy;
use accelerator_host::sync::Mutex;
use burn::data::dataloader::batcher::Batcher;
use burn::module::Module;
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::{Device, Int, Tensor, TensorData};
use clap::Parser;
use serde_json::json;

const TOKENS: usize = 1024;
const PLACES: usize = 32;
const WIDTH: usize = 64;
const HEADS: usize = 4;
const INNER: usize = 256;
const LAYERS: usize = 2;
const CLASSES: usize = 16;
/// The steps before the clock starts.
const WARMUP: u64 = 20;

/// Measure how many samples per second a trainer trains a small transformer with
#[derive(Debug, Parser)]
struct Args {
    /// The number of timed steps, after 20 untimed ones
    #[arg(long, default_value_t = 200)]
    steps: u64,
    /// The samples of each process per step
    #[arg(long, default_value_t = 16)]
    batch: usize,
}

fn main() -> Result<ExitCode> {
    let args = Args::parse();
    let arguments = TrainingArguments {
        learning_rate: 1e-3,
        logging_strategy: IntervalStrategy::No,
        max_steps: (WARMUP + args.steps) as i64,
        optim: OptimizerName::AdamWTorchFused,
        per_device_train_batch_size: args.batch,
        save_strategy: SaveStrategy::No,
        train_sampling_strategy: TrainSamplingStrategy::Sequential,
        disable_tqdm: true,
        ..TrainingArguments::default()
    };
    let accelerator = arguments.accelerator().device(BackendKind::Flex).build()?;
    let processes = accelerator.world_size();
    let clock = Clock::default();
    let mut trainer = Trainer::builder(arguments, Classifier::new, Sequences, Classifier::loss)
        .accelerator(accelerator)
        .train_dataset(Samples::dataset(args.batch * processes * 100))
        .callback(clock.clone())
        .build()?;
    trainer.train()?;
    let seconds = clock.seconds();
    let threads = std::env::var("RAYON_NUM_THREADS").ok();
    let result = json!({
        "side": concat!("burn-accelerate ", env!("CARGO_PKG_VERSION"), ", burn 0.22.1"),
        "processes": processes,
        "threads": threads.and_then(|threads| threads.parse::<usize>().ok()),
        "batch": args.batch,
        "steps": args.steps,
        "parameters": trainer.model().num_params(),
        "step_ms": 1e3 * seconds / args.steps as f64,
        "samples_per_second": (args.steps as usize * args.batch * processes) as f64 / seconds,
    });
    trainer.accelerator().print(result);
    trainer.finish()
}

/// The ends of the last untimed step and of the last step.
#[derive(Clone, Default)]
struct Clock(Arc<Mutex<Option<(Instant, Instant)>>>);

impl Clock {
    fn seconds(&self) -> f64 {
        let times = self.0.lock();
        times.map_or(f64::NAN, |(started, ended)| (ended - started).as_secs_f64())
    }
}

impl<M> TrainerCallback<M> for Clock {
    fn on_step_end(&mut self, at: &CallbackContext<'_, M>, _: &mut TrainerControl) -> Result<()> {
        let now = Instant::now();
        let mut times = self.0.lock();
        match at.state.global_step {
            WARMUP => *times = Some((now, now)),
            _ => *times = times.map(|(started, _)| (started, now)),
        }
        Ok(())
    }
}

#[derive(Clone, Debug)]
struct Batch {
    tokens: Tensor<2, Int>,
    labels: Tensor<1, Int>,
}

/// The sequences of `benches/compare/trainer.py`: the tokens of each reveal its class.
struct Sequences;

impl Batcher<usize, Batch> for Sequences {
    fn batch(&self, items: Vec<usize>, device: &Device) -> Batch {
        let token = |sample: usize, place: usize| {
            sample % CLASSES + CLASSES * ((7 * sample + 3 * place) % (TOKENS / CLASSES))
        };
        let rows = items
            .iter()
            .flat_map(|&sample| (0..PLACES).map(move |place| token(sample, place)));
        let tokens: Vec<_> = rows.map(|token| token as i32).collect();
        let labels: Vec<_> = items
            .iter()
            .map(|sample| (sample % CLASSES) as i32)
            .collect();
        let count = items.len();
        Batch {
            tokens: Tensor::from_data(TensorData::new(tokens, [count, PLACES]), device),
            labels: Tensor::from_data(TensorData::new(labels, [count]), device),
        }
    }
}

#[derive(Debug, Module)]
struct Classifier {
    tokens: Embedding,
    places: Embedding,
    encoder: TransformerEncoder,
    output: Linear,
}

impl Classifier {
    fn new(device: &Device) -> Self {
        Self {
            tokens: EmbeddingConfig::new(TOKENS, WIDTH).init(device),
            places: EmbeddingConfig::new(PLACES, WIDTH).init(device),
            encoder: TransformerEncoderConfig::new(WIDTH, INNER, HEADS, LAYERS)
                .with_dropout(0.0)
                .init(device),
            output: LinearConfig::new(WIDTH, CLASSES).init(device),
        }
    }

    fn loss(&self, inputs: &Inputs<'_, Batch>) -> Tensor<1> {
        let places = self.places.weight.val().unsqueeze::<3>();
        let x = self.tokens.forward(inputs.tokens.clone()) + places;
        let x = self.encoder.forward(TransformerEncoderInput::new(x));
        let logits = self.output.forward(x.mean_dim(1).squeeze_dim::<2>(1));
        cross_entropy(logits, inputs.labels.clone())
    }
}
