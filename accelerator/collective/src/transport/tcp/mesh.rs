//! Connects every rank to every other. One thread per rank drives all of its handshakes at the same time.

use std::{
    io::{self, Read, Write},
    net::{TcpListener, TcpStream},
    ops::ControlFlow,
    sync::Arc,
    time::{Duration, Instant},
};

use accelerator_fault::{Effect, Point, fail_point};
use rustix::event::{PollFd, PollFlags, poll};

use crate::{
    error::{Error, Kind, Result, list_ranks},
    rendezvous::{Key, Meeting, PendingHandshake, PendingHandshakes, random},
    socket::{Waker, begin_connect, finish_connect, timespec},
    wire::{
        ReadError,
        message::{MAX_SHORT_BYTES, Message, Nonce, Registration},
    },
};

/// Connects to all lower ranks, polls_listener all higher ones, and returns the connections in rank order. Both sides prove
/// that they belong to the job.
///
/// The store monitors the ranks meanwhile. If it reports a lost rank, this fails on every rank.
pub(super) fn connect(
    rank: usize,
    meeting: &Meeting,
    deadline: Instant,
) -> Result<Vec<Option<TcpStream>>> {
    if let Some(Effect::DropConnection) = fail_point(rank, Point::Connect) {
        if let Some(store) = &meeting.store {
            store.inject_disconnect();
        }
        return Err(Error::about(
            Kind::Rendezvous,
            vec![rank],
            format!("the connections of rank {rank} were cut by an injected fault"),
        ));
    }
    let outcome = connect_all(rank, meeting, deadline);
    if let Some(store) = &meeting.store {
        match &outcome {
            Ok(_) => store.connected(),
            Err(error) => store.report_failure(error),
        }
    }
    outcome
}

fn connect_all(
    rank: usize,
    meeting: &Meeting,
    deadline: Instant,
) -> Result<Vec<Option<TcpStream>>> {
    let setup_error = |error| Error::io("this rank cannot connect to the others", error);
    let waker = Arc::new(Waker::new().map_err(setup_error)?);
    meeting
        .listener
        .set_nonblocking(true)
        .map_err(setup_error)?;
    if let Some(store) = &meeting.store {
        let waker = Arc::clone(&waker);
        store.on_event(move || waker.wake());
    }
    let mut connector = MeshConnector::new(rank, meeting, deadline);
    loop {
        if connector.missing == 0 {
            return Ok(connector.streams);
        }
        let store = meeting.store.as_ref();
        if let Some(error) = store.and_then(|store| store.connect_failure()) {
            return Err(error);
        }
        // The connecting side knows why it failed and reports that at the deadline, so wait a little longer.
        if Instant::now() > deadline + RESULT_GRACE {
            return Err(connector.deadline_error());
        }
        connector.poll_once(&waker)?;
    }
}

/// The connections of a rank that are being established.
struct MeshConnector<'a> {
    rank: usize,
    peers: &'a [Registration],
    key: &'a Key,
    listener: &'a TcpListener,
    deadline: Instant,
    /// The established connections, in rank order.
    streams: Vec<Option<TcpStream>>,
    /// The number of peers that are not connected yet.
    missing: usize,
    outbound: Vec<OutboundConnect>,
    /// The number of lower ranks to which no connection has been started.
    not_started: usize,
    inbound: Vec<InboundHandshake>,
    pending: Arc<PendingHandshakes>,
    /// The time before which no connection is accepted, set after `accept` has failed.
    accept_after: Instant,
}

impl<'a> MeshConnector<'a> {
    fn new(rank: usize, meeting: &'a Meeting, deadline: Instant) -> Self {
        let world_size = meeting.ranks.len();
        Self {
            rank,
            peers: &meeting.ranks,
            key: &meeting.key,
            listener: &meeting.listener,
            deadline,
            streams: (0..world_size).map(|_| None).collect(),
            missing: world_size - 1,
            outbound: Vec::new(),
            not_started: rank,
            inbound: Vec::new(),
            pending: PendingHandshakes::logged(world_size + 64),
            accept_after: Instant::now(),
        }
    }

