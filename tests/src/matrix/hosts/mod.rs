//! The cells over hosts: network namespaces, which `tests/hosts/faults` creates.
//!
//! Each host has its own launcher. While rank 1 pauses in the operation, a host or its link suffers a fault.

mod judge;

use std::fmt::Write;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use accelerator_collective::internal::Token;

use super::{ALLOWANCE, Verdict, job};
use crate::processes::launcher;

/// A fault of a host or its link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HostFault {
    /// Its launcher is killed.
    KillAgent(usize),
    /// All of its processes are killed at once.
    KillAll(usize),
    /// Its link goes down for good.
    Cut(usize),
    /// Its link goes down for [`BRIEF`], less than the liveness timeout.
    CutBriefly(usize),
    /// One in ten packets to it is lost.
    Loss(usize),
    /// Its link is slow, so packets queue.
    Delay(usize),
}

pub(crate) const FAULTS: [HostFault; 10] = [
    HostFault::KillAgent(1),
    HostFault::KillAll(1),
    HostFault::Cut(1),
    HostFault::CutBriefly(1),
    HostFault::Loss(1),
    HostFault::Delay(1),
    HostFault::KillAgent(0),
    HostFault::KillAll(0),
    HostFault::Cut(0),
    HostFault::CutBriefly(0),
];

/// The number of ranks of each host: host 1 has ranks 1 and 2.
pub(crate) const LAYOUT: [usize; 3] = [1, 2, 1];

/// The pause of rank 1 in the operation, during which the fault strikes.
pub(crate) const PAUSE: Duration = Duration::from_secs(1);

/// Returns the networks that cells may use, each with as many hosts as the layout.
pub(crate) fn networks() -> Vec<String> {
    let names = std::env::var("MATRIX_NETWORKS").unwrap_or_default();
    names.split_whitespace().map(str::to_owned).collect()
}

impl HostFault {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::KillAgent(0) => "kill-agent-0",
            Self::KillAgent(_) => "kill-agent-1",
            Self::KillAll(0) => "kill-all-0",
            Self::KillAll(_) => "kill-all-1",
            Self::Cut(0) => "cut-0",
            Self::Cut(_) => "cut-1",
            Self::CutBriefly(0) => "cut-3s-0",
            Self::CutBriefly(_) => "cut-3s-1",
            Self::Loss(_) => "loss-1",
            Self::Delay(_) => "delay-1",
        }
    }

    /// Returns true if the job continues as if nothing had happened.
    pub(crate) fn is_survived(self) -> bool {
        matches!(self, Self::CutBriefly(_) | Self::Loss(_) | Self::Delay(_))
    }

    fn host(self) -> usize {
        match self {
            Self::KillAgent(host) | Self::KillAll(host) => host,
            Self::Cut(host) | Self::CutBriefly(host) => host,
            Self::Loss(host) | Self::Delay(host) => host,
        }
    }

    /// Returns the longest time from the fault until everyone has named the host, or until the job has ended.
    fn deadline(self) -> Duration {
        let deadline = match self {
            Self::KillAgent(_) | Self::KillAll(_) => Duration::from_secs(1),
            Self::Cut(_) => LIVENESS,
            Self::CutBriefly(_) | Self::Loss(_) | Self::Delay(_) => 2 * LIVENESS,
        };
        deadline + ALLOWANCE
    }

    /// Returns the words for the cause, one of which must be in the survivors' error.
    pub(crate) fn words(self) -> &'static [&'static str] {
        match self {
            Self::Cut(_) => &["silent for", "was lost at", "nothing came from it for"],
            _ => &["its connection", "was lost at", "killed by SIGKILL"],
        }
    }
}

pub(super) fn run(network: &str, operation: &'static str, fault: HostFault) -> Verdict {
    let verdict = (0..ATTEMPTS).find_map(|_| attempt(network, operation, fault));
    verdict.unwrap_or_else(|| {
        Verdict::Failed(format!(
            "the link was down for more than {:?} in each of {ATTEMPTS} attempts: this machine is too busy",
            BRIEF + LATE
        ))
    })
}

