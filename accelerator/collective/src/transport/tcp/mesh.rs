//! Connecting each rank with each.

use std::{
    collections::VecDeque,
    io,
    net::{TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use accelerator_fault::{Effect, Point, fail_point};
use accelerator_host::sync::{Condvar, Mutex};

use crate::{
    error::{Error, Kind, Result, list_ranks},
    rendezvous::{Key, Meeting, PendingHandshake, PendingHandshakes, random, reachable},
    wire::{
        ReadError,
        message::{MAX_SHORT_BYTES, Message, Nonce, Registration},
    },
};

/// A connection to every other rank, in rank order: made to the lower ones, taken from the
/// higher ones. Both sides prove that they belong to the job.
///
/// While that lasts the store watches over the ranks; what it says about one that is lost ends
/// the wait for everybody.
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
    let outcome = assemble(rank, meeting, deadline);
    if let Some(store) = &meeting.store {
        match &outcome {
            Ok(_) => store.connected(),
            Err(error) => store.report_failure(error),
        }
    }
    outcome
}

fn assemble(rank: usize, meeting: &Meeting, deadline: Instant) -> Result<Vec<Option<TcpStream>>> {
    let world_size = meeting.ranks.len();
    let mut streams: Vec<Option<TcpStream>> = (0..world_size).map(|_| None).collect();
    let (sender, events) = mpsc::channel();
    let _threads = MeshThreads::start(rank, meeting, deadline, &sender)?;
    if let Some(store) = &meeting.store {
        store.on_event(move || {
            // Nobody waits for it once the ranks are connected.
            let _ = sender.send(MeshEvent::StoreEvent);
        });
    }
    let missing = |streams: &[Option<TcpStream>]| {
        let missing = streams.iter().enumerate();
        let missing = missing.filter(|(peer, stream)| *peer != rank && stream.is_none());
        missing.map(|(peer, _)| peer).collect::<Vec<_>>()
    };
    while !missing(&streams).is_empty() {
        if let Some(error) = meeting
            .store
            .as_ref()
            .and_then(|store| store.connect_failure())
        {
            return Err(error);
        }
        // The caller knows best why it got no connection; it says so at the deadline.
        let left = (deadline + RESULT_GRACE).saturating_duration_since(Instant::now());
        match events.recv_timeout(left) {
            Ok(MeshEvent::Failed(error)) => return Err(error),
            Ok(MeshEvent::StoreEvent) => {}
            // A second connection replaces one that the other side has given up.
            Ok(MeshEvent::Peer(peer, stream)) => streams[peer] = Some(stream),
            Err(_) => {
                let missing = missing(&streams);
                let message = format!(
                    "rank {rank} met {} at the store, but got no connection in time; did the \
                     process end, or does a firewall keep the hosts apart?",
                    list_ranks(&missing)
                );
                return Err(Error::about(Kind::Rendezvous, missing, message));
            }
        }
    }
    Ok(streams)
}

enum MeshEvent {
    Failed(Error),
    /// The store may have sent something.
    StoreEvent,
    Peer(usize, TcpStream),
}

/// A thread that accepts the higher ranks, and one that calls the lower ones; dropped, they give up.
struct MeshThreads {
    listener: TcpListener,
    pending: Arc<PendingHandshakes>,
    workers: Arc<HandshakeWorkers>,
    closed: Arc<AtomicBool>,
}

impl MeshThreads {
    fn start(
        rank: usize,
        meeting: &Meeting,
        deadline: Instant,
        sender: &mpsc::Sender<MeshEvent>,
    ) -> Result<Self> {
        let world_size = meeting.ranks.len();
        let deaf = |error| Error::io("this rank cannot listen for the others", error);
        let threads = Self {
            listener: meeting.listener.try_clone().map_err(deaf)?,
            pending: PendingHandshakes::logged(world_size + 64),
            workers: Arc::default(),
            closed: Arc::default(),
        };
        let spawn = |name: &str, body: Box<dyn FnOnce() + Send>| {
            thread::Builder::new().name(name.to_owned()).spawn(body)
        };
        if rank + 1 < world_size {
            let inbound = InboundHandshake {
                key: meeting.key.clone(),
                rank,
                world_size,
                sender: sender.clone(),
            };
            let listener = meeting.listener.try_clone().map_err(deaf)?;
            let (pending, closed) = (Arc::clone(&threads.pending), Arc::clone(&threads.closed));
            let workers = Arc::clone(&threads.workers);
            let body = move || inbound.accept(&listener, &pending, &workers, &closed);
            spawn("mesh", Box::new(body)).map_err(deaf)?;
        }
        if rank > 0 {
            let outbound = OutboundConnect {
                key: meeting.key.clone(),
                rank,
                deadline,
                closed: Arc::clone(&threads.closed),
            };
            // Each begins with the rank before it: one that all others call at the same time would refuse most of them.
            let lower: Vec<_> = meeting.ranks[..rank].iter().rev().cloned().collect();
            let sender = sender.clone();
            let body = move || outbound.call(&lower, &sender);
            spawn("mesh-caller", Box::new(body))
                .map_err(|error| Error::io("this rank cannot connect to the others", error))?;
        }
        Ok(threads)
    }
}

impl Drop for MeshThreads {
    fn drop(&mut self) {
        self.closed.store(true, Ordering::Release);
        self.pending.clear();
        self.workers.end();
        // A last connection wakes the thread that accepts. Should it not get through, the thread
        // ends with the next one.
        if let Ok(address) = self.listener.local_addr() {
            drop(TcpStream::connect_timeout(
                &reachable(address),
                CANCEL_CHECK_INTERVAL,
            ));
        }
    }
}

struct OutboundConnect {
    key: Key,
    rank: usize,
    deadline: Instant,
    closed: Arc<AtomicBool>,
}

impl OutboundConnect {
    /// Connects to these peers, one after the other, until one cannot be reached.
    fn call(&self, peers: &[Registration], sender: &mpsc::Sender<MeshEvent>) {
        for peer in peers {
            let event = match self.reach(peer) {
                Some(Ok(stream)) => MeshEvent::Peer(peer.rank, stream),
                Some(Err(error)) => MeshEvent::Failed(error),
                None => return,
            };
            let failed = matches!(event, MeshEvent::Failed(_));
            // The mesh may have been given up.
            if sender.send(event).is_err() || failed {
                return;
            }
        }
    }

    /// Connects to a peer, again where another connection evicted its handshake; `None` where
    /// nobody waits for it any more.
    fn reach(&self, peer: &Registration) -> Option<Result<TcpStream>> {
        // The peer has listened since before it registered: who refuses is not there any more,
        // of which the store usually knows more.
        let mut refused: Option<Instant> = None;
        let mut pause = MIN_RETRY_DELAY;
        loop {
            let failure = match self.try_once(peer) {
                Ok(stream) => return Some(Ok(stream)),
                Err(failure) => failure,
            };
            if self.is_closed() {
                return None;
            }
            let now = Instant::now();
            let until = match &failure {
                ReadError::Message(_) | ReadError::Frame(_) => now,
                ReadError::Io(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                    *refused.get_or_insert(now + REFUSED)
                }
                ReadError::Io(_) | ReadError::Closed | ReadError::Torn => self.deadline,
            };
            if now + pause > until.min(self.deadline) {
                return Some(Err(Error::about(
                    Kind::Rendezvous,
                    vec![peer.rank],
                    format!(
                        "rank {} cannot connect to rank {} (process {} on {}) at {}: {failure}",
                        self.rank, peer.rank, peer.pid, peer.host, peer.address
                    ),
                )));
            }
            thread::sleep(pause);
            pause = (2 * pause).min(MAX_RETRY_DELAY);
        }
    }

    /// The connecting side of the handshake.
    fn try_once(&self, peer: &Registration) -> Result<TcpStream, ReadError> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        let left = left.clamp(Duration::from_millis(1), Duration::from_secs(1));
        let stream = TcpStream::connect_timeout(&peer.address, left).map_err(ReadError::Io)?;
        let _ = stream.set_nodelay(true);
        let nonce = random().map_err(|error| ReadError::Io(io::Error::other(error)))?;
        Message::Greet {
            from: self.rank as u32,
            to: peer.rank as u32,
            nonce,
        }
        .send(&stream)?;
        let Message::Answer { nonce: own, proof } = self.receive(&stream)? else {
            return Err(ReadError::Message("no answer to the greeting".to_owned()));
        };
        let signed = transcript(self.rank, peer.rank, &nonce, &own);
        if !self.key.accepts("answer", &[&signed], &proof) {
            return Err(ReadError::Message("the proof of another job".to_owned()));
        }
        Message::Confirm {
            proof: self.key.prove("confirm", &[&signed]),
        }
        .send(&stream)?;
        match self.receive(&stream)? {
            Message::Accepted => Ok(stream),
            _ => Err(ReadError::Message("no word of welcome".to_owned())),
        }
    }

    /// The next message of the peer, as long as somebody waits for it.
    fn receive(&self, stream: &TcpStream) -> Result<Message, ReadError> {
        while !Message::arrives(stream, Some(CANCEL_CHECK_INTERVAL))? {
            if self.is_closed() || Instant::now() > self.deadline {
                return Err(ReadError::Io(io::ErrorKind::TimedOut.into()));
            }
        }
        Message::receive(
            stream,
            MAX_SHORT_BYTES,
            Instant::now() + PendingHandshakes::TIMEOUT,
        )
    }

    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }
}

