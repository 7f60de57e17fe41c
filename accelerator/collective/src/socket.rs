//! A waker for threads that poll, and operations on TCP sockets: non-blocking connects, readiness, the amount of
//! undelivered data, and a bound on the backoff of retransmissions.
#![cfg_attr(
    target_os = "linux",
    expect(
        unsafe_code,
        reason = "a question to the system and an option of it that no crate has"
    )
)]

use std::{
    io::{self, Read, Write},
    net::{SocketAddr, TcpStream},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    os::unix::net::UnixStream,
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{AddressFamily, SocketFlags, SocketType, connect, socket_with, sockopt},
};

/// A socket pair: [`wake`](Self::wake) makes the end that is polled readable.
#[derive(Debug)]
pub(crate) struct Waker {
    sender: UnixStream,
    receiver: UnixStream,
}

impl Waker {
    pub(crate) fn new() -> io::Result<Self> {
        let (sender, receiver) = UnixStream::pair()?;
        sender.set_nonblocking(true)?;
        receiver.set_nonblocking(true)?;
        Ok(Self { sender, receiver })
    }

    pub(crate) fn wake(&self) {
        // If the socket is full, a wake-up is already pending.
        let _ = (&self.sender).write(&[1]);
    }

    /// Discards pending wake-ups.
    pub(crate) fn drain(&self) {
        let _ = (&self.receiver).read(&mut [0; 64]);
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.receiver.as_fd()
    }
}

