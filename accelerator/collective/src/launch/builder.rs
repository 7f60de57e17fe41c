//! Builds a launch from variables.

use std::{fmt, str::FromStr, time::Duration};

use accelerator_host as env;

use super::{
    Elastic, Launch, OnLoss,
    exchange::Exchange,
    place::{HostPlace, MeetingPlace, Place},
    reader::{LaunchReader, Origin, Setting},
    sources::{self, Found},
};
use crate::{
    error::{Error, Result},
    rendezvous::{Rendezvous, Security, StoreHost, WeakStoreClient},
    topology::{Topology, TransportKind},
};

impl Launch {
    /// Reads variables through `lookup`, as [`from_env`](Self::from_env) reads the environment. An
    /// empty one counts as not set. No process manager is contacted.
    ///
    /// # Errors
    ///
    /// A topology error that names the variable, its value and the values that were expected.
    pub fn from_vars(lookup: impl Fn(&str) -> Option<String>) -> Result<Self> {
        LaunchBuilder::new(LaunchReader(&lookup)).launch()
    }
}

pub(super) struct LaunchBuilder<'a> {
    vars: LaunchReader<'a>,
    settings: Vec<Setting>,
}

impl<'a> LaunchBuilder<'a> {
    pub(super) fn new(vars: LaunchReader<'a>) -> Self {
        Self {
            vars,
            settings: Vec::new(),
        }
    }

    pub(super) fn launch(mut self) -> Result<Launch> {
        let Found { place, noticed } = sources::find(self.vars)?;
        let topology = match &place {
            Some(place) => place.topology()?,
            None => Topology::single(),
        };
        let names = place.as_ref().map(|place| place.names);
        let [rank, size] = names.map_or([Origin::Default; 2], |names| {
            [names.rank, names.world_size].map(Origin::Variable)
        });
        self.note("rank", topology.rank(), rank);
        self.note("world size", topology.world_size(), size);
        let transport = self.transport()?;
        let source = place.as_ref().map(|place| place.source);
        let mut launch = Launch {
            transport,
            source,
            noticed,
            elastic: self.elastic()?,
            on_loss: self.on_loss()?,
            former_store: WeakStoreClient::default(),
            ..Launch::single()
        };
        if let Some(place) = place {
            let is_one = topology.world_size() == 1;
            launch.topology = match is_one {
                true => Topology::single(),
                false => topology,
            };
            if !launch.is_alone() {
                self.meeting(&mut launch, &place)?;
            }
            self.place_on_host(&mut launch, &place)?;
        } else {
            self.note("local rank", 0, Origin::Derived);
            self.note("local world size", 1, Origin::Derived);
        }
        launch.liveness_timeout = self.liveness_timeout()?;
        launch.restart = self.count("restart", env::RESTART.name)?.unwrap_or(0);
        launch.max_restarts = self.count("most restarts", env::MAX_RESTARTS.name)?;
        launch.settings = self.settings;
        Ok(launch)
    }

    /// Finds the place where the ranks meet: `MASTER_ADDR`, or the one that the launcher gives.
    fn meeting(&mut self, launch: &mut Launch, place: &Place) -> Result<()> {
        if let Some(host) = self.vars.text("MASTER_ADDR") {
            let host = host.trim();
            if host.is_empty() {
                return Err(Error::topology(
                    "MASTER_ADDR is empty; expected a host name or an IP address",
                ));
            }
            self.note("store host", host, Origin::Variable("MASTER_ADDR"));
            let Some(port) = self.port()? else {
                return Err(Error::topology(
                    "WORLD_SIZE is above 1, but neither ACCEL_PORT nor MASTER_PORT is set; set one to \
                     the port where the ranks meet",
                ));
            };
            let mut rendezvous = self.joining(Rendezvous::new(host, port), None)?;
            if self.is_own_pod(place, &rendezvous) {
                rendezvous = rendezvous.in_network();
            }
            launch.rendezvous = Some(rendezvous);
            return Ok(());
        }
        match &place.meeting {
            MeetingPlace::Unknown(why) => Err(Error::topology(format!(
                "{why}set MASTER_ADDR to the host where the ranks meet, 127.0.0.1 for processes of one host, and \
                 MASTER_PORT to a port that is free there, for every process"
            ))),
            MeetingPlace::Store(store) => {
                self.note("store host", &store.host, Origin::Derived);
                let port = match self.port()? {
                    Some(port) => port,
                    None => {
                        self.note("store port", store.port, Origin::Derived);
                        store.port
                    }
                };
                let rendezvous = Rendezvous::new(&store.host, port);
                let mut rendezvous = self.joining(rendezvous, Some(&store.job))?;
                if !rendezvous.is_loopback() {
                    // A host's own name may resolve to an address that no other host can reach.
                    rendezvous = rendezvous.in_network();
                }
                launch.rendezvous = Some(rendezvous);
                Ok(())
            }
            MeetingPlace::Exchanged(wire) => {
                let told = format!("told by rank 0 through {} when the ranks meet", wire.name());
                self.note("store host", told, Origin::Derived);
                let port = self.port()?.unwrap_or(0);
                launch.exchange = Some(Exchange {
                    wire: wire.clone(),
                    rendezvous: self.joining(Rendezvous::new("", port), None)?,
                    is_on_one_host: place.is_on_one_host(),
                });
                Ok(())
            }
        }
    }

