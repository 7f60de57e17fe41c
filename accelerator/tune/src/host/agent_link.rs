//! The search's connection to the agent of another host, its messages, and the resources of a host.

use std::collections::BTreeMap;
use std::io::{BufReader, PipeWriter, Write};
use std::net::TcpStream;
use std::ops::Range;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use accelerator_collective::internal::{PendingHandshakes, Token};
use accelerator_host::machine::UsableCores;
use accelerator_host::sync::Mutex;
use rustix::process::Signal;
use serde::{Deserialize, Serialize};

use super::process::{Output, Process, ProcessProgram, ProcessSpec};
use crate::error::{Error, Kind, Result};
use crate::trial::protocol::{PeerRole, greet, receive, send};

pub(super) struct AgentLink {
    pub(super) rank: usize,
    pub(super) name: String,
    pub(super) resources: HostResources,
    stream: Arc<TcpStream>,
    replies: Receiver<FromAgent>,
    processes: Processes,
    is_lost: Arc<AtomicBool>,
}

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
            "the host {host} is lost, with its trials: start the search again, and it continues; `accel-launch --max-restarts` \
             does so by itself"
        ),
    )
}

/// The time that an agent may take to start a process, or to end one.
const START: Duration = Duration::from_secs(30);

/// The invitation that agents get from the search through the job's process group.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct Invitation {
    pub(super) address: String,
    /// A file in the search's folder.
    pub(super) mark: PathBuf,
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ToAgent {
    Start { process: u32, spec: ProcessSpec },
    Signal { process: u32, signal: EndSignal },
    Close,
}

#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum EndSignal {
    Terminate,
    Kill,
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum FromAgent {
    Joined {
        resources: HostResources,
    },
    Started {
        pid: u32,
    },
    NotStarted {
        message: String,
    },
    /// A line of standard output, with its end.
    Output {
        process: u32,
        line: String,
    },
    OutputClosed {
        process: u32,
    },
    /// The status as `waitpid` tells it.
    Exited {
        process: u32,
        status: Option<i32>,
    },
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(crate) struct HostResources {
    /// The number of threads that may compute at a time, by affinity and quota.
    pub(crate) cores: usize,
    /// The numbers of the cores to which trials are bound; empty if the system has to choose.
    pub(crate) core_numbers: Vec<usize>,
    /// The GPUs, as `CUDA_VISIBLE_DEVICES` names them.
    pub(crate) gpus: Vec<String>,
}

impl HostResources {
    /// Returns what this process may use: its share of that if a host has several of the job's ranks.
    pub(crate) fn of_this_process(local_rank: usize, local_world_size: usize) -> Self {
        let cores = UsableCores::of_this_process();
        Self {
            cores: share_of(cores.count().get(), local_rank, local_world_size).len(),
            core_numbers: share(cores.numbers(), local_rank, local_world_size),
            gpus: share(&visible_gpus(), local_rank, local_world_size),
        }
    }
}

fn share<T: Clone>(all: &[T], of: usize, among: usize) -> Vec<T> {
    all[share_of(all.len(), of, among)].to_vec()
}

fn share_of(all: usize, of: usize, among: usize) -> Range<usize> {
    all * of / among..all * (of + 1) / among
}

/// Returns the GPUs of `CUDA_VISIBLE_DEVICES`, or all of the machine if that is not set.
fn visible_gpus() -> Vec<String> {
    if let Ok(list) = std::env::var("CUDA_VISIBLE_DEVICES") {
        // As CUDA reads it: what stands behind an invalid one is not seen.
        let listed = list.split(',').map(str::trim);
        let listed = listed.take_while(|id| !id.is_empty() && !id.starts_with('-'));
        return listed.map(str::to_owned).collect();
    }
    let devices = Path::new("/proc/driver/nvidia/gpus").read_dir();
    let count = devices.map_or(0, Iterator::count);
    (0..count).map(|index| index.to_string()).collect()
}
