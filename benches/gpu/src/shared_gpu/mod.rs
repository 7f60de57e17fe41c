//! Compares two ranks on one device with one rank on the same global batch.
//!
//! Gradients go through the host's memory. The parameters must equal those of one rank that takes the two halves of
//! each batch in turn, except for rounding: sums are in another order. A rank that takes the whole batch at once
//! differs by more if the device chooses kernels for that shape that round differently, for example to TF32.

mod difference;
mod rank;

use std::error::Error;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use accelerator::timeline::StepSummary;
use accelerator_examples::DeviceName;
use clap::ValueEnum;
use serde::Serialize;

use self::difference::largest_difference;
pub(crate) use self::rank::{RankArgs, run as rank};
use crate::model::Kind;
use crate::setting::Size;

/// The settings of `shared-gpu`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// The kind of device
    #[arg(long, value_enum)]
    device: DeviceName,
    /// The network
    #[arg(long, value_enum, default_value = "cnn")]
    model: Kind,
    /// The size of network and batch
    #[arg(long, value_enum, default_value = "full")]
    size: Size,
    /// The samples of a step, over all ranks [default: half of what suits one rank]
    #[arg(long)]
    global_batch: Option<usize>,
    /// The number of steps of SGD
    #[arg(long, default_value_t = 100)]
    steps: usize,
    /// The learning rate
    #[arg(long, default_value_t = 0.01)]
    rate: f64,
    /// The bytes of a bucket of gradients
    #[arg(long, default_value_t = 1 << 20)]
    bucket_size: usize,
    /// The largest relative difference between parameters to allow
    #[arg(long, default_value_t = 1e-4)]
    tolerance: f64,
    /// The launcher [default: `accel-launch` beside this program, or else on the PATH]
    #[arg(long)]
    launcher: Option<PathBuf>,
    /// The folder to write models to [default: a temporary folder]
    #[arg(long)]
    work: Option<PathBuf>,
}

/// The result. Each difference is that of the parameter that differs most, over its largest element.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Shared {
    measure: &'static str,
    device: String,
    model: Kind,
    size: Size,
    steps: usize,
    rate: f64,
    bucket_size: usize,
    tolerance: f64,
    /// The distance that the parameters moved in the training of one rank.
    moved: f64,
    /// One rank against itself, started twice: the nondeterminism of the device.
    repeated_difference: f64,
    /// One rank against one that takes the whole batch at once.
    difference_whole_batch: f64,
    /// One rank against two, with buckets sent after backward.
    difference_overlap_off: f64,
    /// One rank against two, with buckets sent during backward.
    difference_overlap_on: f64,
    whole_batch: StepSummary,
    overlap_off: StepSummary,
    overlap_on: StepSummary,
    passed: bool,
}

/// The time at which buckets are sent.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum Sending {
    /// After backward
    After,
    /// During backward
    Within,
}

/// The split of a global batch over ranks.
#[derive(Clone, Copy, Debug)]
enum Batches {
    /// One rank takes all of it at once.
    Whole,
    /// One rank takes its two halves in turn.
    HalvesInTurn,
    /// Two ranks take half of it each.
    HalfEach,
}

/// Starts the ranks, and compares their parameters.
pub(crate) fn run(args: &Args) -> Result<Shared, Box<dyn Error>> {
    let folder = match &args.work {
        Some(work) => work.clone(),
        None => std::env::temp_dir().join(format!("accel-gpu-bench-{}", std::process::id())),
    };
    std::fs::create_dir_all(&folder)?;
    let shared = compare(args, &folder);
    if args.work.is_none() {
        // What cannot be removed stays in the system's temporary folder.
        let _ = std::fs::remove_dir_all(&folder);
    }
    shared
}

impl Shared {
    /// Returns an error if parameters are not within tolerance.
    pub(crate) fn check(&self) -> Result<(), Box<dyn Error>> {
        if self.passed {
            return Ok(());
        }
        Err(format!(
            "expected parameters of two ranks within {:e} of those of one; found {:e} without overlap, {:e} with it, \
             and {:e} between one rank and itself",
            self.tolerance, self.difference_overlap_off, self.difference_overlap_on, self.repeated_difference
        )
        .into())
    }
}

