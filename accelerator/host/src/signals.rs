//! The signal state that a process inherits from its parent, and passes on to its children.
//!
//! A process keeps an ignored SIGCHLD and its mask of blocked signals across `exec`. If SIGCHLD is ignored, the system
//! reaps the children of the process itself, and their exit status is lost; if SIGTERM is blocked, they do not receive
//! it.

#![expect(
    unsafe_code,
    reason = "the standard library neither reads nor sets the mask and the disposition of signals"
)]

use std::mem::MaybeUninit;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::{io, ptr};

/// Resets the inherited signal state: lets this process wait for its children, and unblocks all signals.
///
/// Call it in the first line of a program that starts others, since it changes the whole process and the threads that
/// start after it. A library calls [`prepare_child`] instead.
pub fn reset_signals() {
    heed_children();
    // It can fail only for an invalid first argument.
    let _ = unblock_all();
}

/// Lets this process learn the exit status of the child that `command` starts, and lets the child receive every signal,
/// whatever this process inherits or blocks.
///
/// If this process ignores SIGCHLD, the signal has its default action from then on.
///
/// ```
/// let mut command = std::process::Command::new("true");
/// assert!(accelerator_host::prepare_child(&mut command).status().is_ok());
/// ```
pub fn prepare_child(command: &mut Command) -> &mut Command {
    heed_children();
    // SAFETY: the closure runs in the child between fork and exec, where only async-signal-safe work is allowed: it makes
    // one system call, allocates nothing and takes no lock.
    unsafe { command.pre_exec(unblock_all) }
}

/// Lets this process learn the exit status of its children: gives SIGCHLD its default action if it is ignored. A
/// handler stays.
///
/// Call it in a library that runs a short-lived program; unlike [`prepare_child`], it keeps the fast path of the
/// system's spawn, which does not copy the page tables of a large process.
pub fn heed_children() {
    let mut action = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: `action` is valid for a write, and is read only if the call has filled it. The default action replaces no
    // handler, only an ignored signal.
    unsafe {
        if libc::sigaction(libc::SIGCHLD, ptr::null(), action.as_mut_ptr()) == 0
            && action.assume_init().sa_sigaction == libc::SIG_IGN
        {
            libc::signal(libc::SIGCHLD, libc::SIG_DFL);
        }
    }
}

/// Unblocks all signals in this thread.
fn unblock_all() -> io::Result<()> {
    let mut none = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `sigemptyset` fills `none`, which `pthread_sigmask` reads; both are async-signal-safe.
    let error = unsafe {
        libc::sigemptyset(none.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, none.as_ptr(), ptr::null_mut())
    };
    match error {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    const INNER: &str = "SIGNALS_TEST_INNER";

    /// Runs the test `name` again with SIGCHLD ignored and SIGTERM blocked; returns true in that second run.
    fn is_inner(name: &str) -> bool {
        if std::env::var_os(INNER).is_some() {
            return true;
        }
        let status = Command::new("env")
            .args(["--ignore-signal=CHLD", "--block-signal=TERM"])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", &format!("signals::tests::{name}")])
            .env(INNER, "1")
            .status();
        assert!(status.unwrap().success());
        false
    }

    fn killed_by_term() -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", "kill -TERM $$; exit 7"]);
        command
    }

    #[test]
    fn a_prepared_child_tells_how_it_ends_and_hears_signals() {
        if is_inner("a_prepared_child_tells_how_it_ends_and_hears_signals") {
            assert!(killed_by_term().status().is_err());
            let status = prepare_child(&mut killed_by_term()).status();
            assert_eq!(status.unwrap().signal(), Some(libc::SIGTERM));
        }
    }

    #[test]
    fn every_child_of_a_process_that_is_reset_does() {
        if is_inner("every_child_of_a_process_that_is_reset_does") {
            reset_signals();
            let status = killed_by_term().status();
            assert_eq!(status.unwrap().signal(), Some(libc::SIGTERM));
        }
    }

    #[test]
    fn a_process_that_heeds_children_learns_how_they_end() {
        if is_inner("a_process_that_heeds_children_learns_how_they_end") {
            heed_children();
            assert!(Command::new("true").status().unwrap().success());
        }
    }
}
