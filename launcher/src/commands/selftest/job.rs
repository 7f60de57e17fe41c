//! The jobs of the self-test: this program, launched by itself, and its output.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use accelerator_collective::launcher::place_variables;
use accelerator_host::PREFIX;
use rustix::process::Signal;
use signal_hook::consts::signal::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};

use super::rank::Task;
use super::report::{StageFailure, StageResult, failed};
use crate::error::{Error, Result};
use crate::process::{End, Process, RankProcess, wait_for_end};

/// The settings that all jobs of a test share.
#[derive(Clone, Debug)]
pub(super) struct JobSpec<'a> {
    program: PathBuf,
    processes: NonZeroUsize,
    port: u16,
    limit: Duration,
    interrupt: &'a Interrupt,
}

/// A running job. Dropped, it is ended.
#[derive(Debug)]
pub(super) struct StageJob<'a> {
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

impl<'a> JobSpec<'a> {
    /// Describes jobs of `processes` ranks that take no longer than `limit`.
    ///
    /// # Errors
    /// When this program cannot find itself.
    pub(super) fn new(
        processes: NonZeroUsize,
        limit: Duration,
        interrupt: &'a Interrupt,
    ) -> Result<Self> {
        let program = std::env::current_exe()
            .map_err(|error| Error::system("this program cannot find itself").with_source(error))?;
        Ok(Self {
            program,
            processes,
            port: 0,
            limit,
            interrupt,
        })
    }

    /// Sets the port of the store; 0 takes a free one.
    pub(super) fn with_port(self, port: u16) -> Self {
        Self { port, ..self }
    }

    /// Returns the number of ranks.
    pub(super) fn processes(&self) -> usize {
        self.processes.get()
    }

    /// Starts a job. Threads are ranks of a single process, which needs no port.
    pub(super) fn start(
        &self,
        task: Task,
        variables: &[(&str, &str)],
    ) -> std::result::Result<StageJob<'_>, StageFailure> {
        let (processes, port) = match task {
            Task::Threads => (1, 0),
            _ => (self.processes(), self.port),
        };
        let mut command = Command::new(&self.program);
        // Of a launch that this test runs in, nothing is passed on.
        for name in place_variables().chain(settings()) {
            command.env_remove(name);
        }
        command
            .args(["--quiet", "--no-prefix", "--grace", "0.2"])
            .args(["--num-processes", &processes.to_string()])
            .args(["--master-port", &port.to_string()])
            .arg(&self.program)
            .args(["__rank", task.name()])
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
    pub(super) fn line(&mut self) -> std::result::Result<(String, Instant), StageFailure> {
        match self.next()? {
            JobEvent::Line { text, at } => Ok((text, at)),
            JobEvent::Ended { end, errors } => Err(ended(end, &errors)),
        }
    }

    /// Waits until the job has ended; returns its last line.
    pub(super) fn result(mut self) -> StageResult {
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
pub(super) struct Interrupt(Arc<AtomicUsize>);

impl Interrupt {
    /// Notes signals from now on.
    ///
    /// # Errors
    /// When the handlers cannot be installed.
    pub(super) fn listen() -> Result<Self> {
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
    pub(super) fn signal(&self) -> Option<i32> {
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
    // After an error, only what was read before it counts.
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
        let limit = Duration::from_millis(500);
        let mut spec = JobSpec::new(NonZeroUsize::MIN, limit, &interrupt).unwrap();
        spec.program = program;
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
