use accelerator_host::{LAUNCH_ID, variable};
use accelerator_track::{Capture, Histogram, Run, RunMark, digest_folder};
use burn::module::Module;
use burn::tensor::DType;
use serde::Serialize;

use super::Accelerator;
use crate::core::error::{self, Result};
use crate::model;
use crate::reduce::AveragedGradients;
use crate::tracking::{RunEnding, untracked};

/// The run that a training is recorded as. Rank 0 writes it; every rank makes the same calls.
impl Accelerator {
    /// Begins a run in `runs/<name>`, with its hyperparameters: a struct or a map, which may be nested. Every rank
    /// must call it, next to [`prepare`](Self::prepare). In a job whose [number of ranks changes](Self::regroup),
    /// each group calls it again at its beginning.
    ///
    /// The run is a folder with a journal, where rank 0 sees it, and whatever
    /// [`log_with`](crate::AcceleratorBuilder::log_with) says; each rank whose host sees the folder adds what it uses of
    /// the system, every ten seconds. Without this call, [`log`](Self::log) does nothing, and nothing is written.
    ///
    /// It is one run through kills and restarts: a checkpoint knows its run, and [`resume`](Self::resume) continues
    /// with it, before or after this call, from where it was; a job that the launcher restarts without a checkpoint
    /// starts its run over. Elsewhere, a name that is there already gets a number. A second call ends the run before,
    /// unless it has that name.
    ///
    /// With the feature `kubeflow`, a run in a pod of a TrainJob tells Kubeflow Trainer how far it is, where the pod has
    /// `KUBEFLOW_TRAINER_SERVER_URL`.
    ///
    /// No failure of a disk or a server stops the training: it is said once. Where rank 0 cannot write the folder, all
    /// ranks train on without a run. What the program itself contradicts is an error: a name or hyperparameters that
    /// cannot be ones, a run that another process writes; in a job that was restarted or resumed, the former alone.
    ///
    /// ```
    /// use accelerator::prelude::*;
    /// use accelerator::track::RunHistory;
    /// # let runs = tempfile::tempdir().unwrap();
    /// # let runs = runs.path();
    ///
    /// #[derive(serde::Serialize)]
    /// struct Hyperparameters { lr: f64 }
    ///
    /// let accelerator = Accelerator::builder().runs_folder(runs).build()?;
    /// accelerator.init_trackers("mnist", &Hyperparameters { lr: 1e-3 })?;
    /// for step in 1..=3 {
    ///     accelerator.log("train", [("loss", 1.0 / step as f64)], step, None);
    /// }
    /// accelerator.finish()?;
    /// let run = RunHistory::read(runs.join("mnist")).unwrap();
    /// assert_eq!(run.series("train/loss").unwrap().points.len(), 3);
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The same on every rank: [`Error::is_misuse`](crate::Error::is_misuse) for a name that is empty, or hyperparameters
    /// that are no map of JSON; [`Error::is_io`](crate::Error::is_io) if another process writes the run at the start
    /// of a job; [`Error::is_collective`](crate::Error::is_collective) when a rank is lost.
    #[track_caller]
    pub fn init_trackers(&self, name: &str, hyperparameters: &impl Serialize) -> Result<()> {
        let (context, tracking) = (&self.shared.context, &self.shared.tracking);
        let begun = context.on_main("begin the run", || {
            let continues = self.restarts() > 0 || tracking.resumed().is_some();
            match tracking.begin(name, |mark| self.start_run(name, hyperparameters, mark)) {
                Ok(place) => Ok(place),
                Err(error) if error.is_io() || continues && !error.is_misuse() => {
                    untracked(&error);
                    Ok(None)
                }
                Err(error) => Err(error.into()),
            }
        })?;
        let group = self.group().for_purpose("begin the run");
        tracking.join(group.broadcast_object(begun.as_ref(), 0)?);
        Ok(())
    }

    /// Logs metrics of one kind (`train`, `test`) at a step: `[("loss", 0.5)]` of kind `train` goes to the series
    /// `train/loss`. The epoch may be a fraction, or `None`.
    ///
    /// Rank 0's values count; call it on every rank all the same, so that each knows the steps for an
    /// [emergency](Self::save_emergency). Nothing is communicated: what is to be said of all ranks is
    /// [reduced](Self::reduce_metric) before. It takes some microseconds; a thread writes. Without
    /// [`init_trackers`](Self::init_trackers) it does nothing, so a program needs no branch.
    pub fn log<'a>(
        &self,
        kind: &str,
        metrics: impl IntoIterator<Item = (&'a str, f64)>,
        step: u64,
        epoch: impl Into<Option<f64>>,
    ) {
        let values = metrics.into_iter();
        let values = values.map(|(name, value)| (name, value, None));
        self.shared.tracking.log(kind, values, step, epoch.into());
    }

