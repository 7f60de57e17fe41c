//! An attempt at a trial of a program, and the reports in what it prints.

use std::collections::{BTreeSet, VecDeque};
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Map, Value};

use crate::checkpoint_folder;
use crate::config::TrialId;
use crate::error::{Error, Result};
use crate::host::TrialProcess;
use crate::runner::{Offer, Report, RunnerEvent};
use crate::value::Metrics;

/// A process of a program, which carries out one attempt at a trial.
#[derive(Debug)]
pub(super) struct ProgramAttempt {
    pub(super) trial: TrialId,
    pub(super) slot: usize,
    /// The trial's.
    pub(super) folder: PathBuf,
    pub(super) process: TrialProcess,
    pub(super) iteration: u64,
    pub(super) since: Instant,
    /// The reports that it has printed and that are not passed on yet.
    pub(super) reports: VecDeque<MetricsLine>,
    /// The checkpoints that it has named.
    pub(super) named: BTreeSet<PathBuf>,
    /// The report whose answer is awaited.
    pub(super) unanswered: Option<UnansweredReport>,
    /// The channel from which a permit is taken for each report; `None` once no more are wanted.
    pub(super) permits: Option<Receiver<()>>,
    /// The number of its outputs that are open.
    pub(super) open: usize,
    /// Held while it may write to its file of metrics.
    pub(super) writer: Option<FileWriter>,
    pub(super) exited: Option<Instant>,
    /// The time at which it was asked to end.
    pub(super) stopping: Option<Instant>,
    /// The reason for that, if it has done something that it may not.
    pub(super) failure: Option<String>,
    pub(super) has_reported: bool,
    /// A rank other than 0 that has printed reports.
    pub(super) other_rank: Option<usize>,
}

#[derive(Debug)]
pub(super) struct UnansweredReport {
    /// The checkpoint that the program has saved.
    checkpoint: Option<PathBuf>,
}

impl ProgramAttempt {
    /// The next report, unless an earlier one is not answered.
    pub(super) fn next_report(&mut self) -> Option<RunnerEvent> {
        if self.unanswered.is_some() || self.stopping.is_some() {
            return None;
        }
        let report = self.reports.pop_front()?;
        if let Some(path) = &report.checkpoint
            && let Some(refusal) = self.refusal(path)
        {
            self.failure = Some(refusal);
            self.stop();
            return None;
        }
        // There is one: its sender has put it there before.
        let _ = self.permits.as_ref().map(Receiver::try_recv);
        self.iteration += 1;
        let offer = match report.checkpoint {
            Some(_) => Offer::Checkpoint,
            None => Offer::Nothing,
        };
        self.unanswered = Some(UnansweredReport {
            checkpoint: report.checkpoint,
        });
        let report = Report {
            iteration: self.iteration,
            metrics: report.metrics,
            seconds: self.since.elapsed().as_secs_f64(),
            offer,
        };
        self.since = Instant::now();
        let trial = self.trial;
        Some(RunnerEvent::Reported { trial, report })
    }

    /// Returns the reason for which a checkpoint that it has named is refused, if it is.
    fn refusal(&mut self, path: &Path) -> Option<String> {
        if path.exists() && !is_within(path, &self.folder) {
            return Some(format!(
                "it named the checkpoint {}, which is not in its folder {}: the search moves what is named, so save it below \
                 `{{folder}}`",
                path.display(),
                self.folder.display()
            ));
        }
        let is_new = self.named.insert(path.to_owned());
        (!is_new).then(|| {
            format!(
                "it named the checkpoint {} twice: what is there may be of a later report, since a program does not wait; save \
                 each under a new name",
                path.display()
            )
        })
    }

    /// Returns `true` if it has ended, its outputs are closed, and its last report is answered.
    pub(super) fn is_over(&self) -> bool {
        self.open == 0 && self.exited.is_some() && self.unanswered.is_none()
    }

    /// Reaps its process and returns the event of its end.
    pub(super) fn end(mut self) -> RunnerEvent {
        let trial = self.trial;
        let status = self.process.reap();
        if let Some(message) = self.failure {
            return RunnerEvent::Failed { trial, message };
        }
        match (self.stopping, status) {
            (Some(_), _) => RunnerEvent::Stopped { trial },
            (None, Some(status)) if status.success() => match self.other_rank {
                Some(rank) if !self.has_reported => RunnerEvent::Failed {
                    trial,
                    message: format!(
                        "rank {rank} printed reports, and rank 0 none: reports are those of rank 0, so print them there"
                    ),
                },
                // A trial that started from a checkpoint may have had nothing left to do.
                _ if !self.has_reported && self.iteration == 0 => RunnerEvent::Failed {
                    trial,
                    message: "it ended without a report; report at least once, and resume only from `{checkpoint}`: a program \
                              that resumes from its own folder may find an earlier trial's checkpoint, and have nothing left \
                              to train"
                        .to_owned(),
                },
                _ => RunnerEvent::Ended { trial },
            },
            (None, status) => RunnerEvent::Failed {
                trial,
                message: self.process.failure(status),
            },
        }
    }

