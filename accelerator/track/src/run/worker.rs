//! The thread that writes the journal, and the queue before it; and the end of a run whose job has failed.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use accelerator_host::sync::{Condvar, Mutex, MutexGuard};
use serde::Serialize;
use serde_json::Value;

use super::feeder::Feeder;
use crate::error::{Error, Kind, Result, warn};
use crate::journal::{self, JOURNAL, JournalWriter, RunLock, now_ms};
use crate::provenance::mask_value;
use crate::record::{EndStatus, Metrics, Number, PointValue, Record, RunId};
use crate::run_files::FAILURE;
use crate::sink::Sink;

/// Ends the runs of a launch that did not finish as failed with that cause, and puts the report into their folders, as
/// `failure.json`. Both are masked, as [`mask_arguments`](crate::internal::mask_arguments) does. Gives the folders of those runs.
///
/// ```
/// use accelerator_track::{Run, RunHistory, internal::record_failure};
///
/// # let temporary = tempfile::tempdir().unwrap();
/// # let runs = temporary.path();
/// let run = Run::builder("mnist").runs_folder(runs).launch("b7f2").start()?;
/// drop(run);                                              // the program is killed
/// let report = serde_json::json!({ "exit_code": 137 });
/// let folders = record_failure(runs, "b7f2", "rank 1 was killed", &report)?;
/// assert_eq!(RunHistory::read(&folders[0])?.end.unwrap().failure.unwrap(), "rank 1 was killed");
/// assert!(folders[0].join("failure.json").exists());
/// # Ok::<(), accelerator_track::Error>(())
/// ```
///
/// # Errors
///
/// If a run of the launch cannot be written, or the folder of runs cannot be read; if there is none, no run is
/// recorded in it.
pub fn record_failure(
    runs: impl AsRef<Path>,
    launch: &str,
    cause: &str,
    report: &impl Serialize,
) -> Result<Vec<PathBuf>> {
    let runs = runs.as_ref();
    let unread = |error| Error::io("read the folder", runs, error);
    if !runs.is_dir() {
        return Ok(Vec::new());
    }
    let report = serde_json::to_value(report).map(mask_value);
    let cause = mask_value(cause.into());
    let mut recorded = Vec::new();
    for entry in runs.read_dir().map_err(unread)? {
        let folder = entry.map_err(unread)?.path();
        // A run that cannot be read is somebody else's.
        let of = journal::unfinished_launch(&folder.join(JOURNAL)).unwrap_or_default();
        if of.as_deref() != Some(launch) || RunLock::is_held(&folder) {
            continue;
        }
        if let Ok(report) = &report {
            let path = folder.join(FAILURE);
            std::fs::write(&path, format!("{report:#}\n"))
                .map_err(|error| Error::io("write", &path, error))?;
        }
        end(folder.clone(), cause.clone())?;
        recorded.push(folder);
    }
    Ok(recorded)
}

/// Writes what is in the queue until it is closed, and has sinks fed.
#[derive(Debug)]
pub(super) struct Worker {
    queue: Arc<Queue>,
    thread: Option<JoinHandle<JournalEnd>>,
    feeders: Vec<Feeder>,
}

/// The state of the journal once its thread has ended.
#[derive(Debug)]
pub(super) struct JournalEnd {
    /// The number of entries that it lacks.
    pub(super) lost: u64,
    /// An error if the last entries could not be flushed to the disk.
    pub(super) flushed: Result<()>,
}

impl Worker {
    pub(super) fn start(
        journal: Journal,
        queue: Arc<Queue>,
        sinks: Vec<Box<dyn Sink>>,
    ) -> Result<Self> {
        let folder = journal.folder.clone();
        let of_thread = Arc::clone(&queue);
        let thread = thread::Builder::new()
            .name("run-journal".to_owned())
            .spawn(move || journal.write(&of_thread))
            .map_err(|error| Error::new(Kind::Io, format!("no thread for the run: {error}")))?;
        let feeders = sinks.into_iter().map(|sink| Feeder::start(&folder, sink));
        Ok(Self {
            queue,
            thread: Some(thread),
            feeders: feeders.collect::<Result<_>>()?,
        })
    }

