//! Which way processes exchange their data, once they are connected: they find out together.

use std::{fmt, ops::Range, time::Instant};

use serde::{Deserialize, Serialize};

use super::member::Member;
use crate::{
    element::DType,
    error::{Error, Kind, Result},
    fingerprint::{CallSite, CollectiveFingerprint, OpKind},
    shared::{Arrangement, Key},
    transport::TransportKind,
};

/// Lets a group whose ranks are connected share memory where that was asked for, or serves all.
///
/// Every rank says where it runs and where its memory is, looks for that of the others, and says
/// whether it found it. All know the same in the end, and so choose alike.
///
/// It is part of connecting, which began at `began`, and has what is left of the connect timeout.
///
/// # Errors
///
/// Where memory was to be shared and cannot be, the reason, the same on every rank; otherwise as an
/// operation.
pub(super) fn choose(member: &Member, asked: TransportKind, began: Instant) -> Result<()> {
    if asked == TransportKind::Tcp {
        return Ok(());
    }
    let obstacle = match arrange(member, asked, began)? {
        Ok(arrangement) => {
            match &arrangement {
                Arrangement::OneHost(_) => {
                    tracing::debug!("the ranks share the memory of their host");
                }
                Arrangement::Hosts(hosts) => tracing::debug!(
                    hosts = hosts.len(),
                    lanes = hosts.lanes(),
                    "the ranks share the memory of their hosts, which are connected by TCP"
                ),
            }
            member.transport.share(arrangement);
            return Ok(());
        }
        Err(obstacle) => obstacle,
    };
    if asked == TransportKind::Auto {
        match obstacle.nature {
            Nature::Apart => tracing::debug!("the ranks exchange data by TCP: {obstacle}"),
            // All of them see it.
            Nature::Broken if member.topology.is_main() => tracing::warn!(
                "ranks of one host exchange data by TCP, which is slower than the memory that they \
                 could share: {obstacle}"
            ),
            Nature::Broken => {}
        }
        return Ok(());
    }
    Err(Error::about(
        Kind::Topology,
        obstacle.ranks,
        format!(
            "the transport `{asked}` was asked for, but {}; ask for auto or tcp",
            obstacle.text
        ),
    ))
}

/// Why ranks do not share memory, in words that are the same on every rank.
#[derive(Debug)]
struct Obstacle {
    nature: Nature,
    ranks: Vec<usize>,
    text: String,
}

#[derive(Clone, Copy, Debug)]
enum Nature {
    /// There is nothing to share.
    Apart,
    /// Ranks of one host could share, but for this.
    Broken,
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// What a rank tells the others.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
struct Offer {
    /// The machine on which it runs, since when.
    host: String,
    /// The first rank of its host.
    first: usize,
    pid: u32,
    /// Where the others find its memory, or why they do not.
    memory: Result<Key, String>,
}

/// The obstacle that is clear from what the ranks told, which were all asked for the same.
fn obstacle(asked: TransportKind, offers: &[Offer]) -> Option<Obstacle> {
    let hosts = hosts(offers);
    if let Some(second) = hosts.get(1)
        && (asked == TransportKind::Shm || hosts.len() == offers.len())
    {
        return Some(Obstacle {
            nature: Nature::Apart,
            ranks: vec![0, second.start],
            text: match asked == TransportKind::Hierarchical {
                true => "no host holds two ranks".to_owned(),
                false => format!("ranks 0 and {} are on different hosts", second.start),
            },
        });
    }
    if let Some(host) = hosts
        .iter()
        .find(|host| offers[host.start].first != host.start)
    {
        return Some(Obstacle {
            nature: Nature::Broken,
            ranks: vec![host.start],
            text: format!(
                "rank {} says that the first rank of its host is {}: the ranks of a host must \
                 follow one another, as their local ranks do",
                host.start, offers[host.start].first
            ),
        });
    }
    offers.iter().enumerate().find_map(|(rank, offer)| {
        let error = offer.memory.as_ref().err()?;
        Some(Obstacle {
            nature: Nature::Broken,
            ranks: vec![rank],
            text: format!("rank {rank} has no memory to share: {error}"),
        })
    })
}

/// The ranks of each host, as far as they follow one another.
fn hosts(offers: &[Offer]) -> Vec<Range<usize>> {
    let mut hosts: Vec<Range<usize>> = Vec::new();
    for (rank, offer) in offers.iter().enumerate() {
        match hosts.last_mut() {
            Some(host) if offers[host.start].is_beside(offer) => host.end = rank + 1,
            _ => hosts.push(rank..rank + 1),
        }
    }
    hosts
}

impl Offer {
    fn is_beside(&self, other: &Self) -> bool {
        (&self.host, self.first) == (&other.host, other.first)
    }
}

/// Has every rank tell the others something.
fn tell<T>(member: &Member, began: Instant, value: &T) -> Result<Vec<T>>
where
    T: Serialize + for<'a> Deserialize<'a>,
{
    let mut own = Vec::new();
    ciborium::into_writer(value, &mut own)
        .map_err(|error| Error::caused(Kind::Protocol, "an offer cannot be written", error))?;
    let fingerprint = CollectiveFingerprint::new(OpKind::Connect, CallSite::new(file!(), line!()))
        .with_data(DType::U8, own.len());
    let mut all = vec![Vec::new(); member.topology.world_size()];
    let patience = member.options.patience_to_connect(began.elapsed());
    member.exchange(0, &fingerprint, patience, |exchange| {
        exchange.all_gather(&own, |rank, piece| all[rank].extend_from_slice(piece))
    })?;
    all[member.topology.rank()] = own;
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
    member: &Member,
    asked: TransportKind,
    began: Instant,
) -> Result<Result<Arrangement, Obstacle>> {
    let offer = Offer {
        host: String::new(),
        first: 0,
        pid: std::process::id(),
        memory: Err("this system has no files in memory".to_owned()),
    };
    let offers = tell(member, began, &offer)?;
    // Every rank here says that it has none.
    Ok(Err(obstacle(asked, &offers).unwrap_or(Obstacle {
        nature: Nature::Apart,
        ranks: Vec::new(),
        text: "the ranks have no memory to share".to_owned(),
    })))
}

#[cfg(target_os = "linux")]
mod linux {
    use std::{os::fd::AsRawFd, sync::Arc, time::Instant};

