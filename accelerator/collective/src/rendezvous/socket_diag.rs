//! One connection of this host, as the kernel knows it: `sock_diag(7)`, which finds it without a walk through its table.

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
    // Whoever is not the kernel can send nothing to it.
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
        // What is asked has the ids where the answer has them, four bytes on.
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