    /// Finds the place on the host: as a variable gives it, or as it follows from the place where the ranks meet.
    /// Otherwise it is not known yet.
    fn place_on_host(&mut self, launch: &mut Launch, place: &Place) -> Result<()> {
        let names = place.names;
        if let HostPlace::RankAndSize(rank, size) = place.local {
            self.note("local rank", rank, self.origin(names.local_rank));
            self.note(
                "local world size",
                size,
                self.origin(names.local_world_size),
            );
            return Ok(());
        }
        if let HostPlace::Rank(rank) = place.local {
            launch.local_rank = Some(rank);
        }
        // Nothing says how the ranks are spread over hosts. Ranks that meet on the loopback interface
        // share a host; others find out when they meet.
        let topology = Topology::new(place.rank, place.world_size)?;
        let rendezvous = launch.rendezvous.as_ref();
        let is_one_host = topology.world_size() == 1
            || rendezvous.is_some_and(|store| store.is_loopback() && !store.is_in_network());
        if !is_one_host {
            for name in ["local rank", "local world size"] {
                self.note(name, "found when the ranks meet", Origin::Derived);
            }
            return Ok(());
        }
        launch.topology = topology;
        self.note("local rank", topology.rank(), Origin::Derived);
        self.note("local world size", topology.world_size(), Origin::Derived);
        match launch.local_rank {
            Some(told) if told != topology.rank() => Err(Error::topology(format!(
                "{} is {told}, but {} is not set, and all ranks meet on the loopback interface, so the local \
                 rank must be the rank, {}; set both or neither",
                names.local_rank,
                names.local_world_size,
                topology.rank()
            ))),
            _ => Ok(()),
        }
    }

    /// Returns `true` if a Kubernetes operator tells rank 0 that the store is on `localhost`; it gives the other pods
    /// the name of rank 0's pod.
    fn is_own_pod(&self, place: &Place, rendezvous: &Rendezvous) -> bool {
        place.rank == 0
            && matches!(place.local, HostPlace::Unknown)
            && rendezvous.is_loopback()
            && self.vars.is_set("KUBERNETES_SERVICE_HOST")
    }

    fn port(&mut self) -> Result<Option<u16>> {
        if let Some(port) = self.vars.port(env::PORT.name)? {
            self.note("store port", port, Origin::Variable(env::PORT.name));
            return Ok(Some(port));
        }
        let Some(port) = self.vars.port("MASTER_PORT")? else {
            return Ok(None);
        };
        if !self.switch("TORCHELASTIC_USE_AGENT_STORE")? {
            self.note("store port", port, Origin::Variable("MASTER_PORT"));
            return Ok(Some(port));
        }
        let Some(next) = port.checked_add(1) else {
            return Err(Error::topology(
                "MASTER_PORT is 65535, on which torchrun's agent listens, and there is no port \
                 above it for the store; set ACCEL_PORT",
            ));
        };
        self.note("store port", next, Origin::Derived);
        Ok(Some(next))
    }

