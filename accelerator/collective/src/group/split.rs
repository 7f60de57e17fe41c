//! Groups of some of the ranks.

use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::{ProcessGroup, data_path, rank_state::RankState};
use crate::error::{Error, Kind, Result};
use crate::topology::{Topology, TransportKind};
use crate::transport::{GroupId, Peer, Subset, Transport};

impl ProcessGroup {
    /// Divides the ranks of this group into new groups, like `MPI_Comm_split`. All ranks of this group must call it. Ranks
    /// that pass the same `color` form a group, and each rank gets a handle on its own group. Ranks of a new group are
    /// numbered by `key`; ranks with equal keys keep their order in this group.
    ///
    /// The new group has its own order of operations. Its options, timeouts, checks and results, to the bit, are those of
    /// a job with that many ranks (a *world*). It uses the existing connections, and costs two descriptors; with members
    /// on one host, also a file in memory with the steps of their operations (some 400 KiB) and buffers that it makes. Over
    /// several hosts, members that share one use its memory if they follow one another.
    ///
    /// A rank may use several groups at the same time, from several threads or with operations that it has started and
    /// not yet waited for. If one thread waits in several groups in turn, the orders of calls on all ranks must be
    /// compatible. Otherwise the ranks wait for each other in a circle.
    ///
    /// If one group of a job fails, all fail: the members of that group return the same error, and other ranks return one
    /// that names the same rank, or the one that told them. Errors and [`lost`](Self::lost) use ranks of the world.
    ///
    /// [`close`](Self::close) leaves only the group that it is called on. After the world is closed, none of its groups
    /// can be used. A rank can be in about 65,000 groups during a job, whether at the same time or in succession.
    ///
    /// ```
    /// use std::thread;
    ///
    /// use accelerator_collective::{GroupOptions, ProcessGroup, ReduceOp};
    ///
    /// # fn main() -> accelerator_collective::Result<()> {
    /// let ranks = ProcessGroup::threads(4, &GroupOptions::new())?;
    /// thread::scope(|scope| {
    ///     for world in ranks {
    ///         scope.spawn(move || -> accelerator_collective::Result<()> {
    ///             // Ranks 0 and 2, and ranks 1 and 3.
    ///             let group = world.split(world.rank() % 2, world.rank())?;
    ///             assert_eq!((group.rank(), group.world_size()), (world.rank() / 2, 2));
    ///             let mut values = [world.rank() as f32];
    ///             group.all_reduce(&mut values, ReduceOp::Sum)?;
    ///             assert_eq!(values, [[2.0], [4.0]][world.rank() % 2]);
    ///             Ok(())
    ///         });
    ///     }
    /// });
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Every rank of this group returns the same error: a misuse error if the ranks have made too many groups; an I/O error if
    /// there is no memory or descriptor for the new group; otherwise the errors of [`barrier`](Self::barrier).
    #[track_caller]
    pub fn split(&self, color: usize, key: usize) -> Result<Self> {
        let group = self.for_purpose("split").for_caller(self.location());
        let world = self.handle.rank_state.world();
        loop {
            let wishes = group.all_gather_object(&Wish {
                color,
                key,
                number: world.propose_group(),
                local_rank: world.topology.local_rank(),
            })?;
            // The first group of a rank is a part of the world.
            let hosts = world.hosts.get_or_init(|| {
                let local_ranks: Vec<usize> = wishes.iter().map(|wish| wish.local_rank).collect();
                hosts(world.transport.peers(), &local_ranks)
            });
            // Groups without a common rank may have the same number.
            let number = wishes.iter().map(|wish| wish.number).max().unwrap_or(0);
            world.note_group(number);
            let Ok(id) = u16::try_from(number).map(GroupId) else {
                return Err(Error::misuse(format!(
                    "a rank can be in at most {} groups during a job; make groups once and reuse them",
                    u16::MAX
                )));
            };
            let members = members(&wishes, color);
            let made = self.subgroup(id, hosts, &members);
            // Nobody sends before all can receive.
            let outcomes = group.all_gather_object(&match &made {
                Ok(Some(_)) => Outcome::Made,
                Ok(None) => Outcome::Taken,
                Err(error) => Outcome::Failed(error.to_string()),
            })?;
            for (rank, outcome) in outcomes.iter().enumerate() {
                if let Outcome::Failed(text) = outcome {
                    world.transport.forget(id);
                    let rank = self.handle.rank_state.transport.member(rank);
                    let text = format!("rank {rank} cannot make a group: {text}");
                    return Err(Error::about(Kind::Io, vec![rank], text));
                }
            }
            let Ok(Some((topology, transport))) = made else {
                continue;
            };
            if outcomes.contains(&Outcome::Taken) {
                world.transport.forget(id);
                continue;
            }
            let made = self.with_state(RankState::in_world(world, topology, transport));
            let asked = match world.transport.kind() {
                TransportKind::Tcp => Some(TransportKind::Tcp),
                TransportKind::Threads => None,
                _ => Some(TransportKind::Auto),
            };
            if let Some(asked) = asked.filter(|_| members.len() > 1) {
                data_path::negotiate(&made.handle.rank_state, asked, Instant::now())?;
            }
            return Ok(made);
        }
    }

