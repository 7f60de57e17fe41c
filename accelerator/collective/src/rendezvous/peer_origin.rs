//! The origin of a connection: the host and user of the process at its other end.

use std::{
    net::{IpAddr, SocketAddr, TcpStream},
    time::Duration,
};

#[cfg(target_os = "linux")]
use accelerator_host::sync::Mutex;
#[cfg(target_os = "linux")]
use socket_diag::SocketOwner;
#[cfg(target_os = "linux")]
use std::{thread, time::Instant};

/// The origin of a connection: the host and user of its other end.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum PeerOrigin {
    /// A process on another host.
    Remote,
    /// A process of this user, or of root, on this host.
    SameUser,
    /// A process of another user on this host.
    OtherUser { user: u32 },
    /// A process on this host whose user the system does not tell: it has closed its end, or not
    /// accepted the connection yet.
    Unknown,
}

impl PeerOrigin {
    /// Determines the origin of a connection; searches for up to `timeout` for its owner.
    pub(crate) fn of(stream: &TcpStream, timeout: Duration) -> Self {
        let (Ok(peer), Ok(local)) = (stream.peer_addr(), stream.local_addr()) else {
            return Self::Remote;
        };
        let (peer, local) = (plain(peer), plain(local));
        if !peer.ip().is_loopback() && peer.ip() != local.ip() {
            return Self::Remote;
        }
        match owner(peer, local, timeout) {
            // Root may do anything on this host anyway.
            Some(user) if user == 0 || user == rustix::process::geteuid().as_raw() => {
                Self::SameUser
            }
            Some(user) => Self::OtherUser { user },
            None => Self::Unknown,
        }
    }
}

/// The user who owns the socket that is bound to `local` and connected to `remote`, where the
/// system tells within `timeout`.
#[cfg(target_os = "linux")]
fn owner(local: SocketAddr, remote: SocketAddr, timeout: Duration) -> Option<u32> {
    // The kernel works for each line. Connections that come all at once must not keep the
    // processors from everything else.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let until = Instant::now() + timeout;
    let table = || {
        let _turn = ONE_AT_A_TIME.lock();
        ["/proc/net/tcp", "/proc/net/tcp6"]
            .into_iter()
            .filter_map(|path| std::fs::read_to_string(path).ok())
            .find_map(|table| find(&table, local, remote))
    };
    loop {
        let found = match socket_diag::owner(local, remote) {
            Some(SocketOwner::User(user)) => Some(user),
            Some(SocketOwner::Nobody) => None,
            None => table(),
        };
        if found.is_some() || Instant::now() >= until {
            return found;
        }
        // The table is read in pieces, so a line may be missed while others come and go.
        thread::sleep(LOOKUP_INTERVAL);
    }
}

#[cfg(target_os = "linux")]
const LOOKUP_INTERVAL: Duration = Duration::from_millis(10);

#[cfg(not(target_os = "linux"))]
fn owner(_local: SocketAddr, _remote: SocketAddr, _timeout: Duration) -> Option<u32> {
    None
}

/// Finds a connection in the kernel's table: `sl local remote state queues timer retransmits
/// uid timeout inode …`, addresses in hexadecimal. A socket that belongs to no process has inode 0,
/// and a uid of 0, which is also root's.
#[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "Linux only"))]
fn find(table: &str, local: SocketAddr, remote: SocketAddr) -> Option<u32> {
    table.lines().skip(1).find_map(|line| {
        let mut fields = line.split_ascii_whitespace().skip(1);
        let found =
            address(fields.next()?)? == plain(local) && address(fields.next()?)? == plain(remote);
        if !found {
            return None;
        }
        let user = fields.nth(4)?.parse().ok()?;
        (fields.nth(1)? != "0").then_some(user)
    })
}

