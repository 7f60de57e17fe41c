//! Addresses that stand for others.

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
