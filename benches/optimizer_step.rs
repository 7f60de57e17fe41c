//! Measures an optimizer step as Burn does it, fused, and sharded over the ranks: alone, and with forward, backward and
//! reduction. The sides take turns in a rotating order. `ACCEL_TRANSPORT` chooses the transport between ranks.
//!
//! `cargo bench -p accelerator-benches --bench optimizer_step -- --help`

use std::error::Error;
use std::fmt;
use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use accelerator::optim::{InitFused, Manual, Sharded};
use accelerator::prelude::*;
use accelerator_benches::{Batch, Interval, Model, Net, Output, rank_variables};
use accelerator_host::allocator::ALLOCATOR_VARIABLES;
use burn::data::dataloader::batcher::Batcher;
use burn::optim::AdamWConfig;
use clap::Parser;
use serde::Serialize;

/// The samples in a batch: few, so that forward and backward take little time.
const SAMPLES: usize = 8;
const RATE: f64 = 1e-5;

/// Measure the step of AdamW
#[derive(Debug, Parser)]
struct Args {
    /// The network
    #[arg(long, default_value = "mlp")]
    model: Model,
    /// The numbers of processes that train together
    #[arg(long, value_delimiter = ',', default_value = "1,2")]
    processes: Vec<usize>,
    /// The number of rounds; in each, every side takes its turn
    #[arg(long, default_value_t = 20)]
    rounds: usize,
    /// The number of steps per turn
    #[arg(long, default_value_t = 10)]
    steps: usize,
    /// The number of threads per process
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Be a rank of the job that measures
    #[arg(long, hide = true)]
    rank: bool,
    #[command(flatten)]
    output: Output,
}

/// The result of a side.
#[derive(Debug, Serialize)]
struct Line {
    processes: usize,
    side: &'static str,
    /// Milliseconds per step, on rank 0.
    step: Interval,
    /// The step over that of Burn, round by round.
    ratio: Interval,
    /// Milliseconds from the forward pass to the end of the step, on rank 0.
    whole: Interval,
    /// `whole` over that of Burn, round by round.
    whole_ratio: Interval,
    /// The bytes of state on each rank.
    state: Vec<usize>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    if args.rank {
        return measure(&args);
    }
    for &processes in &args.processes {
        run(&args, processes)?;
    }
    Ok(())
}

/// Runs this program as that many ranks, of which rank 0 prints.
fn run(args: &Args, processes: usize) -> Result<(), Box<dyn Error>> {
    let port = TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port();
    let ranks = (0..processes).map(|rank| {
        let mut command = Command::new(std::env::current_exe()?);
        command
            .args(std::env::args_os().skip(1))
            .arg("--rank")
            .envs(ALLOCATOR_VARIABLES)
            .env("RAYON_NUM_THREADS", args.threads.to_string())
            .envs(rank_variables(rank, processes, port));
        if rank > 0 {
            command.stdout(Stdio::null());
        }
        command.spawn()
    });
    let ranks: Vec<_> = ranks.collect::<Result<_, _>>()?;
    for (rank, mut child) in ranks.into_iter().enumerate() {
        let status = child.wait()?;
        if !status.success() {
            return Err(format!("rank {rank} ended with {status}").into());
        }
    }
    Ok(())
}

/// One way to step.
struct Side {
    name: &'static str,
    /// `None` after a failed step.
    model: Option<Net>,
    optimizer: PreparedOptimizer<Manual>,
    times: Vec<f64>,
    /// The times including everything before the step.
    whole: Vec<f64>,
}

fn measure(args: &Args) -> Result<(), Box<dyn Error>> {
    let accelerator = Accelerator::builder()
        .device(BackendKind::Flex)
        .allow_same_batches()
        .build()?;
    let device = accelerator.device();
    let batcher = args.model.samples().batcher();
    let batch = batcher.batch((0..SAMPLES).collect(), &device.clone().inner());
    let config = AdamWConfig::new();
    let mut sides = Vec::new();
    let mut add = |name, (model, optimizer)| {
        sides.push(Side {
            name,
            model: Some(model),
            optimizer,
            times: Vec::new(),
            whole: Vec::new(),
        });
    };
    let net = || args.model.init(&device);
    add("burn", accelerator.prepare((net(), config.init()))?);
    add("fused", accelerator.prepare((net(), config.init_fused()))?);
    if accelerator.world_size() > 1 {
        let sharded = Sharded(config.init());
        add("burn, sharded", accelerator.prepare((net(), sharded))?);
        let sharded = Sharded(config.init_fused());
        add("fused, sharded", accelerator.prepare((net(), sharded))?);
    }
    for side in &mut sides {
        side.turn(&accelerator, &batch, args.steps)?;
        side.times.clear();
        side.whole.clear();
    }
    for round in 0..args.rounds {
        for turn in 0..sides.len() {
            let at = (round + turn) % sides.len();
            sides[at].turn(&accelerator, &batch, args.steps)?;
        }
    }
    let (burn, burn_whole) = (sides[0].times.clone(), sides[0].whole.clone());
    for side in sides {
        let state = accelerator.gather_object(&side.optimizer.state_memory()?)?;
        args.output.print(&Line {
            processes: accelerator.world_size(),
            side: side.name,
            ratio: Interval::of_ratios(&side.times, &burn),
            whole_ratio: Interval::of_ratios(&side.whole, &burn_whole),
            step: Interval::of(side.times),
            whole: Interval::of(side.whole),
            state,
        })?;
    }
    Ok(accelerator.finish()?)
}

impl Side {
    /// Takes `steps` steps, on all ranks at once.
    fn turn(
        &mut self,
        accelerator: &Accelerator,
        batch: &Batch,
        steps: usize,
    ) -> Result<(), Box<dyn Error>> {
        let mut spent = Duration::ZERO;
        accelerator.wait_for_everyone()?;
        let begin = Instant::now();
        for _ in 0..steps {
            let model = self.model.take().ok_or("an earlier step failed")?;
            let gradients = accelerator.backward(model.loss(batch), &model, SAMPLES)?;
            accelerator.wait_for_everyone()?;
            let start = Instant::now();
            let model = self.optimizer.step(RATE, model, gradients);
            spent += start.elapsed();
            self.model = Some(model);
        }
        self.whole
            .push(begin.elapsed().as_secs_f64() * 1e3 / steps as f64);
        self.times.push(spent.as_secs_f64() * 1e3 / steps as f64);
        Ok(())
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            processes,
            side,
            step,
            ratio,
            whole,
            whole_ratio,
            state,
        } = self;
        write!(
            f,
            "{processes} × {side:15} {step:.3} ms, ratio {ratio:.3}; with what is before it {whole:.3} ms, \
             ratio {whole_ratio:.3}; state {state:?} bytes"
        )
    }
}
