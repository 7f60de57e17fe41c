//! The thread that shows a rank's life, and hears of the death of others.

use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use super::member::Member;
use crate::error::{Error, Result};

/// The way to a member's pulse.
#[derive(Debug, Default)]
pub(super) struct Pulse {
    state: Mutex<State>,
    changed: Condvar,
}

impl Pulse {
    /// Starts a member's pulse. It ends with the member's last word, or with the member.
    pub(super) fn start(member: &Arc<Member>) -> Result<()> {
        let pulse = Arc::clone(&member.pulse);
        let weak = Arc::downgrade(member);
        thread::Builder::new()
            .name(format!("pulse-{}", member.topology.rank()))
            .stack_size(256 * 1024)
            .spawn(move || {
                while !pulse.is_stopped() {
                    let Some(member) = weak.upgrade() else {
                        return;
                    };
                    let Some(pause) = member.beat() else {
                        return;
                    };
                    drop(member);
                    pulse.sleep(pause);
                }
            })
            .map_err(|error| Error::io("the thread of the heartbeat cannot be started", error))?;
        Ok(())
    }

    /// Ends it.
    pub(super) fn stop(&self) {
        self.lock().stopped = true;
        self.changed.notify_all();
    }

    /// Lets it beat at once.
    pub(super) fn nudge(&self) {
        self.lock().nudged = true;
        self.changed.notify_all();
    }

    fn is_stopped(&self) -> bool {
        self.lock().stopped
    }

    fn sleep(&self, pause: Duration) {
        let quiet = |state: &mut State| !state.stopped && !state.nudged;
        let waited = self
            .changed
            .wait_timeout_while(self.lock(), pause, quiet)
            .unwrap_or_else(PoisonError::into_inner);
        let (mut state, _) = waited;
        state.nudged = false;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Two flags are whole at every moment.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug, Default)]
struct State {
    stopped: bool,
    nudged: bool,
}
