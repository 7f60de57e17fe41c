//! Addresses of this host and listeners on them, and its network interfaces, as the kernel lists them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};
use std::{fs, io};

use crate::error::{Error, Result};
use crate::socket::tcp_socket;

/// Listens on the first of `addresses` that this host has. If it has none of them, they belong to a proxy in front of
/// it, so this listens on all addresses of this host.
///
/// ```
/// use accelerator_collective::internal::listen_at;
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
    use rustix::net::{AddressFamily, bind, listen, sockopt};

    let both = || -> io::Result<TcpListener> {
        let socket = tcp_socket(AddressFamily::INET6)?;
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

/// An address of this host, and the number of the interface that has it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct InterfaceAddress {
    interface: u32,
    ip: IpAddr,
}

/// The addresses of the first of `names`, which commas part, that this host has; without those of the link, which mean
/// nothing to other hosts.
///
/// # Errors
///
/// A topology error where this host has none of the interfaces, or the interface has no such address; an I/O error
/// where the system does not tell.
pub(super) fn addresses_of(names: &str) -> Result<Vec<IpAddr>> {
    let unread = |error| Error::io("this host's network interfaces cannot be read", error);
    let listed = names.split(',').map(str::trim);
    let Some((name, number)) = listed
        .filter_map(|name| Some((name, number_of(name)?)))
        .next()
    else {
        return Err(Error::topology(format!(
            "{}: this host has no such network interface; it has {}",
            shown(names),
            all_names().join(", ")
        )));
    };
    let own: Vec<IpAddr> = all_addresses()
        .map_err(unread)?
        .into_iter()
        .filter(|address| address.interface == number)
        .map(|address| address.ip)
        .collect();
    let usable: Vec<IpAddr> = own.iter().copied().filter(|ip| !is_of_link(ip)).collect();
    match (usable.is_empty(), own.first()) {
        (false, _) => Ok(usable),
        (true, None) => Err(Error::topology(format!(
            "{}: the network interface {name} has no address",
            shown(names)
        ))),
        (true, Some(link)) => Err(Error::topology(format!(
            "{}: the network interface {name} has only the link-local address {link}, which other hosts cannot tell \
             from theirs",
            shown(names)
        ))),
    }
}

/// The address of the first of `names` that is of the family of `other`.
///
/// # Errors
///
/// The errors of [`addresses_of`], and a topology error if the interface has no address of that family.
pub(super) fn address_like(names: &str, other: IpAddr) -> Result<IpAddr> {
    let own = addresses_of(names)?;
    let like = own.iter().find(|ip| ip.is_ipv4() == other.is_ipv4());
    like.copied().ok_or_else(|| {
        let family = match other {
            IpAddr::V4(_) => "IPv4",
            IpAddr::V6(_) => "IPv6",
        };
        let own: Vec<String> = own.iter().map(IpAddr::to_string).collect();
        Error::topology(format!(
            "{}: the network interface has no {family} address, as the store is reached by; it has {}",
            shown(names),
            own.join(", ")
        ))
    })
}

/// Checks if an address is valid on one link only.
fn is_of_link(ip: &IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    }
}

fn shown(names: &str) -> String {
    format!("{} is {names:?}", accelerator_host::NETWORK_INTERFACE.name)
}

pub(super) fn all_names() -> Vec<String> {
    let table = fs::read_to_string("/proc/net/dev").unwrap_or_default();
    let names = table.lines().filter_map(|line| line.split_once(':'));
    names.map(|(name, _)| name.trim().to_owned()).collect()
}

/// The number of an interface, where this host has it.
#[cfg(target_os = "linux")]
fn number_of(name: &str) -> Option<u32> {
    let socket = std::net::UdpSocket::bind(("0.0.0.0", 0));
    let socket = socket.or_else(|_| std::net::UdpSocket::bind(("::", 0)));
    rustix::net::netdevice::name_to_index(socket.ok()?, name).ok()
}

#[cfg(not(target_os = "linux"))]
fn number_of(_name: &str) -> Option<u32> {
    None
}

/// All addresses of this host, those of an interface in its own order.
#[cfg(target_os = "linux")]
fn all_addresses() -> io::Result<Vec<InterfaceAddress>> {
    use rustix::net::{
        AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socket_with,
    };

    // `NETLINK_ROUTE` is protocol 0.
    let (family, kind) = (AddressFamily::NETLINK, SocketType::RAW);
    let socket = socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
    send(&socket, &netlink_request(), SendFlags::empty())?;
    let mut found = Vec::new();
    let mut buffer = vec![0; 1 << 16];
    loop {
        let (read, _) = recv(&socket, &mut buffer[..], RecvFlags::empty())?;
        match read_answer(&buffer[..read], &mut found) {
            Some(AddressDump::More) => {}
            Some(AddressDump::Complete) => return Ok(found),
            None => return Err(io::Error::other("the kernel's answer has no known form")),
        }
    }
}

#[cfg(not(target_os = "linux"))]
fn all_addresses() -> io::Result<Vec<InterfaceAddress>> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Asks for all addresses: `nlmsghdr`, and an `ifaddrmsg` of zeros, which stands for every family and interface.
#[cfg(target_os = "linux")]
fn netlink_request() -> [u8; 24] {
    const GET_ADDRESSES: u16 = 22;
    /// `NLM_F_REQUEST | NLM_F_DUMP`.
    const ALL: u16 = 0x301;
    let mut request = [0; 24];
    request[..4].copy_from_slice(&24_u32.to_ne_bytes());
    request[4..6].copy_from_slice(&GET_ADDRESSES.to_ne_bytes());
    request[6..8].copy_from_slice(&ALL.to_ne_bytes());
    request
}

