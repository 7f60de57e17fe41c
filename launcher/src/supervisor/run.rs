//! An attempt from the start of its ranks to their end.

use std::num::NonZeroUsize;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use accelerator_collective::internal::FlightRecords;
use rustix::process::Signal;

use super::attempt::{Attempt, last_lines, start, wait_until};
use super::group::{
    EndedBy, GroupOutcome, GroupPhase, GroupStep, Observer, StoppedRanksMonitor, supervise,
};
use super::group_machine::Cause;
use super::leftovers::{KillScope, Swept};
use super::regroup::Regrouping;
use super::spawner::Spawner;
use super::store::{RankReports, StoreHandle};
use crate::error::{Error, Result};
use crate::event::Channel;
use crate::output::{Output, headline};
use crate::process::{End, RankProcess};
use crate::settings::Settings;
use crate::text::{list, without_middle};
use crate::variables;

/// The time that failure reports may take to arrive after ranks have ended.
const REPORTS_WITHIN: Duration = Duration::from_millis(100);

/// The longest time between the end of a rank and the notice that it closed its group. Ranks that lost it wait a little
/// longer for the store's report.
const LEAVE_WITHIN: Duration = Duration::from_millis(100);

/// The longest part of a rank's error that the other ranks get.
const MAX_TOLD: usize = 1000;

#[derive(Debug)]
pub(crate) enum AttemptOutcome {
    /// All its ranks ran, and have ended.
    Ran(Box<FinishedAttempt>),
    /// The process of this rank could not be started, and those before it were ended.
    NotStarted { rank: usize, error: Error },
    /// Its ranks continue in a larger or smaller group, which reports on this channel.
    Regrouped {
        next: Box<Attempt>,
        channel: Channel,
        /// The ranks that were lost; empty if the group was resized.
        lost: Vec<LostRank>,
    },
}

/// An attempt whose ranks have ended.
#[derive(Debug)]
pub(crate) struct FinishedAttempt {
    pub(crate) outcome: GroupOutcome,
    /// Their processes, by rank.
    pub(crate) processes: Vec<RankInfo>,
    pub(crate) output: Output,
    pub(crate) rank_reports: RankReports,
    pub(crate) settings: Settings,
    /// The last operations of the ranks, as they have told the store.
    pub(crate) operations: Vec<FlightRecords>,
    /// True if the ranks had been told to form another group.
    pub(crate) was_to_regroup: bool,
}

/// The facts that a report gives about the process of a rank.
#[derive(Clone, Debug)]
pub(crate) struct RankInfo {
    /// Its id on its host.
    pub(crate) pid: i32,
    /// Its host, if that is another one.
    pub(crate) host: Option<String>,
    /// The host that was lost with it, and the cause.
    pub(crate) loss: Option<String>,
}

impl RankInfo {
    fn of(process: &dyn RankProcess) -> Self {
        Self {
            pid: process.pid(),
            host: process.host(),
            loss: process.loss(),
        }
    }
}

/// A lost rank; the others continue without it.
#[derive(Clone, Debug)]
pub(crate) struct LostRank {
    pub(crate) rank: usize,
    pub(crate) process: RankInfo,
    /// `None` if the launcher ended it.
    pub(crate) end: Option<End>,
    /// The last lines of its output.
    pub(crate) last_words: Vec<String>,
}

