//! The signals that the launcher receives, itself and through its shim.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::thread;
use std::time::{Duration, Instant};

use accelerator_host::sync::Mutex;
use signal_hook::consts::signal::{
    SIGCHLD, SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGUSR1, SIGUSR2,
};
use signal_hook::iterator::Signals;

use crate::error::{Error, Result};
use crate::event::Event;
use crate::process;

/// A second request this soon after the first is the same one, sent twice: to the process and to
/// its group, as `timeout` does.
const DUPLICATE_WITHIN: Duration = Duration::from_millis(100);

/// The time by which one path of a signal that takes two may lag behind the other.
const MAX_LAG: Duration = Duration::from_secs(5);

/// Checks if `signal` asks the job to end; any other one is only forwarded to the ranks.
pub(crate) fn asks_to_end(signal: i32) -> bool {
    matches!(signal, SIGINT | SIGTERM | SIGHUP | SIGQUIT)
}

/// Returns `true` if `signal` stops the job or continues it.
pub(crate) fn is_job_control(signal: i32) -> bool {
    matches!(signal, SIGTSTP | SIGCONT)
}

/// Checks if the user has stopped the job and not yet continued it. This is known before the signal is forwarded, and
/// also while no attempt is under way.
pub(super) fn is_suspended() -> bool {
    IS_SUSPENDED.load(Ordering::Acquire)
}

static IS_SUSPENDED: AtomicBool = AtomicBool::new(false);

/// Installs handlers for the signals that concern a job, and for those of `more`.
///
/// SIGHUP and SIGTSTP stay ignored if the launcher was started so (`nohup`).
pub(crate) fn receive(more: &[i32]) -> Result<Signals> {
    let mut wanted = vec![SIGINT, SIGTERM, SIGQUIT, SIGUSR1, SIGUSR2, SIGHUP];
    wanted.extend(more);
    wanted.retain(|&signal| !matches!(signal, SIGHUP | SIGTSTP) || !is_ignored(signal));
    Signals::new(&wanted).map_err(|error| {
        Error::system("the signal handlers could not be installed").with_source(error)
    })
}

/// Receives signals on a thread of its own from now on, and sends them to `relay`.
///
/// If there is a shim, it alone stops for SIGTSTP: this process serves ranks and other hosts that would miss it.
pub(crate) fn listen(relay: Relay, stopper: Stopper) -> Result<()> {
    let mut signals = receive(match stopper {
        Stopper::Shim => &[SIGCHLD, SIGTSTP],
        Stopper::System => &[SIGCHLD],
    })?;
    thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            for signal in signals.forever() {
                match signal {
                    SIGCHLD => process::reap_orphans(),
                    SIGTSTP => {}
                    _ => relay.deliver(signal, Route::Direct),
                }
            }
        })
        .map_err(|error| {
            Error::system("a thread for signals could not be started").with_source(error)
        })?;
    Ok(())
}

/// The process that handles SIGTSTP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stopper {
    /// The shim stops itself, and asks this process to stop the ranks.
    Shim,
    /// The system stops this process.
    System,
}

/// The route by which a signal reached the launcher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Route {
    /// This process received it.
    Direct,
    Shim,
}

/// Sends signals to the current attempt. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Relay {
    target: Arc<Mutex<RelayTarget>>,
}

impl Relay {
    /// A relay that sends every signal to `events`.
    pub(crate) fn new(events: Sender<Event>) -> Self {
        let target = RelayTarget {
            events,
            requests: Requests::default(),
            hosts: HostRequests::default(),
        };
        Self {
            target: Arc::new(Mutex::new(target)),
        }
    }

    /// Sends signals to `events` from now on.
    pub(crate) fn redirect(&self, events: Sender<Event>) {
        self.target.lock().events = events;
    }

    /// Forwards `signal`, unless it has already arrived by the other route.
    pub(crate) fn deliver(&self, signal: i32, path: Route) {
        let mut target = self.target.lock();
        if target.requests.counts(signal, path, Instant::now()) {
            if is_job_control(signal) {
                IS_SUSPENDED.store(signal == SIGTSTP, Ordering::Release);
            }
            match asks_to_end(signal) {
                true => target.ask(0, signal),
                false => target.send(Event::ForwardSignal(signal)),
            }
        }
    }

    /// Forwards `signal`, which asked the launcher on another host to end.
    pub(crate) fn deliver_from(&self, host: usize, signal: i32) {
        self.target.lock().ask(host, signal);
    }

    /// Sends an event of another thread of the launcher, whichever attempt is under way.
    pub(crate) fn send(&self, event: Event) {
        self.target.lock().send(event);
    }
}

#[derive(Debug)]
struct RelayTarget {
    events: Sender<Event>,
    requests: Requests,
    hosts: HostRequests,
}

impl RelayTarget {
    fn ask(&mut self, host: usize, signal: i32) {
        if self.hosts.counts(host) {
            self.send(Event::Signal(signal));
        }
    }

