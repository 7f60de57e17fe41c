//! The assignment of ranks to hosts, and their local ranks.

use std::collections::{BTreeMap, HashMap};

use crate::{
    error::{Error, Kind, Result, list_ranks},
    topology::Topology,
    wire::message::{LocalPlace, Registration},
};

/// The topology of a rank that has met the others. Where its local rank is not known, it follows from the
/// hosts of all ranks.
///
/// # Errors
///
/// The errors of [`local_places`], and a topology error if a rank does not tell its host.
pub(crate) fn resolve_local_rank(topology: Topology, ranks: &[Registration]) -> Result<Topology> {
    if topology.is_local_known() {
        return Ok(topology);
    }
    let rank = topology.rank();
    match local_places(ranks)?.get(rank) {
        Some(Some(place)) => topology.with_local(place.rank, place.size),
        _ => Err(Error::about(
            Kind::Topology,
            vec![rank],
            format!(
                "LOCAL_RANK and LOCAL_WORLD_SIZE are not set for rank {rank}, and the ranks cannot find out \
                 which of them share a host; set both for every process"
            ),
        )),
    }
}

/// The place of each rank on its host, in rank order: as the rank was told, or else by counting the ranks of
/// its host, if every rank has reported its host.
///
/// # Errors
///
/// A rendezvous error where more ranks have the same local rank than there can be hosts.
pub(super) fn local_places(ranks: &[Registration]) -> Result<Vec<Option<LocalPlace>>> {
    let mut hosts: HashMap<(&str, &str), Vec<usize>> = HashMap::new();
    for (rank, told) in ranks.iter().enumerate() {
        if let Some(host) = host(told) {
            hosts.entry(host).or_default().push(rank);
        }
    }
    let all_tell = ranks.iter().all(|told| host(told).is_some());
    let counted = |rank: usize, told: &Registration| {
        let together = hosts.get(&host(told)?).filter(|_| all_tell)?;
        Some(LocalPlace {
            rank: together.partition_point(|other| *other < rank),
            size: together.len(),
        })
    };
    let mut places = Vec::with_capacity(ranks.len());
    let mut alike: BTreeMap<LocalPlace, Vec<usize>> = BTreeMap::new();
    for (rank, told) in ranks.iter().enumerate() {
        let place = told.local.or_else(|| counted(rank, told));
        if let Some(place) = place {
            alike.entry(place).or_default().push(rank);
        }
        places.push(place);
    }
    match alike
        .into_iter()
        .find(|(place, same)| same.len().saturating_mul(place.size) > ranks.len())
    {
        None => Ok(places),
        Some((place, same)) => Err(crowded(place, same, ranks.len())),
    }
}

/// The host of a rank, where it tells it.
fn host(told: &Registration) -> Option<(&str, &str)> {
    Some((&told.host, told.boot.as_deref()?))
}

/// The error of too many `ranks` with one place.
fn crowded(place: LocalPlace, ranks: Vec<usize>, world_size: usize) -> Error {
    let LocalPlace { rank, size } = place;
    let text = format!(
        "{} have local rank {rank} of {size}, for which there would have to be {} hosts of {size} ranks, but \
         the world size is {world_size}; LOCAL_RANK must differ between the ranks of a host, and \
         LOCAL_WORLD_SIZE is their number",
        list_ranks(&ranks),
        ranks.len()
    );
    Error::about(Kind::Rendezvous, ranks, text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::tests::registration;

    /// A rank's host, boot id, and local rank and local world size, where it was told them.
    type Given = (&'static str, &'static str, Option<(usize, usize)>);

    fn ranks(given: &[Given]) -> Vec<Registration> {
        let rank = |(rank, &(host, boot, local)): (usize, &Given)| Registration {
            host: host.to_owned(),
            boot: Some(boot.to_owned()).filter(|boot| !boot.is_empty()),
            local: local.map(|(rank, size)| LocalPlace { rank, size }),
            ..registration(rank, given.len())
        };
        given.iter().enumerate().map(rank).collect()
    }

    fn places(given: &[Given]) -> Vec<Option<(usize, usize)>> {
        let places = local_places(&ranks(given)).unwrap().into_iter();
        places.map(|x| x.map(|x| (x.rank, x.size))).collect()
    }

    #[test]
    fn ranks_are_counted_on_their_hosts() {
        let (a, b) = (("a", "1", None), ("b", "2", None));
        let expected = [(0, 2), (1, 2), (0, 1)].map(Some);
        assert_eq!(places(&[a, a, b]), expected);
        // Ranks that take turns over the hosts.
        let expected = [(0, 2), (0, 2), (1, 2), (1, 2)].map(Some);
        assert_eq!(places(&[a, b, a, b]), expected);
        // Containers of one machine have names of their own; two machines may have one name.
        for other in [("b", "1", None), ("a", "2", None)] {
            assert_eq!(places(&[a, other]), [Some((0, 1)); 2]);
        }
    }

    #[test]
    fn what_ranks_were_told_holds() {
        let place = |rank| Some((rank, 2));
        let hosts_on_one_machine = [0, 1, 0, 1].map(|rank| ("a", "1", place(rank)));
        let expected = [0, 1, 0, 1].map(place);
        assert_eq!(places(&hosts_on_one_machine), expected);
        let mixed = [("a", "1", place(0)), ("a", "1", None)];
        assert_eq!(places(&mixed), [place(0), place(1)]);
    }

    #[test]
    fn a_host_that_is_not_told_is_an_error_where_it_is_needed() {
        let mixed = [("a", "1", None), ("a", "", None), ("a", "1", Some((0, 1)))];
        assert_eq!(places(&mixed), [None, None, Some((0, 1))]);
        let topology = Topology::new(0, 3).unwrap();
        assert_eq!(
            resolve_local_rank(topology, &ranks(&mixed)).unwrap(),
            topology
        );
        let error = resolve_local_rank(topology.without_local(), &ranks(&mixed)).unwrap_err();
        assert!(error.is_topology(), "{error}");
        assert!(
            error
                .to_string()
                .starts_with("LOCAL_RANK and LOCAL_WORLD_SIZE are not set")
        );
    }

    #[test]
    fn one_local_rank_for_more_ranks_than_hosts_is_an_error() {
        let first = ("a", "1", Some((0, 2)));
        for given in [
            &[first, first][..],
            &[first, first, first, ("b", "2", Some((1, 2)))],
            // One that was told, and one that has counted.
            &[("a", "1", Some((1, 2))), ("a", "1", None)],
        ] {
            let error = local_places(&ranks(given)).unwrap_err();
            assert!(error.is_rendezvous(), "{error}");
            assert!(
                error.to_string().contains("LOCAL_RANK must differ"),
                "{error}"
            );
        }
        let huge = ("a", "1", Some((0, usize::MAX)));
        assert!(local_places(&ranks(&[huge, huge])).is_err());
    }
}