impl Attempt {
    /// Starts the ranks and waits until all have ended.
    ///
    /// # Errors
    /// Fails if the system cannot start a thread, or if a signal ends the launcher before all ranks run.
    pub(crate) fn run(
        self,
        spawner: &dyn Spawner,
        package_dir: Option<&Path>,
        channel: &Channel,
    ) -> Result<AttemptOutcome> {
        let Self {
            settings,
            output,
            rank_reports,
            store,
            carried,
        } = self;
        // Dropped after the guard of `carried`, which kills all ranks at once instead of one after the other.
        let mut other_hosts = OtherHosts(Some(spawner));
        let mut carried = match carried {
            Some(carried) => carried,
            None => match start(&settings, &store, &output, spawner, package_dir, channel)? {
                Ok(carried) => carried,
                Err((rank, error)) => return Ok(AttemptOutcome::NotStarted { rank, error }),
            },
        };
        let mut group = std::mem::take(&mut carried.processes);
        let events = channel.sender.clone();
        let store_handle = (group.len() > 1).then(|| store.handle());
        let _monitor =
            StoppedRanksMonitor::over(&group, variables::liveness(), &output, store_handle.clone());
        let mut observer = ExitReporter {
            output: output.clone(),
            rank_reports: rank_reports.clone(),
            store_handle,
            absent: Vec::new(),
            has_asked_operations: false,
            lost: Vec::new(),
            regrouping: Regrouping::new(
                spawner,
                package_dir,
                &settings,
                output.clone(),
                &store,
                events,
            ),
        };
        let mut outcome = supervise(
            &mut group,
            settings.grace,
            KillScope::Descendants(carried.guard.excluded()),
            channel,
            &mut observer,
        );
        if let Some(next) = observer
            .regrouping
            .take_complete()
            .filter(|_| outcome.is_taken_over)
        {
            other_hosts.0 = None;
            carried.readers += observer.regrouping.given_up_readers();
            carried.readers = carried.readers.saturating_sub(outcome.drained);
            let mut lost = Vec::new();
            if next.is_recovery() {
                let gone = (0..group.len()).filter(|&rank| !next.keeps(rank));
                lost.extend(gone.map(|rank| LostRank {
                    rank,
                    process: RankInfo::of(&*group[rank]),
                    end: outcome.end(rank).filter(|_| outcome.ended_by_itself(rank)),
                    last_words: output.stderr_tail(rank),
                }));
            }
            let (attempt, channel) =
                next.into_attempt(group, carried, channel, spawner, &outcome, &output);
            return Ok(AttemptOutcome::Regrouped {
                next: Box::new(attempt),
                channel,
                lost,
            });
        }
        observer.regrouping.give_up(None);
        let was_to_regroup = observer.regrouping.was_told();
        carried.readers += observer.regrouping.given_up_readers();
        outcome.add(other_hosts.end(&outcome, settings.grace, channel));
        carried.guard.disarm();
        let processes = group.iter().map(|process| RankInfo::of(&**process));
        let processes = processes.collect();
        if let Some(Cause::Failure(failed_rank)) = outcome.cause() {
            let failed_ranks: Vec<usize> = (0..group.len())
                .filter(|&rank| rank != failed_rank && outcome.ended_by_itself(rank))
                .filter(|&rank| matches!(outcome.end(rank), Some(End::Code(1..))))
                .collect();
            wait_until(REPORTS_WITHIN, || {
                failed_ranks
                    .iter()
                    .all(|&rank| rank_reports.has_reported(rank))
            });
        }
        let asked = output.drain(carried.readers, outcome.drained, channel);
        outcome.asked_to_end = outcome.asked_to_end.or(asked);
        Ok(AttemptOutcome::Ran(Box::new(FinishedAttempt {
            outcome,
            processes,
            output,
            rank_reports,
            operations: store.operations(),
            settings,
            was_to_regroup,
        })))
    }
}

/// Ends the attempt on other hosts, also when an error drops it.
struct OtherHosts<'a>(Option<&'a dyn Spawner>);

impl OtherHosts<'_> {
    fn end(mut self, outcome: &GroupOutcome, grace: Duration, channel: &Channel) -> Swept {
        let spawner = self.0.take();
        spawner.map_or_else(Swept::default, |spawner| {
            spawner.end(outcome.first_signal(), grace, channel)
        })
    }
}

impl Drop for OtherHosts<'_> {
    fn drop(&mut self) {
        if let Some(spawner) = self.0.take() {
            spawner.end(Signal::KILL, Duration::ZERO, &Channel::new());
        }
    }
}

/// Reports ended ranks to the store, tells the user which ranks the launcher waits for, and forms the next group.
struct ExitReporter<'a> {
    output: Output,
    rank_reports: RankReports,
    /// `None` with a single rank.
    store_handle: Option<StoreHandle>,
    /// Ranks that ended with code 0 before any had joined: perhaps none will.
    absent: Vec<usize>,
    has_asked_operations: bool,
    /// The ranks that have ended, and how, for the note that the others continue.
    lost: Vec<String>,
    regrouping: Regrouping<'a>,
}

