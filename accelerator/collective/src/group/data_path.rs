//! The path of data, on which processes agree once they are connected by the TCP mesh.

use std::{fmt, ops::Range, time::Instant};

use serde::{Deserialize, Serialize};

use super::rank_state::RankState;
use crate::{
    element::DType,
    error::{Error, Kind, Result},
    fingerprint::{CallSite, CollectiveFingerprint, OpKind},
    shm::ArenaId,
    topology::TransportKind,
    transport::DataPath,
    wire::to_bytes,
};

/// Lets the ranks of a group, which are connected by the mesh, agree on the path of data: the memory of their hosts,
/// else the mesh. All ranks exchange what the choice depends on, so all choose alike.
///
/// It is part of connecting, which began at `began`, and has what is left of the connect timeout.
///
/// # Errors
///
/// The reason, the same on every rank, if a path was asked for that does not serve all ranks; otherwise as an
/// operation.
pub(super) fn negotiate(
    rank_state: &RankState,
    asked: TransportKind,
    began: Instant,
) -> Result<()> {
    if asked == TransportKind::Tcp {
        return Ok(());
    }
    let unavailable = match arrange(rank_state, asked, began)? {
        Ok(path) => {
            match &path {
                DataPath::Hierarchical(hosts) => tracing::debug!(
                    hosts = hosts.len(),
                    lanes = hosts.lanes(),
                    "the ranks share the memory of their hosts, which are connected by TCP"
                ),
                _ => tracing::debug!("the ranks share the memory of their host"),
            }
            rank_state.transport.set_path(path);
            return Ok(());
        }
        Err(unavailable) => unavailable,
    };
    if asked != TransportKind::Auto {
        return Err(Error::about(
            Kind::Topology,
            unavailable.ranks,
            format!(
                "the transport `{asked}` was asked for, but {}; ask for auto or tcp",
                unavailable.text
            ),
        ));
    }
    match unavailable.kind {
        UnavailableKind::NothingToShare => {
            tracing::debug!("the ranks exchange data by TCP: {unavailable}");
        }
        // All of them see it.
        UnavailableKind::Failed if rank_state.is_part() => {
            tracing::debug!("the ranks of a group exchange data by TCP: {unavailable}");
        }
        UnavailableKind::Failed if rank_state.topology.is_main() => tracing::warn!(
            "ranks of one host exchange data by TCP, which is slower than the memory that they \
             could share: {unavailable}"
        ),
        UnavailableKind::Failed => {}
    }
    Ok(())
}

/// The reason that a path does not serve all ranks, in the same words on every rank.
#[derive(Debug)]
struct Unavailable {
    kind: UnavailableKind,
    ranks: Vec<usize>,
    text: String,
}

#[derive(Clone, Copy, Debug)]
enum UnavailableKind {
    NothingToShare,
    /// Ranks of one host could share, but for this.
    Failed,
}

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// A rank's account of its host and memory, for the other ranks.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
struct HostInfo {
    /// The machine on which it runs, since when.
    host: String,
    first: usize,
    pid: u32,
    /// The arena that the others map, or the reason that there is none.
    memory: Result<ArenaId, String>,
}

/// Returns the reason that memory cannot be shared as `asked`, if the exchanged infos show one. All ranks asked for
/// the same transport.
fn unavailable(asked: TransportKind, infos: &[HostInfo]) -> Option<Unavailable> {
    let hosts = hosts(infos);
    if let Some(second) = hosts.get(1)
        && (asked == TransportKind::Shm || hosts.len() == infos.len())
    {
        return Some(Unavailable {
            kind: UnavailableKind::NothingToShare,
            ranks: vec![0, second.start],
            text: match asked == TransportKind::Hierarchical {
                true => "no host holds two ranks".to_owned(),
                false => format!("ranks 0 and {} are on different hosts", second.start),
            },
        });
    }
    if let Some(host) = hosts
        .iter()
        .find(|host| infos[host.start].first != host.start)
    {
        return Some(Unavailable {
            kind: UnavailableKind::Failed,
            ranks: vec![host.start],
            text: format!(
                "rank {} says that the first rank of its host is {}: the ranks of a host must \
                 follow one another, as their local ranks do",
                host.start, infos[host.start].first
            ),
        });
    }
    infos.iter().enumerate().find_map(|(rank, info)| {
        let error = info.memory.as_ref().err()?;
        Some(Unavailable {
            kind: UnavailableKind::Failed,
            ranks: vec![rank],
            text: format!("rank {rank} has no memory to share: {error}"),
        })
    })
}

