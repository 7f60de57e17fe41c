//! A rank's way to the store, which it finds or hosts, and to the other ranks' addresses.

use std::cell::OnceCell;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::time::{Duration, Instant};
use std::{io, thread};

use accelerator_fault::{Effect, Point, fail_point};

use super::address::{
    addresses_of, listen_at, listen_everywhere, of_one_family, own_addresses, reachable,
};
use super::join::{JoinAttempt, Joined, RETRY};
use super::server::not_listening;
use super::token::{Key, Token};
use super::{
    MAX_WAIT, Rendezvous, StoreClient, StoreHost, StoreOptions, StoreServer, TokenSource,
    WeakStoreClient,
};
use crate::error::{Error, Kind, Result, Seconds, stderr_fallback};
use crate::liveness::bounded;
use crate::topology::{Topology, TransportKind};
use crate::wire::message::Registration;

/// The knowledge of a rank once all have met.
#[derive(Debug)]
pub(crate) struct Meeting {
    pub(crate) ranks: Vec<Registration>,
    pub(crate) listener: TcpListener,
    /// The key by which the ranks of this job recognize one another.
    pub(crate) key: Key,
    /// The open connection to the store, to be kept as long as the group lives.
    pub(crate) store: Option<StoreClient>,
}

impl Rendezvous {
    /// Meets the other ranks within `connect_timeout`. A rank that sends nothing for `liveness` is lost, and all ranks
    /// must ask for the same `transport`. If this rank comes from another group, the launcher may end the attempt at the
    /// `former_store`.
    pub(crate) fn meet(
        &self,
        topology: &Topology,
        connect_timeout: Duration,
        liveness: Duration,
        transport: TransportKind,
        former_store: &WeakStoreClient,
    ) -> Result<Meeting> {
        let place = |deadline| match self.is_in_network() && self.is_hosted_by(topology) {
            true => StorePlace::in_network(self.port, self.network_interface()),
            false => {
                let addresses = self.resolve(topology, deadline)?;
                Ok(match self.is_loopback() || is_on_one_host(topology) {
                    true => StorePlace::at(addresses),
                    false => StorePlace::at_name(addresses),
                })
            }
        };
        self.meet_at(
            place,
            topology,
            connect_timeout,
            liveness,
            transport,
            former_store,
        )
    }

    /// Meets the other ranks as [`meet`](Self::meet) does, at the place that `place` finds; `place` gets the deadline.
    pub(crate) fn meet_at(
        &self,
        place: impl FnOnce(Instant) -> Result<StorePlace>,
        topology: &Topology,
        connect_timeout: Duration,
        liveness: Duration,
        transport: TransportKind,
        former_store: &WeakStoreClient,
    ) -> Result<Meeting> {
        if let Some(Effect::DropConnection) = fail_point(topology.rank(), Point::Rendezvous) {
            return Err(Error::rendezvous(format!(
                "{topology} was cut off from the store by an injected fault"
            )));
        }
        let liveness = bounded(liveness);
        let deadline = Instant::now() + connect_timeout.min(MAX_WAIT);
        let token = self.token.read()?;
        if self.is_hosted_by(topology)
            && let TokenSource::File(_) = self.token
            && token.as_ref().is_some_and(Token::is_guessable)
        {
            tracing::warn!("{}", Token::GUESSABLE);
            stderr_fallback(Token::GUESSABLE);
        }
        let place = place(deadline)?;
        if place.is_shadowed {
            tracing::info!(
                "rank {} listens on all addresses of its host: here, the host of the store, {:?} (MASTER_ADDR), is {}, \
                 which other hosts cannot reach",
                topology.rank(),
                self.host,
                place.addresses[0].ip()
            );
        }
        let is_in_network = self.is_in_network() || place.is_shadowed;
        let known = place.addresses.clone();
        let (outward, mut targets) = (known[0], known.clone());
        let mut store = None;
        if self.is_hosted_by(topology) {
            let server = self.serve(place, topology, token.clone())?;
            targets = vec![reachable(server.local_addr())];
            store = Some(server);
        }
        let attempt = JoinAttempt {
            rendezvous: self,
            topology,
            key: token.as_ref().map(Token::key),
            deadline,
            connect_timeout,
            liveness,
            transport,
            former_store,
            outward,
            is_in_network,
            store_process: OnceCell::new(),
        };
        let Joined {
            mut ranks,
            secret,
            listener,
            stream,
        } = attempt.run(&targets)?;
        // If an interface is named, each rank knows its own address.
        if self.network_interface.is_none() {
            let store = stream
                .peer_addr()
                .map_err(|error| Error::io("the address of the store cannot be read", error))?;
            let known = is_in_network.then_some(&known[..]);
            reach_beside_store(&mut ranks, store.ip(), known);
        }
        let key = Key::of_job(&secret, attempt.key.as_ref());
        let store_client =
            StoreClient::open(topology.rank(), stream, liveness, attempt.store(), store)?;
        Ok(Meeting {
            ranks,
            listener,
            key,
            store: Some(store_client),
        })
    }

