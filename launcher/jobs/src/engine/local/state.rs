//! The state that a job's supervisor writes for other processes, and the identity of recorded processes.

use std::fs;
use std::io;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use accelerator_host::lock::{FileLock, LockMode};
use accelerator_host::machine::boot_id;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};

use crate::job::{
    Failure, JobStatus, LAST_LINES, Role, node_log, read_failure, read_json, replace_json,
};
use crate::output::last_lines;
use crate::spec::JobSpec;

/// The interval at which state and output are polled.
pub(super) const POLL: Duration = Duration::from_millis(50);
const FILE: &str = "state.json";
/// The lock file that the supervisor holds for as long as it lives.
const LOCK: &str = "supervisor.lock";
/// The time that a supervisor waits for commands that briefly hold its lock to check it.
const LONGEST_LOOK: Duration = Duration::from_secs(1);

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct LocalState {
    pub(super) status: JobStatus,
    pub(super) reason: Option<String>,
    /// Seconds since 1970.
    pub(super) started: u64,
    pub(super) ended: Option<u64>,
    pub(super) nodes: Vec<NodeState>,
}

/// The state of a node's agent.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct NodeState {
    pub(super) agent: Option<ProcessIdentity>,
    pub(super) restarts: u32,
    /// The exit code of an agent that is not started again; 128 + signal if a signal ended it.
    pub(super) exit_code: Option<i32>,
    pub(super) ended: Option<u64>,
    pub(super) reason: Option<String>,
}

impl LocalState {
    /// Reads the state of the job with this folder, once its supervisor has written one.
    pub(super) fn read(folder: &Path) -> Option<Self> {
        read_json(&folder.join(FILE))
    }

    /// Replaces the state.
    pub(super) fn write(&self, folder: &Path) -> io::Result<()> {
        replace_json(&folder.join(FILE), self)
    }

    /// Returns the current state; a job that has not ended counts as failed if no supervisor is left to write its
    /// state.
    pub(super) fn current(folder: &Path) -> Option<Self> {
        let state = Self::read(folder)?;
        // If the lock cannot be checked, the state is the best answer.
        if state.status.is_final() || Self::is_supervised(folder).unwrap_or(true) {
            return Some(state);
        }
        // The supervisor may have ended between the read and the check of its lock.
        let mut state = Self::read(folder)?;
        if !state.status.is_final() {
            state.status = JobStatus::Failed;
            state.reason =
                Some("its supervisor was killed, or this machine was restarted; `accel-launch jobs stop` ends any of its processes that still run".to_owned());
        }
        Some(state)
    }

    /// Acquires the lock of a job's supervisor and writes its process into it; `None` if another one holds it.
    pub(super) fn lock(
        folder: &Path,
        supervisor: &ProcessIdentity,
    ) -> io::Result<Option<FileLock>> {
        let text = serde_json::to_vec(supervisor)?;
        // A command that checks if the job is supervised holds the lock for a moment.
        let locked = FileLock::create(&folder.join(LOCK), LockMode::Exclusive, LONGEST_LOOK)?;
        let Some(mut lock) = locked else {
            return Ok(None);
        };
        lock.write(&text)?;
        Ok(Some(lock))
    }

    /// Returns `true` if the supervisor of a job lives.
    pub(super) fn is_supervised(folder: &Path) -> io::Result<bool> {
        FileLock::is_held(&folder.join(LOCK))
    }

    /// Returns the process that holds the lock, or has held it.
    pub(super) fn supervisor(folder: &Path) -> Option<ProcessIdentity> {
        read_json(&folder.join(LOCK))
    }

    /// Ends agents whose supervisor is gone.
    pub(super) fn end_agents(&self, deadline: Instant) {
        let agents: Vec<_> = self
            .nodes
            .iter()
            .filter_map(|node| node.agent.as_ref())
            .collect();
        for agent in &agents {
            agent.signal(Signal::TERM);
        }
        while agents.iter().any(|agent| agent.is_alive()) {
            if Instant::now() > deadline {
                agents.iter().for_each(|agent| agent.signal(Signal::KILL));
                return;
            }
            thread::sleep(POLL);
        }
    }

