//! Experiment tracking: what a training run was given, what it measured, what it made.
//!
//! A run is a folder with an append-only journal. Everything else is replayed from it: the files that TensorBoard
//! reads, tables, reports, and what an MLflow server or Kubeflow Trainer shows.

pub use artifact::{
    Artifact, ArtifactFile, ArtifactId, ArtifactReader, ArtifactReference, ArtifactStore,
    StoredArtifact,
};
pub use error::{Error, Result};
pub use history::{
    ArtifactUse, Hyperparameter, Media, MediaContent, Point, RunAttempt, RunEnd, RunHistory,
    RunStatus, Series, SystemPoint, WeightsDigest,
};
#[cfg(feature = "kubeflow")]
pub use kubeflow::KubeflowSink;
#[cfg(feature = "mlflow")]
pub use mlflow::{MlflowServer, MlflowSink};
pub use provenance::{
    Capture, Commit, FolderDigest, HashedFile, HostFacts, Provenance, digest_folder, mask_arguments,
};
pub use record::{ArtifactRole, EndStatus, Entry, Metrics, Number, PointValue, Record, RunId};
pub use report::Report;
pub use run::{Histogram, Run, RunBuilder, RunMark};
pub use runs::{RunSummary, Runs, SeriesSummary};
pub use sink::{CsvFile, Delivery, Origin, RunInfo, Sink, SinkPosition};
pub use system::SystemSampler;
pub use tensorboard::TensorBoard;
pub use upload::{UploadReport, upload};

// For accel-launch and the tuner, without a promise.
#[doc(hidden)]
pub use artifact::{PruneReport, Retention};
#[cfg(feature = "board")]
#[doc(hidden)]
pub use board::Board;
#[doc(hidden)]
pub use provenance::Reproduction;
#[doc(hidden)]
pub use provenance::diff::{Difference, diff};
#[doc(hidden)]
pub use report::{HtmlPage, downsample};
#[doc(hidden)]
pub use run::{deliver, export, record_failure};
#[doc(hidden)]
pub use runs::{Leftover, ListedRun};

mod artifact;
#[cfg(feature = "board")]
mod board;
mod error;
mod history;
mod journal;
#[cfg(feature = "kubeflow")]
mod kubeflow;
#[cfg(feature = "mlflow")]
mod mlflow;
mod provenance;
mod record;
mod report;
mod run;
mod run_files;
mod runs;
mod sink;
mod system;
mod tensorboard;
mod upload;
