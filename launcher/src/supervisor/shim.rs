//! The shim: the process that a user starts, and the pipe between it and the launcher proper.
//!
//! Each of the two ends all processes of the job if the other is killed. `README.md` beside this file explains how.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus};
use signal_hook::consts::signal;

use super::signals::{self, Relay, Route};
use crate::process::descendants::{self, Excluded};
use crate::process::{self, End};

/// The process name of the launcher proper; `pkill accel-launch` does not match it.
const NAME: &str = "accel-job";

/// Precedes the file descriptor of the pipe in the launcher proper's arguments.
const PIPE_MARK: &str = "liveness-pipe:";

/// The source of a shim's commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Control {
    /// Any process that sends signals to it.
    Signals,
    /// Signals, and one byte per signal on its standard input. The end of that input kills the job.
    StandardInput,
}

/// Starts this program once more, as the launcher proper, waits for it, and returns its exit code.
///
/// `prepare` changes the command that starts the launcher proper. Returns `None` if the system does not support it
/// (there is no `/proc`, or it is not Linux); the job then runs in this process.
pub(crate) fn run(
    arguments: &[OsString],
    prepare: impl FnOnce(&mut Command),
    control: Control,
) -> Option<ExitCode> {
    if !descendants::become_subreaper() {
        return None;
    }
    // A shell that became this program by `exec` may have left it children.
    let excluded = Excluded::present();
    let (read_end, mut write_end) = pipe_with(PipeFlags::CLOEXEC)
        .map(|(read_end, write_end)| (read_end, File::from(write_end)))
        .ok()?;
    // Before the start, so that no signal in between ends the shim alone.
    let mut signals = signals::receive(&[signal::SIGTSTP, signal::SIGCONT]).ok()?;
    let number = std::os::fd::AsRawFd::as_raw_fd(&read_end);
    let mut command = Command::new("/proc/self/exe");
    command
        .arg0(NAME)
        .arg(format!("{PIPE_MARK}{number}"))
        .args(arguments);
    prepare(&mut command);
    if control == Control::StandardInput {
        command.stdin(Stdio::null());
    }
    // Before the process is started, which would have to be ended if this failed.
    let commands = match control {
        Control::StandardInput => Some(write_end.try_clone().ok()?),
        Control::Signals => None,
    };
    let mut child = process::spawn_with(&mut command, read_end).ok()?;
    // It held this process's copy of the read end.
    drop(command);
    let asked = Arc::new(AtomicBool::new(false));
    if let Some(commands) = commands {
        let (excluded, asked) = (excluded.clone(), Arc::clone(&asked));
        let obey = move || obey(commands, &excluded, &asked);
        // After the start: when standard input ends, it kills the process, which has to be there.
        let thread = thread::Builder::new().name("commands".into()).spawn(obey);
        if thread.is_err() {
            // Its end is all that is waited for.
            let _ = child.kill();
            let _ = child.wait();
            return None;
        }
    }
    let forward = {
        let asked = Arc::clone(&asked);
        let mut pass_on = move |received: &[i32]| {
            for &signal in received {
                asked.fetch_or(signals::asks_to_end(signal), Ordering::Relaxed);
                // Signal numbers fit in a byte. A launcher that is gone needs none.
                let _ = write_end.write_all(&[signal as u8]);
            }
        };
        move || {
            while !signals.handle().is_closed() {
                // They come in the order of their numbers. As in the kernel, SIGCONT cancels a SIGTSTP, and nobody stops
                // whom no shell would continue.
                let mut received: Vec<i32> = signals.wait().collect();
                let is_to_stop = received.contains(&signal::SIGTSTP)
                    && !received.contains(&signal::SIGCONT)
                    && !descendants::is_in_orphaned_group();
                received.retain(|&signal| signal != signal::SIGTSTP || is_to_stop);
                pass_on(&received);
                if !is_to_stop {
                    continue;
                }
                // SIGSTOP would discard it.
                let is_continued = signals::is_pending(signal::SIGCONT);
                let mut late: Vec<i32> = signals.pending().collect();
                late.retain(|&signal| signal != signal::SIGTSTP);
                pass_on(&late);
                if !is_continued && !late.contains(&signal::SIGCONT) {
                    // The shell waits for this process, and continues it.
                    let _ = rustix::process::kill_process(rustix::process::getpid(), Signal::STOP);
                }
            }
        }
    };
    // Should there be no thread, `forward` is dropped, and the launcher proper ends the job as if
    // this process had been killed.
    let _ = thread::Builder::new().name("signals".into()).spawn(forward);

    let pid = child.id().cast_signed();
    let (end, mut killed) = wait(pid);
    Some(match end {
        End::Code(_) | End::Lost => ExitCode::from(end.exit_code()),
        End::Signal(_) => {
            killed.extend(descendants::kill(&excluded));
            killed.extend(reap_killed());
            let count = killed.len();
            // Asked to end before it had handlers, it ended as any program does.
            let is_ordinary = asked.load(Ordering::Relaxed) && count == 0;
            if !is_ordinary {
                print(&format!(
                    "the process that ran the job (pid {pid}) was {end}; ended {} of the job",
                    processes(count)
                ));
            }
            ExitCode::from(end.exit_code())
        }
    })
}

/// The launcher proper's end of the pipe whose other end the shim holds.
#[derive(Debug)]
pub(crate) struct LivenessPipe {
    pipe: File,
}

