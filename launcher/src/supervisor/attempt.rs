//! One attempt of a job: its store and its ranks.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::error::{Error, Result};
use crate::event::{Channel, Event};
use crate::output::{Output, Stream};
use crate::process::{End, RankProcess};
use crate::settings::Settings;
use crate::settings::rank_env::RankEnv;
use crate::supervisor::group::{EndedBy, GroupOutcome, Observer, supervise};
use crate::supervisor::job::Cause;
use crate::supervisor::leftovers::{KillScope, Swept};
use crate::supervisor::rank_reports::RankReports;
use crate::supervisor::shim::KillOnDrop;
use crate::supervisor::spawner::Spawner;
use crate::supervisor::store::{Store, StoreHandle};
use crate::text::list;

/// How long failure reports may take to arrive after ranks have ended.
const REPORTS_WITHIN: Duration = Duration::from_millis(100);

/// How long the last lines of a rank may take to arrive after its end.
const STDERR_WITHIN: Duration = Duration::from_millis(50);

/// How long the notice that a rank closed its group may take to arrive after its end; ranks that lost it wait a
/// little longer for the store's report.
const LEAVE_WITHIN: Duration = Duration::from_millis(100);

/// An attempt whose ranks are not started yet.
#[derive(Debug)]
pub(crate) struct Attempt {
    settings: Settings,
    output: Output,
    rank_reports: RankReports,
    store: Store,
}

/// How an attempt ended.
#[derive(Debug)]
pub(crate) enum AttemptOutcome {
    /// All its ranks ran, and have ended.
    Ran(Box<FinishedAttempt>),
    /// The process of this rank could not be started, and those before it were ended.
    NotStarted {
        /// The rank.
        rank: usize,
        /// Why.
        error: Error,
    },
}

/// An attempt whose ranks have ended.
#[derive(Debug)]
pub(crate) struct FinishedAttempt {
    /// How they ended.
    pub(crate) outcome: GroupOutcome,
    /// Their processes, by rank.
    pub(crate) processes: Vec<RankInfo>,
    /// What they wrote.
    pub(crate) output: Output,
    /// What they reported to the store.
    pub(crate) rank_reports: RankReports,
    /// The settings of the attempt.
    pub(crate) settings: Settings,
}

/// What the report says about the process of a rank.
#[derive(Clone, Debug)]
pub(crate) struct RankInfo {
    /// Its id on its host.
    pub(crate) pid: i32,
    /// Its host, where that is another one.
    pub(crate) host: Option<String>,
    /// Which host was lost with it, and how.
    pub(crate) loss: Option<String>,
}

impl Attempt {
    /// Opens the output, the log files and the store; all report to `channel`.
    ///
    /// # Errors
    /// When a log file cannot be made, or the store cannot listen.
    pub(crate) fn prepare(settings: Settings, channel: &Channel) -> Result<Self> {
        let output = Output::open(
            settings.layout.ranks(),
            settings.prefix,
            settings.log_dir.as_deref(),
            settings.restart,
            settings.on_output_error,
            channel.sender.clone(),
        )?;
        let rank_reports = RankReports::default();
        let observer = {
            let (rank_reports, events) = (rank_reports.clone(), channel.sender.clone());
            move |report| rank_reports.record(report, &events)
        };
        let store = Store::open(&settings, observer)?;
        Ok(Self {
            settings,
            output,
            rank_reports,
            store,
        })
    }

    /// Where the launcher's own lines go.
    pub(crate) fn output(&self) -> &Output {
        &self.output
    }

