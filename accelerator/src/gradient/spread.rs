//! Sums of which each rank has a part; see "Sharded optimizers" in the README of this folder.

use core::ops::Range;
use std::sync::Arc;

use accelerator_collective::ProcessGroup;

/// By parameter of a model, by number: which of its elements each rank steps. Those of one rank begin at
/// whole [blocks](super::BLOCK) of the parameter, unless they are none.
#[derive(Debug)]
pub(crate) struct Bounds {
    /// By parameter: where the part of each rank begins, and where the last one ends.
    bounds: Vec<Vec<usize>>,
    /// Of the optimizer that has settled them.
    owner: Arc<()>,
    ranks: usize,
}

impl Bounds {
    pub(crate) fn new(bounds: Vec<Vec<usize>>, ranks: usize, owner: &Arc<()>) -> Self {
        Self {
            bounds,
            owner: owner.clone(),
            ranks,
        }
    }

    /// Whether they are those of that optimizer.
    pub(crate) fn are_of(&self, owner: &Arc<()>) -> bool {
        Arc::ptr_eq(&self.owner, owner)
    }

    pub(super) fn range(&self, parameter: usize, rank: usize) -> Range<usize> {
        let bounds = &self.bounds[parameter];
        bounds[rank]..bounds[rank + 1]
    }

    pub(super) fn ranks(&self) -> usize {
        self.ranks
    }
}

/// Which sums of a window a rank has.
#[derive(Clone, Debug)]
pub(super) enum Spread {
    /// All of them.
    Whole,
    /// Those within its bounds, which are those of the layout. The others are in the group.
    Own(ProcessGroup),
}