    /// Logs means, each with the number of samples behind it, such as a [metric](crate::metric::Mean) over all ranks.
    ///
    /// ```
    /// use accelerator::metric::Mean;
    /// # let runs = tempfile::tempdir().unwrap();
    /// # let runs = runs.path();
    ///
    /// accelerator::Accelerator::builder().runs_folder(runs).launch(2, |accelerator| {
    ///     accelerator.init_trackers("mnist", &())?;
    ///     let mut loss = Mean::new();
    ///     // Three samples of rank 0, one of rank 1.
    ///     let (mean, samples) = [(1.0, 3), (5.0, 1)][accelerator.rank()];
    ///     loss.update(mean, samples);
    ///     let loss = accelerator.reduce_metric(loss)?;
    ///     accelerator.log_means("test", [("loss", loss.value(), loss.samples() as u64)], 1, None);
    ///     accelerator.finish()
    /// })?;
    /// let run = accelerator::track::RunHistory::read(runs.join("mnist")).unwrap();
    /// let point = run.series("test/loss").unwrap().points[0];
    /// assert_eq!((point.value, point.count), (2.0, Some(4)));
    /// # Ok::<(), accelerator::Error>(())
    /// ```
    pub fn log_means<'a>(
        &self,
        kind: &str,
        means: impl IntoIterator<Item = (&'a str, f64, u64)>,
        step: u64,
        epoch: impl Into<Option<f64>>,
    ) {
        let values = means.into_iter();
        let values = values.map(|(name, value, count)| (name, value, Some(count)));
        self.shared.tracking.log(kind, values, step, epoch.into());
    }

