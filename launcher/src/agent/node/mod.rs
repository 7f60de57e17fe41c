//! The launcher of a host other than host 0: starts the ranks there, as the head says.

mod attempt;
mod connection;
mod inbox;

use std::cell::Cell;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime};

use accelerator_host::machine::host_name;

use super::line::{Line, LineEnd};
use super::message::{HostInfo, Plan, ToHead, ToHost};
use super::stream_line::StreamLine;
use super::trust;
use crate::error::{Error, Result, START_AGAIN, chain, ended_by};
use crate::event::{Channel, Event};
use crate::output;
use crate::report::{self, FailureRecord, JobOutcome, KnownRank, LostHead};
use crate::settings::nodes::HostPlace;
use crate::settings::options::Options;
use crate::settings::{Settings, variable};
use crate::supervisor::signals::Relay;
use crate::supervisor::spawner::LocalSpawner;
use crate::text::{note, utc};
use connection::Connection;
use inbox::{HURRY, Inbound, Inbox, Work};

/// The number of requests to end after which the launcher does so without the head.
const MAX_REQUESTS: u32 = 3;

/// A host other than host 0.
#[derive(Debug)]
pub(crate) struct Node<'a> {
    /// Its place.
    pub(crate) place: HostPlace,
    /// The user's options.
    pub(crate) options: &'a Options,
    /// The settings of this host.
    pub(crate) settings: Settings,
    /// The launcher's own command line.
    pub(crate) command: &'a [OsString],
    /// The source of signals.
    pub(crate) relay: Relay,
}

/// The program that the ranks of this host run.
#[derive(Debug)]
pub(crate) struct Program {
    /// Starts it.
    pub(crate) spawner: LocalSpawner,
    /// The folder of its package, if cargo built it.
    pub(crate) package_dir: Option<PathBuf>,
}

impl Node<'_> {
    /// Joins the job, and does as the head says until the job is over: gives its exit code.
    ///
    /// `build` makes the program; it is called when the head has admitted this host.
    ///
    /// # Errors
    /// When the head cannot be reached or does not admit this host, when `build` fails, or the head is lost. Nothing of
    /// the job runs on this host then.
    pub(crate) fn run(
        &self,
        channel: Channel,
        build: impl FnOnce(&Channel) -> Result<Program>,
    ) -> Result<ExitCode> {
        let info = HostInfo {
            name: host_name(),
            pid: std::process::id(),
            ranks: self.settings.ranks.get(),
            job: variable(accelerator_host::JOB.name).filter(|job| !job.is_empty()),
            max_restarts: self.options.max_restarts,
        };
        let token = trust::token()?;
        let connection = Connection::open(&self.place, token, info, &self.relay, &channel)?;
        let head = format!("host 0 ({}, {})", connection.name, connection.address);
        if !self.options.quiet {
            let HostPlace { hosts, host, .. } = self.place;
            note(&format!("this is host {host} of {hosts}; joined {head}"));
        }
        let inbox = Inbox::new(self.relay.clone());
        let (line, start) = Line::new(connection.messages)?;
        let receiver = inbox.clone();
        start.run(connection.liveness, move |message| {
            receiver.put(message.into())
        })?;
        let built = inbox.during(Work::Build, || build(&channel));
        let agent = Agent {
            node: self,
            head,
            head_name: connection.name,
            line,
            outputs: connection.outputs.map(StreamLine::new),
            inbox,
            requests: Cell::new(0),
        };
        match built {
            Ok(program) => agent.serve(channel, &program),
            Err(error) => agent.give_up(error),
        }
    }
}

/// A host that has joined the job.
struct Agent<'a> {
    node: &'a Node<'a>,
    /// The head: "host 0 (a, 10.0.0.1)".
    head: String,
    /// The name of its host.
    head_name: String,
    line: Line,
    outputs: [StreamLine; 2],
    inbox: Inbox,
    /// The number of times that this launcher was asked to end.
    requests: Cell<u32>,
}

/// The last attempt that has begun here.
#[derive(Debug, Default)]
struct KnownAttempt {
    plan: Option<Plan>,
    ranks: Vec<KnownRank>,
}

/// The reason for which the work for a job ends.
#[derive(Debug)]
enum Over {
    /// The head has said so.
    Job { code: u8, text: Option<String> },
    /// The head is lost.
    Head(LineEnd),
    /// The job continues without this host.
    Left,
}

