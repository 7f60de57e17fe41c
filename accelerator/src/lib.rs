//! Distributed data-parallel training for [Burn](burn): the same training loop runs on one device, in several
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
//! | shard and prefetch data sets and streams, with samplers | [`data`] |
//! | average gradients, accumulate, clip | [`Accelerator::backward`], [`Accelerator::average`], [`Weight`], [`AveragedGradients`], [`Clip`] |
//! | choose a device, and share a GPU between ranks | [`BackendKind`], [`Oversubscription`] |
//! | compute in half precision | [`precision`] |
//! | send gradients in half precision | [`Compression`] |
//! | choose how gradients of GPUs are reduced (NCCL or host memory) | [`GradientReduction`] |
//! | send gradients as low-rank factors (PowerSGD), or by a hook of your own | [`hook::PowerSgd`], [`hook::CommunicationHook`] |
//! | send gradients while backward runs | [`Overlap`] |
//! | step an optimizer with its schedule, freeze, group parameters | [`optim`] |
//! | average parameters every few steps instead of gradients (LocalSGD, DiLoCo) | [`local`] |
//! | compute the number of optimizer steps | [`Accelerator::plan`] |
//! | keep an exponential moving average of parameters | [`Ema`] |
//! | step faster on the CPU, and shard an optimizer's state over the ranks (ZeRO stage 1) | [`optim::fused`], [`optim::Sharded`] |
//! | compute faster on the CPU than with Burn's layers | `ops`, with the feature `ops` |
//! | compute activations again in backward, in place of keeping them | [`nn::Unit`], [`nn::recompute`] |
//! | profile steps | [`Accelerator::step_summary`], [`AcceleratorBuilder::trace`], [`Accelerator::profile`] |
//! | evaluate | [`metric`], [`Accelerator::reduce_metric`], [`Accelerator::gather_for_metrics`] |
//! | exchange tensors and objects | [`Accelerator::gather`], [`Accelerator::pad_across_processes`], [`Accelerator::gather_object`] |
//! | divide work other than batches among ranks | [`Accelerator::split_between_processes`] |
//! | run code on one rank only, or on one rank first | [`Accelerator::on_main_process`], [`Accelerator::main_process_first`] |
//! | find the largest batch that fits in memory | [`Accelerator::find_executable_batch_size`] |
//! | log and print with the rank | [`logging`], [`Accelerator::print`], [`Accelerator::in_rank_order`] |
//! | track a run: metrics, histograms, TensorBoard | [`Accelerator::init_trackers`], [`Accelerator::log`], [`AcceleratorBuilder::log_with`] |
//! | show progress bars on rank 0 | `Accelerator::progress`, with the feature `progress` |
//! | stop all ranks when one rank decides to | [`Accelerator::set_trigger`], [`Accelerator::check_trigger`] |
//! | save and exit when the cluster's scheduler asks for it | [`Accelerator::on_preemption`], [`Accelerator::preempted`] |
//! | normalise over the batches of all ranks | [`nn::SyncBatchNorm`], [`Accelerator::valid`] |
//! | save and load models | [`Accelerator::save_model`], [`Accelerator::load_model`], [`model`] |
//! | find a rank whose parameters differ | [`Accelerator::check_replicas`] |
//! | save the whole state, and resume | [`checkpoint`] |
//! | resume a schedule on a different number of ranks | [`Accelerator::resume_loader`] |
//! | turn off a warning or a check | [`allow_same_batches`](AcceleratorBuilder::allow_same_batches), [`without_item_check`](data::LoaderBuilder::without_item_check) |
//! | fail if a loss is not finite | [`stop_at_non_finite_loss`](AcceleratorBuilder::stop_at_non_finite_loss) |
//! | run a `Learner` of burn-train on several processes | `learner`, with the feature `burn-train` |
//! | run several ranks inside one process, in tests | [`launch`] |
//! | start the processes of the ranks from the program | [`launch_processes`] |
//! | train with an operator on processes that its trainer starts, as in Ray SGD | [`train::TrainingOperator`], [`train::OperatorTrainer`] |
//!
//! # How a program is started
//!
//! A launcher, such as `accel-launch` or torchrun, sets the rank, the world size and the address of the store in the
//! variables that [`Launch`](collective::Launch) lists. A program can instead pass its own `Launch` to
//! [`launched_as`](AcceleratorBuilder::launched_as). Without either, the process is the only rank.
//!
//! # Environment variables
//!
//! The methods of [`AcceleratorBuilder`] name their `ACCEL_…` variables and defaults; `accel-launch env` shows
//! and checks all of them. Conflicting values in code and environment are an error; for timeouts, code wins. An
//! unknown `ACCEL_…` variable is an error, unless a newer `accel-launch` has set it and lists it in
//! `ACCEL_SET_BY_LAUNCHER`; an empty variable counts as not set.

#[cfg(not(any(feature = "cube", feature = "flex", feature = "ndarray")))]
compile_error!(
    "accelerator: no device is enabled; choose at least one of the features `flex` (CPU, the \
     default), `cpu`, `ndarray`, `wgpu`, `vulkan`, `metal`, `rocm`, `cuda`, for example `burn-accelerate = { features = [\"flex\"] }`"
);

mod accelerator;
pub mod checkpoint;
mod context;
mod core;
pub mod data;
mod ema;
#[cfg(feature = "burn-train")]
pub mod learner;
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
mod tracking;
pub mod train;
mod unit;

