//! The place of a rank in its world, and the names of the ways in which ranks are connected.

use std::{fmt, str::FromStr};

use crate::element::names;
use crate::error::{Error, Result};

/// The place of one rank: its number in the whole job and on its host.
///
/// A topology is always consistent: a rank is below its world size, a local rank below its local
/// world size, and no host holds more ranks than the world.
///
/// ```
/// use accelerator_collective::Topology;
///
/// # fn main() -> accelerator_collective::Result<()> {
/// let topology = Topology::new(5, 8)?.with_local(1, 4)?;
/// assert_eq!(topology.to_string(), "rank 5 of 8 (local 1 of 4)");
/// assert!(!topology.is_main());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Topology {
    rank: usize,
    world_size: usize,
    local_rank: usize,
    local_world_size: usize,
    is_local_known: bool,
}

impl Topology {
    /// The most ranks that a job may have: a bound against settings gone wrong.
    pub const LARGEST: usize = 8192;

    /// The only rank of a world of one.
    pub fn single() -> Self {
        Self {
            rank: 0,
            world_size: 1,
            local_rank: 0,
            local_world_size: 1,
            is_local_known: true,
        }
    }

    /// A rank of a world that lies on one host; [`with_local`](Self::with_local) says otherwise.
    ///
    /// # Errors
    ///
    /// A topology error where the world is empty or the rank outside it.
    pub fn new(rank: usize, world_size: usize) -> Result<Self> {
        if world_size == 0 {
            return Err(Error::topology(
                "a world size of 0 was given; it counts the ranks of the job and is at least 1",
            ));
        }
        if world_size > Self::LARGEST {
            return Err(Error::topology(format!(
                "a world size of {world_size} was given; at most {} ranks can form a job",
                Self::LARGEST
            )));
        }
        if rank >= world_size {
            return Err(Error::topology(format!(
                "rank {rank} is outside the world: with a world size of {world_size}, ranks \
                     are 0 to {}",
                world_size - 1
            )));
        }
        Ok(Self {
            rank,
            world_size,
            local_rank: rank,
            local_world_size: world_size,
            is_local_known: true,
        })
    }

    /// The same rank with its place on its host.
    ///
    /// # Errors
    ///
    /// A topology error where the host is empty, holds more ranks than the world, or the local
    /// rank is outside it.
    pub fn with_local(self, local_rank: usize, local_world_size: usize) -> Result<Self> {
        if local_world_size == 0 || local_world_size > self.world_size {
            return Err(Error::topology(format!(
                "a local world size of {local_world_size} was given; it counts the ranks of \
                     this host and lies between 1 and the world size, {}",
                self.world_size
            )));
        }
        if local_rank >= local_world_size {
            return Err(Error::topology(format!(
                "local rank {local_rank} is outside its host: with a local world size of \
                     {local_world_size}, local ranks are 0 to {}",
                local_world_size - 1
            )));
        }
        Ok(Self {
            local_rank,
            local_world_size,
            is_local_known: true,
            ..self
        })
    }

    /// The same rank, whose place on its host is found when the ranks meet.
    pub(crate) fn without_local(self) -> Self {
        Self {
            local_rank: 0,
            local_world_size: 1,
            is_local_known: false,
            ..self
        }
    }

    /// This rank's number in the job, from 0.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The number of ranks of the job.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// This rank's number on its host, from 0.
    pub fn local_rank(&self) -> usize {
        self.local_rank
    }

    /// The number of ranks on this host.
    pub fn local_world_size(&self) -> usize {
        self.local_world_size
    }

    /// Returns true if the local rank and the local world size are known, as they are in every group.
    ///
    /// If [`Launch`](crate::Launch) does not tell them, they are found when the ranks connect; until then they
    /// are 0 and 1.
    pub fn is_local_known(&self) -> bool {
        self.is_local_known
    }

    /// Returns `true` if this is rank 0 of the job.
    pub fn is_main(&self) -> bool {
        self.rank == 0
    }

    /// Returns `true` if this is the first rank of its host.
    pub fn is_local_main(&self) -> bool {
        self.local_rank == 0
    }

    /// Returns `true` if this is the highest rank of the job.
    pub fn is_last(&self) -> bool {
        self.rank + 1 == self.world_size
    }
}

impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {} (local ", self.rank, self.world_size)?;
        match self.is_local_known {
            true => write!(f, "{} of {})", self.local_rank, self.local_world_size),
            false => f.write_str("rank not known yet)"),
        }
    }
}

/// The way in which the ranks of a group are connected.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum TransportKind {
    /// The best that serves all ranks.
    #[default]
    Auto,
    /// Shared memory between the processes of each host, TCP connections between hosts.
    ///
    /// An all-reduce combines the values of each host in rank order, then those of the hosts in
    /// their order, so that a host sends no more than one rank would. Other operations, and means
    /// of integers, go by connections. The ranks of a host must follow one another.
    Hierarchical,
    /// Memory that the processes of one host share.
    Shm,
    /// TCP connections between processes.
    Tcp,
    /// Memory of the one process whose threads the ranks are.
    Threads,
}

names! {
    TransportKind, ALL, name {
        Auto "auto",
        Hierarchical "hierarchical",
        Shm "shm",
        Tcp "tcp",
        Threads "threads",
    }
}

impl fmt::Display for TransportKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for TransportKind {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::ALL
            .into_iter()
            .find(|kind| kind.name() == text)
            .ok_or_else(|| {
                Error::misuse(format!(
                    "{text:?} is no transport; expected {}",
                    accelerator_host::TRANSPORT.grammar
                ))
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_places_are_refused() {
        assert!(Topology::new(0, 0).unwrap_err().is_topology());
        assert!(Topology::new(3, 3).unwrap_err().is_topology());
        let rank = Topology::new(2, 3).unwrap();
        assert!(rank.with_local(0, 0).is_err());
        assert!(rank.with_local(0, 4).is_err());
        assert!(rank.with_local(2, 2).is_err());
        assert!(rank.is_last() && !rank.is_main());
        assert!(rank.with_local(0, 1).unwrap().is_local_main());
        assert_eq!(Topology::single(), Topology::new(0, 1).unwrap());
    }
    #[test]
    fn the_variable_has_the_names_of_all_transports() {
        let names = TransportKind::ALL.map(TransportKind::name);
        assert_eq!(accelerator_host::TRANSPORT.words(), names);
    }
}
