use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::mpsc::Sender;
use std::thread;
use std::time::Duration;

use super::events::PoolEvent;
use crate::error::Result;
use crate::host::{at_port, bind_everywhere};
use crate::trial::protocol::{WorkerEnv, greet, random, receive};

/// Where workers connect.
#[derive(Debug)]
pub(super) struct Listener {
    address: String,
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
    /// Workers of other hosts reach it at `host`, and there are none otherwise.
    pub(super) fn bind(host: Option<&str>, events: Sender<PoolEvent>) -> Result<Self> {
        let listener = match host {
            None => TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?,
            Some(_) => bind_everywhere()?,
        };
        let port = listener.local_addr()?.port();
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
        Ok(Self {
            address: at_port(host.unwrap_or("127.0.0.1"), port),
            token,
        })
    }

    /// The environment of a worker that is about to be started.
    pub(super) fn worker_env(&self, worker: u32, cores: Vec<usize>) -> WorkerEnv {
        WorkerEnv {
            address: self.address.clone(),
            token: self.token.clone(),
            worker,
            parent: None,
            cores,
        }
    }
}

/// How long to wait after a connection that could not be taken.
const REFUSED: Duration = Duration::from_millis(100);

/// Passes on the messages of a worker, until it closes the connection.
fn serve(stream: TcpStream, token: &str, events: &Sender<PoolEvent>) {
    let Some((mut reader, hello)) = greet(&stream, token) else {
        return;
    };
    let connection = Connection {
        worker: hello.worker,
        rank: hello.rank,
        host: hello.host,
        pid: hello.pid,
        stream,
    };
    let (worker, rank) = (connection.worker, connection.rank);
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
