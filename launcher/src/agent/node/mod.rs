//! The launcher of a host other than host 0: joins the job, and runs the ranks there in each attempt, as the head says.

mod connection;

use std::cell::Cell;
use std::collections::VecDeque;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use accelerator_host::machine::host_name;
use accelerator_host::sync::Mutex;
use rustix::process::Signal;
use signal_hook::consts::signal::{SIGKILL, SIGTERM};

use super::line::{HostInfo, Line, LineEnd, Plan, SignalScope, ToHead, ToHost};
use super::stream_line::StreamLine;
use crate::error::{Error, Result, START_AGAIN, chain, ended_by};
use crate::event::{Channel, Event};
use crate::output::{self, Stream};
use crate::process::{End, RankProcess};
use crate::report::{self, FailureRecord, JobOutcome, KnownRank, LostHead};
use crate::settings::nodes::HostPlace;
use crate::settings::options::Options;
use crate::settings::rank_env::RankEnv;
use crate::settings::{Settings, variable};
use crate::supervisor::group::{forward, stop_if_suspended, watch};
use crate::supervisor::leftovers::{KillScope, Remains, end_group};
use crate::supervisor::shim::{self, KillOnDrop};
use crate::supervisor::signals::{Relay, is_job_control};
use crate::supervisor::spawner::{Program, Spawner};
use crate::supervisor::store::{given_token, token_of_hosts};
use crate::text::{note, utc};
use crate::variables;
use connection::Connection;

/// The number of requests to end after which the launcher does so without the head.
const MAX_REQUESTS: u32 = 3;

/// A host other than host 0.
#[derive(Debug)]
pub(crate) struct Node<'a> {
    /// Its place.
    pub(crate) place: HostPlace,
    /// The user's options.
    pub(crate) options: &'a Options,
    pub(crate) settings: Settings,
    /// The launcher's own command line.
    pub(crate) command: &'a [OsString],
    /// The source of signals.
    pub(crate) relay: Relay,
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
        let token = token_of_hosts()?;
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
                    "this host has left the job, which continues without it. Exit code {START_AGAIN}: start this launcher \
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
        let until = Instant::now() + variables::liveness();
        while self.inbox.take().is_none() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        Err(error)
    }

    /// Takes in a message of the head while no attempt is under way.
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

    /// Writes a report of the failure as this host knows it.
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
        report::write(&folder, &[record], &[], JobOutcome::Failed, None).map_err(unwritable)?;
        output::point_latest(&folder).map_err(unwritable)?;
        Ok(folder.join(report::FILE))
    }
}

/// The time for which ranks may outlive SIGKILL.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);

/// The head's request at the end of an attempt.
#[derive(Clone, Copy, Debug)]
struct Sweep {
    first: Signal,
    grace: Duration,
}

/// The ranks of this host.
struct LocalRanks<'a> {
    agent: &'a Agent<'a>,
    restart: u64,
    first_rank: usize,
    known: &'a mut Vec<KnownRank>,
    /// The processes by local rank.
    group: Vec<Box<dyn RankProcess>>,
}

