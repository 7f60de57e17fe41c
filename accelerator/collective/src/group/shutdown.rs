//! The ways out of a group, and the ranks that are gone.

use super::{ProcessGroup, panics};
use crate::error::Result;

impl ProcessGroup {
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
        self.0.rank_state.close();
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
        self.0.rank_state.abort(&reason.into());
    }

    /// Ends the group because this thread panicked, and the panic was caught: as [`abort`](Self::abort), for
    /// what the panic said and where it was. A group whose last handle is dropped by a thread that unwinds
    /// does so by itself.
    pub fn abort_by_panic(&self) {
        self.0.rank_state.abort(&panics::last_panic());
    }

    /// Returns the message and the place of the latest panic of this thread, for a thread that unwinds. It is known in
    /// a program with a group of several ranks.
    pub fn last_panic() -> String {
        panics::last_panic()
    }

    /// Returns why collectives of this group fail, or the next one that needs all ranks will, as far as this rank
    /// knows at this moment; `None` while all is well, and where ranks left in good order. Nothing is sent or
    /// awaited, so it can be asked often: by what waits for other ranks by other means, such as a GPU.
    pub fn failure(&self) -> Option<String> {
        self.0.rank_state.failure()
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
        self.0.rank_state.lost()
    }
}
