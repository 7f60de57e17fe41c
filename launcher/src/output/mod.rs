//! The ranks' output: read, prefixed, shown, and kept in log files.

mod lines;

use std::fs::{self, File};
use std::io::{self, ErrorKind, IsTerminal, Read, Write};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use accelerator_host::sync::Mutex;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::event::{Channel, Event};
use crate::text::utc;
pub(crate) use lines::headline;
use lines::{BlockingWriter, LastLines, Lines, Separator, SharedWriter, Source};

/// The number of bytes read at once.
const CHUNK: usize = 64 << 10;

/// The number of bytes of a stream that are still read after its rank has ended: what a pipe can hold and no more,
/// since a process that escaped could write for ever.
const MAX_AFTER_EXIT: usize = 2 << 20;

/// The time for which a stream may stay silent after its rank has ended before it is abandoned.
const SILENT_PIPE_TIMEOUT: Duration = Duration::from_secs(1);

/// One of the two streams of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Stream {
    /// Standard output.
    Out,
    /// Standard error.
    Err,
}

/// The way in which lines are marked with their rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Prefix {
    /// `[rank] ` before every line.
    Rank,
    /// Whole lines, unmarked.
    Lines,
    /// Bytes as they come: there is one rank only.
    Raw,
}

/// The fate of a job whose standard output cannot be written, as on a full disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum OnOutputError {
    /// It continues: training is worth more than its output.
    #[default]
    Continue,
    /// It ends with exit code 1: the output is its only result.
    EndJob,
}

/// The output of all ranks of a group. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Output {
    shared: Arc<Shared>,
    /// The outputs of the ranks, by rank.
    ranks: Arc<[Arc<RankOutput>]>,
}

impl Output {
    /// Opens the writers and, in `log_dir`, one log file per rank. Every restart of a job has its own log files.
    ///
    /// # Errors
    /// When the folder or a log file cannot be made.
    pub(crate) fn open(
        size: usize,
        prefix: Prefix,
        log_dir: Option<&Path>,
        restart: u64,
        on_output_error: OnOutputError,
        events: Sender<Event>,
    ) -> Result<Self> {
        let suffix = match restart {
            0 => String::new(),
            _ => format!(".restart-{restart}"),
        };
        let ranks = (0..size).map(|rank| RankOutput::open(rank, log_dir, &suffix));
        let ranks = ranks.collect::<Result<_>>()?;
        let (out, err) = (io::stdout().is_terminal(), io::stderr().is_terminal());
        let err_writer = Arc::new(SharedWriter::new(separator(err)));
        let out_writer = if out && err {
            Arc::clone(&err_writer)
        } else {
            Arc::new(SharedWriter::new(separator(out)))
        };
        Ok(Self {
            shared: Arc::new(Shared {
                prefix,
                coloured: [is_coloured(&io::stdout()), is_coloured(&io::stderr())],
                writers: [out_writer, err_writer],
                broken: [AtomicBool::new(false), AtomicBool::new(false)],
                on_output_error,
                lost: AtomicBool::new(false),
                writing: AtomicUsize::new(0),
                over: AtomicBool::new(false),
                events: Mutex::new(events),
            }),
            ranks,
        })
    }

    /// The output of the group that follows this one: `former` has the rank here of each of its ranks, where it runs
    /// already. Log files of the others have `suffix` in their names.
    ///
    /// # Errors
    /// When a log file cannot be made.
    pub(crate) fn regrouped(
        &self,
        former: &[Option<usize>],
        log_dir: Option<&Path>,
        suffix: &str,
    ) -> Result<Self> {
        let ranks = former.iter().enumerate().map(|(rank, former)| {
            match former.and_then(|former| self.ranks.get(former)) {
                Some(known) => Ok(Arc::clone(known)),
                None => RankOutput::open(rank, log_dir, suffix),
            }
        });
        Ok(Self {
            shared: Arc::clone(&self.shared),
            ranks: ranks.collect::<Result<_>>()?,
        })
    }

    /// Takes over the lines of `former`, whose group this one replaces: they are marked with the ranks of this group, and
    /// `events` are told.
    pub(crate) fn relabel(&self, former: &Self, events: Sender<Event>) {
        for (rank, known) in self.ranks.iter().enumerate() {
            known.rank.store(rank, Ordering::Relaxed);
        }
        for gone in former.ranks.iter() {
            if !self.ranks.iter().any(|known| Arc::ptr_eq(known, gone)) {
                gone.rank.store(GONE, Ordering::Relaxed);
            }
        }
        *self.shared.events.lock() = events;
    }

