//! The launcher of host 0: admits the others, and starts ranks on them.

use std::cell::RefCell;
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use accelerator_collective::Topology;
use accelerator_collective::rendezvous::Token;
use rustix::process::Signal;

use super::admission::{Absent, Admission};
use super::handshake::{Refusal, answer};
use super::host::Host;
use super::line::{Line, LineStart, spawn};
use super::message::{Plan, Purpose, Welcome};
use super::stream_line;
use super::trust;
use crate::error::{Error, Result, chain};
use crate::event::{Channel, Event};
use crate::output::Stream;
use crate::process::RankProcess;
use crate::settings::layout::Layout;
use crate::settings::nodes::{Endpoint, HostPlace};
use crate::settings::options::Options;
use crate::settings::rank_env::RankEnv;
use crate::settings::{Settings, variable};
use crate::supervisor::leftovers::{LEFTOVER_TIMEOUT, Swept};
use crate::supervisor::signals::Relay;
use crate::supervisor::spawner::{LocalSpawner, Spawner};
use crate::text::{host_name, note};

/// How long a stranger may take for each message.
const STRANGER_TIMEOUT: Duration = Duration::from_secs(10);

/// How many strangers are listened to at once.
const MAX_STRANGERS: usize = 256;

/// How often the head says for whom it waits.
const TELL_EVERY: Duration = Duration::from_secs(10);

/// What a host may take on top of its grace period to end what runs there.
const SWEEP_SLACK: Duration = Duration::from_secs(15);

/// How often the head looks whether hosts have done as told, where it does not hear of it.
const POLL: Duration = Duration::from_millis(20);

/// The head of a job on several hosts.
#[derive(Debug)]
pub(crate) struct Head {
    place: HostPlace,
    /// The address at which it listens.
    address: IpAddr,
    /// The store's host where the user names it.
    master_addr: Option<String>,
    liveness: Duration,
    admission: Arc<Admission>,
}

impl Head {
    /// Listens for the other hosts from now on.
    ///
    /// # Errors
    /// When there is no token, or the port is taken.
    pub(crate) fn listen(
        place: HostPlace,
        options: &Options,
        settings: &Settings,
        relay: &Relay,
    ) -> Result<Self> {
        let token = trust::token()?;
        let listener = bind(&place.endpoint)?;
        let address = listener
            .local_addr()
            .map_err(|error| Error::system("the own address cannot be read").with_source(error))?;
        let liveness = trust::liveness();
        let admission = Arc::new(Admission::new(
            place.hosts,
            variable(accelerator_env::JOB.name).filter(|job| !job.is_empty()),
            settings.max_restarts,
            liveness,
            relay.clone(),
        ));
        let greeter = Arc::new(Greeter {
            admission: Arc::clone(&admission),
            token,
            liveness,
            relay: relay.clone(),
            sessions: AtomicU64::new(1),
            strangers: AtomicUsize::new(0),
        });
        spawn("hosts", move || greeter.accept(&listener))?;
        Ok(Self {
            place,
            address: address.ip(),
            master_addr: options.master_addr.clone(),
            liveness,
            admission,
        })
    }

