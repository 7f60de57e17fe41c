//! A batch whose collation may be deferred to the thread that asks for it, so that a batcher that draws from the device
//! draws under the seed of its step.

use std::sync::{Arc, OnceLock};

use burn::data::dataloader::batcher::Batcher;
use burn::tensor::{Device, Distribution, Tensor};

use crate::core::error::Result;
use crate::core::generator::drawing;
use crate::core::panic_text::caught;

/// The result of a batcher, or the function that makes it.
pub(super) enum DeferredBatch<O> {
    Ready(O),
    /// A function to call on the thread that asks for the batch, with the seed of its random numbers, if the
    /// generator is this rank's own.
    Deferred(Box<dyn FnOnce(Option<u64>) -> O + Send>),
}

/// The thread that makes the batches of a batcher.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum BatcherThread {
    /// The one that asks for them, between the draws of two steps: a device has one generator, and dropout
    /// draws from it too.
    Caller,
    /// The one that loads them.
    Worker,
}

impl<O: 'static> DeferredBatch<O> {
    /// A batch of the items. While it is not known who makes it, the caller does, and finds out whether the
    /// batcher draws from the device.
    pub(super) fn collate<I: Send + 'static>(
        items: Vec<I>,
        batcher: &Arc<dyn Batcher<I, O>>,
        maker: &Arc<OnceLock<BatcherThread>>,
        device: &Device,
    ) -> Self {
        if maker.get() == Some(&BatcherThread::Worker) {
            return Self::Ready(batcher.batch(items, device));
        }
        let (batcher, maker, device) = (batcher.clone(), maker.clone(), device.clone());
        Self::Deferred(Box::new(move |seed| {
            let Some(seed) = seed else {
                maker.get_or_init(|| BatcherThread::Worker);
                return batcher.batch(items, &device);
            };
            let _turn = drawing();
            device.seed(seed);
            let batch = batcher.batch(items, &device);
            maker.get_or_init(|| match has_drawn(&device, seed) {
                true => {
                    tracing::info!(
                        "a batcher draws from the device: it is called where batches are asked for, and not \
                         by workers (said once a loader)"
                    );
                    BatcherThread::Caller
                }
                false => BatcherThread::Worker,
            });
            batch
        }))
    }
}

impl<O> DeferredBatch<O> {
    /// A panic of the batcher is an error, as it is on a worker.
    pub(super) fn resolve(self, seed: Option<u64>) -> Result<O> {
        match self {
            Self::Ready(value) => Ok(value),
            Self::Deferred(make) => caught("making a batch", || Ok(make(seed))),
        }
    }
}

/// Tells if something was drawn since the generator was set from the seed. It tells nobody its state.
fn has_drawn(device: &Device, seed: u64) -> bool {
    let draw = || Tensor::<1>::random([8], Distribution::Default, device).into_data();
    let next = draw();
    device.seed(seed);
    next != draw()
}