/// Lets a connection send again within a second what the network has lost. The system's pauses double without that: a
/// link that is down for 3 s may stay silent for 6 s, and a peer be taken for lost that no longer is.
///
/// Linux has this since 6.15; elsewhere nothing changes.
pub fn limit_backoff(stream: &TcpStream) {
    #[cfg(target_os = "linux")]
    {
        use std::ffi::{c_int, c_void};
        use std::os::fd::AsRawFd;

        unsafe extern "C" {
            fn setsockopt(
                socket: c_int,
                level: c_int,
                option: c_int,
                value: *const c_void,
                length: u32,
            ) -> c_int;
        }

        /// `linux/in.h` and `linux/tcp.h`, the same on every architecture.
        const IPPROTO_TCP: c_int = 6;
        const TCP_RTO_MAX_MS: c_int = 44;

        let milliseconds: c_int = 1000;
        // SAFETY: the descriptor is open as long as `stream` is borrowed, and the option is one `int`, which is read
        // from a value that lives. A kernel that does not know it returns an error and changes nothing.
        unsafe {
            setsockopt(
                stream.as_raw_fd(),
                IPPROTO_TCP,
                TCP_RTO_MAX_MS,
                (&raw const milliseconds).cast(),
                size_of::<c_int>() as u32,
            );
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = stream;
}

/// Starts a non-blocking connect. Once the stream is writable, [`finish_connect`] returns the result.
pub(crate) fn begin_connect(address: SocketAddr) -> io::Result<TcpStream> {
    let socket = tcp_socket(match address {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    })?;
    rustix::io::ioctl_fionbio(&socket, true)?;
    match connect(&socket, &address) {
        Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => Ok(socket.into()),
        Err(error) => Err(error.into()),
    }
}

/// Completes a connect: returns `true` once connected, `false` while in progress, and the error if it failed, which the
/// socket tells once.
pub(crate) fn finish_connect(stream: &TcpStream) -> io::Result<bool> {
    sockopt::socket_error(stream)??;
    match stream.peer_addr() {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotConnected => Ok(false),
        Err(error) => Err(error),
    }
}

/// Creates a TCP socket that child processes do not inherit.
pub(crate) fn tcp_socket(family: AddressFamily) -> io::Result<OwnedFd> {
    let socket = socket_with(
        family,
        SocketType::STREAM,
        #[cfg(not(target_vendor = "apple"))]
        SocketFlags::CLOEXEC,
        #[cfg(target_vendor = "apple")]
        SocketFlags::empty(),
        None,
    )?;
    #[cfg(target_vendor = "apple")]
    {
        rustix::io::fcntl_setfd(&socket, rustix::io::FdFlags::CLOEXEC)?;
        sockopt::set_socket_nosigpipe(&socket, true)?;
    }
    Ok(socket)
}

/// The number of bytes and ends of a connection that the system has not sent, for want of room at the peer or on the
/// way. Data sent over loopback has arrived. Returns 0 if the system cannot tell, as outside of Linux.
pub(crate) fn unsent(stream: &TcpStream) -> usize {
    #[cfg(target_os = "linux")]
    return ask::<SIOCOUTQNSD>(stream);
    #[cfg(not(target_os = "linux"))]
    {
        let _ = stream;
        0
    }
}

/// The same, with what was sent and is not confirmed by the peer's system: it may have to be sent again.
pub(crate) fn unconfirmed(stream: &TcpStream) -> usize {
    #[cfg(target_os = "linux")]
    return ask::<SIOCOUTQ>(stream);
    #[cfg(not(target_os = "linux"))]
    {
        let _ = stream;
        0
    }
}

/// Waits a while until a connection is ready, and says whether it is; an error or an end counts as
/// being so.
pub(crate) fn await_ready(stream: &TcpStream, flags: PollFlags, pause: Duration) -> bool {
    let mut fds = [PollFd::new(stream, flags)];
    matches!(poll(&mut fds, Some(&timespec(pause))), Ok(count) if count > 0)
}

pub(crate) fn timespec(pause: Duration) -> Timespec {
    Timespec {
        tv_sec: pause.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: pause.subsec_nanos().into(),
    }
}

/// `linux/sockios.h`, the same on every architecture.
#[cfg(target_os = "linux")]
const SIOCOUTQNSD: rustix::ioctl::Opcode = 0x894b;

/// `TIOCOUTQ`, which most architectures have from `asm-generic/ioctls.h`. On the others: what is unsent.
#[cfg(target_os = "linux")]
const SIOCOUTQ: rustix::ioctl::Opcode = match cfg!(any(
    target_arch = "mips",
    target_arch = "mips64",
    target_arch = "powerpc",
    target_arch = "powerpc64",
    target_arch = "sparc",
    target_arch = "sparc64",
)) {
    true => SIOCOUTQNSD,
    false => 0x5411,
};

#[cfg(target_os = "linux")]
fn ask<const OPCODE: rustix::ioctl::Opcode>(stream: &TcpStream) -> usize {
    use rustix::ioctl::{Getter, ioctl};

    // SAFETY: for a TCP socket both requests write one `int`, the number of bytes, and nothing else
    // (tcp(7) for SIOCOUTQ, and its twin); a socket that is none, or a kernel without it, is an error.
    let count = unsafe { ioctl(stream, Getter::<OPCODE, i32>::new()) };
    count
        .ok()
        .and_then(|count| count.try_into().ok())
        .unwrap_or(0)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::{
        io::{ErrorKind, Read, Write},
        net::{Shutdown, TcpListener},
    };

    use super::*;

    #[test]
    fn what_a_peer_has_no_room_for_is_counted_until_it_has() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let mut sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut receiver, _) = listener.accept().unwrap();
        assert_eq!(unsent(&sender), 0);
        sender.write_all(&[1; 100]).unwrap();
        assert_eq!(unsent(&sender), 0, "there was room");
        assert!(unconfirmed(&sender) <= 100);
        sender.set_nonblocking(true).unwrap();
        let mut written = 100;
        loop {
            match sender.write(&[2; 65_536]) {
                Ok(count) => written += count,
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::WouldBlock);
                    break;
                }
            }
        }
        assert!((1..written).contains(&unsent(&sender)));
        assert!(unconfirmed(&sender) >= unsent(&sender));
        sender.shutdown(Shutdown::Write).unwrap();
        let mut all = Vec::new();
        receiver.read_to_end(&mut all).unwrap();
        assert_eq!((all.len(), unsent(&sender)), (written, 0));
    }
}