    /// Starts the ranks and waits until all have ended.
    ///
    /// # Errors
    /// When the system gives no thread, or a signal ends the launcher before all ranks run.
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
        } = self;
        let token = store.token_file();
        let environment = RankEnv::new(&settings, store.address().port(), token, package_dir);
        let ranks = settings.layout.ranks();
        let mut group = Vec::with_capacity(ranks);
        // Dropped before the group, it kills all at once, and not one after the other.
        let guard = KillOnDrop::new();
        let other_hosts = OtherHosts(Some(spawner));
        spawner.begin(&settings, store.address())?;
        for rank in 0..ranks {
            interrupted(channel)?;
            match spawner.spawn(rank, &environment) {
                Ok(process) => group.push(process),
                Err(error) => return Ok(AttemptOutcome::NotStarted { rank, error }),
            }
        }
        let readers = read_output(&mut group, &output)?;
        let mut observer = ExitReporter {
            output: output.clone(),
            rank_reports: rank_reports.clone(),
            store_handle: (group.len() > 1).then(|| store.handle()),
            absent: Vec::new(),
        };
        let mut outcome = supervise(
            &mut group,
            settings.grace,
            KillScope::Descendants(guard.excluded()),
            channel,
            &mut observer,
        );
        outcome.add(other_hosts.end(&outcome, settings.grace, channel));
        guard.disarm();
        let processes = group.iter().map(|process| RankInfo {
            pid: process.pid(),
            host: process.host(),
            loss: process.loss(),
        });
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
        let asked = output.drain(readers, outcome.drained, channel);
        outcome.asked_to_end = outcome.asked_to_end.or(asked);
        Ok(AttemptOutcome::Ran(Box::new(FinishedAttempt {
            outcome,
            processes,
            output,
            rank_reports,
            settings,
        })))
    }
}

/// Ends the attempt on other hosts, when it is dropped by an error too.
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

/// Reports to the store how ranks end, and to the user which ranks the launcher waits for.
#[derive(Debug)]
struct ExitReporter {
    output: Output,
    rank_reports: RankReports,
    /// `None` with a single rank.
    store_handle: Option<StoreHandle>,
    /// Ranks that ended with code 0 before any had joined: perhaps none will.
    absent: Vec<usize>,
}

impl Observer for ExitReporter {
    fn ended(&mut self, rank: usize, process: &dyn RankProcess, end: End, ended_by: EndedBy) {
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
        // Its last lines, or the notice that it closed its group, can still be on their way.
        let (output, rank_reports) = (self.output.clone(), self.rank_reports.clone());
        let wait = move || match end {
            End::Code(0) => {
                if !wait_until(LEAVE_WITHIN, || !rank_reports.is_joined(rank)) {
                    store_handle.report_exit(rank, format!("it ended with {end}"));
                }
            }
            _ => {
                wait_until(STDERR_WITHIN, || output.is_stderr_drained(rank));
                let words = output.stderr_tail(rank);
                store_handle.report_exit(
                    rank,
                    match words.is_empty() {
                        true => format!("it ended with {end}"),
                        false => {
                            format!("it ended with {end}; its last words: {}", words.join(" / "))
                        }
                    },
                );
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

/// Whether `is_so` within `limit`.
fn wait_until(limit: Duration, is_so: impl Fn() -> bool) -> bool {
    let until = Instant::now() + limit;
    while !is_so() {
        if Instant::now() >= until {
            return false;
        }
        thread::sleep(Duration::from_millis(2));
    }
    true
}

/// The error of a launcher that receives a signal while it starts ranks: there may be thousands.
fn interrupted(channel: &Channel) -> Result<()> {
    match channel.events.try_recv() {
        Ok(Event::Signal(signal)) => Err(Error::interrupted(signal)),
        Ok(event) => {
            // Kept for when all run. It can be sent, since the receiver is here.
            let _ = channel.sender.send(event);
            Ok(())
        }
        Err(_) => Ok(()),
    }
}

/// Starts the readers of all streams and returns how many they are.
fn read_output(group: &mut [Box<dyn RankProcess>], output: &Output) -> Result<usize> {
    let mut readers = 0;
    for (rank, process) in group.iter_mut().enumerate() {
        let pipes = [
            (Stream::Out, process.take_stdout()),
            (Stream::Err, process.take_stderr()),
        ];
        for (stream, pipe) in pipes {
            if let Some(pipe) = pipe {
                output.read(rank, stream, pipe)?;
                readers += 1;
            }
        }
    }
    Ok(readers)
}
