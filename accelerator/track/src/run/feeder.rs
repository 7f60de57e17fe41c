//! Delivers a run to a sink.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use accelerator_host::sync::Mutex;

use crate::error::{Error, Kind, Result, warn};
use crate::history::HistoryReader;
use crate::journal::{Followed, Follower, JOURNAL, RankJournals, RunLock};
use crate::record::Record;
use crate::sink::{Origin, RunInfo, Sink, SinkPosition};
use accelerator_host::text::shell_line;

/// Delivers what is in a run's journal to a sink now.
///
/// # Errors
///
/// If there is no run, the sink refuses it, or another process delivers the run to the sink.
///
/// ```
/// use accelerator_track::{CsvFile, Run, internal::deliver};
///
/// # let temporary = tempfile::tempdir().unwrap();
/// let run = Run::builder("mnist").runs_folder(temporary.path()).start()?;
/// run.log("train", [("loss", 0.5)], 1, None);
/// run.flush()?;
/// deliver(run.folder(), &mut CsvFile::in_run())?;
/// assert!(run.folder().join("metrics.csv").exists());
/// # Ok::<(), accelerator_track::Error>(())
/// ```
pub fn deliver(folder: impl AsRef<Path>, sink: &mut dyn Sink) -> Result<()> {
    let folder = folder.as_ref();
    // A folder without a run gets no lock.
    HistoryReader::open(folder)?;
    let _lock = RunLock::take_for_sink(folder, &sink.name())?;
    export(folder, sink)
}

/// Delivers what is in a run's journal to a sink that nothing else delivers to. Unlike [`deliver`], it writes nothing
/// to the run's folder, and so does not need to be able to.
///
/// # Errors
///
/// If there is no run, or the sink refuses it.
///
/// ```
/// use accelerator_track::{CsvFile, Run, internal::export};
///
/// # let temporary = tempfile::tempdir().unwrap();
/// let run = Run::builder("mnist").runs_folder(temporary.path()).start()?;
/// run.log("train", [("loss", 0.5)], 1, None);
/// run.flush()?;
/// let table = temporary.path().join("mnist.csv");
/// export(run.folder(), &mut CsvFile::at(&table))?;
/// assert!(table.exists() && !run.folder().join("metrics.csv").exists());
/// # Ok::<(), accelerator_track::Error>(())
/// ```
pub fn export(folder: impl AsRef<Path>, sink: &mut dyn Sink) -> Result<()> {
    let mut delivery = OpenSink::open(folder.as_ref(), sink, None)?;
    while delivery.advance(sink)? == Advanced::More {}
    Ok(())
}

/// A thread that delivers to a sink as the run is written.
#[derive(Debug)]
pub(super) struct Feeder {
    name: String,
    /// The command that delivers the rest.
    advice: String,
    stop: mpsc::Sender<Stop>,
    /// The outcome, behind a lock so that a run can be shared by threads.
    done: Mutex<mpsc::Receiver<Fed>>,
}

/// The end of a feeder.
#[derive(Clone, Copy, Debug)]
enum Stop {
    /// Stops once everything has been delivered, or time is up.
    Delivered,
    /// Stops at once.
    Now,
}

/// The outcome, and the sink.
type Fed = (Result<()>, Box<dyn Sink>);

impl Feeder {
    pub(super) fn start(folder: &Path, sink: Box<dyn Sink>) -> Result<Self> {
        let (stop, stopped) = mpsc::channel();
        let (ended, done) = mpsc::channel();
        let folder = folder.to_owned();
        let name = sink.name();
        let advice = advice(&folder, &*sink);
        thread::Builder::new()
            .name("run-sink".to_owned())
            .spawn(move || {
                let mut sink = sink;
                let fed = feed(&folder, &mut *sink, &stopped);
                // Who waited may have gone.
                let _ = ended.send((fed, sink));
            })
            .map_err(|error| Error::new(Kind::Io, format!("no thread for {name}: {error}")))?;
        Ok(Self {
            name,
            advice,
            stop,
            done: Mutex::new(done),
        })
    }

    /// Waits until everything is delivered, for a limited time.
    pub(super) fn finish(self) {
        let problem = match self.end(Stop::Delivered) {
            Some((Ok(()), _)) => return,
            Some((Err(error), _)) => error.to_string(),
            None => format!(
                "it did not take everything within {} s",
                LAST_DELIVERY.as_secs()
            ),
        };
        let Self { name, advice, .. } = &self;
        warn(&format!(
            "the run was not delivered completely to {name}: {problem}; {advice}"
        ));
    }

    /// Gives the sink back, unless it is busy for too long.
    pub(super) fn release(self) -> Option<Box<dyn Sink>> {
        let released = self.end(Stop::Now);
        if released.is_none() {
            warn(&format!(
                "{} is busy for more than {} s, and gets nothing more of this training; {}",
                self.name,
                LAST_DELIVERY.as_secs(),
                self.advice
            ));
        }
        released.map(|(_, sink)| sink)
    }

    fn end(&self, stop: Stop) -> Option<Fed> {
        // The thread may have ended.
        let _ = self.stop.send(stop);
        let done = self.done.lock();
        done.recv_timeout(LAST_DELIVERY).ok()
    }
}