impl Agent<'_> {
    /// Runs the ranks of an attempt until the head ends it, or the job is over.
    ///
    /// # Errors
    /// When the system gives no threads, or this launcher was asked to end again and again.
    fn attempt(
        &self,
        plan: Plan,
        program: &Program,
        channel: &Channel,
        last: &mut KnownAttempt,
    ) -> Result<Option<Over>> {
        let settings = self.settings(&plan);
        let package_dir = program.package_dir.as_deref();
        let token = given_token()?.and_then(|given| given.file);
        let environment = RankEnv::new(&settings, plan.store_port, token, package_dir);
        let restart = plan.restart;
        last.plan = Some(plan);
        last.ranks.clear();
        let mut ranks = LocalRanks {
            agent: self,
            restart,
            first_rank: environment.ranks().start,
            known: &mut last.ranks,
            group: Vec::with_capacity(environment.ranks().len()),
        };
        // Dropped before the ranks, it kills all at once, and not one after the other.
        let guard = KillOnDrop::new();
        ranks.start(program, &environment, channel)?;
        stop_if_suspended(&ranks.group);
        let sweep = match ranks.run(channel)? {
            Ok(sweep) => sweep,
            Err(over) => return Ok(Some(over)),
        };
        let asked = ranks.sweep(sweep, KillScope::Descendants(guard.excluded()), channel);
        guard.disarm();
        if let Some(signal) = asked {
            self.ask(signal)?;
        }
        Ok(None)
    }

    /// This host's own settings, and those that hold for all hosts.
    fn settings(&self, plan: &Plan) -> Settings {
        let settings = self.node.settings.clone();
        let settings = settings.on_host(plan.host, plan.layout.clone(), plan.store_host.clone());
        Settings {
            restart: plan.restart,
            max_restarts: plan.max_restarts,
            job: plan.job.clone(),
            elastic: plan.elastic,
            survivors: plan.survivors,
            ..settings
        }
    }
}

impl LocalRanks<'_> {
    fn start(&mut self, program: &Program, environment: &RankEnv, channel: &Channel) -> Result<()> {
        let (line, restart) = (&self.agent.line, self.restart);
        for rank in environment.ranks() {
            let mut process = match program.spawner.spawn(rank, environment) {
                Ok(process) => process,
                Err(error) => {
                    // The head ends those before it.
                    line.send(&ToHead::NotStarted {
                        restart,
                        rank,
                        text: chain(&error),
                        is_usage: error.is_usage(),
                    });
                    return Ok(());
                }
            };
            let pid = process.pid();
            line.send(&ToHead::Started { restart, rank, pid });
            self.known.push(KnownRank {
                rank,
                pid,
                end: None,
            });
            let streams = [
                (Stream::Out, process.take_stdout()),
                (Stream::Err, process.take_stderr()),
            ];
            watch(rank, &*process, &channel.sender);
            self.group.push(process);
            for (stream, pipe) in streams {
                if let Some(pipe) = pipe {
                    self.agent.outputs[stream as usize].send(restart, rank, pipe)?;
                }
            }
        }
        Ok(())
    }

    /// Does as the head says until it ends the attempt, or the job is over.
    fn run(&mut self, channel: &Channel) -> Result<std::result::Result<Sweep, Over>> {
        loop {
            while let Some(inbound) = self.agent.inbox.take() {
                match inbound {
                    Inbound::Message(ToHost::Signal {
                        restart,
                        rank,
                        signal,
                        scope,
                    }) if restart == self.restart => self.signal(rank, signal, scope),
                    Inbound::Message(ToHost::EndAttempt {
                        restart,
                        first,
                        grace,
                    }) if restart == self.restart => {
                        let first = Signal::from_named_raw(first).unwrap_or(Signal::KILL);
                        return Ok(Ok(Sweep { first, grace }));
                    }
                    other => {
                        if let Some(over) = self.agent.between_attempts(other) {
                            return Ok(Err(over));
                        }
                    }
                }
            }
            match channel.next(None) {
                Event::Ended { rank, end } => self.ended(rank, end),
                Event::Signal(signal) => self.agent.ask(signal)?,
                Event::ForwardSignal(number) => {
                    self.group
                        .iter()
                        .for_each(|process| forward(&**process, number));
                    if !is_job_control(number) {
                        self.agent.line.send(&ToHead::Forwarded);
                    }
                }
                _ => {}
            }
        }
    }

    /// Ends the processes that still run; returns the first signal that asked this launcher to end meanwhile.
    fn sweep(mut self, sweep: Sweep, scope: KillScope<'_>, channel: &Channel) -> Option<i32> {
        let running = self.known.iter().zip(&self.group);
        let running = running.filter(|(known, _)| known.end.is_none());
        running.for_each(|(_, process)| end_group(&**process, Signal::KILL));
        let until = Instant::now() + KILL_TIMEOUT;
        let mut asked = None;
        while self.known.iter().any(|known| known.end.is_none()) && Instant::now() < until {
            match channel.next(Some(until)) {
                Event::Ended { rank, end } => self.ended(rank, end),
                Event::Signal(signal) => asked = asked.or(Some(signal)),
                _ => {}
            }
        }
        let remains = Remains {
            first_rank: self.first_rank,
            has_ended: self.known.iter().map(|known| known.end.is_some()).collect(),
        };
        let left_behind = remains.left_behind(&self.group, scope);
        let Sweep { first, grace } = sweep;
        let inbox = &self.agent.inbox;
        let swept = inbox.during(Work::Sweep, || {
            remains.sweep(&mut self.group, first, grace, scope, channel)
        });
        self.agent.line.send(&ToHead::Swept {
            restart: self.restart,
            left_behind,
        });
        asked.or(swept.asked_to_end)
    }

    fn ended(&mut self, rank: usize, end: End) {
        // If the shim was killed, this launcher kills the ranks and ends with them: the host is lost.
        if shim::is_over() {
            return;
        }
        let at = rank.checked_sub(self.first_rank);
        if let Some(known) = at.and_then(|at| self.known.get_mut(at)) {
            known.end = Some(end);
            self.agent.line.send(&ToHead::Ended {
                restart: self.restart,
                rank,
                end,
            });
        }
    }

    fn signal(&self, rank: usize, signal: i32, scope: SignalScope) {
        let at = rank.checked_sub(self.first_rank);
        let process = at.and_then(|at| self.group.get(at));
        if let (Some(process), Some(signal)) = (process, Signal::from_named_raw(signal)) {
            match scope {
                SignalScope::Process => process.signal(signal),
                SignalScope::Group => process.signal_group(signal),
            }
        }
    }
}

