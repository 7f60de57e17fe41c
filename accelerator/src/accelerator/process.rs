use core::fmt;
use std::ops::Range;

use accelerator_collective::Partition;

use super::Accelerator;
use crate::error::Result;
use crate::outcome;

/// What only some ranks do, and in which order.
impl Accelerator {
    /// Whether this is rank 0.
    pub fn is_main_process(&self) -> bool {
        self.topology().is_main()
    }

    /// Whether this is the first rank of its host.
    pub fn is_local_main_process(&self) -> bool {
        self.topology().is_local_main()
    }

    /// Whether this is the rank with the highest number.
    pub fn is_last_process(&self) -> bool {
        self.topology().is_last()
    }

    /// Prints a line on rank 0, and nothing elsewhere.
    #[allow(clippy::print_stdout, reason = "printing is what this function is for")]
    pub fn print(&self, line: impl fmt::Display) {
        if self.is_main_process() {
            println!("{line}");
        }
    }

    /// Runs `work` on rank 0 only.
    ///
    /// The other ranks do not take part, so a collective inside `work` would wait for them for
    /// ever: it returns an error there and then instead.
    ///
    /// ```
    /// let seen = accelerator::launch(2, |accelerator| {
    ///     Ok(accelerator.on_main_process(|| "rank 0 was here"))
    /// })?;
    /// assert_eq!(seen, [Some("rank 0 was here"), None]);
    /// # Ok::<(), accelerator::Error>(())
    /// ```
    pub fn on_main_process<T>(&self, work: impl FnOnce() -> T) -> Option<T> {
        self.on_process(0, work)
    }

    /// Runs `work` on the first rank of each host only; see
    /// [`on_main_process`](Self::on_main_process).
    pub fn on_local_main_process<T>(&self, work: impl FnOnce() -> T) -> Option<T> {
        self.is_local_main_process().then(|| self.alone(work))
    }

    /// Runs `work` on that rank only; see [`on_main_process`](Self::on_main_process).
    pub fn on_process<T>(&self, rank: usize, work: impl FnOnce() -> T) -> Option<T> {
        (self.rank() == rank).then(|| self.alone(work))
    }

    /// Runs `work` on rank 0, and on the others after it succeeded there: the first one
    /// downloads or unpacks, the others find it done.
    ///
    /// ```
    /// accelerator::launch(2, |accelerator| {
    ///     accelerator.main_process_first(|| Ok(()))
    /// })?;
    /// # Ok::<(), accelerator::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// What `work` returned on this rank. When it failed on rank 0, every other rank gets an error
    /// of the same kind with that message, and does not run it.
    #[track_caller]
    pub fn main_process_first<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let group = &self.shared.group;
        if self.is_main_process() {
            return outcome::tell(group, self.alone(work));
        }
        outcome::hear(group, "do what it does first here")?;
        work()
    }

    /// Waits until every rank has come here.
    ///
    /// # Errors
    ///
    /// [`Error::is_collective`](crate::Error::is_collective) when one does not.
    #[track_caller]
    pub fn wait_for_everyone(&self) -> Result<()> {
        Ok(self.shared.group.barrier()?)
    }

    /// This rank's contiguous share of `count` items; the first ranks get one more where it
    /// does not divide evenly.
    ///
    /// ```
    /// let shares = accelerator::launch(4, |accelerator| Ok(accelerator.share_of(17)))?;
    /// assert_eq!(shares, [0..5, 5..9, 9..13, 13..17]);
    /// # Ok::<(), accelerator::Error>(())
    /// ```
    pub fn share_of(&self, count: usize) -> Range<usize> {
        Partition::new(count, self.world_size()).range(self.rank())
    }

    fn alone<T>(&self, work: impl FnOnce() -> T) -> T {
        let _guard = (self.world_size() > 1).then(|| {
            self.shared.group.forbid(
                "it was called inside a closure that runs on one rank only, where the others \
                 would never join it; move it out of the closure",
            )
        });
        work()
    }
}
