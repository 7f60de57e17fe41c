//! `accel-launch test`: whether this installation works on this machine.
//!
//! Every stage runs in processes of this very program (`rank/`), so that none can hang or crash
//! the test. This side starts them, reads their output and checks it (`stage.rs`). The processes of a stage end with
//! it, however it went.

mod chaos;
mod rank;
mod ranks;
mod results;
mod stage;
mod timing;

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;

use crate::error::{Error, Result};
use crate::text::print;
use rank::Sabotage;
use ranks::Interrupt;
use results::{StageFailure, TestReport};
use stage::Stage;

/// Tests this installation: whether ranks connect, compute, divide samples, and detect failures.
///
/// Every stage has a time limit and a result of its own. The exit code is 0 when nothing failed
/// and 1 otherwise.
#[derive(Args, Clone, Debug)]
pub(crate) struct TestArgs {
    /// How many processes connect.
    #[arg(short = 'n', long, value_name = "N", default_value = "2", value_parser = processes)]
    num_processes: NonZeroUsize,

    /// The port of the store; 0 takes a free one.
    #[arg(long, value_name = "PORT", default_value_t = 0)]
    master_port: u16,

    /// How many seconds a stage may take.
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = limit)]
    limit: Duration,

    /// Run these stages only; can be repeated.
    #[arg(long, value_name = "STAGE")]
    stage: Vec<Stage>,

    /// Also measure the time from the launcher's start to the end of the first all-reduce: the
    /// median of ten runs.
    #[arg(long)]
    timing: bool,

    /// Instead, inject faults into a small training job, and compare its weights with those of a
    /// run without faults. Needs a build with the feature `faults`.
    #[arg(long, conflicts_with_all = ["stage", "timing", "master_port"])]
    chaos: bool,

    /// The seed of the first schedule of faults; the next ones follow it.
    #[arg(long, value_name = "S", requires = "chaos", default_value_t = 0)]
    seed: u64,

    /// For how many minutes to draw schedules.
    #[arg(long, value_name = "M", requires = "chaos", conflicts_with = "schedules", value_parser = minutes)]
    minutes: Option<Duration>,

    /// How many schedules to run [default: 20].
    #[arg(long, value_name = "N", requires = "chaos")]
    schedules: Option<u64>,

    /// Print one JSON object.
    #[arg(long)]
    json: bool,

    /// Break a stage on purpose, to see that the test notices.
    #[arg(long, value_name = "STAGE:HOW", hide = true, value_parser = parse_sabotage)]
    r#break: Option<(Stage, Sabotage)>,

    /// Break the training of --chaos on purpose.
    #[arg(long, value_name = "HOW", hide = true, value_parser = chaos::parse_sabotage)]
    break_chaos: Option<Sabotage>,
}

/// Arguments of a rank of the self-test.
#[derive(Args, Clone, Debug)]
pub(crate) struct RankArgs {
    /// What it is to do.
    task: rank::Task,

    /// How many threads are ranks.
    #[arg(long, default_value = "2")]
    threads: NonZeroUsize,

    /// How long it may wait for others.
    #[arg(long, default_value = "60", value_parser = limit)]
    limit: Duration,

    /// Where it may write.
    #[arg(long)]
    folder: Option<PathBuf>,

    /// How it fails on purpose.
    #[arg(long)]
    sabotage: Option<Sabotage>,
}

/// Runs the test.
///
/// # Errors
/// When nothing can be tested at all; what is found wrong is in the exit code.
pub(crate) fn run(arguments: &TestArgs) -> Result<ExitCode> {
    let context = Context {
        interrupt: Interrupt::listen()?,
        program: std::env::current_exe()
            .map_err(|error| Error::system("this program cannot find itself").with_source(error))?,
        arguments: arguments.clone(),
    };
    let started = Instant::now();
    let mut report = TestReport::new(arguments.num_processes);
    if arguments.chaos {
        if !chaos::run(&context, &mut report)? {
            return interrupted(context.interrupt.signal().unwrap_or_default());
        }
        return conclude(report, started, arguments);
    }
    let mut can_connect = true;
    for stage in Stage::chosen(&arguments.stage) {
        let began = Instant::now();
        let outcome = match stage.needs_rendezvous() && !can_connect {
            false => stage.run(&context),
            true => Err(StageFailure::Skipped("the processes did not meet".into())),
        };
        can_connect &= stage != Stage::Rendezvous || outcome.is_ok();
        if let Some(signal) = context.interrupt.signal() {
            return interrupted(signal);
        }
        let line = report.add(stage.name(), outcome, began.elapsed());
        context.show(line)?;
    }
    if arguments.timing {
        let began = Instant::now();
        let outcome = timing::measure(&context);
        if let Some(signal) = context.interrupt.signal() {
            return interrupted(signal);
        }
        let outcome = outcome.map(|times| {
            let text = times.to_string();
            report.set_times(&times);
            text
        });
        let line = report.add("timing", outcome, began.elapsed());
        context.show(line)?;
    }
    conclude(report, started, arguments)
}

/// Runs a rank of the test; the exit code is its result, and its output what it found.
pub(crate) fn rank(arguments: &RankArgs) -> ExitCode {
    rank::run(arguments)
}

/// What all stages of a test have in common.
#[derive(Debug)]
struct Context {
    interrupt: Interrupt,
    program: PathBuf,
    arguments: TestArgs,
}

impl Context {
    /// How the first rank of this stage is to fail.
    fn sabotage(&self, stage: Stage) -> Option<Sabotage> {
        let (broken, sabotage) = self.arguments.r#break?;
        (broken == stage).then_some(sabotage)
    }

    fn show(&self, line: &str) -> Result<()> {
        if !self.arguments.json {
            print(line)?;
        }
        Ok(())
    }
}

fn conclude(mut report: TestReport, started: Instant, arguments: &TestArgs) -> Result<ExitCode> {
    report.seconds = started.elapsed().as_secs_f64();
    match arguments.json {
        true => print(&report.to_json())?,
        false => print(&report.summary())?,
    };
    Ok(ExitCode::from(u8::from(!report.ok)))
}

fn interrupted(signal: i32) -> Result<ExitCode> {
    let name = signal_hook::low_level::signal_name(signal).unwrap_or("a signal");
    print(&format!(
        "ended by {name}; no process of the test is left\n"
    ))?;
    Ok(ExitCode::from(
        u8::try_from(128 + signal).unwrap_or(u8::MAX),
    ))
}

/// More than 16 would have sums that 8 bits cannot hold.
fn processes(text: &str) -> std::result::Result<NonZeroUsize, String> {
    match text.parse::<usize>() {
        Ok(count @ 2..=16) => NonZeroUsize::new(count).ok_or_else(String::new),
        _ => Err("expected a number of processes from 2 to 16".into()),
    }
}

fn limit(text: &str) -> std::result::Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.1..=86_400.0).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err("expected a number of seconds between 0.1 and 86400".into()),
    }
}

fn minutes(text: &str) -> std::result::Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(minutes) if (0.0..=100_000.0).contains(&minutes) => {
            Ok(Duration::from_secs_f64(60.0 * minutes))
        }
        _ => Err("expected a number of minutes, such as 10 or 0.5".into()),
    }
}

fn parse_sabotage(text: &str) -> std::result::Result<(Stage, Sabotage), String> {
    use clap::ValueEnum;
    let (stage, how) = text.split_once(':').unwrap_or((text, "wrong"));
    Ok((
        Stage::from_str(stage, false)?,
        <Sabotage as ValueEnum>::from_str(how, false)?,
    ))
}
