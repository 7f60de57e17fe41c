//! What the environment says about a launch.

mod sources;

use std::{fmt, str::FromStr, time::Duration};

use accelerator_env as env;
pub use accelerator_env::variable;

use sources::PlaceVariables;

use crate::{
    error::{Error, Kind, Result},
    rendezvous::{Rendezvous, Security, StoreHost, is_on},
    topology::Topology,
    transport_kind::TransportKind,
};

/// How this process was started: its place in the job and where the ranks meet.
///
/// [`from_env`](Self::from_env) reads these variables, which `accel-launch` sets and torchrun
/// knows:
///
/// | variable | meaning |
/// |---|---|
/// | `RANK`, `WORLD_SIZE` | this process among all of the job; both or neither |
/// | `LOCAL_RANK`, `LOCAL_WORLD_SIZE` | this process among those of its host; both, or neither where the ranks [find out](Topology::is_local_known) |
/// | `MASTER_ADDR` | the host of the store where the ranks meet |
/// | `ACCEL_PORT`, else `MASTER_PORT` | the port of the store |
/// | `TORCHELASTIC_USE_AGENT_STORE` | torchrun's agent listens on `MASTER_PORT`: the store is one above |
/// | `TORCHELASTIC_RUN_ID`, `ACCEL_JOB` | the name of the job; ranks of another job are refused |
/// | `ACCEL_STORE` | `launcher` where the launcher hosts the store, `rank0` (default) where rank 0 does |
/// | `ACCEL_TOKEN_FILE` | the file that holds the job token |
/// | `ACCEL_INSECURE` | `1` lets several hosts meet without a token |
/// | `ACCEL_TRANSPORT` | `auto` (default), `hierarchical`, `shm`, `tcp` or `threads` |
/// | `ACCEL_LIVENESS_TIMEOUT` | after how many seconds of silence a rank counts as lost |
/// | `ACCEL_RESTART`, `ACCEL_MAX_RESTARTS` | how often the job was restarted, and may be; set by the launcher |
/// | `ACCEL_SET_BY_LAUNCHER` | which variables the launcher has [set itself](Self::SET_BY_LAUNCHER) |
///
/// `ACCEL_FAULTS`, faults to inject for tests, is read by `burn-accelerate-fault`.
///
/// Without `RANK` and `WORLD_SIZE` the process is a world of its own. Anything incomplete,
/// malformed or contradictory is an error: a process never becomes rank 0 by accident. So it is an
/// error, too, where they are not set and the variables of Open MPI, of another MPI by PMI or PMIx, of a
/// step of Slurm's or of torchrun's settings (`PET_NNODES`, `PET_NPROC_PER_NODE`) show a job of several
/// processes: those launchers are not supported, and each process would train alone.
///
/// ```
/// use accelerator_collective::Launch;
///
/// # fn main() -> accelerator_collective::Result<()> {
/// let alone = Launch::from_vars(|_| None)?;
/// assert_eq!(alone.topology.world_size(), 1);
///
/// let error = Launch::from_vars(|name| (name == "RANK").then(|| "banana".to_owned())).unwrap_err();
/// assert!(error.is_topology());
/// assert!(error.to_string().starts_with("RANK is \"banana\""));
/// # Ok(())
/// # }
/// ```
///
/// What a launcher says, and how a program tells what it was started with:
///
/// ```
/// use accelerator_collective::{Launch, TransportKind};
///
/// # fn main() -> accelerator_collective::Result<()> {
/// let launched = Launch::from_vars(|name| {
///     let value = match name {
///         "RANK" | "LOCAL_RANK" => "1",
///         "WORLD_SIZE" | "LOCAL_WORLD_SIZE" => "2",
///         "MASTER_ADDR" => "127.0.0.1",
///         "ACCEL_PORT" => "29500",
///         "ACCEL_TRANSPORT" => "shm",
///         "ACCEL_RESTART" => "1",
///         "ACCEL_MAX_RESTARTS" => "3",
///         _ => return None,
///     };
///     Some(value.to_owned())
/// })?;
/// assert_eq!((launched.restart(), launched.max_restarts()), (1, Some(3)));
/// assert_eq!(launched.transport, TransportKind::Shm);
/// assert_eq!(launched.rendezvous.as_ref().map(|store| store.port()), Some(29_500));
/// for setting in launched.settings() {
///     println!("{} = {} ({})", setting.name, setting.value, setting.origin);
/// }
/// // What it does not inherit from a job, where it is to be alone:
/// assert!(Launch::VARIABLES.contains(&"ACCEL_RESTART"));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Launch {
    /// The place of this rank. Without `LOCAL_RANK` its place on its host is known where `MASTER_ADDR` is on the
    /// loopback interface, as all ranks share the host then; otherwise [`Topology::is_local_known`] is false here,
    /// and the [group](crate::ProcessGroup::topology) knows it.
    pub topology: Topology,
    /// Where the ranks meet; `None` in a world of one.
    pub rendezvous: Option<Rendezvous>,
    /// The transport that the environment asks for.
    pub transport: TransportKind,
    liveness_timeout: Option<Duration>,
    restart: u64,
    max_restarts: Option<u64>,
    settings: Vec<Setting>,
}

