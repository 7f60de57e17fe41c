//! The thread that shows a rank's life, and hears of the death of others.

use std::{sync::Arc, thread, time::Duration};

use super::rank_state::RankState;
use crate::error::{Error, Result};
use accelerator_host::sync::{Condvar, Mutex, MutexGuard};

/// Controls the heartbeat thread of a rank.
#[derive(Debug, Default)]
pub(super) struct HeartbeatThread {
    state: Mutex<Flags>,
    changed: Condvar,
}

impl HeartbeatThread {
    /// Starts the heartbeats of a rank. They end with its final message, or with the `RankState`.
    pub(super) fn start(rank_state: &Arc<RankState>) -> Result<()> {
        let heartbeat = Arc::clone(&rank_state.heartbeat);
        let weak = Arc::downgrade(rank_state);
        thread::Builder::new()
            .name(format!("heartbeat-{}", rank_state.topology.rank()))
            .stack_size(256 * 1024)
            .spawn(move || {
                while !heartbeat.is_stopped() {
                    let Some(rank_state) = weak.upgrade() else {
                        return;
                    };
                    let Some(pause) = rank_state.heartbeat_round() else {
                        return;
                    };
                    drop(rank_state);
                    heartbeat.sleep(pause);
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
    pub(super) fn wake(&self) {
        self.lock().wakened = true;
        self.changed.notify_all();
    }

    fn is_stopped(&self) -> bool {
        self.lock().stopped
    }

    fn sleep(&self, pause: Duration) {
        let quiet = |state: &mut Flags| !state.stopped && !state.wakened;
        let mut state = self.changed.wait_timeout_while(self.lock(), pause, quiet);
        state.wakened = false;
    }

    fn lock(&self) -> MutexGuard<'_, Flags> {
        self.state.lock()
    }
}

#[derive(Debug, Default)]
struct Flags {
    stopped: bool,
    wakened: bool,
}
