//! Facts of the machine: its name, clock, memory, cores and GPUs.

use std::ffi::OsStr;
use std::num::NonZeroUsize;
use std::process::Command;
use std::thread;
use std::time::{Duration, SystemTime};

use crate::process::{self, Group, Limits, Outcome};

/// Returns the name of this host, cut to 64 characters.
pub fn host_name() -> String {
    #[cfg(unix)]
    let name = rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned();
    #[cfg(not(unix))]
    let name = std::env::var("COMPUTERNAME").unwrap_or_default();
    match name.is_empty() {
        true => "an unnamed host".to_owned(),
        false => name.chars().take(64).collect(),
    }
}

/// Returns the random id of this start of the machine's kernel, if it has one. The containers of a machine
/// share it.
pub fn boot_id() -> Option<String> {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(id.trim().to_owned()).filter(|id| !id.is_empty())
}

/// Returns the time since 1970, or zero if the clock is set to an earlier time.
pub fn unix_time() -> Duration {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.unwrap_or_default()
}

/// The main memory of the machine, in bytes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Memory {
    /// All of it.
    pub total: u64,
    /// The part that programs can get without swapping.
    pub available: u64,
}

impl Memory {
    /// Returns the memory of this machine, if the system reports it.
    pub fn of_this_machine() -> Option<Self> {
        let text = std::fs::read_to_string("/proc/meminfo").ok()?;
        Some(Self {
            total: bytes(&text, "MemTotal:")?,
            available: bytes(&text, "MemAvailable:")?,
        })
    }

    /// Returns how many bytes of this process are in main memory, if the system reports it.
    pub fn of_this_process() -> Option<u64> {
        bytes(
            &std::fs::read_to_string("/proc/self/status").ok()?,
            "VmRSS:",
        )
    }
}

/// The cores that this process may use, according to its affinity and to the CPU quota of its control group.
#[derive(Clone, Debug)]
pub struct UsableCores {
    count: NonZeroUsize,
    numbers: Vec<usize>,
}

impl UsableCores {
    /// Queries the system.
    pub fn of_this_process() -> Self {
        let count = thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
        let numbers = affinity::of(None).filter(|numbers| numbers.len() == count.get());
        Self {
            count,
            numbers: numbers.unwrap_or_default(),
        }
    }

    /// Returns how many threads may compute at a time.
    pub fn count(&self) -> NonZeroUsize {
        self.count
    }

    /// Returns the system's numbers of the cores, to which threads may be bound.
    ///
    /// There are none if a quota grants fewer cores than the affinity allows: threads of other processes with quotas of
    /// their own run on the same cores, so the system has to choose. There are none, either, if the system has no
    /// affinity.
    pub fn numbers(&self) -> &[usize] {
        &self.numbers
    }

    /// Returns how many cores this process and the given ones may use together: at most the quota of this process.
    ///
    /// A process whose affinity cannot be read (it is gone, or the system has none) counts as running on the cores of
    /// this process.
    pub fn count_with(mut self, processes: impl IntoIterator<Item = u32>) -> usize {
        if self.numbers.is_empty() {
            return self.count.get();
        }
        for process in processes {
            self.numbers
                .extend(affinity::of(Some(process)).into_iter().flatten());
        }
        self.numbers.sort_unstable();
        self.numbers.dedup();
        self.numbers.len()
    }
}

/// Queries NVIDIA's tool, `nvidia-smi`, for each GPU, or for those that `ids` names as its option `-i` does.
///
/// `query` has the names of properties, separated by commas. Each GPU is a row of at least as many values: a name that
/// contains a comma becomes several. A line with fewer values, such as an error message of the tool, is no row. There
/// are no rows if the tool takes longer than `time`: it hangs if a device does.
pub fn nvidia_smi(
    program: impl AsRef<OsStr>,
    query: &str,
    ids: Option<&str>,
    time: Duration,
) -> Vec<Vec<String>> {
    let mut command = Command::new(program);
    command
        .arg(format!("--query-gpu={query}"))
        .arg("--format=csv,noheader,nounits");
    if let Some(ids) = ids {
        command.args(["-i", ids]);
    }
    let limits = Limits {
        time,
        output: 1 << 20,
        // It starts nothing, and Ctrl-C ends it with this program.
        group: Group::Callers,
    };
    let Ok(output) = process::run(&mut command, limits) else {
        return Vec::new();
    };
    if !matches!(output.outcome, Outcome::Ended(_)) {
        return Vec::new();
    }
    let values = |line: &str| -> Vec<String> {
        line.split(',')
            .map(|value| value.trim().to_owned())
            .collect()
    };
    let asked = query.split(',').count();
    let text = String::from_utf8_lossy(&output.stdout);
    let rows = text.lines().map(values);
    rows.filter(|row| row.len() >= asked).collect()
}

