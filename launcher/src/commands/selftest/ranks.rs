//! Ranks as processes of this program, and their output.

use std::ffi::OsString;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use accelerator_collective::rendezvous::{StoreOptions, StoreServer};
use rustix::process::Pid;

use super::args::{Sabotage, Task};
use super::context::{Context, Interrupt};
use super::results::StageFailure;
use crate::error::{Error, Result, chain};
use crate::output::LastLines;
use crate::process::{End, Process, RankProcess, wait_for_end};

/// Running processes of one stage. Dropped, they are killed, with their process groups.
#[derive(Debug)]
pub(super) struct RankProcesses {
    // In this order: the processes end before the store does.
    processes: Vec<Process>,
    _store: Option<StoreServer>,
    events: Receiver<RankEvent>,
    interrupt: Interrupt,
    deadline: Instant,
    limit: Duration,
    running: Vec<bool>,
}

/// Output or end of a rank.
#[derive(Debug)]
pub(super) enum RankEvent {
    /// A line of its standard output.
    Line {
        rank: usize,
        text: String,
        at: Instant,
    },
    /// Its end, after its last line.
    Ended {
        rank: usize,
        end: End,
        words: String,
    },
}

/// What the processes of a stage are to do.
#[derive(Clone, Debug)]
pub(super) struct RankSpec<'a> {
    pub(super) task: Task,
    pub(super) processes: usize,
    pub(super) folder: Option<&'a Path>,
    pub(super) sabotage: Option<Sabotage>,
    pub(super) variables: &'a [(&'a str, &'a str)],
}

impl RankProcesses {
    /// Starts the processes and their store.
    pub(super) fn start(
        context: &Context,
        spec: &RankSpec<'_>,
    ) -> std::result::Result<Self, StageFailure> {
        let world_size = spec.processes;
        let store = match world_size {
            1 => None,
            _ => Some(store(context, world_size)?),
        };
        let limit = context.arguments.limit;
        let (sender, events) = mpsc::channel();
        let mut ranks = Self {
            processes: Vec::with_capacity(world_size),
            events,
            interrupt: context.interrupt.clone(),
            deadline: Instant::now() + limit,
            limit,
            running: vec![true; world_size],
            _store: store,
        };
        for rank in 0..world_size {
            let mut command = command(&context.program);
            command.arg("__rank").arg(spec.task.name());
            command.args(["--limit", &limit.as_secs_f64().to_string()]);
            let threads = context.arguments.num_processes;
            command.args(["--threads", &threads.to_string()]);
            if let Some(folder) = spec.folder {
                command.arg("--folder").arg(folder);
            }
            if let Some(sabotage) = spec.sabotage.filter(|_| rank == 0) {
                command.args(["--sabotage", sabotage.name()]);
            }
            if let Some(store) = &ranks._store {
                command.envs(place(rank, world_size, store.local_addr().port()));
            }
            command.envs(spec.variables.iter().copied());
            let mut process = Process::spawn(&mut command).map_err(|error| {
                StageFailure::Failed(format!("rank {rank} cannot be started: {error}"))
            })?;
            listen(rank, &mut process, sender.clone())
                .map_err(|error| StageFailure::Failed(chain(&error)))?;
            ranks.processes.push(process);
        }
        Ok(ranks)
    }

    /// The process id of a rank.
    pub(super) fn pid(&self, rank: usize) -> Pid {
        self.processes[rank].id()
    }

    /// The next event, within the limit of the stage.
    ///
    /// # Errors
    /// When nothing arrived in time, or the test was interrupted.
    pub(super) fn next(&mut self) -> std::result::Result<RankEvent, StageFailure> {
        loop {
            if self.interrupt.signal().is_some() {
                return Err(StageFailure::TimedOut("interrupted".into()));
            }
            let left = self.deadline.saturating_duration_since(Instant::now());
            match self.events.recv_timeout(left.min(TICK)) {
                Ok(event) => {
                    if let RankEvent::Ended { rank, .. } = &event {
                        self.running[*rank] = false;
                    }
                    return Ok(event);
                }
                Err(RecvTimeoutError::Timeout) if !left.is_zero() => {}
                Err(RecvTimeoutError::Timeout) => return Err(self.late()),
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(StageFailure::Failed("the ranks ended early".into()));
                }
            }
        }
    }

    /// Waits until all ranks have ended; returns the last line of rank 0.
    pub(super) fn finish(mut self) -> std::result::Result<String, StageFailure> {
        let mut said = String::new();
        while self.running.contains(&true) {
            match self.next()? {
                RankEvent::Line { rank: 0, text, .. } => said = text,
                RankEvent::Line { .. } => {}
                RankEvent::Ended { rank, end, words } => expect_success(rank, end, &words)?,
            }
        }
        Ok(said)
    }

    fn late(&self) -> StageFailure {
        let late: Vec<String> = (0..self.running.len())
            .filter(|rank| self.running[*rank])
            .map(|rank| format!("rank {rank} (process {})", self.pid(rank).as_raw_pid()))
            .collect();
        StageFailure::TimedOut(format!(
            "no end within {} s: waited for {}",
            self.limit.as_secs_f64(),
            late.join(", ")
        ))
    }
}