    /// Reads `pipe`, the given stream of `rank`, to its end on a thread of its own, which
    /// then sends [`Event::Drained`].
    ///
    /// # Errors
    /// When no thread can be started.
    pub(crate) fn read(&self, rank: usize, stream: Stream, pipe: File) -> Result<()> {
        let shared = Arc::clone(&self.shared);
        let Some(own) = self.ranks.get(rank).cloned() else {
            return Ok(());
        };
        thread::Builder::new()
            .name(format!("output-{rank}"))
            .spawn(move || {
                shared.read(&own, stream, pipe);
                if stream == Stream::Err {
                    own.stderr_drained.store(true, Ordering::Release);
                }
                shared.send(Event::Drained);
            })
            .map_err(|error| {
                Error::system(format!(
                    "a thread to read the output of rank {rank} could not be started"
                ))
                .with_source(error)
            })?;
        Ok(())
    }

    /// Writes lines of the launcher's own to standard error.
    pub(crate) fn note(&self, text: &str) {
        self.shared.note(text);
    }

    /// Waits until `readers` streams have come to their end, of which `drained` already did.
    ///
    /// Call it when the ranks are gone. It waits for a slow reader of the launcher's output,
    /// but neither for a process that escaped with a stream nor after another signal that asks
    /// to end, which it gives.
    pub(crate) fn drain(
        &self,
        readers: usize,
        mut drained: usize,
        channel: &Channel,
    ) -> Option<i32> {
        self.shared.over.store(true, Ordering::Relaxed);
        let mut silent_since = Instant::now();
        while drained < readers {
            match channel.next(Some(Instant::now() + Duration::from_millis(20))) {
                Event::Drained => {
                    drained += 1;
                    silent_since = Instant::now();
                }
                Event::Signal(signal) => return Some(signal),
                Event::Tick if self.shared.writing.load(Ordering::Relaxed) > 0 => {
                    silent_since = Instant::now();
                }
                Event::Tick if silent_since.elapsed() >= SILENT_PIPE_TIMEOUT => break,
                _ => {}
            }
        }
        // A stream that cannot be written to has been dealt with before.
        let _ = self.shared.writers[0].finish(&mut io::stdout());
        let _ = self.shared.writers[1].finish(&mut io::stderr());
        None
    }

    /// Returns `true` if standard output could not be written and the job ends because of it.
    pub(crate) fn has_lost_output(&self) -> bool {
        self.shared.lost.load(Ordering::Acquire)
    }

    /// The last lines of `rank`'s standard error.
    pub(crate) fn stderr_tail(&self, rank: usize) -> Vec<String> {
        self.ranks
            .get(rank)
            .map_or_else(Vec::new, |own| own.last_lines.lock().text())
    }

    /// Returns `true` if the standard error of `rank` has been read to its end.
    pub(crate) fn is_stderr_drained(&self, rank: usize) -> bool {
        let own = self.ranks.get(rank);
        own.is_none_or(|own| own.stderr_drained.load(Ordering::Acquire))
    }

    /// The log file of `rank`, if there is one.
    pub(crate) fn log(&self, rank: usize) -> Option<&Path> {
        let log = self.ranks.get(rank)?.log.as_ref()?;
        Some(log.path.as_path())
    }
}

/// The value of [`RankOutput::rank`] for a process that has left the job.
const GONE: usize = usize::MAX;

static NEXT_ID: AtomicUsize = AtomicUsize::new(0);

/// The part of a rank's output that is kept as long as its process runs.
#[derive(Debug)]
struct RankOutput {
    /// The rank with which its lines are marked; [`GONE`] if it has left the job.
    rank: AtomicUsize,
    /// Distinct among all ranks of this process.
    id: usize,
    log: Option<Log>,
    last_lines: Mutex<LastLines>,
    /// True if its standard error has come to its end.
    stderr_drained: AtomicBool,
}

impl RankOutput {
    fn open(rank: usize, log_dir: Option<&Path>, suffix: &str) -> Result<Arc<Self>> {
        let log = log_dir.map(|dir| open_log(dir, &format!("rank-{rank}{suffix}.log")));
        Ok(Arc::new(Self {
            rank: AtomicUsize::new(rank),
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            log: log.transpose()?,
            last_lines: Mutex::default(),
            stderr_drained: AtomicBool::new(false),
        }))
    }
}

