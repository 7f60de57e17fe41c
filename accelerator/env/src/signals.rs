//! The signals that a process inherits from whoever started it, and passes on to those that it starts.
//!
//! A process keeps an ignored SIGCHLD and a mask of blocked signals across `exec`. With the first the system reaps its
//! children itself, and how they ended is lost; with the second they do not hear SIGTERM.

#![expect(
    unsafe_code,
    reason = "the standard library neither reads nor sets the mask and the disposition of signals"
)]

use std::mem::MaybeUninit;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::{io, ptr};

/// Undoes what this process has inherited: lets it learn how its children end, and unblocks all signals.
///
/// It is for the first line of a program that starts others, since it changes the whole process and the threads that start
/// after it. A library calls [`prepare_child`] instead.
///
/// ```
/// accelerator_env::reset_signals();
/// assert!(std::process::Command::new("true").status().is_ok());
/// ```
pub fn reset_signals() {
    heed_children();
    // It fails for an invalid first argument only.
    let _ = unblock_all();
}

/// Lets this process learn how the one that `command` starts ends, and lets that one receive every signal, whatever this
/// process has inherited and blocks.
///
/// A SIGCHLD that this process ignores has its default action from then on.
///
/// ```
/// let mut command = std::process::Command::new("true");
/// assert!(accelerator_env::prepare_child(&mut command).status().is_ok());
/// ```
pub fn prepare_child(command: &mut Command) -> &mut Command {
    heed_children();
    // SAFETY: the closure runs in the child between fork and exec, where only async-signal-safe work is allowed: it makes
    // one system call, allocates nothing and takes no lock.
    unsafe { command.pre_exec(unblock_all) }
}

/// Lets this process learn how those end that it starts: gives SIGCHLD its default action where it is ignored. A handler
/// stays.
///
/// It is for a library that asks a short-lived program something; unlike [`prepare_child`], it leaves the start to the
/// system's fast path, which does not copy the tables of a large process.
///
/// ```
/// accelerator_env::heed_children();
/// assert!(std::process::Command::new("true").status().is_ok());
/// ```
pub fn heed_children() {
    let mut action = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: `action` is valid for a write, and is read only where the call has filled it. The default action replaces
    // no handler, but the request to ignore the signal.
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

    /// Runs the test `name` again with SIGCHLD ignored and SIGTERM blocked; whether this is that run.
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
}
