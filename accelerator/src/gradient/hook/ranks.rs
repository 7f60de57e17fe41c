use accelerator_collective::{Element, ProcessGroup, ReduceOp};

use crate::error::Result;

/// All ranks, as a [`CommunicationHook`](super::CommunicationHook) talks to them.
///
/// Every rank calls the same methods with as many values, in one order; where they do not, all of them get
/// an error that says so.
#[derive(Debug)]
pub struct Ranks<'a> {
    group: &'a ProcessGroup,
}

impl<'a> Ranks<'a> {
    pub(in crate::gradient) fn new(group: &'a ProcessGroup) -> Self {
        Self { group }
    }

    /// The number of this rank, from 0.
    pub fn rank(&self) -> usize {
        self.group.rank()
    }

    /// How many there are.
    pub fn world_size(&self) -> usize {
        self.group.world_size()
    }

    /// Puts what the values of all ranks come to, element by element, in their place: the same bits on
    /// every rank.
    ///
    /// # Errors
    ///
    /// [`Error::is_collective`](crate::Error::is_collective) when another rank is lost, or calls something
    /// else.
    #[track_caller]
    pub fn all_reduce<T: Element>(&self, values: &mut [T], op: ReduceOp) -> Result<()> {
        Ok(self.group.all_reduce(values, op)?)
    }

    /// The values of all ranks, equally many of each, in rank order.
    ///
    /// # Errors
    ///
    /// As [`all_reduce`](Self::all_reduce).
    #[track_caller]
    pub fn all_gather<T: Element>(&self, values: &[T]) -> Result<Vec<T>> {
        Ok(self.group.all_gather(values)?)
    }

    /// The values of each rank, by rank, which may be more of one than of another.
    ///
    /// # Errors
    ///
    /// As [`all_reduce`](Self::all_reduce).
    #[track_caller]
    pub fn all_gather_varied<T: Element>(&self, values: &[T]) -> Result<Vec<Vec<T>>> {
        Ok(self.group.all_gather_varied(values)?)
    }

    /// The group underneath, for operations that this type has no method for.
    pub fn group(&self) -> &'a ProcessGroup {
        self.group
    }
}
