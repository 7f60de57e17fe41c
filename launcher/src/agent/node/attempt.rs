//! The ranks of this host in one attempt of the job.

use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::inbox::{Inbound, Work};
use super::{Agent, KnownAttempt, Over, Program};
use crate::agent::message::{Plan, SignalScope, ToHead, ToHost};
use crate::error::{Result, chain};
use crate::event::{Channel, Event};
use crate::output::Stream;
use crate::process::{End, RankProcess};
use crate::report::KnownRank;
use crate::settings::Settings;
use crate::settings::rank_env::RankEnv;
use crate::supervisor::group::{forward, stop_if_suspended, watch};
use crate::supervisor::leftovers::{KillScope, Remains, end_group};
use crate::supervisor::shim::{self, KillOnDrop};
use crate::supervisor::signals::is_job_control;
use crate::supervisor::spawner::Spawner;
use crate::supervisor::store::given_token;

/// The time for which ranks may outlive SIGKILL.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);

/// The head's request at the end of an attempt.
#[derive(Clone, Copy, Debug)]
struct Sweep {
    first: Signal,
    grace: Duration,
}

/// The ranks of this host.
struct LocalRanks<'a> {
    agent: &'a Agent<'a>,
    restart: u64,
    first_rank: usize,
    known: &'a mut Vec<KnownRank>,
    /// The processes by local rank.
    group: Vec<Box<dyn RankProcess>>,
}

impl Agent<'_> {
    /// Runs the ranks of an attempt until the head ends it, or the job is over.
    ///
    /// # Errors
    /// When the system gives no threads, or this launcher was asked to end again and again.
    pub(super) fn attempt(
        &self,
        plan: Plan,
        program: &Program,
        channel: &Channel,
        last: &mut KnownAttempt,
    ) -> Result<Option<Over>> {
        let settings = self.settings(&plan);
        let package_dir = program.package_dir.as_deref();
        let token = given_token()?.and_then(|given| given.file);
        let environment = RankEnv::new(&settings, plan.store_port, token, package_dir);
        let restart = plan.restart;
        last.plan = Some(plan);
        last.ranks.clear();
        let mut ranks = LocalRanks {
            agent: self,
            restart,
            first_rank: environment.ranks().start,
            known: &mut last.ranks,
            group: Vec::with_capacity(environment.ranks().len()),
        };
        // Dropped before the ranks, it kills all at once, and not one after the other.
        let guard = KillOnDrop::new();
        ranks.start(program, &environment, channel)?;
        stop_if_suspended(&ranks.group);
        let sweep = match ranks.run(channel)? {
            Ok(sweep) => sweep,
            Err(over) => return Ok(Some(over)),
        };
        let asked = ranks.sweep(sweep, KillScope::Descendants(guard.excluded()), channel);
        guard.disarm();
        if let Some(signal) = asked {
            self.ask(signal)?;
        }
        Ok(None)
    }

    /// This host's own settings, and those that hold for all hosts.
    fn settings(&self, plan: &Plan) -> Settings {
        let settings = self.node.settings.clone();
        let settings = settings.on_host(plan.host, plan.layout.clone(), plan.store_host.clone());
        Settings {
            restart: plan.restart,
            max_restarts: plan.max_restarts,
            job: plan.job.clone(),
            elastic: plan.elastic,
            ..settings
        }
    }
}