    /// Waits for a ready socket, an event of the store or a timeout, then advances every handshake that can.
    fn poll_once(&mut self, waker: &Waker) -> Result<()> {
        // Each rank starts with the rank just below it. If all started with rank 0, its backlog would overflow.
        while self.not_started > 0 && self.outbound.len() < MAX_OUTBOUND {
            self.not_started -= 1;
            self.outbound.push(OutboundConnect::new(self.not_started));
        }
        let now = Instant::now();
        let polls_listener = now >= self.accept_after;
        let mut until = self.deadline + RESULT_GRACE;
        let mut polled = vec![PollFd::new(waker, PollFlags::IN)];
        match polls_listener {
            true => polled.push(PollFd::new(self.listener, PollFlags::IN)),
            false => until = until.min(self.accept_after),
        }
        for handshake in &self.inbound {
            until = until.min(handshake.expires_at);
            polled.push(PollFd::new(&*handshake.connection.stream, PollFlags::IN));
        }
        for connect in &self.outbound {
            until = until.min(connect.due_at(self.deadline));
            if let OutboundState::Handshaking(handshake) = &connect.state {
                polled.push(PollFd::new(
                    &*handshake.connection.stream,
                    handshake.poll_flags(),
                ));
            }
        }
        let pause = until.saturating_duration_since(now);
        // If a signal interrupts the poll, no socket counts as ready.
        let _ = poll(&mut polled, Some(&timespec(pause)));
        let ready: Vec<bool> = polled.iter().map(|fd| !fd.revents().is_empty()).collect();
        let mut ready = ready.into_iter();
        let mut next_ready = || ready.next().unwrap_or(false);
        if next_ready() {
            waker.drain();
        }
        let listener_is_ready = polls_listener && next_ready();
        self.advance_inbound(&mut next_ready);
        let outcome = self.advance_outbound(&mut next_ready);
        if listener_is_ready {
            self.accept();
        }
        outcome
    }

    fn accept(&mut self) {
        for _ in 0..MAX_ACCEPTS_PER_POLL {
            let handshake = match self.listener.accept() {
                Ok((stream, _)) => InboundHandshake::new(stream, &self.pending),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                // For instance, too many open files: retry after a pause.
                Err(_) => {
                    self.accept_after = Instant::now() + ACCEPT_PAUSE;
                    return;
                }
            };
            match handshake {
                Ok(handshake) => self.inbound.push(handshake),
                Err(error) => {
                    tracing::debug!(%error, "dropped an accepted connection that cannot be set up")
                }
            }
        }
    }

    fn advance_inbound(&mut self, next_ready: &mut impl FnMut() -> bool) {
        for handshake in std::mem::take(&mut self.inbound) {
            let progress = match next_ready() {
                true => handshake.advance(self),
                false if Instant::now() < handshake.expires_at => {
                    Ok(ControlFlow::Continue(handshake))
                }
                false => Err(timed_out()),
            };
            match progress {
                Ok(ControlFlow::Continue(handshake)) => self.inbound.push(handshake),
                Ok(ControlFlow::Break((peer, stream))) => self.add_stream(peer, stream),
                Err(error) => {
                    tracing::debug!(%error, "dropped a connection that did not complete the handshake")
                }
            }
        }
    }

    /// Advances the outbound connections. Fails if a peer cannot be reached.
    fn advance_outbound(&mut self, next_ready: &mut impl FnMut() -> bool) -> Result<()> {
        for mut connect in std::mem::take(&mut self.outbound) {
            let until = connect.due_at(self.deadline);
            let state = std::mem::replace(&mut connect.state, OutboundState::Backoff(until));
            let progress = match state {
                OutboundState::Handshaking(handshake) if next_ready() => {
                    handshake.advance(self, connect.peer)
                }
                OutboundState::Handshaking(handshake) if Instant::now() < until => {
                    Ok(ControlFlow::Continue(handshake))
                }
                OutboundState::Handshaking(_) => Err(timed_out()),
                OutboundState::Backoff(_) if Instant::now() < until => {
                    self.outbound.push(connect);
                    continue;
                }
                OutboundState::Backoff(_) => {
                    OutboundHandshake::new(&self.peers[connect.peer]).map(ControlFlow::Continue)
                }
            };
            match progress {
                Ok(ControlFlow::Continue(handshake)) => {
                    connect.state = OutboundState::Handshaking(handshake)
                }
                Ok(ControlFlow::Break(stream)) => {
                    self.add_stream(connect.peer, stream);
                    continue;
                }
                Err(failure) => match connect.next_attempt(&failure, self.deadline) {
                    Some(at) => connect.state = OutboundState::Backoff(at),
                    None => return Err(self.connect_error(connect.peer, &failure)),
                },
            }
            self.outbound.push(connect);
        }
        Ok(())
    }

    /// Adds an established connection, or replaces one that the peer has abandoned.
    fn add_stream(&mut self, peer: usize, stream: TcpStream) {
        if self.streams[peer].replace(stream).is_none() {
            self.missing -= 1;
        }
    }

