//! Searches for the learning rate and the momentum with which a small CNN reads handwritten digits best, in the manner
//! of Ray Tune: a `Trainable`, ASHA, a live table, a CSV file and the best configuration.
//!
//! ```text
//! cargo run --release --example tune_mnist -- --num-samples 9 --max-iterations 16
//! ```
//!
//! The digits are drawn, or read from the folder of `--data-dir mnist`. An interrupted search resumes when it is run
//! again. With `--grid`, both parameters take three values, so `--num-samples 2` makes 18 trials.

use std::path::{Path, PathBuf};

use accelerator::optim::Manual;
use accelerator::prelude::*;
use accelerator::tune::{
    Asha, AshaPromotion, BoxError, Config, Metrics, Mode, Objective, Reset, Resources, Scheduler,
    Search, SearchOrder, Space, Stop, Trainable, TrialContext, WorkerReuse, grid_search, uniform,
};
use accelerator_examples::{DigitBatch, DigitBatcher, Score, Split, cross_entropy};
use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::pool::{MaxPool2d, MaxPool2dConfig};
use burn::nn::{Linear, LinearConfig};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{ModuleOptimizer, SgdConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};
use clap::{Parser, ValueEnum};

/// A trial: the network, its optimizer and the digits.
struct MnistTrainable {
    accelerator: Accelerator,
    digits: Split,
    lr: f64,
    momentum: f64,
    model: ConvNet,
    optimizer: PreparedOptimizer<Manual>,
    train: PreparedLoader<DigitBatch>,
    test: PreparedLoader<DigitBatch>,
    epoch: u64,
}

impl Trainable for MnistTrainable {
    fn setup(config: &Config, _context: &TrialContext) -> Result<Self, BoxError> {
        let folder = config.parse_or::<Option<PathBuf>>("data_dir", None)?;
        let digits = Split::open(folder.as_deref(), None)?.limit(config.parse("limit")?);
        let accelerator = Accelerator::builder().seed(config.parse("seed")?).build()?;
        Self::prepare(accelerator, digits, config)
    }

    fn step(&mut self) -> Result<Metrics, BoxError> {
        for batch in self.train.epoch(self.epoch) {
            let batch = batch?;
            let logits = self.model.forward(batch.images.clone());
            let loss = cross_entropy(logits, batch.targets.clone());
            let gradients = self.accelerator.backward(loss, &self.model, &batch)?;
            self.model = self.optimizer.step(self.lr, self.model.clone(), gradients);
        }
        self.epoch += 1;
        let model = self.accelerator.valid(&self.model)?;
        let score = Score::on(&self.test, |images| model.forward(images))?;
        let score = self.accelerator.reduce_metric(score)?;
        Ok(Metrics::from([
            ("mean_accuracy", score.accuracy()),
            ("mean_loss", score.loss()),
        ]))
    }

    fn save_checkpoint(&mut self, folder: &Path) -> Result<(), BoxError> {
        let parts = (&self.model, &self.optimizer, Object(&self.epoch));
        self.accelerator.save_state(folder, parts)?;
        Ok(())
    }

    fn load_checkpoint(&mut self, folder: &Path) -> Result<(), BoxError> {
        let optimizer = self.accelerator.prepare(sgd(self.momentum))?;
        let parts = (self.model.clone(), optimizer, Object(self.epoch));
        let (parts, _) = self.accelerator.resume(folder, parts)?;
        (self.model, self.optimizer, Object(self.epoch)) = parts;
        Ok(())
    }

    fn reset_config(&mut self, config: &Config, _: &TrialContext) -> Result<Reset, BoxError> {
        *self = Self::prepare(self.accelerator.clone(), self.digits.clone(), config)?;
        Ok(Reset::Done)
    }
}

impl MnistTrainable {
    fn prepare(accelerator: Accelerator, digits: Split, config: &Config) -> Result<Self, BoxError> {
        let device = accelerator.device();
        device.seed(config.parse("seed")?);
        let momentum = config.parse("momentum")?;
        let loader = |size: usize| LoaderBuilder::new(DigitBatcher).batch_size(size);
        let train = loader(64)
            .shuffle(config.parse("seed")?)
            .build(digits.train.clone());
        let test = loader(256).build(digits.test.clone());
        let parts = (ConvNet::new(&device), sgd(momentum), train, test);
        let (model, optimizer, train, test) = accelerator.prepare(parts)?;
        Ok(Self {
            lr: config.parse("lr")?,
            momentum,
            accelerator,
            digits,
            model,
            optimizer,
            train,
            test,
            epoch: 0,
        })
    }
}

fn sgd(momentum: f64) -> ModuleOptimizer {
    let momentum = MomentumConfig::new().with_momentum(momentum);
    SgdConfig::new().with_momentum(Some(momentum)).init()
}