impl Launch {
    /// The variables of this project that belong to a launch, beside torchrun's:
    /// [`from_env`](Self::from_env) reads them all but `ACCEL_FAULTS`, which
    /// `burn-accelerate-fault` reads, and [`SET_BY_LAUNCHER`](Self::SET_BY_LAUNCHER).
    pub const VARIABLES: [&'static str; 11] = [
        env::FAULTS.name,
        env::INSECURE.name,
        env::JOB.name,
        env::LIVENESS_TIMEOUT.name,
        env::MAX_RESTARTS.name,
        env::PORT.name,
        env::RESTART.name,
        env::SET_BY_LAUNCHER.name,
        env::STORE.name,
        env::TOKEN_FILE.name,
        env::TRANSPORT.name,
    ];

    /// The variable in which `accel-launch` lists the names of the `ACCEL_…` variables that it has set itself,
    /// separated by commas.
    ///
    /// An `ACCEL_…` variable that a program does not know is misspelt, and an error, unless it is listed here:
    /// then the launcher is newer than the program, which ignores the variable.
    ///
    /// ```
    /// use accelerator_collective::Launch;
    ///
    /// assert_eq!(Launch::SET_BY_LAUNCHER, "ACCEL_SET_BY_LAUNCHER");
    /// ```
    pub const SET_BY_LAUNCHER: &'static str = env::SET_BY_LAUNCHER.name;

    /// A launch that the program describes itself.
    ///
    /// ```
    /// use accelerator_collective::{Launch, Rendezvous, Topology};
    ///
    /// # fn main() -> accelerator_collective::Result<()> {
    /// let launch = Launch::new(Topology::new(1, 2)?, Rendezvous::new("127.0.0.1", 29_500));
    /// assert_eq!(launch.topology.rank(), 1);
    /// # Ok(())
    /// # }
    /// ```
    pub fn new(topology: Topology, rendezvous: Rendezvous) -> Self {
        Self {
            topology,
            rendezvous: Some(rendezvous),
            ..Self::single()
        }
    }

    /// A world of one.
    pub fn single() -> Self {
        Self {
            topology: Topology::single(),
            rendezvous: None,
            transport: TransportKind::Auto,
            liveness_timeout: None,
            restart: 0,
            max_restarts: None,
            settings: Vec::new(),
        }
    }

    /// Reads the environment of this process.
    ///
    /// ```
    /// use accelerator_collective::Launch;
    ///
    /// # fn main() -> accelerator_collective::Result<()> {
    /// // Nothing has launched this process.
    /// let launch = Launch::from_env()?;
    /// assert_eq!(launch.topology, Launch::single().topology);
    /// assert!(launch.rendezvous.is_none());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// A topology error that names the variable, what it holds and what was expected.
    pub fn from_env() -> Result<Self> {
        // A value that is not Unicode cannot be any of the valid ones; the lossy text shows it.
        Self::from_vars(|name| Some(variable(name)?.to_string_lossy().into_owned()))
    }