impl LocalRanks<'_> {
    fn start(&mut self, program: &Program, environment: &RankEnv, channel: &Channel) -> Result<()> {
        let (line, restart) = (&self.agent.line, self.restart);
        for rank in environment.ranks() {
            let mut process = match program.spawner.spawn(rank, environment) {
                Ok(process) => process,
                Err(error) => {
                    // The head ends those before it.
                    line.send(&ToHead::NotStarted {
                        restart,
                        rank,
                        text: chain(&error),
                        is_usage: error.is_usage(),
                    });
                    return Ok(());
                }
            };
            let pid = process.pid();
            line.send(&ToHead::Started { restart, rank, pid });
            self.known.push(KnownRank {
                rank,
                pid,
                end: None,
            });
            let streams = [
                (Stream::Out, process.take_stdout()),
                (Stream::Err, process.take_stderr()),
            ];
            watch(rank, &*process, &channel.sender);
            self.group.push(process);
            for (stream, pipe) in streams {
                if let Some(pipe) = pipe {
                    self.agent.outputs[stream as usize].send(restart, rank, pipe)?;
                }
            }
        }
        Ok(())
    }

    /// Does as the head says until it ends the attempt, or the job is over.
    fn run(&mut self, channel: &Channel) -> Result<std::result::Result<Sweep, Over>> {
        loop {
            while let Some(inbound) = self.agent.inbox.take() {
                match inbound {
                    Inbound::Message(ToHost::Signal {
                        restart,
                        rank,
                        signal,
                        scope,
                    }) if restart == self.restart => self.signal(rank, signal, scope),
                    Inbound::Message(ToHost::EndAttempt {
                        restart,
                        first,
                        grace,
                    }) if restart == self.restart => {
                        let first = Signal::from_named_raw(first).unwrap_or(Signal::KILL);
                        return Ok(Ok(Sweep { first, grace }));
                    }
                    other => {
                        if let Some(over) = self.agent.between_attempts(other) {
                            return Ok(Err(over));
                        }
                    }
                }
            }
            match channel.next(None) {
                Event::Ended { rank, end } => self.ended(rank, end),
                Event::Signal(signal) => self.agent.ask(signal)?,
                Event::ForwardSignal(number) => {
                    self.group
                        .iter()
                        .for_each(|process| forward(&**process, number));
                    if !is_job_control(number) {
                        self.agent.line.send(&ToHead::Forwarded);
                    }
                }
                _ => {}
            }
        }
    }

    /// Ends what still runs; returns the first signal that asked this launcher to end meanwhile.
    fn sweep(mut self, sweep: Sweep, scope: KillScope<'_>, channel: &Channel) -> Option<i32> {
        let running = self.known.iter().zip(&self.group);
        let running = running.filter(|(known, _)| known.end.is_none());
        running.for_each(|(_, process)| end_group(&**process, Signal::KILL));
        let until = Instant::now() + KILL_TIMEOUT;
        let mut asked = None;
        while self.known.iter().any(|known| known.end.is_none()) && Instant::now() < until {
            match channel.next(Some(until)) {
                Event::Ended { rank, end } => self.ended(rank, end),
                Event::Signal(signal) => asked = asked.or(Some(signal)),
                _ => {}
            }
        }
        let remains = Remains {
            first_rank: self.first_rank,
            has_ended: self.known.iter().map(|known| known.end.is_some()).collect(),
        };
        let left_behind = remains.left_behind(&self.group, scope);
        let Sweep { first, grace } = sweep;
        let inbox = &self.agent.inbox;
        let swept = inbox.during(Work::Sweep, || {
            remains.sweep(&mut self.group, first, grace, scope, channel)
        });
        self.agent.line.send(&ToHead::Swept {
            restart: self.restart,
            left_behind,
        });
        asked.or(swept.asked_to_end)
    }

    fn ended(&mut self, rank: usize, end: End) {
        // Where the shim was killed, this launcher kills the ranks, and goes with them: the host is lost.
        if shim::is_over() {
            return;
        }
        let at = rank.checked_sub(self.first_rank);
        if let Some(known) = at.and_then(|at| self.known.get_mut(at)) {
            known.end = Some(end);
            self.agent.line.send(&ToHead::Ended {
                restart: self.restart,
                rank,
                end,
            });
        }
    }

    fn signal(&self, rank: usize, signal: i32, scope: SignalScope) {
        let at = rank.checked_sub(self.first_rank);
        let process = at.and_then(|at| self.group.get(at));
        if let (Some(process), Some(signal)) = (process, Signal::from_named_raw(signal)) {
            match scope {
                SignalScope::Process => process.signal(signal),
                SignalScope::Group => process.signal_group(signal),
            }
        }
    }
}