    /// Writes and delivers what is left.
    pub(super) fn finish(&mut self) -> JournalEnd {
        let end = self.close();
        for feeder in self.feeders.drain(..) {
            feeder.finish();
        }
        end
    }

    /// Writes what is left, and gives the sinks back.
    pub(super) fn release(mut self) -> Vec<Box<dyn Sink>> {
        self.close();
        self.feeders.drain(..).filter_map(Feeder::release).collect()
    }

    fn close(&mut self) -> JournalEnd {
        self.queue.close();
        let ended = match self.thread.take() {
            Some(thread) => thread.join(),
            None => Ok(JournalEnd {
                lost: 0,
                flushed: Ok(()),
            }),
        };
        // The thread's panic has been printed.
        ended.unwrap_or_else(|_| JournalEnd {
            lost: 0,
            flushed: Err(Error::new(Kind::Io, WRITER_ENDED)),
        })
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let JournalEnd { lost, .. } = self.finish();
        if lost > 0 {
            warn(&format!(
                "{lost} entries of the run were lost: the disk did not take them"
            ));
        }
    }
}

/// A journal with what its writer must know of it.
#[derive(Debug)]
pub(super) struct Journal {
    pub(super) folder: PathBuf,
    pub(super) attempts: u32,
    writer: JournalWriter,
    series: HashMap<String, u32>,
    /// The name of a point, made in place.
    key: String,
    last_step: Option<u64>,
    /// The initial hyperparameters of the last attempt that logged a step, or of the last attempt if none did.
    pub(super) hyperparameters: BTreeMap<String, Value>,
    has_warned: bool,
    _lock: RunLock,
}

impl Journal {
    pub(super) fn new(folder: PathBuf, lock: RunLock, writer: JournalWriter) -> Self {
        Self {
            folder,
            attempts: 0,
            writer,
            series: HashMap::new(),
            key: String::new(),
            last_step: None,
            hyperparameters: BTreeMap::new(),
            has_warned: false,
            _lock: lock,
        }
    }

    /// Opens the journal of a run that continues, with the run's identity and name.
    pub(super) fn reopen(folder: PathBuf, lock: RunLock) -> Result<(Self, (RunId, String))> {
        let (mut head, mut attempts, mut last_step) = (None, 0, None);
        let mut series = HashMap::new();
        let (mut hyperparameters, mut begun_with) = (BTreeMap::new(), None);
        let (mut has_logged, mut begins) = (false, false);
        let path = folder.join(JOURNAL);
        // Another file, or a newer journal, stays as it is: opening cuts off what is not intact.
        journal::first_entry(&path)?;
        let writer = JournalWriter::open(&path, |entry| {
            // An attempt begins with its hyperparameters.
            let at_begin = std::mem::take(&mut begins);
            if entry.record.step().is_some() {
                has_logged = true;
                if let Some(set) = begun_with.take() {
                    hyperparameters = set;
                }
            }
            match entry.record {
                Record::Head { version, run, name } => head = Some((version, run, name)),
                Record::Attempt { attempt, .. } => {
                    attempts = attempt + 1;
                    begins = true;
                    begun_with = None;
                }
                Record::Series { i, key } => {
                    series.insert(key, i);
                }
                // An attempt's hyperparameters count once it logs a step. A finished program that restarts logs none.
                Record::Param { set } if at_begin && has_logged => begun_with = Some(set),
                Record::Param { set } if at_begin => hyperparameters = set,
                Record::Rewind { to } => {
                    last_step = to;
                    begins = at_begin;
                }
                record => last_step = last_step.max(record.step()),
            }
        })?;
        let Some((version, run, name)) = head else {
            return Err(Error::new(
                Kind::Corrupt,
                format!("{} does not begin with its head", path.display()),
            ));
        };
        if version > journal::VERSION {
            return Err(Error::new(
                Kind::Incompatible,
                format!(
                    "the run in {} is of format {version}, and this program writes format {}; use a newer one",
                    folder.display(),
                    journal::VERSION
                ),
            ));
        }
        let this = Self {
            attempts,
            series,
            last_step,
            hyperparameters,
            ..Self::new(folder, lock, writer)
        };
        Ok((this, (run, name)))
    }

