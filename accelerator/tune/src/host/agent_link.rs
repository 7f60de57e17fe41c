use std::collections::BTreeMap;
use std::io::{BufReader, PipeWriter, Write};
use std::net::TcpStream;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use accelerator_collective::launcher::{PendingHandshakes, Token};
use accelerator_host::sync::Mutex;
use rustix::process::Signal;

use super::message::{EndSignal, FromAgent, ToAgent};
use super::process::{Output, Process, ProcessProgram, ProcessSpec};
use super::resources::HostResources;
use crate::error::{Error, Kind, Result};
use crate::trial::protocol::{PeerRole, greet, receive, send};

/// The search's connection to the agent of another host.
#[derive(Debug)]
pub(super) struct AgentLink {
    pub(super) rank: usize,
    pub(super) name: String,
    pub(super) resources: HostResources,
    stream: Arc<TcpStream>,
    replies: Receiver<FromAgent>,
    processes: Processes,
    is_lost: Arc<AtomicBool>,
}

/// A process of another host.
#[derive(Debug)]
pub(super) struct RemoteProcess {
    number: u32,
    pid: u32,
    stream: Arc<TcpStream>,
    status: Receiver<Option<i32>>,
}

impl AgentLink {
    /// Lets an agent join; `None` is no agent of this search.
    pub(super) fn greet(
        stream: TcpStream,
        token: &Token,
        pending: &Arc<PendingHandshakes>,
    ) -> Result<Option<Self>> {
        let stream = Arc::new(stream);
        let handshake = pending.enter(&stream);
        let Some((mut reader, peer)) = greet(&stream, token) else {
            return Ok(None);
        };
        if peer.role != PeerRole::Agent || !handshake.leave() {
            return Ok(None);
        }
        let (name, resources) = match receive(&mut reader) {
            Some(FromAgent::Joined { resources }) => (peer.host, resources),
            Some(FromAgent::NotStarted { message }) => {
                return Err(Error::misuse(format!("{}: {message}", peer.host)));
            }
            _ => return Err(lost(&peer.host)),
        };
        let (to_replies, replies) = channel();
        let processes = Processes::default();
        let is_lost = Arc::new(AtomicBool::new(false));
        let (known, noted) = (processes.clone(), Arc::clone(&is_lost));
        thread::Builder::new()
            .name("agent".to_owned())
            .spawn(move || {
                follow(reader, &known, &to_replies);
                noted.store(true, Ordering::Relaxed);
                // Dropping them ends the waiting for their output and status.
                known.0.lock().clear();
            })?;
        Ok(Some(Self {
            rank: peer.rank,
            name,
            resources,
            stream,
            replies,
            processes,
            is_lost,
        }))
    }

    pub(super) fn start(
        &self,
        number: u32,
        spec: &ProcessSpec,
        exited: Box<dyn FnOnce() + Send>,
    ) -> Result<(RemoteProcess, Option<Output>)> {
        let (to_status, status) = channel();
        let (output, writer) = match spec.program {
            ProcessProgram::Worker(_) => (None, None),
            ProcessProgram::Command(_) => {
                let (reader, writer) = std::io::pipe()?;
                (Some(Box::new(reader) as Output), Some(writer))
            }
        };
        self.processes.0.lock().insert(
            number,
            Running {
                exited,
                status: to_status,
                output: writer,
            },
        );
        let message = ToAgent::Start {
            process: number,
            spec: spec.clone(),
        };
        // That nothing arrives is noticed below.
        let _ = send(&self.stream, &message);
        match self.replies.recv_timeout(START) {
            Ok(FromAgent::Started { pid }) => {
                let process = RemoteProcess {
                    number,
                    pid,
                    stream: Arc::clone(&self.stream),
                    status,
                };
                Ok((process, output))
            }
            Ok(FromAgent::NotStarted { message }) => {
                Err(Error::new(Kind::Io, format!("{}: {message}", self.name)))
            }
            _ => Err(lost(&self.name)),
        }
    }

    pub(super) fn check(&self) -> Result<()> {
        match self.is_lost.load(Ordering::Relaxed) {
            true => Err(lost(&self.name)),
            false => Ok(()),
        }
    }
}

impl Drop for AgentLink {
    fn drop(&mut self) {
        // An agent that is gone needs no word.
        let _ = send(&self.stream, &ToAgent::Close);
    }
}

impl Process for RemoteProcess {
    fn id(&self) -> u32 {
        self.pid
    }

    fn signal(&self, signal: Signal) {
        let signal = match signal {
            Signal::TERM => EndSignal::Terminate,
            _ => EndSignal::Kill,
        };
        let message = ToAgent::Signal {
            process: self.number,
            signal,
        };
        // The processes of a host that is lost are, too.
        let _ = send(&self.stream, &message);
    }

    fn reap(&mut self) -> Option<ExitStatus> {
        self.signal(Signal::KILL);
        let status = self.status.recv_timeout(START).ok().flatten();
        status.map(ExitStatus::from_raw)
    }
}

/// The processes that run on the host, by number.
#[derive(Clone, Default)]
struct Processes(Arc<Mutex<BTreeMap<u32, Running>>>);

struct Running {
    exited: Box<dyn FnOnce() + Send>,
    status: Sender<Option<i32>>,
    output: Option<PipeWriter>,
}

impl std::fmt::Debug for Processes {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_set().entries(self.0.lock().keys()).finish()
    }
}

/// Passes on what the agent says, until it closes.
fn follow(mut reader: BufReader<TcpStream>, processes: &Processes, replies: &Sender<FromAgent>) {
    while let Some(message) = receive(&mut reader) {
        match message {
            FromAgent::Output { process, line } => {
                let mut processes = processes.0.lock();
                let output = processes.get_mut(&process);
                if let Some(output) = output.and_then(|running| running.output.as_mut()) {
                    // Nobody reads the output of a trial that was ended.
                    let _ = output.write_all(line.as_bytes());
                }
            }
            FromAgent::OutputClosed { process } => {
                if let Some(running) = processes.0.lock().get_mut(&process) {
                    running.output = None;
                }
            }
            FromAgent::Exited { process, status } => {
                let ended = processes.0.lock().remove(&process);
                if let Some(running) = ended {
                    // Nobody takes the status of one that was ended.
                    let _ = running.status.send(status);
                    (running.exited)();
                }
            }
            reply => {
                if replies.send(reply).is_err() {
                    return;
                }
            }
        }
    }
}

fn lost(host: &str) -> Error {
    Error::new(
        Kind::Io,
        format!(
            "the host {host} is lost, with its trials: start the search again, and it goes on; `accel-launch --max-restarts` \
             does so by itself"
        ),
    )
}

/// The time that an agent may take to start a process, or to end one.
const START: Duration = Duration::from_secs(30);
