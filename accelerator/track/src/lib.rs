//! Experiment tracking: what a training run was given, what it measured, what it made.
//!
//! A run is a folder with an append-only journal. Everything else is replayed from it: the files that TensorBoard
//! reads, tables, reports, and what an MLflow server or Kubeflow Trainer shows.

pub use artifact::{
    Artifact, ArtifactFile, ArtifactId, ArtifactReference, ArtifactStore, StoredArtifact,
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
pub use provenance::{Capture, FolderDigest, digest_folder};
pub use record::{ArtifactRole, EndStatus, Entry, Metrics, Number, PointValue, Record, RunId};
pub use report::Report;
pub use run::{Histogram, Run, RunBuilder, RunMark};
pub use runs::{RunSummary, Runs, SeriesSummary};
pub use sink::{CsvFile, Delivery, Origin, RunInfo, Sink, SinkPosition};
pub use tensorboard::TensorBoard;
pub use upload::{UploadReport, upload};

/// Items for the launcher and the other crates of this project. They are not part of the public API.
#[doc(hidden)]
pub mod internal {
    pub use crate::artifact::PruneReport;
    #[cfg(feature = "board")]
    pub use crate::board::Board;
    pub use crate::provenance::diff::{Difference, diff};
    pub use crate::provenance::{
        Commit, HashedFile, HostFacts, Provenance, Reproduction, mask_arguments,
    };
    pub use crate::report::{HtmlPage, downsample};
    pub use crate::run::{deliver, export, record_failure};
    pub use crate::runs::ListedRun;
    pub use crate::runs::leftovers::{
        Leftover, leftovers, remove_artifacts, remove_leftovers, remove_unfinished, unfinished,
        unneeded_artifacts,
    };
    pub use crate::system::SystemSampler;
}

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
#[cfg(test)]
mod tests;
mod upload;
