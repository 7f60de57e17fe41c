//! Addresses that stand for others, and the name of this host.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use super::interface::{all_addresses, is_of_link};

/// Where this host reaches its own listener, which may listen at all its addresses.
pub(crate) fn reachable(mut listener: SocketAddr) -> SocketAddr {
    if listener.ip().is_unspecified() {
        listener.set_ip(match listener.ip() {
            IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
        });
    }
    listener
}

/// All addresses of this host, of the family of another one.
pub(super) fn any_like(other: SocketAddr) -> IpAddr {
    match other {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    }
}

/// The addresses of this host in the network, all of one family: where the way out begins, and then the others. That
/// of the loopback interface, where there is no other.
pub(super) fn own_addresses() -> Vec<IpAddr> {
    /// How many are worth a try.
    const MOST: usize = 8;
    let listed = all_addresses().unwrap_or_default();
    let listed = listed.into_iter().map(|address| address.ip);
    let mut found: Vec<IpAddr> = Vec::new();
    for address in way_out().into_iter().chain(listed) {
        if is_of_network(&address) && !found.contains(&address) {
            found.push(address);
        }
    }
    let mut found = of_one_family(found);
    found.truncate(MOST);
    if found.is_empty() {
        found.push(Ipv4Addr::LOCALHOST.into());
    }
    found
}

/// The addresses of IPv4, or where there are none, all.
pub(super) fn of_one_family(mut addresses: Vec<IpAddr>) -> Vec<IpAddr> {
    if addresses.iter().any(IpAddr::is_ipv4) {
        addresses.retain(IpAddr::is_ipv4);
    }
    addresses
}

/// The address of this host at which its default route begins; nothing is sent.
fn way_out() -> Option<IpAddr> {
    // An address that nobody has (RFC 5737).
    let far = SocketAddr::from(([192, 0, 2, 1], 9));
    let socket = UdpSocket::bind((any_like(far), 0)).ok()?;
    socket.connect(far).ok()?;
    Some(socket.local_addr().ok()?.ip())
}

fn is_of_network(address: &IpAddr) -> bool {
    !is_of_link(address) && !address.is_loopback() && !address.is_unspecified()
}

/// The name of this host, for messages.
pub(crate) fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname");
    let name = name.or_else(|_| std::env::var("HOSTNAME"));
    let mut name = name.unwrap_or_default().trim().to_owned();
    let end = name.char_indices().nth(64).map_or(name.len(), |(at, _)| at);
    name.truncate(end);
    match name.is_empty() {
        true => "an unnamed host".to_owned(),
        false => name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_are_kept() {
        for (listener, expected, any) in [
            ("0.0.0.0:7", "127.0.0.1:7", "0.0.0.0"),
            ("[::]:7", "[::1]:7", "::"),
            ("10.0.0.1:7", "10.0.0.1:7", "0.0.0.0"),
        ] {
            let listener = listener.parse().unwrap();
            assert_eq!(reachable(listener).to_string(), expected);
            assert_eq!(any_like(listener).to_string(), any);
        }
    }

    #[test]
    fn addresses_of_the_network_are_told_from_others() {
        for (address, expected) in [
            ("10.0.0.7", true),
            ("127.0.0.1", false),
            ("169.254.1.1", false),
            ("fd00::7", true),
            ("::1", false),
            ("fe80::1", false),
        ] {
            assert_eq!(
                is_of_network(&address.parse().unwrap()),
                expected,
                "{address}"
            );
        }
    }

    #[test]
    fn this_host_has_addresses_of_one_family() {
        let own = own_addresses();
        assert!(!own.is_empty());
        assert!(
            own.iter()
                .all(|address| address.is_ipv4() == own[0].is_ipv4())
        );
    }
}
