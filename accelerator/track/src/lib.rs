//! Experiment tracking: what a training run was given, what it measured, what it made.
//!
//! A run is a folder with an append-only journal. Everything else is replayed from it: the files that TensorBoard reads,
//! tables, what an MLflow server or a Kubeflow Trainer shows, reports.

pub use artifact::{
    Artifact, ArtifactFile, ArtifactId, ArtifactReader, ArtifactReference, ArtifactStore,
    PruneReport, Retention, StoredArtifact,
};
#[cfg(feature = "board")]
pub use board::Board;
pub use error::{Error, Result};
pub use history::{
    ArtifactUse, HistoryReader, Hyperparameter, Media, MediaContent, Point, RunAttempt, RunEnd,
    RunHistory, RunStatus, Series, SystemPoint, WeightsDigest,
};
#[cfg(feature = "kubeflow")]
pub use kubeflow::KubeflowSink;
#[cfg(feature = "mlflow")]
pub use mlflow::{MlflowRun, MlflowServer, MlflowSink, SentFile};
pub use provenance::{
    Capture, Commit, Difference, FolderDigest, HashedFile, HostFacts, MASK, Provenance,
    Reproduction, diff, digest_folder, mask_arguments,
};
pub use record::{ArtifactRole, EndStatus, Entry, Metrics, Number, PointValue, Record};
pub use report::{HtmlPage, Report, downsample};
pub use run::{Histogram, Run, RunBuilder, RunMark, deliver, export, record_failure};
pub use run_id::RunId;
pub use runs::{Leftover, ListedRun, RunSummary, Runs, SeriesSummary};
pub use sink::csv::CsvFile;
pub use sink::{Delivery, Origin, RunInfo, Sink, SinkPosition};
pub use system::SystemSampler;
pub use tensorboard::TensorBoard;
pub use upload::{UploadReport, upload};

mod artifact;
mod blob;
#[cfg(feature = "board")]
mod board;
mod error;
mod folder_name;
mod history;
#[cfg(any(feature = "kubeflow", feature = "mlflow"))]
mod http;
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
mod run_id;
mod runs;
mod sink;
mod system;
mod tensorboard;
mod upload;
mod warning;
