//! The supervisor of a local job: starts one agent per node, restarts agents that ask for it, and writes the state.

use std::fs::{File, OpenOptions};
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use accelerator_host::cli::{Error, Result, chain};
use rustix::net::{
    AddressFamily, SocketFlags, SocketType, bind, getsockname, socket_with, sockopt,
};
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use super::state::{LocalState, NodeState, POLL, ProcessIdentity};
use crate::engine::{TENSORBOARD_LOG, token_path, write_token};
use crate::job::{JobRecord, JobStatus, node_log};
use crate::output::now;
use crate::spec::{JobSpec, launcher_here};

/// The time that agents may take to end after a signal.
const GRACE: Duration = Duration::from_secs(45);
/// The pause between the end of an agent and its next start.
const RESTART_DELAY: Duration = Duration::from_millis(500);

/// The time in which writing the end of a job is attempted again.
const WRITE_LIMIT: Duration = Duration::from_secs(300);

/// Runs the job with this folder to its end.
///
/// # Errors
/// When the folder has no record, has another supervisor, or cannot be written.
pub(crate) fn supervise(folder: &Path) -> Result<()> {
    let failed = |what: &str| {
        let message = format!("{}: {what}", folder.display());
        move |error: io::Error| Error::system(message).with_source(error)
    };
    let record = crate::job::Records::record_in(folder)?;
    let supervisor = i32::try_from(std::process::id())
        .ok()
        .and_then(ProcessIdentity::of);
    let supervisor = supervisor
        .ok_or_else(|| Error::system("/proc does not show this process; it has to be mounted"))?;
    let lock = LocalState::lock(folder, &supervisor).map_err(failed("cannot be locked"))?;
    if lock.is_none() {
        return Err(Error::refused(format!(
            "{} has a supervisor already",
            folder.display()
        )));
    }
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&stop))
            .map_err(failed("signals cannot be watched"))?;
    }
    let mut job = LocalJob::start(&record, folder, stop)?;
    let done = job.run();
    if let Err(error) = &done
        && !job.state.status.is_final()
    {
        job.finish(JobStatus::Failed, Some(chain(error)));
        // The folder itself may not be writable.
        let _ = job.write();
    }
    // After an error, such as a state that could not be written, nobody else would end them.
    job.end(Signal::TERM);
    done
}

struct LocalJob<'a> {
    spec: &'a JobSpec,
    folder: &'a Path,
    endpoint: ReservedPort,
    agents: Vec<Agent>,
    tensorboard: Option<Child>,
    state: LocalState,
    stop: Arc<AtomicBool>,
    deadline: Option<Instant>,
}

struct Agent {
    process: Option<Child>,
    /// The time of its restart.
    due: Option<Instant>,
}

/// The consequence of an agent's end.
enum Next {
    Restart,
    /// Its part of the job is over.
    Over,
}

impl<'a> LocalJob<'a> {
    fn start(record: &'a JobRecord, folder: &'a Path, stop: Arc<AtomicBool>) -> Result<Self> {
        let spec = &record.spec;
        let nodes = spec.nodes.get();
        let mut job = Self {
            spec,
            folder,
            endpoint: ReservedPort::new()
                .map_err(|error| Error::system("no port is free").with_source(error))?,
            agents: Vec::new(),
            tensorboard: None,
            state: LocalState {
                status: JobStatus::Running,
                reason: None,
                started: now(),
                ended: None,
                nodes: vec![NodeState::default(); nodes],
            },
            stop,
            deadline: spec.time_limit.map(|limit| Instant::now() + limit),
        };
        write_token(folder)?;
        for node in 0..nodes {
            let process = job.start_agent(node);
            let process = process.inspect_err(|_| job.end(Signal::KILL))?;
            job.agents.push(Agent {
                process: Some(process),
                due: None,
            });
        }
        if spec.tensorboard {
            let started = tensorboard(spec, folder).inspect_err(|_| job.end(Signal::KILL))?;
            job.tensorboard = Some(started);
        }
        job.write().inspect_err(|_| job.end(Signal::KILL))?;
        Ok(job)
    }

