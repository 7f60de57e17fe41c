//! Processes of this machine that outlive the command that started them.

use std::fs;

use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};

/// A process, identified by its number, the time of its start, and the boot of its machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::engine) struct ProcessIdentity {
    pub(in crate::engine) pid: i32,
    /// Clock ticks since the machine was started.
    start_time: u64,
    /// The beginning of the random id that Linux gives to each boot.
    boot: u64,
}

impl ProcessIdentity {
    /// Of the process that has this number now.
    pub(in crate::engine) fn of(pid: i32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name, the second field, is in parentheses and may have blanks; the start time is field 22.
        let (_, rest) = stat.rsplit_once(')')?;
        let start_time = rest.split_whitespace().nth(19)?.parse().ok()?;
        Some(Self {
            pid,
            start_time,
            boot: boot(),
        })
    }

    /// Whether it has not ended.
    pub(in crate::engine) fn is_alive(self) -> bool {
        Self::of(self.pid) == Some(self)
    }

    /// Sends it a signal; one that has ended is left alone.
    pub(in crate::engine) fn signal(self, signal: Signal) {
        if self.is_alive()
            && let Some(pid) = Pid::from_raw(self.pid)
        {
            // It may have ended meanwhile.
            let _ = kill_process(pid, signal);
        }
    }
}

/// Returns the boot id; 0 if the system has none.
fn boot() -> u64 {
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let digits: String = id.chars().filter(|c| *c != '-').take(16).collect();
    u64::from_str_radix(&digits, 16).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_of_another_start_of_the_machine_is_another() {
        let pid = i32::try_from(std::process::id()).unwrap();
        let this = ProcessIdentity::of(pid).unwrap();
        assert!(this.is_alive());
        let before = ProcessIdentity {
            boot: this.boot.wrapping_add(1),
            ..this
        };
        assert!(!before.is_alive());
    }
}
