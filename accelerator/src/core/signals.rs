//! Signals that this process listens to. Handlers belong to the process, so accelerators share them.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use accelerator_host::sync::{Mutex, MutexGuard};
use signal_hook::{SigId, flag, low_level};

use super::error::{Error, Kind, Result};

/// Sets a flag when a signal arrives, as long as it lives. Without any listener, the signal does what it does in a
/// program that has no handlers.
#[derive(Debug)]
pub(super) struct SignalListener {
    signal: i32,
    id: SigId,
    received: Arc<AtomicBool>,
}

impl SignalListener {
    pub(super) fn start(signal: i32, received: &Arc<AtomicBool>) -> Result<Self> {
        let failed = |error| {
            let message = format!("the handler of signal {signal} could not be installed");
            Error::new(Kind::Io, message).with_source(error)
        };
        let mut handled = handled();
        let listeners = match handled.entry(signal) {
            Entry::Occupied(listeners) => listeners.into_mut(),
            Entry::Vacant(place) => {
                let has_none = Arc::new(AtomicBool::new(true));
                flag::register_conditional_default(signal, has_none.clone()).map_err(failed)?;
                place.insert(Listeners { count: 0, has_none })
            }
        };
        let id = flag::register(signal, received.clone()).map_err(failed)?;
        listeners.count += 1;
        listeners.has_none.store(false, Ordering::SeqCst);
        Ok(Self {
            signal,
            id,
            received: received.clone(),
        })
    }
}

impl Drop for SignalListener {
    /// Stops listening, unless a signal has arrived: the process is about to end with an exit code of its own, and
    /// another signal must not end it before.
    fn drop(&mut self) {
        if self.received.load(Ordering::SeqCst) {
            return;
        }
        if let Some(listeners) = handled().get_mut(&self.signal) {
            listeners.count -= 1;
            listeners
                .has_none
                .store(listeners.count == 0, Ordering::SeqCst);
        }
        low_level::unregister(self.id);
    }
}

/// The listeners of one signal.
struct Listeners {
    count: usize,
    /// Read by the handler, which does what the system would do.
    has_none: Arc<AtomicBool>,
}

/// The listeners of each signal that this process has ever listened to.
static HANDLED: Mutex<BTreeMap<i32, Listeners>> = Mutex::new(BTreeMap::new());

fn handled() -> MutexGuard<'static, BTreeMap<i32, Listeners>> {
    HANDLED.lock()
}

#[cfg(test)]
#[cfg(unix)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    use signal_hook::consts::{SIGUSR1, SIGUSR2};

    use super::*;

    fn listen(signal: i32) -> (SignalListener, Arc<AtomicBool>) {
        let received = Arc::default();
        (SignalListener::start(signal, &received).unwrap(), received)
    }

    #[test]
    fn each_listener_hears_a_signal_as_long_as_it_lives() {
        let [(_first, at_first), (_second, at_second), (gone, at_gone)] =
            [(); 3].map(|()| listen(SIGUSR1));
        drop(gone);
        low_level::raise(SIGUSR1).unwrap();
        let heard = [at_first, at_second, at_gone].map(|flag| flag.load(Ordering::SeqCst));
        assert_eq!(heard, [true, true, false]);
    }

    /// A process that a signal ends once nothing listens to it any more.
    #[test]
    #[ignore = "a part of another test"]
    fn end_a_child() {
        drop(listen(SIGUSR2));
        low_level::raise(SIGUSR2).unwrap();
    }

    /// Ends well: who has heard a signal once is not ended by another one.
    #[test]
    #[ignore = "a part of another test"]
    fn do_not_end_a_child() {
        let (listener, received) = listen(SIGUSR2);
        low_level::raise(SIGUSR2).unwrap();
        assert!(received.load(Ordering::SeqCst));
        drop(listener);
        low_level::raise(SIGUSR2).unwrap();
    }

    #[test]
    fn a_signal_ends_the_process_when_the_last_listener_is_gone_that_has_not_heard_it() {
        let end = |test: &str| {
            let name = format!("core::signals::tests::{test}");
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["--ignored", "--exact", &name]);
            command.output().unwrap().status
        };
        assert_eq!(end("end_a_child").signal(), Some(SIGUSR2));
        assert_eq!(end("do_not_end_a_child").code(), Some(0));
    }
}
