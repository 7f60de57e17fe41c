use std::ops::Range;

use accelerator_collective::Partition;

use super::Accelerator;

/// Shares out work without a loader: prompts, files, folds.
impl Accelerator {
    /// Returns this rank's contiguous share of `count` items; the first ranks get one more if it
    /// does not divide evenly. Nothing is communicated.
    pub fn share_of(&self, count: usize) -> Range<usize> {
        Partition::new(count, self.world_size()).range(self.rank())
    }

    /// Returns this rank's contiguous share of `items`, as [`share_of`](Self::share_of) cuts them. With fewer
    /// items than ranks, the last ranks get none.
    ///
    /// Several lists of the same length, and rows of tensors, are cut alike by `share_of`.
    ///
    /// ```
    /// let shares = accelerator::launch(2, |accelerator| {
    ///     Ok(accelerator.split_between_processes(&["A", "B", "C"]).to_vec())
    /// })?;
    /// assert_eq!(shares, [vec!["A", "B"], vec!["C"]]);
    /// # Ok::<(), accelerator::Error>(())
    /// ```
    pub fn split_between_processes<'a, T>(&self, items: &'a [T]) -> &'a [T] {
        // Within the items: the ranges partition them.
        &items[self.share_of(items.len())]
    }
}