    fn run(&mut self) -> Result<()> {
        let mut is_written = true;
        while self.state.status == JobStatus::Running || self.state.status == JobStatus::Restarting
        {
            thread::sleep(POLL);
            let changed = self.step()?;
            if self.stop.load(Ordering::Relaxed) {
                self.finish(JobStatus::Stopped, Some("stopped by its user".to_owned()));
            } else if self
                .deadline
                .is_some_and(|deadline| Instant::now() >= deadline)
            {
                self.finish(JobStatus::Failed, Some("its time limit is over".to_owned()));
            }
            if changed || self.state.status.is_final() || !is_written {
                is_written = self.write().is_ok();
            }
        }
        // Space may be freed on a disk that is full; nobody else knows the end of the job.
        let deadline = Instant::now() + WRITE_LIMIT;
        while !is_written && Instant::now() < deadline {
            thread::sleep(POLL);
            is_written = self.write().is_ok();
        }
        match is_written {
            true => Ok(()),
            false => self.write(),
        }
    }

    /// Polls the agents once, and returns true if something has changed.
    fn step(&mut self) -> Result<bool> {
        let mut changed = false;
        for node in 0..self.agents.len() {
            let ended = match &mut self.agents[node].process {
                Some(process) => process.try_wait().ok().flatten(),
                None => None,
            };
            if let Some(status) = ended {
                changed = true;
                self.agents[node].process = None;
                match self.agent_ended(node, status) {
                    Next::Restart => self.agents[node].due = Some(Instant::now() + RESTART_DELAY),
                    Next::Over => {}
                }
            }
            if self.agents[node]
                .due
                .is_some_and(|due| Instant::now() >= due)
            {
                changed = true;
                self.agents[node].due = None;
                let process = self.start_agent(node)?;
                self.agents[node].process = Some(process);
                self.state.status = JobStatus::Running;
            }
        }
        if self
            .agents
            .iter()
            .all(|agent| agent.process.is_none() && agent.due.is_none())
        {
            let is_success = self
                .state
                .nodes
                .iter()
                .all(|node| node.exit_code == Some(0));
            let status = if is_success {
                JobStatus::Succeeded
            } else {
                JobStatus::Failed
            };
            self.finish(status, None);
        }
        Ok(changed)
    }

    /// Handles the end of an agent. Exit code 75 asks for a restart, and an agent that was killed is restarted as well.
    fn agent_ended(&mut self, node: usize, status: ExitStatus) -> Next {
        let state = &mut self.state.nodes[node];
        let code = status.code().or_else(|| Some(128 + status.signal()?));
        let is_lost = status.signal().is_some()
            || code == Some(i32::from(accelerator_host::PREEMPTED_EXIT_CODE));
        if is_lost && state.restarts < self.spec.max_restarts {
            state.restarts += 1;
            state.reason = Some(format!(
                "its agent ended with {status}, and was started again"
            ));
            self.state.status = JobStatus::Restarting;
            return Next::Restart;
        }
        state.exit_code = code;
        state.ended = Some(now());
        state.reason = (code != Some(0)).then(|| format!("its agent ended with {status}"));
        Next::Over
    }

    fn start_agent(&mut self, node: usize) -> Result<Child> {
        let words = agent_words(self.spec, node, &self.endpoint.address, self.folder)?;
        let path = node_log(self.folder, node);
        let failed = |error: io::Error| {
            Error::system(format!("the agent of node {node} cannot start")).with_source(error)
        };
        let log = OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .map_err(failed)?;
        let mut command = Command::new(&words[0]);
        command
            .args(&words[1..])
            .stdin(Stdio::null())
            .stdout(log.try_clone().map_err(failed)?)
            .stderr(log);
        command
            .env(accelerator_host::TOKEN_FILE.name, token_path(self.folder))
            .envs(&self.spec.env);
        if let Some(folder) = &self.spec.working_dir {
            command.current_dir(folder);
        }
        let process = command.spawn().map_err(failed)?;
        self.state.nodes[node].agent = i32::try_from(process.id())
            .ok()
            .and_then(ProcessIdentity::of);
        Ok(process)
    }