fn feed(folder: &Path, sink: &mut dyn Sink, stopped: &mpsc::Receiver<Stop>) -> Result<()> {
    let mut open: Option<OpenSink> = None;
    let mut has_warned = false;
    let mut is_waiting = false;
    let mut pause = TICK;
    let mut until = None;
    loop {
        let result = match open.as_mut() {
            Some(open) => open.advance(sink),
            None => RunLock::take_for_sink(folder, &sink.name())
                .and_then(|lock| OpenSink::open(folder, sink, Some(lock)))
                .map(|opened| {
                    open = Some(opened);
                    Advanced::More
                }),
        };
        match result {
            Ok(Advanced::More) => continue,
            Ok(Advanced::Complete) => {
                if has_warned {
                    has_warned = false;
                    tracing::info!(sink = sink.name(), "the run is delivered again");
                }
                pause = TICK;
                if until.is_some() {
                    return Ok(());
                }
            }
            Err(error) => {
                open = None;
                if let Some(until) = until {
                    if !error.is_temporary() || Instant::now() + pause >= until {
                        return Err(error);
                    }
                    if !is_waiting {
                        is_waiting = true;
                        warn(&format!(
                            "the end waits for {}, for at most {} s: {error}",
                            sink.name(),
                            LAST_DELIVERY.as_secs()
                        ));
                    }
                } else if !has_warned {
                    has_warned = true;
                    tracing::warn!(
                        sink = sink.name(), %error,
                        "the run cannot be delivered now; training continues, and it is tried again"
                    );
                }
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        }
        if until.is_some() {
            thread::sleep(pause);
            continue;
        }
        match stopped.recv_timeout(pause) {
            Err(RecvTimeoutError::Timeout) => {}
            Ok(Stop::Now) => return Ok(()),
            Ok(Stop::Delivered) | Err(RecvTimeoutError::Disconnected) => {
                until = Some(Instant::now() + LAST_DELIVERY);
                pause = TICK;
            }
        }
    }
}

/// The advice that names the command which delivers the rest of a run to a sink.
pub(super) fn advice(folder: &Path, sink: &dyn Sink) -> String {
    let options = sink.sync_options();
    if options.is_empty() {
        return format!("the journal in {} has the rest", folder.display());
    }
    let mut run = folder.to_string_lossy().into_owned();
    if !run.contains('/') {
        // Otherwise it is a name in the folder `runs`.
        run.insert_str(0, "./");
    }
    let words = shell_line([run].into_iter().chain(options));
    format!("`accel-launch runs sync {words}` delivers the rest")
}

/// The position of a sink that was opened.
struct OpenSink {
    folder: PathBuf,
    run: RunInfo,
    journal: Follower,
    ranks: RankJournals,
    position: SinkPosition,
    _lock: Option<RunLock>,
}

#[derive(Debug, Eq, PartialEq)]
enum Advanced {
    /// There may be more.
    More,
    /// Everything that was written has been delivered.
    Complete,
}

impl OpenSink {
    fn open(folder: &Path, sink: &mut dyn Sink, lock: Option<RunLock>) -> Result<Self> {
        let reader = HistoryReader::open(folder)?;
        let history = reader.history();
        let run = RunInfo {
            id: history.id,
            name: history.name.clone(),
            folder: folder.to_owned(),
            created_ms: history.created_ms,
        };
        let journal = Follower::open(&folder.join(JOURNAL), sink.delivery())?;
        let mut position = sink.open(&run)?;
        let length = journal.journal_length();
        if position.next > length {
            tracing::warn!(
                sink = sink.name(),
                run = run.name,
                "the journal has {length} entries, and {} were delivered: it lost its end, or is an older copy; all of it is \
                 delivered again",
                position.next
            );
            position.next = 0;
        }
        Ok(Self {
            folder: folder.to_owned(),
            run,
            journal,
            ranks: RankJournals::default(),
            position,
            _lock: lock,
        })
    }

    fn advance(&mut self, sink: &mut dyn Sink) -> Result<Advanced> {
        let mut has_written = false;
        match self.journal.poll(BATCH)? {
            Followed::Superseded => {
                self.position = sink.open(&self.run)?;
                self.ranks = RankJournals::default();
                return Ok(Advanced::More);
            }
            Followed::Entries(entries) => {
                for entry in &entries {
                    // A sink that continues in the middle also needs the numbers of series.
                    let is_series = matches!(entry.record, Record::Series { .. });
                    if entry.n >= self.position.next || is_series {
                        sink.write(Origin::Run, entry)?;
                    }
                    has_written = true;
                }
            }
        }
        for (rank, entries) in self.ranks.poll(&self.folder, BATCH) {
            let from = self.position.ranks.get(&rank).copied().unwrap_or(0);
            for entry in entries.iter().filter(|entry| entry.n >= from) {
                sink.write(Origin::Rank(rank), entry)?;
            }
            has_written = true;
        }
        if has_written {
            sink.flush()?;
            return Ok(Advanced::More);
        }
        Ok(Advanced::Complete)
    }
}

const BATCH: usize = 4096;
const TICK: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// The time for what is left at the end of a run.
const LAST_DELIVERY: Duration = Duration::from_secs(30);