impl Agent<'_> {
    fn serve(&self, mut channel: Channel, program: &Program) -> Result<ExitCode> {
        self.line.send(&ToHead::Ready);
        let mut last = KnownAttempt::default();
        loop {
            let over = match self.inbox.take() {
                Some(Inbound::Message(ToHost::StartAttempt(plan))) => {
                    let old = std::mem::replace(&mut channel, Channel::new());
                    self.node.relay.redirect(channel.sender.clone());
                    for event in old.events.try_iter() {
                        if let Event::Signal(signal) = event {
                            self.ask(signal)?;
                        }
                    }
                    self.attempt(plan, program, &channel, &mut last)?
                }
                Some(inbound) => self.between_attempts(inbound),
                None => {
                    if let Event::Signal(signal) = channel.next(None) {
                        self.ask(signal)?;
                    }
                    None
                }
            };
            if let Some(over) = over {
                return self.conclude(over, &last);
            }
        }
    }

    /// Ends this launcher with the exit code of the job, or for the loss of the head.
    fn conclude(&self, over: Over, last: &KnownAttempt) -> Result<ExitCode> {
        match over {
            Over::Job { code, text } => {
                if code != 0 {
                    let text = text.map(|text| format!(": {text}")).unwrap_or_default();
                    note(&format!("the job ended with exit code {code}{text}"));
                }
                Ok(ExitCode::from(code))
            }
            Over::Head(end) => Err(self.head_lost(&end, last)),
            Over::Left => {
                note(&format!(
                    "this host has left the job, which goes on without it. Exit code {START_AGAIN}: start this launcher \
                     again, and it joins again"
                ));
                Ok(ExitCode::from(START_AGAIN))
            }
        }
    }

    /// The program cannot be built.
    fn give_up(&self, error: Error) -> Result<ExitCode> {
        // The head may be why.
        let mut inbound = std::iter::from_fn(|| self.inbox.take());
        if let Some(over) = inbound.find_map(|inbound| self.between_attempts(inbound)) {
            return self.conclude(over, &KnownAttempt::default());
        }
        let (code, text) = (error.code(), chain(&error));
        self.line.send(&ToHead::Failed { code, text });
        // The head answers that the job is over.
        let until = Instant::now() + trust::liveness();
        while self.inbox.take().is_none() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        Err(error)
    }

    /// Takes in what comes while no attempt is under way.
    fn between_attempts(&self, inbound: Inbound) -> Option<Over> {
        match inbound {
            Inbound::Message(ToHost::JobOver { code, text }) => Some(Over::Job { code, text }),
            Inbound::Message(ToHost::Left) => Some(Over::Left),
            Inbound::End(end) => Some(Over::Head(end)),
            // Of an attempt that is over, or a second one to end it.
            Inbound::Message(_) => None,
        }
    }

    /// A signal asks this launcher to end: the head decides for all hosts.
    ///
    /// # Errors
    /// When it was asked so often that it does not wait for the head any more.
    fn ask(&self, signal: i32) -> Result<()> {
        if signal == HURRY {
            return Ok(());
        }
        self.requests.set(self.requests.get() + 1);
        if self.requests.get() >= MAX_REQUESTS {
            return Err(ended_by(signal, "without waiting for host 0"));
        }
        self.line.send(&ToHead::Asked { signal });
        Ok(())
    }

    /// The error of a host whose head is lost. The ranks of this host have been ended.
    fn head_lost(&self, end: &LineEnd, last: &KnownAttempt) -> Error {
        let at = utc(SystemTime::now());
        let text = format!("{} was lost at {at}: {end}", self.head);
        let mut said = format!(
            "{text}; every process of the job on this host has been ended. Exit code {START_AGAIN}: start this launcher \
             again, and it joins the job when host 0 is there again"
        );
        if let Some(logs) = &self.node.settings.log_dir {
            match self.report(logs, &text, last) {
                Ok(path) => said.push_str(&format!("\n  this report: {}", path.display())),
                Err(error) => note(&format!("the report cannot be written: {error}")),
            }
        }
        Error::unreachable(said)
    }

    /// Writes what this host knows of the failure.
    fn report(&self, logs: &Path, text: &str, last: &KnownAttempt) -> Result<PathBuf> {
        let folder = output::create_run_folder(logs)?;
        let unwritable = |error| Error::system(folder.display().to_string()).with_source(error);
        let plan = last.plan.as_ref();
        let record = FailureRecord::of_lost_head(
            &LostHead {
                host: &self.head_name,
                loss: text,
                world_size: plan.map_or(0, |plan| plan.layout.ranks()),
                job: plan.map_or("", |plan| &plan.job),
                restarts: plan.map_or(0, |plan| plan.restart),
                ranks: &last.ranks,
            },
            self.node.command,
        );
        report::write(&folder, &[record], JobOutcome::Failed, None).map_err(unwritable)?;
        output::point_latest(&folder).map_err(unwritable)?;
        Ok(folder.join(report::FILE))
    }
}