#[derive(Debug)]
struct Shared {
    prefix: Prefix,
    coloured: [bool; 2],
    writers: [Arc<SharedWriter>; 2],
    /// True if the launcher's own streams have failed.
    broken: [AtomicBool; 2],
    on_output_error: OnOutputError,
    lost: AtomicBool,
    /// The number of readers that are writing at the moment.
    writing: AtomicUsize,
    /// True if all ranks have ended.
    over: AtomicBool,
    events: Mutex<Sender<Event>>,
}

impl Shared {
    fn send(&self, event: Event) {
        // Without a receiver the job is over.
        let _ = self.events.lock().send(event);
    }

    fn read(&self, own: &RankOutput, stream: Stream, mut pipe: File) {
        let mut lines = Lines::default();
        let mut chunk = vec![0; CHUNK];
        let mut remainder = MAX_AFTER_EXIT;
        loop {
            let bytes = match pipe.read(&mut chunk) {
                Ok(0) => break,
                Ok(count) => &chunk[..count],
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(_) => break,
            };
            self.writing.fetch_add(1, Ordering::Relaxed);
            if stream == Stream::Err {
                own.last_lines.lock().feed(bytes);
            }
            match self.prefix {
                Prefix::Raw => self.forward(own, stream, bytes),
                Prefix::Rank | Prefix::Lines => {
                    lines.feed(bytes, |block| self.forward(own, stream, block));
                }
            }
            self.writing.fetch_sub(1, Ordering::Relaxed);
            if self.over.load(Ordering::Relaxed) {
                remainder = remainder.saturating_sub(bytes.len());
                if remainder == 0 {
                    break;
                }
            }
        }
        self.writing.fetch_add(1, Ordering::Relaxed);
        lines.rest(|block| self.forward(own, stream, block));
        self.writing.fetch_sub(1, Ordering::Relaxed);
    }

    fn forward(&self, own: &RankOutput, stream: Stream, block: &[u8]) {
        let rank = own.rank.load(Ordering::Relaxed);
        let prefix = self.prefix_of(rank, stream);
        let source = match self.prefix {
            Prefix::Raw => Source::Raw,
            Prefix::Rank | Prefix::Lines => Source::Stream(2 * own.id + stream as usize),
        };
        if let Some(log) = &own.log
            && let Err(error) = log.file.lock().write_all(block)
            && !log.broken.swap(true, Ordering::Relaxed)
        {
            self.note(&format!(
                "{}: {error}; this log is incomplete",
                log.path.display()
            ));
        }
        self.show(stream, source, &prefix, block);
    }

    fn show(&self, stream: Stream, source: Source, prefix: &[u8], block: &[u8]) {
        let broken = &self.broken[stream as usize];
        if broken.load(Ordering::Relaxed) {
            return;
        }
        let writer = &self.writers[stream as usize];
        let result = match stream {
            Stream::Out => writer.write(source, prefix, block, &mut BlockingWriter(io::stdout())),
            Stream::Err => writer.write(source, prefix, block, &mut BlockingWriter(io::stderr())),
        };
        let Err(error) = result else { return };
        if broken.swap(true, Ordering::Relaxed) {
            return;
        }
        if error.kind() == ErrorKind::BrokenPipe {
            self.send(Event::OutputClosed);
        } else if stream == Stream::Out {
            let what = match self.on_output_error {
                OnOutputError::Continue => "; the job continues without it",
                OnOutputError::EndJob => "",
            };
            self.note(&format!("standard output cannot be written: {error}{what}"));
            if self.on_output_error == OnOutputError::EndJob {
                self.lost.store(true, Ordering::Release);
                self.send(Event::OutputClosed);
            }
        }
    }

    fn note(&self, text: &str) {
        let mut block = String::new();
        for line in text.lines() {
            block.push_str("accel-launch: ");
            block.push_str(line);
            block.push('\n');
        }
        self.show(Stream::Err, Source::Launcher, b"", block.as_bytes());
    }

