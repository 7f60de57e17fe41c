//! Addresses that stand for others, and the name of this host.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
};

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
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    let listed = ipv4_addresses(&read("/proc/net/fib_trie"))
        .chain(ipv6_addresses(&read("/proc/net/if_inet6")))
        .collect::<Vec<_>>();
    let mut found: Vec<IpAddr> = Vec::new();
    for address in way_out().into_iter().chain(listed) {
        if is_of_network(&address) && !found.contains(&address) {
            found.push(address);
        }
    }
    if found.iter().any(IpAddr::is_ipv4) {
        found.retain(IpAddr::is_ipv4);
    }
    found.truncate(MOST);
    if found.is_empty() {
        found.push(Ipv4Addr::LOCALHOST.into());
    }
    found
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
    let is_link_local = match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    };
    !is_link_local && !address.is_loopback() && !address.is_unspecified()
}

/// The addresses of this host in `/proc/net/fib_trie`: each before a line that says so.
fn ipv4_addresses(table: &str) -> impl Iterator<Item = IpAddr> {
    let mut leaf = None;
    table.lines().filter_map(move |line| {
        let line = line.trim();
        match line.strip_prefix("|-- ") {
            Some(address) => {
                leaf = address.parse().ok();
                None
            }
            None => leaf.filter(|_| line == "/32 host LOCAL"),
        }
    })
}

/// The addresses of `/proc/net/if_inet6`: the first word of each line, in hexadecimal.
fn ipv6_addresses(table: &str) -> impl Iterator<Item = IpAddr> {
    let words = table.lines().filter_map(|line| line.split(' ').next());
    let bits = words.filter_map(|word| u128::from_str_radix(word, 16).ok());
    bits.map(|bits| Ipv6Addr::from_bits(bits).into())
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
    fn the_addresses_of_this_host_are_read_from_the_kernels_tables() {
        let table = "Main:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 0.0.0.0\n        /0 universe UNICAST\n     \
                     |-- 10.0.0.0\n        /24 link UNICAST\nLocal:\n  +-- 10.0.0.0/24 2 0 2\n     \
                     |-- 10.0.0.7\n        /32 host LOCAL\n     |-- 10.0.0.255\n        /32 link BROADCAST\n     \
                     |-- 127.0.0.1\n        /32 host LOCAL\n";
        let found: Vec<String> = ipv4_addresses(table).map(|ip| ip.to_string()).collect();
        assert_eq!(found, ["10.0.0.7", "127.0.0.1"]);
        let table = "fd000000000000000000000000000007 02 40 00 80     eth0\n\
                     00000000000000000000000000000001 01 80 10 80       lo\n";
        let found: Vec<String> = ipv6_addresses(table).map(|ip| ip.to_string()).collect();
        assert_eq!(found, ["fd00::7", "::1"]);
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