/// A connection that has been accepted.
struct InboundConnection {
    stream: Arc<TcpStream>,
    handshake: PendingHandshake,
}

/// The threads for handshakes with connections that were accepted. A silent connection keeps its thread to itself, so a
/// connection for which no thread is free gets a new one; [`PendingHandshakes`] bounds their number. Threads are used
/// again, since the first memory that a thread takes costs more than a handshake.
#[derive(Default)]
struct HandshakeWorkers {
    queue: Mutex<HandshakeQueue>,
    changed: Condvar,
}

#[derive(Default)]
struct HandshakeQueue {
    connections: VecDeque<InboundConnection>,
    /// The threads that wait for a connection.
    idle: usize,
    ended: bool,
}

impl HandshakeWorkers {
    /// Hands a connection to a thread that is free, or to a new one.
    fn handle(self: &Arc<Self>, connection: InboundConnection, inbound: &InboundHandshake) {
        let mut queue = self.queue.lock();
        if queue.ended {
            return;
        }
        queue.connections.push_back(connection);
        let has_thread = queue.connections.len() <= queue.idle;
        drop(queue);
        if has_thread {
            return self.changed.notify_one();
        }
        let (workers, inbound) = (Arc::clone(self), inbound.clone());
        let spawned = thread::Builder::new()
            .name("mesh-handshake".to_owned())
            .stack_size(512 * 1024)
            .spawn(move || workers.work(&inbound));
        if let Err(error) = spawned {
            tracing::warn!(%error, "there is no thread for a connection of another rank");
        }
    }

