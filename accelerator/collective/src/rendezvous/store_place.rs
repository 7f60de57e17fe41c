//! Where one rank finds, or hosts, the store.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};

use super::{
    address::{any_like, of_one_family, own_addresses},
    interface::addresses_of,
    server::listen,
};
use crate::error::{Error, Result};

/// Where one rank finds, or hosts, the store.
pub(crate) struct StorePlace {
    /// At least one; they are tried in turn.
    pub(super) addresses: Vec<SocketAddr>,
    /// Where the store listens already.
    pub(super) listener: Option<TcpListener>,
}

impl StorePlace {
    /// At these addresses, of which there is at least one.
    pub(crate) fn at(addresses: impl IntoIterator<Item = SocketAddr>) -> Self {
        Self {
            addresses: addresses.into_iter().collect(),
            listener: None,
        }
    }

    /// Listens at all addresses of this host, which is reached at those of an interface where one is named; port 0 takes
    /// a free one.
    ///
    /// # Errors
    ///
    /// An address-in-use error where the port is taken, an I/O error where the system refuses it; a topology error where
    /// there is no such interface, or it has no address.
    pub(crate) fn in_network(port: u16, interface: Option<&str>) -> Result<Self> {
        let own = match interface {
            Some(name) => of_one_family(addresses_of(name)?),
            None => own_addresses(),
        };
        let first = SocketAddr::new(own[0], port);
        let ip = match first.ip().is_loopback() {
            true => first.ip(),
            false => any_like(first),
        };
        Self::listening(ip, port, own)
    }

    /// Listens on the loopback interface; port 0 takes a free one.
    ///
    /// # Errors
    ///
    /// As [`in_network`](Self::in_network).
    pub(crate) fn on_loopback(port: u16) -> Result<Self> {
        let ip = Ipv4Addr::LOCALHOST.into();
        Self::listening(ip, port, vec![ip])
    }

    /// The port of the store.
    pub(crate) fn port(&self) -> u16 {
        self.addresses[0].port()
    }

    /// The addresses at which the store is reached.
    pub(crate) fn ips(&self) -> impl Iterator<Item = IpAddr> {
        self.addresses.iter().map(SocketAddr::ip)
    }

    fn listening(ip: IpAddr, port: u16, reached: Vec<IpAddr>) -> Result<Self> {
        let listener = listen((ip, port))?;
        let port = listener
            .local_addr()
            .map_err(|error| Error::io("the store's own address cannot be read", error))?
            .port();
        let addresses = reached.into_iter().map(|ip| SocketAddr::new(ip, port));
        Ok(Self {
            addresses: addresses.collect(),
            listener: Some(listener),
        })
    }
}
