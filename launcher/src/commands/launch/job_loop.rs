//! The attempts of a job, one after the other, and the end of the job.

use std::ffi::OsString;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::restart::{AttemptFailure, Decision, Restarts};
use crate::error::{BEFORE_RESTART, Error, Result, chain, ended_by};
use crate::event::{Channel, Event};
use crate::output::Output;
use crate::report::{self, FailureRecord, JobOutcome, ReportFile, SurvivedLoss};
use crate::settings::options::Options;
use crate::settings::{Settings, variable};
use crate::supervisor::attempt::Attempt;
use crate::supervisor::group_machine::Cause;
use crate::supervisor::leftovers::LeftBehind;
use crate::supervisor::run::{AttemptOutcome, FinishedAttempt};
use crate::supervisor::signals::Relay;
use crate::supervisor::spawner::Spawner;
use crate::text::list;

/// A job: the parts that all of its attempts have in common.
pub(super) struct JobLoop<'a> {
    /// The user's options.
    pub(super) options: &'a Options,
    /// The settings of the first attempt.
    pub(super) settings: Settings,
    pub(super) spawner: &'a dyn Spawner,
    /// The folder of the program's package, if cargo built it.
    pub(super) package_dir: Option<&'a Path>,
    /// The launcher's own command line.
    pub(super) command: &'a [OsString],
    /// The source of signals.
    pub(super) relay: Relay,
}

/// The history of a job so far.
struct JobHistory {
    /// The output of the latest attempt, for the launcher's own lines.
    output: Output,
    /// The failures of the attempts whose ranks ran.
    failures: Vec<FailureRecord>,
    /// The losses that the job survived without a restart.
    losses: Vec<SurvivedLoss>,
}

/// The end of a job, for the launchers of all hosts.
#[derive(Clone, Debug)]
pub(super) struct JobVerdict {
    pub(super) code: u8,
    /// The cause of its end, if it did not succeed.
    pub(super) text: Option<String>,
}

struct JobEnd {
    outcome: JobOutcome,
    code: u8,
    /// The reason for which it was not restarted, if restarts were left.
    reason: Option<String>,
}