/// The ranks of each host, as far as they follow one another.
fn hosts(infos: &[HostInfo]) -> Vec<Range<usize>> {
    let mut hosts: Vec<Range<usize>> = Vec::new();
    for (rank, info) in infos.iter().enumerate() {
        match hosts.last_mut() {
            Some(host) if infos[host.start].is_beside(info) => host.end = rank + 1,
            _ => hosts.push(rank..rank + 1),
        }
    }
    hosts
}

impl HostInfo {
    fn is_beside(&self, other: &Self) -> bool {
        (&self.host, self.first) == (&other.host, other.first)
    }
}

fn exchange<T>(rank_state: &RankState, began: Instant, value: &T) -> Result<Vec<T>>
where
    T: Serialize + for<'a> Deserialize<'a>,
{
    let own = to_bytes(value);
    let fingerprint = CollectiveFingerprint::new(OpKind::Connect, CallSite::new(file!(), line!()))
        .with_data(DType::U8, own.len());
    let mut all = vec![Vec::new(); rank_state.topology.world_size()];
    let timeouts = rank_state.options.connect_timeouts(began.elapsed());
    rank_state.run_op(0, &fingerprint, timeouts, |ctx| {
        ctx.gather(
            &own,
            |_, _| true,
            |rank, piece| all[rank].extend_from_slice(piece),
        )
    })?;
    all[rank_state.topology.rank()] = own;
    let read = all.iter().enumerate().map(|(rank, bytes)| {
        ciborium::from_reader(&bytes[..]).map_err(|error| {
            let text = format!("what rank {rank} says about its host cannot be read");
            Error::caused(Kind::Protocol, text, error)
        })
    });
    read.collect()
}

#[cfg(target_os = "linux")]
use linux::arrange;

#[cfg(not(target_os = "linux"))]
fn arrange(
    rank_state: &RankState,
    asked: TransportKind,
    began: Instant,
) -> Result<Result<DataPath, Unavailable>> {
    let info = HostInfo {
        host: String::new(),
        first: 0,
        pid: std::process::id(),
        memory: Err("this system has no files in memory".to_owned()),
    };
    let infos = exchange(rank_state, began, &info)?;
    // Every rank here says that it has none.
    Ok(Err(unavailable(asked, &infos).unwrap_or(Unavailable {
        kind: UnavailableKind::NothingToShare,
        ranks: Vec::new(),
        text: "the ranks have no memory to share".to_owned(),
    })))
}

#[cfg(target_os = "linux")]
mod linux {
    use std::{os::fd::AsRawFd, sync::Arc, time::Instant};

    use super::{HostInfo, Unavailable, UnavailableKind, exchange, hosts, unavailable};
    use crate::{
        error::{Error, Result},
        group::rank_state::RankState,
        rendezvous::random,
        shm::{Arena, ArenaId, Hosts, Room, ShmPeers, Spin},
        topology::TransportKind,
        transport::{DataPath, Peer, PeerLocation},
    };
    use accelerator_host::machine::{UsableCores, boot_id};