    pub(super) fn next(&self) -> u64 {
        self.writer.next()
    }

    pub(super) fn append(&mut self, ms: u64, record: Record) {
        self.last_step = match record {
            Record::Rewind { to } => to,
            _ => self.last_step.max(record.step()),
        };
        self.writer.append(ms, record);
    }

    pub(super) fn flush_or_fail(&mut self) -> Result<()> {
        let flushed = self.writer.flush();
        flushed.map_err(|error| Error::io("write", &self.folder.join(JOURNAL), error))
    }

    /// Writes what is logged until the queue is closed.
    fn write(mut self, queue: &Queue) -> JournalEnd {
        loop {
            let taken = queue.take(TICK);
            for (ms, message) in taken.messages {
                match message {
                    Message::Metrics(metrics) => self.append_metrics(ms, &metrics),
                    Message::Record(record) => self.append(ms, record),
                }
                if self.writer.waiting() >= FLUSH_BYTES {
                    let flushed = self.writer.flush();
                    self.told(flushed);
                }
            }
            self.writer.lose(taken.lost);
            if taken.syncs.is_empty() && !taken.is_closed {
                let flushed = self.writer.flush();
                self.told(flushed);
                continue;
            }
            let synced = self.writer.sync();
            let path = self.folder.join(JOURNAL);
            let answer = match &synced {
                Ok(()) => Ok((self.last_step, self.writer.next())),
                Err(error) => Err(Error::io(
                    "write",
                    &path,
                    io::Error::new(error.kind(), error.to_string()),
                )),
            };
            self.told(synced);
            for sync in taken.syncs {
                // Who asked may have gone.
                let _ = sync.send(answer.clone());
            }
            if taken.is_closed {
                return JournalEnd {
                    lost: self.writer.missing(),
                    flushed: answer.map(|_| ()),
                };
            }
        }
    }

    fn append_metrics(&mut self, ms: u64, metrics: &LoggedMetrics) {
        let mut points = Vec::new();
        for (name, value, count) in metrics.points() {
            self.key.clear();
            self.key.push_str(metrics.kind());
            if !metrics.kind().is_empty() {
                self.key.push('/');
            }
            self.key.push_str(name);
            let series = match self.series.get(&self.key) {
                Some(&series) => series,
                None => {
                    let i = self.series.len() as u32;
                    let key = self.key.clone();
                    self.writer.append(ms, Record::Series { i, key });
                    self.series.insert(self.key.clone(), i);
                    i
                }
            };
            points.push(PointValue {
                series,
                value,
                count,
            });
        }
        self.last_step = self.last_step.max(Some(metrics.step));
        self.writer.append(
            ms,
            Record::Metrics(Metrics {
                step: metrics.step,
                epoch: metrics.epoch.filter(|epoch| epoch.is_finite()),
                points,
            }),
        );
    }

    fn told(&mut self, written: io::Result<()>) {
        match written {
            Ok(()) if self.has_warned => {
                self.has_warned = false;
                tracing::info!(folder = %self.folder.display(), "the run is written again");
            }
            Err(error) if !self.has_warned => {
                self.has_warned = true;
                tracing::warn!(
                    folder = %self.folder.display(), %error,
                    "the run cannot be written now; training continues, and what is logged waits in memory"
                );
            }
            _ => {}
        }
    }
}

const TICK: Duration = Duration::from_millis(200);
const FLUSH_BYTES: usize = 1 << 20;

/// The pace at which the journal is written.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) enum Pace {
    /// Several times a second.
    #[default]
    Ticks,
    /// Whenever something is logged.
    Prompt,
}

