//! The place of a process, as the variables of one launcher give it.

use super::{
    exchange::Wire,
    reader::{LaunchReader, LaunchSource},
};
use crate::{
    error::{Error, Result},
    topology::Topology,
};

/// The place of this process, and how it meets the others.
pub(super) struct Place {
    pub(super) source: LaunchSource,
    pub(super) rank: usize,
    pub(super) world_size: usize,
    pub(super) local: HostPlace,
    /// The variables that gave it.
    pub(super) names: &'static PlaceVariables,
    pub(super) meeting: MeetingPlace,
}

/// The local rank and the number of local ranks, as far as the launcher gives them.
#[derive(Clone, Copy)]
pub(super) enum HostPlace {
    Unknown,
    /// The local rank alone. The rest is found when the ranks meet, and has to agree with it.
    Rank(usize),
    RankAndSize(usize, usize),
}

/// The place where ranks meet whose variables name no `MASTER_ADDR`.
pub(super) enum MeetingPlace {
    /// No variable names it; the text says why, for the error.
    Unknown(String),
    /// A store on rank 0, whose address follows from the variables.
    Store(DerivedStore),
    /// An address that rank 0 tells the others through the launcher.
    Exchanged(Wire),
}

/// The address of a store, derived from the variables of a launcher.
pub(super) struct DerivedStore {
    pub(super) host: String,
    /// The port, unless a variable gives another one.
    pub(super) port: u16,
    pub(super) job: String,
}

/// The store port of the job with this number, from 21000 to 28999: below the ports that systems give out.
pub(super) fn derived_port(number: u64) -> u16 {
    const FIRST: u16 = 21_000;
    const COUNT: u64 = 8_000;
    // The rest is below `COUNT`.
    FIRST + (number % COUNT) as u16
}

/// The variables by which a launcher tells each process its place.
pub(super) struct PlaceVariables {
    pub(super) launcher: &'static str,
    /// Its rank among all processes of the job.
    pub(super) rank: &'static str,
    /// The number of processes of the job.
    pub(super) world_size: &'static str,
    /// Its rank among those of its host.
    pub(super) local_rank: &'static str,
    /// The number of processes of the job on its host.
    pub(super) local_world_size: &'static str,
}

impl PlaceVariables {
    /// The place that they give; `None` if none of them is set.
    ///
    /// # Errors
    ///
    /// A topology error if they are incomplete, malformed or impossible.
    pub(super) fn place(
        &'static self,
        vars: LaunchReader<'_>,
        meeting: impl FnOnce(&Place) -> Result<MeetingPlace>,
    ) -> Result<Option<Place>> {
        let [rank_name, size_name] = [self.rank, self.world_size];
        let (rank, world_size) = match (vars.number(rank_name)?, vars.number(size_name)?) {
            (Some(rank), Some(world_size)) => (rank, world_size),
            (None, None) => {
                for name in [self.local_rank, self.local_world_size] {
                    if let Some(value) = vars.number(name)? {
                        return Err(Error::topology(format!(
                            "{name} is {value}, but neither {rank_name} nor {size_name} is set; set all \
                             of them, or none for a single process"
                        )));
                    }
                }
                return Ok(None);
            }
            (Some(rank), None) => {
                return Err(Error::topology(format!(
                    "{rank_name} is {rank}, but {size_name} is not set; set both, or neither for a single \
                     process"
                )));
            }
            (None, Some(world_size)) => {
                return Err(Error::topology(format!(
                    "{size_name} is {world_size}, but {rank_name} is not set; set both, or neither for a \
                     single process"
                )));
            }
        };
        let local = match (
            vars.number(self.local_rank)?,
            vars.number(self.local_world_size)?,
        ) {
            (Some(rank), Some(size)) => HostPlace::RankAndSize(rank, size),
            (Some(rank), None) => HostPlace::Rank(rank),
            (None, None) => HostPlace::Unknown,
            (None, Some(size)) => {
                return Err(Error::topology(format!(
                    "{} is {size}, but {} is not set; set both or neither",
                    self.local_world_size, self.local_rank
                )));
            }
        };
        let mut place = Place {
            source: LaunchSource {
                launcher: self.launcher,
                variable: rank_name,
            },
            rank,
            world_size,
            local,
            names: self,
            meeting: MeetingPlace::Unknown(String::new()),
        };
        place.check()?;
        place.meeting = meeting(&place)?;
        Ok(Some(place))
    }
}

impl Place {
    /// Rejects impossible places.
    pub(super) fn check(&self) -> Result<()> {
        let Self {
            rank,
            world_size,
            names,
            ..
        } = *self;
        let [rank_name, size_name] = [names.rank, names.world_size];
        if world_size == 0 {
            return Err(Error::topology(format!(
                "{size_name} is \"0\"; expected the number of processes of the job, at least 1"
            )));
        }
        if rank >= world_size {
            return Err(Error::topology(format!(
                "{rank_name} is {rank}, but {size_name} is {world_size}; expected a rank from 0 to {}",
                world_size - 1
            )));
        }
        let [local_rank_name, local_size_name] = [names.local_rank, names.local_world_size];
        let local_rank = match self.local {
            HostPlace::Unknown => return Ok(()),
            HostPlace::Rank(rank) => rank,
            HostPlace::RankAndSize(local_rank, size) => {
                if size == 0 || size > world_size {
                    return Err(Error::topology(format!(
                        "{local_size_name} is {size}, but {size_name} is {world_size}; expected the number of \
                         processes on this host, from 1 to {size_name}"
                    )));
                }
                if local_rank >= size {
                    return Err(Error::topology(format!(
                        "{local_rank_name} is {local_rank}, but {local_size_name} is {size}; expected a \
                         local rank from 0 to {}",
                        size - 1
                    )));
                }
                local_rank
            }
        };
        match local_rank > rank {
            true => Err(Error::topology(format!(
                "{local_rank_name} is {local_rank}, but {rank_name} is {rank}; a host's ranks are counted \
                 from the job's, so {local_rank_name} is never above {rank_name}"
            ))),
            false => Ok(()),
        }
    }

    /// The topology, without a place on the host if the variables do not give it in full.
    pub(super) fn topology(&self) -> Result<Topology> {
        let topology = Topology::new(self.rank, self.world_size)?;
        match self.local {
            HostPlace::RankAndSize(rank, size) => topology.with_local(rank, size),
            HostPlace::Rank(_) | HostPlace::Unknown => Ok(topology.without_local()),
        }
    }

    /// Returns `true` if the variables show that all ranks are on one host.
    pub(super) fn is_on_one_host(&self) -> bool {
        matches!(self.local, HostPlace::RankAndSize(_, size) if size == self.world_size)
    }
}