fn compare(args: &Args, folder: &Path) -> Result<Shared, Box<dyn Error>> {
    if args.global_batch.is_some_and(|samples| samples % 2 != 0) {
        return Err("expected an even --global-batch, of which each of two ranks gets half".into());
    }
    let start = |batches: Batches, sending: Sending, name: &str| {
        start(args, folder, batches, sending, name)
    };
    let whole = start(Batches::Whole, Sending::After, "whole")?;
    let one = start(Batches::HalvesInTurn, Sending::After, "one")?;
    let again = start(Batches::HalvesInTurn, Sending::After, "again")?;
    let off = start(Batches::HalfEach, Sending::After, "off")?;
    let on = start(Batches::HalfEach, Sending::Within, "on")?;
    let difference = |other: &Path| largest_difference(&one.model, other);
    let (off_by, on_by) = (difference(&off.model)?, difference(&on.model)?);
    let moved = difference(&one.initial)?;
    Ok(Shared {
        measure: "shared_gpu",
        device: args.device.to_string(),
        model: args.model,
        size: args.size,
        steps: args.steps,
        rate: args.rate,
        bucket_size: args.bucket_size,
        tolerance: args.tolerance,
        moved,
        repeated_difference: difference(&again.model)?,
        difference_whole_batch: difference(&whole.model)?,
        difference_overlap_off: off_by,
        difference_overlap_on: on_by,
        whole_batch: whole.summary,
        overlap_off: off.summary,
        overlap_on: on.summary,
        // Parameters that did not move are equal, whatever the ranks did.
        passed: off_by <= args.tolerance
            && on_by <= args.tolerance
            && moved > 10.0 * args.tolerance,
    })
}

/// The output of ranks that have ended.
struct Run {
    initial: PathBuf,
    model: PathBuf,
    summary: StepSummary,
}

fn start(
    args: &Args,
    folder: &Path,
    batches: Batches,
    sending: Sending,
    name: &str,
) -> Result<Run, Box<dyn Error>> {
    let (ranks, micro_batches) = match batches {
        Batches::Whole => (1, 1),
        Batches::HalvesInTurn => (1, 2),
        Batches::HalfEach => (2, 1),
    };
    let file = |what: &str| folder.join(format!("{name}-{what}"));
    let (initial, model) = (file("initial.safetensors"), file("model.safetensors"));
    let summary = file("summary.json");
    let program = std::env::current_exe()?;
    let mut command = Command::new(launcher(args, &program));
    command
        .args([
            "--num-processes",
            &ranks.to_string(),
            "--oversubscribe-gpus",
        ])
        .arg(&program)
        .arg("rank")
        .args(["--device", &args.device.to_string()])
        .args(["--model", &value_name(args.model)])
        .args(["--size", &value_name(args.size)])
        .args(["--sending", &value_name(sending)])
        .args(["--micro-batches", &micro_batches.to_string()])
        .args(["--steps", &args.steps.to_string()])
        .args(["--rate", &args.rate.to_string()])
        .args(["--bucket-size", &args.bucket_size.to_string()])
        .args([OsStr::new("--initial"), initial.as_os_str()])
        .args([OsStr::new("--save"), model.as_os_str()])
        .args([OsStr::new("--summary"), summary.as_os_str()]);
    if let Some(samples) = args.global_batch {
        command.args(["--global-batch", &samples.to_string()]);
    }
    // Standard output is for one JSON object only.
    command.stdout(std::io::stderr());
    let status = command
        .status()
        .map_err(|error| format!("{command:?} could not be started: {error}"))?;
    if !status.success() {
        return Err(format!("{ranks} rank(s), {name}: ended with {status}; {command:?}").into());
    }
    Ok(Run {
        initial,
        model,
        summary: serde_json::from_slice(&std::fs::read(&summary)?)?,
    })
}

fn launcher(args: &Args, program: &Path) -> PathBuf {
    let beside = program.with_file_name("accel-launch");
    match &args.launcher {
        Some(launcher) => launcher.clone(),
        None if beside.exists() => beside,
        None => PathBuf::from("accel-launch"),
    }
}

fn value_name(value: impl ValueEnum) -> String {
    let value = value.to_possible_value();
    value.map_or_else(String::new, |value| value.get_name().to_owned())
}
