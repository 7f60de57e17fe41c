/// How a model's gradients are sent; see
/// [`Accelerator::overlap_report`](crate::Accelerator::overlap_report).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct OverlapReport {
    /// Whether they are sent while backward runs.
    pub state: OverlapState,
    /// The number of buckets of the last window; 0 before the first one.
    pub buckets: usize,
    /// How many of them this rank began to send before its backward ended.
    pub early: usize,
    /// In how many steps some rank had sent a bucket before it was complete, so that it was reduced
    /// once more.
    pub repairs: u32,
}

/// Whether buckets are sent while backward runs.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum OverlapState {
    /// They are sent afterwards: as the settings say, or since no gradient is ready earlier.
    Off,
    /// The first two windows tell which gradients are ready when.
    Learning,
    /// They are.
    On,
    /// They were, and the model's graph changes too much from step to step.
    GivenUp,
}
