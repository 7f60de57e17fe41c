#![allow(
    clippy::large_enum_variant,
    reason = "tensors of some devices are large; such values are few, or in memory that is kept"
)]

mod backward;
mod backward_calls;
mod bucket_layout;
mod bucket_set;
mod bucket_storage;
mod bucket_sums;
mod compression;
mod control_vector;
mod device_bucket;
mod device_reduce;
mod element_values;
mod gradients;
pub mod hook;
mod loss;
mod model_state;
mod models;
mod overlap;
mod pace;
mod parameter_mean;
mod reduce_context;
mod reduced_gradients;
mod reducer;
mod register;
mod step_gradients;
mod trigger;
mod updates;
mod warnings;
mod window;
mod working_copy;

pub(crate) use self::backward::{MicroStep, backward};
pub(crate) use self::bucket_layout::ShardMap;
pub use self::compression::Compression;
pub(crate) use self::device_reduce::DeviceReducer;
pub use self::device_reduce::GradientReduction;
#[cfg_attr(not(feature = "flex"), allow(unused_imports))]
pub(crate) use self::element_values::{ElementValues, with_values};
pub use self::gradients::AveragedGradients;
pub(crate) use self::loss::OnNonFiniteLoss;
pub(crate) use self::model_state::ModelState;
pub(crate) use self::overlap::OverlapSwitch;
pub use self::overlap::{Overlap, OverlapReport, OverlapState};
pub(crate) use self::parameter_mean::{MeanWeight, mean_over_ranks};
pub(crate) use self::reduce_context::{ReduceContext, ReduceScope, ReduceSettings, SameBatches};
pub use self::reduced_gradients::Clip;
pub(crate) use self::register::{prepare, resume};
pub(crate) use self::step_gradients::{
    GradientFloat as Summand, GradientSums, StepGradients, SumLocation,
};
pub(crate) use self::trigger::{SaveProgress, WatchedSave};
pub(crate) use self::updates::{LocalRound, OpenRoundConcern, SeenUpdates, sharded};
pub(crate) use self::working_copy::working_copy;

/// Runs `body` on that many ranks, which are threads.
#[cfg(test)]
fn on_ranks<T: Send>(
    count: usize,
    body: impl Fn(accelerator_collective::ProcessGroup) -> T + Sync,
) -> Vec<T> {
    let options = accelerator_collective::GroupOptions::new();
    let groups = accelerator_collective::ProcessGroup::threads(count, &options).unwrap();
    std::thread::scope(|scope| {
        let body = &body;
        let threads: Vec<_> = groups
            .into_iter()
            .map(|group| scope.spawn(move || body(group)))
            .collect();
        let outcomes = threads.into_iter().map(|thread| thread.join().unwrap());
        outcomes.collect()
    })
}
