//! Another host as the head sees it, and its ranks.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::net::{IpAddr, Shutdown, TcpStream};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use accelerator_host::sync::{Condvar, Mutex};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::Signal;

use super::line::{HostInfo, Line, Plan, SignalScope, ToHead, ToHost};
use crate::error::{Error, Result};
use crate::event::Event;
use crate::output::Stream;
use crate::process::{End, RankProcess};
use crate::supervisor::leftovers::LeftBehind;
use crate::supervisor::signals::Relay;
use crate::text::{note, span, utc};

/// The time for which the job first does without a host whose ranks failed when they were taken in.
const POSTPONE: Duration = Duration::from_secs(60);

/// The time that a host may take to start its ranks: a folder on a network can delay it.
const START_TIMEOUT: Duration = Duration::from_secs(120);

/// The time by which the end of a connection for messages may lag behind that of one for output.
const OUTPUT_LAG: Duration = Duration::from_millis(500);

/// A host whose launcher has been admitted. It is lost for good when its connection ends: a launcher that comes again is
/// another one.
#[derive(Debug)]
pub(super) struct Host {
    /// The number of the host.
    pub(super) number: usize,
    /// The description that its launcher sent.
    pub(super) info: HostInfo,
    /// The address that it comes from.
    pub(super) address: IpAddr,
    /// The address of this host as it reaches it.
    pub(super) head_address: IpAddr,
    /// The number of its connection for messages.
    pub(super) session: u64,
    line: Line,
    relay: Relay,
    leave_policy: LeavePolicy,
    state: Mutex<HostState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct HostState {
    restart: Option<u64>,
    /// The ranks by the numbers with which they were started.
    ranks: BTreeMap<usize, RankState>,
    /// The numbers of its ranks now.
    numbers: Option<Range<usize>>,
    outputs: [Option<TcpStream>; 2],
    is_ready: bool,
    /// The reason for which its ranks can never be started.
    failure: Option<Error>,
    swept: Option<LeftBehind>,
    /// The reason for which it was lost.
    loss: Option<String>,
    /// Set once the head has told this host that the job is over or continues without it.
    is_over: bool,
    /// The signal that asked its launcher to end, if the job may continue without it.
    leaves: Option<i32>,
    /// Set once it has ended the job.
    has_ended_job: bool,
    /// The number of times that its ranks failed when they were taken in.
    failed_joins: u32,
    not_before: Option<Instant>,
    /// The time since which the job continues without it.
    left_at: Option<Instant>,
}

/// A rank of the current attempt.
#[derive(Debug, Default)]
struct RankState {
    pid: Option<i32>,
    not_started: Option<(String, bool)>,
    end: Option<End>,
    /// Read by the attempt.
    readers: [Option<File>; 2],
    /// Filled with the output that comes from the host.
    pipes: [Option<Arc<File>>; 2],
}

/// The effect on the job of a signal that asks the launcher of one host to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LeavePolicy {
    /// It ends, on all hosts.
    WithJob,
    /// It may continue without that host.
    Alone,
}

/// The state of a host, as far as the head depends on it.
#[derive(Clone, Debug)]
pub(super) enum HostStatus {
    /// Nothing.
    Ready,
    /// Its launcher builds the program.
    Preparing,
    /// It is lost.
    Lost,
    /// Its ranks can never be started.
    Failed(Error),
}

