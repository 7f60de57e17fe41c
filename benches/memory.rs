//! Measures the peak memory and the step time of a transformer whose activations are kept, or recomputed in backward, and,
//! with several ranks, whose layers are sharded over them, or, with `--offload`, kept in files.
//!
//! ```text
//! cargo bench -p accelerator-benches --bench memory
//! cargo bench -p accelerator-benches --bench memory -- --length 512
//! cargo bench -p accelerator-benches --bench memory -- --ranks 2
//! cargo bench -p accelerator-benches --bench memory -- --offload FOLDER --width 1024 --layers 10 --no-checkpoints
//! cargo bench -p accelerator-benches --bench memory -- --tokens 50257 --width 384 --heads 12 --layers 6 --batch 6 \
//!     --length 512 --parts 16
//! ```
//!
//! Each mode runs in its own process, with the allocator configured as `accel-launch` does it. The peaks of saving and
//! resuming are those of allocated memory in the first round, on rank 0 and on the others.
//! `benches/compare/memory.py` measures the same with PyTorch's `checkpoint`.

use std::array;
use std::error::Error;
use std::fmt;
use std::fs::File;
use std::hash::{DefaultHasher, Hasher};
use std::io::Read;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use accelerator::nn::Units;
use accelerator::prelude::*;
use accelerator_benches::{
    Interval, Layers, Output, Shape, Transformer, peak_memory, rank_variables,
};
use accelerator_host::allocator::ALLOCATOR_VARIABLES;
use burn::module::Module;
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Int, Tensor, TensorData};
use clap::Parser;
use peak_alloc::PeakAlloc;
use serde::{Deserialize, Serialize};

#[global_allocator]
static ALLOCATED: PeakAlloc = PeakAlloc;

/// Measure the memory and step time of training with activations kept, and recomputed
#[derive(Clone, Debug, Parser, Serialize)]
struct Args {
    #[arg(long, default_value_t = 64)]
    tokens: usize,
    #[arg(long, default_value_t = 256)]
    width: usize,
    #[arg(long, default_value_t = 4)]
    heads: usize,
    #[arg(long, default_value_t = 12)]
    layers: usize,
    #[arg(long, default_value_t = 8)]
    batch: usize,
    #[arg(long, default_value_t = 64)]
    length: usize,
    /// Use the layers of `accelerator::ops` instead of Burn's
    #[arg(long)]
    ops: bool,
    /// The number of parts in which the loss is computed
    #[arg(long, default_value_t = 1)]
    parts: usize,
    #[arg(long, default_value_t = 4)]
    steps: usize,
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// The number of processes, each with a batch of its own
    #[arg(long, default_value_t = 1)]
    ranks: usize,
    /// Keep the parameters, gradients and optimizer state of sharded units in files in this folder
    #[arg(long)]
    offload: Option<PathBuf>,
    /// Do not measure saving and resuming
    #[arg(long)]
    no_checkpoints: bool,
    /// Train in this process, in this mode
    #[arg(long, hide = true)]
    units: Option<String>,
    /// The folder for checkpoints
    #[arg(long, hide = true, requires = "units")]
    folder: Option<PathBuf>,
    #[command(flatten)]
    #[serde(skip)]
    output: Output,
}

/// The result of one process.
#[derive(Debug, Default, Deserialize, Serialize)]
struct Trained {
    /// The peak of allocated memory, in MiB.
    allocated: f64,
    /// The peak of resident memory, minus the memory before the model was built, in MiB.
    resident: f64,
    /// The median duration of the forward pass, without the first step, in seconds.
    forward: f64,
    /// The median duration of a step, without the first, in seconds.
    step: f64,
    /// The peak of allocated memory while a checkpoint is saved, on rank 0 and on the others, in MiB.
    saving: [f64; 2],
    /// The peak of allocated memory while a new model and its optimizer are resumed, on rank 0 and on the others, in MiB.
    resuming: [f64; 2],
    loss: f64,
    /// A hash of the weights after the last step.
    weights: u64,
}