    fn send(&self, event: Event) {
        // At the very end there is no receiver any more, and the event is too late.
        let _ = self.events.send(event);
    }
}

/// Counts a request once that reaches several hosts: an engine that ends a job signals all of them.
#[derive(Debug, Default)]
struct HostRequests {
    by_host: BTreeMap<usize, u32>,
    most: u32,
}

impl HostRequests {
    /// Counts a request to this host, and checks if it is one more than any host has had.
    fn counts(&mut self, host: usize) -> bool {
        let count = self.by_host.entry(host).or_default();
        *count += 1;
        let is_new = *count > self.most;
        self.most = self.most.max(*count);
        is_new
    }
}

/// Counts a signal once that reaches the launcher by two routes.
///
/// Ctrl-C on a terminal goes to the whole foreground group: the shim and this process both get
/// it, and the shim forwards it. A signal to the shim alone arrives by one route only.
#[derive(Debug, Default)]
struct Requests {
    seen: BTreeMap<i32, Seen>,
}

#[derive(Debug)]
struct Seen {
    counted: Instant,
    last: Instant,
    /// Signals that came by the one path and not yet by the other, by [`Route`].
    unmatched: [u32; 2],
}

impl Requests {
    fn counts(&mut self, signal: i32, path: Route, now: Instant) -> bool {
        let Some(seen) = self.seen.get_mut(&signal) else {
            let mut unmatched = [0; 2];
            unmatched[path as usize] = 1;
            let seen = Seen {
                counted: now,
                last: now,
                unmatched,
            };
            self.seen.insert(signal, seen);
            return true;
        };
        if now.saturating_duration_since(seen.last) > MAX_LAG {
            seen.unmatched = [0; 2];
        }
        seen.last = now;
        let other = &mut seen.unmatched[1 - path as usize];
        if *other > 0 {
            *other -= 1;
            return false;
        }
        seen.unmatched[path as usize] += 1;
        let is_same = now.saturating_duration_since(seen.counted) < DUPLICATE_WITHIN;
        if asks_to_end(signal) && is_same {
            return false;
        }
        seen.counted = now;
        true
    }
}

/// Checks if `signal` has come to this process, and no handler has run for it yet.
pub(super) fn is_pending(signal: i32) -> bool {
    is_in_mask("ShdPnd:", signal)
}

fn is_ignored(signal: i32) -> bool {
    is_in_mask("SigIgn:", signal)
}

/// Reads it from `/proc/self/status`, if there is one.
fn is_in_mask(name: &str, signal: i32) -> bool {
    let Ok(status) = std::fs::read_to_string("/proc/self/status") else {
        return false;
    };
    status
        .lines()
        .find_map(|line| line.strip_prefix(name))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .is_some_and(|mask| mask & (1 << (signal - 1)) != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use Route::{Direct, Shim};

    /// Returns the number of these signals, at milliseconds, that count.
    fn count(signal: i32, arrivals: &[(u64, Route)]) -> usize {
        let (mut requests, begin) = (Requests::default(), Instant::now());
        arrivals
            .iter()
            .filter(|&&(at, path)| requests.counts(signal, path, begin + Duration::from_millis(at)))
            .count()
    }

    #[test]
    fn a_signal_by_two_paths_counts_once() {
        assert_eq!(count(SIGINT, &[(0, Direct), (3, Shim)]), 1);
        assert_eq!(count(SIGINT, &[(0, Shim), (900, Direct)]), 1);
        assert_eq!(count(SIGUSR1, &[(0, Direct), (900, Shim)]), 1);
    }

    #[test]
    fn a_request_to_all_hosts_counts_once() {
        let mut requests = HostRequests::default();
        let counts: Vec<bool> = [1, 0, 2, 0, 1, 2, 2]
            .into_iter()
            .map(|host| requests.counts(host))
            .collect();
        assert_eq!(counts, [true, false, false, true, false, false, true]);
    }

    #[test]
    fn a_second_request_counts_whatever_its_paths() {
        let twice = [(0, Direct), (1, Shim), (500, Shim), (501, Direct)];
        assert_eq!(count(SIGINT, &twice), 2);
        let late = [(0, Direct), (400, Direct), (800, Shim), (801, Shim)];
        assert_eq!(count(SIGINT, &late), 2);
        assert_eq!(count(SIGTERM, &[(0, Shim), (400, Shim)]), 2);
        assert_eq!(count(SIGTERM, &[(0, Shim), (90_000, Direct)]), 2);
    }

    #[test]
    fn a_request_sent_to_process_and_group_counts_once() {
        // `timeout` signals the shim, then its group.
        let arrivals = [(0, Shim), (1, Shim), (1, Direct)];
        assert_eq!(count(SIGTERM, &arrivals), 1);
        // A user signal is no request, and each counts.
        assert_eq!(count(SIGUSR1, &[(0, Shim), (1, Shim)]), 2);
    }
}
