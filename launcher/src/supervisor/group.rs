//! Runs a group of processes to its end: carries out the decisions of [`GroupMachine`].

use std::fs::File;
use std::num::NonZeroUsize;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use accelerator_host::process::Drain;
use accelerator_host::sync::Mutex;
use rustix::process::Signal;
use signal_hook::consts::signal;

use super::group_machine::{Action, Cause, GroupMachine, Recovery};
use super::leftovers::{KillScope, LeftBehind, Remains, Swept, end_group};
use super::signals::{self, is_job_control, is_suspended};
use super::store::StoreHandle;
use crate::error::{BEFORE_START, Error, Result, ended_by};
use crate::event::{Channel, Event};
use crate::output::Output;
use crate::process::descendants::{RunState, state_of};
use crate::process::{End, Process, RankProcess};
use crate::text::list;

/// The one that ended a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EndedBy {
    /// It ended before the launcher signalled it.
    Itself,
    /// The launcher signalled it first.
    Launcher,
}

/// Receives the events of a running group.
pub(super) trait Observer {
    /// `rank`, whose process this is, has ended.
    fn ended(&mut self, _rank: usize, _process: &dyn RankProcess, _end: End, _ended_by: EndedBy) {}

    /// Returns the smallest number of ranks that may continue after a loss; `None` if the group does not continue.
    fn least_survivors(&self) -> Option<NonZeroUsize> {
        None
    }

    fn joined(&mut self, _rank: usize) {}

    /// These ranks take long to end.
    fn waiting(&mut self, _ranks: &[usize]) {}

    /// Advances the next group, and returns how the running one continues. Called after each event.
    fn poll_regroup(&mut self, _phase: GroupPhase) -> GroupStep {
        GroupStep::Run
    }

    /// Returns the time of the next call of [`poll_regroup`](Self::poll_regroup), if nothing happens before.
    fn deadline(&self) -> Option<Instant> {
        None
    }
}

/// The next step of a running group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum GroupStep {
    /// It runs on.
    Run,
    /// Another group takes over its processes.
    HandOver,
    /// Its survivors cannot form a group.
    GiveUp,
    /// These survivors hang, and count as lost.
    Lose(Vec<usize>),
}

/// The phase of a group's run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum GroupPhase {
    /// Nothing has failed, and some of its processes run.
    Running,
    /// Some ranks were lost; the ranks given here are to continue without them.
    Recovering(Vec<usize>),
    /// Something has failed, and the other ranks may continue.
    Settling,
    /// Its processes have ended, or are about to.
    Ending,
}

/// An observer that does nothing.
#[derive(Debug)]
struct NoopObserver;

impl Observer for NoopObserver {}

/// The end of a group.
#[derive(Clone, Debug)]
pub(crate) struct GroupOutcome {
    machine: GroupMachine,
    /// The number of output readers that finished meanwhile.
    pub(crate) drained: usize,
    /// Processes that were left when the members had ended; they were then ended.
    pub(crate) left_behind: LeftBehind,
    /// The first signal that asked the launcher to end, whatever the group ended of.
    pub(crate) asked_to_end: Option<i32>,
    /// True if another group has taken over its processes, which run on.
    pub(crate) is_taken_over: bool,
}

impl GroupOutcome {
    /// Returns the cause for which the group was ended, if not every member succeeded by itself.
    pub(crate) fn cause(&self) -> Option<Cause> {
        self.machine.cause()
    }

    /// Returns the end of `rank`; `None` if it did not end even on SIGKILL.
    pub(crate) fn end(&self, rank: usize) -> Option<End> {
        self.machine.end(rank)
    }

    /// Returns `true` if `rank` ended before the launcher ended it.
    pub(crate) fn ended_by_itself(&self, rank: usize) -> bool {
        self.machine.ended_by_itself(rank)
    }

    /// Returns `true` if a signal told the launcher itself that the job is to end.
    pub(crate) fn was_notified(&self) -> bool {
        self.asked_to_end.is_some() || self.machine.was_notified()
    }

    pub(crate) fn exit_code(&self) -> u8 {
        self.machine.exit_code()
    }

    /// The first signal to processes that the members have left behind.
    pub(crate) fn first_signal(&self) -> Signal {
        match self.machine.was_killed() {
            true => Signal::KILL,
            false => Signal::TERM,
        }
    }

    /// Adds the processes left behind on other hosts, and the events that came while they were ended.
    pub(crate) fn add(&mut self, swept: Swept) {
        self.drained += swept.drained;
        self.asked_to_end = self.asked_to_end.or(swept.asked_to_end);
        self.left_behind.add(swept.left_behind);
    }
}

