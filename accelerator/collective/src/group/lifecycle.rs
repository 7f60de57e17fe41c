//! The life of a group apart from its operations: signs of work, code that must not call collectives, leaving, the
//! ranks that are gone, and the place of this process in the group that follows.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use accelerator_host::variable;

use super::{ProcessGroup, rank_state};
use crate::error::{Error, Kind, Result, Seconds};
use crate::launch::Launch;
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

impl ProcessGroup {
    /// Forbids collectives on all handles of this rank while the guard lives.
    ///
    /// A collective that only some ranks reach would wait for the others in vain; around code
    /// that runs on one rank alone, this turns it into a misuse error at once, with the reason.
    /// The group stays usable.
    ///
    /// ```
    /// use accelerator_collective::ProcessGroup;
    ///
    /// let group = ProcessGroup::single();
    /// let guard = group.forbid("only the main rank runs this closure");
    /// let error = group.barrier().unwrap_err();
    /// assert!(error.is_misuse());
    /// assert!(error.to_string().ends_with("only the main rank runs this closure"));
    /// drop(guard);
    /// assert!(group.barrier().is_ok());
    /// ```
    pub fn forbid(&self, reason: impl Into<String>) -> Forbidden {
        let reason: Arc<str> = reason.into().into();
        self.0.rank_state.forbid(Arc::clone(&reason));
        Forbidden {
            group: self.clone(),
            reason,
        }
    }

    /// Checks that collectives of this rank are allowed here, for a `call` that communicates only after it
    /// has done something else. Sends nothing.
    ///
    /// # Errors
    ///
    /// A misuse error if they are [forbidden](Self::forbid), with the reason. The group stays usable.
    pub fn check_allowed(&self, call: impl fmt::Display) -> Result<()> {
        self.0.rank_state.check_allowed(&call)
    }
}

/// A guard that makes collectives of this rank fail while it lives; see [`ProcessGroup::forbid`].
#[derive(Debug)]
#[must_use = "collectives are allowed again when this is dropped"]
pub struct Forbidden {
    group: ProcessGroup,
    reason: Arc<str>,
}

impl Drop for Forbidden {
    fn drop(&mut self) {
        self.group.0.rank_state.allow(&self.reason);
    }
}

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
        self.0.rank_state.abort(&rank_state::last_panic());
    }

    /// Returns the message and the place of the latest panic of this thread, for a thread that unwinds. It is known in
    /// a program with a group of several ranks.
    pub fn last_panic() -> String {
        rank_state::last_panic()
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

/// The place of a process in the group that follows this one, of another size.
///
/// ```
/// use accelerator_collective::{Launch, ProcessGroup, GroupOptions, launcher::NextPlace};
///
/// # fn main() -> accelerator_collective::Result<()> {
/// let next = |place| match place {
///     // This group is closed first.
///     NextPlace::Join(launch) => ProcessGroup::connect(&launch, &GroupOptions::new()).map(Some),
///     NextPlace::Leave => Ok(None),
/// };
/// let group = next(NextPlace::Join(Box::new(Launch::single())))?;
/// assert_eq!(group.map(|group| group.world_size()), Some(1));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub enum NextPlace {
    /// The process is this rank of the next group.
    Join(Box<Launch>),
    /// The process is no rank of the next group, and ends.
    Leave,
}

impl ProcessGroup {
    /// Returns `true` if the launcher has told this process its place in a next group. Nothing is sent or awaited.
    /// Other ranks may learn of theirs a moment earlier or later. It is always `false` without a launcher that does so.
    #[doc(hidden)]
    pub fn has_next_place(&self) -> bool {
        let store = self.0.rank_state.store();
        store.is_some_and(|store| store.has_next_place())
    }

