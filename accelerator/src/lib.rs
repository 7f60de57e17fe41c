//! Write a [Burn](burn) training loop once. It runs unchanged on one device, in several
//! processes, and on several hosts.
//!
//! ```
//! use accelerator::prelude::*;
//! use burn::nn::{Linear, LinearConfig, loss::{MseLoss, Reduction}};
//! # use burn::data::{dataloader::batcher::Batcher, dataset::InMemDataset};
//! use burn::optim::SgdConfig;
//! use burn::tensor::{Device, Tensor, TensorData};
//! # #[derive(Clone)]
//! # struct Points;
//! # #[derive(Clone, Debug)]
//! # struct PointBatch { x: Tensor<2>, y: Tensor<2> }
//! # impl Batcher<f32, PointBatch> for Points {
//! #     fn batch(&self, items: Vec<f32>, device: &Device) -> PointBatch {
//! #         let n = items.len();
//! #         let x = Tensor::from_data(TensorData::new(items, [n, 1]), device);
//! #         PointBatch { y: x.clone() * 2.0 + 3.0, x }
//! #     }
//! # }
//!
//! # fn main() -> accelerator::Result<()> {
//! let accelerator = Accelerator::new()?;
//! let device = accelerator.device();
//!
//! let model: Linear = LinearConfig::new(1, 1).init(&device);
//! let optimizer = SgdConfig::new().init();
//! # let dataset = InMemDataset::new((0..64).map(|i| i as f32 / 64.0).collect());
//! let train = LoaderBuilder::new(Points).batch_size(8).shuffle(42).build(dataset);
//!
//! let (mut model, mut optimizer, train) = accelerator.prepare((model, optimizer, train))?;
//!
//! for epoch in 0..3 {
//!     for batch in train.epoch(epoch) {
//!         let batch = batch?;
//!         let loss = MseLoss::new().forward(
//!             model.forward(batch.x.clone()), batch.y.clone(), Reduction::Mean);
//!         let gradients = accelerator.backward(loss, &model, &batch)?;
//!         model = optimizer.step(0.1, model, gradients);
//!     }
//! }
//! accelerator.finish()
//! # }
//! ```
//!
//! | to | see |
//! |---|---|
//! | start, choose device, precision, seed | [`Accelerator::new`], [`Accelerator::builder`] |
//! | shard and prefetch data exactly, of every kind: data sets, samplers, streams | [`data`] |
//! | average gradients, accumulate, clip | [`Accelerator::backward`], [`Weight`], [`AveragedGradients`], [`Clip`] |
//! | know which GPU a rank takes, and share one | [`BackendKind`], [`Oversubscription`] |
//! | compute in half precision | [`precision`] |
//! | send gradients in half precision | [`Compression`] |
//! | choose how gradients of GPUs are reduced | [`GradientReduction`] |
//! | send gradients as products of thin matrices, or in your own way | [`hook::PowerSgd`], [`hook::CommunicationHook`] |
//! | send gradients while backward runs | [`Overlap`] |
//! | step an optimizer with its schedule, freeze, group parameters | [`optim`] |
//! | average parameters now and then, in place of gradients | [`local`] |
//! | know how many steps there will be | [`Accelerator::plan`] |
//! | average weights over time | [`Ema`] |
//! | step faster on the CPU, and keep a part of an optimizer's state on each rank | [`optim::fused`], [`optim::Sharded`] |
//! | see where the time of a step goes | [`Accelerator::step_summary`], [`AcceleratorBuilder::trace`], [`Accelerator::profile`] |
//! | evaluate | [`metric`], [`Accelerator::reduce_metric`], [`Accelerator::gather_for_metrics`] |
//! | exchange tensors and objects | [`Accelerator::gather`], [`Accelerator::pad_across_processes`], [`Accelerator::gather_object`] |
//! | share out other work than batches | [`Accelerator::split_between_processes`] |
//! | do something on one rank only, or there first | [`Accelerator::on_main_process`], [`Accelerator::main_process_first`] |
//! | find the batch that memory holds | [`Accelerator::find_executable_batch_size`] |
//! | log, warn, print with ranks | [`logging`], [`Accelerator::warn_once`], [`Accelerator::print_in_order`], [`Accelerator::in_rank_order`] |
//! | show progress bars on rank 0 | `Accelerator::progress`, with the feature `progress` |
//! | stop all ranks for a reason that one of them knows | [`Accelerator::set_trigger`], [`Accelerator::check_trigger`] |
//! | normalise over the batches of all ranks | [`nn::SyncBatchNorm`], [`Accelerator::valid`] |
//! | save and load models | [`Accelerator::save_model`], [`Accelerator::load_model`], [`model`] |
//! | find a rank whose parameters drifted | [`Accelerator::check_replicas`] |
//! | save everything, and go on from there | [`checkpoint`] |
//! | go on with a schedule at another number of ranks | [`Accelerator::resume_loader`] |
//! | do on purpose what is warned of or refused | [`allow_same_batches`](AcceleratorBuilder::allow_same_batches), [`without_item_check`](data::LoaderBuilder::without_item_check) |
//! | end a training whose loss is not finite | [`stop_at_non_finite_loss`](AcceleratorBuilder::stop_at_non_finite_loss) |
//! | run on several ranks inside one process, in tests | [`launch`] |
//!
//! # Environment variables
//!
//! Conflicting values in code and environment are an error; for timeouts, code wins. An unknown `ACCEL_…`
//! variable is an error, unless a newer `accel-launch` has set it and lists it in `ACCEL_SET_BY_LAUNCHER`; an
//! empty variable counts as not set.
//!
//! | variable | values | default | in the program |
//! |---|---|---|---|
//! | `ACCEL_ACCUMULATION_STEPS` | a number | 1 | [`accumulation_steps`](AcceleratorBuilder::accumulation_steps) |
//! | `ACCEL_DEVICE` | `cuda`, `wgpu`, `flex`, `ndarray` | the fastest that is compiled in | [`device`](AcceleratorBuilder::device) |
//! | `ACCEL_COMPRESSION` | `none`, `f16`, `bf16` | `none` | [`compression`](AcceleratorBuilder::compression) |
//! | `ACCEL_OVERLAP` | `auto`, `off`, `on` | `auto`: on between hosts, and on CUDA devices | [`overlap`](AcceleratorBuilder::overlap) |
//! | `ACCEL_OVERSUBSCRIBE_GPUS` | `1`: more ranks than GPUs share them; `0` | `0` | [`oversubscription`](AcceleratorBuilder::oversubscription) |
//! | `ACCEL_PRECISION` | `no`, `f16`, `bf16` | `no` | [`precision`](AcceleratorBuilder::precision) |
//! | `ACCEL_REDUCTION` | `auto`, `nccl`, `staged` | `auto`: NCCL where it can be | [`gradient_reduction`](AcceleratorBuilder::gradient_reduction) |
//! | `ACCEL_TRACE` | a path | no trace | [`trace`](AcceleratorBuilder::trace) |
//! | `ACCEL_TRACE_SCHEDULE` | `active=3,wait=1,warm_up=1,repeat=2,skip_first=10`; all but `active` may be left out | one trace of everything | [`trace_schedule`](AcceleratorBuilder::trace_schedule) |
//! | `ACCEL_TRANSPORT` | `auto`, `hierarchical`, `shm`, `tcp` | `auto`: for where the ranks are | [`transport`](AcceleratorBuilder::transport) |
//! | `ACCEL_LIVENESS_TIMEOUT` | seconds | 5 | [`liveness_timeout`](AcceleratorBuilder::liveness_timeout) |
//!
//! Size of buckets, seed and the other timeouts are set by the program alone:
//! [`bucket_size`](AcceleratorBuilder::bucket_size) (25 MiB),
//! [`seed`](AcceleratorBuilder::seed) (0),
//! [`connect_timeout`](AcceleratorBuilder::connect_timeout) (60 s),
//! [`progress_timeout`](AcceleratorBuilder::progress_timeout) (10 minutes),
//! [`busy_timeout`](AcceleratorBuilder::busy_timeout) (an hour).
//!
//! Where a process stands is set by `accel-launch`, torchrun or a cluster, and in the program by
//! [`launched_as`](AcceleratorBuilder::launched_as); [`Launch`](collective::Launch) tells the meaning of
//! each:
//!
//! | variable | values | default |
//! |---|---|---|
//! | `RANK`, `WORLD_SIZE` | numbers | a world of one; an error where MPI, Slurm or settings of torchrun show a job of several |
//! | `LOCAL_RANK`, `LOCAL_WORLD_SIZE` | numbers | found when the ranks meet, by the hosts on which they run |
//! | `MASTER_ADDR` | the host of the store where ranks meet | none: needed by several ranks |
//! | `ACCEL_PORT`, else `MASTER_PORT` | its port | none: needed by several ranks |
//! | `ACCEL_STORE` | `launcher`, `rank0` | `rank0` |
//! | `ACCEL_JOB` | the name of the job | none |
//! | `ACCEL_TOKEN_FILE` | the file of the job token | none: needed between hosts |
//! | `ACCEL_INSECURE` | `1`: hosts meet without a token | off |
//! | `ACCEL_RESTART`, `ACCEL_MAX_RESTARTS` | numbers, see [`restarts`](Accelerator::restarts) | 0, none |
//! | `ACCEL_FAULTS` | faults to inject, with the feature `faults` | none |