/// Runs the job once; returns `None` if the job failed because its link was down for too long. A process left behind is
/// a failure even then.
fn attempt(network: &str, operation: &'static str, fault: HostFault) -> Option<Verdict> {
    let mut job = match Job::start(network, operation, fault) {
        Ok(job) => job,
        Err(why) => return Some(Verdict::Failed(why)),
    };
    let ended = job.watch(operation, fault);
    let ended = ended.and_then(|struck| job.nothing_is_left().map(|()| struck));
    let is_clean = ended.is_ok();
    match ended.and_then(|struck| job.judge(operation, fault, struck)) {
        Ok(seconds) if fault.is_survived() => Some(Verdict::Survived { seconds }),
        Ok(seconds) => Some(Verdict::Named { seconds }),
        Err(_) if is_clean && job.was_late => None,
        Err(why) => Some(Verdict::Failed(format!("{why}\n{}", job.output()))),
    }
}

/// The default liveness timeout of launchers and ranks.
const LIVENESS: Duration = Duration::from_secs(5);

/// The time for which a link is down that comes up again.
const BRIEF: Duration = Duration::from_secs(3);

/// The most that the link may be down longer: the rest of [`LIVENESS`] is for the heartbeat before the fault and for
/// TCP, which retransmits within a second.
const LATE: Duration = Duration::from_millis(400);

/// The most runs of a job whose link was down for too long.
const ATTEMPTS: u32 = 5;

/// The time limit of a job, after which its processes are killed.
const LIMIT: Duration = Duration::from_secs(60);

/// A job on all hosts of a network.
struct Job {
    network: String,
    launchers: Vec<Child>,
    lines: Receiver<Line>,
    seen: Vec<Line>,
    ended: Vec<Option<ExitStatus>>,
    /// `true` if the link was down for longer than the fault says, because this machine was busy.
    was_late: bool,
    _folder: tempfile::TempDir,
}

/// A line that a launcher wrote.
struct Line {
    host: usize,
    at: Instant,
    text: String,
}