/// Messages from the program to the thread that writes the journal.
///
/// When the queue is full, the program waits for a moment. If there is no room even then, the disk hangs: metrics are
/// counted and dropped, without waiting again, until there is room.
#[derive(Debug)]
pub(super) struct Queue {
    pace: Pace,
    state: Mutex<QueueState>,
    /// There is something that should not wait for the next tick.
    urgent: Condvar,
    room: Condvar,
}

#[derive(Debug, Default)]
pub(super) struct QueueState {
    pub(super) messages: Vec<(u64, Message)>,
    pub(super) lost: u64,
    /// Asks for everything up to here to be on the disk.
    pub(super) syncs: Vec<mpsc::Sender<Synced>>,
    pub(super) is_closed: bool,
    weight: usize,
    has_stalled: bool,
}

/// The greatest step that was logged and the number of the next entry.
pub(super) type Synced = Result<(Option<u64>, u64)>;

#[derive(Debug)]
pub(super) enum Message {
    Metrics(LoggedMetrics),
    Record(Record),
}

/// The metrics of a call, their names in one string.
#[derive(Debug)]
pub(super) struct LoggedMetrics {
    pub(super) step: u64,
    pub(super) epoch: Option<f64>,
    /// The kind, then the names.
    text: String,
    kind: usize,
    points: Vec<LoggedPoint>,
}

#[derive(Debug)]
struct LoggedPoint {
    name_ends: usize,
    value: Number,
    count: Option<u64>,
}

impl LoggedMetrics {
    pub(super) fn new(kind: &str, step: u64, epoch: Option<f64>) -> Self {
        Self {
            step,
            epoch,
            text: kind.to_owned(),
            kind: kind.len(),
            points: Vec::new(),
        }
    }

    pub(super) fn add(&mut self, name: &str, value: Number, count: Option<u64>) {
        self.text.push_str(name);
        self.points.push(LoggedPoint {
            name_ends: self.text.len(),
            value,
            count,
        });
    }

    pub(super) fn kind(&self) -> &str {
        &self.text[..self.kind]
    }

    pub(super) fn points(&self) -> impl Iterator<Item = (&str, Number, Option<u64>)> {
        let mut from = self.kind;
        self.points.iter().map(move |point| {
            let name = &self.text[std::mem::replace(&mut from, point.name_ends)..point.name_ends];
            (name, point.value, point.count)
        })
    }
}

impl Queue {
    pub(super) fn new(pace: Pace) -> Self {
        Self {
            pace,
            state: Mutex::default(),
            urgent: Condvar::default(),
            room: Condvar::default(),
        }
    }

    pub(super) fn push(&self, ms: u64, message: Message) {
        let mut state = self.state.lock();
        if state.weight >= MOST_WEIGHT && matches!(message, Message::Metrics(_)) {
            state = self.wait_for_room(state);
            if state.has_stalled {
                state.lost += 1;
                return;
            }
        }
        state.weight += match &message {
            Message::Metrics(metrics) => 8 + metrics.points.len(),
            Message::Record(_) => 8,
        };
        state.messages.push((ms, message));
        if state.weight >= MOST_WEIGHT / 4 || self.pace == Pace::Prompt {
            self.urgent.notify_one();
        }
    }

    /// Waits until what was pushed before is on the disk, for a limited time.
    pub(super) fn sync(&self) -> Synced {
        let (answer, synced) = mpsc::channel();
        self.state.lock().syncs.push(answer);
        self.urgent.notify_one();
        synced.recv_timeout(LONGEST_SYNC).map_err(|error| {
            let why = match error {
                RecvTimeoutError::Timeout => "the disk does not take the run's journal",
                RecvTimeoutError::Disconnected => WRITER_ENDED,
            };
            Error::new(Kind::Io, why)
        })?
    }

    pub(super) fn close(&self) {
        self.state.lock().is_closed = true;
        self.urgent.notify_one();
    }