impl Host {
    /// A host at the other end of `line`.
    pub(super) fn new(
        number: usize,
        info: HostInfo,
        [address, head_address]: [IpAddr; 2],
        session: u64,
        line: Line,
        relay: Relay,
        leave_policy: LeavePolicy,
    ) -> Self {
        Self {
            number,
            info,
            address,
            head_address,
            session,
            line,
            relay,
            leave_policy,
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// "host 1 (b, 10.0.0.2)".
    pub(super) fn shown(&self) -> String {
        let Self { number, info, .. } = self;
        format!("host {number} ({}, {})", info.name, self.address)
    }

    /// Takes in a message of the host.
    pub(super) fn receive(&self, message: ToHead) {
        let mut state = self.state.lock();
        let now = state.restart;
        match message {
            ToHead::Ready => state.is_ready = true,
            ToHead::Failed { code, text } => {
                let error = Error::of_code(code, format!("{}: {text}", self.shown()));
                state.failure = Some(error);
            }
            ToHead::Started { restart, rank, pid } if now == Some(restart) => {
                if let Some(rank) = state.ranks.get_mut(&rank) {
                    rank.pid = Some(pid);
                }
            }
            ToHead::NotStarted {
                restart,
                rank,
                text,
                is_usage,
            } if now == Some(restart) => {
                if let Some(rank) = state.ranks.get_mut(&rank) {
                    rank.not_started = Some((text, is_usage));
                }
            }
            ToHead::Ended { restart, rank, end } if now == Some(restart) => {
                if let Some(rank) = state.ranks.get_mut(&rank) {
                    rank.end.get_or_insert(end);
                }
            }
            ToHead::Swept {
                restart,
                left_behind,
            } if now == Some(restart) => {
                state.swept = Some(left_behind);
            }
            ToHead::Asked { signal } => {
                let alone = self.leave_policy == LeavePolicy::Alone;
                let is_second = state.leaves.is_some() && !state.has_ended_job;
                if alone {
                    state.leaves.get_or_insert(signal);
                }
                drop(state);
                if alone && is_second {
                    return self
                        .lose("its launcher was asked to end again, before its ranks had left");
                }
                let name = signal_hook::low_level::signal_name(signal).unwrap_or("a signal");
                note(&format!("{} received {name}", self.shown()));
                return match alone {
                    true => self.tell(),
                    false => self.relay.deliver_from(self.number, signal),
                };
            }
            ToHead::Forwarded => {
                drop(state);
                return self.relay.send(Event::ForwardedElsewhere);
            }
            // Of an attempt that is over.
            _ => {}
        }
        drop(state);
        self.tell();
    }

    /// The host is lost, and its ranks with it.
    pub(super) fn lose(&self, why: &str) {
        self.line.cut();
        let mut state = self.state.lock();
        if state.loss.is_some() || state.is_over {
            state.loss.get_or_insert_default();
            state.outputs = [None, None];
            drop(state);
            return self.tell();
        }
        let ranks = match &state.numbers {
            Some(ranks) if !ranks.is_empty() => format!(", {}", span(ranks)),
            _ => String::new(),
        };
        let Self { number, info, .. } = self;
        let (name, address) = (&info.name, self.address);
        let at = utc(SystemTime::now());
        let text = format!("host {number} ({name}, {address}{ranks}) was lost at {at}: {why}");
        let is_running = state.ranks.values().any(|rank| rank.end.is_none());
        for rank in state.ranks.values_mut() {
            rank.end.get_or_insert(End::Lost);
            rank.pipes = [None, None];
        }
        for stream in std::mem::take(&mut state.outputs).iter().flatten() {
            let _ = stream.shutdown(Shutdown::Both);
        }
        state.loss = Some(text.clone());
        drop(state);
        if !is_running {
            // Otherwise the report of the failure says so.
            note(&text);
        }
        self.tell();
    }

    /// A connection for output has ended. The one for messages, which ends with it, knows better why.
    pub(super) fn lose_output(&self, why: &str) {
        let state = self.state.lock();
        let is_there = |state: &mut HostState| state.loss.is_none();
        let waited = self.changed.wait_timeout_while(state, OUTPUT_LAG, is_there);
        drop(waited);
        self.lose(why);
    }

    /// Returns the state of the host, as far as the head depends on it.
    pub(super) fn status(&self) -> HostStatus {
        let state = self.state.lock();
        match &state.failure {
            _ if state.loss.is_some() => HostStatus::Lost,
            Some(error) => HostStatus::Failed(error.clone()),
            None if state.is_ready && state.outputs.iter().all(Option::is_some) => {
                HostStatus::Ready
            }
            None => HostStatus::Preparing,
        }
    }

    /// Takes over the connection for a stream of its output; [`forward`](Self::forward) passes its bytes on.
    pub(super) fn add_output(&self, stream: Stream, connection: TcpStream) {
        self.state.lock().outputs[stream as usize] = Some(connection);
        self.tell();
    }

    /// Makes the pipes of the host's ranks, and has them started.
    pub(super) fn begin(&self, plan: Plan) -> Result<()> {
        let mut ranks = BTreeMap::new();
        for rank in plan.layout.ranks_of(plan.host) {
            let mut state = RankState::default();
            for stream in [Stream::Out, Stream::Err] {
                let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).map_err(|error| {
                    let text = format!("no pipe can be made for the output of rank {rank}");
                    Error::system(text).with_source(error)
                })?;
                state.readers[stream as usize] = Some(File::from(reader));
                state.pipes[stream as usize] = Some(Arc::new(File::from(writer)));
            }
            ranks.insert(rank, state);
        }
        let mut state = self.state.lock();
        state.ranks = ranks;
        state.numbers = Some(plan.layout.ranks_of(plan.host));
        state.restart = Some(plan.restart);
        state.swept = None;
        if state.loss.is_some() {
            for rank in state.ranks.values_mut() {
                rank.end = Some(End::Lost);
                rank.pipes = [None, None];
            }
        }
        drop(state);
        self.line.send(&ToHost::StartAttempt(plan));
        Ok(())
    }

    /// The process of `rank`, once the host has told that it was started.
    ///
    /// # Errors
    /// When it could not be started, or the host does not tell.
    pub(super) fn started(self: &Arc<Self>, rank: usize) -> Result<Box<dyn RankProcess>> {
        let until = Instant::now() + START_TIMEOUT;
        let mut state = self.state.lock();
        loop {
            let restart = state.restart.unwrap_or_default();
            let is_lost = state.loss.is_some();
            let Some(known) = state.ranks.get_mut(&rank) else {
                let text = format!("rank {rank} is none of {}", self.shown());
                return Err(Error::system(text));
            };
            if let Some((text, is_usage)) = &known.not_started {
                let text = format!("{}: {text}", self.shown());
                return Err(match is_usage {
                    true => Error::usage(text),
                    false => Error::system(text),
                });
            }
            if known.pid.is_some() || is_lost {
                return Ok(Box::new(RemoteProcess {
                    host: Arc::clone(self),
                    restart,
                    rank,
                    pid: known.pid.unwrap_or(0),
                    output: std::mem::take(&mut known.readers),
                    is_over: false,
                }));
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::system(format!(
                    "{} did not start rank {rank} within {} s",
                    self.shown(),
                    START_TIMEOUT.as_secs()
                )));
            }
            state = self.changed.wait_timeout(state, left);
        }
    }

