//! The launcher of host 0: admits the others, and starts ranks on them.

use std::cell::RefCell;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use accelerator_collective::Topology;
use rustix::process::{Resource, Rlimit, Signal, getrlimit, setrlimit};

use super::acceptor::Acceptor;
use super::admission::{Absent, Admission};
use super::host::Host;
use super::message::Plan;
use super::trust;
use crate::error::{Error, Result};
use crate::event::{Channel, Event};
use crate::process::RankProcess;
use crate::settings::layout::Layout;
use crate::settings::nodes::HostPlace;
use crate::settings::options::Options;
use crate::settings::rank_env::RankEnv;
use crate::settings::{Settings, variable};
use crate::supervisor::leftovers::{LEFTOVER_TIMEOUT, Swept};
use crate::supervisor::signals::Relay;
use crate::supervisor::spawner::{LocalSpawner, Spawner};
use crate::text::note;

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
        raise_file_limit();
        let liveness = trust::liveness();
        let admission = Arc::new(Admission::new(
            place.hosts,
            variable(accelerator_env::JOB.name).filter(|job| !job.is_empty()),
            settings.max_restarts,
            liveness,
            relay.clone(),
        ));
        let acceptor = Acceptor::new(Arc::clone(&admission), token, liveness, relay.clone());
        let address = acceptor.listen(&place.endpoint)?;
        Ok(Self {
            place,
            address,
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
                restart: settings.restart,
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

/// Lets this launcher open as many files as the system allows it, since each rank of another host takes four.
fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    // Where it cannot be raised, the ranks may be few enough; if not, the error says so.
    let _ = setrlimit(
        Resource::Nofile,
        Rlimit {
            current: limit.maximum,
            ..limit
        },
    );
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