/// Waits for every process of `group`, ends all when one fails or a signal asks for it, and ends what
/// `scope` covers.
///
/// Their ends, which are [watched](watch), and signals arrive on `channel`.
pub(super) fn supervise(
    group: &mut [Box<dyn RankProcess>],
    grace: Duration,
    scope: KillScope<'_>,
    channel: &Channel,
    observer: &mut impl Observer,
) -> GroupOutcome {
    let machine = GroupMachine::new(group.len(), grace);
    let mut machine = machine.with_survivors(observer.least_survivors());
    let mut drained = 0;
    let mut is_taken_over = false;
    stop_if_suspended(group);
    while !machine.is_over() && !is_taken_over {
        let deadlines = machine.deadline().into_iter().chain(observer.deadline());
        let event = channel.next(deadlines.min());
        let mut ended = None;
        match event {
            Event::Ended { rank, end } => ended = Some((rank, end)),
            Event::Joined(rank) => observer.joined(rank),
            Event::ForwardSignal(number) => {
                for process in group.iter() {
                    forward(&**process, number);
                }
            }
            Event::Drained => {
                drained += 1;
                continue;
            }
            _ => {}
        }
        let actions = machine.step(event, Instant::now());
        if let Some((rank, end)) = ended {
            let ended_by = match machine.ended_by_itself(rank) {
                true => EndedBy::Itself,
                false => EndedBy::Launcher,
            };
            if let Some(process) = group.get(rank) {
                observer.ended(rank, &**process, end, ended_by);
            }
        }
        for action in actions {
            match action {
                Action::Signal { signal, ranks } => {
                    if let Some(named) = Signal::from_named_raw(signal) {
                        let members = ranks.into_iter().filter_map(|rank| group.get(rank));
                        members.for_each(|process| end_group(&**process, named));
                    }
                }
                Action::Waiting(ranks) => observer.waiting(&ranks),
            }
        }
        let phase = match (machine.is_running(), machine.recovery()) {
            (true, _) => GroupPhase::Running,
            (false, None) => GroupPhase::Ending,
            (false, Some(Recovery::Settling)) => GroupPhase::Settling,
            (false, Some(Recovery::Of(survivors))) => GroupPhase::Recovering(survivors),
        };
        match observer.poll_regroup(phase) {
            GroupStep::Run => {}
            GroupStep::HandOver => is_taken_over = true,
            GroupStep::GiveUp => machine.abandon_recovery(),
            GroupStep::Lose(ranks) => {
                machine.lose(&ranks);
                let members = ranks.into_iter().filter_map(|rank| group.get(rank));
                members.for_each(|process| end_group(&**process, Signal::KILL));
            }
        }
    }
    let mut outcome = GroupOutcome {
        left_behind: LeftBehind::default(),
        asked_to_end: machine.asked_to_end(),
        is_taken_over,
        drained,
        machine,
    };
    if is_taken_over {
        return outcome;
    }
    let remains = Remains {
        first_rank: 0,
        has_ended: (0..group.len())
            .map(|rank| outcome.end(rank).is_some())
            .collect(),
    };
    outcome.left_behind = remains.left_behind(group, scope);
    outcome.add(remains.sweep(group, outcome.first_signal(), grace, scope, channel));
    outcome
}

/// Forwards to a rank a signal that the launcher has received and that does not ask it to end. As in a terminal, one
/// that stops a job reaches the rank's children, too.
pub(crate) fn forward(process: &dyn RankProcess, signal: i32) {
    let Some(named) = Signal::from_named_raw(signal) else {
        return;
    };
    match is_job_control(signal) {
        true => process.signal_group(named),
        false => process.signal(named),
    }
}

/// Stops ranks that have just started, if the job was stopped before.
pub(crate) fn stop_if_suspended(group: &[Box<dyn RankProcess>]) {
    if is_suspended() {
        group
            .iter()
            .for_each(|process| forward(&**process, signal::SIGTSTP));
    }
}

/// A thread that waits for the end of a process, and tells it to whoever supervises the process by then.
#[derive(Clone, Debug)]
pub(crate) struct Watch(Arc<Mutex<WatchTarget>>);

#[derive(Debug)]
struct WatchTarget {
    rank: usize,
    events: Sender<Event>,
    /// A channel that is woken as well.
    wake: Option<Sender<Event>>,
}

impl Watch {
    /// Also wakes this channel, until it is redirected.
    pub(super) fn waking(self, wake: Sender<Event>) -> Self {
        self.0.lock().wake = Some(wake);
        self
    }

    /// Tells the end as that of `rank` to `events` from now on.
    pub(super) fn redirect(&self, rank: usize, events: Sender<Event>) {
        *self.0.lock() = WatchTarget {
            rank,
            events,
            wake: None,
        };
    }

