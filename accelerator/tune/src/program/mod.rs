//! Trials of any program: it prints its metrics as JSON lines, and knows nothing of the search.
//!
//! A program does not wait for decisions. It runs ahead while the search evaluates earlier reports, and is stopped if
//! the decision is to stop; its later reports are dropped.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel, sync_channel};
use std::time::{Duration, Instant};

use crate::config::TrialId;
use crate::error::{Error, Result};
use crate::fields;
use crate::host::{Hosts, ProcessProgram};
use crate::runner::{Answer, Location, RunnerEvent, TrialRunner, TrialStart};
use crate::slots::{Resources, Slots};
use attempt::{AttemptEvent, GrowingFile, LineSource, ProgramAttempt, ProgramEvent, ReportSender};
pub(crate) use template::Template;

mod attempt;
mod template;

pub(crate) struct Programs {
    template: Template,
    /// The metric that a line has to be a report.
    metric: String,
    others: OtherObjects,
    hosts: Hosts,
    slots: Slots,
    processes: usize,
    attempts: BTreeMap<u32, ProgramAttempt>,
    next_attempt: u32,
    waiting: VecDeque<TrialStart>,
    events: Receiver<ProgramEvent>,
    sender: Sender<ProgramEvent>,
    ready: VecDeque<RunnerEvent>,
}

/// The treatment of objects without the metric.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum OtherObjects {
    /// The search ends with an error, as long as there is no report.
    Refused,
    Ignored,
}

impl Programs {
    pub(crate) fn new(
        hosts: Hosts,
        template: Template,
        metric: &str,
        others: OtherObjects,
        resources: &Resources,
        slots: Option<usize>,
    ) -> Result<Self> {
        let (sender, events) = channel();
        Ok(Self {
            template,
            metric: metric.to_owned(),
            others,
            slots: Slots::new(resources, slots, &hosts.resources())?,
            hosts,
            processes: resources.processes,
            attempts: BTreeMap::new(),
            next_attempt: 0,
            waiting: VecDeque::new(),
            events,
            sender,
            ready: VecDeque::new(),
        })
    }

    fn begin_waiting(&mut self) -> Result<()> {
        while let Some(slot) = self.slots.free() {
            let Some(start) = self.waiting.pop_front() else {
                return Ok(());
            };
            self.begin(slot, start)?;
        }
        Ok(())
    }

    fn begin(&mut self, slot: usize, start: TrialStart) -> Result<()> {
        let number = self.next_attempt;
        self.next_attempt += 1;
        let log = start.folder.join("output.log");
        let on = &self.slots[slot];
        let program = ProcessProgram::Command(self.template.fill(&start)?);
        let spec = on.process(program, self.processes, log.clone());
        let (file, writer) = match self.template.has_metrics() {
            true => {
                let (file, writer) = GrowingFile::create(&start.folder.join(template::METRICS))?;
                (Some(file), Some(writer))
            }
            false => (None, None),
        };
        let sender = self.sender.clone();
        let exited = move || {
            // Nobody listens once the search has ended.
            let _ = sender.send((number, AttemptEvent::Exited));
        };
        let (process, output) = self.hosts.start(on.host, &spec, number, exited)?;
        let (backlog, permits) = sync_channel(MOST_REPORTS);
        let sender = ReportSender {
            attempt: number,
            source: LineSource::Process,
            metric: self.metric.clone(),
            events: self.sender.clone(),
            backlog,
        };
        let mut open = 0;
        if let Some(file) = file {
            attempt::follow(file, None, sender.clone())?;
            open += 1;
        }
        if let Some(output) = output {
            let source = match self.processes {
                1 => LineSource::Process,
                _ => LineSource::Ranks,
            };
            attempt::follow(output, Some(&log), ReportSender { source, ..sender })?;
            open += 1;
        }
        let location = Location {
            host: self.hosts.name(on.host).to_owned(),
            pid: process.id(),
        };
        let trial = start.trial;
        self.ready
            .push_back(RunnerEvent::Started { trial, location });
        self.slots[slot].active = Some(trial);
        let attempt = ProgramAttempt {
            trial,
            slot,
            folder: start.folder,
            process,
            iteration: start.restore.map_or(0, |restore| restore.iteration),
            since: Instant::now(),
            reports: VecDeque::new(),
            named: BTreeSet::new(),
            unanswered: None,
            permits: Some(permits),
            open,
            writer,
            exited: None,
            stopping: None,
            failure: None,
            has_reported: false,
            other_rank: None,
        };
        self.attempts.insert(number, attempt);
        Ok(())
    }

    fn number_of(&self, trial: TrialId) -> Option<u32> {
        let mut attempts = self.attempts.iter();
        let found = attempts.find(|(_, attempt)| attempt.trial == trial);
        found.map(|(number, _)| *number)
    }

    fn handle(&mut self, (number, event): ProgramEvent) -> Result<()> {
        let Some(attempt) = self.attempts.get_mut(&number) else {
            return Ok(());
        };
        match event {
            AttemptEvent::Line(line) => {
                attempt.reports.push_back(line);
                attempt.has_reported = true;
                self.others = OtherObjects::Ignored;
                // What it has written last is still on its way.
                attempt.exited = attempt.exited.map(|_| Instant::now());
            }
            AttemptEvent::Other(names) if self.others == OtherObjects::Refused => {
                return Err(without_metric(&self.metric, attempt.trial, &names));
            }
            AttemptEvent::Other(_) => {}
            AttemptEvent::OtherRank(rank) => attempt.other_rank = Some(rank),
            AttemptEvent::Closed => attempt.open = attempt.open.saturating_sub(1),
            AttemptEvent::Exited => {
                attempt.exited = Some(Instant::now());
                attempt.writer = None;
            }
        }
        self.advance(number)
    }