    /// The place that the launcher gives this process in the next group; waits up to `timeout` for it. The group may be
    /// closed already.
    ///
    /// # Errors
    ///
    /// A rendezvous error if none comes in time; a topology error if the launcher tells a place that cannot be.
    #[doc(hidden)]
    pub fn next_place(&self, timeout: Duration) -> Result<NextPlace> {
        let store = self.0.rank_state.store();
        let Some(told) = store.and_then(|store| store.next_place(timeout)) else {
            return Err(Error::new(
                Kind::Rendezvous,
                format!(
                    "the launcher has told {} no place in a next group, within {}",
                    self.topology(),
                    Seconds(timeout)
                ),
            ));
        };
        if told.is_empty() {
            return Ok(NextPlace::Leave);
        }
        let told: BTreeMap<String, String> = told.into_iter().collect();
        let launch = Launch::from_vars(|name| match told.get(name) {
            Some(value) => Some(value.clone()),
            None => Some(variable(name)?.to_string_lossy().into_owned()),
        })?;
        Ok(NextPlace::Join(Box::new(launch)))
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::GroupOptions;
    use crate::rendezvous::{StoreServer, Token};

    const SOON: Duration = Duration::from_secs(10);

    /// A launch as a launcher describes it to a process.
    fn launch(store: &StoreServer, rank: usize, size: usize, elastic: &str) -> Launch {
        let told: BTreeMap<_, _> = variables(store, rank, size, elastic).into_iter().collect();
        Launch::from_vars(|name| told.get(name).cloned()).unwrap()
    }

    fn variables(
        store: &StoreServer,
        rank: usize,
        size: usize,
        elastic: &str,
    ) -> Vec<(String, String)> {
        let told = [
            ("RANK", rank.to_string()),
            ("WORLD_SIZE", size.to_string()),
            ("MASTER_ADDR", "127.0.0.1".to_owned()),
            ("ACCEL_PORT", store.local_addr().port().to_string()),
            ("ACCEL_STORE", "launcher".to_owned()),
            ("ACCEL_TRANSPORT", "tcp".to_owned()),
            ("ACCEL_ELASTIC", elastic.to_owned()),
        ];
        let told = told.map(|(name, value)| (name.to_owned(), value));
        told.to_vec()
    }

    fn store(size: usize) -> StoreServer {
        StoreServer::bind(("127.0.0.1", 0), size, None::<Token>).unwrap()
    }

    fn sum(group: &ProcessGroup) -> f64 {
        let mut sum = [1.0];
        group.all_reduce(&mut sum, crate::ReduceOp::Sum).unwrap();
        sum[0]
    }

    fn connect(launch: &Launch) -> ProcessGroup {
        let options = GroupOptions::new().with_connect_timeout(SOON);
        ProcessGroup::connect(launch, &options).unwrap()
    }

    fn next(group: &ProcessGroup) -> Option<ProcessGroup> {
        group.close().unwrap();
        match group.next_place(SOON).unwrap() {
            NextPlace::Join(launch) => Some(connect(&launch)),
            NextPlace::Leave => None,
        }
    }

    #[test]
    fn a_place_that_is_told_before_the_ranks_have_met_waits_for_them() {
        let [first, second] = [store(2), store(1)];
        first.tell_next_place(0, variables(&second, 0, 1, "running"));
        first.tell_next_place(1, []);
        thread::scope(|scope| {
            for rank in 0..2 {
                let launch = launch(&first, rank, 2, "running");
                scope.spawn(move || {
                    let group = connect(&launch);
                    assert_eq!(sum(&group), 2.0);
                    assert_eq!(next(&group).is_some(), rank == 0);
                });
            }
        });
    }

    #[test]
    fn one_process_becomes_three_and_then_two() {
        let [first, second, third] = [store(1), store(3), store(2)];
        thread::scope(|scope| {
            for rank in 1..3 {
                let launch = launch(&second, rank, 3, "joining");
                scope.spawn(move || {
                    let group = connect(&launch);
                    assert_eq!(sum(&group), 3.0);
                    let group = next(&group);
                    assert_eq!(group.is_some(), rank == 2, "rank 1 leaves");
                    if let Some(group) = group {
                        assert_eq!((group.rank(), sum(&group)), (1, 2.0));
                    }
                });
            }
            let alone = connect(&launch(&first, 0, 1, "running"));
            assert_eq!(sum(&alone), 1.0);
            assert!(!alone.has_next_place());
            first.tell_next_place(0, variables(&second, 0, 3, "running"));
            let group = next(&alone).unwrap();
            assert_eq!(sum(&group), 3.0);
            second.tell_next_place(0, variables(&third, 0, 2, "running"));
            second.tell_next_place(1, []);
            second.tell_next_place(2, variables(&third, 1, 2, "running"));
            assert_eq!(sum(&next(&group).unwrap()), 2.0);
        });
    }
}