    /// Starts ranks on all hosts: with `local` on this one.
    pub(crate) fn spawner(&self, local: LocalSpawner) -> HeadSpawner<'_> {
        HeadSpawner {
            head: self,
            local,
            attempt: RefCell::new(None),
        }
    }

    /// Waits until all hosts are there, and adds to `settings` what follows from them.
    ///
    /// # Errors
    /// When a host does not come in time, can never start its ranks, or contradicts this one; when a signal arrives.
    pub(crate) fn gather(&self, settings: Settings, channel: &Channel) -> Result<Settings> {
        let began = Instant::now();
        let until = began + self.place.join_timeout;
        let mut tell_at = began + TELL_EVERY;
        let layout = loop {
            let absent = match self.admission.layout(settings.ranks.get())? {
                Ok(layout) => break layout,
                Err(absent) => absent,
            };
            let now = Instant::now();
            let is_missing = !absent.missing.is_empty();
            if is_missing && now >= until {
                return Err(self.missing(&absent));
            }
            if now >= tell_at {
                let waited = began.elapsed().as_secs();
                note(&format!(
                    "waiting for {}, for {waited} s now",
                    shown(&absent)
                ));
                tell_at = now + TELL_EVERY;
            }
            let next = if is_missing {
                tell_at.min(until)
            } else {
                tell_at
            };
            if let Event::Signal(signal) = channel.next(Some(next)) {
                return Err(match settings.restart {
                    0 => Error::interrupted(signal),
                    _ => Error::interrupted_restart(signal),
                });
            }
        };
        if layout.ranks() > Topology::LARGEST {
            return Err(Error::usage(format!(
                "the hosts run {} ranks together; a job has at most {}",
                layout.ranks(),
                Topology::LARGEST
            )));
        }
        let first = self.admission.host(1);
        let reached = first.map(|host| host.head_address.to_string());
        let master_addr = self.master_addr.clone().or(reached);
        let master_addr = master_addr.unwrap_or_else(|| settings.master_addr.clone());
        Ok(Settings {
            listen_addr: self.address.to_string(),
            ..settings.on_host(0, layout, master_addr)
        })
    }

    /// Tells the other hosts that the job is over, with the exit code of all launchers and what ended it.
    pub(crate) fn finish(&self, code: u8, text: Option<String>) {
        let hosts = self.admission.finish(code, text);
        let until = Instant::now() + self.liveness;
        // A connection that is closed while something is on its way loses what was sent.
        while hosts.iter().any(|host| !host.is_gone()) && Instant::now() < until {
            thread::sleep(POLL);
        }
    }

    fn missing(&self, absent: &Absent) -> Error {
        let HostPlace {
            hosts,
            endpoint,
            join_timeout,
            ..
        } = &self.place;
        let mut text = format!(
            "{} did not join within {} s: start accel-launch there with `--nnodes {hosts} --node-rank {} --rdzv-endpoint \
             {endpoint}`, and see that it reaches this host at port {}",
            shown(absent),
            join_timeout.as_secs_f64(),
            absent.missing.first().unwrap_or(&1),
            endpoint.port
        );
        for refused in &absent.refused {
            text.push_str("; ");
            text.push_str(refused);
        }
        Error::system(text)
    }
}

/// Starts ranks on all hosts of a job.
#[derive(Debug)]
pub(crate) struct HeadSpawner<'a> {
    head: &'a Head,
    local: LocalSpawner,
    /// The ranks of the current attempt, and the other hosts.
    attempt: RefCell<Option<(Layout, Vec<Arc<Host>>)>>,
}

impl Spawner for HeadSpawner<'_> {
    fn gather(&self, settings: Settings, channel: &Channel) -> Result<Settings> {
        self.head.gather(settings, channel)
    }

    fn begin(&self, settings: &Settings, store: SocketAddr) -> Result<()> {
        let layout = &settings.layout;
        let others = 1..layout.hosts();
        let hosts: Vec<_> = others
            .filter_map(|number| self.head.admission.host(number))
            .collect();
        self.attempt.replace(Some((layout.clone(), hosts.clone())));
        for host in hosts {
            let own = self.head.master_addr.clone();
            host.begin(Plan {
                epoch: settings.restart,
                max_restarts: settings.max_restarts,
                job: settings.job.clone(),
                layout: layout.clone(),
                store_host: own.unwrap_or_else(|| host.head_address.to_string()),
                store_port: store.port(),
            })?;
        }
        Ok(())
    }

    fn spawn(&self, rank: usize, environment: &RankEnv) -> Result<Box<dyn RankProcess>> {
        if environment.ranks().contains(&rank) {
            return self.local.spawn(rank, environment);
        }
        let attempt = self.attempt.borrow();
        let host = attempt.as_ref().and_then(|(layout, hosts)| {
            let number = layout.host_of(rank);
            hosts.iter().find(|host| host.number == number)
        });
        match host {
            Some(host) => host.started(rank),
            None => Err(Error::system(format!("rank {rank} has no host"))),
        }
    }

    fn end(&self, first: Signal, grace: Duration, channel: &Channel) -> Swept {
        let mut swept = Swept::default();
        let Some((_, hosts)) = self.attempt.take() else {
            return swept;
        };
        for host in &hosts {
            host.end(first, grace);
        }
        let until = Instant::now() + grace + LEFTOVER_TIMEOUT + SWEEP_SLACK;
        while hosts.iter().any(|host| host.swept().is_none()) {
            let now = Instant::now();
            if now >= until {
                let late = hosts.iter().filter(|host| host.swept().is_none());
                late.for_each(|host| host.lose("it did not end its processes in time"));
                break;
            }
            match channel.next(Some(until.min(now + POLL))) {
                Event::Signal(signal) => {
                    swept.asked_to_end.get_or_insert(signal);
                    for host in &hosts {
                        host.end(Signal::KILL, Duration::ZERO);
                    }
                }
                Event::Drained => swept.drained += 1,
                _ => {}
            }
        }
        for left_behind in hosts.iter().filter_map(|host| host.swept()) {
            swept.left_behind.add(left_behind);
        }
        swept
    }
}

