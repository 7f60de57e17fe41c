//! Starts a process so that it, and every process that it starts, can be ended.
//!
//! Every process leads a process group of its own, so a signal reaches its children too.
//! On Linux it is killed by the kernel when the launcher dies without a chance to clean up.
//! A process that has ended is not reaped before its group is dealt with: as long as the
//! kernel keeps its entry, its id cannot be given to another process.

#![allow(unsafe_code)]

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};

use accelerator_host::sync::{Mutex, MutexGuard};
use rustix::io::FdFlags;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, WaitOptions};

use super::{End, RankProcess, descendants};

/// The time for which a program file may be busy (still open for writing somewhere) before that is an error.
const BUSY: Duration = Duration::from_secs(2);

/// The time that a dropped process may take to end after SIGKILL.
const LAST_WAIT: Duration = Duration::from_secs(2);

/// A started process, leader of its own process group.
///
/// Dropped before [`RankProcess::reap`], it is killed with its whole group.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    pid: Pid,
    reaped: bool,
}

impl Process {
    /// Starts `command` in a process group of its own.
    ///
    /// Call it on the main thread: the kernel's "parent died" signal follows the thread that
    /// started the process, and the main thread lives as long as the launcher.
    pub(crate) fn spawn(command: &mut Command) -> io::Result<Self> {
        command.process_group(0);
        #[cfg(target_os = "linux")]
        die_with_parent(command);
        let busy_until = Instant::now() + BUSY;
        let child = loop {
            let mut started = started();
            let result = command.spawn();
            if let Ok(child) = &result {
                started.insert(pid_of(child).as_raw_pid());
            }
            drop(started);
            match result {
                // A file that was just written can be held open by a child of another
                // thread that is between fork and exec.
                Err(error)
                    if error.kind() == io::ErrorKind::ExecutableFileBusy
                        && Instant::now() < busy_until =>
                {
                    thread::sleep(Duration::from_millis(10));
                }
                result => break result?,
            }
        };
        let pid = pid_of(&child);
        Ok(Self {
            child,
            pid,
            reaped: false,
        })
    }

    /// The process id, which is also that of its group.
    pub(crate) fn id(&self) -> Pid {
        self.pid
    }

    /// Records that the process was reaped: from here on, its id can belong to another one.
    fn forget(&mut self) {
        self.reaped = true;
        started().remove(&self.pid.as_raw_pid());
    }
}

impl RankProcess for Process {
    fn pid(&self) -> i32 {
        self.pid.as_raw_pid()
    }

    fn local_pid(&self) -> Option<i32> {
        Some(self.pid.as_raw_pid())
    }

    fn take_stdout(&mut self) -> Option<File> {
        let pipe = self.child.stdout.take();
        pipe.map(|pipe| File::from(OwnedFd::from(pipe)))
    }

    fn take_stderr(&mut self) -> Option<File> {
        let pipe = self.child.stderr.take();
        pipe.map(|pipe| File::from(OwnedFd::from(pipe)))
    }

    fn waiter(&self) -> Box<dyn FnOnce() -> End + Send> {
        let pid = self.pid;
        // "No such child" cannot be, since nothing reaps it before its end is known.
        Box::new(move || wait_for_end(pid).unwrap_or(End::Code(1)))
    }

    fn signal(&self, signal: Signal) {
        if !self.reaped {
            let _ = rustix::process::kill_process(self.pid, signal);
        }
    }

    fn signal_group(&self, signal: Signal) {
        // It is no error if no process is left to receive it.
        let _ = rustix::process::kill_process_group(self.pid, signal);
    }

    fn has_group(&self) -> bool {
        rustix::process::test_kill_process_group(self.pid).is_ok()
    }

    fn reap(&mut self) {
        if !self.reaped {
            // It has ended, so this does not wait; it cannot fail but for "no such child".
            let _ = self.child.wait();
            self.forget();
        }
    }

    fn abandon(&mut self) {
        self.forget();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.reaped {
            return;
        }
        self.signal_group(Signal::KILL);
        let until = Instant::now() + LAST_WAIT;
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < until {
            thread::sleep(Duration::from_millis(5));
        }
        self.forget();
    }
}

