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
//! let train = DataLoaderBuilder::new(Points).batch_size(8).shuffle(42).build(dataset);
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
//! | shard and prefetch data exactly | [`data`] |
//! | average gradients, accumulate, clip | [`Accelerator::backward`], [`Gradients`] |
//! | send gradients in half precision | [`Compression`] |
//! | send gradients while backward runs | [`Overlap`] |
//! | step an optimizer with its schedule | [`optim`] |
//! | see where the time of a step goes | [`Accelerator::step_summary`], [`AcceleratorBuilder::with_trace`] |
//! | evaluate | [`metric`], [`Accelerator::reduce`], [`Accelerator::gather_for_metrics`] |
//! | save and load models | [`Accelerator::save_model`], [`Accelerator::load_model`], [`model`] |
//! | find a rank whose parameters drifted | [`Accelerator::check_replicas`] |
//! | save everything, and go on from there | [`checkpoint`] |
//! | run on several ranks inside one process, in tests | [`launch`] |

#[cfg(not(any(
    feature = "cuda",
    feature = "flex",
    feature = "ndarray",
    feature = "wgpu"
)))]
compile_error!(
    "accelerator: no device is enabled; choose at least one of the features `flex` (CPU, the \
     default), `ndarray`, `wgpu`, `cuda`, for example `accelerator = { features = [\"flex\"] }`"
);

mod accelerator;
mod agreement;
pub mod checkpoint;
pub mod data;
mod device;
mod error;
mod gradient;
mod launch;
pub mod metric;
pub mod model;
pub mod optim;
mod outcome;
mod prepare;
mod replicas;
pub mod timeline;

pub use accelerator_collective as collective;
pub use accelerator_plan as plan;

pub use crate::accelerator::{Accelerator, AcceleratorBuilder};
pub use crate::device::DeviceKind;
pub use crate::error::{Error, Result};
pub use crate::gradient::{Compression, Gradients, Overlap, OverlapReport, OverlapState, Weight};
pub use crate::launch::launch;
pub use crate::prepare::{Prepare, kind};

/// What a training program usually imports.
pub mod prelude {
    pub use crate::checkpoint::{Checkpoints, Object, PerRank};
    pub use crate::collective::ReduceOp;
    pub use crate::data::{Batch, DataLoaderBuilder, PreparedLoader};
    pub use crate::metric::{Accuracy, Mean};
    pub use crate::optim::{PerEpoch, PreparedOptimizer, StepOutcome};
    pub use crate::plan::TailPolicy;
    pub use crate::{Accelerator, DeviceKind, Error, Gradients, Result, launch};
}
