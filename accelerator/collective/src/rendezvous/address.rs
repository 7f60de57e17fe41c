//! Addresses and name of this host, and listeners on them.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket},
};

use super::interface::{all_addresses, is_of_link};

/// Listens on the first of `addresses` that this host has. If it has none of them, they belong to a proxy in front of
/// it, so this listens on all addresses of this host.
///
/// ```
/// use accelerator_collective::launcher::listen_at;
///
/// # fn main() -> std::io::Result<()> {
/// let listener = listen_at(&["192.0.2.1".parse().unwrap(), "127.0.0.1".parse().unwrap()], 0)?;
/// assert!(listener.local_addr()?.ip().is_loopback());
/// let listener = listen_at(&["192.0.2.1".parse().unwrap()], 0)?;
/// assert!(listener.local_addr()?.ip().is_unspecified());
/// # Ok(())
/// # }
/// ```
///
/// # Errors
///
/// An error of the system, for instance if the port is taken.
pub fn listen_at(addresses: &[IpAddr], port: u16) -> io::Result<TcpListener> {
    let mut taken = None;
    for &ip in addresses.iter().filter(|&&ip| is_own_address(ip)) {
        match TcpListener::bind((ip, port)) {
            Ok(listener) => return Ok(listener),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => taken = Some(error),
            // IPv6 may be switched off.
            Err(_) => {}
        }
    }
    match taken {
        Some(error) => Err(error),
        None => listen_everywhere(port),
    }
}

/// Listens on all addresses of this host, IPv6 and IPv4, whatever the system's default for IPv6 sockets
/// (`net.ipv6.bindv6only`); on those of IPv4 alone if there is no IPv6.
///
/// # Errors
///
/// An error of the system, for instance if the port is taken.
pub fn listen_everywhere(port: u16) -> io::Result<TcpListener> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, listen, socket_with, sockopt};

    let both = || -> io::Result<TcpListener> {
        let socket = socket_with(
            AddressFamily::INET6,
            SocketType::STREAM,
            #[cfg(not(target_vendor = "apple"))]
            SocketFlags::CLOEXEC,
            #[cfg(target_vendor = "apple")]
            SocketFlags::empty(),
            None,
        )?;
        #[cfg(target_vendor = "apple")]
        rustix::io::fcntl_setfd(&socket, rustix::io::FdFlags::CLOEXEC)?;
        sockopt::set_socket_reuseaddr(&socket, true)?;
        sockopt::set_ipv6_v6only(&socket, false)?;
        bind(&socket, &SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)))?;
        // The system lowers it to its own limit.
        listen(&socket, i32::MAX)?;
        Ok(socket.into())
    };
    match both() {
        Err(error) if error.kind() != io::ErrorKind::AddrInUse => {
            TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))
        }
        other => other,
    }
}

/// Returns true if this host has the address, according to its network interfaces or its routes. Binding a socket to
/// the address would prove less: with `net.ipv4.ip_nonlocal_bind`, a socket can be bound to any address.
pub fn is_own_address(ip: IpAddr) -> bool {
    let ip = ip.to_canonical();
    let is_listed = || {
        let listed = all_addresses().unwrap_or_default();
        listed.iter().any(|own| own.ip == ip)
    };
    ip.is_loopback() || is_listed() || way_to(ip) == Some(ip)
}

/// The address by which this host reaches its own listener, which may listen on all addresses.
pub(crate) fn reachable(mut listener: SocketAddr) -> SocketAddr {
    if listener.ip().is_unspecified() {
        // `::` includes the addresses of IPv4, and the loopback interface may have no IPv6.
        listener.set_ip(Ipv4Addr::LOCALHOST.into());
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
    /// The most addresses that are worth a try.
    const MOST: usize = 8;
    let listed = all_addresses().unwrap_or_default();
    let listed = listed.into_iter().map(|address| address.ip);
    let mut found: Vec<IpAddr> = Vec::new();
    // An address that nobody has (RFC 5737): it is reached by the default route.
    let far = Ipv4Addr::new(192, 0, 2, 1);
    for address in way_to(far.into()).into_iter().chain(listed) {
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

/// Returns the address of this host from which it reaches another one; sends nothing.
fn way_to(far: IpAddr) -> Option<IpAddr> {
    let far = SocketAddr::new(far, 9);
    let socket = UdpSocket::bind((any_like(far), 0)).ok()?;
    socket.connect(far).ok()?;
    Some(socket.local_addr().ok()?.ip())
}

fn is_of_network(address: &IpAddr) -> bool {
    !is_of_link(address) && !address.is_loopback() && !address.is_unspecified()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_are_kept() {
        for (listener, expected, any) in [
            ("0.0.0.0:7", "127.0.0.1:7", "0.0.0.0"),
            ("[::]:7", "127.0.0.1:7", "::"),
            ("[fd00::1]:7", "[fd00::1]:7", "::"),
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
    fn who_listens_everywhere_is_reached_by_both_families() {
        let listener = listen_everywhere(0).unwrap();
        let port = listener.local_addr().unwrap().port();
        let v6_is_here = TcpListener::bind(("::1", 0)).is_ok();
        for (ip, is_here) in [("127.0.0.1", true), ("::1", v6_is_here)] {
            let reached = std::net::TcpStream::connect((ip, port));
            assert!(reached.is_ok() || !is_here, "{ip}: {reached:?}");
        }
        let taken = listen_everywhere(port).unwrap_err();
        assert_eq!(taken.kind(), io::ErrorKind::AddrInUse);
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