    fn is_hosted_by(&self, topology: &Topology) -> bool {
        topology.is_main() && self.store == StoreHost::Rank0
    }

    /// Returns the addresses of the store, at least one. If there is none yet, warns at once and tries again until the
    /// deadline.
    fn resolve(&self, topology: &Topology, deadline: Instant) -> Result<Vec<SocketAddr>> {
        let mut is_told = false;
        loop {
            let failure = match (self.host.as_str(), self.port).to_socket_addrs() {
                Ok(addresses) => {
                    let addresses: Vec<SocketAddr> = addresses.collect();
                    if !addresses.is_empty() {
                        return Ok(addresses);
                    }
                    std::io::Error::other("the name has no address")
                }
                Err(error) => error,
            };
            // The name of a host that is still starting may become known later.
            if Instant::now() + RETRY > deadline {
                return Err(Error::caused(
                    Kind::Rendezvous,
                    format!(
                        "the host of the store, {:?}, has no known address; MASTER_ADDR must be \
                         the host where the ranks meet",
                        self.host
                    ),
                    failure,
                ));
            }
            if !is_told {
                is_told = true;
                let text = format!(
                    "rank {} finds no address of the store's host, {:?} (MASTER_ADDR): {failure}; it asks again for {}",
                    topology.rank(),
                    self.host,
                    Seconds(deadline.saturating_duration_since(Instant::now()))
                );
                tracing::warn!("{text}");
                stderr_fallback(&text);
            }
            thread::sleep(RETRY);
        }
    }

    /// Hosts the store: on its existing listener, or on the address itself, or on all addresses of this host if the
    /// address is a name for a proxy in front of this host or for a loopback address.
    pub(super) fn serve(
        &self,
        place: StorePlace,
        topology: &Topology,
        token: Option<Token>,
    ) -> Result<StoreServer> {
        let mut options = StoreOptions::new(topology.world_size())
            .with_job(&self.job)
            .with_security(self.security)
            .with_host(topology.rank());
        if let Some(token) = token {
            options = options.with_token(token);
        }
        if let Some(listener) = place.listener {
            return StoreServer::on(listener, options);
        }
        let ips: Vec<IpAddr> = match place.is_shadowed {
            true => Vec::new(),
            false => place.ips().collect(),
        };
        let listener = listen_at(&ips, self.port);
        let listener = listener.map_err(|error| not_listening(&place.addresses, error))?;
        StoreServer::on(listener, options)
    }
}

fn is_on_one_host(topology: &Topology) -> bool {
    topology.is_local_known() && topology.local_world_size() == topology.world_size()
}

/// Replaces the addresses of ranks on the store's host by `reached`, the address at which the store was reached: a rank
/// there cannot know by which of its host's addresses the others reach it. `known` has some of these addresses. It is
/// `None` if this rank does not meet others over the network; then only loopback addresses are replaced, since they are
/// valid on the store's host only.
fn reach_beside_store(ranks: &mut [Registration], reached: IpAddr, known: Option<&[SocketAddr]>) {
    let first = ranks.first().map(|rank| rank.address.ip());
    for rank in ranks {
        let ip = rank.address.ip();
        let is_beside = match known {
            None => ip.is_loopback() && !reached.is_loopback(),
            Some(known) => {
                let is_known = known.iter().any(|address| address.ip() == ip);
                ip.is_loopback() || is_known || Some(ip) == first
            }
        };
        if is_beside {
            rank.address.set_ip(reached);
        }
    }
}

/// The place where a rank finds or hosts the store.
pub(crate) struct StorePlace {
    /// The addresses to try in turn, at least one.
    pub(super) addresses: Vec<SocketAddr>,
    /// The socket on which the store already listens.
    pub(super) listener: Option<TcpListener>,
    /// True if a loopback address is among the addresses: other hosts cannot reach this one by it.
    is_shadowed: bool,
}

