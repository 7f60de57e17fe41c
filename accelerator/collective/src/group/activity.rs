//! Work of a rank that others wait for.

use std::{fmt, sync::Arc, time::Duration};

use super::ProcessGroup;
use crate::transport::ActivityClock;

impl ProcessGroup {
    /// Shows the other ranks that this one works while it is in no collective; see [`Activity`].
    pub fn activity(&self) -> Activity {
        let rank_state = &self.0.rank_state;
        Activity {
            activity: Arc::clone(rank_state.transport.inbox().activity()),
            limit: rank_state.options.busy_timeout(),
        }
    }
}

/// Shows the other ranks that this one works while it is in no collective: it writes a large file,
/// hashes or downloads one.
///
/// A collective that waits for a rank fails after the
/// [progress timeout](crate::GroupOptions::with_progress_timeout). Each sign of work of that rank counts
/// as progress. Signs of activity travel with the heartbeats, so they arrive within a second; a heartbeat alone is
/// none, since the process of a hung rank sends heartbeats too.
///
/// It is a handle that keeps no group open: clones are cheap and may be used from any thread.
///
/// ```
/// use std::{thread, time::Duration};
///
/// use accelerator_collective::{GroupOptions, ProcessGroup};
///
/// # fn main() -> accelerator_collective::Result<()> {
/// let options = GroupOptions::new().with_progress_timeout(Duration::from_secs(1));
/// let ranks = ProcessGroup::threads(2, &options)?;
/// thread::scope(|scope| {
///     for group in ranks {
///         scope.spawn(move || {
///             if group.rank() == 0 {
///                 let activity = group.activity();
///                 for _block in 0..24 {
///                     thread::sleep(Duration::from_millis(50)); // writes a block
///                     activity.keep_alive();
///                 }
///             }
///             group.barrier().unwrap();
///         });
///     }
/// });
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Activity {
    activity: Arc<ActivityClock>,
    limit: Duration,
}

impl Activity {
    /// Shows that this rank works at this moment. It costs next to nothing, and sends nothing by itself.
    pub fn keep_alive(&self) {
        self.activity.record();
    }

    /// Shows that this rank works for as long as the guard lives, if the work itself cannot: at most
    /// for the [busy timeout](crate::GroupOptions::with_busy_timeout) after the last
    /// [`keep_alive`](Self::keep_alive), so that work that hangs is found.
    pub fn busy(&self) -> Busy {
        self.activity.begin(self.limit);
        Busy(Arc::clone(&self.activity))
    }
}

impl fmt::Debug for Activity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Activity").finish_non_exhaustive()
    }
}

/// A guard that makes this rank count as one that works while it lives; see [`Activity::busy`].
#[must_use = "the rank counts as idle again when this is dropped"]
pub struct Busy(Arc<ActivityClock>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.end();
    }
}

impl fmt::Debug for Busy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Busy").finish_non_exhaustive()
    }
}