    fn work(&self, inbound: &InboundHandshake) {
        while let Some(InboundConnection { stream, handshake }) = self.next() {
            if let Err(error) = inbound.receive(stream, handshake) {
                tracing::debug!(%error, "a connection that is no rank was dropped");
            }
        }
    }

    fn next(&self) -> Option<InboundConnection> {
        let mut queue = self.queue.lock();
        queue.idle += 1;
        let waiting = |queue: &mut HandshakeQueue| queue.connections.is_empty() && !queue.ended;
        let mut queue = self.changed.wait_while(queue, waiting);
        queue.idle -= 1;
        queue.connections.pop_front()
    }

    /// Ends the threads, those in a handshake after it.
    fn end(&self) {
        let mut queue = self.queue.lock();
        queue.ended = true;
        queue.connections.clear();
        drop(queue);
        self.changed.notify_all();
    }
}

#[derive(Clone)]
struct InboundHandshake {
    key: Key,
    rank: usize,
    world_size: usize,
    sender: mpsc::Sender<MeshEvent>,
}

impl InboundHandshake {
    fn accept(
        &self,
        listener: &TcpListener,
        pending: &Arc<PendingHandshakes>,
        workers: &Arc<HandshakeWorkers>,
        closed: &AtomicBool,
    ) {
        loop {
            let accepted = listener.accept();
            if closed.load(Ordering::Acquire) {
                return;
            }
            let Ok((stream, _)) = accepted else {
                // Too many open files, for instance: try again, but not at full speed.
                thread::sleep(Duration::from_millis(20));
                continue;
            };
            let stream = Arc::new(stream);
            let handshake = pending.enter(&stream);
            workers.handle(InboundConnection { stream, handshake }, self);
        }
    }