    /// Logs a histogram of each parameter of a model: `parameters/layer.weight`. Rank 0 alone reads its own, which are
    /// those of all ranks. It waits for the device and copies the model to memory: call it every some hundred steps.
    ///
    /// ```
    /// use accelerator::prelude::*;
    /// use burn::nn::{Linear, LinearConfig};
    /// # let runs = tempfile::tempdir().unwrap();
    /// # let runs = runs.path();
    ///
    /// let accelerator = Accelerator::builder().runs_folder(runs).build()?;
    /// accelerator.init_trackers("linear", &())?;
    /// let model: Linear = LinearConfig::new(2, 3).init(&accelerator.device());
    /// accelerator.log_histograms(&model, 1);
    /// accelerator.finish()?;
    /// let run = accelerator::track::RunHistory::read(runs.join("linear")).unwrap();
    /// let keys: Vec<_> = run.media.iter().map(|medium| medium.key.as_str()).collect();
    /// assert_eq!(keys, ["parameters/weight", "parameters/bias"]);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn log_histograms<M: Module + 'static>(&self, model: &M, step: u64) {
        self.shared.tracking.note(step);
        self.tracker(|run| {
            for (path, values) in model::float_values(model) {
                run.log_histogram(&format!("parameters/{path}"), &histogram(&values), step);
            }
        });
    }

    /// Logs a histogram of each gradient as the optimizer gets it, averaged over all ranks and clipped if that was asked
    /// for: `gradients/layer.weight`. Call it on every rank, before the optimizer's step. Rank 0 alone reads; nothing
    /// is communicated. It waits for the device and copies the gradients to memory: call it every some hundred steps.
    ///
    /// It does nothing while a window is open, and where the step is skipped. Of
    /// [local training](crate::local) the gradients are those of rank 0. With a [`Sharded`](crate::optim::Sharded)
    /// optimizer, whose ranks have a part of the gradient each, nothing is logged from the second window on, and a
    /// warning says so once.
    pub fn log_gradient_histograms(&self, gradients: &AveragedGradients, step: u64) {
        self.shared.tracking.note(step);
        self.tracker(|run| {
            let mut histograms = Vec::new();
            gradients.read_each(|path, data| {
                let values = data.convert_dtype(DType::F32);
                // It is of that type now.
                let values = values.try_to_vec().unwrap_or_default();
                histograms.push((format!("gradients/{path}"), histogram(&values)));
            });
            // Buckets have them in the order in which backward got to them.
            histograms.sort_by(|a, b| a.0.cmp(&b.0));
            for (key, histogram) in histograms {
                run.log_histogram(&key, &histogram, step);
            }
        });
    }

    /// Calls `work` with the run that is being written, to add tags, texts, images or artifacts. Returns `None`
    /// without calling it on ranks that do not write, and if no run was begun.
    ///
    /// ```
    /// # let runs = tempfile::tempdir().unwrap();
    /// # let runs = runs.path();
    /// accelerator::Accelerator::builder().runs_folder(runs).launch(2, |accelerator| {
    ///     accelerator.init_trackers("mnist", &())?;
    ///     let folder = accelerator.tracker(|run| {
    ///         run.set_tag("data", "digits");
    ///         run.folder().to_owned()
    ///     });
    ///     assert_eq!(folder.is_some(), accelerator.is_main_process());
    ///     accelerator.finish()
    /// })?;
    /// # Ok::<(), accelerator::Error>(())
    /// ```
    pub fn tracker<T>(&self, work: impl FnOnce(&Run) -> T) -> Option<T> {
        self.shared.tracking.with(work)
    }

    /// Ends the run as finished. What is left is written and delivered, for at most half a minute per
    /// [tracker](crate::Tracker). [`finish`](Self::finish) does this, too, and a job that fails or is preempted ends
    /// its run as such. Call this in a program that has several runs, one after the other. Nothing is communicated.
    ///
    /// ```
    /// # let runs = tempfile::tempdir().unwrap();
    /// # let runs = runs.path();
    /// let accelerator = accelerator::Accelerator::builder().runs_folder(runs).build()?;
    /// for fold in 0..3 {
    ///     accelerator.init_trackers(&format!("fold-{fold}"), &())?;
    ///     accelerator.log("test", [("accuracy", 0.9)], 1, None);
    ///     accelerator.end_training();
    /// }
    /// assert_eq!(std::fs::read_dir(runs)?.count(), 3);
    /// # accelerator.finish()?;
    /// # Ok::<(), accelerator::Error>(())
    /// ```
    pub fn end_training(&self) {
        self.shared.tracking.end(RunEnding::Finished, None);
    }

    /// Runs a program that gets its accelerator, and ends its run as failed where the program fails.
    pub(super) fn run<T>(self, program: impl FnOnce(Self) -> Result<T>) -> Result<T> {
        // Where the program drops it first, the run ends without the error.
        let kept = self.clone();
        program(self).inspect_err(|error| {
            let failure = format!("{error:?}");
            kept.shared
                .tracking
                .end(RunEnding::Finished, Some(&failure));
        })
    }

    fn start_run(
        &self,
        name: &str,
        hyperparameters: &impl Serialize,
        mark: Option<RunMark>,
    ) -> accelerator_track::Result<Run> {
        let settings = &self.shared.tracker_settings;
        let mut run = Run::builder(name)
            .world(self.world_size())
            .hyperparameters(hyperparameters)?
            .capture(self.capture());
        if let Some(folder) = &settings.runs_folder {
            run = run.runs_folder(folder);
        }
        // Ranks that are threads are started by the program, which the launcher may have started for something else.
        if let Some(launch) = variable(LAUNCH_ID.name) {
            run = run.launch(launch.to_string_lossy());
        }
        if let Some(mark) = mark {
            run = run.resume(&mark);
        }
        if self.group().continues_on_loss() {
            run = run.prompt();
        }
        for tracker in &settings.trackers {
            run = tracker.attach(run)?;
        }
        #[cfg(feature = "kubeflow")]
        match accelerator_track::KubeflowSink::from_env() {
            Ok(Some(sink)) => run = run.sink(sink),
            Ok(None) => {}
            Err(error) => error::warn(&format!("Kubeflow Trainer is not told of the run: {error}")),
        }
        run.start()
    }

    /// Captures the properties that only the program itself knows.
    fn capture(&self) -> Capture {
        let features = [
            ("autotune", cfg!(feature = "autotune")),
            ("cuda", cfg!(feature = "cuda")),
            ("faults", cfg!(feature = "faults")),
            ("flex", cfg!(feature = "flex")),
            ("fusion", cfg!(feature = "fusion")),
            ("ndarray", cfg!(feature = "ndarray")),
            ("wgpu", cfg!(feature = "wgpu")),
        ];
        let features = features.into_iter().filter(|(_, is_on)| *is_on);
        let folders = &self.shared.tracker_settings.data_folders;
        let capture = folders.iter().fold(Capture::new(), |capture, folder| {
            match digest_folder(folder) {
                Ok(digest) => capture.data(folder.to_string_lossy(), digest),
                Err(error) => {
                    error::warn(&format!("the run does not know its data: {error}"));
                    capture
                }
            }
        });
        capture
            .features(features.map(|(name, _)| name))
            .devices([self.backend_kind().to_string()])
            .seed("accelerator", self.shared.context.seed)
            .plan(serde_json::json!({
                "accumulation_steps": self.accumulation_steps(),
                "precision": self.precision().to_string(),
                "topology": self.topology().to_string(),
                "transport": self.group().transport().to_string(),
            }))
            .world(self.world_size())
    }
}

fn histogram(values: &[f32]) -> Histogram {
    Histogram::of(values.iter().map(|&value| f64::from(value)), HISTOGRAM_BINS)
}

/// The number of bins, as TensorBoard shows them.
const HISTOGRAM_BINS: usize = 30;
