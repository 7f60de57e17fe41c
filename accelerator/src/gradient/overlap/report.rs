/// How a model's gradients are sent; see
/// [`Accelerator::overlap_report`](crate::Accelerator::overlap_report).
///
/// [`On`](OverlapState::On) says that buckets may go early, and the counts say whether they did: a bucket
/// goes with the end of backward where backward is over before it could leave. With
/// [`Compression`](crate::Compression), no bucket leaves before all ranks have told their weights, so that
/// a backward that is shorter than this exchange sends nothing early, ever. `early_total` of 0 after many
/// `windows` tells.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct OverlapReport {
    /// Whether they are sent while backward runs.
    pub state: OverlapState,
    /// The number of buckets of the last window; 0 before the first one.
    pub buckets: usize,
    /// How many of them this rank began to send before its backward ended.
    pub early: usize,
    /// As `early`, of all `windows` together.
    pub early_total: u64,
    /// How many windows were sent since buckets may go early.
    pub windows: u64,
    /// In how many steps some rank had sent a bucket before it was complete, so that it was reduced
    /// once more.
    pub repairs: u32,
}

/// Whether buckets are sent while backward runs.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum OverlapState {
    /// They are sent afterwards: as the settings say, by a
    /// [communication hook](crate::hook::CommunicationHook), or since no gradient is ready earlier.
    Off,
    /// The first two windows in which each rank has samples tell which gradients are ready when.
    Learning,
    /// They are.
    On,
    /// They were, and the model's graph changes too much from step to step.
    GivenUp,
}
