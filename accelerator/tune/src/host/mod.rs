#![doc = include_str!("README.md")]

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use accelerator_collective::internal::{PendingHandshakes, Token, listen_everywhere};
use accelerator_collective::{GroupOptions, Launch, ProcessGroup};
use accelerator_host::machine::host_name;
use rustix::process::Signal;

use crate::error::{Error, Kind, Result};
use crate::trial::protocol::accept_one;
pub(crate) use agent_link::HostResources;
use agent_link::{AgentLink, Invitation};
use process::{LocalProcess, Output, Process, ProcessLog};
pub(crate) use process::{ProcessProgram, ProcessSpec};

mod agent;
mod agent_link;
mod process;

/// The hosts on which a search starts processes: this one, and those whose agents have joined.
pub(crate) struct Hosts {
    name: String,
    resources: HostResources,
    agents: Vec<AgentLink>,
    /// The token by which the processes of the search recognize one another.
    token: Token,
    /// The address at which processes of other hosts reach this one.
    address: Option<String>,
}

#[derive(Debug)]
pub(crate) struct TrialProcess {
    process: Box<dyn Process>,
    log: ProcessLog,
}

impl Hosts {
    /// The hosts of the job that this process is rank 0 of, which is this one alone where there is no job. In the job's other
    /// ranks it serves the search until that ends, and exits.
    ///
    /// `folder` is the search's, which all hosts have to see.
    pub(crate) fn join(folder: &Path) -> Result<Self> {
        let launch = Launch::from_env().map_err(of_job)?;
        let name = host_name();
        if launch.topology.world_size() == 1 {
            return Ok(Self {
                name,
                resources: HostResources::of_this_process(0, 1),
                agents: Vec::new(),
                token: Token::generate().map_err(of_job)?,
                address: None,
            });
        }
        let group = ProcessGroup::connect(&launch, &GroupOptions::new()).map_err(of_job)?;
        let place = group.topology();
        let token = match group.token(PURPOSE) {
            Some(token) => token,
            // The job has shrunk to a single rank.
            None => Token::generate().map_err(of_job)?,
        };
        let resources =
            HostResources::of_this_process(place.local_rank(), place.local_world_size());
        if !place.is_main() {
            let invitation = group
                .broadcast_object::<Invitation>(None, 0)
                .map_err(of_job)?;
            group.close().map_err(of_job)?;
            agent::serve(&invitation, &token, place.rank(), resources);
        }
        let address = match &launch.rendezvous {
            Some(store) => store.host().to_owned(),
            None => name.clone(),
        };
        let listener = listen_everywhere(0)?;
        let mark = SharedMark::make(folder)?;
        let invitation = Invitation {
            address: at_port(&address, listener.local_addr()?.port()),
            mark: mark.0.clone(),
        };
        group
            .broadcast_object(Some(&invitation), 0)
            .map_err(of_job)?;
        let count = group.world_size() - 1;
        group.close().map_err(of_job)?;
        Ok(Self {
            name,
            resources,
            agents: accept(&listener, &token, count)?,
            token,
            address: Some(address),
        })
    }

    pub(crate) fn resources(&self) -> Vec<&HostResources> {
        let agents = self.agents.iter().map(|agent| &agent.resources);
        std::iter::once(&self.resources).chain(agents).collect()
    }

    /// Returns the address at which workers of other hosts reach this one; `None` if there are no other hosts.
    pub(crate) fn address(&self) -> Option<&str> {
        self.address.as_deref()
    }

    pub(crate) fn token(&self) -> &Token {
        &self.token
    }

    pub(crate) fn name(&self, host: usize) -> &str {
        match host {
            0 => &self.name,
            host => &self.agents[host - 1].name,
        }
    }

    /// Starts a process on a host, and tells when it has ended.
    pub(crate) fn start(
        &self,
        host: usize,
        spec: &ProcessSpec,
        number: u32,
        exited: impl FnOnce() + Send + 'static,
    ) -> Result<(TrialProcess, Option<Output>)> {
        let (process, output): (Box<dyn Process>, _) = match host {
            0 => {
                let mut process = LocalProcess::spawn(spec, &self.token)?;
                process.watch(exited)?;
                let output = process.take_output();
                let output = output.map(|output| Box::new(output) as Output);
                (Box::new(process), output)
            }
            host => {
                let agent = &self.agents[host - 1];
                let (process, output) = agent.start(number, spec, Box::new(exited))?;
                (Box::new(process), output)
            }
        };
        let log = ProcessLog::new(&spec.log);
        Ok((TrialProcess { process, log }, output))
    }

    pub(crate) fn check(&self) -> Result<()> {
        self.agents.iter().try_for_each(AgentLink::check)
    }
}

impl TrialProcess {
    pub(crate) fn id(&self) -> u32 {
        self.process.id()
    }

    pub(crate) fn terminate(&self) {
        self.process.signal(Signal::TERM);
    }

    /// Ends it, and what it has started.
    pub(crate) fn kill(&self) {
        self.process.signal(Signal::KILL);
    }