    /// Reads variables through `lookup`, as [`from_env`](Self::from_env) reads the environment. One that
    /// is empty counts as not set.
    ///
    /// # Errors
    ///
    /// A topology error that names the variable, what it holds and what was expected.
    pub fn from_vars(lookup: impl Fn(&str) -> Option<String>) -> Result<Self> {
        Reader {
            lookup,
            settings: Vec::new(),
        }
        .launch()
    }

    /// After how long without a heartbeat a rank counts as lost, where the environment says
    /// (`ACCEL_LIVENESS_TIMEOUT`, in seconds).
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use accelerator_collective::Launch;
    ///
    /// # fn main() -> accelerator_collective::Result<()> {
    /// let set = |name: &str| (name == "ACCEL_LIVENESS_TIMEOUT").then(|| "1.5".to_owned());
    /// assert_eq!(Launch::from_vars(set)?.liveness_timeout(), Some(Duration::from_millis(1500)));
    /// assert_eq!(Launch::from_vars(|_| None)?.liveness_timeout(), None);
    /// # Ok(())
    /// # }
    /// ```
    pub fn liveness_timeout(&self) -> Option<Duration> {
        self.liveness_timeout
    }

    /// How often the launcher has restarted this job (`ACCEL_RESTART`); 0 the first time.
    pub fn restart(&self) -> u64 {
        self.restart
    }

    /// How often the launcher restarts this job at most (`ACCEL_MAX_RESTARTS`); `None` without
    /// a launcher that restarts.
    pub fn max_restarts(&self) -> Option<u64> {
        self.max_restarts
    }

    /// Every setting with its value and where it came from, in a fixed order.
    pub fn settings(&self) -> &[Setting] {
        &self.settings
    }
}

/// One setting of a launch: what it is called, what it is, and who said so.
///
/// ```
/// use accelerator_collective::{Launch, Origin};
///
/// # fn main() -> accelerator_collective::Result<()> {
/// let launch = Launch::from_vars(|name| (name == "ACCEL_RESTART").then(|| "2".to_owned()))?;
/// let restart = launch.settings().iter().find(|setting| setting.name == "restart").unwrap();
/// assert_eq!((&*restart.value, restart.origin), ("2", Origin::Variable("ACCEL_RESTART")));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct Setting {
    /// The name, such as `world size`.
    pub name: &'static str,
    /// The value as text.
    pub value: String,
    /// Where the value came from.
    pub origin: Origin,
}

/// Where a setting came from.
///
/// ```
/// use accelerator_collective::{Launch, Origin};
///
/// # fn main() -> accelerator_collective::Result<()> {
/// let launch = Launch::from_vars(|name| (name == "ACCEL_RESTART").then(|| "2".to_owned()))?;
/// // What somebody has said, and what is so by default or follows from the rest.
/// let (said, known): (Vec<_>, Vec<_>) = launch
///     .settings()
///     .iter()
///     .map(|setting| setting.origin)
///     .partition(|origin| !matches!(origin, Origin::Default | Origin::Derived));
/// assert_eq!(said, [Origin::Variable("ACCEL_RESTART")]);
/// assert!(known.len() > 3);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum Origin {
    /// Nobody said anything: the default.
    Default,
    /// It follows from other settings.
    Derived,
    /// The environment variable of this name.
    Variable(&'static str),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::Derived => f.write_str("derived"),
            Self::Variable(name) => f.write_str(name),
        }
    }
}

/// Refuses to take this process for one that is alone where another launcher has started several, as
/// [`Launch::from_vars`] does; for a launcher, which gives its ranks their places itself.
///
/// # Errors
///
/// A topology error that names the launcher, its variables and what to do.
///
/// ```
/// use accelerator_collective::check_alone;
///
/// let of = |vars: &'static [(&str, &str)]| {
///     move |name: &str| vars.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
/// };
/// assert!(check_alone(of(&[])).is_ok());
/// assert!(check_alone(of(&[("PMI_SIZE", "2"), ("PMI_RANK", "0")])).unwrap_err().is_topology());
/// // It was given a place.
/// assert!(check_alone(of(&[("PMI_SIZE", "2"), ("RANK", "0")])).is_ok());
/// ```
pub fn check_alone(lookup: impl Fn(&str) -> Option<String>) -> Result<()> {
    let reader = Reader {
        lookup,
        settings: Vec::new(),
    };
    let mut places = sources::supported();
    let has_place = places.any(|place| {
        [place.rank, place.world_size]
            .iter()
            .any(|name| reader.text(name).is_some())
    });
    match has_place {
        true => Ok(()),
        false => reader.check_alone(),
    }
}