/// The last lines of a failed rank are the result.
pub(super) fn expect_success(
    rank: usize,
    end: End,
    words: &str,
) -> std::result::Result<(), StageFailure> {
    if end == End::Code(0) {
        return Ok(());
    }
    let colon = if words.is_empty() { "" } else { ": " };
    Err(StageFailure::Failed(format!(
        "rank {rank} ended with {end}{colon}{words}"
    )))
}

/// This program, with nothing of a launch in its environment.
pub(super) fn command(program: &Path) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        if is_of_a_launch(&name) {
            command.env_remove(name);
        }
    }
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Reads the output of a process until it ends, on threads of its own.
///
/// # Errors
/// When a thread cannot be started.
pub(super) fn listen(rank: usize, process: &mut Process, events: Sender<RankEvent>) -> Result<()> {
    let (stdout, stderr) = (process.take_stdout(), process.take_stderr());
    let pid = process.id();
    let words = thread::Builder::new()
        .spawn(move || stderr.map(last_words).unwrap_or_default())
        .map_err(no_thread)?;
    let read = move || {
        // The stage may have ended already.
        for line in stdout
            .into_iter()
            .flat_map(|pipe| BufReader::new(pipe).lines())
        {
            let Ok(text) = line else { break };
            let at = Instant::now();
            let _ = events.send(RankEvent::Line { rank, text, at });
        }
        let words = words.join().unwrap_or_default();
        if let Ok(end) = wait_for_end(pid) {
            let _ = events.send(RankEvent::Ended { rank, end, words });
        }
    };
    thread::Builder::new().spawn(read).map_err(no_thread)?;
    Ok(())
}

fn store(context: &Context, world_size: usize) -> std::result::Result<StoreServer, StageFailure> {
    let port = context.arguments.master_port;
    let options = StoreOptions::new(world_size).with_job(JOB);
    StoreServer::bind_with(("127.0.0.1", port), options).map_err(|error| {
        StageFailure::Failed(match error.is_address_in_use() {
            true => format!(
                "port {port} of 127.0.0.1 is taken; leave --master-port out to take a free one"
            ),
            false => format!("no store can listen on 127.0.0.1: {}", chain(&error)),
        })
    })
}

fn place(rank: usize, world_size: usize, port: u16) -> [(&'static str, String); 9] {
    [
        ("RANK", rank.to_string()),
        ("LOCAL_RANK", rank.to_string()),
        ("WORLD_SIZE", world_size.to_string()),
        ("LOCAL_WORLD_SIZE", world_size.to_string()),
        ("MASTER_ADDR", "127.0.0.1".to_owned()),
        ("MASTER_PORT", port.to_string()),
        ("ACCEL_PORT", port.to_string()),
        ("ACCEL_STORE", "launcher".to_owned()),
        ("ACCEL_JOB", JOB.to_owned()),
    ]
}

fn is_of_a_launch(name: &OsString) -> bool {
    let name = name.to_string_lossy();
    ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"].contains(&&*name)
        || ["ACCEL_", "MASTER_", "TORCHELASTIC_"]
            .iter()
            .any(|prefix| name.starts_with(prefix))
}

/// The last lines of a stream, joined.
fn last_words(mut pipe: File) -> String {
    let mut last_lines = LastLines::default();
    let mut chunk = [0; 8 << 10];
    // After an error, only what was read before it counts.
    while let Ok(count @ 1..) = pipe.read(&mut chunk) {
        last_lines.feed(&chunk[..count]);
    }
    let lines = last_lines.text();
    lines[lines.len().saturating_sub(3)..].join("; ")
}

fn no_thread(error: std::io::Error) -> Error {
    Error::system("a thread for the output of a rank could not be started").with_source(error)
}

/// How long a signal may wait to be seen.
const TICK: Duration = Duration::from_millis(50);

const JOB: &str = "self-test";