impl ExitReporter<'_> {
    /// Lets ranks that still run tell the store what they are doing, once. A rank that fails tells it by itself.
    fn ask_operations(&mut self) {
        if std::mem::replace(&mut self.has_asked_operations, true) {
            return;
        }
        if let Some(store_handle) = &self.store_handle {
            store_handle.ask_operations();
        }
    }
}

impl Observer for ExitReporter<'_> {
    fn deadline(&self) -> Option<Instant> {
        self.regrouping.deadline()
    }

    fn least_survivors(&self) -> Option<NonZeroUsize> {
        self.regrouping.least_survivors()
    }

    fn poll_regroup(&mut self, phase: GroupPhase) -> GroupStep {
        match phase {
            GroupPhase::Running => {
                self.has_asked_operations = false;
                match self.regrouping.step() {
                    true => GroupStep::HandOver,
                    false => GroupStep::Run,
                }
            }
            GroupPhase::Settling => {
                self.ask_operations();
                GroupStep::Run
            }
            GroupPhase::Recovering(survivors) => {
                let lost = std::mem::take(&mut self.lost);
                self.regrouping.recover(&survivors, &lost)
            }
            GroupPhase::Ending => {
                self.ask_operations();
                self.regrouping.give_up(None);
                self.regrouping.refuse_survivors();
                GroupStep::Run
            }
        }
    }

    fn ended(&mut self, rank: usize, process: &dyn RankProcess, end: End, ended_by: EndedBy) {
        let text = process.loss().unwrap_or_else(|| {
            let how = match end {
                End::Signal(_) => format!("was {end}"),
                _ => format!("ended with {end}"),
            };
            format!("rank {rank} (process {}) {how}", process.pid())
        });
        // A host is lost with all of its ranks.
        if !self.lost.contains(&text) {
            self.lost.push(text);
        }
        // If the rank is on its way to the next group, the others wait for it there.
        if let (Some((store_handle, Some(rank))), true) =
            (self.regrouping.told(rank), end != End::Code(0))
        {
            store_handle.report_exit(rank, format!("it ended with {end}"));
        }
        let Some(store_handle) = self
            .store_handle
            .clone()
            .filter(|_| ended_by == EndedBy::Itself)
        else {
            return;
        };
        if let End::Signal(_) | End::Lost = end {
            let text = process.loss().unwrap_or_else(|| format!("it was {end}"));
            return store_handle.report_exit(rank, text);
        }
        let is_joined = self.rank_reports.is_joined(rank);
        if end == End::Code(0) && !is_joined {
            if self.rank_reports.has_any_joined() {
                store_handle.report_exit(rank, format!("it ended with {end}"));
            } else {
                self.absent.push(rank);
            }
            return;
        }
        // The rank's last lines, or the notice that it closed its group, can still be on their way.
        let (output, rank_reports) = (self.output.clone(), self.rank_reports.clone());
        let wait = move || match end {
            End::Code(0) => {
                if !wait_until(LEAVE_WITHIN, || !rank_reports.is_joined(rank)) {
                    store_handle.report_exit(rank, format!("it ended with {end}"));
                }
            }
            _ => {
                let words = last_words(&last_lines(&output, rank));
                store_handle.report_exit(rank, format!("it ended with {end}{words}"));
            }
        };
        let _ = thread::Builder::new()
            .name("exit-report".into())
            .spawn(wait);
    }

    fn joined(&mut self, _rank: usize) {
        for rank in std::mem::take(&mut self.absent) {
            if let Some(store_handle) = &self.store_handle {
                store_handle.report_exit(rank, format!("it ended with {}", End::Code(0)));
            }
        }
    }

    fn waiting(&mut self, ranks: &[usize]) {
        // The terminal may be stopped, and the main thread must not wait for it.
        let output = self.output.clone();
        let text = format!("waiting for {} to end", list(ranks));
        let _ = thread::Builder::new().spawn(move || output.note(&text));
    }
}

/// Returns the end of the report that the other ranks get about a rank: its error, taken from its last lines. Each of
/// them repeats the error, so it is a single line.
pub(crate) fn last_words(lines: &[String]) -> String {
    headline(lines).map_or_else(String::new, |line| {
        format!("; its last words: {}", without_middle(line, MAX_TOLD))
    })
}
