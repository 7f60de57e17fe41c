//! The process of another host's rank.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::net::TcpStream;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use accelerator_collective::internal::Token;
use accelerator_host::sync::Mutex;
use rustix::process::Signal;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use super::agent_link::{EndSignal, FromAgent, Invitation, ToAgent};
use super::{HostResources, LocalProcess, Output, Process, ProcessSpec};
use crate::error::{Error, Result};
use crate::trial::protocol::{PeerRole, connect, receive, send};

/// Starts and ends processes as the search asks, until it ends. Then this process exits.
pub(super) fn serve(
    invitation: &Invitation,
    token: &Token,
    rank: usize,
    resources: HostResources,
) -> ! {
    let code = match Agent::join(invitation, token, rank, resources).and_then(Agent::run) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("Error: {error}");
            1
        }
    };
    std::process::exit(code.into());
}

struct Agent {
    shared: Shared,
    reader: BufReader<TcpStream>,
    /// A signal asks all ranks to end.
    interrupted: Arc<AtomicBool>,
}

#[derive(Clone)]
struct Shared {
    stream: Arc<Mutex<TcpStream>>,
    processes: Arc<Mutex<BTreeMap<u32, LocalProcess>>>,
    token: Token,
}

impl Agent {
    fn join(
        invitation: &Invitation,
        token: &Token,
        rank: usize,
        resources: HostResources,
    ) -> Result<Self> {
        // The search decides what a signal means, which the launcher sends to all ranks.
        let interrupted = Arc::new(AtomicBool::new(false));
        for signal in [SIGHUP, SIGINT, SIGTERM] {
            signal_hook::flag::register(signal, Arc::clone(&interrupted))?;
        }
        let (reader, stream) = connect(&invitation.address, token, PeerRole::Agent, rank)?;
        if !is_seen(&invitation.mark) {
            let folder = invitation.mark.parent().unwrap_or(&invitation.mark);
            let message = format!(
                "this host does not see the search's folder, {}: it has to be on a file system that all hosts share",
                folder.display()
            );
            send(
                &stream,
                &FromAgent::NotStarted {
                    message: message.clone(),
                },
            )?;
            return Err(Error::misuse(message));
        }
        send(&stream, &FromAgent::Joined { resources })?;
        Ok(Self {
            shared: Shared {
                stream: Arc::new(Mutex::new(stream)),
                processes: Arc::default(),
                token: token.clone(),
            },
            reader,
            interrupted,
        })
    }

    /// The exit code.
    fn run(mut self) -> Result<u8> {
        let mut is_closed = false;
        while let Some(message) = receive(&mut self.reader) {
            match message {
                ToAgent::Start { process, spec } => {
                    let reply = match self.shared.start(process, &spec) {
                        Ok(pid) => FromAgent::Started { pid },
                        Err(error) => FromAgent::NotStarted {
                            message: error.to_string(),
                        },
                    };
                    self.shared.send(&reply);
                }
                ToAgent::Signal { process, signal } => {
                    let signal = match signal {
                        EndSignal::Terminate => Signal::TERM,
                        EndSignal::Kill => Signal::KILL,
                    };
                    if let Some(process) = self.shared.processes.lock().get(&process) {
                        process.signal(signal);
                    }
                }
                ToAgent::Close => {
                    is_closed = true;
                    break;
                }
            }
        }
        for process in self.shared.processes.lock().values() {
            process.signal(Signal::KILL);
        }
        match (is_closed, self.interrupted.load(Ordering::Relaxed)) {
            (true, true) => Ok(accelerator_host::PREEMPTED_EXIT_CODE),
            (true, false) => Ok(0),
            (false, _) => Err(Error::connection(
                "the search has ended; so do its trials on this host",
            )),
        }
    }
}

impl Shared {
    fn start(&self, number: u32, spec: &ProcessSpec) -> Result<u32> {
        let mut processes = self.processes.lock();
        let mut process = LocalProcess::spawn(spec, &self.token)?;
        let output = process.take_output();
        let reading = match output {
            Some(output) => Some(self.clone().forward(number, Box::new(output))?),
            None => None,
        };
        let ended = self.clone();
        process.watch(move || {
            let process = ended.processes.lock().remove(&number);
            let status = process.and_then(|mut process| process.reap());
            // What it has written comes before its end.
            if let Some(reading) = reading {
                let _ = reading.join();
            }
            ended.send(&FromAgent::Exited {
                process: number,
                status: status.map(ExitStatusExt::into_raw),
            });
        })?;
        let pid = process.id();
        processes.insert(number, process);
        Ok(pid)
    }

    fn forward(self, process: u32, output: Output) -> Result<thread::JoinHandle<()>> {
        let forward = move || {
            let mut lines = BufReader::new(output);
            let mut line = Vec::new();
            while lines
                .read_until(b'\n', &mut line)
                .is_ok_and(|read| read > 0)
            {
                self.send(&FromAgent::Output {
                    process,
                    line: String::from_utf8_lossy(&line).into_owned(),
                });
                line.clear();
            }
            self.send(&FromAgent::OutputClosed { process });
        };
        Ok(thread::Builder::new()
            .name("output".to_owned())
            .spawn(forward)?)
    }

    fn send(&self, message: &FromAgent) {
        // That the search is gone is noticed where it is read from.
        let _ = send(&self.stream.lock(), message);
    }
}

/// Waits for a file, which a network's file system may show late; returns `false` if it does not appear.
fn is_seen(mark: &Path) -> bool {
    let until = Instant::now() + SEEN;
    while !mark.exists() {
        if Instant::now() > until {
            return false;
        }
        thread::sleep(Duration::from_millis(50));
        // Reading the folder renews what is remembered of it.
        let _ = mark.parent().map(Path::read_dir);
    }
    true
}

const SEEN: Duration = Duration::from_secs(10);
