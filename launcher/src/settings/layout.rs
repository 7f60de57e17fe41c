//! How the ranks of a job are spread over hosts.

use std::num::NonZeroUsize;
use std::ops::Range;

use serde::{Deserialize, Serialize};

/// How many ranks each host runs. Ranks are numbered host by host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Layout {
    hosts: Vec<usize>,
}

impl Layout {
    /// All ranks on one host.
    pub(crate) fn of_one_host(ranks: NonZeroUsize) -> Self {
        Self::new(vec![ranks.get()])
    }

    /// So many ranks on each host, in the order of the hosts.
    pub(crate) fn new(hosts: Vec<usize>) -> Self {
        Self { hosts }
    }

    /// How many hosts there are.
    pub(crate) fn hosts(&self) -> usize {
        self.hosts.len()
    }

    /// How many ranks there are on all hosts.
    pub(crate) fn ranks(&self) -> usize {
        self.hosts.iter().sum()
    }

    /// The ranks of a host; none where there is no such host.
    pub(crate) fn ranks_of(&self, host: usize) -> Range<usize> {
        let before = self.hosts.iter().take(host).sum();
        before..before + self.hosts.get(host).copied().unwrap_or(0)
    }

    /// The host of a rank; behind the last one where there is no such rank.
    pub(crate) fn host_of(&self, rank: usize) -> usize {
        let mut end = 0;
        let before = self.hosts.iter().take_while(|&&ranks| {
            end += ranks;
            end <= rank
        });
        before.count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_numbered_host_by_host() {
        let layout = Layout::new(vec![2, 1, 3]);
        assert_eq!((layout.hosts(), layout.ranks()), (3, 6));
        let ranks = [0, 1, 2, 3].map(|host| layout.ranks_of(host));
        assert_eq!(ranks, [0..2, 2..3, 3..6, 6..6]);
        let hosts = [0, 1, 2, 3, 4, 5, 6].map(|rank| layout.host_of(rank));
        assert_eq!(hosts, [0, 0, 1, 2, 2, 2, 3]);
    }
}
