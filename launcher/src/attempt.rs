//! One attempt at a job: a store, a group of ranks, and their end.

use std::ffi::OsString;
use std::io::{self, ErrorKind, IsTerminal};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::environment::Environment;
use crate::error::{Error, Result};
use crate::hearing::Hearing;
use crate::job::{Cause, End};
use crate::keeper::Guard;
use crate::output::{Output, Stream};
use crate::rendezvous::{Stand, Store};
use crate::settings::Settings;
use crate::signals;
use crate::spawn::Process;
use crate::supervise::{Doing, Family, Notice, Outcome, Witness, supervise};
use crate::text::list;
use crate::tool::Channel;

/// How long what ranks said of a failure may take to arrive after their ends.
const STATEMENTS: Duration = Duration::from_millis(100);

/// How long the last words of a rank that ended may take to arrive.
const LAST_WORDS: Duration = Duration::from_millis(50);

/// How long a rank's farewell may take to arrive after its end; ranks that lost it wait a little
/// longer for word of it.
const FAREWELL: Duration = Duration::from_millis(100);

/// An attempt whose ranks are not started yet.
#[derive(Debug)]
pub(crate) struct Attempt {
    settings: Settings,
    output: Output,
    hearing: Hearing,
    store: Store,
}

/// What an attempt came to.
#[derive(Debug)]
pub(crate) enum Ended {
    /// All its ranks ran, and have ended.
    Ran(Box<Finished>),
    /// The process of this rank could not be started, and those before it were ended.
    NotStarted {
        /// The rank.
        rank: usize,
        /// Why.
        error: Error,
    },
}

/// An attempt whose ranks have ended.
#[derive(Debug)]
pub(crate) struct Finished {
    /// How they ended.
    pub(crate) outcome: Outcome,
    /// Their process ids.
    pub(crate) pids: Vec<i32>,
    /// What they wrote.
    pub(crate) output: Output,
    /// What they told the store.
    pub(crate) hearing: Hearing,
    /// The settings of the attempt.
    pub(crate) settings: Settings,
}

impl Attempt {
    /// Opens the screen, the log files and the store; all report to `channel`.
    ///
    /// # Errors
    /// When a log file cannot be made, or the store cannot listen.
    pub(crate) fn prepare(settings: Settings, channel: &Channel) -> Result<Self> {
        let output = Output::open(
            settings.ranks.get(),
            settings.prefix,
            settings.log_dir.as_deref(),
            settings.restart,
            settings.lost_output,
            channel.sender.clone(),
        )?;
        let hearing = Hearing::default();
        let observer = {
            let (hearing, notices) = (hearing.clone(), channel.sender.clone());
            move |report| hearing.hear(report, &notices)
        };
        let store = Store::open(&settings, observer)?;
        Ok(Self {
            settings,
            output,
            hearing,
            store,
        })
    }

    /// Where the launcher's own lines go.
    pub(crate) fn output(&self) -> &Output {
        &self.output
    }

    /// Starts the ranks and sees them through.
    ///
    /// # Errors
    /// When the system gives no thread, or a signal ends the launcher before all ranks run.
    pub(crate) fn run(
        self,
        program: &Path,
        arguments: &[OsString],
        package_dir: Option<&Path>,
        channel: &Channel,
    ) -> Result<Ended> {
        let Self {
            settings,
            output,
            hearing,
            store,
        } = self;
        let token = store.token_file();
        let environment = Environment::new(&settings, store.address(), token, package_dir);
        let mut group = Vec::with_capacity(environment.ranks());
        // Dropped before the group, it kills all at once, and not one after the other.
        let guard = Guard::new();
        for rank in 0..environment.ranks() {
            interrupted(channel)?;
            match start(rank, program, arguments, &environment) {
                Ok(process) => group.push(process),
                Err(error) => return Ok(Ended::NotStarted { rank, error }),
            }
        }
        let readers = read_output(&mut group, &output)?;
        let pids = group
            .iter()
            .map(|process| process.pid().as_raw_pid())
            .collect();
        let mut witness = Teller {
            output: output.clone(),
            hearing: hearing.clone(),
            stand: (group.len() > 1).then(|| store.stand()),
            absent: Vec::new(),
        };
        let mut outcome = supervise(
            &mut group,
            settings.grace,
            Family::Descendants(guard.spared()),
            &channel.sender,
            &channel.notices,
            &mut witness,
        );
        guard.disarm();
        if let Some(Cause::Failure(culprit)) = outcome.cause() {
            let speakers: Vec<usize> = (0..group.len())
                .filter(|&rank| rank != culprit && outcome.ended_by_itself(rank))
                .filter(|&rank| matches!(outcome.end(rank), Some(End::Code(1..))))
                .collect();
            wait_until(STATEMENTS, || {
                speakers.iter().all(|&rank| hearing.has_spoken(rank))
            });
        }
        let asked = output.drain(readers, outcome.drained, &channel.notices);
        outcome.asked_to_end = outcome.asked_to_end.or(asked);
        Ok(Ended::Ran(Box::new(Finished {
            outcome,
            pids,
            output,
            hearing,
            settings,
        })))
    }
}

