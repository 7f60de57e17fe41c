//! `accel-launch test`: tests this installation on this machine.
//!
//! Each stage is a small job that this program starts as a user would, with itself as the training program
//! (`rank.rs`). So no stage can hang or crash the test, and its processes end with it.

mod rank;
mod report;

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use accelerator_collective::internal::place_variables;
use accelerator_host::PREFIX;
use clap::{Args, ValueEnum};
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::signal::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};

use crate::error::{Error, Result};
use crate::process::{End, Process, RankProcess, wait_for_end};
use crate::text::print;
pub(crate) use rank::{RankArgs, run as rank};
use rank::{RankLine, Task, limit};
use report::{LaunchTimes, StageFailure, StageResult, TestReport, failed};

/// Tests that ranks connect, compute and detect failures on this machine.
///
/// Every stage has its own time limit and result. The exit code is 0 if no stage failed, and 1
/// otherwise.
#[derive(Args, Clone, Debug)]
pub(crate) struct TestArgs {
    /// Number of processes.
    #[arg(short = 'n', long, value_name = "N", default_value = "2", value_parser = processes)]
    num_processes: NonZeroUsize,

    /// The port of the store; 0 picks a free one.
    #[arg(long, value_name = "PORT", default_value_t = 0)]
    master_port: u16,

    /// The time limit of a stage in seconds.
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = limit)]
    limit: Duration,

    /// Run only this stage; can be repeated.
    #[arg(long, value_name = "STAGE")]
    stage: Vec<Stage>,

    /// Also measure the time from the launcher's start to the end of the first all-reduce (median of
    /// ten runs).
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
    /// A rank is killed, and every other rank must name it.
    Death,
}

/// Runs the test.
///
/// # Errors
/// When nothing can be tested at all; a failed stage is in the exit code.
pub(crate) fn run(arguments: &TestArgs) -> Result<ExitCode> {
    let interrupt = Interrupt::listen()?;
    let program = std::env::current_exe()
        .map_err(|error| Error::system("this program cannot find itself").with_source(error))?;
    let spec = JobSpec {
        program,
        processes: arguments.num_processes.get(),
        port: arguments.master_port,
        limit: arguments.limit,
        interrupt: &interrupt,
    };
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
    let world_size = spec.processes;
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

/// The settings that all jobs of a test share.
#[derive(Clone, Debug)]
struct JobSpec<'a> {
    program: PathBuf,
    processes: usize,
    port: u16,
    limit: Duration,
    interrupt: &'a Interrupt,
}

/// A running job. Dropped, it is ended.
#[derive(Debug)]
struct StageJob<'a> {
    launcher: Process,
    events: Receiver<JobEvent>,
    spec: &'a JobSpec<'a>,
    deadline: Instant,
    last_line: String,
}

#[derive(Debug)]
enum JobEvent {
    /// A line of a rank's standard output.
    Line { text: String, at: Instant },
    /// The launcher's end, after the last line, with what it and the ranks wrote to standard error.
    Ended { end: End, errors: String },
}

impl JobSpec<'_> {
    /// Starts a job. Threads are ranks of a single process, which needs no port.
    fn start(
        &self,
        task: Task,
        variables: &[(&str, &str)],
    ) -> std::result::Result<StageJob<'_>, StageFailure> {
        let (processes, port) = match task {
            Task::Threads => (1, 0),
            _ => (self.processes, self.port),
        };
        let mut command = Command::new(&self.program);
        // No variable of a launch that this test runs in is passed on.
        for name in place_variables().chain(settings()) {
            command.env_remove(name);
        }
        command
            .args(["--quiet", "--no-prefix", "--grace", "0.2"])
            .args(["--num-processes", &processes.to_string()])
            .args(["--master-port", &port.to_string()])
            .arg(&self.program)
            .arg("__rank")
            .args(
                task.to_possible_value()
                    .map(|word| word.get_name().to_owned()),
            )
            .args(["--threads", &self.processes.to_string()])
            .args(["--limit", &self.limit.as_secs_f64().to_string()])
            .envs(variables.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let deadline = Instant::now() + self.limit;
        let (sender, events) = mpsc::channel();
        let mut launcher = Process::spawn(&mut command)
            .map_err(|error| failed("the launcher cannot be started", &error))?;
        listen(&mut launcher, sender)
            .map_err(|error| failed("the launcher's output cannot be read", &error))?;
        Ok(StageJob {
            launcher,
            events,
            spec: self,
            deadline,
            last_line: String::new(),
        })
    }
}

impl StageJob<'_> {
    /// Returns the next line of a rank, and when it came.
    ///
    /// # Errors
    /// When the job ends or fails before, takes too long, or the test is interrupted.
    fn line(&mut self) -> std::result::Result<(String, Instant), StageFailure> {
        match self.next()? {
            JobEvent::Line { text, at } => Ok((text, at)),
            JobEvent::Ended { end, errors } => Err(ended(end, &errors)),
        }
    }

    /// Waits until the job has ended; returns its last line.
    fn result(mut self) -> StageResult {
        loop {
            match self.next()? {
                JobEvent::Line { text, .. } => self.last_line = text,
                JobEvent::Ended { end, .. } if end.is_success() => {
                    return Ok(std::mem::take(&mut self.last_line));
                }
                JobEvent::Ended { end, errors } => return Err(ended(end, &errors)),
            }
        }
    }

    fn next(&mut self) -> std::result::Result<JobEvent, StageFailure> {
        loop {
            if self.spec.interrupt.signal().is_some() {
                return Err(StageFailure::TimedOut("interrupted".into()));
            }
            let left = self.deadline.saturating_duration_since(Instant::now());
            match self.events.recv_timeout(left.min(TICK)) {
                Ok(event) => {
                    if let JobEvent::Ended { .. } = event {
                        self.launcher.reap();
                    }
                    return Ok(event);
                }
                Err(RecvTimeoutError::Timeout) if !left.is_zero() => {}
                Err(_) => {
                    return Err(StageFailure::TimedOut(format!(
                        "no end within {} s",
                        self.spec.limit.as_secs_f64()
                    )));
                }
            }
        }
    }
}

