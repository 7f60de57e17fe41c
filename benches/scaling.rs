//! Measures the gain of a second process: one process of one thread, one of two, two that do not communicate (the most
//! that the machine gives), and two ranks of a job. The sides take turns in each round.
//!
//! `cargo bench -p accelerator-benches --bench scaling -- --help`

use std::error::Error;
use std::ffi::OsStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use accelerator_benches::worker::{Loop, Round, WorkerArgs, work};
use accelerator_benches::{Crew, CrewLink, Interval, Model, Output, Plan, middle};
use clap::{Parser, ValueEnum};
use serde::Serialize;

/// Measure the gain of a second process
#[derive(Debug, Parser)]
struct Args {
    /// The networks
    #[arg(long, value_delimiter = ',', default_value = "cnn,mlp,transformer")]
    model: Vec<Model>,
    /// The sides to compare; the others are divided by the first
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "one,plain,threads,apart,ranks,strong"
    )]
    side: Vec<Side>,
    /// The number of rounds of each side
    #[arg(long, default_value_t = 12)]
    rounds: usize,
    /// The duration of a round, in seconds
    #[arg(long, default_value_t = 1.5)]
    seconds: f64,
    /// Occupy the core that a side leaves idle, and pause between rounds: for a machine with other work, with
    /// `nice -n -20` before the command
    #[arg(long)]
    hold: bool,
    #[command(flatten)]
    output: Output,
}

/// A side of the comparison.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
enum Side {
    /// A prepared loop in one process of one thread
    One,
    /// A loop of plain Burn in one process of one thread
    Plain,
    /// A prepared loop in one process of two threads
    Threads,
    /// Two processes of one thread, without communication
    Apart,
    /// Two ranks of one thread, with a whole batch each
    Ranks,
    /// Two ranks of one thread, with half a batch each
    Strong,
}

/// The result of a side.
#[derive(Debug, Serialize)]
struct Line {
    model: Model,
    side: Side,
    /// Samples per second.
    rate: Interval,
    /// The rate over that of the first side in the same round.
    ratio: Interval,
    /// The ratio if, in each step, the processes had waited for the slower one and for nothing else: the best that two
    /// ranks can reach, since they do wait.
    in_step: Interval,
    /// Milliseconds per step.
    step: f64,
    /// Processor seconds per second and process.
    busy: f64,
    /// The part of `busy` in the kernel.
    kernel: f64,
    /// Pages first touched, per step.
    faults: f64,
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut argv = std::env::args_os().skip(1);
    if argv.next().as_deref() == Some(OsStr::new("worker")) {
        let program = std::iter::once("worker".into());
        return work(&WorkerArgs::parse_from(program.chain(argv)));
    }
    let args = Args::parse();
    args.output.header(machine());
    for &model in &args.model {
        for line in measure(&args, model)? {
            args.output.print(&line)?;
        }
    }
    Ok(())
}

