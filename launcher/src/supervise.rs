//! Running a group of processes to its end: the hands of [`Job`].

use std::sync::mpsc::{Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use signal_hook::consts::signal;

use crate::job::{Action, Cause, End, Event, Job};
use crate::signals;
use crate::spawn::{self, Process};

/// How long a leftover process may outlive SIGKILL before it is left.
const UNKILLABLE: Duration = Duration::from_secs(2);

/// How often the launcher looks whether leftover processes are gone.
const SWEEP: Duration = Duration::from_millis(10);

/// What a thread of the launcher tells the main one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Notice {
    /// A process ended.
    Ended {
        /// Its place in the group.
        rank: usize,
        /// How it ended.
        end: End,
    },
    /// The launcher received a signal.
    Signal(i32),
    /// Nobody reads the launcher's output any more.
    OutputClosed,
    /// A reader of a rank's output has come to its end.
    Drained,
}

/// How a group ended.
#[derive(Clone, Debug)]
pub(crate) struct Outcome {
    job: Job,
    /// How many readers came to their end meanwhile.
    pub(crate) drained: usize,
    /// Ranks whose own processes left others behind, which were then ended.
    pub(crate) left_behind: Vec<usize>,
}

impl Outcome {
    /// Why the group was ended, if not every member succeeded by itself.
    pub(crate) fn cause(&self) -> Option<Cause> {
        self.job.cause()
    }

    /// How `rank` ended; `None` where it did not end even on SIGKILL.
    pub(crate) fn end(&self, rank: usize) -> Option<End> {
        self.job.end(rank)
    }

    /// Whether `rank` ended before the launcher ended the group.
    pub(crate) fn ended_by_itself(&self, rank: usize) -> bool {
        self.job.ended_by_itself(rank)
    }

    /// The exit code of the whole.
    pub(crate) fn exit_code(&self) -> u8 {
        self.job.exit_code()
    }
}

/// Waits for every process of `group`, ends all when one fails or the launcher is told to,
/// and leaves no member of their process groups behind.
///
/// `sender` and `notices` are the two ends of the channel on which signals arrive;
/// `waiting` is told the ranks that take long to end.
pub(crate) fn supervise(
    group: &mut [Process],
    grace: Duration,
    sender: &Sender<Notice>,
    notices: &Receiver<Notice>,
    mut waiting: impl FnMut(&[usize]),
) -> Outcome {
    let mut job = Job::new(group.len(), grace);
    let mut drained = 0;
    for (rank, process) in group.iter().enumerate() {
        watch(rank, process, sender);
    }
    while !job.is_over() {
        let event = match next(notices, job.deadline()) {
            Some(Notice::Ended { rank, end }) => Event::Ended { rank, end },
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
        for action in job.step(event, Instant::now()) {
            match action {
                Action::Signal(number) => {
                    if let Some(named) = Signal::from_named_raw(number) {
                        group.iter().for_each(|process| process.signal_group(named));
                    }
                }
                Action::Waiting(ranks) => waiting(&ranks),
            }
        }
    }
    let left_behind = sweep(group, &job, grace, notices, &mut drained);
    Outcome {
        job,
        drained,
        left_behind,
    }
}

/// Starts the thread that reports the end of `process`.
fn watch(rank: usize, process: &Process, sender: &Sender<Notice>) {
    let pid = process.pid();
    let report = {
        let sender = sender.clone();
        move || {
            // "No such child" cannot be, since nothing reaps it before its end is known.
            let end = spawn::wait_for_end(pid).unwrap_or(End::Code(1));
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

/// Ends what the processes of `group`, all over, have left in their process groups.
///
/// The first signal is sent while the unreaped leader still pins the group's number; later
/// ones only to groups that have been seen populated ever since.
fn sweep(
    group: &mut [Process],
    job: &Job,
    grace: Duration,
    notices: &Receiver<Notice>,
    drained: &mut usize,
) -> Vec<usize> {
    let running = spawn::running_groups().unwrap_or_default();
    let pid = |process: &Process| process.pid().as_raw_pid();
    let left_behind = (0..group.len())
        .filter(|&rank| running.contains(&pid(&group[rank])))
        .collect();
    let mut left = Vec::new();
    for (rank, process) in group.iter_mut().enumerate() {
        if job.end(rank).is_none() {
            process.abandon();
            continue;
        }
        process.signal_group(if job.was_killed() {
            Signal::KILL
        } else {
            Signal::TERM
        });
        process.reap();
        left.push(rank);
    }
    let mut kill_at = Some(Instant::now() + grace);
    let mut give_up_at = None;
    loop {
        left.retain(|&rank| group[rank].has_group());
        if !left.is_empty()
            && let Some(running) = spawn::running_groups()
        {
            left.retain(|&rank| running.contains(&pid(&group[rank])));
        }
        let now = Instant::now();
        if left.is_empty() || give_up_at.is_some_and(|at| now >= at) {
            return left_behind;
        }
        if kill_at.is_some_and(|at| now >= at) {
            left.iter()
                .for_each(|&rank| group[rank].signal_group(Signal::KILL));
            kill_at = None;
            give_up_at = Some(now + UNKILLABLE);
        }
        match next(notices, Some(now + SWEEP)) {
            Some(Notice::Signal(number)) if signals::asks_to_end(number) && kill_at.is_some() => {
                kill_at = Some(now)
            }
            Some(Notice::Drained) => *drained += 1,
            _ => {}
        }
    }
}
