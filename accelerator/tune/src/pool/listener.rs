use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread;
use std::time::Duration;

use accelerator_collective::rendezvous::{PendingHandshakes, Token};

use super::events::PoolEvent;
use crate::error::Result;
use crate::host::{at_port, bind_everywhere};
use crate::trial::protocol::{PeerRole, WorkerPlace, greet, receive};

/// Where workers connect.
#[derive(Debug)]
pub(super) struct Listener {
    address: String,
}

/// A rank of a worker has connected, and knows the token.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) worker: u32,
    pub(super) rank: usize,
    pub(super) host: String,
    pub(super) pid: u32,
    pub(super) stream: Arc<TcpStream>,
}

impl Listener {
    /// Listens for at most `most` workers at a time. Workers of other hosts connect to `host`; if it is `None`, there
    /// are none.
    pub(super) fn bind(
        host: Option<&str>,
        token: &Token,
        most: usize,
        events: Sender<PoolEvent>,
    ) -> Result<Self> {
        let listener = match host {
            None => TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?,
            Some(_) => bind_everywhere()?,
        };
        let port = listener.local_addr()?.port();
        let token = token.clone();
        let pending = PendingHandshakes::logged(most.saturating_add(64));
        thread::Builder::new()
            .name("workers".to_owned())
            .spawn(move || {
                for stream in listener.incoming() {
                    let Ok(stream) = stream else {
                        // Such as too many open files: not at once again.
                        thread::sleep(REFUSED);
                        continue;
                    };
                    let (events, token) = (events.clone(), token.clone());
                    let pending = Arc::clone(&pending);
                    let serve = move || serve(stream, &token, &pending, &events);
                    if let Err(error) = thread::Builder::new()
                        .name("worker".to_owned())
                        .spawn(serve)
                    {
                        tracing::error!("no thread can be started for a worker: {error}");
                    }
                }
            })?;
        Ok(Self {
            address: at_port(host.unwrap_or("127.0.0.1"), port),
        })
    }

    /// Returns the address of the search for a worker that is about to be started.
    pub(super) fn place(&self, worker: u32) -> WorkerPlace {
        WorkerPlace {
            address: self.address.clone(),
            worker,
        }
    }
}

/// How long to wait after a connection that could not be taken.
const REFUSED: Duration = Duration::from_millis(100);

/// Passes on the messages of a worker, until it closes the connection.
fn serve(
    stream: TcpStream,
    token: &Token,
    pending: &Arc<PendingHandshakes>,
    events: &Sender<PoolEvent>,
) {
    let stream = Arc::new(stream);
    let handshake = pending.enter(&stream);
    let Some((mut reader, peer)) = greet(&stream, token) else {
        return;
    };
    let PeerRole::Worker(worker) = peer.role else {
        return;
    };
    if !handshake.leave() {
        return;
    }
    let connection = Connection {
        worker,
        rank: peer.rank,
        host: peer.host,
        pid: peer.pid,
        stream,
    };
    let rank = connection.rank;
    let mut is_open = events.send(PoolEvent::Connected(connection)).is_ok();
    while is_open {
        let Some(message) = receive(&mut reader) else {
            break;
        };
        let event = PoolEvent::Message {
            worker,
            rank,
            message,
        };
        is_open = events.send(event).is_ok();
    }
    // Nobody listens once the search has ended.
    let _ = events.send(PoolEvent::Closed { worker });
}
