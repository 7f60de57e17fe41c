//! Processes that outlive their rank: listing and ending them.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde::{Deserialize, Serialize};

use crate::event::{Channel, Event};
use crate::process::RankProcess;
use crate::process::descendants::{self, Excluded};

/// The time for which the launcher waits for leftover processes after SIGKILL.
pub(crate) const LEFTOVER_TIMEOUT: Duration = Duration::from_secs(2);

/// The intervals at which the launcher checks for leftover processes: the first and the longest.
const SWEEP_INTERVALS: [Duration; 2] = [Duration::from_millis(2), Duration::from_millis(50)];

/// The processes that are ended with a group.
#[derive(Clone, Copy, Debug)]
pub(crate) enum KillScope<'a> {
    /// The process groups that its members lead.
    Groups,
    /// All descendants of this process but the excluded ones.
    Descendants(&'a Excluded),
}

/// Processes that outlived the rank that started them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LeftBehind {
    /// The ranks they came from, as far as that is known.
    pub(crate) ranks: BTreeSet<usize>,
    /// The number of processes that came from an unknown rank.
    pub(crate) others: usize,
}

impl LeftBehind {
    /// Adds those of another host.
    pub(crate) fn add(&mut self, other: Self) {
        self.ranks.extend(other.ranks);
        self.others += other.others;
    }
}

/// The events that arrived while leftover processes were ended.
#[derive(Clone, Debug, Default)]
pub(crate) struct Swept {
    /// The number of output readers that finished.
    pub(crate) drained: usize,
    /// The first signal that asked the launcher to end.
    pub(crate) asked_to_end: Option<i32>,
    /// Processes on other hosts.
    pub(crate) left_behind: LeftBehind,
}

/// A group whose processes are over: all have ended, but for some that do not end even on SIGKILL.
#[derive(Clone, Debug)]
pub(crate) struct Remains {
    /// The rank of the group's first process.
    pub(crate) first_rank: usize,
    /// One entry per process: `true` if it has ended.
    pub(crate) has_ended: Vec<bool>,
}

impl Remains {
    /// Ends the processes that those of `group` have left behind on this host.
    ///
    /// The first signal goes to the process groups, while their unreaped leaders keep the ids from being reused.
    /// The remaining processes are then looked up: descendants, if they can be listed; else groups that have been seen
    /// populated ever since.
    pub(crate) fn sweep(
        &self,
        group: &mut [Box<dyn RankProcess>],
        first: Signal,
        grace: Duration,
        scope: KillScope<'_>,
        channel: &Channel,
    ) -> Swept {
        let mut swept = Swept::default();
        let mut stuck = BTreeSet::new();
        let mut left = Vec::new();
        for (at, process) in group.iter_mut().enumerate() {
            if !self.has_ended(at) {
                process.abandon();
                stuck.extend(process.local_pid());
                continue;
            }
            // Another host ends its leftover processes by itself.
            if process.local_pid().is_some() {
                end_group(&**process, first);
                left.push(at);
            }
            process.reap();
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
                    left.retain(|&at| group[at].has_group());
                    if !left.is_empty()
                        && let Some(running) = descendants::running_groups()
                    {
                        left.retain(|&at| {
                            let pid = group[at].local_pid();
                            pid.is_none_or(|pid| running.contains(&pid))
                        });
                    }
                    if is_killing {
                        left.iter()
                            .for_each(|&at| group[at].signal_group(Signal::KILL));
                    }
                    left.is_empty()
                }
            };
            if is_clear || give_up_at.is_some_and(|at| now >= at) {
                return swept;
            }
            if is_killing && give_up_at.is_none() {
                kill_at = None;
                give_up_at = Some(now + LEFTOVER_TIMEOUT);
            }
            let look_at = kill_at.map_or(now + pause, |at| at.min(now + pause));
            pause = longest.min(pause * 2);
            match channel.next(Some(look_at)) {
                Event::Signal(number) => {
                    swept.asked_to_end.get_or_insert(number);
                    kill_at = kill_at.map(|_| now);
                }
                Event::Drained => swept.drained += 1,
                _ => {}
            }
        }
    }

    /// Processes that still run although their rank has ended.
    pub(crate) fn left_behind(
        &self,
        group: &[Box<dyn RankProcess>],
        scope: KillScope<'_>,
    ) -> LeftBehind {
        if matches!(scope, KillScope::Descendants(_)) && descendants::has_no_running_child() {
            return LeftBehind::default();
        }
        let stuck = |pid: i32| {
            let at = (0..group.len()).find(|&at| group[at].local_pid() == Some(pid));
            at.is_some_and(|at| !self.has_ended(at))
        };
        let Some(members) = descendants_of(scope) else {
            let running = descendants::running_groups().unwrap_or_default();
            let left = (0..group.len()).filter(|&at| {
                let pid = group[at].local_pid();
                self.has_ended(at) && pid.is_some_and(|pid| running.contains(&pid))
            });
            return LeftBehind {
                ranks: left.map(|at| self.first_rank + at).collect(),
                others: 0,
            };
        };
        let ranks = self.first_rank..self.first_rank + group.len();
        let mut found = LeftBehind::default();
        for member in members {
            if !stuck(member.pid) {
                match member.rank().filter(|rank| ranks.contains(rank)) {
                    Some(rank) => {
                        found.ranks.insert(rank);
                    }
                    None => found.others += 1,
                }
            }
        }
        found
    }

    fn has_ended(&self, at: usize) -> bool {
        self.has_ended.get(at).copied().unwrap_or(false)
    }
}

/// Sends `signal` to the group of `process`, and continues stopped members so that they receive it.
pub(crate) fn end_group(process: &dyn RankProcess, signal: Signal) {
    process.signal_group(signal);
    if signal != Signal::KILL {
        process.signal_group(Signal::CONT);
    }
}

fn descendants_of(scope: KillScope<'_>) -> Option<Vec<descendants::ProcessInfo>> {
    match scope {
        KillScope::Groups => None,
        KillScope::Descendants(excluded) => descendants::running(excluded),
    }
}
