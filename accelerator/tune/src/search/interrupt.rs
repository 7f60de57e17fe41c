//! Ctrl-C and its like, while a search runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::{Handle, Signals};

use crate::error::Result;

/// Counts signals that ask this process to end, instead of ending it.
#[derive(Debug)]
pub(crate) struct Interrupts {
    count: Arc<AtomicU32>,
    signals: Option<(Handle, JoinHandle<()>)>,
}

impl Interrupts {
    pub(crate) fn watch() -> Result<Self> {
        let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])?;
        let count = Arc::new(AtomicU32::new(0));
        let handle = signals.handle();
        let counted = Arc::clone(&count);
        let thread = std::thread::Builder::new()
            .name("signals".to_owned())
            .spawn(move || {
                for _ in signals.forever() {
                    counted.fetch_add(1, Ordering::Relaxed);
                }
            })?;
        Ok(Self {
            count,
            signals: Some((handle, thread)),
        })
    }

    /// Leaves signals as they are, and asks a counter.
    pub(crate) fn counted_by(count: Arc<AtomicU32>) -> Self {
        Self {
            count,
            signals: None,
        }
    }

    pub(crate) fn count(&self) -> u32 {
        self.count.load(Ordering::Relaxed)
    }
}

impl Drop for Interrupts {
    fn drop(&mut self) {
        if let Some((handle, thread)) = self.signals.take() {
            handle.close();
            // It counts, and cannot fail.
            let _ = thread.join();
        }
    }
}
