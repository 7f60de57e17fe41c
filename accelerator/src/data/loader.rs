use core::fmt;
use std::sync::Arc;

use super::order::Spec;
use super::source::ItemSource;
use super::stream::SharedStream;
use crate::core::error::Result;

/// A loader that was built and not yet shared out: pass it to
/// [`Accelerator::prepare`](crate::Accelerator::prepare).
#[must_use]
pub struct Loader<O> {
    pub(super) origin: SampleSource<O>,
    pub(super) spec: Spec,
}

/// The source of samples.
pub(super) enum SampleSource<O> {
    Indexed(Arc<dyn ItemSource<O>>),
    Stream(Arc<dyn SharedStream<O>>),
}

impl<O> Loader<O> {
    /// Does not compile, and says why.
    #[doc(hidden)]
    pub fn epoch(&self, _: u64) -> core::iter::Empty<Result<super::Batch<O>>>
    where
        Self: Epochs,
    {
        core::iter::empty()
    }

    /// Does not compile, and says why.
    #[doc(hidden)]
    pub fn iter(&self) -> core::iter::Empty<Result<super::Batch<O>>>
    where
        Self: Epochs,
    {
        core::iter::empty()
    }
}

/// A bound that no loader meets before it is prepared.
#[doc(hidden)]
#[diagnostic::on_unimplemented(
    message = "this loader was built and not prepared, so it has no epochs",
    label = "built, and not prepared",
    note = "pass it to `accelerator.prepare(…)`, and take the batches of `loader.epoch(epoch)` of what comes back"
)]
pub trait Epochs {}

impl<O> fmt::Debug for Loader<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("Loader");
        match &self.origin {
            SampleSource::Indexed(source) => debug.field("samples", &source.len()),
            SampleSource::Stream(stream) => debug.field("stream", &stream.sharing()),
        };
        debug.field("spec", &self.spec).finish_non_exhaustive()
    }
}