struct Reader<F> {
    lookup: F,
    settings: Vec<Setting>,
}

impl<F: Fn(&str) -> Option<String>> Reader<F> {
    fn launch(mut self) -> Result<Launch> {
        let (topology, place) = self.topology()?;
        let transport = self.transport()?;
        let rendezvous = if topology.world_size() > 1 {
            Some(self.rendezvous()?)
        } else {
            None
        };
        let topology = self.with_local(topology, place, rendezvous.as_ref())?;
        let liveness_timeout = self.liveness_timeout()?;
        let restart = self.count("restart", env::RESTART.name)?.unwrap_or(0);
        let max_restarts = self.count("most restarts", env::MAX_RESTARTS.name)?;
        Ok(Launch {
            topology,
            rendezvous,
            transport,
            liveness_timeout,
            restart,
            max_restarts,
            settings: self.settings,
        })
    }

    /// The rank and the world size, and the variables that say so.
    fn topology(&mut self) -> Result<(Topology, Option<&'static PlaceVariables>)> {
        for place in sources::supported() {
            if let Some(topology) = self.topology_by(place)? {
                return Ok((topology, Some(place)));
            }
        }
        self.check_alone()?;
        self.note("rank", 0, Origin::Default);
        self.note("world size", 1, Origin::Default);
        Ok((Topology::single(), None))
    }

    fn topology_by(&mut self, place: &'static PlaceVariables) -> Result<Option<Topology>> {
        let [rank_name, size_name] = [place.rank, place.world_size];
        let (rank, world_size) = match (self.number(rank_name)?, self.number(size_name)?) {
            (Some(rank), Some(world_size)) => (rank, world_size),
            (None, None) => {
                for name in [place.local_rank, place.local_world_size] {
                    if let Some(value) = self.number(name)? {
                        return Err(invalid(format!(
                            "{name} is {value}, but neither {rank_name} nor {size_name} is set; set all \
                             of them, or none for a single process"
                        )));
                    }
                }
                return Ok(None);
            }
            (Some(rank), None) => {
                return Err(invalid(format!(
                    "{rank_name} is {rank}, but {size_name} is not set; set both, or neither for a single \
                     process"
                )));
            }
            (None, Some(world_size)) => {
                return Err(invalid(format!(
                    "{size_name} is {world_size}, but {rank_name} is not set; set both, or neither for a \
                     single process"
                )));
            }
        };
        if world_size == 0 {
            return Err(invalid(format!(
                "{size_name} is \"0\"; expected the number of processes of the job, at least 1"
            )));
        }
        if rank >= world_size {
            return Err(invalid(format!(
                "{rank_name} is {rank}, but {size_name} is {world_size}; expected a rank from 0 to {}",
                world_size - 1
            )));
        }
        self.note("rank", rank, Origin::Variable(rank_name));
        self.note("world size", world_size, Origin::Variable(size_name));
        Topology::new(rank, world_size).map(Some)
    }

