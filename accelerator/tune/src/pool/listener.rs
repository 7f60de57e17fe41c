use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread;

use accelerator_collective::launcher::{PendingHandshakes, Token};

use crate::error::Result;
use crate::host::{at_port, bind_everywhere};
use crate::trial::protocol::{FromWorker, PeerRole, WorkerPlace, accept_one, greet, receive};

/// The address to which workers connect.
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

/// An event of a worker.
#[derive(Debug)]
pub(super) enum PoolEvent {
    Connected(Connection),
    Message {
        worker: u32,
        rank: usize,
        message: FromWorker,
    },
    Closed {
        worker: u32,
    },
    Exited {
        worker: u32,
    },
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
                loop {
                    let (events, token) = (events.clone(), token.clone());
                    let pending = Arc::clone(&pending);
                    accept_one(&listener, "worker", move |stream| {
                        serve(stream, &token, &pending, &events);
                    });
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