    fn finish(&mut self, status: JobStatus, reason: Option<String>) {
        self.end(Signal::TERM);
        self.state.status = status;
        self.state.reason = reason;
        self.state.ended = Some(now());
        for node in &mut self.state.nodes {
            node.ended = node.ended.or(self.state.ended);
        }
    }

    /// Ends all processes, by `first` and after a while by SIGKILL.
    fn end(&mut self, first: Signal) {
        let tensorboard = self.tensorboard.take();
        let agents = self
            .agents
            .iter_mut()
            .filter_map(|agent| agent.process.take());
        let mut processes: Vec<Child> = agents.chain(tensorboard).collect();
        for process in &processes {
            signal(process, first);
        }
        let deadline = Instant::now() + GRACE;
        while !processes.is_empty() {
            processes.retain_mut(|process| !matches!(process.try_wait(), Ok(Some(_))));
            if Instant::now() > deadline {
                processes
                    .iter()
                    .for_each(|process| signal(process, Signal::KILL));
            }
            thread::sleep(POLL);
        }
        for agent in &mut self.agents {
            agent.due = None;
        }
    }

    fn write(&self) -> Result<()> {
        let written = self.state.write(self.folder);
        written.map_err(|error| {
            Error::system("the state of the job cannot be written").with_source(error)
        })
    }
}

/// Returns the command of the agent of node `node`.
pub(super) fn agent_words(
    spec: &JobSpec,
    node: usize,
    endpoint: &str,
    folder: &Path,
) -> Result<Vec<String>> {
    let launcher = launcher_here()?;
    let program = spec.program_file()?;
    let mut agent = spec
        .agent()
        .launcher(launcher.to_string_lossy())
        .program(program.to_string_lossy())
        .node_rank(node)
        .endpoint(endpoint);
    if node == 0 {
        agent = agent.log_dir(folder.join("logs").to_string_lossy());
    }
    Ok(agent.words())
}

/// Starts TensorBoard, which chooses a port and prints its address.
fn tensorboard(spec: &JobSpec, folder: &Path) -> Result<Child> {
    let failed = |error: io::Error| Error::system("tensorboard cannot start").with_source(error);
    let logdir = spec
        .working_dir
        .as_deref()
        .unwrap_or(Path::new(""))
        .join(&spec.logdir);
    let log = File::create(folder.join(TENSORBOARD_LOG)).map_err(failed)?;
    let mut command = Command::new("tensorboard");
    command
        .args(["--host", "127.0.0.1", "--port", "0", "--logdir"])
        .arg(logdir);
    command
        .stdin(Stdio::null())
        .stdout(log.try_clone().map_err(failed)?)
        .stderr(log);
    command.spawn().map_err(failed)
}

/// A port of this machine that the system gives to nobody else. A program that knows its number can listen there.
struct ReservedPort {
    /// `127.0.0.1:PORT`.
    address: String,
    /// Bound, without listening: the system lets a second socket have the same port if both reuse addresses, as those
    /// of servers do.
    _socket: OwnedFd,
}

impl ReservedPort {
    fn new() -> io::Result<Self> {
        let socket = socket_with(
            AddressFamily::INET,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            None,
        )?;
        sockopt::set_socket_reuseaddr(&socket, true)?;
        bind(&socket, &SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))?;
        let bound = SocketAddr::try_from(getsockname(&socket)?)?;
        Ok(Self {
            address: bound.to_string(),
            _socket: socket,
        })
    }
}

fn signal(process: &Child, signal: Signal) {
    let pid = i32::try_from(process.id()).ok().and_then(Pid::from_raw);
    if let Some(pid) = pid {
        // It may have ended meanwhile; until it is waited for, its number is not taken.
        let _ = kill_process(pid, signal);
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn a_reserved_port_is_for_who_knows_it() {
        let reserved = ReservedPort::new().unwrap();
        assert!(TcpStream::connect(&reserved.address).is_err());
        for _ in 0..2 {
            let listener = TcpListener::bind(&reserved.address).unwrap();
            assert!(TcpStream::connect(&reserved.address).is_ok());
            assert!(TcpListener::bind(&reserved.address).is_err());
            drop(listener);
        }
        assert_ne!(ReservedPort::new().unwrap().address, reserved.address);
    }
}