impl StorePlace {
    /// A place at these addresses, of which there must be at least one.
    pub(crate) fn at(addresses: impl IntoIterator<Item = SocketAddr>) -> Self {
        Self {
            addresses: addresses.into_iter().collect(),
            listener: None,
            is_shadowed: false,
        }
    }

    /// Like [`at`](Self::at), for a host whose name may resolve to another address here than elsewhere, as on Debian
    /// and Ubuntu, where a host's own name resolves to 127.0.1.1.
    fn at_name(addresses: Vec<SocketAddr>) -> Self {
        let is_shadowed = addresses.iter().any(|address| address.ip().is_loopback());
        Self {
            is_shadowed,
            ..Self::at(addresses)
        }
    }

    /// Listens on all addresses of this host; if an interface is named, the others reach the store at that interface's
    /// addresses. Port 0 picks a free port.
    ///
    /// # Errors
    ///
    /// An address-in-use error if the port is taken, an I/O error if the system refuses it; a topology error if there
    /// is no such interface, or it has no address.
    pub(crate) fn in_network(port: u16, interface: Option<&str>) -> Result<Self> {
        let own = match interface {
            Some(name) => of_one_family(addresses_of(name)?),
            None => own_addresses(),
        };
        match own[0].is_loopback() {
            true => Self::listening(TcpListener::bind((own[0], port)), port, own),
            false => Self::listening(listen_everywhere(port), port, own),
        }
    }

    /// Listens on the loopback interface. Port 0 picks a free port.
    ///
    /// # Errors
    ///
    /// The errors of [`in_network`](Self::in_network).
    pub(crate) fn on_loopback(port: u16) -> Result<Self> {
        let ip = Ipv4Addr::LOCALHOST.into();
        Self::listening(TcpListener::bind((ip, port)), port, vec![ip])
    }

    pub(crate) fn port(&self) -> u16 {
        self.addresses[0].port()
    }

    pub(crate) fn ips(&self) -> impl Iterator<Item = IpAddr> {
        self.addresses.iter().map(SocketAddr::ip)
    }

    fn listening(
        listener: io::Result<TcpListener>,
        port: u16,
        reached: Vec<IpAddr>,
    ) -> Result<Self> {
        let listener = listener.map_err(|error| not_listening(port, error))?;
        let port = listener
            .local_addr()
            .map_err(|error| Error::io("the store's own address cannot be read", error))?
            .port();
        let addresses = reached.into_iter().map(|ip| SocketAddr::new(ip, port));
        Ok(Self {
            addresses: addresses.collect(),
            listener: Some(listener),
            is_shadowed: false,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::tests::registration;

    #[test]
    fn ranks_beside_the_store_are_reached_as_the_store_is() {
        let rank = |(rank, ip): (usize, &str)| Registration {
            host: "a".to_owned(),
            address: SocketAddr::new(ip.parse().unwrap(), 7),
            ..registration(rank, 5)
        };
        // Rank 0 thinks of its first address, rank 1 of its bridge, rank 2 of its own name.
        let own = [
            "192.168.0.1",
            "172.17.0.1",
            "127.0.1.1",
            "10.0.0.2",
            "10.0.0.3",
        ];
        let ranks: Vec<_> = own.into_iter().enumerate().map(rank).collect();
        let known = ["172.17.0.1:5", "10.0.0.1:5"].map(|address| address.parse().unwrap());
        let beside = "10.0.0.1:7";
        let [there, other] = ["10.0.0.2:7", "10.0.0.3:7"];
        for (reached, known, expected) in [
            (
                "10.0.0.1",
                Some(&known[..]),
                [beside, beside, beside, there, other],
            ),
            (
                "10.0.0.1",
                None,
                ["192.168.0.1:7", "172.17.0.1:7", beside, there, other],
            ),
            (
                "127.0.0.1",
                None,
                ["192.168.0.1:7", "172.17.0.1:7", "127.0.1.1:7", there, other],
            ),
        ] {
            let mut ranks = ranks.clone();
            reach_beside_store(&mut ranks, reached.parse().unwrap(), known);
            let ranks = ranks.iter().map(|rank| rank.address.to_string());
            assert_eq!(ranks.collect::<Vec<_>>(), expected, "{reached}");
        }
    }
}
