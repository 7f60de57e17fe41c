//! The ranks' output: read, prefixed, shown, and kept in log files.

mod lines;
pub(crate) mod runs;
mod screen;
mod tail;

use std::fs::File;
use std::io::{self, ErrorKind, IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::signals;
use crate::supervise::Notice;
use lines::Lines;
use screen::{Parting, Screen, Writer};
use tail::Tail;
pub(crate) use tail::headline;

/// How much is read at once.
const CHUNK: usize = 64 << 10;

/// How much of a stream is still read once its rank is gone: what a pipe can hold, and no more,
/// since a process that escaped could write on for ever.
const REMAINDER: usize = 2 << 20;

/// How long a stream may stay silent, with its rank gone, before it is left.
const SILENCE: Duration = Duration::from_secs(1);

/// One of the two streams of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stream {
    /// Standard output.
    Out,
    /// Standard error.
    Err,
}

/// How lines are marked with their rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Prefix {
    /// `[rank] ` before every line.
    Rank,
    /// Whole lines, unmarked.
    Lines,
    /// Bytes as they come: there is one rank only.
    Raw,
}

/// What becomes of a job whose standard output cannot be written, as on a disk that is full.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum LostOutput {
    /// It goes on: training is worth more than what it says.
    #[default]
    GoesOn,
    /// It ends with exit code 1: what it says is all that it is for.
    Ends,
}

/// What the launcher does with the output of `size` ranks. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Output {
    shared: Arc<Shared>,
}

impl Output {
    /// Prepares screens and, in `log_dir`, the folder of this run, one log file a rank. Every restart of a job has
    /// log files of its own.
    ///
    /// # Errors
    /// When the folder or a log file cannot be made.
    pub(crate) fn open(
        size: usize,
        prefix: Prefix,
        log_dir: Option<&Path>,
        restart: u64,
        lost_output: LostOutput,
        notices: Sender<Notice>,
    ) -> Result<Self> {
        let logs = match log_dir {
            Some(dir) => open_logs(dir, size, restart)?,
            None => Vec::new(),
        };
        let (out, err) = (io::stdout().is_terminal(), io::stderr().is_terminal());
        let err_screen = Arc::new(Screen::new(parting(err)));
        let out_screen = if out && err {
            Arc::clone(&err_screen)
        } else {
            Arc::new(Screen::new(parting(out)))
        };
        Ok(Self {
            shared: Arc::new(Shared {
                prefix,
                coloured: [out && colours_wanted(), err && colours_wanted()],
                screens: [out_screen, err_screen],
                broken: [AtomicBool::new(false), AtomicBool::new(false)],
                lost_output,
                lost: AtomicBool::new(false),
                logs,
                tails: (0..size).map(|_| Mutex::default()).collect(),
                complained: (0..size).map(|_| AtomicBool::new(false)).collect(),
                writing: AtomicUsize::new(0),
                over: AtomicBool::new(false),
                notices,
            }),
        })
    }

