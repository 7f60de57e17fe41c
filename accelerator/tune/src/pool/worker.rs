//! A process that carries out trials, and the listener to which its ranks connect.

use std::collections::VecDeque;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread;
use std::time::Instant;

use accelerator_collective::internal::{PendingHandshakes, Token, listen_everywhere};

use crate::checkpoint_folder;
use crate::config::TrialId;
use crate::error::Result;
use crate::host::{TrialProcess, at_port};
use crate::runner::{Location, RunnerEvent, TrialStart};
use crate::trial::protocol::{self, FromWorker, PeerRole, ToWorker, accept_one, greet, receive};

/// A process that carries out trials, one at a time.
#[derive(Debug)]
pub(super) struct Worker {
    pub(super) process: TrialProcess,
    pub(super) slot: usize,
    /// Connections, by rank.
    pub(super) links: Vec<Option<Arc<TcpStream>>>,
    pub(super) location: Option<Location>,
    /// The trial that it carries out, or is about to.
    pub(super) start: Option<TrialStart>,
    pub(super) joint: JointMessages,
    /// The checkpoint that is being saved, and its iteration.
    pub(super) saving: Option<(PathBuf, u64)>,
    pub(super) iteration: u64,
    pub(super) closed: Option<Instant>,
    /// The number of its connections that are open.
    pub(super) open: usize,
    pub(super) has_exited: bool,
    /// The event to send once it has exited: a device is free then.
    pub(super) on_exit: Option<RunnerEvent>,
    /// The reason for its failure, in its own words.
    pub(super) failure: Option<String>,
}

impl Worker {
    pub(super) fn new(process: TrialProcess, slot: usize, ranks: usize) -> Self {
        Self {
            process,
            slot,
            links: (0..ranks).map(|_| None).collect(),
            location: None,
            start: None,
            joint: JointMessages::new(ranks),
            saving: None,
            iteration: 0,
            closed: None,
            open: 0,
            has_exited: false,
            on_exit: None,
            failure: None,
        }
    }

    /// The trial that it carries out, or whose end is told when it has exited.
    pub(super) fn trial(&self) -> Option<TrialId> {
        let start = self.start.as_ref().map(|start| start.trial);
        start.or_else(|| self.on_exit.as_ref().map(RunnerEvent::trial))
    }

    pub(super) fn is_connected(&self) -> bool {
        self.closed.is_none() && self.links.iter().all(Option::is_some)
    }

    pub(super) fn connect(&mut self, connection: Connection) {
        self.open += 1;
        if connection.rank == 0 {
            self.location = Some(connection.location);
        }
        if let Some(link) = self.links.get_mut(connection.rank) {
            *link = Some(connection.stream);
        }
        self.send_start();
    }

    pub(super) fn assign(&mut self, start: TrialStart) {
        self.process.mark_log();
        self.start = Some(start);
        self.send_start();
    }

    fn send_start(&mut self) {
        if !self.is_connected() {
            return;
        }
        if let Some(start) = self.start.clone() {
            self.send(&ToWorker::Start(start));
        }
    }

    pub(super) fn save(
        &mut self,
        folder: PathBuf,
        message: impl FnOnce(PathBuf) -> ToWorker,
    ) -> ToWorker {
        let partial = checkpoint_folder::partial(&folder);
        self.saving = Some((folder, self.iteration));
        message(partial)
    }

    pub(super) fn send(&self, message: &ToWorker) {
        for link in self.links.iter().flatten() {
            // One that does not listen any more is about to be noticed.
            let _ = protocol::send(link, message);
        }
    }
}

/// Messages that all ranks of a worker send, each in the same order, though one may be ahead of another. They are kept
/// by rank.
#[derive(Debug)]
pub(super) struct JointMessages(Vec<VecDeque<FromWorker>>);

impl JointMessages {
    fn new(ranks: usize) -> Self {
        Self(vec![VecDeque::new(); ranks])
    }

    /// Adds a rank's message; returns rank 0's once every rank has sent one. A checkpoint of which one rank skipped its part is
    /// skipped.
    pub(super) fn push(&mut self, rank: usize, message: FromWorker) -> Option<FromWorker> {
        self.0.get_mut(rank)?.push_back(message);
        if self.0.iter().any(VecDeque::is_empty) {
            return None;
        }
        let first = self.0.iter_mut().filter_map(VecDeque::pop_front);
        let messages: Vec<_> = first.collect();
        if messages.contains(&FromWorker::Skipped) {
            return Some(FromWorker::Skipped);
        }
        messages.into_iter().next()
    }
}

/// A rank of a worker has connected, and knows the token.
#[derive(Debug)]
pub(super) struct Connection {
    rank: usize,
    location: Location,
    stream: Arc<TcpStream>,
}

/// The number of a worker, and its event.
pub(super) type PoolEvent = (u32, WorkerEvent);

#[derive(Debug)]
pub(super) enum WorkerEvent {
    Connected(Connection),
    Message(usize, FromWorker),
    /// A rank has closed its connection.
    Closed,
    Exited,
}

/// Listens for at most `most` workers at a time, and returns the address. Workers of other hosts connect to `host`; if it
/// is `None`, there are none.
pub(super) fn listen(
    host: Option<&str>,
    token: &Token,
    most: usize,
    events: Sender<PoolEvent>,
) -> Result<String> {
    let listener = match host {
        None => TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?,
        Some(_) => listen_everywhere(0)?,
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
    Ok(at_port(host.unwrap_or("127.0.0.1"), port))
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
    let rank = peer.rank;
    let (host, pid) = (peer.host, peer.pid);
    let connection = Connection {
        rank,
        location: Location { host, pid },
        stream,
    };
    let tell = |event| events.send((worker, event)).is_ok();
    let mut is_open = tell(WorkerEvent::Connected(connection));
    while is_open {
        let Some(message) = receive(&mut reader) else {
            break;
        };
        is_open = tell(WorkerEvent::Message(rank, message));
    }
    // Nobody listens once the search has ended.
    tell(WorkerEvent::Closed);
}

#[cfg(test)]
mod tests {
    use FromWorker::{Saved, Skipped, Stopped};

    use super::*;

    #[test]
    fn a_rank_that_is_ahead_does_not_speak_for_the_others() {
        let mut ranks = JointMessages::new(2);
        let complete = [(0, Saved), (0, Stopped), (1, Saved), (1, Stopped)]
            .map(|(rank, message)| ranks.push(rank, message));
        assert_eq!(complete, [None, None, Some(Saved), Some(Stopped)]);
        let complete = [(1, Skipped), (1, Stopped), (0, Saved), (0, Stopped)]
            .map(|(rank, message)| ranks.push(rank, message));
        assert_eq!(complete, [None, None, Some(Skipped), Some(Stopped)]);
        assert_eq!(JointMessages::new(1).push(0, Stopped), Some(Stopped));
    }
}