/// The results of one mode, over all rounds.
#[derive(Debug, Serialize)]
struct Line {
    units: String,
    parameters: usize,
    allocated: Interval,
    resident: Interval,
    forward: Interval,
    step: Interval,
    saving: [f64; 2],
    resuming: [f64; 2],
    loss: f64,
    weights: u64,
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    if let Some(units) = &args.units {
        let trained = train(&args, units.parse()?)?;
        println!("{}", serde_json::to_string(&trained)?);
        return Ok(());
    }
    args.output.header(format_args!(
        "{} layers of width {}, batches of {} x {}\n{:>10}  {:>24}  {:>24}  {:>24}  {:>24}  {:>12}  {:>14}  {:>9}  {:>16}",
        args.layers,
        args.width,
        args.batch,
        args.length,
        "units",
        "allocated, MiB",
        "resident, MiB",
        "forward, s",
        "step, s",
        "saving, MiB",
        "resuming, MiB",
        "loss",
        "hash of weights"
    ));
    let mut ways = vec![Units::Plain, Units::Keep, Units::Recompute];
    let are_sharded = args.ranks > 1 || args.offload.is_some();
    ways.extend(are_sharded.then_some(Units::Shard));
    let mut results: Vec<_> = ways.iter().map(|_| Vec::new()).collect();
    for _ in 0..args.rounds {
        for (units, results) in ways.iter().zip(&mut results) {
            results.push(job(&args, *units)?);
        }
    }
    for (units, results) in ways.into_iter().zip(results) {
        let of = |number: fn(&Trained) -> f64| Interval::of(results.iter().map(number).collect());
        args.output.print(&Line {
            units: units.to_string(),
            parameters: transformer(&args, &Device::default()).num_params(),
            allocated: of(|result| result.allocated),
            resident: of(|result| result.resident),
            forward: of(|result| result.forward),
            step: of(|result| result.step),
            saving: results
                .first()
                .map_or([f64::NAN; 2], |result| result.saving),
            resuming: results
                .first()
                .map_or([f64::NAN; 2], |result| result.resuming),
            loss: results.first().map_or(f64::NAN, |result| result.loss),
            weights: results.first().map_or(0, |result| result.weights),
        })?;
    }
    Ok(())
}

/// Runs this program again as that many processes, which train in that mode. Returns the largest result of each kind.
fn job(args: &Args, units: Units) -> Result<Trained, Box<dyn Error>> {
    let ranks = args.ranks;
    let offload = args.offload.as_ref().filter(|_| units == Units::Shard);
    let folder = tempfile::tempdir()?;
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let start = |rank| {
        Command::new(std::env::current_exe()?)
            .args(std::env::args_os().skip(1))
            .args(["--units", &units.to_string()])
            .arg("--folder")
            .arg(folder.path())
            .envs(ALLOCATOR_VARIABLES)
            .envs(offload.map(|folder| ("ACCEL_OFFLOAD_FOLDER", folder)))
            .envs(
                (ranks > 1)
                    .then(|| rank_variables(rank, ranks, port))
                    .into_iter()
                    .flatten(),
            )
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
    };
    let ranks: Vec<Child> = (0..ranks).map(start).collect::<Result<_, _>>()?;
    let mut largest = Trained::default();
    for rank in ranks {
        let output = rank.wait_with_output()?;
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).into());
        }
        let trained: Trained = serde_json::from_slice(&output.stdout)?;
        largest = Trained {
            allocated: largest.allocated.max(trained.allocated),
            resident: largest.resident.max(trained.resident),
            forward: largest.forward.max(trained.forward),
            step: largest.step.max(trained.step),
            saving: array::from_fn(|of| largest.saving[of].max(trained.saving[of])),
            resuming: array::from_fn(|of| largest.resuming[of].max(trained.resuming[of])),
            loss: trained.loss,
            weights: trained.weights,
        };
    }
    Ok(largest)
}

fn transformer(args: &Args, device: &Device) -> Transformer {
    let shape = Shape {
        tokens: args.tokens,
        length: args.length,
        width: args.width,
        heads: args.heads,
        layers: args.layers,
    };
    let layers = match args.ops {
        true => Layers::Ops,
        false => Layers::Burn,
    };
    Transformer::new(layers, shape, device)
}