    /// Adds the place on this host, which `place` tells where the launcher says it.
    fn with_local(
        &mut self,
        topology: Topology,
        place: Option<&'static PlaceVariables>,
        rendezvous: Option<&Rendezvous>,
    ) -> Result<Topology> {
        let local = match place {
            Some(place) => self.local(place)?,
            None => None,
        };
        let Some((place, rank, size)) = local else {
            // Nothing says how the ranks are spread over hosts. Ranks that meet on the loopback interface
            // share a host; others find out when they meet.
            if rendezvous.is_none_or(Rendezvous::is_loopback) {
                self.note("local rank", topology.rank(), Origin::Derived);
                self.note("local world size", topology.world_size(), Origin::Derived);
                return Ok(topology);
            }
            for name in ["local rank", "local world size"] {
                self.note(name, "found when the ranks meet", Origin::Derived);
            }
            return Ok(topology.without_local());
        };
        let [rank_name, size_name] = [place.local_rank, place.local_world_size];
        if size == 0 || size > topology.world_size() {
            return Err(invalid(format!(
                "{size_name} is {size}, but {world} is {}; expected the number of \
                 processes on this host, from 1 to {world}",
                topology.world_size(),
                world = place.world_size
            )));
        }
        if rank >= size {
            return Err(invalid(format!(
                "{rank_name} is {rank}, but {size_name} is {size}; expected a local rank from \
                 0 to {}",
                size - 1
            )));
        }
        if rank > topology.rank() {
            return Err(invalid(format!(
                "{rank_name} is {rank}, but {global} is {}; a host's ranks are counted from the job's, \
                 so {rank_name} is never above {global}",
                topology.rank(),
                global = place.rank
            )));
        }
        self.note("local rank", rank, Origin::Variable(rank_name));
        self.note("local world size", size, Origin::Variable(size_name));
        topology.with_local(rank, size)
    }

    fn local(
        &self,
        place: &'static PlaceVariables,
    ) -> Result<Option<(&'static PlaceVariables, usize, usize)>> {
        let [rank_name, size_name] = [place.local_rank, place.local_world_size];
        match (self.number(rank_name)?, self.number(size_name)?) {
            (Some(rank), Some(size)) => Ok(Some((place, rank, size))),
            (None, None) => Ok(None),
            (Some(rank), None) => Err(invalid(format!(
                "{rank_name} is {rank}, but {size_name} is not set; set both or neither"
            ))),
            (None, Some(size)) => Err(invalid(format!(
                "{size_name} is {size}, but {rank_name} is not set; set both or neither"
            ))),
        }
    }

    fn rendezvous(&mut self) -> Result<Rendezvous> {
        let Some(host) = self.text("MASTER_ADDR") else {
            return Err(invalid(
                "WORLD_SIZE is above 1, but MASTER_ADDR is not set; set it to the host where the \
                 ranks meet, 127.0.0.1 for processes of one host",
            ));
        };
        if host.trim().is_empty() {
            return Err(invalid(
                "MASTER_ADDR is empty; expected a host name or an IP address",
            ));
        }
        self.note("store host", &host, Origin::Variable("MASTER_ADDR"));
        let port = self.port()?;
        let mut rendezvous = Rendezvous::new(host.trim(), port);
        rendezvous = rendezvous.with_store(self.store()?);
        for name in [env::JOB.name, "TORCHELASTIC_RUN_ID"] {
            if let Some(job) = self.text(name) {
                self.note("job", &job, Origin::Variable(name));
                rendezvous = rendezvous.with_job(job);
                break;
            }
        }
        if let Some(path) = self.text(env::TOKEN_FILE.name) {
            self.note("token file", &path, Origin::Variable(env::TOKEN_FILE.name));
            rendezvous = rendezvous.with_token_file(path);
        }
        if Security::from_vars(&self.lookup)? == Security::Waived {
            self.note(
                Security::VARIABLE,
                "1",
                Origin::Variable(Security::VARIABLE),
            );
            rendezvous = rendezvous.without_security();
        }
        Ok(rendezvous)
    }

    fn port(&mut self) -> Result<u16> {
        if let Some(port) = self.port_number(env::PORT.name)? {
            self.note("store port", port, Origin::Variable(env::PORT.name));
            return Ok(port);
        }
        let Some(port) = self.port_number("MASTER_PORT")? else {
            return Err(invalid(
                "WORLD_SIZE is above 1, but neither ACCEL_PORT nor MASTER_PORT is set; set one to \
                 the port where the ranks meet",
            ));
        };
        if !self.switch("TORCHELASTIC_USE_AGENT_STORE")? {
            self.note("store port", port, Origin::Variable("MASTER_PORT"));
            return Ok(port);
        }
        let Some(next) = port.checked_add(1) else {
            return Err(invalid(
                "MASTER_PORT is 65535, on which torchrun's agent listens, and there is no port \
                 above it for the store; set ACCEL_PORT",
            ));
        };
        self.note("store port", next, Origin::Derived);
        Ok(next)
    }

