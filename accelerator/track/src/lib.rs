//! Experiment tracking: what a training run was given, what it measured, what it made.
//!
//! A run is a folder with an append-only journal. Everything else is replayed from it: the files that TensorBoard reads,
//! tables, what an MLflow server shows, reports.

pub use error::{Error, Result};
pub use provenance::{
    Capture, Commit, Difference, FolderDigest, HashedFile, HostFacts, MASK, Provenance,
    Reproduction, SourceState, diff, diff_with_git, digest_folder, mask_arguments,
};
pub use record::{ArtifactRole, EndStatus, Entry, Metrics, Number, PointValue, Record};
pub use run_id::RunId;
pub use sink::{Delivery, Origin, RunInfo, Sink, SinkPosition};

mod error;
mod provenance;
mod record;
mod run_id;
mod sink;
