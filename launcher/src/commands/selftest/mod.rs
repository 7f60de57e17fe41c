//! `accel-launch test`: tests this installation on this machine.
//!
//! Each stage is a small job that this program starts as a user would (`job.rs`), with itself as the training program
//! (`rank.rs`). So no stage can hang or crash the test, and its processes end with it.

mod job;
mod rank;
mod report;

use std::num::NonZeroUsize;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use rustix::process::{Pid, Signal, kill_process};

use crate::error::Result;
use crate::text::print;
use job::{Interrupt, JobSpec, StageJob};
pub(crate) use rank::{RankArgs, run as rank};
use rank::{RankLine, Task, limit};
use report::{LaunchTimes, StageFailure, StageResult, TestReport};

/// Tests this installation: whether ranks connect, compute, and detect failures.
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

    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// One stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Stage {
    /// The processes connect.
    Rendezvous,
    /// Every collective, between threads.
    Threads,
    /// Every collective, between processes that share memory.
    Shm,
    /// Every collective, between processes over connections.
    Tcp,
    /// Every other rank names a rank that is killed.
    Death,
}

/// Runs the test.
///
/// # Errors
/// When nothing can be tested at all; a failed stage is in the exit code.
pub(crate) fn run(arguments: &TestArgs) -> Result<ExitCode> {
    let interrupt = Interrupt::listen()?;
    let spec = JobSpec::new(arguments.num_processes, arguments.limit, &interrupt)?
        .with_port(arguments.master_port);
    let started = Instant::now();
    let mut report = TestReport::new(arguments.num_processes);
    let show = |line: &str| match arguments.json {
        true => Ok(ExitCode::SUCCESS),
        false => print(line),
    };
    let mut can_connect = true;
    let all = Stage::value_variants().iter();
    for stage in all.filter(|stage| arguments.stage.is_empty() || arguments.stage.contains(stage)) {
        let began = Instant::now();
        let outcome = match can_connect || *stage == Stage::Threads {
            true => stage.run(&spec),
            false => Err(StageFailure::Skipped("the processes did not meet".into())),
        };
        can_connect &= *stage != Stage::Rendezvous || outcome.is_ok();
        if let Some(signal) = interrupt.signal() {
            return interrupted(signal);
        }
        show(report.add(stage.name(), outcome, began.elapsed()))?;
    }
    if arguments.timing {
        let began = Instant::now();
        let outcome = LaunchTimes::measure(|| time_to_all_reduce(&spec));
        if let Some(signal) = interrupt.signal() {
            return interrupted(signal);
        }
        let outcome = outcome.map(|times| report.set_times(times));
        show(report.add("timing", outcome, began.elapsed()))?;
    }
    report.seconds = started.elapsed().as_secs_f64();
    print(&match arguments.json {
        true => report.to_json(),
        false => report.summary(),
    })?;
    Ok(ExitCode::from(u8::from(!report.ok)))
}

fn interrupted(signal: i32) -> Result<ExitCode> {
    let name = signal_hook::low_level::signal_name(signal).unwrap_or("a signal");
    print(&format!(
        "ended by {name}; no process of the test is left\n"
    ))?;
    let code = u8::try_from(128 + signal).unwrap_or(u8::MAX);
    Ok(ExitCode::from(code))
}

impl Stage {
    fn name(self) -> &'static str {
        match self {
            Self::Rendezvous => "rendezvous",
            Self::Threads => "collectives, threads",
            Self::Shm => "collectives, shm",
            Self::Tcp => "collectives, tcp",
            Self::Death => "killed rank",
        }
    }

    fn run(self, spec: &JobSpec<'_>) -> StageResult {
        match self {
            Self::Rendezvous => spec.start(Task::Rendezvous, &[])?.result(),
            Self::Threads => spec.start(Task::Threads, &[])?.result(),
            Self::Shm => share_memory(spec),
            Self::Tcp => {
                let job = spec.start(Task::Collectives, &[("ACCEL_TRANSPORT", "tcp")])?;
                job.result()
            }
            Self::Death => lose_rank(spec),
        }
    }
}