    /// The accepting side of the handshake.
    fn receive(
        &self,
        stream: Arc<TcpStream>,
        handshake: PendingHandshake,
    ) -> Result<(), ReadError> {
        let deadline = Instant::now() + PendingHandshakes::TIMEOUT;
        let _ = stream.set_nodelay(true);
        let Message::Greet { from, to, nonce } =
            Message::receive(&stream, MAX_SHORT_BYTES, deadline)?
        else {
            return Err(ReadError::Message("no greeting".to_owned()));
        };
        let peer = from as usize;
        if to as usize != self.rank || peer <= self.rank || peer >= self.world_size {
            return Err(ReadError::Message(format!(
                "a greeting from rank {from} to rank {to}, here is rank {} of {}",
                self.rank, self.world_size
            )));
        }
        let own = random().map_err(|error| ReadError::Io(io::Error::other(error)))?;
        let signed = transcript(peer, self.rank, &nonce, &own);
        let proof = self.key.prove("answer", &[&signed]);
        Message::Answer { nonce: own, proof }.send(&stream)?;
        let Message::Confirm { proof } = Message::receive(&stream, MAX_SHORT_BYTES, deadline)?
        else {
            return Err(ReadError::Message("no confirmation".to_owned()));
        };
        if !self.key.accepts("confirm", &[&signed], &proof) {
            return Err(ReadError::Message("the proof of another job".to_owned()));
        }
        // Whoever had to make room for somebody else calls again.
        if !handshake.leave() {
            return Err(ReadError::Closed);
        }
        Message::Accepted.send(&stream)?;
        let stream = match Arc::try_unwrap(stream) {
            Ok(stream) => stream,
            Err(shared) => shared.try_clone().map_err(ReadError::Io)?,
        };
        // The mesh may be complete, or given up, already.
        let _ = self.sender.send(MeshEvent::Peer(peer, stream));
        Ok(())
    }
}

/// The bytes that both sides of a handshake prove: who speaks with whom, and the nonces of both.
fn transcript(from: usize, to: usize, nonce: &Nonce, own: &Nonce) -> Vec<u8> {
    let mut signed = Vec::with_capacity(80);
    signed.extend_from_slice(&(from as u64).to_le_bytes());
    signed.extend_from_slice(&(to as u64).to_le_bytes());
    signed.extend_from_slice(nonce);
    signed.extend_from_slice(own);
    signed
}

/// The time within which the store must find a peer dead whose listener is gone.
const REFUSED: Duration = Duration::from_secs(1);

/// The interval at which a caller checks if anybody waits for it.
const CANCEL_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// The delays between attempts: the first one, and the longest.
const MIN_RETRY_DELAY: Duration = Duration::from_millis(10);
const MAX_RETRY_DELAY: Duration = Duration::from_millis(200);

/// The time after the deadline within which the connecting thread may still report.
const RESULT_GRACE: Duration = Duration::from_millis(250);