    fn store(&mut self) -> Result<StoreHost> {
        let (store, origin) = match self.text(env::STORE.name) {
            None => (StoreHost::Rank0, Origin::Default),
            Some(value) => match value.as_str() {
                "launcher" => (StoreHost::Launcher, Origin::Variable(env::STORE.name)),
                "rank0" => (StoreHost::Rank0, Origin::Variable(env::STORE.name)),
                _ => {
                    return Err(invalid(format!(
                        "ACCEL_STORE is {value:?}; expected {}",
                        env::STORE.grammar
                    )));
                }
            },
        };
        self.note("store", store, origin);
        Ok(store)
    }

    fn transport(&mut self) -> Result<TransportKind> {
        let Some(value) = self.text(env::TRANSPORT.name) else {
            self.note("transport", TransportKind::Auto, Origin::Default);
            return Ok(TransportKind::Auto);
        };
        let transport = TransportKind::from_str(&value)
            .map_err(|error| invalid(format!("ACCEL_TRANSPORT: {error}")))?;
        self.note(
            "transport",
            transport,
            Origin::Variable(env::TRANSPORT.name),
        );
        Ok(transport)
    }

    fn liveness_timeout(&mut self) -> Result<Option<Duration>> {
        const NAME: &str = env::LIVENESS_TIMEOUT.name;
        let Some(value) = self.text(NAME) else {
            return Ok(None);
        };
        let Some(timeout) = env::seconds(&value) else {
            return Err(invalid(format!(
                "{NAME} is {value:?}; expected {}",
                env::LIVENESS_TIMEOUT.grammar
            )));
        };
        let text = format!("{} s", timeout.as_secs_f64());
        self.note("liveness timeout", text, Origin::Variable(NAME));
        Ok(Some(timeout))
    }

    fn count(&mut self, what: &'static str, name: &'static str) -> Result<Option<u64>> {
        let count = self.number(name)?.map(|count| count as u64);
        if let Some(count) = count {
            self.note(what, count, Origin::Variable(name));
        }
        Ok(count)
    }

    fn text(&self, name: &str) -> Option<String> {
        (self.lookup)(name).filter(|value| !value.is_empty())
    }

    fn number(&self, name: &str) -> Result<Option<usize>> {
        let Some(value) = self.text(name) else {
            return Ok(None);
        };
        match env::number(&value) {
            Some(number) => Ok(Some(number)),
            None => Err(invalid(format!(
                "{name} is {value:?}; expected {}",
                env::Grammar::Number
            ))),
        }
    }

    fn port_number(&self, name: &str) -> Result<Option<u16>> {
        let Some(value) = self.text(name) else {
            return Ok(None);
        };
        match env::port(&value) {
            Some(port) => Ok(Some(port)),
            None => Err(invalid(format!(
                "{name} is {value:?}; expected {}",
                env::Grammar::Port
            ))),
        }
    }

    fn switch(&mut self, name: &'static str) -> Result<bool> {
        let Some(value) = self.text(name) else {
            return Ok(false);
        };
        let on = is_on(name, &value)?;
        if on {
            self.note(name, "1", Origin::Variable(name));
        }
        Ok(on)
    }

