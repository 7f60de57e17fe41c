use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The number of living optimizers that an accelerator has prepared, by where their state is.
#[derive(Debug, Default)]
pub(crate) struct OptimizerCount {
    sharded: Arc<()>,
    whole: Arc<()>,
    /// Set if the last step of any of them was skipped.
    skipped: Arc<AtomicBool>,
}

/// An optimizer that is counted as long as it holds this.
#[derive(Debug)]
pub(crate) struct CountedOptimizer {
    _count: Arc<()>,
    skipped: Arc<AtomicBool>,
}

impl CountedOptimizer {
    /// Notes that it has taken a step.
    pub(super) fn note_stepped(&self) {
        self.skipped.store(false, Ordering::Relaxed);
    }

    /// Notes that it has skipped a step, whose gradients were not finite.
    pub(super) fn note_skipped(&self) {
        self.skipped.store(true, Ordering::Relaxed);
    }
}

/// The place of an optimizer's state.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum StateOf {
    /// Each rank has a part.
    Shards,
    /// Each rank has all of it.
    Whole,
}

impl OptimizerCount {
    pub(crate) fn count(&self, state: StateOf) -> CountedOptimizer {
        let count = match state {
            StateOf::Shards => &self.sharded,
            StateOf::Whole => &self.whole,
        };
        CountedOptimizer {
            _count: count.clone(),
            skipped: self.skipped.clone(),
        }
    }

    pub(crate) fn skipped(&self) -> bool {
        self.skipped.load(Ordering::Relaxed)
    }

    /// Returns `true` if there are optimizers and all of them are sharded.
    pub(crate) fn has_only_shards(&self) -> bool {
        // One handle is the count's own.
        Arc::strong_count(&self.sharded) > 1 && Arc::strong_count(&self.whole) == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_is_dropped_counts_no_more() {
        let count = OptimizerCount::default();
        assert!(!count.has_only_shards());
        let _sharded = count.count(StateOf::Shards);
        assert!(count.has_only_shards());
        let whole = count.count(StateOf::Whole);
        assert!(!count.has_only_shards());
        drop(whole);
        assert!(count.has_only_shards());
    }
}
