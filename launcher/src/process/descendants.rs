//! The descendants of this process, also those that left its process group or session.
//!
//! A process that made itself a *child subreaper* is given its descendants' orphans, so everything
//! that it started, and that these started, can be found by walking from child to parent. Linux
//! alone has subreapers and `/proc`; elsewhere the functions here find nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};

/// The time for which processes may outlive SIGKILL (a device driver can hold one) before they are left.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);

/// The pause between two checks for processes that are left.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

static IS_REAPER: AtomicBool = AtomicBool::new(false);

/// Makes this process the parent of its descendants' orphans; returns whether that worked and
/// descendants can be listed.
pub(crate) fn become_subreaper() -> bool {
    #[cfg(target_os = "linux")]
    {
        let is_reaper = read(std::process::id().cast_signed()).is_some()
            && rustix::process::set_child_subreaper(Some(rustix::process::getpid())).is_ok();
        IS_REAPER.store(is_reaper, Ordering::Relaxed);
        is_reaper
    }
    #[cfg(not(target_os = "linux"))]
    false
}

/// Processes that are not ended, with all their descendants.
#[derive(Clone, Debug, Default)]
pub(crate) struct Excluded(BTreeSet<(i32, u64)>);

impl Excluded {
    /// All present descendants of this process.
    pub(crate) fn present() -> Self {
        if has_no_running_child() {
            return Self::default();
        }
        let running = running(&Self::default()).unwrap_or_default();
        Self(running.iter().map(|one| (one.pid, one.started)).collect())
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct ProcessInfo {
    pub(crate) pid: i32,
    parent: i32,
    group: i32,
    is_running: bool,
    is_stopped: bool,
    /// Clock ticks from the machine's start to its own, which with its number identifies it.
    started: u64,
}

impl ProcessInfo {
    /// Sends `signal`, unless its number has been given to another process meanwhile.
    pub(crate) fn signal(&self, signal: Signal) {
        let Some(pid) = Pid::from_raw(self.pid) else {
            return;
        };
        #[cfg(target_os = "linux")]
        if let Ok(handle) = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()) {
            if read(self.pid).is_some_and(|member| member.started == self.started) {
                let _ = rustix::process::pidfd_send_signal(handle, signal);
            }
            return;
        }
        let _ = rustix::process::kill_process(pid, signal);
    }

    /// The rank that it belongs to, by the environment that it was started with.
    pub(crate) fn rank(&self) -> Option<usize> {
        self.variables()?.get("RANK")?.parse().ok()
    }

    /// The environment that it was started with, if this user may see it.
    pub(crate) fn variables(&self) -> Option<BTreeMap<String, String>> {
        let environment = std::fs::read(format!("/proc/{}/environ", self.pid)).ok()?;
        let text = String::from_utf8_lossy(&environment);
        let variables = text
            .split('\0')
            .filter_map(|variable| variable.split_once('='));
        let owned = |(name, value): (&str, &str)| (name.to_owned(), value.to_owned());
        Some(variables.map(owned).collect())
    }
}

/// The descendants that run, without those `excluded`; `None` where they cannot be listed.
pub(crate) fn running(excluded: &Excluded) -> Option<Vec<ProcessInfo>> {
    if !IS_REAPER.load(Ordering::Relaxed) {
        return None;
    }
    let mut children: BTreeMap<i32, Vec<ProcessInfo>> = BTreeMap::new();
    for member in table()? {
        children.entry(member.parent).or_default().push(member);
    }
    let mut found = Vec::new();
    let mut parents = vec![std::process::id().cast_signed()];
    while let Some(parent) = parents.pop() {
        for member in children.remove(&parent).unwrap_or_default() {
            if !excluded.0.contains(&(member.pid, member.started)) {
                parents.push(member.pid);
                found.extend(member.is_running.then_some(member));
            }
        }
    }
    Some(found)
}

/// All processes that can be seen but this one, or those that descend from `ancestor`, itself included.
pub(crate) fn processes(ancestor: Option<i32>) -> Option<Vec<ProcessInfo>> {
    let me = std::process::id().cast_signed();
    let table = table()?;
    let parents: BTreeMap<i32, i32> = table.iter().map(|one| (one.pid, one.parent)).collect();
    let descends = |process: &ProcessInfo| {
        let Some(ancestor) = ancestor else {
            return true;
        };
        let mut line = std::iter::successors(Some(process.pid), |pid| parents.get(pid).copied());
        // Longer lines are circles, of processes that came and went while they were listed.
        line.by_ref().take(parents.len()).any(|pid| pid == ancestor)
    };
    let others = table.iter().filter(|process| process.pid != me);
    Some(
        others
            .filter(|process| descends(process))
            .copied()
            .collect(),
    )
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RunState {
    /// It runs or waits for something; or the system does not tell.
    Running,
    /// A signal or a debugger has stopped it.
    Stopped,
    /// It has ended.
    Ended,
}

/// Returns the state of the process `pid`, a child of this one.
pub(crate) fn state_of(pid: i32) -> RunState {
    match read(pid) {
        Some(found) if found.is_stopped => RunState::Stopped,
        Some(found) if !found.is_running => RunState::Ended,
        Some(_) => RunState::Running,
        // Without `/proc` nothing is known of any.
        None if IS_REAPER.load(Ordering::Relaxed) => RunState::Ended,
        None => RunState::Running,
    }
}

/// Checks if no ancestor in this session is outside of this process's group: no shell waits for the group then, and the
/// kernel discards its SIGTSTP, since nobody would continue it.
pub(crate) fn is_in_orphaned_group() -> bool {
    let group = rustix::process::getpgrp();
    let mut ancestor = rustix::process::getppid();
    while let Some(pid) = ancestor
        && rustix::process::getpgid(Some(pid)) == Ok(group)
    {
        ancestor = read(pid.as_raw_pid()).and_then(|member| Pid::from_raw(member.parent));
    }
    let session = rustix::process::getsid(None);
    !ancestor.is_some_and(|pid| rustix::process::getsid(Some(pid)) == session)
}

/// Checks if no descendant seems to run: a quick check of the children only, without a walk over every process of the
/// machine. What runs descends from a child that runs, since a zombie has no children; but the kernel may leave a child
/// out while another is being reaped.
pub(crate) fn has_no_running_child() -> bool {
    children().is_some_and(|children| !children.iter().any(|child| child.is_running))
}

/// Kills every descendant but those `excluded`, and returns their numbers.
///
/// It looks again until none is left, since one can fork while others are killed.
pub(crate) fn kill(excluded: &Excluded) -> BTreeSet<i32> {
    let until = Instant::now() + KILL_TIMEOUT;
    let mut killed = BTreeSet::new();
    loop {
        let left = running(excluded).unwrap_or_default();
        if left.is_empty() || Instant::now() >= until {
            return killed;
        }
        for member in left {
            member.signal(Signal::KILL);
            killed.insert(member.pid);
        }
        thread::sleep(POLL_INTERVAL);
    }
}

/// The process groups with a running process, if the system has `/proc`.
///
/// Zombies do not count: an orphan that has ended stays in its group until its new parent clears
/// it away, and in many a container process 1 does not.
pub(crate) fn running_groups() -> Option<BTreeSet<i32>> {
    let running = table()?.into_iter().filter(|member| member.is_running);
    Some(running.map(|member| member.group).collect())
}

/// The children of this process that have ended, orphans among them.
pub(super) fn ended_children() -> Vec<i32> {
    let me = std::process::id().cast_signed();
    let children = children().unwrap_or_else(|| {
        let all = table().unwrap_or_default().into_iter();
        all.filter(|member| member.parent == me).collect()
    });
    let ended = children.into_iter().filter(|child| !child.is_running);
    ended.map(|child| child.pid).collect()
}

/// The children of the main thread, which starts all processes and is given all orphans; `None`
/// if the kernel was built without that list.
fn children() -> Option<Vec<ProcessInfo>> {
    let me = std::process::id();
    let list = std::fs::read_to_string(format!("/proc/self/task/{me}/children")).ok()?;
    let pids = list.split_ascii_whitespace();
    Some(pids.filter_map(|pid| read(pid.parse().ok()?)).collect())
}

/// All processes of the machine that can be seen.
fn table() -> Option<Vec<ProcessInfo>> {
    let me = std::process::id().cast_signed();
    let entries = std::fs::read_dir("/proc").ok()?.flatten();
    let members: Vec<ProcessInfo> = entries
        .filter_map(|entry| read(entry.file_name().to_str()?.parse().ok()?))
        .collect();
    // A list without this very process cannot be trusted.
    members
        .iter()
        .any(|member| member.pid == me)
        .then_some(members)
}

fn read(pid: i32) -> Option<ProcessInfo> {
    let stat = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    parse(pid, &String::from_utf8_lossy(&stat))
}

/// `stat` is "pid (name) state parent group …", where the name can hold anything.
fn parse(pid: i32, stat: &str) -> Option<ProcessInfo> {
    let (_, rest) = stat.rsplit_once(')')?;
    let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
    // In proc(5), which counts from 1 and two fields before these, they are fields 20 and 22.
    let threads: u64 = fields.get(17)?.parse().ok()?;
    Some(ProcessInfo {
        pid,
        parent: fields.get(1)?.parse().ok()?,
        group: fields.get(2)?.parse().ok()?,
        // A process whose main thread has ended looks like a zombie while others run.
        is_running: !matches!(*fields.first()?, "Z" | "X") || threads > 1,
        is_stopped: matches!(*fields.first()?, "T" | "t"),
        started: fields.get(19)?.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_proc_stat_is_parsed() {
        let line = "42 (a) Z ) S 7 9 9 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 3 0 12345 1 1 1";
        let member = parse(42, line).unwrap();
        assert_eq!((member.pid, member.parent, member.group), (42, 7, 9));
        assert_eq!(member.started, 12345);
        assert!(member.is_running && !member.is_stopped);
        let stopped = "42 (a) T 7 9 9 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 3 0 12345 1 1 1";
        assert!(parse(42, stopped).unwrap().is_stopped);
        let zombie = "42 (a) Z 7 9 9 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 12345 1 1 1";
        assert!(!parse(42, zombie).unwrap().is_running);
        assert!(parse(42, "42 (cut").is_none());
    }
}