    fn connect_error(&self, peer: usize, failure: &ReadError) -> Error {
        let peer = &self.peers[peer];
        Error::about(
            Kind::Rendezvous,
            vec![peer.rank],
            format!(
                "rank {} cannot connect to rank {} (process {} on {}) at {}: {failure}",
                self.rank, peer.rank, peer.pid, peer.host, peer.address
            ),
        )
    }

    fn deadline_error(&self) -> Error {
        let peers = self.streams.iter().enumerate();
        let missing = peers.filter(|(peer, stream)| *peer != self.rank && stream.is_none());
        let missing: Vec<_> = missing.map(|(peer, _)| peer).collect();
        let message = format!(
            "rank {} met {} at the store, but got no connection in time; did the process end, or does a firewall block \
             connections between the hosts?",
            self.rank,
            list_ranks(&missing)
        );
        Error::about(Kind::Rendezvous, missing, message)
    }
}

/// A connection to a lower rank, with the state of its retries.
struct OutboundConnect {
    peer: usize,
    state: OutboundState,
    /// The time at which refused connections become a final failure, set at the first refusal.
    refused_until: Option<Instant>,
    /// The delay before the next attempt.
    delay: Duration,
}

enum OutboundState {
    /// Waits until this time before the next attempt.
    Backoff(Instant),
    Handshaking(OutboundHandshake),
}

impl OutboundConnect {
    fn new(peer: usize) -> Self {
        Self {
            peer,
            state: OutboundState::Backoff(Instant::now()),
            refused_until: None,
            delay: MIN_RETRY_DELAY,
        }
    }

    /// Returns the time at which this must be advanced even if its socket is not ready.
    fn due_at(&self, deadline: Instant) -> Instant {
        match &self.state {
            OutboundState::Backoff(at) => *at,
            OutboundState::Handshaking(handshake) => match handshake.stage {
                OutboundStage::Connecting { expires_at } => expires_at.min(deadline),
                OutboundStage::AwaitAnswer { .. } | OutboundStage::AwaitAccepted => deadline,
            },
        }
    }

    /// Returns the time of the next attempt, or `None` if the failure is final. A closed connection is retried: the
    /// peer may have evicted it to make room for others.
    fn next_attempt(&mut self, failure: &ReadError, deadline: Instant) -> Option<Instant> {
        let now = Instant::now();
        let until = match failure {
            ReadError::Message(_) | ReadError::Frame(_) => now,
            // The peer listened before it registered, so a refusal means that it has exited. The store usually reports
            // why.
            ReadError::Io(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                *self.refused_until.get_or_insert(now + REFUSED_GRACE)
            }
            ReadError::Io(_) | ReadError::Closed | ReadError::Torn => deadline,
        };
        let at = now + self.delay;
        self.delay = (2 * self.delay).min(MAX_RETRY_DELAY);
        (at <= until.min(deadline)).then_some(at)
    }
}

/// The connecting side of a handshake.
struct OutboundHandshake {
    connection: HandshakeStream,
    stage: OutboundStage,
}

enum OutboundStage {
    Connecting { expires_at: Instant },
    AwaitAnswer { nonce: Nonce },
    AwaitAccepted,
}

impl OutboundHandshake {
    fn new(peer: &Registration) -> Result<Self, ReadError> {
        let stream = begin_connect(peer.address).map_err(ReadError::Io)?;
        Ok(Self {
            connection: HandshakeStream::new(stream).map_err(ReadError::Io)?,
            stage: OutboundStage::Connecting {
                expires_at: Instant::now() + CONNECT_TIMEOUT,
            },
        })
    }

    fn poll_flags(&self) -> PollFlags {
        match self.stage {
            OutboundStage::Connecting { .. } => PollFlags::OUT,
            OutboundStage::AwaitAnswer { .. } | OutboundStage::AwaitAccepted => PollFlags::IN,
        }
    }