/// Reads an address such as `0100007F:1F90`: words of 32 bits as the machine holds them.
fn address(text: &str) -> Option<SocketAddr> {
    let (ip, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let mut bytes = Vec::with_capacity(16);
    let mut rest = ip;
    while !rest.is_empty() {
        let (word, tail) = rest.split_at_checked(8)?;
        bytes.extend_from_slice(&u32::from_str_radix(word, 16).ok()?.to_ne_bytes());
        rest = tail;
    }
    let ip = match bytes.len() {
        4 => IpAddr::from(<[u8; 4]>::try_from(bytes).ok()?),
        16 => IpAddr::from(<[u8; 16]>::try_from(bytes).ok()?),
        _ => return None,
    };
    Some(plain(SocketAddr::new(ip, port)))
}

/// An IPv4 address that is written as an IPv6 one counts as the former.
pub(super) fn plain(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// Lookups of one connection of this host by `sock_diag(7)`, without a walk through the kernel's table.
#[cfg(target_os = "linux")]
mod socket_diag {
    use std::net::{IpAddr, SocketAddr};

    use rustix::net::{
        AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, connect, netlink, recv, send,
        socket_with,
    };

    /// The owner of a socket.
    #[derive(Clone, Copy, Debug, Eq, PartialEq)]
    pub(super) enum SocketOwner {
        /// No process owns it: nobody has accepted it yet, or its process has closed it.
        Nobody,
        User(u32),
    }

    /// The owner of the socket that is bound to `local` and connected to `remote`; `None` where the kernel knows no such
    /// socket, or does not answer such questions.
    pub(super) fn owner(local: SocketAddr, remote: SocketAddr) -> Option<SocketOwner> {
        let kind = SocketType::DGRAM;
        let flags = SocketFlags::CLOEXEC;
        let protocol = Some(netlink::SOCK_DIAG);
        let socket = socket_with(AddressFamily::NETLINK, kind, flags, protocol).ok()?;
        // Once connected to the kernel, the socket receives from nothing else.
        connect(&socket, &netlink::SocketAddrNetlink::new(0, 0)).ok()?;
        send(&socket, &question(local, remote)?, SendFlags::empty()).ok()?;
        let mut answer = [0; 512];
        // The kernel has answered before `send` returns.
        let (_, len) = recv(&socket, &mut answer[..], RecvFlags::DONTWAIT).ok()?;
        read(answer.get(..len)?, local, remote)
    }

    /// `nlmsghdr`, then `inet_diag_req_v2`.
    fn question(local: SocketAddr, remote: SocketAddr) -> Option<[u8; HEADER + REQUEST]> {
        let family = match (local.ip(), remote.ip()) {
            (IpAddr::V4(_), IpAddr::V4(_)) => INET,
            (IpAddr::V6(_), IpAddr::V6(_)) => INET6,
            _ => return None,
        };
        let mut bytes = [0; HEADER + REQUEST];
        bytes[..4].copy_from_slice(&((HEADER + REQUEST) as u32).to_ne_bytes());
        bytes[4..6].copy_from_slice(&SOCK_DIAG_BY_FAMILY.to_ne_bytes());
        bytes[6..8].copy_from_slice(&NLM_F_REQUEST.to_ne_bytes());
        let request = &mut bytes[HEADER..];
        request[..2].copy_from_slice(&[family, IPPROTO_TCP]);
        // Of all states.
        request[4..8].copy_from_slice(&u32::MAX.to_ne_bytes());
        let id = &mut request[8..];
        id[..2].copy_from_slice(&local.port().to_be_bytes());
        id[2..4].copy_from_slice(&remote.port().to_be_bytes());
        for (at, address) in [(4, local), (20, remote)] {
            match address.ip() {
                IpAddr::V4(ip) => id[at..at + 4].copy_from_slice(&ip.octets()),
                IpAddr::V6(ip) => id[at..at + 16].copy_from_slice(&ip.octets()),
            }
        }
        // INET_DIAG_NOCOOKIE
        id[40..48].fill(0xff);
        Some(bytes)
    }

    /// `nlmsghdr`, then `inet_diag_msg`. The kernel may answer with a socket that listens at `local`, which is another one.
    fn read(answer: &[u8], local: SocketAddr, remote: SocketAddr) -> Option<SocketOwner> {
        if u16::from_ne_bytes(array(answer, 4)?) != SOCK_DIAG_BY_FAMILY {
            return None;
        }
        let message = answer.get(HEADER..)?;
        let family = *message.first()?;
        let id = message.get(4..52)?;
        let address = |port: usize, ip: usize| {
            let ip = match family {
                INET => IpAddr::from(array::<4>(id, ip)?),
                INET6 => IpAddr::from(array::<16>(id, ip)?).to_canonical(),
                _ => return None,
            };
            Some(SocketAddr::new(ip, u16::from_be_bytes(array(id, port)?)))
        };
        if (address(0, 4)?, address(2, 20)?) != (local, remote) {
            return None;
        }
        let user = u32::from_ne_bytes(array(message, 64)?);
        match u32::from_ne_bytes(array(message, 68)?) {
            // Without an inode, root's number stands in the place of the user.
            0 => Some(SocketOwner::Nobody),
            _ => Some(SocketOwner::User(user)),
        }
    }

    fn array<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
        bytes.get(at..at + N)?.try_into().ok()
    }

    const HEADER: usize = 16;
    const REQUEST: usize = 56;
    const SOCK_DIAG_BY_FAMILY: u16 = 20;
    const NLM_F_REQUEST: u16 = 1;
    const INET: u8 = 2;
    const INET6: u8 = 10;
    const IPPROTO_TCP: u8 = 6;

    #[cfg(test)]
    mod tests {
        use std::net::{TcpListener, TcpStream};

        use super::*;

        /// If the kernel answers, its answer about a connection agrees with its table.
        #[test]
        fn a_connection_has_an_owner_when_it_is_accepted_and_until_it_is_closed() {
            for loopback in ["127.0.0.1", "::1"] {
                let Ok(listener) = TcpListener::bind((loopback, 0)) else {
                    continue;
                };
                let place = listener.local_addr().unwrap();
                let near = TcpStream::connect(place).unwrap();
                let own = near.local_addr().unwrap();
                let Some(before) = owner(place, own) else {
                    continue;
                };
                assert_eq!(before, SocketOwner::Nobody, "not accepted yet");
                let (far, _) = listener.accept().unwrap();
                let user = SocketOwner::User(rustix::process::geteuid().as_raw());
                assert_eq!(owner(place, own), Some(user));
                assert_eq!(owner(own, place), Some(user));
                drop(near);
                assert_ne!(owner(own, place), Some(user), "closed");
                drop(far);
                let stranger = SocketAddr::new(place.ip(), 1);
                assert_eq!(owner(place, stranger), None, "it listens there");
            }
        }

        #[test]
        fn a_torn_answer_tells_nothing() {
            let local: SocketAddr = "127.0.0.1:80".parse().unwrap();
            let remote: SocketAddr = "127.0.0.1:4000".parse().unwrap();
            // The ids in the request are four bytes behind their place in the answer.
            let asked = question(local, remote).unwrap();
            let mut answer = vec![0; HEADER + 72];
            answer[4..6].copy_from_slice(&SOCK_DIAG_BY_FAMILY.to_ne_bytes());
            answer[HEADER] = INET;
            answer[HEADER + 4..HEADER + 52].copy_from_slice(&asked[HEADER + 8..]);
            answer[HEADER + 64..HEADER + 68].copy_from_slice(&1000_u32.to_ne_bytes());
            answer[HEADER + 68] = 1;
            assert_eq!(read(&answer, local, remote), Some(SocketOwner::User(1000)));
            assert_eq!(read(&answer, remote, local), None);
            for len in 0..answer.len() {
                assert_eq!(read(&answer[..len], local, remote), None, "{len} bytes");
            }
            answer[HEADER + 68] = 0;
            assert_eq!(read(&answer, local, remote), Some(SocketOwner::Nobody));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{net::TcpListener, time::Duration};

    use super::*;

    #[test]
    #[cfg(target_endian = "little")]
    fn tables_are_read() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid\n\
             0: 0100007F:1F90 0100007F:0050 01 00000000:00000000 00:00000000 00000000  1000 0 1\n\
             1: 0100007F:1F91 0100007F:0050 01 00000000:00000000 00:00000000 00000000  1001 0 1\n\
             2: 0000000000000000FFFF00000100007F:1F92 0000000000000000FFFF00000100007F:0050 01 \
             00000000:00000000 00:00000000 00000000  1002 0 1\n\
             3: 0100007F:1F94 0100007F:0050 05 00000000:00000000 03:0000176A 00000000     0 0 0 3\n";
        let remote = "127.0.0.1:80".parse().unwrap();
        let user = |port| find(table, SocketAddr::new([127, 0, 0, 1].into(), port), remote);
        assert_eq!(user(8080), Some(1000));
        assert_eq!(user(8081), Some(1001));
        assert_eq!(user(8082), Some(1002));
        assert_eq!(user(8083), None);
        assert_eq!(user(8084), None, "its process has closed it");
        for garbage in ["", "x", "0100007F:", "0100007:1F90", "é100007F:1F90"] {
            assert_eq!(address(garbage), None);
        }
    }

    /// The system tells root's number where a socket belongs to no process.
    #[test]
    #[cfg(target_os = "linux")]
    fn who_has_gone_or_not_come_is_not_our_own() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (soon, timeout) = (Duration::from_millis(20), Duration::from_secs(5));
        assert_eq!(PeerOrigin::of(&near, soon), PeerOrigin::Unknown);
        let (far, _) = listener.accept().unwrap();
        assert_eq!(PeerOrigin::of(&near, timeout), PeerOrigin::SameUser);
        drop(near);
        assert_eq!(PeerOrigin::of(&far, soon), PeerOrigin::Unknown);
    }

    #[test]
    fn a_connection_within_this_process_is_our_own() {
        let expected = match cfg!(target_os = "linux") {
            true => PeerOrigin::SameUser,
            false => PeerOrigin::Unknown,
        };
        let everywhere = crate::rendezvous::listen_everywhere(0).unwrap();
        let loopback = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        for (listener, ip) in [
            (&loopback, "127.0.0.1"),
            (&everywhere, "127.0.0.1"),
            // Its own end is 127.0.0.1.
            (&everywhere, "127.0.1.1"),
        ] {
            let port = listener.local_addr().unwrap().port();
            let near = TcpStream::connect((ip, port)).unwrap();
            let (far, _) = listener.accept().unwrap();
            for end in [&near, &far] {
                let origin = PeerOrigin::of(end, Duration::from_secs(5));
                assert_eq!(origin, expected, "{ip}");
            }
        }
    }
}
