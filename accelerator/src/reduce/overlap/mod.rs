mod agree;
mod anchors;
mod backward;
mod calibration;
mod identity;
mod ready_order;
mod report;
mod scheduler;
mod setting;
mod watch;

use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;

use self::anchors::Anchors;
pub(super) use self::identity::is_of;
pub(super) use self::ready_order::ReadyOrder;
pub use self::report::{OverlapReport, OverlapState};
pub(super) use self::scheduler::OverlapScheduler;
pub(crate) use self::scheduler::OverlapSwitch;
pub use self::setting::Overlap;
use self::watch::{Observer, ProbeWatch};

/// A place in backward at which to look at gradients.
#[derive(Debug)]
struct ProbePoint {
    /// The depth of the point: everything deeper has run when it is reached.
    depth: usize,
    /// The parameters whose gradients are looked at; `None` is one that has none.
    leaves: Vec<Option<DispatchTensor>>,
}

/// The same loss, whose backward calls `observer` at each of `probes`, which are ordered from
/// the deepest to the shallowest. Values and gradients stay as they are.
fn watch(
    loss: Tensor<1>,
    anchors: &mut Anchors,
    probes: Vec<ProbePoint>,
    observer: &Arc<dyn Observer>,
) -> Tensor<1> {
    let chain = anchors.on(&loss.device());
    let depths: Vec<usize> = probes.iter().map(|probe| probe.depth).collect();
    let anchors = chain.at(&depths);
    // Each watch stands on the next shallower one, so that one node joins all of them.
    let mut watched = chain.leaf();
    for (point, (probe, anchor)) in probes.into_iter().zip(anchors).enumerate().rev() {
        let watch = ProbeWatch {
            leaves: probe.leaves,
            observer: Arc::clone(observer),
            point,
        };
        watched = watch::watch(watched, anchor, watch);
    }
    Tensor::from_dispatch(watch::join(
        loss.into_dispatch(),
        watched,
        Arc::clone(observer),
    ))
}

#[cfg(test)]
mod tests;