    fn tell(&self, end: End) {
        let target = self.0.lock();
        let rank = target.rank;
        // Without a receiver the job is over.
        let _ = target.events.send(Event::Ended { rank, end });
        if let Some(wake) = &target.wake {
            let _ = wake.send(Event::Message);
        }
    }
}

/// Starts the thread that tells `events` the end of `process` as that of `rank`.
pub(crate) fn watch(rank: usize, process: &dyn RankProcess, events: &Sender<Event>) -> Watch {
    let watch = Watch(Arc::new(Mutex::new(WatchTarget {
        rank,
        events: events.clone(),
        wake: None,
    })));
    let wait = process.waiter();
    let report = {
        let watch = watch.clone();
        move || watch.tell(wait())
    };
    if thread::Builder::new()
        .name(format!("watch-{rank}"))
        .spawn(report)
        .is_err()
    {
        // Without a thread to watch it, a process cannot be supervised: end it.
        process.signal_group(Signal::KILL);
        watch.tell(End::Signal(signal::SIGKILL));
    }
    watch
}

/// The shortest interval between two looks at the ranks.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Watches for ranks of this host that are all stopped, until it is dropped.
#[derive(Debug)]
pub(super) struct StoppedRanksMonitor {
    _running: Sender<()>,
}

impl StoppedRanksMonitor {
    /// Reports to `output` once which ranks of `group` are stopped, after none of this host has run for `limit`. If they
    /// were stopped through the launcher, as by Ctrl-Z, the user knows it, and `store` does not take their silence for a
    /// failure.
    ///
    /// The job continues: whoever has stopped them may continue them.
    pub(super) fn over(
        group: &[Box<dyn RankProcess>],
        limit: Duration,
        output: &Output,
        store: Option<StoreHandle>,
    ) -> Self {
        let ranks = group.iter().enumerate();
        let ranks = ranks.filter_map(|(rank, process)| Some((rank, process.local_pid()?)));
        let (ranks, output): (Vec<(usize, i32)>, _) = (ranks.collect(), output.clone());
        let (running, ended) = mpsc::channel();
        let watch = move || {
            let mut since: Option<Instant> = None;
            let mut is_told = false;
            while ended.recv_timeout(LOOK_EVERY.min(limit / 4)) == Err(RecvTimeoutError::Timeout) {
                let stopped = stopped(&ranks);
                let is_on_purpose = !stopped.is_empty() && signals::is_suspended();
                if is_on_purpose && let Some(store) = &store {
                    store.forgive_silence();
                }
                if stopped.is_empty() || is_on_purpose {
                    since = None;
                    continue;
                }
                let since = *since.get_or_insert_with(Instant::now);
                if since.elapsed() >= limit && !is_told {
                    is_told = true;
                    output.note(&text(&stopped, since.elapsed()));
                }
            }
        };
        // Without a thread nobody tells.
        let _ = thread::Builder::new().name("stopped".into()).spawn(watch);
        Self { _running: running }
    }
}

/// The ranks that are stopped, if no other one runs.
fn stopped(ranks: &[(usize, i32)]) -> Vec<(usize, i32)> {
    let states = ranks
        .iter()
        .map(|&(rank, pid)| ((rank, pid), state_of(pid)));
    let mut stopped = Vec::new();
    for (rank, state) in states {
        match state {
            RunState::Running => return Vec::new(),
            RunState::Stopped => stopped.push(rank),
            RunState::Ended => {}
        }
    }
    stopped
}

fn text(stopped: &[(usize, i32)], waited: Duration) -> String {
    let ranks: Vec<usize> = stopped.iter().map(|(rank, _)| *rank).collect();
    let pids = stopped.iter().map(|(_, pid)| format!(" {pid}"));
    format!(
        "{} stopped, as by SIGSTOP, and no rank has run for {:.1} s; the job waits: continue with `kill -CONT{}`, or end \
         this launcher",
        match ranks.len() {
            1 => format!("{} is", list(&ranks)),
            _ => format!("{} are", list(&ranks)),
        },
        waited.as_secs_f64(),
        pids.collect::<String>()
    )
}

/// The time that a tool may take to end after a signal, and that a pipe may take to end after the tool.
const TOOL_GRACE: Duration = Duration::from_secs(5);

/// The use of a tool's standard error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stderr {
    /// It is shown as it comes.
    Show,
    /// It is kept.
    Keep,
}

/// The end of a tool, and its output.
#[derive(Clone, Debug)]
pub(crate) struct ToolOutput {
    pub(crate) end: End,
    /// Its standard output.
    pub(crate) stdout: Vec<u8>,
    /// Its standard error, if it was kept.
    pub(crate) stderr: Vec<u8>,
}