    use super::{Nature, Obstacle, Offer, hosts, obstacle, tell};
    use crate::{
        error::{Error, Kind, Result},
        group::member::Member,
        rendezvous::{boot_id, random},
        shared::{Arena, Arrangement, Hosts, Key, Spin, World, cores},
        transport::{Peer, Place, TransportKind},
    };

    pub(super) fn arrange(
        member: &Member,
        asked: TransportKind,
        began: Instant,
    ) -> Result<Result<Arrangement, Obstacle>> {
        let (rank, topology) = (member.topology.rank(), &member.topology);
        let nonce: [u8; 32] = random()?;
        let nonce = [0, 8].map(|at| {
            let mut word = [0; 8];
            word.copy_from_slice(&nonce[at..at + 8]);
            u64::from_le_bytes(word)
        });
        let arena = Arena::of_process(nonce).map(Arc::new);
        let memory = match &arena {
            Ok(arena) => arena
                .file()
                .map(|file| Key {
                    file: file.as_raw_fd(),
                    nonce,
                })
                .ok_or_else(|| "it lies in no file".to_owned()),
            Err(error) => Err(error.to_string()),
        };
        let offer = Offer {
            host: host(&member.transport.peers()[rank]),
            first: rank.saturating_sub(topology.local_rank()),
            pid: std::process::id(),
            memory,
        };
        let offers = tell(member, began, &offer)?;
        if let Some(obstacle) = obstacle(asked, &offers) {
            return Ok(Err(obstacle));
        }
        let hosts = hosts(&offers);
        let here = hosts.iter().find(|ranks| ranks.contains(&rank)).cloned();
        let here = here.unwrap_or(rank..rank + 1);
        let found: Result<Vec<Arc<Arena>>, String> = here
            .clone()
            .map(|peer| (peer, &offers[peer]))
            .map(|(peer, offer)| match (&arena, offer.memory.as_ref()) {
                (Ok(own), Ok(_)) if peer == rank => Ok(Arc::clone(own)),
                (_, Ok(key)) => Arena::of_peer(offer.pid, *key)
                    .map(Arc::new)
                    .map_err(|error| format!("that of rank {peer}: {error}")),
                // No obstacle: everyone has memory.
                (_, Err(error)) => Err(error.clone()),
            })
            .collect();
        let answer = found.as_ref().err().cloned();
        let answers = tell(member, began, &answer)?;
        let failed = answers.iter().enumerate();
        let mut failed = failed.filter_map(|(rank, x)| Some((rank, x.as_ref()?)));
        if let Some((rank, error)) = failed.next() {
            return Ok(Err(Obstacle {
                nature: Nature::Broken,
                ranks: vec![rank],
                text: format!("rank {rank} cannot reach the memory of others: {error}"),
            }));
        }
        let arenas = match found {
            Ok(arenas) => arenas,
            Err(error) => return Err(Error::new(Kind::Protocol, error)),
        };
        let processes = offers[here.clone()].iter().map(|x| x.pid);
        let spin = Spin::for_ranks(arenas.len(), cores(processes));
        let world = World::new(rank - here.start, arenas.into(), here.start, spin);
        Ok(Ok(match hosts.len() {
            1 => Arrangement::OneHost(world),
            _ => Arrangement::Hosts(Hosts::new(world, hosts)),
        }))
    }

    /// The machine, since it was started.
    fn host(me: &Peer) -> String {
        let boot = boot_id().unwrap_or_default();
        match &me.place {
            Place::Process { host, .. } => format!("{host} {boot}"),
            Place::Thread => boot,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer() -> Offer {
        Offer {
            host: "one".to_owned(),
            first: 0,
            pid: 7,
            memory: Ok(Key {
                file: 3,
                nonce: [1, 2],
            }),
        }
    }

    fn told(change: impl Fn(&mut Offer)) -> Option<String> {
        let mut offers = vec![offer(); 3];
        change(&mut offers[2]);
        obstacle(TransportKind::Auto, &offers).map(|x| x.to_string())
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
        let on = |firsts: &[usize]| -> Vec<Offer> {
            let offer = |first: &usize| Offer {
                first: *first,
                ..offer()
            };
            firsts.iter().map(offer).collect()
        };
        let spread = on(&[0, 0, 2, 3, 3]);
        assert_eq!(hosts(&spread), [0..2, 2..3, 3..5]);
        assert!(obstacle(TransportKind::Auto, &spread).is_none());
        let text = |asked, firsts: &[usize]| obstacle(asked, &on(firsts)).unwrap().to_string();
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
