//! Following what the hosts of ranks measured.

use std::collections::BTreeMap;
use std::path::Path;

use super::{Followed, Follower, rank_journals};
use crate::error::Result;
use crate::record::Entry;
use crate::sink::Delivery;
use crate::warning::warn;

/// The journals of all ranks. One that cannot be read is told and then passed over: it is no part of the run's results.
#[derive(Debug, Default)]
pub(crate) struct RankJournals {
    /// None cannot be read.
    followers: BTreeMap<usize, Option<Follower>>,
}

impl RankJournals {
    /// Up to `limit` further entries of each rank.
    pub(crate) fn poll(&mut self, folder: &Path, limit: usize) -> Vec<(usize, Vec<Entry>)> {
        let mut polled = Vec::new();
        for (rank, path) in rank_journals(folder) {
            let open = || Follower::open(&path, Delivery::Live);
            let follower = match self.followers.remove(&rank) {
                None => open(),
                Some(Some(follower)) => Ok(follower),
                Some(None) => {
                    self.followers.insert(rank, None);
                    continue;
                }
            };
            let read =
                follower.and_then(|mut follower| Ok((next(&mut follower, limit)?, follower)));
            let follower = match read {
                Ok((entries, follower)) => {
                    if !entries.is_empty() {
                        polled.push((rank, entries));
                    }
                    Some(follower)
                }
                Err(error) => {
                    warn(&format!(
                        "what the host of rank {rank} measured is left out from here on: {error}"
                    ));
                    None
                }
            };
            self.followers.insert(rank, follower);
        }
        polled
    }
}

fn next(follower: &mut Follower, limit: usize) -> Result<Vec<Entry>> {
    Ok(match follower.poll(limit)? {
        Followed::Entries(entries) => entries,
        // Nothing in them is ever taken back.
        Followed::Superseded => Vec::new(),
    })
}