impl LivenessPipe {
    /// Takes the pipe's file descriptor out of `arguments`, if the shim has put it there.
    ///
    /// Call it first of all in `main`.
    pub(crate) fn take(arguments: &mut Vec<OsString>) -> Option<Self> {
        let [name, mark, ..] = arguments.as_slice() else {
            return None;
        };
        let number = mark.to_str()?.strip_prefix(PIPE_MARK)?.parse().ok()?;
        if name != NAME {
            return None;
        }
        let pipe = File::from(process::inherited(number)?);
        arguments.drain(..2);
        #[cfg(target_os = "linux")]
        let _ = rustix::thread::set_name(c"accel-job");
        descendants::become_subreaper();
        Some(Self { pipe })
    }

    /// Hands the signals that the shim receives to `relay`, on a thread of its own; when the
    /// shim is gone, calls `before_end`, and ends every process of the job at once, and this one with them.
    ///
    /// Without such a thread a `kill -9` of the shim ends nothing, and the job runs on.
    pub(crate) fn listen(self, relay: Relay, before_end: impl FnOnce() + Send + 'static) {
        let mut pipe = self.pipe;
        let read_pipe = move || {
            let mut numbers = [0; 16];
            loop {
                match pipe.read(&mut numbers) {
                    Ok(count @ 1..) => {
                        for &number in &numbers[..count] {
                            relay.deliver(i32::from(number), Route::Shim);
                        }
                    }
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Ok(0) | Err(_) => break,
                }
            }
            IS_OVER.store(true, Ordering::Release);
            before_end();
            // The main thread must neither restart the job nor tell of its failure.
            process::close();
            let count = descendants::kill(&Excluded::default()).len();
            print_without_blocking(format!(
                "the launcher was killed; ended {} of its job",
                processes(count)
            ));
            std::process::exit(i32::from(End::Signal(signal::SIGKILL).exit_code()));
        };
        let _ = thread::Builder::new()
            .name("liveness-pipe".into())
            .spawn(read_pipe);
    }
}

/// Checks if the shim is gone, and this process is about to end with all that it has started.
pub(crate) fn is_over() -> bool {
    IS_OVER.load(Ordering::Acquire)
}

static IS_OVER: AtomicBool = AtomicBool::new(false);

/// Ends every descendant when it is dropped by a panic, or by an error on the way.
#[derive(Debug)]
pub(crate) struct KillOnDrop {
    excluded: Excluded,
    is_armed: bool,
}

impl KillOnDrop {
    /// Covers the time in which ranks run; processes that exist already are excluded.
    pub(crate) fn new() -> Self {
        Self {
            excluded: Excluded::present(),
            is_armed: true,
        }
    }

    /// The processes that do not belong to the job.
    pub(crate) fn excluded(&self) -> &Excluded {
        &self.excluded
    }

    /// All processes have been ended.
    pub(crate) fn disarm(mut self) {
        self.is_armed = false;
    }
}

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        if self.is_armed {
            descendants::kill(&self.excluded);
        }
    }
}

/// Passes on the signals that come on standard input; kills the job when that ends.
fn obey(mut launcher: File, excluded: &Excluded, asked: &AtomicBool) {
    let mut numbers = [0; 16];
    loop {
        match io::stdin().read(&mut numbers) {
            // A launcher that is gone needs none.
            Ok(count @ 1..) => drop(launcher.write_all(&numbers[..count])),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Ok(0) | Err(_) => break,
        }
    }
    asked.store(true, Ordering::Relaxed);
    descendants::kill(excluded);
    std::process::exit(i32::from(End::Signal(signal::SIGKILL).exit_code()));
}

/// Waits for the child `pid`, and returns its end and the orphans that came to this process after SIGKILL ended them.
/// The kernel kills the ranks with the launcher proper.
fn wait(pid: i32) -> (End, BTreeSet<i32>) {
    let mut killed = BTreeSet::new();
    loop {
        match rustix::process::wait(WaitOptions::empty()) {
            Ok(Some((ended, status))) if ended.as_raw_pid() == pid => {
                let end = End::of(status.exit_status(), status.terminating_signal());
                return (end, killed);
            }
            Ok(Some((ended, status))) => killed.extend(killed_by(ended, status)),
            Ok(None) | Err(rustix::io::Errno::INTR) => {}
            // "No such child" cannot be, since nothing else waits for it.
            Err(_) => return (End::Code(1), killed),
        }
    }
}

/// Clears away orphans that have ended: gives those that were killed.
fn reap_killed() -> BTreeSet<i32> {
    let mut killed = BTreeSet::new();
    while let Ok(Some((ended, status))) = rustix::process::wait(WaitOptions::NOHANG) {
        killed.extend(killed_by(ended, status));
    }
    killed
}

/// Returns the id of the process, if SIGKILL ended it.
fn killed_by(pid: Pid, status: WaitStatus) -> Option<i32> {
    (status.terminating_signal() == Some(signal::SIGKILL)).then(|| pid.as_raw_pid())
}

fn processes(count: usize) -> String {
    match count {
        1 => "1 process".to_owned(),
        _ => format!("{count} processes"),
    }
}

/// Prints it, but does not wait for a stopped terminal.
fn print_without_blocking(text: String) {
    let (done, printed) = mpsc::channel();
    let _ = thread::Builder::new().spawn(move || {
        print(&text);
        let _ = done.send(());
    });
    let _ = printed.recv_timeout(Duration::from_millis(200));
}

fn print(text: &str) {
    // Standard error may be closed.
    let _ = writeln!(io::stderr(), "accel-launch: {text}");
}
