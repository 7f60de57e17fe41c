//! Runs a group of processes to its end: carries out the decisions of [`Job`].

use std::collections::BTreeSet;
use std::sync::mpsc::{Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use signal_hook::consts::signal;

use crate::supervisor::descendants::{self, Excluded};
use crate::supervisor::job::{Action, Cause, End, Event, Job};
use crate::supervisor::signals;
use crate::supervisor::spawner::RankProcess;

/// How long the launcher waits for leftover processes after SIGKILL.
const LEFTOVER_TIMEOUT: Duration = Duration::from_secs(2);

/// How often the launcher checks for leftover processes: the first interval and the longest.
const SWEEP_INTERVALS: [Duration; 2] = [Duration::from_millis(2), Duration::from_millis(50)];

/// A message from another thread of the launcher to the main thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Notice {
    /// A process ended.
    Ended {
        /// Its place in the group.
        rank: usize,
        /// How it ended.
        end: End,
    },
    /// A process has joined the job.
    Joined(usize),
    /// A process has left the job in good order.
    Closed(usize),
    /// A rank reported to the store that its group has failed.
    FailureReported {
        /// The rank that reports it.
        rank: usize,
        /// The ranks that it blames.
        blamed: Vec<usize>,
    },
    /// The launcher received a signal.
    Signal(i32),
    /// The launcher's output was closed.
    OutputClosed,
    /// A reader of a rank's output has come to its end.
    Drained,
}

/// Who ended a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EndedBy {
    /// It ended before the launcher signalled it.
    Itself,
    /// The launcher signalled it first.
    Launcher,
}

/// Receives the events of a running group.
pub(crate) trait Observer {
    /// `rank` has ended.
    fn ended(&mut self, rank: usize, end: End, ended_by: EndedBy) {
        let _ = (rank, end, ended_by);
    }

    /// `rank` has joined the job.
    fn joined(&mut self, rank: usize) {
        let _ = rank;
    }

    /// These ranks take long to end.
    fn waiting(&mut self, ranks: &[usize]) {
        let _ = ranks;
    }
}

/// An observer that does nothing.
#[derive(Debug)]
pub(crate) struct NoopObserver;

impl Observer for NoopObserver {}

/// Which processes are ended with a group.
#[derive(Clone, Copy, Debug)]
pub(crate) enum KillScope<'a> {
    /// Those in the groups that its members lead.
    Groups,
    /// All descendants of this process but the excluded ones.
    Descendants(&'a Excluded),
}

/// How a group ended.
#[derive(Clone, Debug)]
pub(crate) struct GroupOutcome {
    job: Job,
    /// How many output readers finished meanwhile.
    pub(crate) drained: usize,
    /// Processes that were left when the members had ended; they were then ended.
    pub(crate) left_behind: LeftBehind,
    /// The first signal that asked the launcher to end, whatever the group ended of.
    pub(crate) asked_to_end: Option<i32>,
}

/// Processes that outlived the rank that started them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct LeftBehind {
    /// The ranks they came from, as far as that is known.
    pub(crate) ranks: BTreeSet<usize>,
    /// How many came from an unknown rank.
    pub(crate) others: usize,
}

impl GroupOutcome {
    /// Why the group was ended, if not every member succeeded by itself.
    pub(crate) fn cause(&self) -> Option<Cause> {
        self.job.cause()
    }

    /// How `rank` ended; `None` where it did not end even on SIGKILL.
    pub(crate) fn end(&self, rank: usize) -> Option<End> {
        self.job.end(rank)
    }

    /// Whether `rank` ended before the launcher ended it.
    pub(crate) fn ended_by_itself(&self, rank: usize) -> bool {
        self.job.ended_by_itself(rank)
    }

    /// The exit code of the whole.
    pub(crate) fn exit_code(&self) -> u8 {
        self.job.exit_code()
    }
}

