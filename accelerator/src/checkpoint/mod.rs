//! Checkpoints: save everything that training depends on, and resume.
//!
//! ```
//! use accelerator::prelude::*;
//! use accelerator::checkpoint::{Checkpoints, Object};
//! # use burn::data::{dataloader::batcher::Batcher, dataset::InMemDataset};
//! use burn::nn::{Linear, LinearConfig};
//! use burn::optim::AdamWConfig;
//! # use burn::tensor::{Device, Tensor, TensorData};
//! # struct Rows;
//! # impl Batcher<f32, Tensor<2>> for Rows {
//! #     fn batch(&self, items: Vec<f32>, device: &Device) -> Tensor<2> {
//! #         let shape = [items.len(), 1];
//! #         Tensor::from_data(TensorData::new(items, shape), device)
//! #     }
//! # }
//!
//! # fn main() -> Result<()> {
//! # let folder = tempfile::tempdir().unwrap();
//! # let folder = folder.path();
//! let accelerator = Accelerator::new()?;
//! let model: Linear = LinearConfig::new(1, 1).init(&accelerator.device());
//! # let dataset = InMemDataset::new(vec![0.5_f32; 40]);
//! let train = LoaderBuilder::new(Rows).batch_size(4).shuffle(1).build(dataset);
//! let (model, optimizer, train) =
//!     accelerator.prepare((model, AdamWConfig::new().init(), train))?;
//! let lowest = f64::INFINITY;
//!
//! let checkpoints = Checkpoints::new(folder).with_total_limit(3);
//! let ((mut model, mut optimizer, train, Object(mut lowest)), position) =
//!     accelerator.resume(&checkpoints, (model, optimizer, train, Object(lowest)))?;
//! for epoch in position.epoch()..3 {
//!     for batch in train.epoch(epoch) {
//!         let batch = batch?;
//!         let loss = model.forward((*batch).clone()).powi_scalar(2).mean();
//!         let gradients = accelerator.backward(loss, &model, &batch)?;
//!         lowest = lowest.min(gradients.loss().unwrap_or(lowest));
//!         model = optimizer.step(1e-2, model, gradients);
//!         if optimizer.steps() % 7 == 0 {
//!             accelerator.save_state(&checkpoints, (&model, &optimizer, &train, Object(&lowest)))?;
//!         }
//!     }
//! }
//! # assert_eq!(optimizer.steps(), 30);
//! # let (_, position) = accelerator.resume(&checkpoints, (model, optimizer, train, Object(lowest)))?;
//! # assert_eq!((position.epoch(), position.step()), (2, 28));
//! # accelerator.finish()
//! # }
//! ```
//!
//! Interrupted anywhere and started again, this program ends with the weights of one that was never
//! interrupted; on the CPU, bit for bit.
//!
//! A checkpoint is complete or absent, whichever process dies while it is written. Later damage is detected by its
//! hashes, and the checkpoint before it is used. `accel-launch checkpoint` lists and verifies them.

mod parts;
mod position;
mod restorer;
mod resume;
mod save;
mod saving;
mod settings;
mod snapshot;
mod state_file;
mod write;

pub(crate) use self::parts::{DynSave, SavedAs};
pub use self::parts::{Object, PerRank, Resume, Save};
pub use self::position::{Position, Rescale, WorldChange};
pub(crate) use self::restorer::Restorer;
pub(crate) use self::resume::{resume, resume_loader};
pub(crate) use self::save::{
    SurvivorState, keep, loss_to_survive, save, save_async, save_emergency,
};
pub(crate) use self::saving::CheckpointContext;
pub use self::saving::{Saved, Saving};
pub use self::settings::Checkpoints;
pub(crate) use self::snapshot::{Snapshot, SnapshotExchange};
pub(crate) use self::state_file::{PartKind, open_model};
