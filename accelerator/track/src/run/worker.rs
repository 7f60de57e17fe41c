//! The thread that writes the journal.

use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::feeder::Feeder;
use super::queue::{self, LoggedMetrics, Message, Queue};
use crate::error::{Error, Kind, Result};
use crate::journal::{self, JOURNAL, JournalWriter, RunLock};
use crate::record::{Metrics, PointValue, Record};
use crate::run_id::RunId;
use crate::sink::Sink;
use crate::warning::warn;

/// Writes what is in the queue until it is closed, and has sinks fed.
#[derive(Debug)]
pub(super) struct Worker {
    queue: Arc<Queue>,
    thread: Option<JoinHandle<JournalEnd>>,
    feeders: Vec<Feeder>,
}

/// How the journal stands once its thread has ended.
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
            flushed: Err(Error::new(Kind::Io, queue::WRITER_ENDED)),
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
    /// That of a point, made in place.
    key: String,
    last_step: Option<u64>,
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
            has_warned: false,
            _lock: lock,
        }
    }

    /// That of a run that goes on, and the run's identity and name.
    pub(super) fn reopen(folder: PathBuf, lock: RunLock) -> Result<(Self, (RunId, String))> {
        let (mut head, mut attempts, mut last_step) = (None, 0, None);
        let mut series = HashMap::new();
        let path = folder.join(JOURNAL);
        // What is no journal, or a newer one, stays as it is: opening cuts off what is not intact.
        journal::first_entry(&path)?;
        let writer = JournalWriter::open(&path, |entry| match entry.record {
            Record::Head { version, run, name } => head = Some((version, run, name)),
            Record::Attempt { attempt, .. } => attempts = attempt + 1,
            Record::Series { i, key } => {
                series.insert(key, i);
            }
            Record::Rewind { to } => last_step = to,
            record => last_step = last_step.max(record.step()),
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
                    "the run cannot be written now; training goes on, and what is logged waits in memory"
                );
            }
            _ => {}
        }
    }
}

const TICK: Duration = Duration::from_millis(200);
const FLUSH_BYTES: usize = 1 << 20;