/// Runs `command` and waits for its end; a signal to the launcher ends it.
///
/// # Errors
/// When it cannot be started, or a signal ended it.
pub(crate) fn run_tool(
    mut command: Command,
    stderr: Stderr,
    channel: &Channel,
) -> Result<ToolOutput> {
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    if stderr == Stderr::Keep {
        command.stderr(Stdio::piped());
    }
    let program = command.get_program().to_string_lossy().into_owned();
    let mut process = Process::spawn(&mut command).map_err(|error| {
        let message =
            format!("`{program}` could not be started; is it installed, and on the PATH?");
        Error::system(message).with_source(error)
    })?;
    let stdout = process.take_stdout().map(drain).transpose()?;
    let stderr = process.take_stderr().map(drain).transpose()?;
    let mut group: [Box<dyn RankProcess>; 1] = [Box::new(process)];
    watch(0, &*group[0], &channel.sender);
    // A compiler cache that cargo started may stay: it serves other builds.
    let outcome = supervise(
        &mut group,
        TOOL_GRACE,
        KillScope::Groups,
        channel,
        &mut NoopObserver,
    );
    if let Some(Cause::Signal(signal)) = outcome.cause() {
        return Err(ended_by(signal, BEFORE_START));
    }
    Ok(ToolOutput {
        end: outcome.end(0).unwrap_or(End::Code(1)),
        stdout: bytes(stdout),
        stderr: bytes(stderr),
    })
}

fn drain(pipe: File) -> Result<Drain> {
    Drain::start(pipe, usize::MAX).map_err(|error| {
        Error::system("a thread to read a tool's output could not be started").with_source(error)
    })
}

/// Returns the output of a tool that has ended; a daemon that it has left behind may keep the pipe open.
fn bytes(reader: Option<Drain>) -> Vec<u8> {
    reader.map_or_else(Vec::new, |reader| reader.finish(TOOL_GRACE).bytes)
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use accelerator_host::sync::Condvar;

    use super::*;

    /// A rank that runs nowhere, as one of another host would look to the supervisor. It ends on SIGTERM.
    #[derive(Clone, Debug, Default)]
    struct RemoteRank {
        state: Arc<(Mutex<RemoteState>, Condvar)>,
    }

    #[derive(Debug, Default)]
    struct RemoteState {
        end: Option<End>,
        signals: Vec<Signal>,
        is_reaped: bool,
    }

    impl RemoteRank {
        fn end(&self, end: End) {
            self.state.0.lock().end.get_or_insert(end);
            self.state.1.notify_all();
        }
    }

    impl RankProcess for RemoteRank {
        fn pid(&self) -> i32 {
            1
        }

        fn local_pid(&self) -> Option<i32> {
            None
        }

        fn take_stdout(&mut self) -> Option<File> {
            None
        }

        fn take_stderr(&mut self) -> Option<File> {
            None
        }

        fn waiter(&self) -> Box<dyn FnOnce() -> End + Send> {
            let state = Arc::clone(&self.state);
            Box::new(move || {
                let (state, changed) = &*state;
                let state = state.lock();
                let state = changed.wait_while(state, |state| state.end.is_none());
                state.end.unwrap()
            })
        }

        fn signal(&self, signal: Signal) {
            self.signal_group(signal);
        }

        fn signal_group(&self, signal: Signal) {
            self.state.0.lock().signals.push(signal);
            if [Signal::TERM, Signal::KILL].contains(&signal) {
                self.end(End::Signal(signal.as_raw()));
            }
        }

        fn has_group(&self) -> bool {
            !self.state.0.lock().is_reaped
        }

        fn reap(&mut self) {
            self.state.0.lock().is_reaped = true;
        }

        fn abandon(&mut self) {}
    }

    #[test]
    fn ranks_that_do_not_run_here_are_supervised_too() {
        let ranks = [RemoteRank::default(), RemoteRank::default()];
        let mut group = ranks
            .clone()
            .map(|rank| Box::new(rank) as Box<dyn RankProcess>);
        ranks[1].end(End::Code(7));
        let channel = Channel::new();
        for (rank, process) in group.iter().enumerate() {
            watch(rank, &**process, &channel.sender);
        }
        let outcome = supervise(
            &mut group,
            Duration::from_secs(60),
            KillScope::Groups,
            &channel,
            &mut NoopObserver,
        );
        assert_eq!(
            (outcome.cause(), outcome.exit_code()),
            (Some(Cause::Failure(1)), 7)
        );
        assert!(outcome.ended_by_itself(1) && !outcome.ended_by_itself(0));
        let other = ranks[0].state.0.lock();
        assert_eq!(other.signals[..2], [Signal::TERM, Signal::CONT]);
        assert!(other.is_reaped);
    }
}