    pub(crate) fn reap(&mut self) -> Option<ExitStatus> {
        self.process.reap()
    }

    /// Marks the end of the log: what it writes from here on is the next trial's.
    pub(crate) fn mark_log(&mut self) {
        self.log.mark();
    }

    /// Describes its failure, as far as it is known: how it ended, and its last lines.
    pub(crate) fn failure(&self, status: Option<ExitStatus>) -> String {
        let how = status.map_or_else(
            || "its process ended".to_owned(),
            |status| format!("its process ended: {status}"),
        );
        let lines = self.log.last_lines();
        match lines.is_empty() {
            true => how,
            false => format!("{how}; its last lines:\n{lines}"),
        }
    }
}

/// Waits for the agents of all other ranks. Each connection has its own thread, so other connections cannot delay an
/// agent.
fn accept(listener: &TcpListener, token: &Token, count: usize) -> Result<Vec<AgentLink>> {
    listener.set_nonblocking(true)?;
    let until = Instant::now() + JOIN;
    let pending = PendingHandshakes::logged(count + 64);
    let (joined, arrivals) = channel();
    let mut agents = Vec::new();
    loop {
        for agent in arrivals.try_iter() {
            agents.extend(agent?);
        }
        if agents.len() >= count {
            break;
        }
        if Instant::now() > until {
            return Err(Error::new(
                Kind::Io,
                format!(
                    "{} of {count} agents have joined the search within {} s; the others reach this host no more, or \
                     their processes do not come to the search",
                    agents.len(),
                    JOIN.as_secs()
                ),
            ));
        }
        let (token, joined) = (token.clone(), joined.clone());
        let pending = Arc::clone(&pending);
        accept_one(listener, "agent", move |stream| {
            // Nobody listens once all have joined.
            let _ = joined.send(AgentLink::greet(stream, &token, &pending));
        });
    }
    agents.sort_by_key(|agent| agent.rank);
    Ok(agents)
}

/// A file by which agents see that the search's folder is theirs, too.
struct SharedMark(PathBuf);

impl SharedMark {
    fn make(folder: &Path) -> Result<Self> {
        let folder = std::path::absolute(folder)?;
        fs::create_dir_all(&folder).map_err(|error| Error::io("make", &folder, error))?;
        let random = Token::nonce().map_err(of_job)?;
        let random: String = random[..16]
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        let path = folder.join(format!("hosts-{random}"));
        fs::write(&path, "").map_err(|error| Error::io("write", &path, error))?;
        Ok(Self(path))
    }
}

impl Drop for SharedMark {
    fn drop(&mut self) {
        // An empty file more is no harm.
        let _ = fs::remove_file(&self.0);
    }
}

fn of_job(error: accelerator_collective::Error) -> Error {
    Error::new(
        Kind::Io,
        format!("the hosts of the search do not meet: {error}"),
    )
    .with_source(error)
}

/// Joins a host and a port; an IPv6 address gets brackets.
pub(crate) fn at_port(host: &str, port: u16) -> String {
    match host.contains(':') && !host.starts_with('[') {
        true => format!("[{host}]:{port}"),
        false => format!("{host}:{port}"),
    }
}

const PURPOSE: &str = "hyperparameter search";

/// The time that agents have to connect, once their ranks have met the search's.
const JOIN: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use std::io::BufRead;
    use std::net::TcpStream;
    use std::thread;

    use super::*;
    use crate::host::agent_link::FromAgent;
    use crate::trial::protocol::{PeerRole, WorkerPlace, connect, send};

    #[test]
    fn idle_connections_keep_no_agent_out_and_no_message_holds_the_token() {
        let token = Token::generate().unwrap();
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let idle: Vec<_> = (0..100)
            .map(|_| TcpStream::connect(&address).unwrap())
            .collect();
        let place = WorkerPlace {
            address: address.clone(),
            worker: 3,
        };
        let known = token.clone();
        let agent = thread::spawn(move || {
            let (mut reader, stream) = connect(&address, &known, PeerRole::Agent, 1).unwrap();
            let resources = HostResources::default();
            send(&stream, &FromAgent::Joined { resources }).unwrap();
            let mut line = String::new();
            reader.read_line(&mut line).unwrap();
            send(&stream, &FromAgent::Started { pid: 1 }).unwrap();
            line
        });
        let agents = accept(&listener, &token, 1).unwrap();
        let spec = ProcessSpec {
            program: ProcessProgram::Worker(place),
            ranks: 1,
            threads: 1,
            cores: Vec::new(),
            gpus: Vec::new(),
            log: "log".into(),
        };
        agents[0].start(0, &spec, Box::new(|| {})).unwrap();
        let line = agent.join().unwrap();
        let secret = std::str::from_utf8(token.secret()).unwrap();
        let bytes = serde_json::to_string(token.secret()).unwrap();
        assert!(line.contains("\"worker\":3"), "{line}");
        assert!(!line.contains(secret) && !line.contains(&bytes), "{line}");
        drop(idle);
    }
}
