//! PMI-1, as MPICH's Hydra and Slurm's `--mpi=pmi2` serve it: one line each way, `cmd=NAME key=value …`.
//!
//! If a process closes its connection without `finalize`, the launcher assumes that it has died, and kills the job.

#[cfg(test)]
mod tests;

use std::{
    collections::HashMap,
    fs::File,
    io::{ErrorKind, Read, Write},
    net::{TcpStream, ToSocketAddrs},
    os::fd::OwnedFd,
    sync::OnceLock,
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, poll};

use crate::{
    error::{Error, Kind, Result},
    launch::inherited,
    socket::timespec,
    topology::Topology,
};
use accelerator_host::sync::Mutex;

pub(super) struct PmiClient {
    stream: File,
    unread: Vec<u8>,
    deadline: Instant,
}

/// A place that the launcher has given this process over a connection.
pub(super) struct AskedPlace {
    pub(super) rank: usize,
    pub(super) world_size: usize,
    /// The open connection, until the ranks have met.
    client: Mutex<Option<PmiClient>>,
}

/// Asks the launcher at `address` for the place of the process with this id. It is asked once; later calls return the
/// same answer.
pub(super) fn asked(address: &str, id: usize) -> Result<&'static AskedPlace> {
    static ASKED: OnceLock<Result<AskedPlace>> = OnceLock::new();
    ASKED
        .get_or_init(|| AskedPlace::ask(address, id))
        .as_ref()
        .map_err(Error::clone)
}

impl AskedPlace {
    fn ask(address: &str, id: usize) -> Result<Self> {
        let deadline = Instant::now() + ANSWER;
        let mut client = PmiClient::new(connect(address)?.into(), deadline);
        client.say(&format!("cmd=initack pmiid={id}"))?;
        // The launcher sends both in one line, or each in a line of its own.
        let mut told = HashMap::new();
        while !(told.contains_key("size") && told.contains_key("rank")) {
            let line = client.line("initack")?;
            let answer = Answer::parse(&line);
            if !["initack", "set"].contains(&answer.command()) || answer.has_failed() {
                return Err(wrong("initack", &line));
            }
            told.extend(answer.0);
        }
        let number = |key: &str| {
            let value: Option<usize> = told.get(key).and_then(|value| value.parse().ok());
            value.ok_or_else(|| wrong("initack", &format!("{told:?}")))
        };
        Ok(Self {
            rank: number("rank")?,
            world_size: number("size")?,
            client: Mutex::new(Some(client)),
        })
    }

    /// Broadcasts a text from rank 0, which passes it as `own`, and returns it on every rank.
    pub(super) fn share(
        &self,
        topology: &Topology,
        own: Option<&str>,
        deadline: Instant,
    ) -> Result<String> {
        if (self.rank, self.world_size) != (topology.rank(), topology.world_size()) {
            return Err(Error::topology(format!(
                "the launcher told this process that it is rank {} of {}, but it joins as {topology}",
                self.rank, self.world_size
            )));
        }
        let client = self.client.lock().take();
        let mut client = client
            .ok_or_else(|| Error::misuse("this process has left its launcher's PMI before"))?;
        client.deadline = deadline;
        client.share(own)
    }
}

impl PmiClient {
    /// Takes the socket of this number, which the launcher has left to this process.
    pub(super) fn inherited(descriptor: usize, deadline: Instant) -> Result<Self> {
        Ok(Self::new(inherited::socket(descriptor)?, deadline))
    }

    fn new(stream: OwnedFd, deadline: Instant) -> Self {
        Self {
            stream: stream.into(),
            unread: Vec::new(),
            deadline,
        }
    }

    /// Broadcasts a text from rank 0, which passes it as `own`, and ends the connection.
    pub(super) fn share(mut self, own: Option<&str>) -> Result<String> {
        self.ask("init pmi_version=1 pmi_subversion=1", "response_to_init")?;
        let told = self.share_open(own);
        // The connection ends in order whatever went wrong: otherwise the launcher would kill the ranks that can still
        // report the cause.
        let ended = self.finalize();
        let told = told?;
        ended?;
        Ok(told)
    }

    /// Ends the connection, on which late answers may still come.
    fn finalize(&mut self) -> Result<()> {
        self.deadline = self.deadline.max(Instant::now() + FAREWELL);
        self.say("cmd=finalize")?;
        while Answer::parse(&self.line("finalize")?).command() != "finalize_ack" {}
        Ok(())
    }

