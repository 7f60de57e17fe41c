//! The launcher of host 0: admits the others, and starts ranks on them.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use accelerator_collective::Topology;
use accelerator_host::machine::host_name;
use accelerator_host::process::allow_descriptors;
use rustix::process::Signal;

use super::admission::{Absent, Acceptor, Admission, Gathered};
use super::host::{Host, LeavePolicy};
use super::line::Plan;
use crate::error::{BEFORE_RESTART, BEFORE_START, Error, Result, ended_by};
use crate::event::{Channel, Event};
use crate::process::RankProcess;
use crate::settings::nodes::HostPlace;
use crate::settings::options::Options;
use crate::settings::rank_env::RankEnv;
use crate::settings::{Layout, Settings, variable};
use crate::supervisor::leftovers::{LEFTOVER_TIMEOUT, Swept};
use crate::supervisor::signals::Relay;
use crate::supervisor::spawner::{Growth, LocalSpawner, Resize, Spawner};
use crate::supervisor::store::token_of_hosts;
use crate::text::{list, note};
use crate::variables;

/// The interval at which the head reports the hosts that it waits for.
const TELL_EVERY: Duration = Duration::from_secs(10);

/// The time that a job with enough hosts waits for more, counted from the last arrival.
const LAST_CALL: Duration = Duration::from_secs(5);

/// The time that the running job waits for more hosts before it takes in those that have come.
const SETTLE: Duration = Duration::from_secs(1);

/// The time for which a host counts as new: if it is the first to fail, the job does without it for a while.
const TRIAL: Duration = Duration::from_secs(60);

/// The time that a host may take, on top of its grace period, to end its processes.
const SWEEP_SLACK: Duration = Duration::from_secs(15);

/// The interval at which the head polls hosts for progress that they do not announce.
const POLL: Duration = Duration::from_millis(20);