/// Tells the store how ranks end, and the user for whom the launcher waits.
#[derive(Debug)]
struct Teller {
    output: Output,
    hearing: Hearing,
    /// Where there are others to tell.
    stand: Option<Stand>,
    /// Ranks that ended well before any had joined: none of the others may want to.
    absent: Vec<usize>,
}

impl Witness for Teller {
    fn ended(&mut self, rank: usize, end: End, doing: Doing) {
        let Some(stand) = self.stand.clone().filter(|_| doing == Doing::Own) else {
            return;
        };
        if let End::Signal(_) = end {
            return stand.testify(rank, format!("it was {end}"));
        }
        let is_inside = self.hearing.is_inside(rank);
        if end == End::Code(0) && !is_inside {
            if self.hearing.has_anybody_joined() {
                stand.testify(rank, format!("it ended with {end}"));
            } else {
                self.absent.push(rank);
            }
            return;
        }
        // What it said last, or that it left in good order, can still be on its way.
        let (output, hearing) = (self.output.clone(), self.hearing.clone());
        let wait = move || match end {
            End::Code(0) => {
                if !wait_until(FAREWELL, || !hearing.is_inside(rank)) {
                    stand.testify(rank, format!("it ended with {end}"));
                }
            }
            _ => {
                wait_until(LAST_WORDS, || output.has_said_all(rank));
                let words = output.last_words(rank);
                stand.testify(
                    rank,
                    match words.is_empty() {
                        true => format!("it ended with {end}"),
                        false => {
                            format!("it ended with {end}; its last words: {}", words.join(" / "))
                        }
                    },
                );
            }
        };
        let _ = thread::Builder::new().name("testimony".into()).spawn(wait);
    }

    fn joined(&mut self, _rank: usize) {
        for rank in std::mem::take(&mut self.absent) {
            if let Some(stand) = &self.stand {
                stand.testify(rank, format!("it ended with {}", End::Code(0)));
            }
        }
    }

    fn waiting(&mut self, ranks: &[usize]) {
        // The terminal may be stopped, and the main thread must not wait for it.
        let output = self.output.clone();
        let text = format!("waiting for {} to end", list(ranks));
        let _ = thread::Builder::new().spawn(move || output.note(&text));
    }
}

/// Whether `is_so` within `limit`.
fn wait_until(limit: Duration, is_so: impl Fn() -> bool) -> bool {
    let until = Instant::now() + limit;
    while !is_so() {
        if Instant::now() >= until {
            return false;
        }
        thread::sleep(Duration::from_millis(2));
    }
    true
}

/// The error of a launcher that was told to end while it starts ranks: there may be thousands.
fn interrupted(channel: &Channel) -> Result<()> {
    match channel.notices.try_recv() {
        Ok(Notice::Signal(signal)) if signals::asks_to_end(signal) => {
            Err(Error::interrupted(signal))
        }
        Ok(notice) => {
            // Kept for when all run. It can be sent, since the receiver is here.
            let _ = channel.sender.send(notice);
            Ok(())
        }
        Err(_) => Ok(()),
    }
}

fn start(
    rank: usize,
    program: &Path,
    arguments: &[OsString],
    environment: &Environment,
) -> Result<Process> {
    let mut command = Command::new(program);
    command
        .args(arguments)
        .stdin(stdin_of(rank))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    environment.apply(rank, &mut command);
    Process::spawn(&mut command).map_err(|error| {
        let shown = program.display();
        if error.raw_os_error() == Some(rustix::io::Errno::NOEXEC.raw_os_error()) {
            Error::usage(format!(
                "{shown} is neither a program for this machine nor a script that begins with `#!` and its interpreter"
            ))
        } else if error.kind() == ErrorKind::NotFound && !program.exists() {
            Error::usage(format!("{shown} is gone"))
        } else if error.kind() == ErrorKind::NotFound {
            Error::usage(format!(
                "{shown} cannot be run: the interpreter that its first line names is missing"
            ))
        } else {
            Error::system(format!("rank {rank} could not be started from {shown}"))
        }
        .with_source(error)
    })
}

/// Rank 0 reads what is piped to the launcher. A terminal is left alone: the ranks are not
/// in its foreground, and the kernel would stop one that reads from it.
fn stdin_of(rank: usize) -> Stdio {
    if rank == 0 && !io::stdin().is_terminal() {
        Stdio::inherit()
    } else {
        Stdio::null()
    }
}

/// Starts the readers of all streams and returns how many they are.
fn read_output(group: &mut [Process], output: &Output) -> Result<usize> {
    let mut readers = 0;
    for (rank, process) in group.iter_mut().enumerate() {
        let pipes = [
            (Stream::Out, process.take_stdout()),
            (Stream::Err, process.take_stderr()),
        ];
        for (stream, pipe) in pipes {
            if let Some(pipe) = pipe {
                output.read(rank, stream, pipe)?;
                readers += 1;
            }
        }
    }
    Ok(readers)
}