    /// Returns the failure of the node that ended first with an error.
    pub(super) fn failure(&self, spec: &JobSpec, folder: &Path) -> Option<Failure> {
        let failed = |node: &&(usize, &NodeState)| node.1.exit_code.is_some_and(|code| code != 0);
        let nodes: Vec<_> = self.nodes.iter().enumerate().collect();
        let (node, state) = nodes
            .iter()
            .filter(failed)
            .min_by_key(|(_, state)| state.ended)?;
        let lines = || last_lines(&node_log(folder, *node), LAST_LINES).unwrap_or_default();
        if let Some(mut failure) = read_failure(&folder.join("logs"), spec.name.as_str()) {
            if failure.last_lines.is_empty() {
                failure.last_lines = lines();
            }
            return Some(failure);
        }
        Some(Failure {
            instance: Some(Role::instance_name(spec.name.as_str(), *node)),
            exit_code: state.exit_code,
            reason: state
                .reason
                .clone()
                .unwrap_or_else(|| "the agent failed".to_owned()),
            last_lines: lines(),
        })
    }
}

/// A process, distinguished from others with the same number by its start time and the boot of its machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ProcessIdentity {
    pub(super) pid: i32,
    /// Clock ticks since the machine was started.
    start_time: u64,
    /// The id that Linux gives this boot of the machine, if there is one.
    boot: Option<String>,
}

impl ProcessIdentity {
    /// Identifies the process that has this number now.
    pub(super) fn of(pid: i32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name, the second field, is in parentheses and may have spaces; the start time is field 22.
        let (_, rest) = stat.rsplit_once(')')?;
        let start_time = rest.split_whitespace().nth(19)?.parse().ok()?;
        Some(Self {
            pid,
            start_time,
            boot: boot_id(),
        })
    }

    /// Returns `true` if it has not ended.
    pub(super) fn is_alive(&self) -> bool {
        Self::of(self.pid).as_ref() == Some(self)
    }

    /// Sends it a signal, unless it has ended.
    pub(super) fn signal(&self, signal: Signal) {
        let Some(pid) = Pid::from_raw(self.pid) else {
            return;
        };
        // Held before the check, so that the checked process is the one that gets the signal.
        let held = pidfd_open(pid, PidfdFlags::empty());
        if !self.is_alive() {
            return;
        }
        // It may have ended meanwhile.
        let _ = match held {
            Ok(process) => pidfd_send_signal(process, signal),
            // Some sandboxes have no such descriptors.
            Err(_) => kill_process(pid, signal),
        };
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    use super::*;

    #[test]
    fn a_look_at_the_lock_does_not_turn_a_supervisor_away() {
        let folder = tempfile::tempdir().unwrap();
        let this = ProcessIdentity::of(std::process::id() as i32).unwrap();
        let look = FileLock::create(&folder.path().join(LOCK), LockMode::Shared, Duration::ZERO);
        let look = look.unwrap().unwrap();
        let lock = thread::scope(|scope| {
            let supervisor = scope.spawn(|| LocalState::lock(folder.path(), &this).unwrap());
            thread::sleep(2 * POLL);
            drop(look);
            supervisor.join().unwrap()
        });
        assert!(LocalState::is_supervised(folder.path()).unwrap());
        assert!(LocalState::lock(folder.path(), &this).unwrap().is_none());
        drop(lock);
        assert!(!LocalState::is_supervised(folder.path()).unwrap());
    }

    #[test]
    fn a_process_of_another_start_of_the_machine_is_another() {
        let pid = i32::try_from(std::process::id()).unwrap();
        let this = ProcessIdentity::of(pid).unwrap();
        assert!(this.is_alive());
        let id = this.boot.clone().unwrap();
        for boot in [None, Some("0".to_owned()), Some(id.replace('-', ""))] {
            let before = ProcessIdentity {
                boot,
                ..this.clone()
            };
            assert!(!before.is_alive());
        }
    }

    #[test]
    fn only_the_very_process_gets_a_signal() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let this = ProcessIdentity::of(pid).unwrap();
        let before = ProcessIdentity {
            start_time: this.start_time - 1,
            ..this.clone()
        };
        before.signal(Signal::KILL);
        this.signal(Signal::TERM);
        assert_eq!(child.wait().unwrap().signal(), Some(15));
    }
}