impl JobLoop<'_> {
    /// Runs `attempt`, and restarts as long as attempts fail and restarts are left; returns the end of the job.
    ///
    /// # Errors
    /// When ranks cannot be run and no attempt has failed before. If one has, its failure is the job's, and this error
    /// is reported in addition.
    pub(super) fn run(&self, attempt: Attempt, channel: Channel) -> Result<JobVerdict> {
        let mut history = JobHistory {
            output: attempt.output().clone(),
            failures: Vec::new(),
            losses: Vec::new(),
        };
        let end = match self.repeat(attempt, channel, &mut history) {
            Ok(end) => end,
            Err(error) if history.failures.is_empty() => {
                if !history.losses.is_empty() {
                    let outcome = match error.is_interrupted() {
                        true => JobOutcome::Interrupted,
                        false => JobOutcome::Failed,
                    };
                    self.record(&history, outcome, Some(&chain(&error)));
                }
                return Err(error);
            }
            Err(error) if error.is_interrupted() => JobEnd {
                outcome: JobOutcome::Interrupted,
                code: error.code(),
                reason: Some(chain(&error)),
            },
            Err(error) => JobEnd {
                outcome: JobOutcome::Failed,
                code: history.exit_code(&error),
                reason: Some(chain(&error)),
            },
        };
        self.finish(&history, &end);
        let last = history.failures.last();
        let failure = last.filter(|_| end.outcome == JobOutcome::Failed);
        let text = match (failure, end.outcome) {
            (Some(failure), _) => Some(failure.summary()),
            (None, JobOutcome::Interrupted) => Some("it was interrupted".to_owned()),
            (None, _) => None,
        };
        let code = end.code;
        Ok(JobVerdict { code, text })
    }

    /// Runs attempts until one of them is the last; returns the end of the job.
    ///
    /// # Errors
    /// When the ranks of an attempt cannot be started and a retry would fail too, or when a signal arrives
    /// while none runs.
    fn repeat(
        &self,
        mut attempt: Attempt,
        mut channel: Channel,
        history: &mut JobHistory,
    ) -> Result<JobEnd> {
        let settings = &self.settings;
        let mut restarts = Restarts::new(
            settings.ranks.get(),
            settings.least_ranks.get(),
            settings.max_restarts,
            settings.restart_delay,
        );
        let mut began = Instant::now();
        loop {
            let outcome = attempt.run(self.spawner, self.package_dir, &channel)?;
            let next = match outcome {
                AttemptOutcome::Regrouped {
                    next,
                    channel: next_channel,
                    lost,
                } => {
                    if !lost.is_empty() {
                        history.losses.push(SurvivedLoss::of(&lost, next.ranks()));
                    }
                    restarts.regrown(next.ranks());
                    NextStep::Continue(next, next_channel)
                }
                AttemptOutcome::NotStarted { rank, error } => {
                    self.after_failed_start(rank, error, &mut restarts, history)?
                }
                AttemptOutcome::Ran(finished) => {
                    self.note_leftovers(&finished);
                    self.after_run(&finished, began.elapsed(), &mut restarts, history)
                }
            };
            (attempt, channel) = match next {
                NextStep::End(end) => return Ok(end),
                NextStep::Continue(next, next_channel) => {
                    self.hand_over(&channel, &next_channel);
                    (*next, next_channel)
                }
                NextStep::Restart(restart) => {
                    self.announce(&restart, &restarts, history);
                    let channel = match self.pause(channel, restart.wait) {
                        // Nothing runs, and everything is saved.
                        Err(error) if restart.after.is_preempted => {
                            return Ok(restart.after.as_last(Some(chain(&error))));
                        }
                        paused => paused?,
                    };
                    let next = self.prepare_restart(restart.number, &restarts, &channel)?;
                    began = Instant::now();
                    (next, channel)
                }
            };
            history.output = attempt.output().clone();
        }
    }

    /// Decides after an attempt in which `rank` could not be started.
    ///
    /// # Errors
    /// The error of the start where a retry would fail too, or is not asked for.
    fn after_failed_start(
        &self,
        rank: usize,
        error: Error,
        restarts: &mut Restarts,
        history: &JobHistory,
    ) -> Result<NextStep> {
        // It would fail again with every rank and in every attempt.
        if error.is_usage() {
            return Err(error);
        }
        let why = chain(&error);
        let decision = match restarts.failed(AttemptFailure::NotStarted(rank)) {
            Decision::NoRestarts => return Err(error),
            Decision::GiveUp(reason) => Decision::GiveUp(format!("{why}; {reason}")),
            restart => restart,
        };
        let ended = EndedAttempt {
            why,
            evidence: String::new(),
            code: history.exit_code(&error),
            is_preempted: false,
        };
        Ok(ended.followed_by(decision))
    }

    /// Decides after an attempt whose ranks ran for the time `lasted`.
    fn after_run(
        &self,
        finished: &FinishedAttempt,
        lasted: Duration,
        restarts: &mut Restarts,
        history: &mut JobHistory,
    ) -> NextStep {
        let outcome = &finished.outcome;
        // A job whose output was lost has not succeeded, even if all ranks have.
        let code = match outcome.cause() {
            None | Some(Cause::OutputClosed) if finished.output.has_lost_output() => 1,
            _ => outcome.exit_code(),
        };
        let is_preempted = outcome.cause() == Some(Cause::Preempted);
        let (why, evidence, decision) = match FailureRecord::of(finished, self.command) {
            None if is_preempted && !outcome.was_notified() => {
                let (why, decision) = match finished.was_to_regroup {
                    false => (
                        "all ranks were preempted, and have saved",
                        restarts.preempted(lasted),
                    ),
                    true => (
                        "all ranks have saved, to continue with another number of ranks",
                        restarts.resized(finished.settings.most_ranks.get()),
                    ),
                };
                (why.to_owned(), String::new(), decision)
            }
            Some(failure) if outcome.asked_to_end.is_none() => {
                // On the way to another group, a rank that waits there seems to fail if another is lost there.
                let is_certain = failure.is_certain() && !finished.was_to_regroup;
                let is_newcomer = is_certain && self.spawner.blame(failure.rank());
                let decision = restarts.failed(match is_certain {
                    true if is_newcomer => AttemptFailure::Newcomer,
                    true => AttemptFailure::Rank(failure.rank()),
                    false => AttemptFailure::Unknown,
                });
                let why = failure.headline(history.failures.last());
                let evidence = failure.evidence(history.failures.last());
                history
                    .failures
                    .iter_mut()
                    .for_each(FailureRecord::forget_operations);
                history.failures.push(failure);
                (why, evidence, decision)
            }
            failure => {
                history.failures.extend(failure);
                return NextStep::End(JobEnd {
                    outcome: self.outcome_of(finished, history),
                    code,
                    reason: None,
                });
            }
        };
        let ended = EndedAttempt {
            why,
            evidence,
            code,
            is_preempted,
        };
        ended.followed_by(decision)
    }

    /// Sends signals to the next group of the attempt from now on, and those that came since its ranks were handed over.
    fn hand_over(&self, old: &Channel, new: &Channel) {
        self.relay.redirect(new.sender.clone());
        for event in old.events.try_iter() {
            if let Event::Signal(_) | Event::ForwardSignal(_) | Event::ForwardedElsewhere = event {
                let _ = new.sender.send(event);
            }
        }
    }

    /// Records that the job is restarted, and tells the user why and how.
    fn announce(&self, restart: &Restart, restarts: &Restarts, history: &JobHistory) {
        self.record(history, JobOutcome::Restarting, None);
        let EndedAttempt { why, evidence, .. } = &restart.after;
        let wait = match restart.wait {
            _ if restart.after.is_preempted => ", which does not count".to_owned(),
            Duration::ZERO => String::new(),
            wait => format!(" in {} s", wait.as_secs_f64()),
        };
        let size = match restart.dropped_slot {
            None => String::new(),
            Some(slot) => format!(
                ", with {} of {} processes: slot {slot} is taken as gone for good",
                restarts.ranks(),
                self.settings.ranks
            ),
        };
        let (number, most) = (restart.number, restarts.most());
        history.output.note(&format!(
            "{why}; restart {number} of {most}{wait}{size}{evidence}"
        ));
    }

    /// Waits before a restart, and gives the channel on which the next attempt reports.
    ///
    /// # Errors
    /// When a signal ended the wait.
    fn pause(&self, old: Channel, wait: Duration) -> Result<Channel> {
        // Late reports of the attempt before must not be taken for the next one's.
        let new = Channel::new();
        self.relay.redirect(new.sender.clone());
        let until = Instant::now() + wait;
        let asks = |event| match event {
            Event::Signal(signal) => Some(signal),
            _ => None,
        };
        if let Some(signal) = old.events.try_iter().find_map(asks) {
            return Err(ended_by(signal, BEFORE_RESTART));
        }
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match new.events.recv_timeout(left).map(asks) {
                Ok(Some(signal)) => return Err(ended_by(signal, BEFORE_RESTART)),
                Ok(None) => {}
                Err(_) => return Ok(new),
            }
        }
    }

    /// Waits for the hosts of a restart, and makes the store and output of its attempt.
    fn prepare_restart(
        &self,
        number: u64,
        restarts: &Restarts,
        channel: &Channel,
    ) -> Result<Attempt> {
        // There is at least one rank, since a slot is only given up where another is left.
        let ranks = NonZeroUsize::new(restarts.ranks()).unwrap_or(NonZeroUsize::MIN);
        let settings = self
            .settings
            .restarted(number, ranks, self.options, variable);
        let doublings = restarts.drops().saturating_sub(1).min(10);
        let settings = Settings {
            max_restarts: restarts.most(),
            regrow_after: settings.regrow_after * (1 << doublings),
            ..settings
        };
        let settings = self.spawner.gather(settings, channel)?;
        Attempt::prepare(settings, channel)
    }

    /// Reports leftover processes and ranks that never joined.
    fn note_leftovers(&self, finished: &FinishedAttempt) {
        let (outcome, output) = (&finished.outcome, &finished.output);
        let LeftBehind { ranks, others } = &outcome.left_behind;
        if outcome.cause().is_none() && (!ranks.is_empty() || *others > 0) {
            let whose = match (ranks.is_empty(), others) {
                (true, _) => "the ranks".to_owned(),
                (false, 0) => list(ranks),
                (false, _) => format!("{} and others", list(ranks)),
            };
            output.note(&format!("ended processes that {whose} had left behind"));
        }
        let size = finished.processes.len();
        let nobody_met =
            size > 1 && outcome.cause().is_none() && !finished.rank_reports.has_any_joined();
        if nobody_met && !self.options.quiet {
            output.note(&format!(
                "no process joined the job, so each of the {size} worked by itself: does the \
                 program call Accelerator::new?"
            ));
        }
    }

    /// The outcome of a job whose last attempt succeeded, was interrupted or was preempted.
    fn outcome_of(&self, finished: &FinishedAttempt, history: &JobHistory) -> JobOutcome {
        let (outcome, output) = (&finished.outcome, &finished.output);
        match outcome.cause() {
            Some(Cause::Failure(_)) => JobOutcome::Failed,
            Some(Cause::Signal(signal)) => {
                let name = signal_hook::low_level::signal_name(signal).unwrap_or("a signal");
                let stuck: Vec<usize> = (0..finished.processes.len())
                    .filter(|&rank| outcome.end(rank).is_none())
                    .collect();
                if !stuck.is_empty() {
                    output.note(&format!(
                        "{} did not end on {name}, nor on SIGKILL",
                        list(&stuck)
                    ));
                } else if !self.options.quiet {
                    output.note(&format!("ended by {name}"));
                }
                JobOutcome::Interrupted
            }
            Some(Cause::OutputClosed) => JobOutcome::Interrupted,
            Some(Cause::Preempted) => JobOutcome::Preempted,
            None => {
                if !history.failures.is_empty() && !self.options.quiet {
                    output.note(&match finished.settings.restart {
                        1 => "succeeded after 1 restart".to_owned(),
                        restarts => format!("succeeded after {restarts} restarts"),
                    });
                }
                JobOutcome::Succeeded
            }
        }
    }

    /// Records the end of the job; if it failed, shows the last failure as the job's.
    fn finish(&self, history: &JobHistory, end: &JobEnd) {
        let reason = end.reason.as_deref();
        let report = self.record(history, end.outcome, reason);
        let has_failed = end.outcome == JobOutcome::Failed;
        if let Some(last) = history.failures.last().filter(|_| has_failed) {
            history.output.note(&last.block(report.as_deref()));
            self.tell_runs(history, last, reason);
        }
        if end.outcome == JobOutcome::Preempted && !self.options.quiet {
            history
                .output
                .note("preempted: all ranks have saved; start the job again to continue");
        }
        match reason {
            Some(reason) if has_failed => history.output.note(&format!("giving up: {reason}")),
            Some(reason) => history.output.note(reason),
            None => {}
        }
    }

    /// Puts the failure into the runs of this launch that are in the working directory.
    fn tell_runs(&self, history: &JobHistory, last: &FailureRecord, reason: Option<&str>) {
        let report = ReportFile::of(
            &history.failures,
            &history.losses,
            JobOutcome::Failed,
            reason,
        );
        let launch = &self.settings.launch;
        if let Err(error) =
            accelerator_track::internal::record_failure(RUNS, launch, &last.summary(), &report)
        {
            let text = format!("the run does not know why the job failed: {error}");
            history.output.note(&text);
        }
    }

    /// Writes the report, if there is a folder for it, and returns the path of the file.
    fn record(
        &self,
        history: &JobHistory,
        outcome: JobOutcome,
        reason: Option<&str>,
    ) -> Option<PathBuf> {
        let dir = self.settings.log_dir.as_ref()?;
        let path = dir.join(report::FILE);
        match report::write(dir, &history.failures, &history.losses, outcome, reason) {
            Ok(()) => Some(path),
            Err(error) => {
                let text = format!("{} cannot be written: {error}", path.display());
                history.output.note(&text);
                None
            }
        }
    }
}