    /// Keeps the checkpoint that the program has named in its report.
    pub(super) fn keep_checkpoint(&mut self, folder: &Path) -> Result<Option<RunnerEvent>> {
        let Some(report) = &mut self.unanswered else {
            return Ok(None);
        };
        let Some(path) = &report.checkpoint else {
            return Ok(None);
        };
        let partial = checkpoint_folder::partial(folder);
        let taken = checkpoint_folder::begin(folder).and_then(|()| {
            let name = path.file_name().unwrap_or_default();
            fs::rename(path, partial.join(name))
        });
        if let Err(error) = taken {
            checkpoint_folder::abandon(folder);
            tracing::warn!("the checkpoint {} cannot be taken: {error}", path.display());
            report.checkpoint = None;
            return Ok(None);
        }
        let bytes = checkpoint_folder::commit(folder)?;
        Ok(Some(RunnerEvent::Saved {
            trial: self.trial,
            iteration: self.iteration,
            bytes,
        }))
    }

    /// Its report is answered: a checkpoint that is not kept is removed.
    pub(super) fn answered(&mut self) -> Result<()> {
        let report = self.unanswered.take();
        let Some(unused) = report.and_then(|report| report.checkpoint) else {
            return Ok(());
        };
        if !is_within(&unused, &self.folder) {
            return Ok(());
        }
        let removed = match unused.is_dir() {
            true => fs::remove_dir_all(&unused),
            false => fs::remove_file(&unused),
        };
        removed.map_err(|error| Error::io("remove", &unused, error))
    }

    /// Asks it to end.
    pub(super) fn stop(&mut self) {
        self.stopping = Some(Instant::now());
        self.permits = None;
        self.process.terminate();
    }
}

/// Returns `true` if something is there, below a trial's folder. Paths elsewhere are the program's own.
fn is_within(path: &Path, folder: &Path) -> bool {
    let place = |path: &Path| path.canonicalize().ok();
    let (Some(path), Some(folder)) = (place(path), place(folder)) else {
        return false;
    };
    path.starts_with(&folder) && path != folder
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct MetricsLine {
    pub(super) metrics: Metrics,
    /// The checkpoint that the program has saved.
    pub(super) checkpoint: Option<PathBuf>,
}

/// The number of an attempt, and its event.
pub(super) type ProgramEvent = (u32, AttemptEvent);

#[derive(Debug)]
pub(super) enum AttemptEvent {
    Line(MetricsLine),
    /// It has printed, for the first time, an object with numbers of these names, and not the metric.
    Other(Vec<String>),
    /// This rank, which is not rank 0, has printed its first report.
    OtherRank(usize),
    /// Its standard output is closed.
    Closed,
    Exited,
}

/// The origin of the lines of an output.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum LineSource {
    /// Lines of one process.
    Process,
    /// Lines of all ranks, each with its rank as a prefix, as in `[1] {"loss": 0.5}`. Rank 0's are reports.
    Ranks,
}

/// A JSON object that a program has printed.
#[derive(Clone, Debug, PartialEq)]
enum Printed {
    Report(MetricsLine),
    /// An object without the metric: the names of its numbers, of which there are some.
    Other(Vec<String>),
}

/// The channel for the reports of an attempt.
#[derive(Clone, Debug)]
pub(super) struct ReportSender {
    pub(super) attempt: u32,
    pub(super) source: LineSource,
    /// The metric that a line has to be a report.
    pub(super) metric: String,
    pub(super) events: Sender<ProgramEvent>,
    /// Waits while there are too many reports; closed where no more are wanted.
    pub(super) backlog: SyncSender<()>,
}

