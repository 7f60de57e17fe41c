//! The ranks' output between hosts: a connection for each stream, which carries the bytes of all ranks of a host.
//!
//! A rank whose output nobody reads waits, as it would on the head's own host: TCP takes no more from its host then.
//! Frames are restart (u64), rank (u32), length (u32) and the bytes; the end of a rank's stream is a frame of length 0.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use accelerator_host::sync::Mutex;

use super::host::Host;
use super::line::spawn;
use crate::error::Result;
use crate::output::Stream;

/// The largest number of bytes sent at once.
const CHUNK: usize = 64 << 10;

/// The length of a frame's header.
const HEADER: usize = 16;

/// The size of the system's buffer on either side. When a rank ends, data in flight is read no further than `output`
/// reads of a rank that has ended.
const BUFFER: usize = 256 << 10;

/// The silence after which the system checks if the other side is there: firewalls forget connections that carry
/// nothing.
#[cfg(target_os = "linux")]
const KEEPALIVE: Duration = Duration::from_secs(60);

/// A host's connection for a stream. Clones share it.
#[derive(Clone, Debug)]
pub(super) struct StreamLine {
    connection: Arc<Mutex<TcpStream>>,
}

impl StreamLine {
    /// Sends over `connection`.
    pub(super) fn new(connection: TcpStream) -> Self {
        prepare(&connection);
        Self {
            connection: Arc::new(Mutex::new(connection)),
        }
    }

    /// Sends the output of `rank`, which it writes to `pipe`, on a thread of its own.
    pub(super) fn send(&self, restart: u64, rank: usize, pipe: File) -> Result<()> {
        let line = self.clone();
        spawn(&format!("output-{rank}"), move || {
            line.copy(restart, rank, pipe)
        })
    }

    fn copy(&self, restart: u64, rank: usize, mut pipe: File) {
        let mut frame = vec![0; HEADER + CHUNK];
        frame[..8].copy_from_slice(&restart.to_le_bytes());
        // There are far fewer ranks than numbers.
        frame[8..12].copy_from_slice(&(rank as u32).to_le_bytes());
        loop {
            let count = match pipe.read(&mut frame[HEADER..]) {
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(_) => 0,
            };
            frame[12..HEADER].copy_from_slice(&(count as u32).to_le_bytes());
            let mut connection = self.connection.lock();
            // Without the head the output is lost. The rank may still write until it is ended.
            let _ = connection.write_all(&frame[..HEADER + count]);
            if count == 0 {
                return;
            }
        }
    }
}

/// Passes the output from `connection` on to `host`, on a thread of its own, until it is closed.
pub(super) fn receive(mut connection: TcpStream, host: Arc<Host>, stream: Stream) -> Result<()> {
    prepare(&connection);
    spawn(&format!("output-of-host-{}", host.number), move || {
        let error = copy(&mut connection, &host, stream);
        host.lose_output(&match error.kind() {
            ErrorKind::UnexpectedEof => "its connection was closed".to_owned(),
            _ => format!("its connection failed: {error}"),
        });
    })
}

fn copy(connection: &mut TcpStream, host: &Host, stream: Stream) -> io::Error {
    let mut header = [0; HEADER];
    let mut bytes = vec![0; CHUNK];
    loop {
        if let Err(error) = connection.read_exact(&mut header) {
            return error;
        }
        let [a, b, c, d, e, f, g, h, rank @ ..] = header;
        let restart = u64::from_le_bytes([a, b, c, d, e, f, g, h]);
        let [a, b, c, d, e, f, g, h] = rank;
        let rank = u32::from_le_bytes([a, b, c, d]) as usize;
        let length = u32::from_le_bytes([e, f, g, h]) as usize;
        let Some(bytes) = bytes.get_mut(..length) else {
            return io::Error::new(ErrorKind::InvalidData, "it sent no output");
        };
        if let Err(error) = connection.read_exact(bytes) {
            return error;
        }
        host.forward(restart, rank, stream, bytes);
    }
}

fn prepare(connection: &TcpStream) {
    // An option that cannot be set breaks nothing.
    let _ = connection.set_nodelay(true);
    let _ = connection.set_read_timeout(None::<Duration>);
    #[cfg(target_os = "linux")]
    {
        use rustix::net::sockopt;
        let _ = sockopt::set_socket_send_buffer_size(connection, BUFFER);
        let _ = sockopt::set_socket_recv_buffer_size(connection, BUFFER);
        let _ = sockopt::set_socket_keepalive(connection, true);
        let _ = sockopt::set_tcp_keepidle(connection, KEEPALIVE);
    }
}
