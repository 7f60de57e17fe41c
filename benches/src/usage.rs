use core::ops::Sub;

use serde::{Deserialize, Serialize};

/// The seconds per tick of the process times of Linux: `USER_HZ` is 100 on every architecture that Rust's standard
/// library supports.
const TICK: f64 = 0.01;

/// The resources that a process has used, as Linux counts them; zeros elsewhere.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize)]
pub struct Usage {
    /// Processor seconds in the program.
    pub user: f64,
    /// Processor seconds in the kernel.
    pub system: f64,
    /// Memory pages first touched.
    pub faults: u64,
}

impl Usage {
    /// Returns what this process has used so far, over all its threads.
    pub fn of_this_process() -> Self {
        std::fs::read_to_string("/proc/self/stat")
            .ok()
            .and_then(|text| Self::parse(&text))
            .unwrap_or_default()
    }

    /// Reads `/proc/PID/stat`; see proc_pid_stat(5).
    fn parse(text: &str) -> Option<Self> {
        // The name, in parentheses, may itself contain spaces and parentheses.
        let (_, fields) = text.rsplit_once(") ")?;
        let field = |number: usize| fields.split(' ').nth(number - 3)?.parse::<u64>().ok();
        Some(Self {
            user: field(14)? as f64 * TICK,
            system: field(15)? as f64 * TICK,
            faults: field(10)?,
        })
    }
}

impl Sub for Usage {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        Self {
            user: self.user - earlier.user,
            system: self.system - earlier.system,
            faults: self.faults.saturating_sub(earlier.faults),
        }
    }
}

/// Returns the peak memory of this process so far, in KiB; `None` if Linux does not report it.
pub fn peak_memory() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fields_are_counted_behind_the_name() {
        let text = "7 (a ) b) S 1 7 7 0 -1 0 321 0 0 0 150 25 0 0 20 0 1 0 99";
        let usage = Usage::parse(text).unwrap();
        assert_eq!(usage.faults, 321);
        assert!((usage.user - 1.5).abs() < 1e-9);
        assert!((usage.system - 0.25).abs() < 1e-9);
    }
}
