//! Groups of some of the ranks.

use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::{ProcessGroup, data_path, rank_state::RankState};
use crate::error::{Error, Kind, Result};
use crate::topology::{Topology, TransportKind};
use crate::transport::{GroupId, Subset, Transport};

impl ProcessGroup {
    /// Divides the ranks of this group into new groups, like `MPI_Comm_split`. All ranks of this group must call it. Ranks
    /// that pass the same `color` form a group, and each rank gets a handle on its own group. Ranks of a new group are
    /// numbered by `key`; ranks with equal keys keep their order in this group.
    ///
    /// The new group has its own order of operations. Its options, timeouts, checks and results, to the bit, are those of
    /// a job with that many ranks (a *world*). It uses the existing connections. It costs a few kilobytes and two
    /// descriptors, and buffers in shared memory if its members are on one host. Over several hosts, members that share
    /// one use its memory if they follow one another.
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
        let began = Instant::now();
        loop {
            let topology = &world.topology;
            let wishes = group.all_gather_object(&Wish {
                color,
                key,
                number: world.propose_group(),
                host: topology.rank() - topology.local_rank(),
            })?;
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
            let made = self.subgroup(id, &wishes, &members);
            // Nobody sends before all can receive.
            let outcomes = group.all_gather_object(&match &made {
                Ok(Some(_)) => Outcome::Made,
                Ok(None) => Outcome::Taken,
                Err(error) => Outcome::Failed(error.to_string()),
            })?;
            for (rank, outcome) in outcomes.iter().enumerate() {
                if let Outcome::Failed(text) = outcome {
                    let rank = self.handle.rank_state.transport.member(rank);
                    let text = format!("rank {rank} cannot make a group: {text}");
                    return Err(Error::about(Kind::Io, vec![rank], text));
                }
            }
            let Ok(Some((topology, transport))) = made else {
                continue;
            };
            if outcomes.contains(&Outcome::Taken) {
                continue;
            }
            let rank_state = RankState::in_world(world, topology, transport);
            let made = self.with_state(Arc::new(rank_state));
            let asked = match world.transport.kind() {
                TransportKind::Tcp => Some(TransportKind::Tcp),
                TransportKind::Threads => None,
                _ => Some(TransportKind::Auto),
            };
            if let Some(asked) = asked.filter(|_| members.len() > 1) {
                data_path::negotiate(&made.handle.rank_state, asked, began)?;
            }
            return Ok(made);
        }
    }

    /// This rank's part of a new group; `None` if its number is taken.
    fn subgroup(
        &self,
        id: GroupId,
        wishes: &[Wish],
        members: &[usize],
    ) -> Result<Option<(Topology, Transport)>> {
        let (rank_state, me) = (&self.handle.rank_state, self.rank());
        let transport = &rank_state.transport;
        let position = |rank: usize| members.iter().position(|member| *member == rank);
        // It gave its own color.
        let rank = position(me).unwrap_or_default();
        let here: Vec<usize> = members
            .iter()
            .copied()
            .filter(|member| wishes[*member].host == wishes[me].host)
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
    /// The first rank of its host.
    host: usize,
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
