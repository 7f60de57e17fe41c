//! Processes of this machine that outlive the command that started them.

use std::fs;

use accelerator_host::machine::boot_id;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};

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
