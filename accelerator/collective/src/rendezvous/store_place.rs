//! The place where a rank finds or hosts the store.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener},
};

use super::{
    address::{listen_everywhere, of_one_family, own_addresses},
    interface::addresses_of,
    server::not_listening,
};
use crate::error::{Error, Result};

/// The place where a rank finds or hosts the store.
pub(crate) struct StorePlace {
    /// The addresses to try in turn, at least one.
    pub(super) addresses: Vec<SocketAddr>,
    /// The socket on which the store already listens.
    pub(super) listener: Option<TcpListener>,
    /// True if the addresses are loopback ones, by which other hosts cannot reach this one.
    pub(super) is_shadowed: bool,
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
    pub(crate) fn at_name(addresses: Vec<SocketAddr>) -> Self {
        let is_shadowed = addresses.iter().any(|address| address.ip().is_loopback());
        Self {
            is_shadowed,
            ..Self::at(addresses)
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
        match own[0].is_loopback() {
            true => Self::listening(TcpListener::bind((own[0], port)), port, own),
            false => Self::listening(listen_everywhere(port), port, own),
        }
    }

    /// Listens on the loopback interface; port 0 takes a free one.
    ///
    /// # Errors
    ///
    /// The errors of [`in_network`](Self::in_network).
    pub(crate) fn on_loopback(port: u16) -> Result<Self> {
        let ip = Ipv4Addr::LOCALHOST.into();
        Self::listening(TcpListener::bind((ip, port)), port, vec![ip])
    }

    /// The port of the store.
    pub(crate) fn port(&self) -> u16 {
        self.addresses[0].port()
    }

    /// The addresses at which the store is reached.
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
