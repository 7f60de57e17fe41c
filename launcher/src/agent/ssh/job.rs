//! The agents of a job from their start to their end.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use signal_hook::consts::signal::SIGTERM;

use super::agent::{AgentHello, Order};
use super::client::{Client, Show, Ssh, is_own, may_pass, not_started};
use crate::error::{BEFORE_START, Error, Result, START_AGAIN, ended_by};
use crate::event::{Channel, Event};
use crate::process::End;
use crate::settings::hosts::{Endpoint, ListedHost};
use crate::settings::nodes::DEFAULT_JOIN_TIMEOUT;
use crate::settings::options::Options;
use crate::supervisor::group::watch;
use crate::supervisor::signals::{Relay, asks_to_end};
use crate::text::note;

/// The number of hosts reached at once: SSH servers refuse more.
pub(super) const MAX_STARTING: usize = 32;

/// The number of attempts to reach a host.
pub(super) const MAX_TRIES: u32 = 3;

/// The pause between two attempts to reach a host.
pub(super) const RETRY: Duration = Duration::from_secs(1);

/// The time that the head may take to end when another host has ended without it.
const END_TIMEOUT: Duration = Duration::from_secs(15);

/// The time that the others may take to end after the head, which has told them before.
const GOODBYE: Duration = Duration::from_secs(3);

/// The time that agents may take to kill everything.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);

/// The number of requests to end after which the client has everything killed.
const MAX_REQUESTS: u32 = 3;

pub(super) struct SshJob<'a> {
    ssh: &'a Ssh,
    options: &'a Options,
    /// The time that an agent may take to say hello.
    hello_timeout: Duration,
    order: &'a dyn Fn(usize, &str) -> Order,
    relay: Relay,
    hosts: Vec<AgentHost<'a>>,
    /// The host of each agent that was started, by the number of its start.
    starts: Vec<usize>,
}

struct AgentHost<'a> {
    listed: &'a ListedHost,
    is_own: bool,
    tries: u32,
    /// The time of the next attempt.
    start_at: Option<Instant>,
    client: Option<Client>,
    /// The time by which the agent must have said hello.
    hello_until: Instant,
    hello: Option<AgentHello>,
    is_ordered: bool,
    /// The end of the agent that had its order, and its last output.
    end: Option<(End, String)>,
}

impl<'a> SshJob<'a> {
    /// A job on `hosts`. `order` makes the order of a host from its number and the address of the head.
    pub(super) fn new(
        hosts: &'a [ListedHost],
        ssh: &'a Ssh,
        options: &'a Options,
        order: &'a dyn Fn(usize, &str) -> Order,
        relay: Relay,
    ) -> Self {
        let now = Instant::now();
        let hosts = hosts.iter().map(|listed| AgentHost {
            listed,
            is_own: is_own(listed),
            tries: 0,
            start_at: Some(now),
            client: None,
            hello_until: now,
            hello: None,
            is_ordered: false,
            end: None,
        });
        Self {
            ssh,
            options,
            hello_timeout: options.join_timeout.unwrap_or(DEFAULT_JOIN_TIMEOUT),
            order,
            relay,
            hosts: hosts.collect(),
            starts: Vec::new(),
        }
    }

    /// Runs it, and gives its exit code.
    ///
    /// # Errors
    /// When a host is not reached, or its launcher ends without the head; when a signal arrives before the head runs.
    pub(super) fn run(mut self, channel: &Channel) -> Result<u8> {
        let ended = self.until_head_ends(channel);
        self.end_others(channel, ended.is_ok());
        // Its last lines have been shown.
        let (end, _) = ended?;
        match end {
            // The exit code of ssh itself.
            End::Code(255) | End::Signal(_) | End::Lost => Err(Error::unreachable(format!(
                "the connection to host {}, which decides for the job, was lost; every process of the job has been \
                 ended. Exit code {START_AGAIN}: start it again",
                self.hosts[0].listed
            ))),
            End::Code(_) => Ok(end.exit_code()),
        }
    }