    /// Takes what is queued, at the latest after a tick.
    pub(super) fn take(&self, tick: Duration) -> QueueState {
        let state = self.state.lock();
        let is_enough = |state: &QueueState| match self.pace {
            Pace::Ticks => state.weight >= MOST_WEIGHT / 4,
            Pace::Prompt => state.weight > 0,
        };
        let is_idle = |state: &mut QueueState| {
            !state.is_closed && state.syncs.is_empty() && !is_enough(state)
        };
        let mut state = self.urgent.wait_timeout_while(state, tick, is_idle);
        let is_closed = state.is_closed;
        let taken = std::mem::take(&mut *state);
        state.is_closed = is_closed;
        self.room.notify_all();
        taken
    }

    fn wait_for_room<'a>(&self, state: MutexGuard<'a, QueueState>) -> MutexGuard<'a, QueueState> {
        if state.has_stalled {
            return state;
        }
        let is_full = |state: &mut QueueState| state.weight >= MOST_WEIGHT;
        let mut state = self.room.wait_timeout_while(state, LONGEST_WAIT, is_full);
        state.has_stalled = state.weight >= MOST_WEIGHT;
        state
    }
}

const WRITER_ENDED: &str = "the thread that writes the run's journal has ended";

/// The weight of a full queue, in points of some 40 bytes each.
const MOST_WEIGHT: usize = 1 << 20;

/// The longest delay of a checkpoint.
const LONGEST_SYNC: Duration = Duration::from_secs(30);

/// The longest delay of steps by a disk that hangs, in all.
const LONGEST_WAIT: Duration = Duration::from_millis(200);

fn end(folder: PathBuf, cause: Value) -> Result<()> {
    let lock = RunLock::take(&folder)?;
    let (mut journal, _) = Journal::reopen(folder, lock)?;
    let ending = Record::End {
        status: EndStatus::Failed,
        failure: Some(cause),
    };
    journal.append(now_ms(), ending);
    journal.flush_or_fail()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::{Run, RunHistory, RunStatus};

    #[test]
    fn only_runs_of_the_launch_that_did_not_finish_have_failed() {
        let temporary = tempfile::tempdir().unwrap();
        let runs = temporary.path();
        let begin = |name: &str, launch: &str| {
            let run = Run::builder(name).runs_folder(runs).launch(launch);
            run.start().unwrap()
        };
        begin("finished", "1").finish().unwrap();
        drop(begin("killed", "1"));
        begin("failed", "1").fail("rank 1 is lost").unwrap();
        drop(begin("other", "2"));
        let report = json!({ "command": ["train", "--api-key", "abc"], "last_words": ["at http://me:abc@host/x"] });
        let cause = "rank 1 failed first: no http://me:abc@host/x";
        let recorded = record_failure(runs, "1", cause, &report).unwrap();
        assert_eq!(recorded.len(), 2);
        let status = |name: &str| RunHistory::read(runs.join(name)).unwrap().status();
        assert_eq!(status("finished"), RunStatus::Finished);
        assert_eq!(status("other"), RunStatus::Interrupted);
        for name in ["killed", "failed"] {
            let end = RunHistory::read(runs.join(name)).unwrap().end.unwrap();
            let cause = "rank 1 failed first: no http://***@host/x";
            assert_eq!(
                (end.status, end.failure.unwrap()),
                (EndStatus::Failed, json!(cause))
            );
            let kept = std::fs::read_to_string(runs.join(name).join(FAILURE)).unwrap();
            assert!(kept.contains("train") && !kept.contains("abc"), "{kept}");
        }
    }

    #[test]
    fn a_job_without_runs_leaves_nothing() {
        let temporary = tempfile::tempdir().unwrap();
        let runs = temporary.path().join("runs");
        assert_eq!(
            record_failure(&runs, "1", "x", &json!({})).unwrap(),
            [""; 0].map(PathBuf::from)
        );
        assert!(!runs.exists());
    }
}