/// Ranks of a machine without memory to share use connections, so its lack is no failure.
fn share_memory(spec: &JobSpec<'_>) -> StageResult {
    let job = spec.start(Task::Collectives, &[("ACCEL_TRANSPORT", "shm")])?;
    job.result().map_err(|failure| match failure {
        StageFailure::Failed(text) => match text.split_once(NO_MEMORY) {
            Some((_, why)) => {
                let why = why.split_once("; ask for").map_or(why, |(why, _)| why);
                StageFailure::Skipped(why.to_owned())
            }
            None => StageFailure::Failed(text),
        },
        other => other,
    })
}

/// Kills the last rank during all-reduces; all others must name it in time.
fn lose_rank(spec: &JobSpec<'_>) -> StageResult {
    let mut job = spec.start(Task::Reduce, &[])?;
    let world_size = spec.processes();
    let lost = world_size - 1;
    let mut pid = None;
    for _ in 0..world_size {
        match rank_line(&mut job)? {
            (RankLine::Ready { rank, pid: found }, _) if rank == lost => pid = Pid::from_raw(found),
            (RankLine::Ready { .. }, _) => {}
            (other, _) => return Err(StageFailure::Failed(format!("no rank was lost: {other:?}"))),
        }
    }
    let pid = pid.ok_or_else(|| StageFailure::Failed(format!("rank {lost} did not report")))?;
    kill_process(pid, Signal::KILL)
        .map_err(|error| StageFailure::Failed(format!("rank {lost} cannot be killed: {error}")))?;
    let killed_at = Instant::now();
    let mut slowest = Duration::ZERO;
    for _ in 0..lost {
        let (line, at) = rank_line(&mut job)?;
        if !line.names(lost, pid) {
            let pid = pid.as_raw_pid();
            return Err(StageFailure::Failed(format!(
                "rank {lost} (process {pid}) was killed, but a rank reported {line:?}"
            )));
        }
        slowest = slowest.max(at.saturating_duration_since(killed_at));
    }
    let took = format!("{:.0} ms", slowest.as_secs_f64() * 1e3);
    if slowest > DEATH_WITHIN {
        return Err(StageFailure::Failed(format!(
            "rank {lost} was killed and was named after {took}; expected within {} s",
            DEATH_WITHIN.as_secs_f64()
        )));
    }
    Ok(format!("named with its process id after {took}"))
}

fn rank_line(job: &mut StageJob<'_>) -> std::result::Result<(RankLine, Instant), StageFailure> {
    let (text, at) = job.line()?;
    match serde_json::from_str(&text) {
        Ok(line) => Ok((line, at)),
        Err(_) => Err(StageFailure::Failed(format!("a rank said {text:?}"))),
    }
}

/// Launches ranks as a user does, until rank 0 has done an all-reduce.
fn time_to_all_reduce(spec: &JobSpec<'_>) -> std::result::Result<Duration, StageFailure> {
    let started = Instant::now();
    let mut job = spec.start(Task::First, &[])?;
    let (_, at) = job.line()?;
    job.result()?;
    Ok(at.saturating_duration_since(started))
}

/// The beginning of the error of ranks that were asked to share memory and cannot.
const NO_MEMORY: &str = "the transport `shm` was asked for, but ";

/// The time within which the loss of a killed rank must be reported.
const DEATH_WITHIN: Duration = Duration::from_secs(1);

/// Parses the number of processes: with more than 16, sums would not fit in 8 bits.
fn processes(text: &str) -> std::result::Result<NonZeroUsize, String> {
    let count = text.parse().ok().filter(|count| (2..=16).contains(count));
    count
        .and_then(NonZeroUsize::new)
        .ok_or_else(|| "expected a number of processes from 2 to 16".into())
}