fn main() -> Result<(), BoxError> {
    let args = Args::parse();
    let (lr, momentum) = match args.grid {
        true => {
            let grid = |options: [f64; 3]| grid_search(options.map(Into::into));
            (grid([0.01, 0.1, 0.5]), grid([0.1, 0.5, 0.9]))
        }
        false => (uniform(0.001, 1.0), uniform(0.1, 0.9)),
    };
    let data_dir = args
        .data_dir
        .as_ref()
        .map(|folder| {
            let found = std::fs::canonicalize(folder);
            found.map_err(|error| format!("the folder --data-dir {}: {error}", folder.display()))
        })
        .transpose()?;
    let data_dir = data_dir.map(|folder| folder.display().to_string());
    let space = Space::new([
        ("lr", lr),
        ("momentum", momentum),
        ("data_dir", data_dir.into()),
        ("limit", args.limit.into()),
        ("seed", args.seed.into()),
    ]);
    let (max_t, grace_period) = (args.max_iterations, args.grace_period);
    let reduction_factor = args.reduction_factor;
    let scheduler = match args.scheduler {
        Choice::Asha => Asha {
            max_t,
            grace_period,
            reduction_factor,
            ..Asha::default()
        }
        .into(),
        Choice::AshaPromotion => AshaPromotion {
            max_t,
            grace_period,
            reduction_factor,
            ..AshaPromotion::default()
        }
        .into(),
        Choice::Fifo => Scheduler::Fifo,
    };
    let mut search = Search::new("MnistTrainable", Objective::new("mean_accuracy", Mode::Max))
        .space(space)
        .num_samples(args.num_samples)
        .seed(args.seed)
        .scheduler(scheduler)
        .stop(
            Stop::new()
                .at_least("mean_accuracy", 0.99)
                .iterations(u32::try_from(max_t)?),
        )
        .resources_per_trial(Resources {
            processes: args.processes,
            ..Resources::default()
        })
        .reuse_workers(WorkerReuse::Warm)
        .folder(&args.out);
    if let Some(slots) = args.slots {
        search = search.slots(slots);
    }
    if let Some(workers) = args.ordered {
        search = search.order(SearchOrder::Ordered { workers });
    }
    let results = search.run::<MnistTrainable>()?;
    results.dataframe().to_csv(args.out.join("result.csv"))?;
    if let Some(best) = results.best_config("mean_accuracy", Mode::Max) {
        println!("Best config is: {best}");
    }
    Ok(())
}

/// Search for the learning rate and momentum with which a small network reads handwritten digits best
#[derive(Debug, Parser)]
struct Args {
    /// The folder with MNIST's files, or others in that format; without it, digits are drawn
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,

    /// The number of configurations to draw; with --grid, how often to try each of nine
    #[arg(long, default_value_t = 9, value_name = "N")]
    num_samples: u32,

    /// The most iterations of a trial
    #[arg(long, default_value_t = 16, value_name = "N")]
    max_iterations: u64,

    /// The number of digits to train on in an iteration
    #[arg(long, default_value_t = 512, value_name = "N")]
    limit: usize,

    /// The folder for the files of the search
    #[arg(long, default_value = "tune/mnist", value_name = "DIR")]
    out: PathBuf,

    /// The number of trials that run at the same time [default: as many as fit this machine]
    #[arg(long, value_name = "N")]
    slots: Option<usize>,

    /// The scheduler, which may end trials early
    #[arg(long, value_enum, default_value_t = Choice::Asha)]
    scheduler: Choice,

    /// The fewest iterations of a trial, with ASHA
    #[arg(long, default_value_t = 1, value_name = "N")]
    grace_period: u64,

    /// Continue one in this many trials at each rung of ASHA
    #[arg(long, default_value_t = 4, value_name = "N")]
    reduction_factor: u64,

    /// Try a grid of three learning rates and three momenta
    #[arg(long)]
    grid: bool,

    /// The number of processes of a trial
    #[arg(long, default_value_t = 1, value_name = "N")]
    processes: usize,

    /// Decide as this many workers would, whatever the slots
    #[arg(long, value_name = "WORKERS")]
    ordered: Option<usize>,

    /// The seed of everything that is random
    #[arg(long, default_value_t = 0, value_name = "N")]
    seed: u64,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Choice {
    Asha,
    AshaPromotion,
    Fifo,
}

/// The network of Ray Tune's MNIST example.
#[derive(Module, Debug)]
struct ConvNet {
    conv: Conv2d,
    pool: MaxPool2d,
    dense: Linear,
}

impl ConvNet {
    fn new(device: &Device) -> Self {
        Self {
            conv: Conv2dConfig::new([1, 3], [3, 3]).init(device),
            pool: MaxPool2dConfig::new([3, 3]).with_strides([3, 3]).init(),
            // 28 pixels, less 2 for the convolution, pooled by 3.
            dense: LinearConfig::new(3 * 8 * 8, 10).init(device),
        }
    }

    fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let features = relu(self.pool.forward(self.conv.forward(images)));
        self.dense.forward(features.flatten(1, 3))
    }
}