    fn advance(
        mut self,
        connector: &MeshConnector<'_>,
        peer: usize,
    ) -> Result<ControlFlow<TcpStream, Self>, ReadError> {
        self.stage = match self.stage {
            OutboundStage::Connecting { expires_at } => {
                match finish_connect(&self.connection.stream).map_err(ReadError::Io)? {
                    true => {
                        let nonce = nonce()?;
                        self.connection.send(&Message::Greet {
                            from: connector.rank as u32,
                            to: peer as u32,
                            nonce,
                        })?;
                        OutboundStage::AwaitAnswer { nonce }
                    }
                    false if Instant::now() >= expires_at => return Err(timed_out()),
                    false => OutboundStage::Connecting { expires_at },
                }
            }
            OutboundStage::AwaitAnswer { nonce } => match self.connection.try_receive()? {
                Some(Message::Answer { nonce: own, proof }) => {
                    let signed = transcript(connector.rank, peer, &nonce, &own);
                    if !connector.key.accepts("answer", &[&signed], &proof) {
                        return Err(ReadError::Message("the proof of another job".to_owned()));
                    }
                    self.connection.send(&Message::Confirm {
                        proof: connector.key.prove("confirm", &[&signed]),
                    })?;
                    OutboundStage::AwaitAccepted
                }
                Some(_) => {
                    return Err(ReadError::Message("a message other than Answer".to_owned()));
                }
                None => OutboundStage::AwaitAnswer { nonce },
            },
            OutboundStage::AwaitAccepted => match self.connection.try_receive()? {
                Some(Message::Accepted) => {
                    let stream = self.connection.into_stream().map_err(ReadError::Io)?;
                    return Ok(ControlFlow::Break(stream));
                }
                Some(_) => {
                    return Err(ReadError::Message(
                        "a message other than Accepted".to_owned(),
                    ));
                }
                None => OutboundStage::AwaitAccepted,
            },
        };
        Ok(ControlFlow::Continue(self))
    }
}

/// The accepting side of a handshake.
struct InboundHandshake {
    connection: HandshakeStream,
    pending: PendingHandshake,
    expires_at: Instant,
    stage: InboundStage,
}

enum InboundStage {
    AwaitGreet,
    AwaitConfirm { peer: usize, signed: Vec<u8> },
}

impl InboundHandshake {
    fn new(stream: TcpStream, pending: &Arc<PendingHandshakes>) -> io::Result<Self> {
        let connection = HandshakeStream::new(stream)?;
        Ok(Self {
            pending: pending.enter(&connection.stream),
            connection,
            expires_at: Instant::now() + PendingHandshakes::TIMEOUT,
            stage: InboundStage::AwaitGreet,
        })
    }

    fn advance(
        mut self,
        connector: &MeshConnector<'_>,
    ) -> Result<ControlFlow<(usize, TcpStream), Self>, ReadError> {
        let Some(message) = self.connection.try_receive()? else {
            return Ok(ControlFlow::Continue(self));
        };
        match self.stage {
            InboundStage::AwaitGreet => {
                let Message::Greet {
                    from,
                    to,
                    nonce: theirs,
                } = message
                else {
                    return Err(ReadError::Message("a message other than Greet".to_owned()));
                };
                let (peer, world_size) = (from as usize, connector.peers.len());
                if to as usize != connector.rank || peer <= connector.rank || peer >= world_size {
                    return Err(ReadError::Message(format!(
                        "a greeting from rank {from} to rank {to}, but this is rank {} of {world_size}",
                        connector.rank
                    )));
                }
                let own = nonce()?;
                let signed = transcript(peer, connector.rank, &theirs, &own);
                let proof = connector.key.prove("answer", &[&signed]);
                self.connection
                    .send(&Message::Answer { nonce: own, proof })?;
                self.stage = InboundStage::AwaitConfirm { peer, signed };
                Ok(ControlFlow::Continue(self))
            }
            InboundStage::AwaitConfirm { peer, signed } => {
                let Message::Confirm { proof } = message else {
                    return Err(ReadError::Message(
                        "a message other than Confirm".to_owned(),
                    ));
                };
                if !connector.key.accepts("confirm", &[&signed], &proof) {
                    return Err(ReadError::Message("the proof of another job".to_owned()));
                }
                // This handshake was evicted; the peer will retry.
                if !self.pending.leave() {
                    return Err(ReadError::Closed);
                }
                self.connection.send(&Message::Accepted)?;
                let stream = self.connection.into_stream().map_err(ReadError::Io)?;
                Ok(ControlFlow::Break((peer, stream)))
            }
        }
    }
}

/// A non-blocking connection, with the received part of the next message.
struct HandshakeStream {
    stream: Arc<TcpStream>,
    received: Vec<u8>,
}