fn measure(args: &Args, model: Model) -> Result<Vec<Line>, Box<dyn Error>> {
    let mut crews = Vec::new();
    for &side in &args.side {
        let mut crew = Crew::start(&plan(model, side))?;
        // The first steps are cold; the second round tells how many steps fit into a round.
        crew.round(2)?;
        let trial = crew.round(3)?;
        let step = trial
            .iter()
            .map(|round| round.seconds / 3.0)
            .fold(0.0, f64::max);
        let steps = (args.seconds / step).ceil().max(1.0);
        crews.push((side, crew, steps as usize));
    }
    let mut rounds = vec![Vec::new(); crews.len()];
    for _ in 0..args.rounds {
        for ((_, crew, steps), rounds) in crews.iter_mut().zip(&mut rounds) {
            let holder = (args.hold && crew.threads() == 1).then(Holder::start);
            rounds.push(crew.round(*steps)?);
            drop(holder);
            if args.hold {
                thread::sleep(Duration::from_secs_f64(args.seconds / 2.0));
            }
        }
    }
    let rates: Vec<Vec<f64>> = crews
        .iter()
        .zip(&rounds)
        .map(|((side, ..), rounds)| {
            let samples = batch_size(model, *side) as f64;
            let rate = |round: &Round| round.steps as f64 * samples / round.seconds;
            rounds
                .iter()
                .map(|round| round.iter().map(rate).sum())
                .collect()
        })
        .collect();
    let lines = crews
        .iter()
        .zip(&rounds)
        .zip(&rates)
        .map(|(((side, ..), rounds), rate)| {
            let all: Vec<_> = rounds.iter().flatten().collect();
            let seconds: f64 = all.iter().map(|round| round.seconds).sum();
            let system: f64 = all.iter().map(|round| round.usage.system).sum();
            let user: f64 = all.iter().map(|round| round.usage.user).sum();
            let steps: f64 = all.iter().map(|round| round.steps as f64).sum();
            let faults: f64 = all.iter().map(|round| round.usage.faults as f64).sum();
            Line {
                model,
                side: *side,
                rate: Interval::of(rate.clone()),
                ratio: Interval::of_ratios(rate, &rates[0]),
                in_step: Interval::of(
                    in_step(rounds)
                        .zip(rate.iter().zip(&rates[0]))
                        .map(|(part, (a, b))| part * a / b)
                        .collect(),
                ),
                step: middle(
                    all.iter()
                        .map(|round| round.seconds / round.steps as f64 * 1e3)
                        .collect(),
                ),
                busy: (user + system) / seconds,
                kernel: system / (user + system),
                faults: faults / steps,
            }
        });
    Ok(lines.collect())
}

/// Returns, for each round, the mean time of a process over the time of the slower one in each step.
fn in_step(rounds: &[Vec<Round>]) -> impl Iterator<Item = f64> {
    rounds.iter().map(|round| {
        let steps = round.iter().map(|process| process.steps).min().unwrap_or(0);
        let slowest = |step: usize| {
            round
                .iter()
                .map(|process| process.each[step])
                .fold(0.0, f64::max)
        };
        let together: f64 = (0..steps).map(slowest).sum();
        let alone: f64 = round
            .iter()
            .flat_map(|process| &process.each[..steps])
            .sum();
        alone / round.len() as f64 / together
    })
}

fn batch_size(model: Model, side: Side) -> usize {
    match side {
        Side::Strong => model.batch_size() / 2,
        _ => model.batch_size(),
    }
}

fn plan(model: Model, side: Side) -> Plan {
    let (processes, link) = match side {
        Side::One | Side::Plain | Side::Threads => (1, CrewLink::None),
        Side::Apart => (2, CrewLink::None),
        Side::Ranks | Side::Strong => (2, CrewLink::Job),
    };
    Plan {
        model,
        kind: match side {
            Side::Plain => Loop::Plain,
            _ => Loop::Prepared,
        },
        batch_size: batch_size(model, side),
        processes,
        link,
        threads: match side {
            Side::Threads => 2,
            _ => 1,
        },
    }
}

/// A thread that spins, so that nothing else runs on its core.
struct Holder {
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Holder {
    fn start() -> Self {
        let ends = Arc::new(AtomicBool::new(false));
        let seen = ends.clone();
        let spin = move || {
            while !seen.load(Ordering::Relaxed) {
                core::hint::spin_loop();
            }
        };
        Self {
            ends,
            thread: Some(thread::spawn(spin)),
        }
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // The thread cannot panic.
            let _ = thread.join();
        }
    }
}

/// Describes the machine and its load, on which every result depends.
fn machine() -> String {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    format!("{cores} cores, load before: {}", load.trim())
}

impl core::fmt::Display for Line {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let side = self.side.to_possible_value();
        write!(
            f,
            "{:12} {:8} {:8.2} ms/step  {:>28.1} samples/s  x {:.3}  in step {:.3}  \
             busy {:.2} kernel {:.2} faults {:.0}",
            self.model.name(),
            side.as_ref().map_or("", |side| side.get_name()),
            self.step,
            self.rate,
            self.ratio,
            self.in_step.median,
            self.busy,
            self.kernel,
            self.faults
        )
    }
}
