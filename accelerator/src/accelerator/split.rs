use std::ops::Range;

use accelerator_collective::Partition;

use super::Accelerator;

/// The share of this rank, with copies of the last item that make it as long as every other
/// rank's; see [`Accelerator::split_between_processes_padded`].
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct PaddedShare<T> {
    /// The share, padding last.
    pub items: Vec<T>,
    /// The number of copies at the end.
    pub padding: usize,
}

impl<T> PaddedShare<T> {
    /// The items that are no padding: over all ranks, each comes once.
    pub fn real(&self) -> &[T] {
        &self.items[..self.items.len().saturating_sub(self.padding)]
    }
}

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

    /// Splits like [`split_between_processes`](Self::split_between_processes), into equal lengths: a shorter share
    /// ends with copies of its last item, or of the last of all if it is empty.
    /// Leave them out of results with [`PaddedShare::real`] or [`PaddedShare::padding`].
    ///
    /// ```
    /// let shares = accelerator::launch(2, |accelerator| {
    ///     Ok(accelerator.split_between_processes_padded(&["A", "B", "C"]))
    /// })?;
    /// assert_eq!(shares[1].items, ["C", "C"]);
    /// assert_eq!(shares[1].padding, 1);
    /// assert_eq!(shares[1].real(), ["C"]);
    /// # Ok::<(), accelerator::Error>(())
    /// ```
    pub fn split_between_processes_padded<T: Clone>(&self, items: &[T]) -> PaddedShare<T> {
        let mut share = self.split_between_processes(items).to_vec();
        let padding = items.len().div_ceil(self.world_size()) - share.len();
        if let Some(last) = share.last().or(items.last()).cloned() {
            share.extend(std::iter::repeat_n(last, padding));
        }
        PaddedShare {
            items: share,
            padding,
        }
    }
}