    /// Tells the host to end its part of the attempt.
    pub(super) fn end(&self, first: Signal, grace: Duration) {
        let restart = self.state.lock().restart;
        if let Some(restart) = restart {
            let first = first.as_raw();
            self.line.send(&ToHost::EndAttempt {
                restart,
                first,
                grace,
            });
        }
    }

    /// Returns the processes left behind once the host has reported them; an empty set if it is lost or has no attempt.
    pub(super) fn swept(&self) -> Option<LeftBehind> {
        let state = self.state.lock();
        match &state.swept {
            Some(left_behind) => Some(left_behind.clone()),
            None if state.loss.is_some() || state.restart.is_none() => Some(LeftBehind::default()),
            None => None,
        }
    }

    /// Tells the host that the job is over.
    pub(super) fn finish(&self, code: u8, text: Option<String>) {
        self.state.lock().is_over = true;
        self.line.send(&ToHost::JobOver { code, text });
        self.line.finish();
    }

    /// The signal that asked its launcher to end, if the job may continue without it.
    pub(super) fn leaves(&self) -> Option<i32> {
        self.state.lock().leaves
    }

    /// Its ranks have these numbers from now on.
    pub(super) fn renumber(&self, ranks: Range<usize>) {
        self.state.lock().numbers = Some(ranks);
    }

    /// A rank of it has failed while the job took it in, or soon after: the job does without it for a while, twice as long
    /// each time.
    pub(super) fn postpone(&self) {
        let mut state = self.state.lock();
        let doublings = state.failed_joins.min(10);
        state.failed_joins += 1;
        state.not_before = Some(Instant::now() + POSTPONE * (1 << doublings));
    }

    /// Returns the end of the time for which the job does without it.
    pub(super) fn postponed_until(&self) -> Option<Instant> {
        self.state
            .lock()
            .not_before
            .filter(|at| *at > Instant::now())
    }

    /// Checks if no part of an attempt runs there.
    pub(super) fn is_idle(&self) -> bool {
        let state = self.state.lock();
        state.restart.is_none() || state.swept.is_some()
    }

    /// Checks if all of its ranks have ended.
    pub(super) fn has_ended(&self) -> bool {
        let state = self.state.lock();
        state.ranks.values().all(|rank| rank.end.is_some())
    }

    /// Ends the job if its launcher was asked to end: the job does not continue without it.
    pub(super) fn end_job(&self) {
        let mut state = self.state.lock();
        if let Some(signal) = state.leaves.filter(|_| !state.has_ended_job) {
            state.has_ended_job = true;
            drop(state);
            self.relay.deliver_from(self.number, signal);
        }
    }

    /// Records that the job continues without its ranks, which are about to end.
    pub(super) fn has_left(&self) {
        self.state.lock().left_at = Some(Instant::now());
    }

