//! The way to the head: a host keeps asking until it is admitted, or its time is over.

use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use accelerator_collective::internal::Token;

use crate::agent::handshake::{Refusal, ask};
use crate::agent::line::{ConnectionKind, HostInfo, JoinReply, JoinRequest, spawn};
use crate::error::{BEFORE_START, Error, Result, ended_by};
use crate::event::{Channel, Event};
use crate::output::Stream;
use crate::settings::hosts::Endpoint;
use crate::settings::nodes::HostPlace;
use crate::supervisor::signals::Relay;
use crate::text::note;

/// The time limit of one attempt to connect: a filtered port does not answer.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The longest pause between two attempts.
const RETRY: Duration = Duration::from_millis(300);

/// The pause after the first attempt: hosts that an engine starts come within milliseconds of one another.
const FIRST_RETRY: Duration = Duration::from_millis(10);

/// The time after which a host first says that it waits for the head; it doubles each time.
const TELL_AFTER: Duration = Duration::from_secs(10);

/// The connections of a host that was admitted.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) messages: TcpStream,
    /// The connections for the ranks' output, by stream.
    pub(super) outputs: [TcpStream; 2],
    /// The name of the head's host.
    pub(super) name: String,
    /// Its address, and the port at which it listens.
    pub(super) address: SocketAddr,
    /// Silence for which a host is lost.
    pub(super) liveness: Duration,
}

impl Connection {
    /// Asks the head to admit this host, until the join timeout has passed.
    ///
    /// # Errors
    /// When the head was not reached, or does not admit this host; when a signal arrives on `channel`.
    pub(super) fn open(
        place: &HostPlace,
        token: Option<Token>,
        info: HostInfo,
        relay: &Relay,
        channel: &Channel,
    ) -> Result<Self> {
        let joiner = Joiner {
            place: place.clone(),
            token,
            info,
            until: Instant::now() + place.join_timeout,
        };
        let (sender, opened) = mpsc::channel();
        let relay = relay.clone();
        // It ends with this process, where a signal ends the wait.
        spawn("connect", move || {
            let _ = sender.send(joiner.open());
            relay.send(Event::Message);
        })?;
        loop {
            if let Ok(opened) = opened.try_recv() {
                return opened;
            }
            if let Event::Signal(signal) = channel.next(None) {
                return Err(ended_by(signal, BEFORE_START));
            }
        }
    }
}

struct Joiner {
    place: HostPlace,
    token: Option<Token>,
    info: HostInfo,
    until: Instant,
}

impl Joiner {
    fn open(&self) -> Result<Connection> {
        let endpoint = &self.place.endpoint;
        let began = Instant::now();
        let mut tell_after = TELL_AFTER;
        loop {
            let failure = match self.ask() {
                Ok(connection) => return Ok(connection),
                Err(Refusal::Permanent(text) | Refusal::Conflict(text)) => {
                    return Err(Error::usage(format!("host 0 at {endpoint}: {text}")));
                }
                Err(Refusal::Retry(text)) => text,
            };
            if Instant::now() + RETRY > self.until {
                return Err(Error::system(format!(
                    "host 0 was not reached at {endpoint} within {} s: {failure}; is accel-launch running there with \
                     --node-rank 0, and does the network let this host through to that port?",
                    self.place.join_timeout.as_secs_f64()
                )));
            }
            if began.elapsed() >= tell_after {
                note(&format!(
                    "waiting for host 0 at {endpoint}, for {} s now: {failure}",
                    began.elapsed().as_secs()
                ));
                tell_after *= 2;
            }
            thread::sleep((began.elapsed() / 2).clamp(FIRST_RETRY, RETRY));
        }
    }

    /// One attempt, with every address that the endpoint has now.
    fn ask(&self) -> std::result::Result<Connection, Refusal> {
        let Endpoint { host, port } = &self.place.endpoint;
        let now = |error: &std::io::Error| Refusal::Retry(error.to_string());
        let addresses = (host.as_str(), *port).to_socket_addrs();
        let addresses = addresses.map_err(|error| now(&error))?;
        let mut failure = Refusal::Retry(format!("the name {host} has no address"));
        for address in addresses {
            match self.connect(address) {
                Ok(messages) => return self.enter(messages, address),
                Err(refusal) => failure = refusal,
            }
        }
        Err(failure)
    }

    fn enter(
        &self,
        messages: TcpStream,
        address: SocketAddr,
    ) -> std::result::Result<Connection, Refusal> {
        let info = self.info.clone();
        let welcome = self.present(&messages, ConnectionKind::Messages(info))?;
        let session = welcome.session;
        let output = |stream| -> std::result::Result<_, Refusal> {
            let connection = self.connect(address)?;
            self.present(&connection, ConnectionKind::Output { stream, session })?;
            Ok(connection)
        };
        Ok(Connection {
            outputs: [output(Stream::Out)?, output(Stream::Err)?],
            messages,
            name: welcome.name,
            address,
            liveness: welcome.liveness,
        })
    }

    fn connect(&self, address: SocketAddr) -> std::result::Result<TcpStream, Refusal> {
        let left = self.until.saturating_duration_since(Instant::now());
        let left = left.clamp(Duration::from_millis(10), CONNECT_TIMEOUT);
        TcpStream::connect_timeout(&address, left)
            .map_err(|error| Refusal::Retry(error.to_string()))
    }

    fn present(
        &self,
        connection: &TcpStream,
        purpose: ConnectionKind,
    ) -> std::result::Result<JoinReply, Refusal> {
        let HostPlace { hosts, host, .. } = self.place;
        let entry = JoinRequest {
            hosts,
            host,
            purpose,
        };
        let until = self.until.max(Instant::now() + CONNECT_TIMEOUT);
        ask(connection, self.token.as_ref(), &entry, until)
    }
}