    fn share_open(&mut self, own: Option<&str>) -> Result<String> {
        let answer = self.ask("get_my_kvsname", "my_kvsname")?;
        let name = answer.value("kvsname")?.to_owned();
        if let Some(own) = own {
            let put = format!("put kvsname={name} key={KEY} value={own}");
            self.ask(&put, "put_result")?;
        }
        self.ask("barrier_in", "barrier_out")?;
        let get = format!("get kvsname={name} key={KEY}");
        let answer = self.ask(&get, "get_result")?;
        Ok(answer.value("value")?.to_owned())
    }

    /// Sends a command and reads its answer; fails if the answer reports a failure.
    fn ask(&mut self, command: &str, expected: &str) -> Result<Answer> {
        self.say(&format!("cmd={command}"))?;
        let name = command.split(' ').next().unwrap_or(command);
        let (line, answer) = loop {
            let line = self.line(name)?;
            let answer = Answer::parse(&line);
            // The rest of the answer to `initack`.
            if answer.command() != "set" {
                break (line, answer);
            }
        };
        match answer.command() == expected && !answer.has_failed() {
            true => Ok(answer),
            false => Err(wrong(name, &line)),
        }
    }

    fn say(&mut self, line: &str) -> Result<()> {
        let sent = self.stream.write_all(format!("{line}\n").as_bytes());
        sent.map_err(|error| lost(&error))
    }

    /// The next line, without its end.
    fn line(&mut self, command: &str) -> Result<String> {
        loop {
            if let Some(end) = self.unread.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.unread.drain(..=end).collect();
                return Ok(String::from_utf8_lossy(&line).trim().to_owned());
            }
            if self.unread.len() > MOST_BYTES {
                return Err(wrong(command, "a line without an end"));
            }
            self.wait(command)?;
            let mut bytes = [0; 1024];
            match self.stream.read(&mut bytes) {
                Ok(0) => return Err(lost(&ErrorKind::UnexpectedEof.into())),
                Ok(count) => self.unread.extend_from_slice(&bytes[..count]),
                Err(error)
                    if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {}
                Err(error) => return Err(lost(&error)),
            }
        }
    }

    fn wait(&self, command: &str) -> Result<()> {
        loop {
            let left = self.deadline.saturating_duration_since(Instant::now());
            let mut ready = [PollFd::new(&self.stream, PollFlags::IN)];
            match poll(&mut ready, Some(&timespec(left))) {
                Ok(0) => {
                    return Err(Error::rendezvous(format!(
                        "the launcher did not answer PMI's {command:?} in time{}",
                        match command {
                            "barrier_in" => "; not every rank has come to join the group",
                            _ => "",
                        }
                    )));
                }
                Ok(_) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(lost(&error.into())),
            }
        }
    }
}

/// The words `key=value` of a line.
struct Answer(HashMap<String, String>);

impl Answer {
    fn parse(line: &str) -> Self {
        let words = line.split_ascii_whitespace();
        let pairs = words.filter_map(|word| word.split_once('='));
        Self(
            pairs
                .map(|(key, value)| (key.to_owned(), value.to_owned()))
                .collect(),
        )
    }

    fn command(&self) -> &str {
        self.0.get("cmd").map_or("", String::as_str)
    }

    fn has_failed(&self) -> bool {
        let value = |key: &str| self.0.get(key).map(String::as_str);
        value("rc").is_some_and(|rc| rc != "0") || value("found").is_some_and(|it| it == "false")
    }

    fn value(&self, key: &str) -> Result<&str> {
        let value = self
            .0
            .get(key)
            .ok_or_else(|| wrong(self.command(), &format!("no {key}")))?;
        Ok(value)
    }
}

fn connect(address: &str) -> Result<TcpStream> {
    let refused = |error: std::io::Error| {
        Error::caused(
            Kind::Rendezvous,
            format!("the launcher at PMI_PORT={address} cannot be reached"),
            error,
        )
    };
    let mut failure = std::io::Error::other("the name has no address");
    for target in address.to_socket_addrs().map_err(refused)? {
        match TcpStream::connect_timeout(&target, ANSWER) {
            Ok(stream) => return Ok(stream),
            Err(error) => failure = error,
        }
    }
    Err(refused(failure))
}

fn wrong(command: &str, line: &str) -> Error {
    Error::protocol(format!(
        "the launcher answered PMI's {command:?} with {line:?}"
    ))
}

fn lost(error: &std::io::Error) -> Error {
    Error::rendezvous(format!(
        "the connection to the launcher, by PMI, is lost: {error}"
    ))
}

/// The key of rank 0's line; those that begin with `PMI_` are the launcher's own.
const KEY: &str = "accel-store";
/// The time that a launcher may take for an answer that waits for no other rank.
const ANSWER: Duration = Duration::from_secs(30);
/// The time that it may take to let a process go.
const FAREWELL: Duration = Duration::from_secs(1);
const MOST_BYTES: usize = 16 * 1024;
