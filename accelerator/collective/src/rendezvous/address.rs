//! Addresses that stand for others, and the name of this host.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

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
}
