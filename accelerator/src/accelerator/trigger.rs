use super::Accelerator;
use crate::core::error::Result;

/// A flag that any rank raises for all.
impl Accelerator {
    /// Raises a flag that [`check_trigger`](Self::check_trigger) shows to every rank: to stop early,
    /// or to save, for a reason that only this rank knows. Nothing is communicated here, so that it may
    /// be called on one rank only.
    pub fn set_trigger(&self) {
        self.shared.reduction.trigger.set();
    }

    /// Checks if some rank has [raised the flag](Self::set_trigger): the same answer on every rank, which also resets
    /// the flag. Every rank must call it, in the same places.
    ///
    /// It costs nothing where gradients are reduced anyway:
    ///
    /// - If a window of gradients was reduced since the last check, the answer was sent with it: whether
    ///   some rank had raised the flag by the end of its backward pass. A flag that is raised later is
    ///   sent with the next window, or by the next check without one.
    /// - Otherwise the check is an all-reduce of one number, also right after another check.
    ///
    /// The choice between the two depends on the calls of `backward` and `check_trigger` alone, and so is
    /// the same on every rank, and at every world size.
    ///
    /// ```
    /// let answers = accelerator::launch(2, |accelerator| {
    ///     let before = accelerator.check_trigger()?;
    ///     accelerator.on_process(1, || accelerator.set_trigger());
    ///     Ok([before, accelerator.check_trigger()?, accelerator.check_trigger()?])
    /// })?;
    /// assert_eq!(answers, [[false, true, false]; 2]);
    /// # Ok::<(), accelerator::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::is_collective`](crate::Error::is_collective) when ranks have to be asked and one is
    /// lost.
    #[track_caller]
    pub fn check_trigger(&self) -> Result<bool> {
        self.shared.reduction.trigger.check(self.group())
    }
}