impl HandshakeStream {
    fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        let _ = stream.set_nodelay(true);
        Ok(Self {
            stream: Arc::new(stream),
            received: Vec::new(),
        })
    }

    /// Sends a handshake message. The send buffer of a new connection always has room for it.
    fn send(&self, message: &Message) -> Result<(), ReadError> {
        let sent = (&*self.stream).write_all(&message.encode());
        sent.map_err(ReadError::Io)
    }

    /// Returns the next message, or `None` if it has not fully arrived. Never reads beyond it.
    fn try_receive(&mut self) -> Result<Option<Message>, ReadError> {
        loop {
            let filled = self.received.len();
            let len = Message::expected_len(&self.received, MAX_SHORT_BYTES)?;
            if filled == len {
                let bytes = std::mem::take(&mut self.received);
                return Message::read(&mut &bytes[..], MAX_SHORT_BYTES).map(Some);
            }
            self.received.resize(len, 0);
            let read = (&*self.stream).read(&mut self.received[filled..]);
            let count = read.as_ref().map_or(0, |count| *count);
            self.received.truncate(filled + count);
            match read {
                Ok(0) if filled == 0 => return Err(ReadError::Closed),
                Ok(0) => return Err(ReadError::Torn),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(ReadError::Io(error)),
            }
        }
    }

    /// Returns the stream, set back to blocking mode.
    fn into_stream(self) -> io::Result<TcpStream> {
        self.stream.set_nonblocking(false)?;
        match Arc::try_unwrap(self.stream) {
            Ok(stream) => Ok(stream),
            Err(shared) => shared.try_clone(),
        }
    }
}

fn nonce() -> Result<Nonce, ReadError> {
    random().map_err(|error| ReadError::Io(io::Error::other(error)))
}

fn timed_out() -> ReadError {
    ReadError::Io(io::ErrorKind::TimedOut.into())
}

/// The bytes that both sides of a handshake authenticate: the two ranks and both nonces.
fn transcript(from: usize, to: usize, nonce: &Nonce, own: &Nonce) -> Vec<u8> {
    let mut signed = Vec::with_capacity(80);
    signed.extend_from_slice(&(from as u64).to_le_bytes());
    signed.extend_from_slice(&(to as u64).to_le_bytes());
    signed.extend_from_slice(nonce);
    signed.extend_from_slice(own);
    signed
}

/// The maximum number of outbound connections in progress. A listener's backlog holds more.
const MAX_OUTBOUND: usize = 32;

/// The maximum number of connections to accept before handshakes are advanced again: few, so that strangers cannot evict
/// a handshake in the two turns that it takes.
const MAX_ACCEPTS_PER_POLL: usize = 16;

/// The time limit for establishing a TCP connection, after which it is retried.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// The time for which refused connections are retried, so that the store can report why the peer exited.
const REFUSED_GRACE: Duration = Duration::from_secs(1);

/// The shortest and longest delay between attempts.
const MIN_RETRY_DELAY: Duration = Duration::from_millis(10);
const MAX_RETRY_DELAY: Duration = Duration::from_millis(200);

/// The pause after a failed `accept`.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);

/// The extra time after the deadline for other ranks to report why they could not connect.
const RESULT_GRACE: Duration = Duration::from_millis(250);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_sent_byte_by_byte_is_read_to_its_end_and_no_further() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let mut peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut connection = HandshakeStream::new(listener.accept().unwrap().0).unwrap();
        let await_bytes = |connection: &HandshakeStream| {
            let mut fds = [PollFd::new(&*connection.stream, PollFlags::IN)];
            assert_eq!(poll(&mut fds, None), Ok(1));
        };
        let message = Message::Accepted.encode();
        let (last, first) = message.split_last().unwrap();
        for byte in first {
            peer.write_all(&[*byte]).unwrap();
            await_bytes(&connection);
            assert!(connection.try_receive().unwrap().is_none());
        }
        peer.write_all(&[*last, 7]).unwrap();
        await_bytes(&connection);
        assert!(matches!(
            connection.try_receive(),
            Ok(Some(Message::Accepted))
        ));
        let mut stream = connection.into_stream().unwrap();
        let mut next = [0];
        stream.read_exact(&mut next).unwrap();
        assert_eq!(next, [7]);
    }

    #[test]
    fn a_connection_closed_within_a_message_is_torn() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let mut peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut connection = HandshakeStream::new(listener.accept().unwrap().0).unwrap();
        peer.write_all(&Message::Accepted.encode()[..5]).unwrap();
        drop(peer);
        let end = Instant::now() + Duration::from_secs(30);
        let failure = loop {
            match connection.try_receive() {
                Ok(message) => assert!(message.is_none() && Instant::now() < end),
                Err(failure) => break failure,
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        assert!(matches!(failure, ReadError::Torn), "{failure}");
    }
}
