//! Loopback ports for tests: one on which a program listens later, and one on which nobody listens.
//!
//! A port that was bound, read and closed is neither: the system gives it to the next program that asks for any. Tests
//! of other packages include this file by its path.

#![allow(dead_code, unreachable_pub, reason = "each program uses what it needs")]

use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::Mutex;

/// Reserves a port for a program that listens there later, until this process ends.
///
/// It is below the ports that the system gives to outgoing connections and to programs that ask for any. A UDP socket
/// with the same number marks it as taken for other tests; UDP ports are separate from those of TCP.
///
/// # Panics
///
/// If loopback has no free one.
pub fn free_port() -> u16 {
    static RESERVED: Mutex<Vec<UdpSocket>> = Mutex::new(Vec::new());
    let mut reserved = RESERVED.lock().unwrap();
    // Each process starts at a different number, so that few are tried.
    let begin = std::process::id().wrapping_mul(97);
    let free = (0..PORTS).find_map(|next| {
        let port = FIRST_PORT + (begin.wrapping_add(next) % PORTS) as u16;
        let socket = UdpSocket::bind(("127.0.0.1", port)).ok()?;
        TcpListener::bind(("127.0.0.1", port)).ok()?;
        Some((port, socket))
    });
    let (port, socket) = free.unwrap();
    reserved.push(socket);
    port
}

/// An address that refuses connections as long as this value lives: it is the near end of a connection, where nobody
/// can listen.
#[derive(Debug)]
pub struct RefusingAddress {
    near: TcpStream,
    _far: TcpListener,
}

impl RefusingAddress {
    /// Takes such an address.
    ///
    /// # Panics
    ///
    /// If loopback has no free one.
    pub fn take() -> Self {
        let far = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let near = TcpStream::connect(far.local_addr().unwrap()).unwrap();
        Self { near, _far: far }
    }

    /// Returns the address.
    ///
    /// # Panics
    ///
    /// Never: the connection has two ends.
    pub fn address(&self) -> SocketAddr {
        self.near.local_addr().unwrap()
    }
}

const FIRST_PORT: u16 = 12_000;
const PORTS: u32 = 20_000;