pub use accelerator_host::PREEMPTED_EXIT_CODE;

#[cfg(feature = "burn-train")]
pub use crate::accelerator::RunLogger;
pub use crate::accelerator::{
    Accelerator, AcceleratorBuilder, Groups, PadSide, Prepare, launch, launch_processes,
};
pub use crate::core::device::{BackendKind, Oversubscription};
pub use crate::core::error::{Error, Result};
pub use crate::core::preemption::{Preemption, PreemptionSignal};
pub use crate::core::tensors::Tensors;
pub use crate::data::batch::Weight;
pub use crate::ema::Ema;
pub use crate::reduce::{
    AveragedGradients, Clip, Compression, GradientReduction, Overlap, OverlapReport, OverlapState,
    hook,
};
pub use crate::tracking::Tracker;

/// The items that a training program usually imports.
///
/// It leaves out names that are common in programs or in Burn, since two glob imports of one name are ambiguous:
/// import [`Clip`] and the [`metric`]s by name.
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
        Overlap, Oversubscription, PadSide, Preemption, Result, launch, print_main,
    };
}

/// Groups of ranks: how a process joins one, and the operations that its ranks compute together.
pub mod collective {
    #[doc(hidden)]
    pub use accelerator_collective::internal;
    pub use accelerator_collective::{
        Activity, Buffer, Busy, Culprit, DType, Element, Error, GroupOptions, Launch, LaunchSource,
        Partition, Pending, ProcessGroup, ReduceOp, Result, Topology, TransportKind,
    };
}

/// The rules by which samples are divided among ranks, and randomness that depends only on positions.
pub mod plan {
    pub use accelerator_plan::{
        Permutation, TailPolicy, TokenBatches, WeightedSampler, mix, sample_rng_seed,
    };
}

/// Runs: the handle that [`Accelerator::tracker`] lends, the records that a [`Tracker`] gets, and the readers of runs.
pub mod track {
    #[cfg(feature = "kubeflow")]
    pub use accelerator_track::KubeflowSink;
    pub use accelerator_track::{
        Artifact, ArtifactFile, ArtifactId, ArtifactReference, ArtifactRole, ArtifactStore,
        ArtifactUse, Capture, CsvFile, Delivery, EndStatus, Entry, Error, FolderDigest, Histogram,
        Hyperparameter, Media, MediaContent, Metrics, Number, Origin, Point, PointValue, Record,
        Report, Result, Run, RunAttempt, RunBuilder, RunEnd, RunHistory, RunId, RunInfo, RunMark,
        RunStatus, RunSummary, Runs, Series, SeriesSummary, Sink, SinkPosition, StoredArtifact,
        SystemPoint, TensorBoard, UploadReport, WeightsDigest, digest_folder, upload,
    };
    #[cfg(feature = "mlflow")]
    pub use accelerator_track::{MlflowServer, MlflowSink};
}

/// Operations and layers that are faster on the CPU than Burn's, and one node of the graph each.
#[cfg(feature = "ops")]
#[doc(inline)]
pub use accelerator_ops as ops;

/// Hyperparameter search.
#[cfg(feature = "tune")]
pub mod tune {
    pub use accelerator_tune::{
        Asha, AshaPromotion, BestResult, BoxError, CheckpointSettings, Compatibility, Config,
        DataFrame, Display, Error, IntoValue, MaxFailures, MedianStopping, Metrics, Mode, Number,
        Objective, Optuna, Parameter, Pbt, Plateau, Reset, Resources, Result, Results, Scheduler,
        Scope, Search, SearchAlgorithm, SearchEnd, SearchFolder, SearchOrder, SearchSpec, Searcher,
        Space, Stop, Trainable, Trial, TrialContext, TrialEnd, TrialId, TrialResult, TrialSession,
        TrialStatus, WorkerReuse, choice, grid_search, lograndint, loguniform, qlograndint,
        qloguniform, qrandint, qrandn, quniform, randint, randn, sample_from, uniform,
    };
}

/// The program of `docs/adapters.md`.
#[cfg(doctest)]
#[doc = include_str!("../../docs/adapters.md")]
mod adapters_guide {}

/// The program of `docs/tracking.md`.
#[cfg(doctest)]
#[doc = include_str!("../../docs/tracking.md")]
mod tracking_guide {}

/// The program of `docs/trainer.md`.
#[cfg(doctest)]
#[doc = include_str!("../../docs/trainer.md")]
mod trainer_guide {}

/// A batch that is used without `?`, of which `docs/troubleshooting.md` has the compiler's answer.
///
/// ```compile_fail,E0609
/// use accelerator::prelude::*;
/// use burn::tensor::{Device, Tensor};
///
/// struct Points {
///     x: Tensor<1>,
/// }
///
/// fn train(train: PreparedLoader<Points>) -> Tensor<1> {
///     train.epoch(0).fold(Tensor::zeros([1], &Device::default()), |sum, batch| sum + batch.x.clone())
/// }
/// ```
///
/// ```
/// # use accelerator::prelude::*;
/// # use burn::tensor::{Device, Tensor};
/// # struct Points {
/// #     x: Tensor<1>,
/// # }
/// fn train(train: PreparedLoader<Points>) -> Result<Tensor<1>> {
///     let zero = Tensor::zeros([1], &Device::default());
///     train.epoch(0).try_fold(zero, |sum, batch| Ok(sum + batch?.x.clone()))
/// }
/// ```
#[cfg(doctest)]
mod forgotten_question_mark {}
