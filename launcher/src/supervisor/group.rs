//! Runs a group of processes to its end: carries out the decisions of [`Job`].

use std::sync::mpsc::{Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use signal_hook::consts::signal;

use crate::supervisor::descendants::Excluded;
use crate::supervisor::job::{Action, Cause, End, Event, Job};
use crate::supervisor::leftovers::{LeftBehind, left_behind, sweep};
use crate::supervisor::signals;
use crate::supervisor::spawner::RankProcess;

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
    /// A rank has joined the job.
    Joined(usize),
    /// A rank has closed its group.
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
    pub(super) job: Job,
    /// How many output readers finished meanwhile.
    pub(crate) drained: usize,
    /// Processes that were left when the members had ended; they were then ended.
    pub(crate) left_behind: LeftBehind,
    /// The first signal that asked the launcher to end, whatever the group ended of.
    pub(crate) asked_to_end: Option<i32>,
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
pub(super) fn end_group(process: &dyn RankProcess, signal: Signal) {
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

pub(super) fn next(notices: &Receiver<Notice>, deadline: Option<Instant>) -> Option<Notice> {
    match deadline {
        // This side holds a sender, so the channel cannot be disconnected.
        None => notices.recv().ok(),
        Some(at) => notices
            .recv_timeout(at.saturating_duration_since(Instant::now()))
            .ok(),
    }
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