fn train(args: &Args, units: Units) -> Result<Trained, Box<dyn Error>> {
    let folder = args.folder.as_ref().ok_or("--units needs --folder")?;
    // All ranks train with the same batch.
    let builder = Accelerator::builder().units(units).allow_same_batches();
    let accelerator = builder.build()?;
    let before = peak_memory().unwrap_or(0);
    let model = accelerator.init(|device| transformer(args, device));
    let parts = (model, AdamWConfig::new().init_fused());
    let (mut model, mut optimizer) = accelerator.prepare(parts)?;
    let rows = args.batch * args.length;
    let token = |at: usize| (at * 7919 % 104_729 % args.tokens) as i64;
    let tensor = |first: usize| {
        let tokens = (first..first + rows).map(token).collect::<Vec<_>>();
        Tensor::<1, Int>::from_data(TensorData::new(tokens, [rows]), &accelerator.device())
    };
    let tokens = tensor(0).reshape([args.batch, args.length]);
    let next = tensor(1);
    let (mut forwards, mut steps, mut loss) = (Vec::new(), Vec::new(), f64::NAN);
    for _ in 0..args.steps {
        let start = Instant::now();
        let error = model.loss(tokens.clone(), next.clone(), args.parts);
        // The CPU computes at once.
        forwards.push(start.elapsed().as_secs_f64());
        let gradients = accelerator.backward(error, &model, rows as f64)?;
        loss = gradients.loss().unwrap_or(f64::NAN);
        model = optimizer.step(1e-4, model, gradients);
        steps.push(start.elapsed().as_secs_f64());
    }
    let allocated = f64::from(ALLOCATED.peak_usage_as_mb());
    let resident = (peak_memory().unwrap_or(0) - before) as f64 / 1024.0;
    let file = folder.join("weights.safetensors");
    accelerator.save_model(&model, &file)?;
    accelerator.wait_for_everyone()?;
    let trained = Trained {
        allocated,
        resident,
        forward: Interval::of(forwards.split_off(1)).median,
        step: Interval::of(steps.split_off(1)).median,
        loss,
        weights: hash(&file)?,
        ..Trained::default()
    };
    if args.no_checkpoints {
        return Ok(trained);
    }
    let peak =
        |work: &mut dyn FnMut() -> accelerator::Result<()>| -> accelerator::Result<[f64; 2]> {
            accelerator.wait_for_everyone()?;
            ALLOCATED.reset_peak_usage();
            work()?;
            let peak = f64::from(ALLOCATED.peak_usage_as_mb());
            Ok(match accelerator.is_main_process() {
                true => [peak, 0.0],
                false => [0.0, peak],
            })
        };
    let saving = peak(&mut || {
        let saved = accelerator.save_state(folder, (&model, &optimizer));
        saved.map(drop)
    })?;
    drop((model, optimizer));
    let model = accelerator.init(|device| transformer(args, device));
    let parts = (model, AdamWConfig::new().init_fused());
    let mut parts = Some(accelerator.prepare(parts)?);
    let resuming = peak(&mut || {
        let new = parts
            .take()
            .ok_or_else(|| std::io::Error::other("resumed twice"))?;
        parts = Some(accelerator.resume(folder, new)?.0);
        Ok(())
    })?;
    Ok(Trained {
        saving,
        resuming,
        ..trained
    })
}

fn hash(file: &Path) -> std::io::Result<u64> {
    let (mut file, mut hasher) = (File::open(file)?, DefaultHasher::new());
    let mut chunk = vec![0; 1 << 20];
    loop {
        match file.read(&mut chunk)? {
            0 => return Ok(hasher.finish()),
            length => hasher.write(&chunk[..length]),
        }
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [allocated, resident] =
            [self.allocated, self.resident].map(|size| format!("{size:.0}"));
        write!(
            f,
            "{:>10}  {allocated:>24}  {resident:>24}  {:>24}  {:>24}  {:>12}  {:>14}  {:>9.6}  {:016x}",
            self.units,
            format!("{:.3}", self.forward),
            format!("{:.3}", self.step),
            format!("{:.0} / {:.0}", self.saving[0], self.saving[1]),
            format!("{:.0} / {:.0}", self.resuming[0], self.resuming[1]),
            self.loss,
            self.weights
        )
    }
}