/// Passes on the reports in what a program prints, on a thread, and copies all of it to a file.
pub(super) fn follow(
    output: impl Read + Send + 'static,
    log: Option<&Path>,
    sender: ReportSender,
) -> Result<()> {
    let copy = |log: &Path| {
        let copy = OpenOptions::new().create(true).append(true).open(log);
        copy.map_err(|error| Error::io("write", log, error))
    };
    let mut copy = log.map(copy).transpose()?;
    let ReportSender {
        attempt,
        source,
        metric,
        events,
        backlog,
    } = sender;
    let follow = move || {
        let mut lines = BufReader::new(output);
        let mut line = Vec::new();
        let (mut is_other_told, mut is_rank_told) = (false, false);
        // A longer line is taken in pieces, which are no reports.
        while (&mut lines)
            .take(LINE_BYTES)
            .read_until(b'\n', &mut line)
            .is_ok_and(|read| read > 0)
        {
            // A full disk costs the log, and not the trial.
            let _ = copy.as_mut().map(|copy| copy.write_all(&line));
            let text = String::from_utf8_lossy(&line);
            let rank = match source {
                LineSource::Process => 0,
                LineSource::Ranks => rank_of(&text),
            };
            let event = match parse(&text, &metric) {
                Some(Printed::Report(_)) if rank != 0 && !is_rank_told => {
                    is_rank_told = true;
                    Some(AttemptEvent::OtherRank(rank))
                }
                _ if rank != 0 => None,
                Some(Printed::Report(report)) if backlog.send(()).is_ok() => {
                    Some(AttemptEvent::Line(report))
                }
                Some(Printed::Other(names)) if !is_other_told => {
                    is_other_told = true;
                    Some(AttemptEvent::Other(names))
                }
                _ => None,
            };
            if event.is_some_and(|event| events.send((attempt, event)).is_err()) {
                return;
            }
            line.clear();
        }
        // Nobody listens once the search has ended.
        let _ = events.send((attempt, AttemptEvent::Closed));
    };
    thread::Builder::new()
        .name("output".to_owned())
        .spawn(follow)?;
    Ok(())
}

/// A file that a program writes while it runs.
#[derive(Debug)]
pub(super) struct GrowingFile {
    file: File,
    is_complete: Arc<AtomicBool>,
}

/// Marks the file as complete when it is dropped.
#[derive(Debug)]
pub(super) struct FileWriter(Arc<AtomicBool>);

impl GrowingFile {
    /// A new file in place of what is there.
    pub(super) fn create(path: &Path) -> Result<(Self, FileWriter)> {
        let create = || {
            File::create(path)?;
            File::open(path)
        };
        let file = create().map_err(|error| Error::io("write", path, error))?;
        let is_complete = Arc::new(AtomicBool::new(false));
        let writer = FileWriter(Arc::clone(&is_complete));
        Ok((Self { file, is_complete }, writer))
    }
}

impl Read for GrowingFile {
    /// Waits at the end, until it is complete.
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let was_complete = self.is_complete.load(Ordering::Acquire);
            let read = self.file.read(buffer)?;
            if read > 0 || was_complete {
                return Ok(read);
            }
            thread::sleep(POLL);
        }
    }
}

impl Drop for FileWriter {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

const POLL: Duration = Duration::from_millis(20);

/// Returns the rank in the prefix of a line; 0 if it has none.
fn rank_of(line: &str) -> usize {
    let rank = line
        .strip_prefix('[')
        .and_then(|rest| rest.split_once("] "));
    rank.and_then(|(rank, _)| rank.parse().ok()).unwrap_or(0)
}

/// A line is a report where it ends in a JSON object with the metric. A prefix, as launchers write before the lines of
/// ranks, does not matter.
fn parse(line: &str, metric: &str) -> Option<Printed> {
    let line = line.trim_end();
    let starts = line.match_indices('{').take(MOST_BRACES);
    let mut map = starts
        .filter(|_| line.ends_with('}'))
        .find_map(|(at, _)| object(&line[at..]))?;
    if !map.contains_key(metric) {
        let numbers = map.iter().filter(|(_, value)| value.is_number());
        let names: Vec<_> = numbers.map(|(name, _)| name.clone()).collect();
        return (!names.is_empty()).then_some(Printed::Other(names));
    }
    let checkpoint = map.remove("checkpoint");
    let checkpoint = checkpoint.and_then(|path| Some(PathBuf::from(path.as_str()?)));
    let numbers = map.iter().filter_map(|(name, value)| {
        let number = match value {
            Value::Bool(flag) => Some(f64::from(u8::from(*flag))),
            // Programs whose JSON cannot hold NaN write null, or the word.
            Value::Null => Some(f64::NAN),
            Value::String(word) => word.parse().ok(),
            value => value.as_f64(),
        };
        Some((name.as_str(), number?))
    });
    Some(Printed::Report(MetricsLine {
        metrics: numbers.collect(),
        checkpoint,
    }))
}

/// The number of bytes that a report may have.
const LINE_BYTES: u64 = 16 << 20;

/// The number of places at which an object is looked for: a prefix has few braces of its own.
const MOST_BRACES: usize = 16;

/// A JSON object, in which numbers may be `NaN` and infinite, as Python's `json` writes them.
fn object(text: &str) -> Option<Map<String, Value>> {
    let object = serde_json::from_str(text);
    object
        .or_else(|_| serde_json::from_str(&with_quoted_words(text)))
        .ok()
}

fn with_quoted_words(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len());
    let (mut rest, mut is_string, mut is_escaped) = (text, false, false);
    while let Some(next) = rest.chars().next() {
        let word = WORDS.into_iter().find(|word| rest.starts_with(word));
        if let (false, Some(word)) = (is_string, word) {
            quoted.extend(["\"", word, "\""]);
            rest = &rest[word.len()..];
            continue;
        }
        is_string ^= next == '"' && !is_escaped;
        is_escaped = next == '\\' && !is_escaped;
        quoted.push(next);
        rest = &rest[next.len_utf8()..];
    }
    quoted
}