impl Drop for StageJob<'_> {
    fn drop(&mut self) {
        // The launcher ends its ranks in its grace period. If it cannot, it is killed when its process is dropped.
        self.launcher.signal(Signal::TERM);
        let until = Instant::now() + LAST_WAIT;
        while Instant::now() < until {
            match self.events.recv_timeout(LAST_WAIT) {
                Ok(JobEvent::Line { .. }) => {}
                Ok(JobEvent::Ended { .. }) => return self.launcher.reap(),
                Err(_) => return,
            }
        }
    }
}

/// The last signal that asked the test to end; the test then ends as it always does, and leaves nothing.
#[derive(Clone, Debug, Default)]
struct Interrupt(Arc<AtomicUsize>);

impl Interrupt {
    /// Notes signals from now on.
    fn listen() -> Result<Self> {
        let received = Arc::new(AtomicUsize::new(0));
        for signal in [SIGINT, SIGTERM, SIGHUP, SIGQUIT] {
            signal_hook::flag::register_usize(signal, Arc::clone(&received), signal as usize)
                .map_err(|error| {
                    Error::system("the signal handlers could not be installed").with_source(error)
                })?;
        }
        Ok(Self(received))
    }

    /// Returns the last signal that was received.
    fn signal(&self) -> Option<i32> {
        let signal = self.0.load(Ordering::Acquire);
        i32::try_from(signal).ok().filter(|signal| *signal != 0)
    }
}

fn ended(end: End, errors: &str) -> StageFailure {
    let lines: Vec<&str> = errors.lines().take(3).collect();
    let colon = if lines.is_empty() { "" } else { ": " };
    StageFailure::Failed(format!(
        "the job ended with {end}{colon}{}",
        lines.join("; ")
    ))
}

/// Reads the output of the launcher until it ends, on threads of its own.
fn listen(launcher: &mut Process, events: Sender<JobEvent>) -> io::Result<()> {
    let (stdout, stderr) = (launcher.take_stdout(), launcher.take_stderr());
    let pid = launcher.id();
    let errors = thread::Builder::new().spawn(move || stderr.map(beginning).unwrap_or_default())?;
    let read = move || {
        let lines = stdout.into_iter();
        // The stage may have ended already, so nobody may receive.
        for text in lines.flat_map(|pipe| BufReader::new(pipe).lines().map_while(io::Result::ok)) {
            let at = Instant::now();
            let _ = events.send(JobEvent::Line { text, at });
        }
        let errors = errors.join().unwrap_or_default();
        if let Ok(end) = wait_for_end(pid) {
            let _ = events.send(JobEvent::Ended { end, errors });
        }
    };
    thread::Builder::new().spawn(read)?;
    Ok(())
}

/// Reads a stream to its end, and returns its beginning.
fn beginning(mut stream: File) -> String {
    let mut bytes = Vec::new();
    // After an error, only the bytes before it count.
    let _ = Read::by_ref(&mut stream)
        .take(16 << 10)
        .read_to_end(&mut bytes);
    let _ = io::copy(&mut stream, &mut io::sink());
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Lists the variables of this project that are set.
fn settings() -> impl Iterator<Item = OsString> {
    let names = std::env::vars_os().map(|(name, _)| name);
    names.filter(|name| name.to_string_lossy().starts_with(PREFIX))
}

/// The time that a signal may wait to be seen.
const TICK: Duration = Duration::from_millis(50);

/// The time that the launcher may take to end its ranks.
const LAST_WAIT: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// Runs a job whose launcher is a script.
    fn run(script: &str) -> StageResult {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("launcher");
        std::fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
        let interrupt = Interrupt::default();
        let spec = JobSpec {
            program,
            processes: 1,
            port: 0,
            limit: Duration::from_millis(500),
            interrupt: &interrupt,
        };
        spec.start(Task::Rendezvous, &[])?.result()
    }

    #[test]
    fn the_last_line_is_the_result() {
        assert_eq!(run("echo first; echo last").unwrap(), "last");
    }

    #[test]
    fn a_launcher_that_fails_or_dies_fails_its_stage() {
        for (script, expected) in [
            ("echo why >&2; exit 3", "exit code 3: why"),
            ("kill -KILL $$", "killed by SIGKILL"),
        ] {
            match run(script) {
                Err(StageFailure::Failed(text)) => assert!(text.ends_with(expected), "{text}"),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn a_launcher_that_hangs_is_ended_in_time() {
        let began = Instant::now();
        let outcome = run("exec sleep 300");
        assert!(
            matches!(outcome, Err(StageFailure::TimedOut(_))),
            "{outcome:?}"
        );
        assert!(began.elapsed() < Duration::from_secs(60));
    }
}