    /// Starts the agents, gives them their orders, and passes signals on until the head has ended.
    fn until_head_ends(&mut self, channel: &Channel) -> Result<(End, String)> {
        let mut requests = 0;
        let mut restarts = 0;
        // A host that has ended without the head, and by when the head is to have noticed.
        let mut failed: Option<(usize, Instant, bool)> = None;
        loop {
            self.start(channel)?;
            self.listen()?;
            self.give_orders();
            let retry = self.hosts.iter().filter_map(|host| host.start_at).min();
            let hello = self.next_silent()?;
            let until = failed.map(|(_, until, _)| until);
            match channel.next(until.into_iter().chain(retry).chain(hello).min()) {
                Event::Ended { rank, end } => {
                    let number = self.starts[rank];
                    let end = self.ended(number, end)?;
                    if number == 0
                        && let Some(ended) = end
                    {
                        return Ok(ended);
                    }
                    let Some((end, said)) = end else { continue };
                    let is_lost = matches!(end, End::Code(255) | End::Signal(_));
                    let most = self.options.max_restarts.unwrap_or(0);
                    if is_lost && restarts < most {
                        restarts += 1;
                        let host = &mut self.hosts[number];
                        note(&format!(
                            "host {number} ({}) was lost; starting it again",
                            host.listed
                        ));
                        host.again();
                    } else {
                        self.hosts[number].end = Some((end, said));
                        let until = Instant::now() + END_TIMEOUT;
                        failed.get_or_insert((number, until, false));
                    }
                }
                Event::Signal(signal) => {
                    requests += 1;
                    if requests >= MAX_REQUESTS || !self.hosts[0].is_ordered {
                        return Err(ended_by(signal, BEFORE_START));
                    }
                    self.signal(signal);
                }
                Event::ForwardSignal(signal) => self.signal(signal),
                _ => {}
            }
            if let Some((number, until, was_asked)) = &mut failed
                && Instant::now() >= *until
            {
                // The head waits for that host, or has not noticed its end.
                if *was_asked {
                    return Err(self.failure(*number));
                }
                *was_asked = true;
                *until = Instant::now() + END_TIMEOUT;
                let failure = self.failure(*number);
                self.signal(SIGTERM);
                let ended = self.end_of_head(channel, *until);
                return match ended {
                    // It has ended for a reason of its own just now.
                    Some((End::Code(code), _)) if code != 128 + SIGTERM && code != 255 => {
                        Ok((End::Code(code), String::new()))
                    }
                    _ => Err(failure),
                };
            }
        }
    }

    /// Starts agents whose time has come, as many as may be on their way at once.
    fn start(&mut self, channel: &Channel) -> Result<()> {
        let is_starting = |host: &AgentHost<'_>| host.client.is_some() && host.hello.is_none();
        let mut starting = self.hosts.iter().filter(|host| is_starting(host)).count();
        let now = Instant::now();
        for (number, host) in self.hosts.iter_mut().enumerate() {
            if starting < MAX_STARTING && host.start_at.is_some_and(|at| at <= now) {
                starting += 1;
                host.start_at = None;
                host.tries += 1;
                let ssh = (!host.is_own).then_some((self.ssh, host.listed));
                let client = Client::start(ssh, show(number), &self.relay)?;
                watch(self.starts.len(), client.process(), &channel.sender);
                self.starts.push(number);
                host.client = Some(client);
                host.hello_until = now + self.hello_timeout;
            }
        }
        Ok(())
    }

    /// Returns the time at which the next of the agents that have not said hello is late.
    ///
    /// # Errors
    /// When one is late already.
    fn next_silent(&self) -> Result<Option<Instant>> {
        let is_silent = |host: &&AgentHost<'_>| host.client.is_some() && host.hello.is_none();
        let silent = self.hosts.iter().filter(is_silent);
        match silent.min_by_key(|host| host.hello_until) {
            Some(host) if host.hello_until <= Instant::now() => Err(Error::system(format!(
                "host {} was not started: `ssh` did not start accel-launch there within {} s (--join-timeout); a \
                 start-up file of its shell may wait for something, or the connection be slow",
                host.listed,
                self.hello_timeout.as_secs_f64()
            ))),
            host => Ok(host.map(|host| host.hello_until)),
        }
    }

    /// Takes in the hellos of agents.
    fn listen(&mut self) -> Result<()> {
        for host in &mut self.hosts {
            let hello = host.client.as_ref().and_then(Client::hello);
            // The end of one that says something else tells why.
            if let Some(Ok(hello)) = hello {
                let own = env!("CARGO_PKG_VERSION");
                if hello.version != own {
                    return Err(Error::usage(format!(
                        "host {} has accel-launch {}, and this host {own}: install one version, or leave --no-push out",
                        host.listed, hello.version
                    )));
                }
                host.hello = Some(hello);
            }
        }
        Ok(())
    }

