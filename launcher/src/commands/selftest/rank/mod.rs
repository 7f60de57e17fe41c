//! The tasks of the self-test's ranks.
//!
//! The last line on standard output is the result; a failure goes to standard error and the exit code.

mod checkpoint;
mod collectives;
mod line_fit;
mod sharding;
pub(super) mod training;

use std::io::Write;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use accelerator_collective::{GroupOptions, Launch, ProcessGroup, ReduceOp};
use serde::{Deserialize, Serialize};

use super::args::{RankArgs, Sabotage, Task};
use crate::error::{BoxResult as Result, chain};

/// A rank's report about a lost rank.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct Loss {
    pub(super) ranks: Vec<usize>,
    pub(super) text: String,
    is_peer_lost: bool,
}

impl Loss {
    pub(super) fn parse(text: &str) -> Option<Self> {
        serde_json::from_str(text).ok()
    }

    /// Whether it names this rank, and its process, as lost.
    pub(super) fn names(&self, rank: usize, pid: i32) -> bool {
        self.is_peer_lost
            && self.ranks == [rank]
            && self
                .text
                .contains(&format!("rank {rank} (process {pid} on "))
    }
}

/// Runs the task of this rank.
pub(super) fn run(arguments: &RankArgs) -> ExitCode {
    if arguments.task != Task::Train {
        apply_sabotage(arguments.sabotage);
    }
    let done = perform(arguments).and_then(|said| print_line(&said));
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "{}", chain(&*error));
            ExitCode::FAILURE
        }
    }
}

/// Hangs or aborts if `sabotage` asks for it.
pub(super) fn apply_sabotage(sabotage: Option<Sabotage>) {
    match sabotage {
        Some(Sabotage::Hang) => loop {
            thread::sleep(Duration::from_secs(3600));
        },
        Some(Sabotage::Crash) => std::process::abort(),
        Some(Sabotage::Wrong) | None => {}
    }
}

fn perform(arguments: &RankArgs) -> Result<String> {
    let contribution = Contribution::of(arguments);
    match arguments.task {
        Task::Rendezvous => rendezvous(arguments, contribution),
        Task::Threads => threads(arguments, contribution),
        Task::Collectives => {
            let group = connect(arguments)?;
            let said = collectives::check(&group, contribution)?;
            group.close()?;
            Ok(said)
        }
        Task::Plan => sharding::check(contribution),
        Task::Training => {
            let group = connect(arguments)?;
            let said = line_fit::check(&group, contribution)?;
            group.close()?;
            Ok(said)
        }
        Task::Reduce => reduce(arguments, contribution),
        Task::First => {
            let group = connect(arguments)?;
            let mut values = [1.0_f32];
            group.all_reduce(&mut values, ReduceOp::Sum)?;
            if group.rank() == 0 {
                print_line("the first all-reduce is done")?;
            }
            group.close()?;
            Ok(String::new())
        }
        Task::Checkpoint => {
            let folder = arguments.folder.as_deref();
            checkpoint::check(folder.ok_or("no folder was given")?, contribution)
        }
        Task::Train => {
            let folder = arguments.folder.as_deref();
            training::run(arguments, folder.ok_or("no folder was given")?)
        }
    }
}

/// Whether a rank contributes correct values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Contribution {
    Correct,
    /// One value is wrong, so that the test can be tested.
    Wrong,
}

impl Contribution {
    fn of(arguments: &RankArgs) -> Self {
        match arguments.sabotage {
            Some(_) => Self::Wrong,
            None => Self::Correct,
        }
    }

    fn is_wrong(self) -> bool {
        self == Self::Wrong
    }
}

fn connect(arguments: &RankArgs) -> Result<ProcessGroup> {
    let options = GroupOptions::new()
        .with_connect_timeout(arguments.limit)
        .with_progress_timeout(arguments.limit);
    Ok(ProcessGroup::connect(&Launch::from_env()?, &options)?)
}

fn rendezvous(arguments: &RankArgs, contribution: Contribution) -> Result<String> {
    let group = connect(arguments)?;
    let own = (
        group.rank() + usize::from(contribution.is_wrong()),
        std::process::id(),
    );
    let all = group.all_gather_object(&own)?;
    for (rank, (said, _)) in all.iter().enumerate() {
        if *said != rank {
            return Err(format!("who should be rank {rank} says that it is rank {said}").into());
        }
    }
    let mut pids: Vec<u32> = all.iter().map(|(_, pid)| *pid).collect();
    pids.sort_unstable();
    pids.dedup();
    if pids.len() != group.world_size() {
        return Err(format!("expected a process a rank, found the processes {pids:?}").into());
    }
    group.close()?;
    Ok(format!("{} processes met", pids.len()))
}

fn threads(arguments: &RankArgs, contribution: Contribution) -> Result<String> {
    let options = GroupOptions::new().with_progress_timeout(arguments.limit);
    let groups = ProcessGroup::threads(arguments.threads.get(), &options)?;
    let ranks: Vec<_> = groups
        .into_iter()
        .map(|group| {
            let contribution = match group.rank() {
                0 => contribution,
                _ => Contribution::Correct,
            };
            thread::spawn(move || {
                let said = collectives::check(&group, contribution)?;
                group.close()?;
                Ok(said)
            })
        })
        .collect();
    let mut said = Ok(String::new());
    for (rank, thread) in ranks.into_iter().enumerate() {
        let outcome: Result<String> = match thread.join() {
            Ok(outcome) => outcome,
            Err(_) => Err(format!("rank {rank} panicked").into()),
        };
        if said.is_ok() {
            said = outcome;
        }
    }
    said
}

fn reduce(arguments: &RankArgs, contribution: Contribution) -> Result<String> {
    let group = connect(arguments)?;
    let mut values = vec![1.0_f32; 65_536];
    group.all_reduce(&mut values, ReduceOp::Mean)?;
    print_line("ready")?;
    loop {
        if let Err(error) = group.all_reduce(&mut values, ReduceOp::Mean) {
            let loss = Loss {
                ranks: match contribution {
                    Contribution::Correct => error.ranks().to_vec(),
                    Contribution::Wrong => vec![group.rank()],
                },
                text: chain(&error),
                is_peer_lost: error.is_peer_lost(),
            };
            return Ok(serde_json::to_string(&loss)?);
        }
    }
}

/// Prints a line for the process that started this rank.
pub(super) fn print_line(text: &str) -> Result<()> {
    if text.is_empty() {
        return Ok(());
    }
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "{text}")?;
    stdout.flush()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_names_rank_and_process() {
        let loss = Loss {
            ranks: vec![1],
            text: "rank 1 (process 17 on a) is lost".into(),
            is_peer_lost: true,
        };
        assert!(loss.names(1, 17));
        assert!(!loss.names(1, 1));
        assert!(!loss.names(0, 17));
        let late = Loss {
            is_peer_lost: false,
            ..loss
        };
        assert!(!late.names(1, 17), "a timeout names a rank too");
    }
}