    /// Reads `pipe`, the given stream of `rank`, to its end on a thread of its own, which
    /// then sends [`Notice::Drained`].
    ///
    /// # Errors
    /// When no thread can be started.
    pub(crate) fn read(&self, rank: usize, stream: Stream, pipe: File) -> Result<()> {
        let shared = Arc::clone(&self.shared);
        thread::Builder::new()
            .name(format!("output-{rank}"))
            .spawn(move || {
                shared.read(rank, stream, pipe);
                if stream == Stream::Err {
                    shared.complained[rank].store(true, Ordering::Release);
                }
                let _ = shared.notices.send(Notice::Drained);
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
        notices: &Receiver<Notice>,
    ) -> Option<i32> {
        self.shared.over.store(true, Ordering::Relaxed);
        let mut silent_since = Instant::now();
        while drained < readers {
            match notices.recv_timeout(Duration::from_millis(20)) {
                Ok(Notice::Drained) => {
                    drained += 1;
                    silent_since = Instant::now();
                }
                Ok(Notice::Signal(signal)) if signals::asks_to_end(signal) => return Some(signal),
                Ok(_) => {}
                Err(RecvTimeoutError::Timeout) => {
                    if self.shared.writing.load(Ordering::Relaxed) > 0 {
                        silent_since = Instant::now();
                    } else if silent_since.elapsed() >= SILENCE {
                        break;
                    }
                }
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        // A stream that cannot be written to has been dealt with before.
        let _ = self.shared.screens[0].finish(&mut io::stdout());
        let _ = self.shared.screens[1].finish(&mut io::stderr());
        None
    }

    /// Whether standard output could not be written, and the job is to end for it.
    pub(crate) fn is_lost(&self) -> bool {
        self.shared.lost.load(Ordering::Acquire)
    }

    /// The last lines of `rank`'s standard error.
    pub(crate) fn last_words(&self, rank: usize) -> Vec<String> {
        self.shared
            .tails
            .get(rank)
            .map_or_else(Vec::new, |tail| lock(tail).text())
    }

    /// Whether all that `rank` wrote to its standard error has been read.
    pub(crate) fn has_said_all(&self, rank: usize) -> bool {
        let complained = self.shared.complained.get(rank);
        complained.is_none_or(|complained| complained.load(Ordering::Acquire))
    }

    /// The log file of `rank`, if there is one.
    pub(crate) fn log(&self, rank: usize) -> Option<&Path> {
        self.shared.logs.get(rank).map(|log| log.path.as_path())
    }
}

#[derive(Debug)]
struct Shared {
    prefix: Prefix,
    coloured: [bool; 2],
    screens: [Arc<Screen>; 2],
    /// Streams of the launcher that take no more.
    broken: [AtomicBool; 2],
    lost_output: LostOutput,
    lost: AtomicBool,
    logs: Vec<Log>,
    tails: Vec<Mutex<Tail>>,
    /// Whether a rank's standard error has come to its end.
    complained: Vec<AtomicBool>,
    /// How many readers are handing on what they read.
    writing: AtomicUsize,
    /// Whether the ranks are gone.
    over: AtomicBool,
    notices: Sender<Notice>,
}

impl Shared {
    fn read(&self, rank: usize, stream: Stream, mut pipe: File) {
        let prefix = self.prefix_of(rank, stream);
        let writer = match self.prefix {
            Prefix::Raw => Writer::Raw,
            Prefix::Rank | Prefix::Lines => Writer::Stream(2 * rank + stream as usize),
        };
        let mut lines = Lines::default();
        let mut chunk = vec![0; CHUNK];
        let mut remainder = REMAINDER;
        loop {
            let bytes = match pipe.read(&mut chunk) {
                Ok(0) => break,
                Ok(count) => &chunk[..count],
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(_) => break,
            };
            self.writing.fetch_add(1, Ordering::Relaxed);
            if stream == Stream::Err {
                lock(&self.tails[rank]).feed(bytes);
            }
            match self.prefix {
                Prefix::Raw => self.hand_on(rank, stream, writer, &prefix, bytes),
                Prefix::Rank | Prefix::Lines => {
                    lines.feed(bytes, |block| {
                        self.hand_on(rank, stream, writer, &prefix, block)
                    });
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
        lines.rest(|block| self.hand_on(rank, stream, writer, &prefix, block));
        self.writing.fetch_sub(1, Ordering::Relaxed);
    }

    fn hand_on(&self, rank: usize, stream: Stream, writer: Writer, prefix: &[u8], block: &[u8]) {
        if let Some(log) = self.logs.get(rank)
            && let Err(error) = lock(&log.file).write_all(block)
            && !log.broken.swap(true, Ordering::Relaxed)
        {
            self.note(&format!(
                "{}: {error}; this log is incomplete",
                log.path.display()
            ));
        }
        self.show(stream, writer, prefix, block);
    }

    fn show(&self, stream: Stream, writer: Writer, prefix: &[u8], block: &[u8]) {
        let broken = &self.broken[stream as usize];
        if broken.load(Ordering::Relaxed) {
            return;
        }
        let screen = &self.screens[stream as usize];
        let result = match stream {
            Stream::Out => screen.write(writer, prefix, block, &mut Patient(io::stdout())),
            Stream::Err => screen.write(writer, prefix, block, &mut Patient(io::stderr())),
        };
        let Err(error) = result else { return };
        if broken.swap(true, Ordering::Relaxed) {
            return;
        }
        if error.kind() == ErrorKind::BrokenPipe {
            let _ = self.notices.send(Notice::OutputClosed);
        } else if stream == Stream::Out {
            let what = match self.lost_output {
                LostOutput::GoesOn => "; the job goes on without it",
                LostOutput::Ends => "",
            };
            self.note(&format!("standard output cannot be written: {error}{what}"));
            if self.lost_output == LostOutput::Ends {
                self.lost.store(true, Ordering::Release);
                let _ = self.notices.send(Notice::OutputClosed);
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
        self.show(Stream::Err, Writer::Launcher, b"", block.as_bytes());
    }

    fn prefix_of(&self, rank: usize, stream: Stream) -> Vec<u8> {
        /// Colours that are neither red, which means failure, nor hard to read.
        const COLOURS: [u8; 6] = [36, 33, 35, 32, 34, 96];
        match self.prefix {
            Prefix::Raw | Prefix::Lines => Vec::new(),
            Prefix::Rank if self.coloured[stream as usize] => {
                format!("\x1b[{}m[{rank}]\x1b[0m ", COLOURS[rank % COLOURS.len()]).into_bytes()
            }
            Prefix::Rank => format!("[{rank}] ").into_bytes(),
        }
    }
}

#[derive(Debug)]
struct Log {
    path: PathBuf,
    file: Mutex<File>,
    broken: AtomicBool,
}

/// A writer that waits where a non-blocking target is full.
struct Patient<W>(W);

impl<W: Write + std::os::fd::AsFd> Write for Patient<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            match self.0.write(bytes) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.wait()?,
                result => return result,
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        loop {
            match self.0.flush() {
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.wait()?,
                result => return result,
            }
        }
    }
}

impl<W: Write + std::os::fd::AsFd> Patient<W> {
    fn wait(&self) -> io::Result<()> {
        use rustix::event::{PollFd, PollFlags, poll};
        match poll(&mut [PollFd::new(&self.0, PollFlags::OUT)], None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

fn open_logs(dir: &Path, size: usize, restart: u64) -> Result<Vec<Log>> {
    std::fs::create_dir_all(dir).map_err(|error| {
        Error::usage(format!(
            "--log-dir {}: the folder cannot be made; name one that can be written",
            dir.display()
        ))
        .with_source(error)
    })?;
    (0..size)
        .map(|rank| {
            let path = dir.join(match restart {
                0 => format!("rank-{rank}.log"),
                _ => format!("rank-{rank}.restart-{restart}.log"),
            });
            // Opening a pipe would wait for its other end.
            if std::fs::metadata(&path).is_ok_and(|found| !found.is_file()) {
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
        })
        .collect()
}

fn parting(terminal: bool) -> Parting {
    if terminal && !is_dumb() {
        Parting::Erase
    } else {
        Parting::Newline
    }
}

fn colours_wanted() -> bool {
    accelerator_collective::variable("NO_COLOR").is_none() && !is_dumb()
}

fn is_dumb() -> bool {
    std::env::var_os("TERM").is_some_and(|term| term == "dumb")
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
