//! The stages of the test and their checks.

use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process};

use super::args::{Stage, Task};
use super::context::Context;
use super::rank::Loss;
use super::ranks::{RankEvent, RankProcesses, RankSpec, expect_success};
use super::results::{StageFailure, StageResult};

impl Stage {
    /// Runs the stage within the limit.
    pub(super) fn run(self, context: &Context) -> StageResult {
        match self {
            Self::Rendezvous => self.run_ranks(context, Task::Rendezvous, &[]),
            Self::Threads => self.run_one(context, Task::Threads, None),
            Self::Shm => self.share_memory(context),
            Self::Tcp => self.run_ranks(context, Task::Collectives, &[("ACCEL_TRANSPORT", "tcp")]),
            Self::Plan => self.run_one(context, Task::Plan, None),
            Self::Training => self.run_ranks(context, Task::Training, &[]),
            Self::Death => self.lose_rank(context, Signal::KILL, "killed", DEATH_WITHIN),
            Self::Silence => {
                self.lose_rank(context, Signal::STOP, "stopped", LIVENESS + SILENCE_SLACK)
            }
            Self::Checkpoint => {
                let folder = tempfile::Builder::new()
                    .prefix("accel-launch-test-")
                    .tempdir()
                    .map_err(|error| {
                        StageFailure::Failed(format!("no temporary folder can be made: {error}"))
                    })?;
                self.run_one(context, Task::Checkpoint, Some(folder.path()))
            }
        }
    }

    /// Where processes cannot share memory, they train over connections; that is no failure.
    fn share_memory(self, context: &Context) -> StageResult {
        let variables = [("ACCEL_TRANSPORT", "shm")];
        match self.run_ranks(context, Task::Collectives, &variables) {
            Err(StageFailure::Failed(text)) => Err(match text.split_once(NO_MEMORY) {
                Some((_, why)) => {
                    let why = why.split_once("; ask for").map_or(why, |(why, _)| why);
                    StageFailure::Skipped(why.to_owned())
                }
                None => StageFailure::Failed(text),
            }),
            outcome => outcome,
        }
    }

    fn run_ranks(self, context: &Context, task: Task, variables: &[(&str, &str)]) -> StageResult {
        let spec = RankSpec {
            processes: context.arguments.num_processes.get(),
            variables,
            ..self.spec(context, task)
        };
        RankProcesses::start(context, &spec)?.finish()
    }

    fn run_one(self, context: &Context, task: Task, folder: Option<&Path>) -> StageResult {
        let spec = RankSpec {
            folder,
            ..self.spec(context, task)
        };
        RankProcesses::start(context, &spec)?.finish()
    }

    /// Sends `signal` to the last rank during all-reduces; all others must name it in time.
    fn lose_rank(
        self,
        context: &Context,
        signal: Signal,
        what: &str,
        within: Duration,
    ) -> StageResult {
        let world_size = context.arguments.num_processes.get();
        let liveness = LIVENESS.as_secs_f64().to_string();
        let spec = RankSpec {
            processes: world_size,
            variables: &[("ACCEL_LIVENESS_TIMEOUT", &liveness)],
            ..self.spec(context, Task::Reduce)
        };
        let mut ranks = RankProcesses::start(context, &spec)?;
        let mut ready = 0;
        while ready < world_size {
            match ranks.next()? {
                RankEvent::Line { .. } => ready += 1,
                RankEvent::Ended { rank, end, words } => {
                    expect_success(rank, end, &words)?;
                    return Err(StageFailure::Failed(format!(
                        "rank {rank} ended before anything happened to it"
                    )));
                }
            }
        }
        let lost = world_size - 1;
        let pid = ranks.pid(lost);
        kill_process(pid, signal).map_err(|error| {
            StageFailure::Failed(format!("rank {lost} cannot be {what}: {error}"))
        })?;
        let signalled_at = Instant::now();
        let mut slowest = Duration::ZERO;
        let mut named = 0;
        while named < lost {
            let (rank, text, at) = match ranks.next()? {
                RankEvent::Line { rank, text, at } if rank != lost => (rank, text, at),
                RankEvent::Ended { rank, end, words } if rank != lost => {
                    expect_success(rank, end, &words)?;
                    continue;
                }
                _ => continue,
            };
            let loss = Loss::parse(&text).ok_or_else(|| {
                StageFailure::Failed(format!(
                    "rank {rank} reported what cannot be parsed: {text}"
                ))
            })?;
            if !loss.names(lost, pid.as_raw_pid()) {
                return Err(StageFailure::Failed(format!(
                    "rank {lost} (process {}) was {what}, but rank {rank} named {:?} and said: {}",
                    pid.as_raw_pid(),
                    loss.ranks,
                    loss.text
                )));
            }
            slowest = slowest.max(at.saturating_duration_since(signalled_at));
            named += 1;
        }
        let took = format!("{:.0} ms", slowest.as_secs_f64() * 1e3);
        if slowest > within {
            return Err(StageFailure::Failed(format!(
                "rank {lost} was {what} and was named after {took}; expected within {} s",
                within.as_secs_f64()
            )));
        }
        Ok(format!("named with its process id after {took}"))
    }

    fn spec<'a>(self, context: &Context, task: Task) -> RankSpec<'a> {
        RankSpec {
            task,
            processes: 1,
            folder: None,
            sabotage: context.sabotage(self),
            variables: &[],
        }
    }
}

/// What ranks say that were asked to share memory and cannot.
const NO_MEMORY: &str = "the transport `shm` was asked for, but ";

/// How soon the loss of a killed rank must be reported.
const DEATH_WITHIN: Duration = Duration::from_secs(1);

/// The liveness timeout of the stage with a stopped rank.
const LIVENESS: Duration = Duration::from_secs(1);

/// How much later than that the loss of a stopped rank may be reported.
const SILENCE_SLACK: Duration = Duration::from_secs(1);