/// Waits until the process `pid`, a child of this one, has ended, and leaves it unreaped.
///
/// # Errors
/// When `pid` is no child of this process.
pub(crate) fn wait_for_end(pid: Pid) -> io::Result<End> {
    loop {
        match rustix::process::waitid(
            WaitId::Pid(pid),
            WaitIdOptions::EXITED | WaitIdOptions::NOWAIT,
        ) {
            Ok(Some(status)) => {
                return Ok(End::of(status.exit_status(), status.terminating_signal()));
            }
            Ok(None) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Takes children out of the kernel's table that ended and were never started here: orphans of
/// descendants. Started processes are left to their owners.
pub(crate) fn reap_orphans() {
    // Held, so that a process which ends while it is being started is not taken for an orphan.
    let started = started();
    for pid in descendants::ended_children() {
        if !started.contains(&pid)
            && let Some(pid) = Pid::from_raw(pid)
        {
            let _ = rustix::process::waitpid(Some(pid), WaitOptions::NOHANG);
        }
    }
}

/// Starts `command` with the file behind `handle` open in it too, at the same number.
pub(crate) fn spawn_with(command: &mut Command, handle: OwnedFd) -> io::Result<Child> {
    let prepare = move || {
        rustix::io::fcntl_setfd(&handle, FdFlags::empty())?;
        Ok(())
    };
    // SAFETY: the closure runs in the child between fork and exec, where only
    // async-signal-safe work is allowed: it makes one system call, allocates nothing and takes
    // no lock.
    unsafe {
        command.pre_exec(prepare);
    }
    command.spawn()
}

/// Takes over the file that [`spawn_with`] left open at `number`, so that no process which this
/// one starts inherits it; `None` where none is open there.
///
/// Call it once, before anything else opens files.
pub(crate) fn inherited(number: i32) -> Option<OwnedFd> {
    if number <= 2 {
        return None;
    }
    // SAFETY: the number is only used to ask whether a file is open there.
    let borrowed = unsafe { BorrowedFd::borrow_raw(number) };
    rustix::io::fcntl_setfd(borrowed, FdFlags::CLOEXEC).ok()?;
    // SAFETY: a file is open there, by the line above. The caller, the very beginning of `main`,
    // is the only one to know its number, so nothing else owns it.
    Some(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Lets no thread start or reap a process from here on: each that tries waits for ever.
///
/// For a process that is about to end, with everything that it started.
pub(crate) fn close() {
    std::mem::forget(started());
}

/// The ids of the processes that were started here and not reaped.
fn started() -> MutexGuard<'static, BTreeSet<i32>> {
    static STARTED: Mutex<BTreeSet<i32>> = Mutex::new(BTreeSet::new());
    STARTED.lock()
}

fn pid_of(child: &Child) -> Pid {
    #[expect(
        clippy::expect_used,
        reason = "a started child has a positive process id"
    )]
    Pid::from_raw(child.id().cast_signed()).expect("a process id is positive")
}

#[cfg(target_os = "linux")]
fn die_with_parent(command: &mut Command) {
    let parent = rustix::process::getpid();
    let prepare = move || {
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
        // The parent may have died before the signal was asked for.
        if rustix::process::getppid() != Some(parent) {
            return Err(io::Error::from_raw_os_error(
                rustix::io::Errno::SRCH.raw_os_error(),
            ));
        }
        Ok(())
    };
    // SAFETY: the closure runs in the child between fork and exec, where only
    // async-signal-safe work is allowed: it makes two system calls, allocates nothing, takes
    // no lock, and captures a plain number.
    unsafe {
        command.pre_exec(prepare);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Process {
        let mut command = Command::new("/bin/sh");
        command
            .args(["-c", script])
            .stdin(std::process::Stdio::null());
        Process::spawn(&mut command).unwrap()
    }

    fn runs(group: Pid) -> bool {
        let Some(groups) = descendants::running_groups() else {
            return rustix::process::test_kill_process_group(group).is_ok();
        };
        groups.contains(&group.as_raw_pid())
    }

    #[test]
    fn ends_are_seen_and_leave_the_process_unreaped() {
        for (script, end) in [
            ("exit 0", End::Code(0)),
            ("exit 300", End::Code(300 & 0xff)),
            ("kill -KILL $$", End::Signal(9)),
        ] {
            let mut process = shell(script);
            assert_eq!(wait_for_end(process.id()).unwrap(), end);
            assert_eq!(wait_for_end(process.id()).unwrap(), end);
            assert!(process.has_group());
            process.reap();
            assert!(!process.has_group());
        }
    }

    #[test]
    fn a_dropped_process_takes_its_group_along() {
        let process = shell("trap '' TERM; sleep 300 & wait; sleep 300");
        let group = process.id();
        assert!(runs(group));
        drop(process);
        let until = Instant::now() + Duration::from_secs(30);
        while runs(group) {
            assert!(Instant::now() < until, "the group of {group:?} still runs");
            thread::sleep(Duration::from_millis(10));
        }
    }
}
