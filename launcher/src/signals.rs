//! The signals that the launcher receives.

use std::sync::mpsc::Sender;
use std::thread;

use signal_hook::consts::signal::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;

use crate::error::{Error, Result};
use crate::supervise::Notice;

/// Whether `signal` asks the job to end; any other one is only handed to the ranks.
pub(crate) fn asks_to_end(signal: i32) -> bool {
    matches!(signal, SIGINT | SIGTERM | SIGHUP | SIGQUIT)
}

/// Receives signals on a thread of its own from now on, and tells `notices` of each.
///
/// SIGHUP stays ignored where the launcher was started so (`nohup`).
///
/// # Errors
/// When the handlers cannot be installed.
pub(crate) fn listen(notices: Sender<Notice>) -> Result<()> {
    let mut wanted = vec![SIGINT, SIGTERM, SIGQUIT, SIGUSR1, SIGUSR2];
    if !hangup_is_ignored() {
        wanted.push(SIGHUP);
    }
    let mut signals = Signals::new(&wanted).map_err(|error| {
        Error::system("the signal handlers could not be installed").with_source(error)
    })?;
    thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            for signal in signals.forever() {
                if notices.send(Notice::Signal(signal)).is_err() {
                    return;
                }
            }
        })
        .map_err(|error| {
            Error::system("a thread for signals could not be started").with_source(error)
        })?;
    Ok(())
}

/// Read from the kernel's own account of this process, where there is one.
fn hangup_is_ignored() -> bool {
    let Ok(status) = std::fs::read_to_string("/proc/self/status") else {
        return false;
    };
    status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .is_some_and(|mask| mask & (1 << (SIGHUP - 1)) != 0)
}
