//! The life of a group apart from its operations: signs of work, leaving, and the ranks that are gone.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::ProcessGroup;
use crate::error::Result;
use crate::transport::ActivityClock;

impl ProcessGroup {
    /// Shows the other ranks that this one works while it is in no collective; see [`Activity`].
    pub fn activity(&self) -> Activity {
        let rank_state = &self.handle.rank_state;
        Activity {
            activity: Arc::clone(rank_state.transport.inbox().activity()),
            limit: rank_state.options.busy_timeout,
        }
    }

    /// Leaves the group in good order, after everything that was started. Later collectives of
    /// this rank fail, and those of other ranks say that this rank finished.
    ///
    /// A rank that drops its last handle without this leaves as well, and waits for started
    /// operations only for a moment. If others then still need it, they say that it is lost:
    /// its program returned early or failed.
    ///
    /// # Errors
    ///
    /// None so far: closing a group that failed or is closed does nothing.
    pub fn close(&self) -> Result<()> {
        self.handle.rank_state.close();
        Ok(())
    }

    /// Ends the group because this rank fails, for a reason that the program knows: the others'
    /// pending and next collectives fail with an error that names this rank and says why. Later
    /// collectives of this rank fail with the same error.
    ///
    /// The reason continues "rank 1 is lost: ", as in "its data set is empty". A group that
    /// has failed before, or is closed, stays as it is.
    ///
    /// ```
    /// use accelerator_collective::{GroupOptions, ProcessGroup};
    ///
    /// # fn main() -> accelerator_collective::Result<()> {
    /// let ranks = ProcessGroup::threads(2, &GroupOptions::new())?;
    /// ranks[1].abort("its data set is empty");
    /// let error = ranks[0].barrier().unwrap_err();
    /// assert!(error.is_peer_lost());
    /// assert!(error.to_string().contains("rank 1 (a thread of this process) is lost: its data set is empty"));
    /// # Ok(())
    /// # }
    /// ```
    pub fn abort(&self, reason: impl Into<String>) {
        self.handle.rank_state.abort(&reason.into());
    }

    /// Returns why collectives of this group fail, or the next one that needs all ranks will, as far as this rank
    /// knows at this moment; `None` while all is well, and where ranks left in good order. Nothing is sent or
    /// awaited, so it can be asked often: by what waits for other ranks by other means, such as a GPU.
    pub fn failure(&self) -> Option<String> {
        self.handle.rank_state.failure()
    }

    /// The ranks that are gone as far as this rank knows, in ascending order: those that failed by
    /// themselves, whose connection ended, that were silent for too long, that left or dropped
    /// their group, or that another rank or the launcher reports so. This rank itself is among
    /// them if it failed by itself or others gave it up.
    ///
    /// An error names the [culprit](crate::Error::culprit) alone; several ranks may have died with it. A
    /// rank that gave up because of them is not lost: it may still run. What it does afterwards
    /// is not observed.
    ///
    /// In a group that failed, this waits up to two seconds for the final messages of ranks
    /// that have sent none yet. Nothing is sent. Ranks that can reach one another come to the same answer,
    /// except where one dies, or is slow to notice the failure, just then; where the network
    /// splits, each side takes the other for lost.
    ///
    /// ```
    /// use std::thread;
    ///
    /// use accelerator_collective::{GroupOptions, ProcessGroup};
    ///
    /// # fn main() -> accelerator_collective::Result<()> {
    /// let ranks = ProcessGroup::threads(4, &GroupOptions::new())?;
    /// assert!(ranks[3].lost().is_empty());
    /// ranks[1].abort("its host is on fire");
    /// ranks[0].abort("its host is on fire");
    /// thread::scope(|scope| {
    ///     for survivor in &ranks[2..] {
    ///         scope.spawn(|| {
    ///             assert!(survivor.barrier().unwrap_err().is_peer_lost());
    ///             assert_eq!(survivor.lost(), [0, 1]);
    ///         });
    ///     }
    /// });
    /// # Ok(())
    /// # }
    /// ```
    pub fn lost(&self) -> Vec<usize> {
        self.handle.rank_state.lost()
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
