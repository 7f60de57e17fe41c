use core::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use accelerator_track::{CsvFile, RunBuilder, Sink, TensorBoard};

/// A destination of a run beside its journal; for
/// [`AcceleratorBuilder::log_with`](crate::AcceleratorBuilder::log_with).
#[derive(Clone)]
#[non_exhaustive]
pub enum Tracker {
    /// A table of the metrics, `metrics.csv` in the folder of the run.
    Csv,
    /// Event files of TensorBoard, in `tensorboard` in the folder of the run: `tensorboard --logdir runs` shows all runs.
    TensorBoard,
    /// Event files of TensorBoard below that folder, in one with the name of the run's folder: `tensorboard --logdir logs`
    /// shows all runs that are recorded there.
    TensorBoardIn(PathBuf),
    /// The MLflow server that MLflow's own variables name: `MLFLOW_TRACKING_URI`, with `MLFLOW_EXPERIMENT_NAME` or
    /// `MLFLOW_EXPERIMENT_ID`. With the feature `mlflow`; another server is a [`Tracker::sink`].
    #[cfg(feature = "mlflow")]
    Mlflow,
    /// Another sink, made anew for each run; see [`Tracker::sink`].
    Sink(Arc<dyn Fn() -> Box<dyn Sink> + Send + Sync>),
}

impl Tracker {
    /// A sink of the program's own, or one with settings: what makes it, on rank 0.
    pub fn sink<S: Sink + 'static>(make: impl Fn() -> S + Send + Sync + 'static) -> Self {
        Self::Sink(Arc::new(move || Box::new(make())))
    }

    /// Delivers a run to it.
    ///
    /// # Errors
    ///
    /// Fails if variables that it needs are not set.
    pub(crate) fn attach(&self, run: RunBuilder) -> accelerator_track::Result<RunBuilder> {
        Ok(match self {
            Self::Csv => run.sink(CsvFile::in_run()),
            Self::TensorBoard => run.sink(TensorBoard::in_run()),
            Self::TensorBoardIn(folder) => run.sink(TensorBoard::below(folder)),
            #[cfg(feature = "mlflow")]
            Self::Mlflow => run.sink(accelerator_track::MlflowSink::from_env()?),
            Self::Sink(make) => run.sink(make()),
        })
    }
}

impl fmt::Debug for Tracker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Csv => f.write_str("Csv"),
            Self::TensorBoard => f.write_str("TensorBoard"),
            Self::TensorBoardIn(folder) => f.debug_tuple("TensorBoardIn").field(folder).finish(),
            #[cfg(feature = "mlflow")]
            Self::Mlflow => f.write_str("Mlflow"),
            Self::Sink(_) => f.debug_tuple("Sink").finish_non_exhaustive(),
        }
    }
}
