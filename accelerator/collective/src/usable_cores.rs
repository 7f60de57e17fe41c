//! The cores that a process may use.

use std::num::NonZeroUsize;
use std::thread;

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
    pub(crate) fn count_with(mut self, processes: impl IntoIterator<Item = u32>) -> usize {
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
}