/// Waits for every process of `group`, ends all when one fails or a signal asks for it, and ends what
/// `scope` covers.
///
/// `sender` and `notices` are the two ends of the channel on which signals arrive.
pub(crate) fn supervise(
    group: &mut [Box<dyn RankProcess>],
    grace: Duration,
    scope: KillScope<'_>,
    sender: &Sender<Notice>,
    notices: &Receiver<Notice>,
    observer: &mut impl Observer,
) -> GroupOutcome {
    let mut job = Job::new(group.len(), grace);
    let mut drained = 0;
    for (rank, process) in group.iter().enumerate() {
        watch(rank, &**process, sender);
    }
    while !job.is_over() {
        let notice = next(notices, job.deadline());
        let ended = match notice {
            Some(Notice::Ended { rank, end }) => Some((rank, end)),
            _ => None,
        };
        let event = match notice {
            Some(Notice::Ended { rank, end }) => Event::Ended { rank, end },
            Some(Notice::Joined(rank)) => {
                observer.joined(rank);
                Event::Joined(rank)
            }
            Some(Notice::Closed(rank)) => Event::Closed(rank),
            Some(Notice::FailureReported { rank, blamed }) => {
                Event::FailureReported { rank, blamed }
            }
            Some(Notice::Signal(number)) if signals::asks_to_end(number) => Event::Signal(number),
            Some(Notice::Signal(number)) => {
                if let Some(named) = Signal::from_named_raw(number) {
                    group.iter().for_each(|process| process.signal(named));
                }
                continue;
            }
            Some(Notice::OutputClosed) => Event::OutputClosed,
            Some(Notice::Drained) => {
                drained += 1;
                continue;
            }
            None => Event::Tick,
        };
        let actions = job.step(event, Instant::now());
        if let Some((rank, end)) = ended {
            let ended_by = match job.ended_by_itself(rank) {
                true => EndedBy::Itself,
                false => EndedBy::Launcher,
            };
            observer.ended(rank, end, ended_by);
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
    }
    let mut outcome = GroupOutcome {
        left_behind: left_behind(group, &job, scope),
        asked_to_end: job.asked_to_end(),
        job,
        drained,
    };
    sweep(group, &mut outcome, grace, scope, notices);
    outcome
}

/// Sends `signal` to the group of `process`, and lets what is stopped there receive it.
fn end_group(process: &dyn RankProcess, signal: Signal) {
    process.signal_group(signal);
    if signal != Signal::KILL {
        process.signal_group(Signal::CONT);
    }
}

/// Starts the thread that reports the end of `process`.
fn watch(rank: usize, process: &dyn RankProcess, sender: &Sender<Notice>) {
    let wait = process.waiter();
    let report = {
        let sender = sender.clone();
        move || {
            let end = wait();
            let _ = sender.send(Notice::Ended { rank, end });
        }
    };
    if thread::Builder::new()
        .name(format!("watch-{rank}"))
        .spawn(report)
        .is_err()
    {
        // Without a thread to watch it, a process cannot be supervised: end it.
        process.signal_group(Signal::KILL);
        let _ = sender.send(Notice::Ended {
            rank,
            end: End::Signal(signal::SIGKILL),
        });
    }
}

fn next(notices: &Receiver<Notice>, deadline: Option<Instant>) -> Option<Notice> {
    match deadline {
        // This side holds a sender, so the channel cannot be disconnected.
        None => notices.recv().ok(),
        Some(at) => notices
            .recv_timeout(at.saturating_duration_since(Instant::now()))
            .ok(),
    }
}

/// Ends what the processes of `group`, all over, have left behind.
///
/// The first signal goes to the process groups, while the unreaped leaders still pin their numbers.
/// What is left then is looked up: descendants, where they can be listed; else groups that have
/// been seen populated ever since.
fn sweep(
    group: &mut [Box<dyn RankProcess>],
    outcome: &mut GroupOutcome,
    grace: Duration,
    scope: KillScope<'_>,
    notices: &Receiver<Notice>,
) {
    let first = if outcome.job.was_killed() {
        Signal::KILL
    } else {
        Signal::TERM
    };
    let mut stuck = BTreeSet::new();
    let mut left = Vec::new();
    for (rank, process) in group.iter_mut().enumerate() {
        if outcome.end(rank).is_none() {
            process.abandon();
            stuck.extend(process.local_pid());
            continue;
        }
        end_group(&**process, first);
        process.reap();
        left.push(rank);
    }
    let mut signalled = BTreeSet::new();
    let mut kill_at = Some(Instant::now() + grace);
    let mut give_up_at = None;
    let [mut pause, longest] = SWEEP_INTERVALS;
    loop {
        let now = Instant::now();
        let is_killing = kill_at.is_none_or(|at| now >= at);
        let is_clear = match descendants_of(scope) {
            Some(mut members) => {
                members.retain(|member| !stuck.contains(&member.pid));
                for member in &members {
                    if is_killing {
                        member.signal(Signal::KILL);
                    } else if signalled.insert(member.pid) {
                        member.signal(first);
                        member.signal(Signal::CONT);
                    }
                }
                members.is_empty()
            }
            None => {
                left.retain(|&rank| group[rank].has_group());
                if !left.is_empty()
                    && let Some(running) = descendants::running_groups()
                {
                    left.retain(|&rank| {
                        let pid = group[rank].local_pid();
                        pid.is_none_or(|pid| running.contains(&pid))
                    });
                }
                if is_killing {
                    left.iter()
                        .for_each(|&rank| group[rank].signal_group(Signal::KILL));
                }
                left.is_empty()
            }
        };
        if is_clear || give_up_at.is_some_and(|at| now >= at) {
            return;
        }
        if is_killing && give_up_at.is_none() {
            kill_at = None;
            give_up_at = Some(now + LEFTOVER_TIMEOUT);
        }
        let look_at = kill_at.map_or(now + pause, |at| at.min(now + pause));
        pause = longest.min(pause * 2);
        match next(notices, Some(look_at)) {
            Some(Notice::Signal(number)) if signals::asks_to_end(number) => {
                outcome.asked_to_end.get_or_insert(number);
                kill_at = kill_at.map(|_| now);
            }
            Some(Notice::Drained) => outcome.drained += 1,
            _ => {}
        }
    }
}

fn descendants_of(scope: KillScope<'_>) -> Option<Vec<descendants::ProcessInfo>> {
    match scope {
        KillScope::Groups => None,
        KillScope::Descendants(excluded) => descendants::running(excluded),
    }
}

/// Processes that still run although their rank has ended.
fn left_behind(group: &[Box<dyn RankProcess>], job: &Job, scope: KillScope<'_>) -> LeftBehind {
    if matches!(scope, KillScope::Descendants(_)) && descendants::has_no_running_child() {
        return LeftBehind::default();
    }
    let stuck = |pid: i32| {
        let rank = (0..group.len()).find(|&rank| group[rank].local_pid() == Some(pid));
        rank.is_some_and(|rank| job.end(rank).is_none())
    };
    let Some(members) = descendants_of(scope) else {
        let running = descendants::running_groups().unwrap_or_default();
        let ranks = (0..group.len()).filter(|&rank| {
            let pid = group[rank].local_pid();
            job.end(rank).is_some() && pid.is_some_and(|pid| running.contains(&pid))
        });
        return LeftBehind {
            ranks: ranks.collect(),
            others: 0,
        };
    };
    let mut found = LeftBehind::default();
    for member in members {
        if !stuck(member.pid) {
            match member.rank().filter(|&rank| rank < group.len()) {
                Some(rank) => {
                    found.ranks.insert(rank);
                }
                None => found.others += 1,
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::sync::mpsc;
    use std::sync::{Arc, Condvar, Mutex};

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
            self.state.0.lock().unwrap().end.get_or_insert(end);
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
                let state = state.lock().unwrap();
                let state = changed.wait_while(state, |state| state.end.is_none());
                state.unwrap().end.unwrap()
            })
        }

        fn signal(&self, signal: Signal) {
            self.signal_group(signal);
        }

        fn signal_group(&self, signal: Signal) {
            self.state.0.lock().unwrap().signals.push(signal);
            if [Signal::TERM, Signal::KILL].contains(&signal) {
                self.end(End::Signal(signal.as_raw()));
            }
        }

        fn has_group(&self) -> bool {
            !self.state.0.lock().unwrap().is_reaped
        }

        fn reap(&mut self) {
            self.state.0.lock().unwrap().is_reaped = true;
        }

        fn abandon(&mut self) {}
    }

    #[test]
    fn ranks_that_do_not_run_here_are_supervised_too() {
        let ranks = [RemoteRank::default(), RemoteRank::default()];
        let mut group = ranks
            .clone()
            .map(|rank| Box::new(rank) as Box<dyn RankProcess>);
        let (sender, notices) = mpsc::channel();
        ranks[1].end(End::Code(7));
        let outcome = supervise(
            &mut group,
            Duration::from_secs(60),
            KillScope::Groups,
            &sender,
            &notices,
            &mut NoopObserver,
        );
        assert_eq!(
            (outcome.cause(), outcome.exit_code()),
            (Some(Cause::Failure(1)), 7)
        );
        assert!(outcome.ended_by_itself(1) && !outcome.ended_by_itself(0));
        let other = ranks[0].state.0.lock().unwrap();
        assert_eq!(other.signals[..2], [Signal::TERM, Signal::CONT]);
        assert!(other.is_reaped);
    }
}