/// The state of an address dump: `More` if there is more to read.
#[cfg(target_os = "linux")]
#[derive(Debug, Eq, PartialEq)]
enum AddressDump {
    More,
    Complete,
}

/// Adds the addresses of an answer to `found`; `None` where it is none, or an error.
#[cfg(target_os = "linux")]
fn read_answer(mut bytes: &[u8], found: &mut Vec<InterfaceAddress>) -> Option<AddressDump> {
    const END: u16 = 3;
    const ADDRESS: u16 = 20;
    while !bytes.is_empty() {
        let size = u32::from_ne_bytes(*bytes.first_chunk()?) as usize;
        let kind = u16::from_ne_bytes(*bytes.get(4..)?.first_chunk()?);
        let body = bytes.get(16..size)?;
        match kind {
            END => return Some(AddressDump::Complete),
            ADDRESS => found.extend(read_address(body)),
            _ => return None,
        }
        bytes = bytes.get(size.next_multiple_of(4)..).unwrap_or(&[]);
    }
    Some(AddressDump::More)
}

/// The address of an `ifaddrmsg` with its attributes.
#[cfg(target_os = "linux")]
fn read_address(message: &[u8]) -> Option<InterfaceAddress> {
    /// The address, or on a link between two hosts that of the other one, if there is an [`OWN`].
    const ADDRESS: u16 = 1;
    const OWN: u16 = 2;
    let interface = u32::from_ne_bytes(*message.get(4..)?.first_chunk()?);
    let mut attributes = message.get(8..)?;
    let mut found = None;
    while !attributes.is_empty() {
        let size = u16::from_ne_bytes(*attributes.first_chunk()?) as usize;
        let kind = u16::from_ne_bytes(*attributes.get(2..)?.first_chunk()?);
        let value = attributes.get(4..size)?;
        let ip = match value.len() {
            4 => value.first_chunk::<4>().map(|bytes| IpAddr::from(*bytes)),
            16 => value.first_chunk::<16>().map(|bytes| IpAddr::from(*bytes)),
            _ => None,
        };
        match kind {
            OWN => found = ip,
            ADDRESS => found = found.or(ip),
            _ => {}
        }
        attributes = attributes.get(size.next_multiple_of(4)..).unwrap_or(&[]);
    }
    Some(InterfaceAddress {
        interface,
        ip: found?,
    })
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

    #[cfg(target_os = "linux")]
    mod interfaces {
        use super::super::*;

        #[test]
        fn the_loopback_interface_is_found_by_its_name() {
            let own = addresses_of("lo").unwrap();
            assert!(own.contains(&"127.0.0.1".parse().unwrap()), "{own:?}");
            let like = address_like(" no-such-one, lo", "10.0.0.1".parse().unwrap()).unwrap();
            assert!(like.is_ipv4() && like.is_loopback(), "{like}");
        }

        #[test]
        fn an_interface_that_is_not_there_is_an_error_that_names_those_that_are() {
            for names in [
                "eth99",
                "eth99,ib99",
                "",
                "a-name-that-is-too-long-for-linux",
            ] {
                let error = addresses_of(names).unwrap_err();
                assert!(error.is_topology(), "{error}");
                let text = error.to_string();
                let says = format!("ACCEL_NETWORK_INTERFACE is {names:?}: this host has no such");
                assert!(text.contains(&says), "{text}");
                assert!(text.contains("it has ") && text.contains("lo"), "{text}");
            }
        }

        /// A message of the kernel's, with attributes of four bytes.
        fn message(kind: u16, interface: u32, attributes: &[(u16, &[u8])]) -> Vec<u8> {
            let mut body = vec![2, 24, 0, 0];
            body.extend(interface.to_ne_bytes());
            for (kind, value) in attributes {
                body.extend((4 + value.len() as u16).to_ne_bytes());
                body.extend(kind.to_ne_bytes());
                body.extend(*value);
                body.resize(body.len().next_multiple_of(4), 0);
            }
            let mut message = (16 + body.len() as u32).to_ne_bytes().to_vec();
            message.extend(kind.to_ne_bytes());
            message.extend([0; 10]);
            message.extend(body);
            message
        }

        #[test]
        fn answers_of_the_kernel_are_read() {
            let v6 = [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7];
            let answer = [
                message(20, 1, &[(1, &[127, 0, 0, 1]), (2, &[127, 0, 0, 1])]),
                // A tunnel, whose first address is that of the other end, and the name of an interface.
                message(
                    20,
                    7,
                    &[(1, &[10, 0, 0, 2]), (3, b"tun0\0"), (2, &[10, 0, 0, 1])],
                ),
                message(20, 2, &[(1, &v6)]),
            ]
            .concat();
            let mut found = Vec::new();
            assert_eq!(read_answer(&answer, &mut found), Some(AddressDump::More));
            let shown: Vec<_> = found
                .iter()
                .map(|own| format!("{} {}", own.interface, own.ip))
                .collect();
            assert_eq!(shown, ["1 127.0.0.1", "7 10.0.0.1", "2 fd00::7"]);
            let end = message(3, 0, &[]);
            assert_eq!(read_answer(&end, &mut found), Some(AddressDump::Complete));
            // An error, and what is cut off.
            assert_eq!(read_answer(&message(2, 0, &[]), &mut found), None);
            for cut in 1..20 {
                assert_eq!(read_answer(&answer[..cut], &mut found), None, "{cut}");
            }
            assert_eq!(found.len(), 3);
        }
    }
}