const WORDS: [&str; 3] = ["NaN", "Infinity", "-Infinity"];

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str, metric: &str) -> Option<MetricsLine> {
        match parse(line, metric)? {
            Printed::Report(report) => Some(report),
            Printed::Other(_) => None,
        }
    }

    #[test]
    fn a_line_with_the_metric_is_a_report() {
        let report = parsed(
            "[rank 0] {\"loss\": 0.5, \"epoch\": 3, \"note\": \"x\", \"checkpoint\": \"c/1\"}\n",
            "loss",
        )
        .unwrap();
        let metrics = Metrics::from([("loss", 0.5), ("epoch", 3.0)]);
        assert_eq!(report.metrics, metrics);
        assert_eq!(report.checkpoint, Some(PathBuf::from("c/1")));
        let report = parsed("epoch {1/3} {\"loss\": 0.5}\r\n", "loss").unwrap();
        assert_eq!(report.metrics, Metrics::from([("loss", 0.5)]));
        for line in [
            "loss: 0.5",
            "{\"accuracy\": 1}",
            "{\"loss\": ",
            "",
            "{}",
            "{\"epoch\": {\"loss\": 0.5}}",
            "{\"loss\": Nan}",
        ] {
            assert_eq!(parsed(line, "loss"), None, "{line}");
        }
        // As Python writes them, too.
        for (value, expected) in [
            ("\"NaN\"", f64::NAN),
            ("null", f64::NAN),
            ("NaN", f64::NAN),
            ("-Infinity", f64::NEG_INFINITY),
        ] {
            let line = format!(r#"{{"loss": {value}, "high": [Infinity], "note": "\"NaN, \\"}}"#);
            let loss = parsed(&line, "loss").unwrap().metrics.value("loss");
            assert_eq!(loss.map(f64::to_bits), Some(expected.to_bits()), "{line}");
        }
    }

    /// Follows an output from beginning to end.
    fn followed(
        output: impl Read + Send + 'static,
        log: Option<&Path>,
        source: LineSource,
    ) -> Vec<ProgramEvent> {
        let (events, received) = std::sync::mpsc::channel();
        let (backlog, _taken) = std::sync::mpsc::sync_channel(9);
        let sender = ReportSender {
            attempt: 0,
            source,
            metric: "loss".to_owned(),
            events,
            backlog,
        };
        follow(output, log, sender).unwrap();
        received.iter().collect()
    }

    #[test]
    fn a_line_without_an_end_is_not_kept() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        let endless = io::repeat(b'{').take(3 * LINE_BYTES);
        let report = io::Cursor::new("\n{\"loss\": 1}\n");
        let events = followed(endless.chain(report), Some(&log), LineSource::Process);
        let [(0, AttemptEvent::Line(_)), (0, AttemptEvent::Closed)] = events.as_slice() else {
            panic!("{events:?}");
        };
        assert!(log.metadata().unwrap().len() > 3 * LINE_BYTES);
    }

    #[test]
    fn of_ranks_the_first_reports() {
        let lines = "[1] {\"loss\": 1}\n[0] {\"loss\": 0}\n[1] {\"loss\": 1}\n[10] {\"x\": 1}\n[0] {\"x\": 2}\n";
        let events = followed(io::Cursor::new(lines), None, LineSource::Ranks);
        let [
            (0, AttemptEvent::OtherRank(1)),
            (0, AttemptEvent::Line(report)),
            (0, AttemptEvent::Other(names)),
            (0, AttemptEvent::Closed),
        ] = events.as_slice()
        else {
            panic!("{events:?}");
        };
        assert_eq!(report.metrics, Metrics::from([("loss", 0.0)]));
        assert_eq!(names, &["x"]);
    }

    #[test]
    fn a_file_is_read_to_the_end_that_it_has_when_it_is_complete() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics");
        let (file, writer) = GrowingFile::create(&path).unwrap();
        let reading = thread::spawn(move || io::read_to_string(file).unwrap());
        let mut written = OpenOptions::new().append(true).open(&path).unwrap();
        for part in ["{\"loss\"", ": 1}\n", "{}"] {
            written.write_all(part.as_bytes()).unwrap();
            thread::sleep(2 * POLL);
        }
        assert!(!reading.is_finished());
        drop(writer);
        assert_eq!(reading.join().unwrap(), "{\"loss\": 1}\n{}");
    }
}