/// Listens to whoever connects.
#[derive(Debug)]
struct Greeter {
    admission: Arc<Admission>,
    token: Option<Token>,
    liveness: Duration,
    relay: Relay,
    sessions: AtomicU64,
    strangers: AtomicUsize,
}

/// What a connection is, once it has been admitted.
enum Admitted {
    Messages(Arc<Host>, LineStart),
    Output(Arc<Host>, Stream),
}

impl Greeter {
    fn accept(self: Arc<Self>, listener: &TcpListener) {
        for connection in listener.incoming() {
            let Ok(connection) = connection else {
                // No file descriptor is free, perhaps.
                thread::sleep(POLL);
                continue;
            };
            if self.strangers.fetch_add(1, Ordering::Relaxed) < MAX_STRANGERS {
                let greeter = Arc::clone(&self);
                let greet = move || {
                    greeter.greet(connection);
                    greeter.strangers.fetch_sub(1, Ordering::Relaxed);
                };
                if spawn("stranger", greet).is_ok() {
                    continue;
                }
            }
            // It asks again.
            self.strangers.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn greet(&self, connection: TcpStream) {
        let (Ok(peer), Ok(own)) = (connection.peer_addr(), connection.local_addr()) else {
            return;
        };
        // Addresses of IPv4 look like those of IPv6 where both are listened for.
        let addresses = [peer, own].map(|address| address.ip().to_canonical());
        let mut added = None;
        let token = self.token.as_ref();
        let admitted = answer(&connection, token, STRANGER_TIMEOUT, |entry| {
            self.admission.check(&entry)?;
            let session = self.sessions.fetch_add(1, Ordering::Relaxed);
            let welcome = Welcome {
                session,
                liveness: self.liveness,
                name: host_name(),
            };
            match entry.purpose {
                Purpose::Messages(info) => {
                    let failed = |error: Error| Refusal::Now(chain(&error));
                    let copy = connection.try_clone();
                    let copy = copy.map_err(|error| Refusal::Now(error.to_string()))?;
                    let (line, start) = Line::new(copy).map_err(failed)?;
                    let relay = self.relay.clone();
                    let host = Host::new(entry.host, info, addresses, session, line, relay);
                    let host = Arc::new(host);
                    self.admission.add(&host)?;
                    added = Some(Arc::clone(&host));
                    Ok((welcome, Admitted::Messages(host, start)))
                }
                Purpose::Output { stream, session } => {
                    let host = self.admission.of_session(entry.host, session);
                    let host = host.ok_or_else(|| {
                        Refusal::Now(format!("host {} has no such connection", entry.host))
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
                    stream_line::receive(connection, Arc::clone(&host), stream)?;
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

/// Listens at the endpoint's address where it is one of this host, else at all addresses: a name may stand for another
/// address elsewhere, and an address for something in front of this host.
fn bind(endpoint: &Endpoint) -> Result<TcpListener> {
    let all = [
        IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        IpAddr::V4(Ipv4Addr::UNSPECIFIED),
    ];
    let mut failure = None;
    for address in endpoint.address().into_iter().chain(all) {
        match TcpListener::bind((address, endpoint.port)) {
            Ok(listener) => return Ok(listener),
            Err(error) if error.kind() == ErrorKind::AddrInUse => {
                let port = endpoint.port;
                return Err(Error::system(format!(
                    "port {port} is taken; end what listens there, or give another one in --rdzv-endpoint on all hosts"
                ))
                .with_source(error));
            }
            Err(error) => failure = Some(error),
        }
    }
    let error = Error::system(format!(
        "--rdzv-endpoint {endpoint}: this host cannot listen there"
    ));
    Err(match failure {
        Some(failure) => error.with_source(failure),
        None => error,
    })
}

/// "host 1" or "hosts 1 and 3 (host 2 builds the program)".
fn shown(absent: &Absent) -> String {
    let list = |hosts: &[usize]| {
        let numbers: Vec<String> = hosts.iter().map(usize::to_string).collect();
        match numbers.as_slice() {
            [one] => format!("host {one}"),
            _ => format!("hosts {}", numbers.join(", ")),
        }
    };
    match (absent.missing.as_slice(), absent.preparing.as_slice()) {
        (missing, []) => list(missing),
        ([], preparing) => format!("{}, where the program is being built", list(preparing)),
        (missing, preparing) => format!(
            "{} ({} has joined and builds the program)",
            list(missing),
            list(preparing)
        ),
    }
}
