//! The exchange by which ranks learn from their launcher where they meet.
//!
//! Rank 0 listens on a port, and gives the launcher one line with its addresses, the port and a token; the launcher
//! gives it to every rank. That happens once per process: a launcher kills the job if a process begins again.

use std::{
    net::{IpAddr, SocketAddr},
    sync::OnceLock,
    time::{Duration, Instant},
};

use super::{pmi1, pmix};
use crate::{
    error::{Error, Result},
    rendezvous::{MAX_WAIT, Meeting, Rendezvous, StorePlace, Token, WeakStoreClient},
    topology::{Topology, TransportKind},
};

/// A meeting whose address the ranks learn from their launcher.
#[derive(Clone, Debug)]
pub(super) struct Exchange {
    pub(super) wire: Wire,
    /// The job, its token if one is given, and the port if one is, else 0; the host is not known.
    pub(super) rendezvous: Rendezvous,
    pub(super) is_on_one_host: bool,
}

/// The protocol by which ranks ask their launcher.
#[derive(Clone, Debug)]
pub(super) enum Wire {
    /// PMI-1, over a socket that this process has inherited.
    PmiDescriptor(usize),
    /// PMI-1, over a connection to `address`, as the process with this `id`.
    PmiPort { address: String, id: usize },
    /// PMIx, by its library.
    Pmix { namespace: String, is_old: bool },
}

impl Exchange {
    /// Meets the other ranks, as [`Rendezvous::meet`] does if the address is known.
    pub(super) fn meet(
        &self,
        topology: &Topology,
        connect_timeout: Duration,
        liveness: Duration,
        transport: TransportKind,
    ) -> Result<Meeting> {
        /// The line that the launcher has told this process.
        static TOLD: OnceLock<Result<String>> = OnceLock::new();
        let deadline = Instant::now() + connect_timeout.min(MAX_WAIT);
        let mut listening = None;
        let told = TOLD.get_or_init(|| {
            let own = match topology.is_main() {
                true => Some(self.listen(&mut listening)?),
                false => None,
            };
            self.wire.share(topology, own.as_deref(), deadline)
        });
        let StoreAddress {
            port,
            token,
            addresses,
        } = StoreAddress::parse(told.as_ref().map_err(Error::clone)?)?;
        let place = match listening {
            Some(place) => place,
            // It has met before, and its store had this port.
            None if topology.is_main() => self.store_place(port)?,
            None => StorePlace::at(addresses.iter().map(|ip| SocketAddr::new(*ip, port))),
        };
        let mut rendezvous = match self.is_on_one_host {
            true => self.rendezvous.clone(),
            false => self.rendezvous.clone().in_network(),
        };
        if let Some(address) = addresses.first() {
            rendezvous.host = address.to_string();
        }
        rendezvous.port = port;
        if let Some(token) = token {
            rendezvous = rendezvous.with_token(token);
        }
        let connect_timeout = deadline.saturating_duration_since(Instant::now());
        rendezvous.meet_at(
            |_| Ok(place),
            topology,
            connect_timeout,
            liveness,
            transport,
            &WeakStoreClient::default(),
        )
    }

    fn listen(&self, listening: &mut Option<StorePlace>) -> Result<String> {
        let place = self.store_place(self.rendezvous.port)?;
        let token = match self.rendezvous.has_token() {
            true => None,
            false => Some(Token::generate()?),
        };
        let address = StoreAddress {
            port: place.port(),
            token,
            addresses: place.ips().collect(),
        };
        *listening = Some(place);
        Ok(address.to_text())
    }

    fn store_place(&self, port: u16) -> Result<StorePlace> {
        match self.is_on_one_host {
            true => StorePlace::on_loopback(port),
            false => StorePlace::in_network(port, self.rendezvous.network_interface()),
        }
    }
}

impl Wire {
    /// Distributes rank 0's line, which it passes as `own`, to every rank, and returns it.
    fn share(&self, topology: &Topology, own: Option<&str>, deadline: Instant) -> Result<String> {
        match self {
            Self::PmiDescriptor(descriptor) => {
                pmi1::PmiClient::inherited(*descriptor, deadline)?.share(own)
            }
            Self::PmiPort { address, id } => {
                pmi1::asked(address, *id)?.share(topology, own, deadline)
            }
            Self::Pmix { namespace, is_old } => {
                pmix::share(namespace, *is_old, topology, own, deadline)
            }
        }
    }

    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::PmiDescriptor(_) | Self::PmiPort { .. } => "PMI",
            Self::Pmix { .. } => "PMIx",
        }
    }
}

/// The address of rank 0's store, as one line without spaces: all that PMI-1 allows.
struct StoreAddress {
    port: u16,
    /// `None` if every rank has one of its own.
    token: Option<Token>,
    /// One address or more; the first that answers is taken.
    addresses: Vec<IpAddr>,
}

impl StoreAddress {
    fn to_text(&self) -> String {
        let token = self.token.as_ref().map_or("", Token::text);
        let mut text = format!("{MARK}_{}_{token}", self.port);
        for address in &self.addresses {
            text.push_str(&format!("_{address}"));
        }
        text
    }

    fn parse(text: &str) -> Result<Self> {
        let parsed = (|| {
            let mut parts = text.strip_prefix(MARK)?.strip_prefix('_')?.split('_');
            let port = parts.next()?.parse().ok()?;
            let token = parts.next().filter(|token| !token.is_empty());
            let addresses: Vec<IpAddr> = parts.map(str::parse).collect::<Result<_, _>>().ok()?;
            let token = match token {
                Some(token) => Some(Token::from_secret(token.as_bytes())?),
                None => None,
            };
            (!addresses.is_empty()).then_some(Self {
                port,
                token,
                addresses,
            })
        })();
        parsed.ok_or_else(|| {
            Error::protocol("what the launcher gave this rank is no address of rank 0's; ranks must be of one version of \
                 this library",
            )
        })
    }
}

/// The first word of the line; it changes whenever the format of the rest does.
const MARK: &str = "accel1";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_one_word_and_comes_back() {
        let addresses = ["10.0.0.1", "fd00::1"].map(|ip| ip.parse().unwrap());
        for token in [None, Some(Token::generate().unwrap())] {
            let text = StoreAddress {
                port: 21_000,
                token: token.clone(),
                addresses: addresses.to_vec(),
            }
            .to_text();
            assert!(!text.contains([' ', '\n', '\\', '=', ';']), "{text}");
            let back = StoreAddress::parse(&text).unwrap();
            assert_eq!((back.port, &back.addresses[..]), (21_000, &addresses[..]));
            assert_eq!(
                back.token.as_ref().map(Token::text),
                token.as_ref().map(Token::text)
            );
        }
    }

    #[test]
    fn what_is_no_address_is_an_error() {
        for text in [
            "",
            "accel1",
            "accel1_1_",
            "accel1_x__127.0.0.1",
            "accel1_70000__127.0.0.1",
            "accel1_1_short_127.0.0.1",
            "accel1_1__localhost",
            "accel2_1__127.0.0.1",
        ] {
            let error = StoreAddress::parse(text).err().unwrap();
            assert!(error.is_protocol(), "{text:?}: {error}");
        }
    }
}