/// Reads a line such as `VmRSS: 1234 kB`.
fn bytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(target_os = "linux")]
mod affinity {
    use rustix::thread::{CpuSet, Pid, sched_getaffinity};

    /// Returns the cores on which a process, or this one, may run.
    pub(super) fn of(process: Option<u32>) -> Option<Vec<usize>> {
        let pid = match process {
            Some(process) => Some(Pid::from_raw(process.try_into().ok()?)?),
            None => None,
        };
        let set = sched_getaffinity(pid).ok()?;
        Some(
            (0..CpuSet::MAX_CPU)
                .filter(|core| set.is_set(*core))
                .collect(),
        )
    }
}

#[cfg(not(target_os = "linux"))]
mod affinity {
    pub(super) fn of(_process: Option<u32>) -> Option<Vec<usize>> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_counts_its_cores() {
        let own = UsableCores::of_this_process();
        let count = own.count().get();
        assert_eq!(own.clone().count_with([]), count);
        assert_eq!(own.clone().count_with([std::process::id()]), count);
        // No process has this number.
        assert_eq!(own.count_with([u32::MAX]), count);
    }

    #[test]
    fn a_quota_is_not_exceeded_by_the_cores_of_others() {
        let granted = UsableCores {
            count: NonZeroUsize::MIN,
            numbers: Vec::new(),
        };
        assert_eq!(granted.count_with([std::process::id()]), 1);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn linux_tells_its_facts() {
        let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
        assert_eq!(host_name(), name.trim());
        assert_eq!(boot_id(), boot_id());
        assert!(unix_time() > Duration::from_secs(1_700_000_000));
        let memory = Memory::of_this_machine().unwrap();
        let own = Memory::of_this_process().unwrap();
        assert!(own > 1 << 16 && own < memory.total);
        assert!(memory.available > 0 && memory.available <= memory.total);
    }

    #[test]
    fn sizes_are_read_in_bytes() {
        let text = "MemTotal:       16 kB\nMemFree:  x kB\nPages: 7\n";
        assert_eq!(bytes(text, "MemTotal:"), Some(16384));
        for name in ["MemFree:", "Pages:", "MemAvailable:"] {
            assert_eq!(bytes(text, name), None);
        }
    }

    #[cfg(unix)]
    #[test]
    fn a_gpu_is_a_row() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let tool = folder.path().join("nvidia-smi");
        let ask = |script: &str, ids| {
            std::fs::write(&tool, format!("#!/bin/sh\n{script}\n")).unwrap();
            std::fs::set_permissions(&tool, std::fs::Permissions::from_mode(0o755)).unwrap();
            nvidia_smi(&tool, "index,name", ids, Duration::from_secs(60))
        };
        let rows = ask(
            "echo '0, H100, 80GB'; echo 'A GPU is lost'; echo 1,[N/A]; exit 15",
            None,
        );
        assert_eq!(rows, [vec!["0", "H100", "80GB"], vec!["1", "[N/A]"]]);
        let rows = ask("echo \"$1; $2; $3; $4\"", Some("3"));
        let asked = "--query-gpu=index,name; --format=csv,noheader,nounits; -i; 3";
        assert_eq!(rows.concat().join(","), asked);
        assert!(ask("exit 9", None).is_empty());
        assert!(nvidia_smi("no-such-program", "index", None, Duration::ZERO).is_empty());
    }
}