    /// Gives their orders to agents that have said hello, the head first.
    fn give_orders(&mut self) {
        let Some(head) = self.hosts[0].hello.clone() else {
            return;
        };
        let is_head_own = self.hosts[0].is_own;
        let are_all_own = self.hosts.iter().all(|host| host.is_own);
        let name = self.hosts[0].listed.name.clone();
        for (number, host) in self.hosts.iter_mut().enumerate() {
            let (Some(client), Some(hello), false) = (&host.client, &host.hello, host.is_ordered)
            else {
                continue;
            };
            // SSH_CONNECTION has the addresses and ports of the client and of the host.
            let word = |hello: &AgentHello, at| {
                let connection = hello.connection.as_deref()?;
                connection.split(' ').nth(at).map(str::to_owned)
            };
            let address = match (is_head_own, host.is_own) {
                // The other hosts get the addresses of this host that lead to each of them.
                (true, true) if number == 0 && !are_all_own => Some("::".to_owned()),
                (true, true) => Some("127.0.0.1".to_owned()),
                (true, false) => word(hello, 0),
                (false, _) => word(&head, 2),
            };
            let endpoint = self.options.rdzv_endpoint.clone().unwrap_or(Endpoint {
                host: address.unwrap_or_else(|| name.clone()),
                port: head.port,
            });
            client.order(&(self.order)(number, &endpoint.to_string()), show(number));
            host.is_ordered = true;
        }
    }

    /// Handles the end of an agent's process: returns it if the agent had its order, else schedules another start.
    fn ended(&mut self, number: usize, end: End) -> Result<Option<(End, String)>> {
        let host = &mut self.hosts[number];
        let Some(mut client) = host.client.take() else {
            return Ok(None);
        };
        let said = client.last_words();
        if host.is_ordered {
            return Ok(Some((end, said)));
        }
        if !may_pass(end, &said) || host.tries >= MAX_TRIES {
            return Err(Error::system(not_started(host.listed, end, &said)));
        }
        host.hello = None;
        host.start_at = Some(Instant::now() + RETRY);
        Ok(None)
    }

    /// Waits for the end of the head.
    fn end_of_head(&mut self, channel: &Channel, until: Instant) -> Option<(End, String)> {
        while Instant::now() < until {
            if let Event::Ended { rank, end } = channel.next(Some(until)) {
                let number = self.starts[rank];
                let ended = self.ended(number, end).ok()?;
                if number == 0 {
                    return ended;
                }
            }
        }
        None
    }

    /// Waits until the agents have ended, or has them kill everything: at once if the head has not ended itself.
    fn end_others(&mut self, channel: &Channel, has_head_ended: bool) {
        let waits = match has_head_ended {
            true => [GOODBYE, KILL_TIMEOUT],
            false => [Duration::ZERO, KILL_TIMEOUT],
        };
        for wait in waits {
            let until = Instant::now() + wait;
            while self.hosts.iter().any(|host| host.client.is_some()) && Instant::now() < until {
                if let Event::Ended { rank, end } = channel.next(Some(until)) {
                    let _ = self.ended(self.starts[rank], end);
                }
            }
            for host in &mut self.hosts {
                let Some(client) = &mut host.client else {
                    continue;
                };
                client.kill();
                if host.hello.is_none() {
                    // There is no agent yet that would.
                    client.process().signal_group(Signal::KILL);
                }
            }
        }
    }

    fn signal(&self, signal: i32) {
        if let Some(head) = self.hosts[0]
            .client
            .as_ref()
            .filter(|_| self.hosts[0].is_ordered)
        {
            head.signal(signal);
        } else if asks_to_end(signal) {
            note("there is no head to pass the signal on to");
        }
    }

    /// The error of a host whose launcher has ended without the head.
    fn failure(&self, number: usize) -> Error {
        let host = &self.hosts[number];
        let (end, said) = host.end.clone().unwrap_or((End::Lost, String::new()));
        let said = said.replace('\n', "\n  ");
        match end {
            End::Code(code) if code != 255 => Error::of_code(
                end.exit_code(),
                format!(
                    "host {number} ({}) ended with {end}:\n  {said}",
                    host.listed
                ),
            ),
            _ => Error::unreachable(format!(
                "the connection to host {number} ({}) was lost: {end}\n  {said}",
                host.listed
            )),
        }
    }
}

impl AgentHost<'_> {
    fn again(&mut self) {
        (self.hello, self.is_ordered, self.tries) = (None, false, 0);
        self.start_at = Some(Instant::now() + RETRY);
    }
}

/// Selects the output of a host to show: the head's output includes that of all hosts.
fn show(number: usize) -> Show {
    match number {
        0 => Show::Output,
        _ => Show::Nothing,
    }
}
