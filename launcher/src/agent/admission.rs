//! Accepts connections to the head, admits hosts to the job, and records which are present.

use std::io::ErrorKind;
use std::net::{IpAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use accelerator_collective::internal::{
    PendingHandshake, PendingHandshakes, Token, listen_at, listen_everywhere,
};
use accelerator_host::machine::host_name;
use accelerator_host::sync::{Condvar, Mutex};

use super::handshake::{Refusal, answer};
use super::host::{Host, HostStatus, LeavePolicy};
use super::line::{ConnectionKind, HostInfo, JoinReply, JoinRequest, Line, LineStart, spawn};
use super::stream_line;
use crate::error::{Error, Result, chain};
use crate::event::Event;
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

/// The number of refusals that are reported and kept.
const MAX_REFUSALS: usize = 8;

/// The head's record of the other hosts. It has no entry for host 0.
#[derive(Debug)]
pub(super) struct Admission {
    hosts: usize,
    least_hosts: usize,
    job: Option<String>,
    max_restarts: u64,
    liveness: Duration,
    relay: Relay,
    state: Mutex<AdmissionState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct AdmissionState {
    /// The admitted hosts by number; the entry of host 0 is always `None`.
    present: Vec<Option<Arc<Host>>>,
    /// Set once an attempt has begun.
    has_begun: bool,
    /// The mismatch that no retry can resolve, recorded before the first attempt.
    conflict: Option<String>,
    /// The refused hosts, each with the reason.
    refused: Vec<String>,
    /// The exit code of the job once it has ended, with the cause.
    over: Option<(u8, Option<String>)>,
}

impl Admission {
    /// Admits the hosts of a job of `hosts` hosts, which begins with at least `least_hosts`. `job` is its name where its
    /// user has given it one.
    pub(super) fn new(
        [least_hosts, hosts]: [usize; 2],
        job: Option<String>,
        max_restarts: u64,
        liveness: Duration,
        relay: Relay,
    ) -> Self {
        let state = AdmissionState {
            present: vec![None; hosts],
            ..AdmissionState::default()
        };
        Self {
            hosts,
            least_hosts,
            job,
            max_restarts,
            liveness,
            relay,
            state: Mutex::new(state),
            changed: Condvar::new(),
        }
    }

    /// Checks if a host may take its place. If another launcher holds it, the check waits as long as it takes to find
    /// that one lost, since this one may be its replacement.
    ///
    /// # Errors
    /// Returns the reason for the refusal.
    pub(super) fn check(&self, entry: &JoinRequest) -> std::result::Result<(), Refusal> {
        let number = entry.host;
        let mut state = self.state.lock();
        let conflict = match () {
            () if entry.hosts != self.hosts => Some(format!(
                "host {number} was started with --nnodes {}, and host 0 with --nnodes {}",
                entry.hosts, self.hosts
            )),
            () if number == 0 || number >= self.hosts => Some(format!(
                "there is no other host {number} among {}",
                self.hosts
            )),
            () => None,
        };
        if let Some(conflict) = conflict {
            return Err(Refusal::Conflict(conflict));
        }
        let ConnectionKind::Messages(info) = &entry.purpose else {
            return Ok(());
        };
        if let (Some(own), Some(other)) = (&self.job, &info.job)
            && own != other
        {
            let text = format!("the job here is {own:?} by ACCEL_JOB, and {other:?} there");
            return Err(Refusal::Permanent(text));
        }
        let until = Instant::now() + self.liveness * 3 / 2;
        loop {
            if let Some((code, text)) = &state.over {
                let text = text.as_deref().unwrap_or("it ended well");
                return Err(Refusal::Permanent(format!(
                    "the job is over with exit code {code}: {text}"
                )));
            }
            let Some(other) = present(&state, number) else {
                return Ok(());
            };
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let text = format!(
                    "two launchers are host {number}: one on {} (pid {}), and one on {} (pid {}); give each host a \
                     --node-rank of its own",
                    other.info.name, other.info.pid, info.name, info.pid
                );
                return Err(Refusal::Conflict(text));
            }
            state = self.changed.wait_timeout(state, left);
        }
    }

    /// Gives `host` its place.
    ///
    /// # Errors
    /// When it was taken meanwhile.
    pub(super) fn add(&self, host: &Arc<Host>) -> std::result::Result<(), Refusal> {
        let mut state = self.state.lock();
        if present(&state, host.number).is_some() {
            let text = format!("host {} has just been taken", host.number);
            return Err(Refusal::Retry(text));
        }
        state.present[host.number] = Some(Arc::clone(host));
        drop(state);
        let HostInfo { max_restarts, .. } = host.info;
        if let Some(other) = max_restarts.filter(|&other| other != self.max_restarts) {
            note(&format!(
                "{} was started with --max-restarts {other}; what counts is the {} of host 0",
                host.shown(),
                self.max_restarts
            ));
        }
        self.tell();
        Ok(())
    }

    /// The host that has this connection for messages.
    fn of_session(&self, number: usize, session: u64) -> Option<Arc<Host>> {
        let host = present(&self.state.lock(), number);
        host.filter(|host| host.session == session)
    }

    /// Returns the policy for hosts that leave: the job continues without them if it may run on fewer hosts.
    pub(super) fn leave_policy(&self) -> LeavePolicy {
        match self.least_hosts < self.hosts {
            true => LeavePolicy::Alone,
            false => LeavePolicy::WithJob,
        }
    }

    /// Checks if the job may run on `hosts` hosts, this one included.
    pub(super) fn is_enough(&self, hosts: usize) -> bool {
        hosts >= self.least_hosts
    }

    /// The hosts that are ready, and those that are not.
    ///
    /// # Errors
    /// When a host that the job needs can never start its ranks, or hosts contradict one another.
    pub(super) fn gathered(&self) -> Result<Gathered> {
        let state = self.state.lock();
        if let Some(conflict) = &state.conflict {
            return Err(Error::usage(conflict.clone()));
        }
        let mut hosts = Vec::new();
        let mut absent = Absent {
            refused: state.refused.clone(),
            ..Absent::default()
        };
        for number in 1..self.hosts {
            let host = present(&state, number).filter(|host| host.leaves().is_none());
            match host.as_ref().map(|host| (host, host.status())) {
                Some((host, HostStatus::Ready)) => hosts.push(Arc::clone(host)),
                Some((_, HostStatus::Preparing)) => absent.preparing.push(number),
                Some((_, HostStatus::Failed(error)))
                    if self.leave_policy() == LeavePolicy::WithJob =>
                {
                    return Err(error);
                }
                Some((_, HostStatus::Lost | HostStatus::Failed(_))) | None => {
                    absent.missing.push(number);
                }
            }
        }
        Ok(Gathered { hosts, absent })
    }

    /// The hosts that are there and want to leave.
    pub(super) fn leaving(&self) -> Vec<Arc<Host>> {
        let state = self.state.lock();
        let present = (1..self.hosts).filter_map(|number| present(&state, number));
        present.filter(|host| host.leaves().is_some()).collect()
    }

    /// Records that an attempt begins: from now on, a host that contradicts the others is refused alone.
    pub(super) fn begin(&self) {
        self.state.lock().has_begun = true;
    }

    /// Records that a host at `address` was refused and has got the refusal.
    pub(super) fn refused(&self, address: impl std::fmt::Display, refusal: &Refusal) {
        let mut state = self.state.lock();
        match refusal {
            // It asks again, or has only looked whether the port is open.
            Refusal::Retry(_) => return,
            Refusal::Conflict(text) if !state.has_begun => {
                state.conflict.get_or_insert_with(|| text.clone());
            }
            Refusal::Permanent(text) | Refusal::Conflict(text) => {
                let text = format!("refused {address}: {text}");
                if state.refused.len() < MAX_REFUSALS && !state.refused.contains(&text) {
                    note(&text);
                    state.refused.push(text);
                }
            }
        }
        drop(state);
        self.tell();
    }

    /// Records that the job is over: no host is admitted any more, and those that are present get the
    /// outcome. Returns them.
    pub(super) fn finish(&self, code: u8, text: Option<String>) -> Vec<Arc<Host>> {
        let mut state = self.state.lock();
        state.over = Some((code, text.clone()));
        let hosts: Vec<_> = state.present.iter().flatten().cloned().collect();
        drop(state);
        for host in &hosts {
            host.finish(code, text.clone());
        }
        self.changed.notify_all();
        hosts
    }

    /// Wakes whoever waits for a place, or for hosts.
    pub(super) fn tell(&self) {
        self.changed.notify_all();
        self.relay.send(Event::Message);
    }
}

/// The hosts that are present. Host 0 is in neither list.
#[derive(Debug)]
pub(super) struct Gathered {
    /// They can start ranks, in the order of their numbers.
    pub(super) hosts: Vec<Arc<Host>>,
    /// They cannot.
    pub(super) absent: Absent,
}

/// Hosts that keep the others waiting.
#[derive(Clone, Debug, Default)]
pub(super) struct Absent {
    /// They are not there.
    pub(super) missing: Vec<usize>,
    /// Their launchers are there, and build the program.
    pub(super) preparing: Vec<usize>,
    /// The refused hosts, each with the reason.
    pub(super) refused: Vec<String>,
}

fn present(state: &AdmissionState, number: usize) -> Option<Arc<Host>> {
    let host = state.present.get(number)?.as_ref();
    host.filter(|host| !host.is_gone()).cloned()
}
