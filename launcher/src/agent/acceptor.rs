//! Accepts connections to the head, and admits hosts.

use std::io::ErrorKind;
use std::net::{IpAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use accelerator_collective::launcher::{
    PendingHandshake, PendingHandshakes, Token, listen_at, listen_everywhere,
};
use accelerator_host::machine::host_name;

use super::admission::Admission;
use super::handshake::{Refusal, answer};
use super::host::Host;
use super::line::{Line, LineStart, spawn};
use super::message::{ConnectionKind, JoinReply};
use super::stream_line;
use crate::error::{Error, Result, chain};
use crate::output::Stream;
use crate::settings::hosts::Endpoint;
use crate::supervisor::signals::Relay;
use crate::text::note;

/// The most pending connections that have not proved the token.
const MAX_PENDING_HANDSHAKES: usize = 256;

/// The pause after a failed `accept`.
const PAUSE: Duration = Duration::from_millis(20);

/// The listener for the launchers and streams of other hosts.
#[derive(Debug)]
pub(super) struct Acceptor {
    admission: Arc<Admission>,
    token: Option<Token>,
    liveness: Duration,
    relay: Relay,
    sessions: AtomicU64,
    pending: Arc<PendingHandshakes>,
}

/// The kind of an admitted connection.
enum Admitted {
    Messages(Arc<Host>, LineStart),
    Output(Arc<Host>, Stream),
}

impl Acceptor {
    /// Admits by `token` the hosts that `admission` admits.
    pub(super) fn new(
        admission: Arc<Admission>,
        token: Option<Token>,
        liveness: Duration,
        relay: Relay,
    ) -> Self {
        Self {
            admission,
            token,
            liveness,
            relay,
            sessions: AtomicU64::new(1),
            pending: PendingHandshakes::new(MAX_PENDING_HANDSHAKES, note),
        }
    }

    /// Listens at `endpoint`, on threads of its own, as long as this process lives; returns the address.
    ///
    /// # Errors
    /// When the port is taken, or the system gives no thread.
    pub(super) fn listen(self, endpoint: &Endpoint) -> Result<IpAddr> {
        let listener = bind(endpoint)?;
        let address = listener
            .local_addr()
            .map_err(|error| Error::system("the own address cannot be read").with_source(error))?;
        let acceptor = Arc::new(self);
        spawn("hosts", move || acceptor.accept(&listener))?;
        Ok(address.ip())
    }

    fn accept(self: Arc<Self>, listener: &TcpListener) {
        for connection in listener.incoming() {
            let Ok(connection) = connection else {
                // No file descriptor is free, perhaps.
                thread::sleep(PAUSE);
                continue;
            };
            let connection = Arc::new(connection);
            let pending = self.pending.enter(&connection);
            let acceptor = Arc::clone(&self);
            // If no thread can be started, the host asks again.
            let _ = spawn("handshake", move || {
                acceptor.shake_hands(&connection, pending);
            });
        }
    }

    fn shake_hands(&self, connection: &TcpStream, pending: PendingHandshake) {
        let (Ok(peer), Ok(own)) = (connection.peer_addr(), connection.local_addr()) else {
            return;
        };
        // Addresses of IPv4 look like those of IPv6 where both are listened for.
        let addresses = [peer, own].map(|address| address.ip().to_canonical());
        let mut added = None;
        let token = self.token.as_ref();
        let admitted = answer(connection, token, PendingHandshakes::TIMEOUT, |entry| {
            if !pending.leave() {
                return Err(Refusal::Retry("it had to make room for others".to_owned()));
            }
            self.admission.check(&entry)?;
            let session = self.sessions.fetch_add(1, Ordering::Relaxed);
            let welcome = JoinReply {
                session,
                liveness: self.liveness,
                name: host_name(),
            };
            match entry.purpose {
                ConnectionKind::Messages(info) => {
                    let failed = |error: Error| Refusal::Retry(chain(&error));
                    let copy = connection.try_clone();
                    let copy = copy.map_err(|error| Refusal::Retry(error.to_string()))?;
                    let (line, start) = Line::new(copy).map_err(failed)?;
                    let relay = self.relay.clone();
                    let policy = self.admission.leave_policy();
                    let host = Host::new(entry.host, info, addresses, session, line, relay, policy);
                    let host = Arc::new(host);
                    self.admission.add(&host)?;
                    added = Some(Arc::clone(&host));
                    Ok((welcome, Admitted::Messages(host, start)))
                }
                ConnectionKind::Output { stream, session } => {
                    let host = self.admission.of_session(entry.host, session);
                    let host = host.ok_or_else(|| {
                        Refusal::Retry(format!("host {} has no such connection", entry.host))
                    })?;
                    Ok((welcome, Admitted::Output(host, stream)))
                }
            }
        });
        let started = match admitted {
            Ok(Admitted::Messages(host, start)) => {
                let (admission, receiver) = (Arc::clone(&self.admission), Arc::clone(&host));
                start.run(self.liveness, move |message| match message {
                    Ok(message) => receiver.receive(message),
                    Err(end) => {
                        receiver.lose(&end.to_string());
                        admission.tell();
                    }
                })
            }
            Ok(Admitted::Output(host, stream)) => connection
                .try_clone()
                .map_err(|error| Error::system(error.to_string()))
                .and_then(|copy| {
                    let own = copy.try_clone();
                    let own = own.map_err(|error| Error::system(error.to_string()))?;
                    stream_line::receive(own, Arc::clone(&host), stream)?;
                    host.add_output(stream, copy);
                    Ok(())
                }),
            Err(refusal) => {
                self.admission.refused(addresses[0], &refusal);
                match added {
                    Some(_) => Err(Error::system(refusal.text())),
                    None => Ok(()),
                }
            }
        };
        if let (Err(error), Some(host)) = (started, added) {
            host.lose(&chain(&error));
            self.admission.tell();
        }
    }
}

/// Listens at the endpoint's address if it is one of this host, else at all addresses: a name may stand for another
/// address elsewhere, and an address for something in front of this host.
fn bind(endpoint: &Endpoint) -> Result<TcpListener> {
    let port = endpoint.port;
    let listening = match endpoint.address() {
        Some(address) => listen_at(&[address], port),
        None => listen_everywhere(port),
    };
    listening.map_err(|error| {
        let text = match error.kind() {
            ErrorKind::AddrInUse => format!(
                "port {port} is taken; end what listens there, or give another one in --rdzv-endpoint on all hosts"
            ),
            _ => format!("--rdzv-endpoint {endpoint}: this host cannot listen there"),
        };
        Error::system(text).with_source(error)
    })
}