    fn note(&mut self, name: &'static str, value: impl fmt::Display, origin: Origin) {
        self.settings.push(Setting {
            name,
            value: value.to_string(),
            origin,
        });
    }
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(Kind::Topology, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(vars: &[(&str, &str)]) -> Result<Launch> {
        Launch::from_vars(|name| {
            vars.iter()
                .find(|(key, _)| *key == name)
                .map(|(_, value)| (*value).to_owned())
        })
    }

    const JOB: [(&str, &str); 4] = [
        ("RANK", "1"),
        ("WORLD_SIZE", "4"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "29500"),
    ];

    fn job(more: &[(&'static str, &'static str)]) -> Result<Launch> {
        let mut vars = JOB.to_vec();
        for (name, value) in more {
            vars.retain(|(key, _)| key != name);
            if *value != "(unset)" {
                vars.push((name, value));
            }
        }
        launch(&vars)
    }

    #[test]
    fn nothing_set_is_a_world_of_one() {
        let launch = launch(&[]).unwrap();
        assert_eq!(launch.topology, Topology::single());
        assert!(launch.rendezvous.is_none());
        assert!(
            launch
                .settings()
                .iter()
                .all(|x| x.origin != Origin::Variable("RANK"))
        );
    }

    #[test]
    fn a_variable_that_is_empty_is_not_set() {
        let names = Launch::VARIABLES.into_iter().chain([
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
            "MASTER_ADDR",
            "MASTER_PORT",
            "TORCHELASTIC_RUN_ID",
            "TORCHELASTIC_USE_AGENT_STORE",
        ]);
        let empty: Vec<_> = names.map(|name| (name, "")).collect();
        let settings = |launch: Launch| launch.settings().to_vec();
        let (empty, unset) = (launch(&empty).unwrap(), launch(&[]).unwrap());
        assert_eq!(settings(empty), settings(unset));
        let others = [
            ("LOCAL_RANK", ""),
            ("ACCEL_PORT", ""),
            ("ACCEL_STORE", ""),
            ("ACCEL_JOB", ""),
        ];
        assert_eq!(settings(job(&others).unwrap()), settings(job(&[]).unwrap()));
        let error = job(&[("WORLD_SIZE", "")]).unwrap_err().to_string();
        assert!(error.contains("WORLD_SIZE is not set"), "{error}");
    }

    #[test]
    fn a_complete_launch_is_read_with_its_origins() {
        let launch = job(&[("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2")]).unwrap();
        assert_eq!(launch.topology.to_string(), "rank 1 of 4 (local 1 of 2)");
        let rendezvous = launch.rendezvous.as_ref().unwrap();
        assert_eq!(rendezvous.to_string(), "127.0.0.1:29500");
        let origin = |name| {
            let setting = launch.settings().iter().find(|x| x.name == name).unwrap();
            (setting.value.clone(), setting.origin)
        };
        assert_eq!(origin("rank"), ("1".to_owned(), Origin::Variable("RANK")));
        assert_eq!(
            origin("store port"),
            ("29500".to_owned(), Origin::Variable("MASTER_PORT"))
        );
        assert_eq!(origin("store"), ("rank0".to_owned(), Origin::Default));
    }

    #[test]
    fn restarts_and_liveness_are_read() {
        let first = job(&[]).unwrap();
        assert_eq!((first.restart(), first.max_restarts()), (0, None));
        assert_eq!(first.liveness_timeout(), None);
        let later = job(&[
            ("ACCEL_RESTART", "2"),
            ("ACCEL_MAX_RESTARTS", "3"),
            ("ACCEL_LIVENESS_TIMEOUT", "0.25"),
        ]);
        let later = later.unwrap();
        assert_eq!((later.restart(), later.max_restarts()), (2, Some(3)));
        assert_eq!(later.liveness_timeout(), Some(Duration::from_millis(250)));
        let settings = later.settings();
        let origin = Origin::Variable("ACCEL_LIVENESS_TIMEOUT");
        assert!(
            settings
                .iter()
                .any(|x| x.origin == origin && x.value == "0.25 s")
        );
    }

    #[test]
    fn the_store_keeps_clear_of_torchruns_agent() {
        let port = |launch: Launch| launch.rendezvous.unwrap().port();
        let torchrun = ("TORCHELASTIC_USE_AGENT_STORE", "True");
        assert_eq!(port(job(&[torchrun]).unwrap()), 29501);
        assert_eq!(
            port(job(&[torchrun, ("ACCEL_PORT", "7000")]).unwrap()),
            7000
        );
        assert_eq!(
            port(job(&[("TORCHELASTIC_USE_AGENT_STORE", "False")]).unwrap()),
            29500
        );
        assert!(job(&[torchrun, ("MASTER_PORT", "65535")]).is_err());
    }

    #[test]
    fn the_place_on_the_host_is_derived_or_found_later() {
        let near = job(&[]).unwrap();
        assert_eq!(near.topology.to_string(), "rank 1 of 4 (local 1 of 4)");
        let far = job(&[("MASTER_ADDR", "10.0.0.1")]).unwrap();
        assert!(!far.topology.is_local_known());
        let settings = far.settings().iter();
        let local = settings.filter(|x| x.name.starts_with("local "));
        assert!(
            local.eq(far
                .settings()
                .iter()
                .filter(|x| x.value == "found when the ranks meet"))
        );
    }

    #[test]
    fn what_is_malformed_or_contradictory_is_named() {
        type Vars = [(&'static str, &'static str)];
        let cases: [(&Vars, &[&str]); 26] = [
            (
                &[("RANK", "banana")],
                &["RANK", "\"banana\"", "whole number"],
            ),
            (&[("RANK", " ")], &["RANK", "\" \""]),
            (&[("RANK", "-1")], &["RANK", "\"-1\""]),
            (
                &[("RANK", "4")],
                &["RANK is 4", "WORLD_SIZE is 4", "0 to 3"],
            ),
            (
                &[("RANK", "(unset)")],
                &["WORLD_SIZE is 4", "RANK is not set"],
            ),
            (
                &[("WORLD_SIZE", "(unset)")],
                &["RANK is 1", "WORLD_SIZE is not set"],
            ),
            (&[("WORLD_SIZE", "0")], &["WORLD_SIZE", "at least 1"]),
            (&[("WORLD_SIZE", "two")], &["WORLD_SIZE", "\"two\""]),
            (&[("MASTER_ADDR", "(unset)")], &["MASTER_ADDR is not set"]),
            (&[("MASTER_ADDR", " ")], &["MASTER_ADDR is empty"]),
            (
                &[("MASTER_PORT", "(unset)")],
                &["ACCEL_PORT", "MASTER_PORT"],
            ),
            (&[("MASTER_PORT", "0")], &["MASTER_PORT", "1 to 65535"]),
            (&[("ACCEL_PORT", "70000")], &["ACCEL_PORT", "\"70000\""]),
            (
                &[("LOCAL_RANK", "1")],
                &["LOCAL_RANK is 1", "LOCAL_WORLD_SIZE"],
            ),
            (
                &[("LOCAL_RANK", "2"), ("LOCAL_WORLD_SIZE", "2")],
                &["LOCAL_RANK is 2", "0 to 1"],
            ),
            (
                &[("LOCAL_RANK", "2"), ("LOCAL_WORLD_SIZE", "3")],
                &["LOCAL_RANK is 2", "RANK is 1"],
            ),
            (
                &[("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "5")],
                &["LOCAL_WORLD_SIZE is 5"],
            ),
            (&[("ACCEL_STORE", "rank1")], &["ACCEL_STORE", "\"rank1\""]),
            (
                &[("ACCEL_TRANSPORT", "mpi")],
                &["ACCEL_TRANSPORT", "\"mpi\""],
            ),
            (
                &[("ACCEL_INSECURE", "maybe")],
                &["ACCEL_INSECURE", "\"maybe\""],
            ),
            (
                &[("ACCEL_LIVENESS_TIMEOUT", "0")],
                &["ACCEL_LIVENESS_TIMEOUT", "\"0\"", "from 0.1"],
            ),
            (
                &[("ACCEL_LIVENESS_TIMEOUT", "0.001")],
                &["ACCEL_LIVENESS_TIMEOUT", "\"0.001\""],
            ),
            (
                &[("ACCEL_LIVENESS_TIMEOUT", "-1")],
                &["ACCEL_LIVENESS_TIMEOUT", "\"-1\""],
            ),
            (
                &[("ACCEL_LIVENESS_TIMEOUT", "5s")],
                &["ACCEL_LIVENESS_TIMEOUT", "\"5s\""],
            ),
            (&[("ACCEL_RESTART", "x")], &["ACCEL_RESTART", "\"x\""]),
            (
                &[("ACCEL_MAX_RESTARTS", "-1")],
                &["ACCEL_MAX_RESTARTS", "\"-1\""],
            ),
        ];
        for (vars, parts) in cases {
            let error = job(vars).unwrap_err();
            assert!(error.is_topology(), "{vars:?}");
            for part in parts {
                assert!(error.to_string().contains(part), "{vars:?}: {error}");
            }
        }
        let error = launch(&[("LOCAL_RANK", "1")]).unwrap_err();
        assert!(error.to_string().contains("LOCAL_RANK is 1"), "{error}");
    }
}