    /// Opens the memory of this host's ranks: each rank tells where it runs and where its memory is, opens that of the
    /// others, and tells whether it could.
    pub(super) fn arrange(
        rank_state: &RankState,
        asked: TransportKind,
        began: Instant,
    ) -> Result<Result<DataPath, Unavailable>> {
        let (rank, topology) = (rank_state.topology.rank(), &rank_state.topology);
        let nonce: [u8; 32] = random()?;
        let nonce = [0, 8].map(|at| {
            let mut word = [0; 8];
            word.copy_from_slice(&nonce[at..at + 8]);
            u64::from_le_bytes(word)
        });
        let room = match rank_state.is_part() {
            true => Room::Group(topology.local_world_size()),
            false => Room::World(topology.local_world_size()),
        };
        let arena = Arena::of_process(nonce, room).map(Arc::new);
        let memory = match &arena {
            Ok(arena) => arena
                .file()
                .map(|file| ArenaId {
                    file: file.as_raw_fd(),
                    nonce,
                })
                .ok_or_else(|| "it lies in no file".to_owned()),
            Err(error) => Err(error.to_string()),
        };
        let info = HostInfo {
            host: host(rank_state.transport.peer(rank)),
            first: rank.saturating_sub(topology.local_rank()),
            pid: std::process::id(),
            memory,
        };
        let infos = exchange(rank_state, began, &info)?;
        if let Some(unavailable) = unavailable(asked, &infos) {
            return Ok(Err(unavailable));
        }
        let hosts = hosts(&infos);
        let ranks_here = hosts.iter().find(|ranks| ranks.contains(&rank)).cloned();
        let ranks_here = ranks_here.unwrap_or(rank..rank + 1);
        let found: Result<Vec<Arc<Arena>>, String> = ranks_here
            .clone()
            .map(|peer| (peer, &infos[peer]))
            .map(|(peer, info)| match (&arena, info.memory.as_ref()) {
                (Ok(own), Ok(_)) if peer == rank => Ok(Arc::clone(own)),
                (_, Ok(key)) => Arena::of_peer(info.pid, *key)
                    .map(Arc::new)
                    .map_err(|error| format!("that of rank {peer}: {error}")),
                // Not reached: `unavailable` has refused this.
                (_, Err(error)) => Err(error.clone()),
            })
            .collect();
        let failure = found.as_ref().err().cloned();
        let failures = exchange(rank_state, began, &failure)?;
        let failed = failures.iter().enumerate();
        let mut failed = failed.filter_map(|(rank, x)| Some((rank, x.as_ref()?)));
        if let Some((rank, error)) = failed.next() {
            return Ok(Err(Unavailable {
                kind: UnavailableKind::Failed,
                ranks: vec![rank],
                text: format!("rank {rank} cannot reach the memory of others: {error}"),
            }));
        }
        let arenas = match found {
            Ok(arenas) => arenas,
            Err(error) => return Err(Error::protocol(error)),
        };
        let processes = infos[ranks_here.clone()].iter().map(|x| x.pid);
        let cores = UsableCores::of_this_process().count_with(processes);
        let spin = Spin::for_ranks(arenas.len(), cores);
        let world = ShmPeers::new(
            rank - ranks_here.start,
            arenas.into(),
            ranks_here.start,
            spin,
        );
        Ok(Ok(match hosts.len() {
            1 => DataPath::Shm(world),
            _ => DataPath::Hierarchical(Hosts::new(world, hosts)),
        }))
    }

    /// The machine, since it was started.
    fn host(me: &Peer) -> String {
        let boot = boot_id().unwrap_or_default();
        match &me.location {
            PeerLocation::Process { host, .. } => format!("{host} {boot}"),
            PeerLocation::Thread => boot,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info() -> HostInfo {
        HostInfo {
            host: "one".to_owned(),
            first: 0,
            pid: 7,
            memory: Ok(ArenaId {
                file: 3,
                nonce: [1, 2],
            }),
        }
    }

    fn told(change: impl Fn(&mut HostInfo)) -> Option<String> {
        let mut infos = vec![info(); 3];
        change(&mut infos[2]);
        unavailable(TransportKind::Auto, &infos).map(|x| x.to_string())
    }

    #[test]
    fn every_obstacle_is_found() {
        assert_eq!(told(|_| {}), None);
        let text = told(|x| x.host = "two".to_owned()).unwrap();
        assert!(text.starts_with("rank 2 says that the first rank of its host is 0"));
        let text = told(|x| x.memory = Err("no room".to_owned())).unwrap();
        assert_eq!(text, "rank 2 has no memory to share: no room");
    }

    #[test]
    fn hosts_are_found_and_their_ranks_counted() {
        let on = |firsts: &[usize]| -> Vec<HostInfo> {
            let info = |first: &usize| HostInfo {
                first: *first,
                ..info()
            };
            firsts.iter().map(info).collect()
        };
        let spread = on(&[0, 0, 2, 3, 3]);
        assert_eq!(hosts(&spread), [0..2, 2..3, 3..5]);
        assert!(unavailable(TransportKind::Auto, &spread).is_none());
        let text = |asked, firsts: &[usize]| unavailable(asked, &on(firsts)).unwrap().to_string();
        let (auto, shm) = (TransportKind::Auto, TransportKind::Shm);
        assert_eq!(
            text(shm, &[0, 0, 2]),
            "ranks 0 and 2 are on different hosts"
        );
        assert_eq!(
            text(auto, &[0, 1, 2]),
            "ranks 0 and 1 are on different hosts"
        );
        let alone = text(TransportKind::Hierarchical, &[0, 1]);
        assert_eq!(alone, "no host holds two ranks");
        // Ranks that take turns are on no host that could be told.
        assert!(text(auto, &[0, 1, 0, 1, 1]).contains("must follow one another"));
    }
}