#[cfg(not(any(
    feature = "cuda",
    feature = "flex",
    feature = "ndarray",
    feature = "wgpu"
)))]
compile_error!(
    "accelerator: no device is enabled; choose at least one of the features `flex` (CPU, the \
     default), `ndarray`, `wgpu`, `cuda`, for example `burn-accelerate = { features = [\"flex\"] }`"
);

mod accelerator;
pub mod checkpoint;
mod context;
mod core;
pub mod data;
mod ema;
pub mod local;
pub mod logging;
pub mod metric;
pub mod model;
pub mod nn;
pub mod optim;
pub mod precision;
mod reduce;
mod replicas;
pub mod timeline;

pub use accelerator_collective as collective;
pub use accelerator_plan as plan;

pub use crate::accelerator::{
    Accelerator, AcceleratorBuilder, BatchSizeFinder, DistributedType, PadSide, PaddedShare,
    Prepare, Tensors, kind, launch, launch_processes,
};
pub use crate::core::device::{BackendKind, Oversubscription};
pub use crate::core::error::{Error, Result};
pub use crate::data::weight::Weight;
pub use crate::ema::Ema;
pub use crate::reduce::hook;
pub use crate::reduce::{
    AveragedGradients, Clip, Compression, GradientReduction, Overlap, OverlapReport, OverlapState,
};