/// The head of a job on several hosts.
#[derive(Debug)]
pub(crate) struct Head {
    place: HostPlace,
    /// The address at which it listens.
    address: IpAddr,
    /// The store's host, if the user names it.
    master_addr: Option<String>,
    liveness: Duration,
    admission: Arc<Admission>,
    /// The hosts of the attempt that begins next.
    gathered: RefCell<Option<Members>>,
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
        let token = token_of_hosts()?;
        // Each rank of another host takes four. If there are too few, the error of the first that lacks one says so.
        let _ = allow_descriptors(u64::MAX);
        let liveness = variables::liveness();
        let admission = Arc::new(Admission::new(
            [place.least_hosts, place.hosts],
            variable(accelerator_host::JOB.name).filter(|job| !job.is_empty()),
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
            gathered: RefCell::default(),
        })
    }

    /// Starts ranks on all hosts: with `local` on this one.
    pub(crate) fn spawner(&self, local: LocalSpawner) -> HeadSpawner<'_> {
        HeadSpawner {
            head: self,
            local,
            members: RefCell::default(),
            next: RefCell::default(),
            proposed: RefCell::default(),
            last: RefCell::default(),
            taken_in: RefCell::default(),
            seen: RefCell::default(),
            grace: Cell::default(),
        }
    }

    /// Waits until all hosts are there, and adds their layout to `settings`.
    ///
    /// # Errors
    /// When a host does not come in time, can never start its ranks, or contradicts this one; when a signal arrives.
    pub(crate) fn gather(&self, settings: Settings, channel: &Channel) -> Result<Settings> {
        let began = Instant::now();
        let until = began + self.place.join_timeout;
        let mut tell_at = began + TELL_EVERY;
        // Since when as many are there.
        let mut seen = (0, began);
        let hosts = loop {
            if self.admission.leave_policy() == LeavePolicy::Alone {
                // Nothing runs there.
                self.admission
                    .leaving()
                    .iter()
                    .for_each(|host| host.dismiss());
            }
            let Gathered { mut hosts, absent } = self.admission.gathered()?;
            let sound = |host: &&Arc<Host>| host.postponed_until().is_none();
            if self
                .admission
                .is_enough(hosts.iter().filter(sound).count() + 1)
            {
                hosts.retain(|host| sound(&host));
            }
            let now = Instant::now();
            if seen.0 != hosts.len() {
                seen = (hosts.len(), now);
            }
            if absent.missing.is_empty() && absent.preparing.is_empty() {
                break hosts;
            }
            let is_enough = self.admission.is_enough(hosts.len() + 1);
            let last_call = seen.1 + LAST_CALL;
            // A host that comes later is taken in while the job runs.
            if is_enough
                && (settings.restart > 0 || (absent.preparing.is_empty() && now >= last_call))
            {
                break hosts;
            }
            let is_missing = !absent.missing.is_empty();
            if is_missing && !is_enough && now >= until {
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
            let mut next = tell_at;
            if is_missing {
                next = next.min(if is_enough { last_call } else { until });
            }
            if let Event::Signal(signal) = channel.next(Some(next)) {
                return Err(match settings.restart {
                    0 => ended_by(signal, BEFORE_START),
                    _ => ended_by(signal, BEFORE_RESTART),
                });
            }
        };
        self.admission.begin();
        let members = Members::new(settings.ranks.get(), hosts);
        if members.layout.ranks() > Topology::LARGEST {
            return Err(Error::usage(format!(
                "the hosts run {} ranks together; a job has at most {}",
                members.layout.ranks(),
                Topology::LARGEST
            )));
        }
        let settings = Settings {
            listen_addr: self.address.to_string(),
            ..self.on_host_0(&members, settings)
        };
        self.gathered.replace(Some(members));
        Ok(settings)
    }

    /// Settings for the ranks of this host.
    fn on_host_0(&self, members: &Members, settings: Settings) -> Settings {
        let first = members.hosts.first();
        let reached = first.map(|host| host.head_address.to_string());
        let master_addr = self.master_addr.clone().or(reached);
        let master_addr = master_addr.unwrap_or_else(|| settings.master_addr.clone());
        settings.on_host(0, members.layout.clone(), master_addr)
    }

    /// Returns the address at which the ranks of `host` find the store.
    fn store_host(&self, host: &Host) -> String {
        let own = self.master_addr.clone();
        own.unwrap_or_else(|| host.head_address.to_string())
    }

    /// Tells the other hosts that the job is over, with the exit code of all launchers and the cause.
    pub(crate) fn finish(&self, code: u8, text: Option<String>) {
        let hosts = self.admission.finish(code, text);
        let until = Instant::now() + self.liveness;
        // A connection that is closed too early loses the data in flight.
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
        let is_everywhere = endpoint.address().is_some_and(|ip| ip.is_unspecified());
        let reached = match is_everywhere {
            true => format!("{}:{}", host_name(), endpoint.port),
            false => endpoint.to_string(),
        };
        let mut text = format!(
            "{} did not join within {} s: start accel-launch there with `--nnodes {hosts} --node-rank {} --rdzv-endpoint \
             {reached}`, and see that it reaches this host at port {}",
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

/// The hosts of a group of ranks, host 0 left out, and the number of ranks of each.
#[derive(Clone, Debug)]
struct Members {
    layout: Layout,
    hosts: Vec<Arc<Host>>,
}

impl Members {
    /// `own` ranks on host 0, and those of `hosts`, in their order.
    fn new(own: usize, hosts: Vec<Arc<Host>>) -> Self {
        let ranks = hosts.iter().map(|host| host.info.ranks);
        Self {
            layout: Layout::new(std::iter::once(own).chain(ranks).collect()),
            hosts,
        }
    }

    /// Another host than host 0, by its place in the layout.
    fn host(&self, place: usize) -> Option<&Arc<Host>> {
        self.hosts.get(place.checked_sub(1)?)
    }

    fn has(&self, host: &Arc<Host>) -> bool {
        self.hosts.iter().any(|known| Arc::ptr_eq(known, host))
    }
}

/// Starts ranks on all hosts of a job.
#[derive(Debug)]
pub(crate) struct HeadSpawner<'a> {
    head: &'a Head,
    local: LocalSpawner,
    /// The running group.
    members: RefCell<Option<Members>>,
    /// The group that follows it.
    next: RefCell<Option<Members>>,
    /// The group that [`resize`](Spawner::resize) proposed last.
    proposed: RefCell<Option<Members>>,
    /// The group that ran last.
    last: RefCell<Option<Members>>,
    /// The sessions of the hosts that this attempt has taken in while it ran, and when.
    taken_in: RefCell<BTreeMap<u64, Instant>>,
    /// The sessions of hosts that could be taken in, and since when.
    seen: RefCell<BTreeMap<u64, Instant>>,
    grace: Cell<Duration>,
}

impl HeadSpawner<'_> {
    fn begin_on(
        &self,
        members: &Members,
        settings: &Settings,
        store: SocketAddr,
        is_wanted: impl Fn(&Arc<Host>) -> bool,
    ) -> Result<()> {
        for (at, host) in members.hosts.iter().enumerate() {
            if is_wanted(host) {
                host.begin(Plan {
                    restart: settings.restart,
                    max_restarts: settings.max_restarts,
                    job: settings.job.clone(),
                    layout: members.layout.clone(),
                    host: at + 1,
                    elastic: settings.elastic,
                    survivors: settings.survivors,
                    store_host: self.head.store_host(host),
                    store_port: store.port(),
                })?;
            }
        }
        Ok(())
    }

    /// Proposes a group of host 0 and `hosts`; `former` lists the ranks of each host, numbered as in the running group.
    fn propose(
        &self,
        hosts: Vec<Arc<Host>>,
        former: Vec<Vec<Option<usize>>>,
        why: String,
    ) -> Resize {
        let layout = Layout::new(former.iter().map(Vec::len).collect());
        self.proposed.replace(Some(Members {
            layout: layout.clone(),
            hosts,
        }));
        Resize {
            layout,
            former: former.into_iter().flatten().collect(),
            why,
        }
    }

    /// Hosts that are not in the running group, and can be.
    fn newcomers(&self, members: &Members) -> Vec<Arc<Host>> {
        let gathered = self.head.admission.gathered();
        let mut hosts = gathered.map_or_else(|_| Vec::new(), |gathered| gathered.hosts);
        let mut room = Topology::LARGEST.saturating_sub(members.layout.ranks());
        hosts.retain(|host| {
            let is_free = !members.has(host) && host.is_idle() && host.postponed_until().is_none();
            let has_room = host.info.ranks <= room;
            if is_free && has_room {
                room -= host.info.ranks;
            }
            is_free && has_room
        });
        hosts
    }
}

impl Spawner for HeadSpawner<'_> {
    fn gather(&self, settings: Settings, channel: &Channel) -> Result<Settings> {
        self.head.gather(settings, channel)
    }

    fn begin(&self, settings: &Settings, store: SocketAddr) -> Result<()> {
        let Some(members) = self.head.gathered.borrow().clone() else {
            return Ok(());
        };
        self.members.replace(Some(members.clone()));
        self.grace.set(settings.grace);
        self.taken_in.borrow_mut().clear();
        self.begin_on(&members, settings, store, |_| true)
    }

    fn spawn(&self, rank: usize, environment: &RankEnv) -> Result<Box<dyn RankProcess>> {
        if environment.ranks().contains(&rank) {
            return self.local.spawn(rank, environment);
        }
        let [next, running] = [self.next.borrow(), self.members.borrow()];
        let members = next.as_ref().or(running.as_ref());
        match members.and_then(|members| members.host(members.layout.host_of(rank))) {
            Some(host) => host.started(rank),
            None => Err(Error::system(format!("rank {rank} has no host"))),
        }
    }

    fn let_go(&self) {
        let members = self.members.borrow();
        let Some(members) = members.as_ref() else {
            return;
        };
        let admission = &self.head.admission;
        let stays = |host: &&Arc<Host>| host.leaves().is_none();
        let staying = members.hosts.iter().filter(stays).count();
        let is_enough = admission.is_enough(staying + self.newcomers(members).len() + 1);
        for host in admission.leaving() {
            let is_next = self
                .next
                .borrow()
                .as_ref()
                .is_some_and(|next| next.has(&host));
            if members.has(&host) {
                if !is_enough {
                    host.end_job();
                }
            } else if !is_next && (host.has_ended() || host.has_overstayed(self.grace.get())) {
                host.dismiss();
            }
        }
    }

    fn resize(&self, growth: Growth) -> Option<Resize> {
        let members = self.members.borrow();
        let members = members.as_ref()?;
        let mut newcomers = self.newcomers(members);
        let now = Instant::now();
        let mut seen = self.seen.borrow_mut();
        seen.retain(|session, _| newcomers.iter().any(|host| host.session == *session));
        for host in &newcomers {
            seen.entry(host.session).or_insert(now);
        }
        newcomers.retain(|host| growth == Growth::Now && now >= seen[&host.session] + SETTLE);
        let is_growing = !newcomers.is_empty();
        let stays = |host: &&Arc<Host>| host.leaves().is_none();
        let mut hosts: Vec<_> = members.hosts.iter().filter(stays).cloned().collect();
        let is_leaving = hosts.len() < members.hosts.len();
        let is_enough = self
            .head
            .admission
            .is_enough(hosts.len() + newcomers.len() + 1);
        // The job ends if it needs a host that wants to leave.
        if is_leaving && !is_enough || !(is_growing || is_leaving) {
            return None;
        }
        let shown = |hosts: &[&Arc<Host>]| {
            let hosts: Vec<String> = hosts.iter().map(|host| host.shown()).collect();
            hosts.join(" and ")
        };
        let mut changes = Vec::new();
        if is_growing {
            changes.push(format!(
                "takes in {}",
                shown(&newcomers.iter().collect::<Vec<_>>())
            ));
            hosts.extend(newcomers);
        }
        if is_leaving {
            let leaving: Vec<_> = members.hosts.iter().filter(|host| !stays(host)).collect();
            changes.push(format!("continues without {}", shown(&leaving)));
        }
        let old_place =
            |host: &Arc<Host>| members.hosts.iter().position(|old| Arc::ptr_eq(old, host));
        // A host that has lost ranks keeps its other ones.
        let mut former: Vec<Vec<_>> = vec![members.layout.ranks_of(0).map(Some).collect()];
        former.extend(hosts.iter().map(|host| match old_place(host) {
            Some(place) => members.layout.ranks_of(place + 1).map(Some).collect(),
            None => vec![None; host.info.ranks],
        }));
        Some(self.propose(hosts, former, changes.join(", and ")))
    }

    fn without_lost(&self, survivors: &[usize]) -> Option<Resize> {
        let members = self.members.borrow();
        let members = members.as_ref()?;
        let of = |place| {
            let ranks = members.layout.ranks_of(place);
            let left = survivors.iter().copied();
            left.filter(|rank| ranks.contains(rank))
                .map(Some)
                .collect::<Vec<_>>()
        };
        let mut former = vec![of(0)];
        let mut hosts = Vec::new();
        for (at, host) in members.hosts.iter().enumerate() {
            let left = of(at + 1);
            if !left.is_empty() {
                hosts.push(Arc::clone(host));
                former.push(left);
            }
        }
        let why = format!("continues with {}", list(survivors));
        Some(self.propose(hosts, former, why))
    }

    fn deadline(&self) -> Option<Instant> {
        let settled = self
            .seen
            .borrow()
            .values()
            .map(|since| *since + SETTLE)
            .collect::<Vec<_>>();
        let admission = &self.head.admission;
        let overstayed = admission
            .leaving()
            .into_iter()
            .filter_map(|host| host.overstays_at(self.grace.get()));
        let gathered = admission
            .gathered()
            .map_or_else(|_| Vec::new(), |gathered| gathered.hosts);
        let postponed = gathered
            .into_iter()
            .filter_map(|host| host.postponed_until());
        // A time that has passed is handled at the next event, which comes soon.
        let now = Instant::now();
        let all = settled.into_iter().chain(overstayed).chain(postponed);
        all.filter(|at| *at + POLL > now)
            .map(|at| at.max(now) + POLL)
            .min()
    }

    fn begin_next(&self, settings: &Settings, store: SocketAddr) -> Result<()> {
        self.next.replace(self.proposed.take());
        let [next, running] = [self.next.borrow(), self.members.borrow()];
        let (Some(next), Some(running)) = (next.as_ref(), running.as_ref()) else {
            return Ok(());
        };
        self.begin_on(next, settings, store, |host| !running.has(host))
    }

    fn place(&self, rank: usize, settings: &Settings, port: u16) -> Vec<(String, String)> {
        let next = self.next.borrow();
        let Some(next) = next.as_ref() else {
            return Vec::new();
        };
        let place = next.layout.host_of(rank);
        let settings = match next.host(place) {
            None => self.head.on_host_0(next, settings.clone()),
            Some(host) => {
                let store = self.head.store_host(host);
                settings.clone().on_host(place, next.layout.clone(), store)
            }
        };
        RankEnv::new(&settings, port, None, None).place_of(rank)
    }

    fn has_hosts(&self) -> bool {
        true
    }

    fn has_more(&self) -> bool {
        let [next, running] = [self.next.borrow(), self.members.borrow()];
        let is_next = |host: &Arc<Host>| next.as_ref().is_some_and(|next| next.has(host));
        let running = running.as_ref();
        running.is_some_and(|running| self.newcomers(running).iter().any(|host| !is_next(host)))
    }

    fn postpone(&self, ranks: &[usize]) {
        if let Some(next) = &*self.next.borrow() {
            for host in ranks
                .iter()
                .filter_map(|&rank| next.host(next.layout.host_of(rank)))
            {
                host.postpone();
            }
        }
    }

    fn blame(&self, rank: usize) -> bool {
        let gathered = self.head.gathered.borrow();
        let members = self.last.borrow();
        let Some(host) = members
            .as_ref()
            .or(gathered.as_ref())
            .and_then(|members| members.host(members.layout.host_of(rank)))
        else {
            return false;
        };
        let taken_in = self.taken_in.borrow().get(&host.session).copied();
        let is_newcomer = taken_in.is_some_and(|at| at.elapsed() < TRIAL);
        if is_newcomer {
            host.postpone();
        }
        is_newcomer
    }

    fn adopt_next(&self) {
        let Some(next) = self.next.take() else { return };
        for (at, host) in next.hosts.iter().enumerate() {
            host.renumber(next.layout.ranks_of(at + 1));
        }
        let running = self.members.take();
        let was_running =
            |host: &Arc<Host>| running.as_ref().is_some_and(|running| running.has(host));
        let new = next.hosts.iter().filter(|host| !was_running(host));
        self.taken_in
            .borrow_mut()
            .extend(new.map(|host| (host.session, Instant::now())));
        for host in running.iter().flat_map(|running| &running.hosts) {
            if next.has(host) {
                continue;
            }
            if host.leaves().is_none() && host.has_ended() {
                // All its ranks were lost, and its launcher may start others.
                let mut taken_in = self.taken_in.borrow_mut();
                if taken_in
                    .remove(&host.session)
                    .is_some_and(|at| at.elapsed() < TRIAL)
                {
                    host.postpone();
                }
                host.end(Signal::KILL, Duration::ZERO);
            } else {
                host.has_left();
            }
        }
        self.members.replace(Some(next));
    }

    fn drop_next(&self) {
        let (Some(next), Some(running)) = (self.next.take(), &*self.members.borrow()) else {
            return;
        };
        for host in next.hosts.iter().filter(|host| !running.has(host)) {
            host.end(Signal::KILL, Duration::ZERO);
        }
    }

    fn end(&self, first: Signal, grace: Duration, channel: &Channel) -> Swept {
        let mut swept = Swept::default();
        self.drop_next();
        let Some(members) = self.members.take() else {
            return swept;
        };
        let hosts = members.hosts.clone();
        self.last.replace(Some(members));
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