    /// Reports the next line, or the end.
    fn advance(&mut self, number: u32) -> Result<()> {
        let Some(attempt) = self.attempts.get_mut(&number) else {
            return Ok(());
        };
        self.ready.extend(attempt.next_report());
        if !attempt.is_over() {
            return Ok(());
        }
        if let Some(attempt) = self.attempts.remove(&number) {
            self.slots[attempt.slot].active = None;
            self.ready.push_back(attempt.end());
        }
        self.begin_waiting()
    }

    /// Kills programs that ignore a request to stop, and processes left behind by programs that have exited.
    fn end_late(&mut self) -> Result<()> {
        let is_late =
            |since: Option<Instant>| since.is_some_and(|since| since.elapsed() > PATIENCE);
        let mut left = Vec::new();
        for (number, attempt) in &mut self.attempts {
            if is_late(attempt.stopping) || is_late(attempt.exited) {
                attempt.process.kill();
            }
            // What it has started may hold its output open, and may be out of reach.
            if is_late(attempt.exited) && attempt.open > 0 && attempt.reports.is_empty() {
                attempt.open = 0;
                left.push(*number);
            }
        }
        left.into_iter().try_for_each(|number| self.advance(number))
    }
}

impl TrialRunner for Programs {
    fn slots(&self) -> usize {
        self.slots.len()
    }

    fn takes_turns(&self) -> bool {
        false
    }

    fn is_computing(&self, trial: TrialId) -> bool {
        self.number_of(trial).is_some()
    }

    fn requested(&self) -> Option<String> {
        Some(self.slots.requested())
    }

    fn start(&mut self, start: TrialStart) -> Result<()> {
        self.waiting.push_back(start);
        self.begin_waiting()
    }

    fn answer(&mut self, trial: TrialId, answer: Answer) -> Result<()> {
        let Some(number) = self.number_of(trial) else {
            return Ok(());
        };
        if let Some(attempt) = self.attempts.get_mut(&number) {
            if let Answer::Save(folder) | Answer::Pause(folder) = &answer {
                self.ready.extend(attempt.keep_checkpoint(folder)?);
            }
            attempt.answered()?;
            if matches!(answer, Answer::Pause(_) | Answer::Stop) {
                attempt.stop();
            }
        }
        self.advance(number)
    }

    fn kill(&mut self, trial: TrialId) {
        self.waiting.retain(|start| start.trial != trial);
        self.ready.retain(|event| event.trial() != trial);
        if let Some(number) = self.number_of(trial)
            && let Some(mut attempt) = self.attempts.remove(&number)
        {
            attempt.process.kill();
            attempt.process.reap();
            self.slots[attempt.slot].active = None;
        }
        if let Err(error) = self.begin_waiting() {
            tracing::error!("{error}");
        }
    }

    fn next(&mut self, wait: Duration) -> Result<Option<RunnerEvent>> {
        let until = Instant::now() + wait;
        // What has arrived meanwhile is not late, however long the search took.
        while let Ok(event) = self.events.try_recv() {
            self.handle(event)?;
        }
        // Others may report all the time.
        self.end_late()?;
        loop {
            self.hosts.check()?;
            if let Some(event) = self.ready.pop_front() {
                return Ok(Some(event));
            }
            let left = until.saturating_duration_since(Instant::now());
            match self.events.recv_timeout(left) {
                Ok(event) => self.handle(event)?,
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return Ok(None),
            }
        }
    }

    fn close(&mut self) {
        for attempt in self.attempts.values_mut() {
            attempt.process.terminate();
        }
        let until = Instant::now() + PATIENCE;
        while self
            .attempts
            .values()
            .any(|attempt| attempt.exited.is_none())
            && Instant::now() < until
        {
            let left = until.saturating_duration_since(Instant::now());
            if let Ok((number, AttemptEvent::Exited)) = self.events.recv_timeout(left)
                && let Some(attempt) = self.attempts.get_mut(&number)
            {
                attempt.exited = Some(Instant::now());
            }
        }
        for (_, mut attempt) in std::mem::take(&mut self.attempts) {
            attempt.process.kill();
            attempt.process.reap();
        }
    }
}

impl Drop for Programs {
    fn drop(&mut self) {
        self.close();
    }
}

fn without_metric(metric: &str, trial: TrialId, names: &[String]) -> Error {
    let nearest = fields::nearest(metric, names.iter().map(String::as_str));
    let meant = nearest.map(|name| format!("; did you mean `{name}`?"));
    Error::misuse(format!(
        "`metric` is `{metric}`, and trial {trial} has printed a JSON object without it: {}{} Correct the name, or, where \
         programs print other objects before they report, set `disable_strict_metric_checking`",
        names.join(", "),
        meant.as_deref().unwrap_or(".")
    ))
}

/// The time that a program has to end after SIGTERM, and its output after it.
const PATIENCE: Duration = Duration::from_secs(5);
/// The number of reports that a program may be ahead of the search, before it waits.
const MOST_REPORTS: usize = 1000;