/// What a training program usually imports.
///
/// Names that a program's own modules, or Burn's, often have are not in it: two glob imports of one name
/// are ambiguous. [`Clip`] and the [`metric`]s are imported by name.
///
/// ```
/// mod model {
///     pub struct Clip;
///     pub struct Accuracy;
/// }
/// use accelerator::prelude::*;
/// use burn::nn::loss::Reduction::{self, *};
/// use model::*;
///
/// fn settings() -> (Clip, Accuracy, Reduction, Precision) {
///     (Clip, Accuracy, Mean, Precision::No)
/// }
/// # fn main() {
/// #     settings();
/// # }
/// ```
pub mod prelude {
    pub use crate::checkpoint::{Checkpoints, Object, PerRank};
    pub use crate::collective::ReduceOp;
    pub use crate::data::{
        AssumeDeterministic, Batch, BuildUncompared as _, LoaderBuilder, PreparedLoader,
    };
    pub use crate::ema::Ema;
    pub use crate::local::{DiLoCoConfig, LocalOutcome, LocalSgdConfig, LocalTraining};
    pub use crate::optim::{
        InitFused, PerEpoch, PerProcess, PreparedOptimizer, RateScaling, Sharded, StepOutcome,
    };
    pub use crate::plan::TailPolicy;
    pub use crate::precision::Precision;
    pub use crate::{
        Accelerator, AveragedGradients, BackendKind, Compression, Error, GradientReduction,
        Overlap, Oversubscription, PadSide, Result, launch,
    };
}