/// The signal that stands for a message of the head while the main thread awaits only signals; no process receives it.
const HURRY: i32 = SIGKILL;

/// An event on the connection to the head.
#[derive(Debug)]
enum Inbound {
    /// It says something.
    Message(ToHost),
    /// The connection has ended.
    End(LineEnd),
}

impl From<std::result::Result<ToHost, LineEnd>> for Inbound {
    fn from(received: std::result::Result<ToHost, LineEnd>) -> Self {
        received.map_or_else(Self::End, Self::Message)
    }
}

/// Work of the main thread in which it looks at no messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    /// It waits for cargo, which a signal ends.
    Build,
    /// It waits for leftover processes, which a signal has killed.
    Sweep,
}

/// The queue of events from the head. Clones share it.
#[derive(Clone, Debug)]
struct Inbox {
    state: Arc<Mutex<InboxState>>,
    relay: Relay,
}

#[derive(Debug, Default)]
struct InboxState {
    inbound: VecDeque<Inbound>,
    work: Option<Work>,
}

impl Inbox {
    /// An empty one, which wakes the main thread by `relay`.
    fn new(relay: Relay) -> Self {
        Self {
            state: Arc::default(),
            relay,
        }
    }

    /// Adds an event.
    fn put(&self, inbound: Inbound) {
        let mut state = self.state.lock();
        let event = match (state.work, &inbound) {
            (
                Some(Work::Build),
                Inbound::End(_) | Inbound::Message(ToHost::JobOver { .. } | ToHost::Left),
            ) => Event::Signal(SIGTERM),
            (Some(Work::Sweep), _) => Event::Signal(HURRY),
            _ => Event::Message,
        };
        state.inbound.push_back(inbound);
        drop(state);
        self.relay.send(event);
    }

    /// Removes and returns the oldest event.
    fn take(&self) -> Option<Inbound> {
        self.state.lock().inbound.pop_front()
    }

    /// Does `work`, whose wait a message of the head ends.
    fn during<T>(&self, work: Work, body: impl FnOnce() -> T) -> T {
        self.state.lock().work = Some(work);
        let done = body();
        self.state.lock().work = None;
        done
    }
}