/// The step after an attempt.
enum NextStep {
    End(JobEnd),
    /// The ranks continue in this group, which reports on this channel.
    Continue(Box<Attempt>, Channel),
    /// The job is started again.
    Restart(Restart),
}

struct Restart {
    number: u64,
    wait: Duration,
    dropped_slot: Option<usize>,
    after: EndedAttempt,
}

/// An attempt that another one may follow.
struct EndedAttempt {
    /// The cause of its end.
    why: String,
    /// The evidence of the cause; follows the line that announces a restart.
    evidence: String,
    /// The exit code of the job if it was the last.
    code: u8,
    /// True if its ranks were preempted, and have saved.
    is_preempted: bool,
}

impl EndedAttempt {
    fn followed_by(self, decision: Decision) -> NextStep {
        match decision {
            Decision::Restart {
                restart: number,
                wait,
                dropped_slot,
            } => NextStep::Restart(Restart {
                number,
                wait,
                dropped_slot,
                after: self,
            }),
            Decision::NoRestarts => NextStep::End(self.as_last(None)),
            Decision::GiveUp(reason) => NextStep::End(self.as_last(Some(reason))),
        }
    }

    /// Returns the end of a job that is not restarted after it, for `reason`.
    fn as_last(&self, reason: Option<String>) -> JobEnd {
        JobEnd {
            outcome: match self.is_preempted {
                true => JobOutcome::Preempted,
                false => JobOutcome::Failed,
            },
            code: self.code,
            reason,
        }
    }
}

impl JobHistory {
    /// Returns the exit code of the rank that failed last; that of `error` if no attempt failed before it.
    fn exit_code(&self, error: &Error) -> u8 {
        let last = self.failures.last();
        last.map_or_else(|| error.code(), FailureRecord::exit_code)
    }
}

/// The folder in which programs record their runs by default.
const RUNS: &str = "runs";
