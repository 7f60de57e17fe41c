//! The arguments of `accel-launch test` and of its ranks.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};

/// Tests this installation: whether ranks connect, compute, divide samples, and detect failures.
///
/// Every stage has a time limit and a result of its own. The exit code is 0 when nothing failed
/// and 1 otherwise.
#[derive(Args, Clone, Debug)]
pub(crate) struct TestArgs {
    /// How many processes connect.
    #[arg(short = 'n', long, value_name = "N", default_value = "2", value_parser = processes)]
    pub(super) num_processes: NonZeroUsize,

    /// The port of the store; 0 takes a free one.
    #[arg(long, value_name = "PORT", default_value_t = 0)]
    pub(super) master_port: u16,

    /// How many seconds a stage may take.
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = limit)]
    pub(super) limit: Duration,

    /// Run these stages only; can be repeated.
    #[arg(long, value_name = "STAGE")]
    pub(super) stage: Vec<Stage>,

    /// Also measure the time from the launcher's start to the end of the first all-reduce: the
    /// median of ten runs.
    #[arg(long)]
    pub(super) timing: bool,

    /// Instead, inject faults into a small training job, and compare its weights with those of a
    /// run without faults. Needs a build with the feature `faults`.
    #[arg(long, conflicts_with_all = ["stage", "timing", "master_port"])]
    pub(super) chaos: bool,

    /// The seed of the first schedule of faults; the next ones follow it.
    #[arg(long, value_name = "S", requires = "chaos", default_value_t = 0)]
    pub(super) seed: u64,

    /// For how many minutes to draw schedules.
    #[arg(long, value_name = "M", requires = "chaos", conflicts_with = "schedules", value_parser = minutes)]
    pub(super) minutes: Option<Duration>,

    /// How many schedules to run [default: 20].
    #[arg(long, value_name = "N", requires = "chaos")]
    pub(super) schedules: Option<u64>,

    /// Print one JSON object.
    #[arg(long)]
    pub(super) json: bool,

    /// Break a stage on purpose, to see that the test notices.
    #[arg(long, value_name = "STAGE:HOW", hide = true, value_parser = parse_sabotage)]
    pub(super) r#break: Option<(Stage, Sabotage)>,

    /// Break the training of --chaos on purpose.
    #[arg(long, value_name = "HOW", hide = true)]
    pub(super) break_chaos: Option<Sabotage>,
}

/// Arguments of a rank of the self-test.
#[derive(Args, Clone, Debug)]
pub(crate) struct RankArgs {
    /// What it is to do.
    pub(super) task: Task,

    /// How many threads are ranks.
    #[arg(long, default_value = "2")]
    pub(super) threads: NonZeroUsize,

    /// How long it may wait for others.
    #[arg(long, default_value = "60", value_parser = limit)]
    pub(super) limit: Duration,

    /// Where it may write.
    #[arg(long)]
    pub(super) folder: Option<PathBuf>,

    /// How many milliseconds a training pauses before each step, so that faults from outside strike while it runs.
    #[arg(long, default_value_t = 0)]
    pub(super) pause: u64,

    /// How it fails on purpose.
    #[arg(long)]
    pub(super) sabotage: Option<Sabotage>,
}

/// One stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Stage {
    /// The processes connect.
    Rendezvous,
    /// Every collective, between threads.
    Threads,
    /// Every collective, between processes that share memory.
    Shm,
    /// Every collective, between processes over connections.
    Tcp,
    /// Every sample is used exactly once.
    Plan,
    /// Several ranks train to the weights that one rank trains to.
    Training,
    /// Every other rank names a rank that is killed.
    Death,
    /// Every other rank names a rank that is stopped.
    Silence,
    /// A damaged checkpoint is found.
    Checkpoint,
}

impl Stage {
    /// All, or those that were named, in order.
    pub(super) fn chosen(named: &[Self]) -> impl Iterator<Item = Self> {
        let all = Self::value_variants().iter().copied();
        all.filter(|stage| named.is_empty() || named.contains(stage))
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Rendezvous => "rendezvous",
            Self::Threads => "collectives, threads",
            Self::Shm => "collectives, shm",
            Self::Tcp => "collectives, tcp",
            Self::Plan => "sharding plan",
            Self::Training => "training",
            Self::Death => "killed rank",
            Self::Silence => "stopped rank",
            Self::Checkpoint => "checkpoint",
        }
    }

    /// Whether it needs ranks that can connect.
    pub(super) fn needs_rendezvous(self) -> bool {
        matches!(
            self,
            Self::Shm | Self::Tcp | Self::Training | Self::Death | Self::Silence
        )
    }
}

/// What a rank is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Task {
    /// Connect with the other ranks.
    Rendezvous,
    /// All collectives, among threads of this process.
    Threads,
    /// All collectives, with other processes.
    Collectives,
    /// Check the sharding plan.
    Plan,
    /// Train with all ranks, and on one rank.
    Training,
    /// All-reduces without end, and a report of the error that ends them.
    Reduce,
    /// One all-reduce.
    First,
    /// Write, damage and find checkpoints.
    Checkpoint,
    /// Train, save and resume, for schedules of faults.
    Train,
}

impl Task {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Rendezvous => "rendezvous",
            Self::Threads => "threads",
            Self::Collectives => "collectives",
            Self::Plan => "plan",
            Self::Training => "training",
            Self::Reduce => "reduce",
            Self::First => "first",
            Self::Checkpoint => "checkpoint",
            Self::Train => "train",
        }
    }
}

/// How a rank breaks its stage on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Sabotage {
    /// It hangs.
    Hang,
    /// It aborts.
    Crash,
    /// Its result is wrong.
    Wrong,
}

impl Sabotage {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Hang => "hang",
            Self::Crash => "crash",
            Self::Wrong => "wrong",
        }
    }
}

/// More than 16 would have sums that 8 bits cannot hold.
fn processes(text: &str) -> Result<NonZeroUsize, String> {
    match text.parse::<usize>() {
        Ok(count @ 2..=16) => NonZeroUsize::new(count).ok_or_else(String::new),
        _ => Err("expected a number of processes from 2 to 16".into()),
    }
}

fn limit(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.1..=86_400.0).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err("expected a number of seconds between 0.1 and 86400".into()),
    }
}

fn minutes(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(minutes) if (0.0..=100_000.0).contains(&minutes) => {
            Ok(Duration::from_secs_f64(60.0 * minutes))
        }
        _ => Err("expected a number of minutes, such as 10 or 0.5".into()),
    }
}

fn parse_sabotage(text: &str) -> Result<(Stage, Sabotage), String> {
    let (stage, how) = text.split_once(':').unwrap_or((text, "wrong"));
    Ok((
        Stage::from_str(stage, false)?,
        <Sabotage as ValueEnum>::from_str(how, false)?,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_command_line() {
        for task in Task::value_variants() {
            assert_eq!(Task::from_str(task.name(), false), Ok(*task));
        }
        for sabotage in Sabotage::value_variants() {
            assert_eq!(Sabotage::from_str(sabotage.name(), false), Ok(*sabotage));
        }
    }
}