impl Job {
    fn start(network: &str, operation: &str, fault: HostFault) -> Result<Self, String> {
        let error = |error: &dyn std::error::Error| error.to_string();
        let program = std::env::current_exe().map_err(|e| error(&e))?;
        let folder = tempfile::tempdir().map_err(|e| error(&e))?;
        let token = folder.path().join("token");
        let written = Token::generate().and_then(|new| new.write_file(&token));
        written.map_err(|e| error(&e))?;
        let (sender, lines) = mpsc::channel();
        let mut job = Self {
            network: network.to_owned(),
            launchers: Vec::new(),
            lines,
            seen: Vec::new(),
            ended: vec![None; LAYOUT.len()],
            was_late: false,
            _folder: folder,
        };
        let plan = job::plan(operation, super::Fault::OfHost(fault));
        for (host, ranks) in LAYOUT.iter().enumerate() {
            let mut command = lib(&["on", network, &name(host)]);
            command
                .arg(launcher())
                .args(["--nnodes", &LAYOUT.len().to_string()])
                .args(["--node-rank", &host.to_string()])
                .args(["--nproc-per-node", &ranks.to_string()])
                .args(["--rdzv-endpoint", "10.77.0.1", "--join-timeout", "30"])
                .args(["--no-prefix", "--quiet"])
                .arg(&program)
                .args(["rank", operation, fault.name()])
                .env("ACCEL_TOKEN_FILE", &token)
                .env("ACCEL_FAULTS", &plan)
                .env("RUST_BACKTRACE", "0")
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped());
            let mut child = command.spawn().map_err(|e| error(&e))?;
            let stdout = child.stdout.take();
            let stderr = child.stderr.take();
            job.launchers.push(child);
            if let (Some(stdout), Some(stderr)) = (stdout, stderr) {
                read(host, stdout, sender.clone());
                read(host, stderr, sender.clone());
            }
        }
        Ok(job)
    }

    /// Lets the fault happen, and waits until all launchers have ended; returns the time of the fault.
    fn watch(&mut self, operation: &str, fault: HostFault) -> Result<Instant, String> {
        let until = Instant::now() + LIMIT;
        let is_before = matches!(operation, "rendezvous" | "connect");
        while !self.has_come(is_before) {
            self.next(until.min(Instant::now() + TICK))?;
            if Instant::now() > until || self.ended.iter().any(Option::is_some) {
                return Err("the operation was not reached".to_owned());
            }
        }
        std::thread::sleep(PAUSE / 4);
        let (network, host) = (self.network.clone(), name(fault.host()));
        let strike = |what| strike(&network, &host, what);
        let struck = Instant::now();
        match fault {
            HostFault::KillAgent(host) => {
                let killed = self.launchers[host].kill();
                killed.map_err(|error| error.to_string())?;
            }
            HostFault::KillAll(_) => strike("kill")?,
            HostFault::Cut(_) | HostFault::CutBriefly(_) => strike("cut")?,
            HostFault::Loss(_) => strike("loss")?,
            HostFault::Delay(_) => strike("delay")?,
        }
        self.note(fault, "the fault has happened");
        let mut mend_at = matches!(fault, HostFault::CutBriefly(_)).then(|| struck + BRIEF);
        while self.ended.contains(&None) {
            let now = Instant::now();
            if mend_at.is_some_and(|at| now >= at) {
                mend_at = None;
                strike("mend")?;
                self.note(fault, "its link is up again");
                if struck.elapsed() > BRIEF + LATE {
                    self.was_late = true;
                }
            }
            if now > until {
                return Err(format!("still running {LIMIT:?} after its start"));
            }
            self.next(mend_at.unwrap_or(until).min(now + TICK))?;
        }
        // Drains the lines that readers still hold.
        while self.next(Instant::now() + TICK)? {}
        Ok(struck)
    }

    /// Adds a line of this test to those of the host that suffers the fault.
    fn note(&mut self, fault: HostFault, what: &str) {
        self.seen.push(Line {
            host: fault.host(),
            at: Instant::now(),
            text: format!("({what})"),
        });
    }

    /// Returns true once the ranks are where the fault is to strike.
    fn has_come(&self, is_before: bool) -> bool {
        let has = |word: &str| self.seen.iter().any(|line| line.text.starts_with(word));
        match is_before {
            true => (0..LAYOUT.iter().sum()).all(|rank| has(&format!("STARTED {rank} "))),
            false => has("PAUSES"),
        }
    }

    /// Waits for a line, and checks which launchers have ended; returns true if there was a line.
    fn next(&mut self, until: Instant) -> Result<bool, String> {
        for (child, ended) in self.launchers.iter_mut().zip(&mut self.ended) {
            if ended.is_none() {
                *ended = child.try_wait().map_err(|error| error.to_string())?;
            }
        }
        let left = until.saturating_duration_since(Instant::now());
        match self.lines.recv_timeout(left) {
            Ok(line) => {
                self.seen.push(line);
                Ok(true)
            }
            Err(RecvTimeoutError::Timeout) => Ok(false),
            Err(RecvTimeoutError::Disconnected) => {
                std::thread::sleep(TICK.min(left));
                Ok(false)
            }
        }
    }

    /// Waits until no process runs on any host.
    fn nothing_is_left(&self) -> Result<(), String> {
        let until = Instant::now() + LAST;
        loop {
            let left = output_of(lib(&["left", &self.network]))?;
            match left.trim() {
                "" => return Ok(()),
                left if Instant::now() > until => return Err(format!("left behind: {left}")),
                _ => std::thread::sleep(TICK),
            }
        }
    }

    fn output(&self) -> String {
        let start = self.seen.first().map(|line| line.at);
        let mut text = String::new();
        for line in &self.seen {
            let at = start.map_or(Duration::ZERO, |start| {
                line.at.saturating_duration_since(start)
            });
            let _ = writeln!(
                text,
                "{:6.2} host {}: {}",
                at.as_secs_f64(),
                line.host,
                line.text
            );
        }
        text
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for (host, child) in self.launchers.iter_mut().enumerate() {
            let network = &self.network;
            // Also kills what a failed cell has left behind.
            let _ = strike(network, &name(host), "kill");
            let _ = strike(network, &name(host), "heal");
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The interval between checks of which launchers have ended.
const TICK: Duration = Duration::from_millis(20);

/// The longest that the processes of a job may outlive its launchers.
const LAST: Duration = Duration::from_secs(5);

/// Returns the name of a host in the network, which counts from 1.
fn name(host: usize) -> String {
    format!("h{}", host + 1)
}

fn strike(network: &str, host: &str, what: &str) -> Result<(), String> {
    output_of(lib(&["strike", network, host, what])).map(drop)
}

/// Returns the command that calls a function of `tests/hosts/lib.sh`.
fn lib(args: &[&str]) -> Command {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("hosts/lib.sh");
    let mut command = Command::new(script);
    command.args(args);
    command
}

fn output_of(mut command: Command) -> Result<String, String> {
    let output = command
        .output()
        .map_err(|error| format!("{command:?}: {error}"))?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(format!(
            "{command:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        )),
    }
}

fn read(host: usize, pipe: impl Read + Send + 'static, lines: Sender<Line>) {
    std::thread::spawn(move || {
        for text in BufReader::new(pipe).lines().map_while(Result::ok) {
            let at = Instant::now();
            // Nobody receives lines once the cell has failed.
            let _ = lines.send(Line { host, at, text });
        }
    });
}
