use std::io::{BufReader, Read};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::Sender;
use std::thread;
use std::time::Duration;

use super::{PoolEvent, Slot};
use crate::error::Result;
use crate::trial::protocol::{Greeting, Hello, WorkerPlace, receive, send};

/// Where workers connect.
#[derive(Debug)]
pub(super) struct Listener {
    address: SocketAddr,
    token: String,
}

/// A rank of a worker has connected, and knows the token.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) worker: u32,
    pub(super) rank: usize,
    pub(super) host: String,
    pub(super) pid: u32,
    pub(super) stream: TcpStream,
}

impl Listener {
    pub(super) fn bind(events: Sender<PoolEvent>) -> Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let address = listener.local_addr()?;
        let token = random();
        let known = token.clone();
        thread::Builder::new()
            .name("workers".to_owned())
            .spawn(move || {
                for stream in listener.incoming() {
                    let Ok(stream) = stream else {
                        // Such as too many open files: not at once again.
                        thread::sleep(REFUSED);
                        continue;
                    };
                    let (events, token) = (events.clone(), known.clone());
                    let serve = move || serve(stream, &token, &events);
                    if let Err(error) = thread::Builder::new()
                        .name("worker".to_owned())
                        .spawn(serve)
                    {
                        tracing::error!("no thread can be started for a worker: {error}");
                    }
                }
            })?;
        Ok(Self { address, token })
    }

    /// What a worker is told when it is started.
    pub(super) fn place(&self, worker: u32, slot: &Slot) -> WorkerPlace {
        WorkerPlace {
            address: self.address.to_string(),
            token: self.token.clone(),
            worker,
            parent: Some(std::process::id()),
            cores: slot.cores.clone(),
        }
    }
}

/// How long to wait after a connection that could not be taken.
const REFUSED: Duration = Duration::from_millis(100);
/// How long a connection may take to say who it is.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// How long what it says may be.
const HELLO_BYTES: u64 = 4 << 10;

/// Passes on what a worker says, until it closes.
fn serve(stream: TcpStream, token: &str, events: &Sender<PoolEvent>) {
    let Some((mut reader, connection)) = greet(stream, token) else {
        return;
    };
    let (worker, rank) = (connection.worker, connection.rank);
    let mut is_open = events.send(PoolEvent::Connected(connection)).is_ok();
    while is_open {
        let Some(said) = receive(&mut reader) else {
            break;
        };
        is_open = events.send(PoolEvent::Said { worker, rank, said }).is_ok();
    }
    // Nobody listens once the search has ended.
    let _ = events.send(PoolEvent::Closed { worker });
}

fn greet(stream: TcpStream, token: &str) -> Option<(BufReader<TcpStream>, Connection)> {
    stream.set_nodelay(true).ok()?;
    stream.set_read_timeout(Some(HANDSHAKE)).ok()?;
    let nonce = random();
    let greeting = Greeting {
        nonce: nonce.clone(),
    };
    send(&stream, &greeting).ok()?;
    let mut reader = BufReader::new(stream.try_clone().ok()?);
    // Whoever it is: not much is read before it has proved that it knows the token.
    let hello: Hello = receive(&mut reader.by_ref().take(HELLO_BYTES))?;
    if hello.proof != Hello::proof(token, &nonce, hello.worker, hello.rank) {
        tracing::warn!("a process connected that does not know the search's token; it is ignored");
        return None;
    }
    stream.set_read_timeout(None).ok()?;
    let connection = Connection {
        worker: hello.worker,
        rank: hello.rank,
        host: hello.host,
        pid: hello.pid,
        stream,
    };
    Some((reader, connection))
}

/// 128 bits that nobody can guess.
fn random() -> String {
    let mut bytes = [0; 16];
    // It fails on no system that this runs on: it waits until there is randomness.
    let filled = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    debug_assert_eq!(filled, Ok(bytes.len()));
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::mpsc::channel;
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_connection_that_says_much_and_proves_nothing_is_closed() {
        let (events, received) = channel();
        let listener = Listener::bind(events).unwrap();
        let mut stream = TcpStream::connect(listener.address).unwrap();
        let begun = Instant::now();
        let megabyte = vec![b'x'; 1 << 20];
        let sent = (0..200).take_while(|_| stream.write_all(&megabyte).is_ok());
        assert!(sent.count() < 200);
        assert!(begun.elapsed() < HANDSHAKE);
        assert!(received.try_recv().is_err());
    }
}