    /// Completes a meeting from the variables: the store, the job's name (`derived` if none is set), and what ranks
    /// need to join.
    fn joining(&mut self, rendezvous: Rendezvous, derived: Option<&str>) -> Result<Rendezvous> {
        let mut rendezvous = rendezvous.with_store(self.store()?);
        let named = [env::JOB.name, "TORCHELASTIC_RUN_ID"]
            .into_iter()
            .find_map(|name| Some((self.vars.text(name)?, Origin::Variable(name))));
        let derived = derived.map(|job| (job.to_owned(), Origin::Derived));
        if let Some((job, origin)) = named.or(derived) {
            self.note("job", &job, origin);
            rendezvous = rendezvous.with_job(job);
        }
        if let Some(path) = self.vars.text(env::TOKEN_FILE.name) {
            self.note("token file", &path, Origin::Variable(env::TOKEN_FILE.name));
            rendezvous = rendezvous.with_token_file(path);
        }
        if let Some(name) = self.vars.text(env::NETWORK_INTERFACE.name) {
            let origin = Origin::Variable(env::NETWORK_INTERFACE.name);
            self.note("network interface", &name, origin);
            rendezvous = rendezvous.with_network_interface(name);
        }
        if Security::from_vars(|name| self.vars.text(name))? == Security::Waived {
            self.note(
                Security::VARIABLE,
                "1",
                Origin::Variable(Security::VARIABLE),
            );
            rendezvous = rendezvous.without_security();
        }
        Ok(rendezvous)
    }

    fn store(&mut self) -> Result<StoreHost> {
        let told = self.told(&env::STORE, |value| match value {
            "launcher" => Some(StoreHost::Launcher),
            "rank0" => Some(StoreHost::Rank0),
            _ => None,
        })?;
        let origin = told.map_or(Origin::Default, |_| Origin::Variable(env::STORE.name));
        let store = told.unwrap_or(StoreHost::Rank0);
        self.note("store", store, origin);
        Ok(store)
    }

    fn transport(&mut self) -> Result<TransportKind> {
        let Some(value) = self.vars.text(env::TRANSPORT.name) else {
            self.note("transport", TransportKind::Auto, Origin::Default);
            return Ok(TransportKind::Auto);
        };
        let transport = TransportKind::from_str(&value)
            .map_err(|error| Error::topology(format!("ACCEL_TRANSPORT: {error}")))?;
        self.note(
            "transport",
            transport,
            Origin::Variable(env::TRANSPORT.name),
        );
        Ok(transport)
    }

    fn elastic(&mut self) -> Result<Elastic> {
        let told = self.told(&env::ELASTIC, |value| match value {
            "running" => Some((Elastic::Running, "running")),
            "joining" => Some((Elastic::Joining, "joining")),
            _ => None,
        })?;
        let Some((elastic, word)) = told else {
            return Ok(Elastic::Fixed);
        };
        self.note("elastic", word, Origin::Variable(env::ELASTIC.name));
        Ok(elastic)
    }

    fn on_loss(&mut self) -> Result<OnLoss> {
        let told = self.told(&env::ON_LOSS, |value| match value {
            "continue" => Some((OnLoss::Continue, "continue")),
            env::SURVIVOR => Some((OnLoss::Survivor, env::SURVIVOR)),
            _ => None,
        })?;
        let Some((on_loss, word)) = told else {
            return Ok(OnLoss::End);
        };
        self.note("on loss", word, Origin::Variable(env::ON_LOSS.name));
        Ok(on_loss)
    }

    fn liveness_timeout(&mut self) -> Result<Option<Duration>> {
        let timeout = self.told(&env::LIVENESS_TIMEOUT, env::seconds)?;
        if let Some(timeout) = timeout {
            let text = format!("{} s", timeout.as_secs_f64());
            let origin = Origin::Variable(env::LIVENESS_TIMEOUT.name);
            self.note("liveness timeout", text, origin);
        }
        Ok(timeout)
    }

    /// Reads a variable by its grammar.
    fn told<T>(&self, variable: &env::Variable, read: fn(&str) -> Option<T>) -> Result<Option<T>> {
        self.vars.read(variable.name, variable.grammar, read)
    }

    fn count(&mut self, what: &'static str, name: &'static str) -> Result<Option<u64>> {
        let count = self.vars.number(name)?.map(|count| count as u64);
        if let Some(count) = count {
            self.note(what, count, Origin::Variable(name));
        }
        Ok(count)
    }

    fn switch(&mut self, name: &'static str) -> Result<bool> {
        let is_on = self.vars.switch(name)?;
        if is_on {
            self.note(name, "1", Origin::Variable(name));
        }
        Ok(is_on)
    }

    fn origin(&self, name: &'static str) -> Origin {
        match self.vars.is_set(name) {
            true => Origin::Variable(name),
            false => Origin::Derived,
        }
    }

    fn note(&mut self, name: &'static str, value: impl fmt::Display, origin: Origin) {
        self.settings.push(Setting {
            name,
            value: value.to_string(),
            origin,
        });
    }
}
