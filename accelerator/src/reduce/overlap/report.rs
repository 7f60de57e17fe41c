/// A report on how a model's gradients are sent; see
/// [`Accelerator::overlap_report`](crate::Accelerator::overlap_report).
///
/// [`On`](OverlapState::On) says that buckets may go early, and the counts say whether they did: a bucket
/// goes with the end of backward where backward is over before it could leave. With
/// [`Compression`](crate::Compression), no bucket leaves before all ranks have told their weights, so that
/// a backward that is shorter than this exchange sends nothing early, ever. `early_total` of 0 after many
/// `windows` tells.
///
/// ```
/// use accelerator::{Accelerator, Overlap, OverlapState};
/// # use burn::nn::{Linear, LinearConfig};
/// # use burn::tensor::Tensor;
///
/// let reports = Accelerator::builder().overlap(Overlap::On).launch(2, |accelerator| {
/// #     let device = accelerator.device();
/// #     let model: Linear = accelerator.init(|device| LinearConfig::new(2, 1).init(device));
/// #     let model = accelerator.prepare(model)?;
///     let loss = model.forward(Tensor::<2>::ones([4, 2], &device)).mean();
///     let gradients = accelerator.backward(loss, &model, 4)?;
/// #     let _ = gradients;
///     accelerator.overlap_report(&model)
/// })?;
/// // What is ready when is not known after one step.
/// assert_eq!(reports[0].state, OverlapState::Learning);
/// assert_eq!((reports[0].buckets, reports[0].early), (1, 0));
/// assert_eq!((reports[0].windows, reports[0].early_total, reports[0].repairs), (0, 0, 0));
/// # Ok::<(), accelerator::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct OverlapReport {
    /// The state of sending buckets while backward runs.
    pub state: OverlapState,
    /// The number of buckets of the last window; 0 before the first one.
    pub buckets: usize,
    /// The number of them that this rank began to send before its backward ended.
    pub early: usize,
    /// The sum of `early` over all `windows`.
    pub early_total: u64,
    /// The number of windows sent since buckets may go early.
    pub windows: u64,
    /// The number of steps in which some rank had sent a bucket before it was complete, so that it was reduced
    /// once more.
    pub repairs: u32,
}

/// The state of overlap: whether buckets are sent while backward runs.
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