    /// Returns the time at which its ranks will have had `grace` to end by themselves.
    pub(super) fn overstays_at(&self, grace: Duration) -> Option<Instant> {
        self.state.lock().left_at.map(|at| at + grace)
    }

    /// Checks if its ranks have had `grace` to end by themselves.
    pub(super) fn has_overstayed(&self, grace: Duration) -> bool {
        self.overstays_at(grace)
            .is_some_and(|at| Instant::now() >= at)
    }

    /// Tells the host that the job continues without it.
    pub(super) fn dismiss(&self) {
        if std::mem::replace(&mut self.state.lock().is_over, true) {
            return;
        }
        self.line.send(&ToHost::Left);
        self.line.finish();
    }

    /// Checks if its connection has ended.
    pub(super) fn is_gone(&self) -> bool {
        self.state.lock().loss.is_some()
    }

    /// Passes on bytes that a rank of the host wrote; an empty slice is the end of the stream.
    pub(super) fn forward(&self, restart: u64, rank: usize, stream: Stream, bytes: &[u8]) {
        let mut state = self.state.lock();
        if state.restart != Some(restart) {
            return;
        }
        let Some(known) = state.ranks.get_mut(&rank) else {
            return;
        };
        let pipe = &mut known.pipes[stream as usize];
        if bytes.is_empty() {
            *pipe = None;
            return;
        }
        let Some(open) = pipe.clone() else { return };
        // The reader may take its time: a terminal can be stopped.
        drop(state);
        let written = (&*open).write_all(bytes);
        if written.is_err()
            && let Some(known) = self.state.lock().ranks.get_mut(&rank)
        {
            known.pipes[stream as usize] = None;
        }
    }

    /// Describes the loss of the host, if `rank` was lost with it.
    fn loss_of(&self, rank: usize) -> Option<String> {
        let state = self.state.lock();
        let rank = state.ranks.get(&rank)?;
        (rank.end == Some(End::Lost)).then(|| state.loss.clone())?
    }

    /// Blocks until `rank` has ended.
    fn wait(&self, restart: u64, rank: usize) -> End {
        let mut state = self.state.lock();
        loop {
            if state.restart != Some(restart) {
                return End::Lost;
            }
            match state.ranks.get(&rank) {
                None => return End::Lost,
                Some(RankState { end: Some(end), .. }) => return *end,
                Some(_) => {}
            }
            state = self.changed.wait(state);
        }
    }

    /// Wakes whoever waits for the host.
    fn tell(&self) {
        self.changed.notify_all();
        self.relay.send(Event::Message);
    }
}

/// A rank on another host.
#[derive(Debug)]
struct RemoteProcess {
    host: Arc<Host>,
    restart: u64,
    rank: usize,
    pid: i32,
    output: [Option<File>; 2],
    is_over: bool,
}

impl RemoteProcess {
    fn send(&self, signal: Signal, scope: SignalScope) {
        self.host.line.send(&ToHost::Signal {
            restart: self.restart,
            rank: self.rank,
            signal: signal.as_raw(),
            scope,
        });
    }
}

impl RankProcess for RemoteProcess {
    fn pid(&self) -> i32 {
        self.pid
    }

    fn local_pid(&self) -> Option<i32> {
        None
    }

    fn host(&self) -> Option<String> {
        Some(self.host.info.name.clone())
    }

    fn loss(&self) -> Option<String> {
        self.host.loss_of(self.rank)
    }

    fn take_stdout(&mut self) -> Option<File> {
        self.output[Stream::Out as usize].take()
    }

    fn take_stderr(&mut self) -> Option<File> {
        self.output[Stream::Err as usize].take()
    }

    fn waiter(&self) -> Box<dyn FnOnce() -> End + Send> {
        let (host, restart, rank) = (Arc::clone(&self.host), self.restart, self.rank);
        Box::new(move || host.wait(restart, rank))
    }

    fn signal(&self, signal: Signal) {
        self.send(signal, SignalScope::Process);
    }

    fn signal_group(&self, signal: Signal) {
        self.send(signal, SignalScope::Group);
    }

    fn has_group(&self) -> bool {
        // Its host ends its leftover processes.
        false
    }

    fn reap(&mut self) {
        self.is_over = true;
    }

    fn abandon(&mut self) {
        self.is_over = true;
    }
}

impl Drop for RemoteProcess {
    fn drop(&mut self) {
        if !self.is_over {
            self.signal_group(Signal::KILL);
        }
    }
}