    /// This rank's part of a new group; `None` if its number is taken.
    fn subgroup(
        &self,
        id: GroupId,
        hosts: &[usize],
        members: &[usize],
    ) -> Result<Option<(Topology, Transport)>> {
        let (rank_state, me) = (&self.handle.rank_state, self.rank());
        let transport = &rank_state.transport;
        let position = |rank: usize| members.iter().position(|member| *member == rank);
        // It gave its own color.
        let rank = position(me).unwrap_or_default();
        let host = |rank: usize| hosts[transport.member(rank)];
        let here: Vec<usize> = members
            .iter()
            .copied()
            .filter(|member| host(*member) == host(me))
            .collect();
        let local = here.iter().position(|member| *member == me);
        let topology = Topology::new(rank, members.len())?;
        let topology = topology.with_local(local.unwrap_or_default(), here.len())?;
        if !transport.inbox().open_group(id) {
            return Ok(None);
        }
        let ranks = members.iter().map(|member| transport.member(*member));
        let world = &rank_state.world().transport;
        match world.of_subset(Subset::new(id, ranks.collect()), rank) {
            Ok(transport) => Ok(Some((topology, transport))),
            Err(error) => {
                transport.inbox().close_group(id);
                Err(error)
            }
        }
    }

    /// A handle on a new group of this rank, which keeps this one open.
    fn with_state(&self, rank_state: Arc<RankState>) -> Self {
        let key = self.handle.key.clone();
        Self::of(rank_state, key, Some(Arc::clone(&self.handle)))
    }
}

/// The arguments of a rank.
#[derive(Debug, Deserialize, Serialize)]
struct Wish {
    color: usize,
    key: usize,
    /// A number that no group of this rank has had.
    number: u32,
    /// The rank's number on its host, in the world.
    local_rank: usize,
}

/// The outcome of a rank.
#[derive(Debug, Deserialize, Eq, PartialEq, Serialize)]
enum Outcome {
    Made,
    /// Another thread of the rank has taken the number meanwhile.
    Taken,
    Failed(String),
}

/// The ranks that passed a color, in the order of their keys.
fn members(wishes: &[Wish], color: usize) -> Vec<usize> {
    let mut members: Vec<usize> = (0..wishes.len())
        .filter(|rank| wishes[*rank].color == color)
        .collect();
    members.sort_by_key(|rank| wishes[*rank].key);
    members
}

/// Returns the host of each rank, as the lowest rank on it. The ranks of a host need not follow one another. Hosts of the
/// same name are distinguished by local ranks, since each occurs once per host.
fn hosts(peers: &[Peer], local_ranks: &[usize]) -> Vec<usize> {
    let mut found: Vec<usize> = Vec::new();
    for (rank, local_rank) in local_ranks.iter().enumerate() {
        let lacks_it = |host: usize| {
            let mut others = found.iter().zip(local_ranks);
            !others.any(|(other, local)| *other == host && local == local_rank)
        };
        let mut before = (0..rank).filter(|other| found[*other] == *other);
        let beside =
            before.find(|host| peers[*host].host() == peers[rank].host() && lacks_it(*host));
        found.push(beside.unwrap_or(rank));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::PeerLocation;

    fn peers(names: &[&str]) -> Vec<Peer> {
        let peer = |(rank, host): (usize, &&str)| Peer {
            rank,
            location: PeerLocation::Process {
                host: (*host).to_owned(),
                pid: 7,
            },
        };
        names.iter().enumerate().map(peer).collect()
    }

    #[test]
    fn hosts_may_take_turns_or_have_one_name() {
        let found = |names: &[&str], local_ranks: &[usize]| hosts(&peers(names), local_ranks);
        assert_eq!(found(&["a", "a", "b"], &[0, 1, 0]), [0, 0, 2]);
        assert_eq!(found(&["a", "b", "a", "b"], &[0, 0, 1, 1]), [0, 1, 0, 1]);
        assert_eq!(found(&["pod"; 4], &[0, 1, 0, 1]), [0, 0, 2, 2]);
        assert_eq!(found(&["pod"; 3], &[0, 0, 1]), [0, 1, 0]);
    }
}