    fn prefix_of(&self, rank: usize, stream: Stream) -> Vec<u8> {
        /// Colours that are neither red, which means failure, nor hard to read.
        const COLOURS: [u8; 6] = [36, 33, 35, 32, 34, 96];
        match self.prefix {
            Prefix::Raw | Prefix::Lines => Vec::new(),
            Prefix::Rank if rank == GONE => b"[left] ".to_vec(),
            Prefix::Rank if self.coloured[stream as usize] => {
                format!("\x1b[{}m[{rank}]\x1b[0m ", COLOURS[rank % COLOURS.len()]).into_bytes()
            }
            Prefix::Rank => format!("[{rank}] ").into_bytes(),
        }
    }
}

fn separator(terminal: bool) -> Separator {
    if terminal && !is_dumb() {
        Separator::Erase
    } else {
        Separator::Newline
    }
}

/// Returns `true` if a stream shows colours: it is a terminal that can, and neither `NO_COLOR` nor `CLICOLOR` says
/// otherwise.
fn is_coloured(stream: &impl anstream::stream::RawStream) -> bool {
    anstream::AutoStream::choice(stream) != anstream::ColorChoice::Never
}

fn is_dumb() -> bool {
    std::env::var_os("TERM").is_some_and(|term| term == "dumb")
}

/// Makes a folder in `logs` for one run with all its restarts, named by the time: their names are in the order
/// in which the runs began.
pub(crate) fn create_run_folder(logs: &Path) -> Result<PathBuf> {
    create_unique(logs).map_err(|error| {
        Error::usage(format!(
            "--log-dir {}: no folder for this run can be made; name a folder that can be written",
            logs.display()
        ))
        .with_source(error)
    })
}

/// Points the link `latest` at `run` in one step: readers find the run before or this one, never nothing.
///
/// # Errors
/// When something that is no link has its name, or the system has no links.
pub(crate) fn point_latest(run: &Path) -> io::Result<()> {
    let (Some(logs), Some(name)) = (run.parent(), run.file_name()) else {
        return Err(ErrorKind::InvalidInput.into());
    };
    let latest = logs.join(LATEST);
    if fs::symlink_metadata(&latest).is_ok_and(|found| !found.is_symlink()) {
        return Err(io::Error::new(ErrorKind::AlreadyExists, "it is no link"));
    }
    // The run's name is its own, so this one is free.
    let link = logs.join(format!(".{LATEST}-{}", name.to_string_lossy()));
    symlink(name, &link)?;
    fs::rename(&link, latest).inspect_err(|_| {
        let _ = fs::remove_file(&link);
    })
}

/// The log file of a rank.
#[derive(Debug)]
pub(crate) struct Log {
    pub(crate) path: PathBuf,
    pub(crate) file: Mutex<File>,
    /// True if a write to it has failed.
    pub(crate) broken: AtomicBool,
}

/// Opens a log file in `dir`.
///
/// # Errors
/// When the folder or the file cannot be made.
fn open_log(dir: &Path, name: &str) -> Result<Log> {
    fs::create_dir_all(dir).map_err(|error| {
        Error::usage(format!(
            "--log-dir {}: the folder cannot be made; name one that can be written",
            dir.display()
        ))
        .with_source(error)
    })?;
    let path = dir.join(name);
    // Opening a pipe would wait for its other end.
    if fs::metadata(&path).is_ok_and(|found| !found.is_file()) {
        return Err(Error::usage(format!(
            "--log-dir: {} is there and no plain file; name another folder",
            path.display()
        )));
    }
    let file = File::create(&path).map_err(|error| {
        let message = format!(
            "--log-dir: {} cannot be written; name another folder",
            path.display()
        );
        Error::usage(message).with_source(error)
    })?;
    Ok(Log {
        path,
        file: Mutex::new(file),
        broken: AtomicBool::new(false),
    })
}

/// The link to the last run that began.
pub(crate) const LATEST: &str = "latest";

fn create_unique(logs: &Path) -> io::Result<PathBuf> {
    fs::create_dir_all(logs)?;
    // Tools that copy between hosts read a colon as the end of a host's name.
    let began = utc(SystemTime::now()).replace(':', "-");
    let mut run = logs.join(&began);
    let mut others = 1;
    loop {
        match fs::create_dir(&run) {
            Ok(()) => return Ok(run),
            // Another run began in the same second.
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                others += 1;
                run = logs.join(format!("{began}-{others}"));
            }
            Err(error) => return Err(error),
        }
    }
}
