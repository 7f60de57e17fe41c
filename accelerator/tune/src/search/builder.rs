//! A search, from code.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use super::run::{RunOptions, folder_of, run};
use super::spec::{MaxFailures, SearchAlgorithm, SearchSpec};
use crate::config::Config;
use crate::core::{CheckpointSettings, SearchOrder};
use crate::error::Result;
use crate::host::Hosts;
use crate::objective::Objective;
use crate::output::{Display, Results};
use crate::pool::{Pool, WorkerReuse};
use crate::program::{OtherObjects, Programs, Template};
use crate::runner::TrialRunner;
use crate::scheduler::Scheduler;
use crate::searcher::Searcher;
use crate::slots::Resources;
use crate::space::Space;
use crate::stop::Stop;
use crate::trial::{BoxError, Trainable, TrialSession, serve_function, serve_trainable};

/// A search over configurations: Ray's `tune.run`.
///
/// Trials are processes of this program. It is started again for each, with the same arguments, and comes to
/// [`run`](Self::run) again, where it carries trials out and exits. What stands before that call runs in each of them.
///
/// A search is resumed by running it again: its folder has a journal, and what was decided stays decided. After
/// `kill -9`, or a machine's loss, trials continue from their newest checkpoints.
///
/// ```no_run
/// use accelerator_tune::{Asha, Mode, Objective, Search, Space, Stop, loguniform, uniform};
///
/// fn main() -> Result<(), Box<dyn std::error::Error>> {
///     let space = Space::new([("lr", loguniform(1e-4, 1e-1)), ("momentum", uniform(0.1, 0.9))]);
///     let results = Search::new("line", Objective::new("loss", Mode::Min))
///         .space(space)
///         .num_samples(16)
///         .scheduler(Asha::default())
///         .stop(Stop::new().iterations(50))
///         .run_fn(|trial, config| {
///             let (lr, momentum): (f64, f64) = (config.parse("lr")?, config.parse("momentum")?);
///             let (mut x, mut speed) = (5.0, 0.0);
///             loop {
///                 speed = momentum * speed - lr * 2.0 * x;
///                 x += speed;
///                 trial.report([("loss", x * x)])?;
///             }
///         })?;
///     println!("Best config is: {:?}", results.best_config("loss", Mode::Min));
///     Ok(())
/// }
/// ```
pub struct Search {
    spec: SearchSpec,
    searcher: Option<Box<dyn Searcher>>,
    folder: Option<PathBuf>,
    options: RunOptions,
}

impl std::fmt::Debug for Search {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Search")
            .field("spec", &self.spec)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

impl Search {
    /// Creates a search of that name, which begins the names of its trials.
    #[must_use]
    pub fn new(name: impl Into<String>, objective: Objective) -> Self {
        Self::from(SearchSpec::new(name, objective))
    }

    /// Sets the space from which configurations are drawn.
    #[must_use]
    pub fn space(mut self, space: Space) -> Self {
        self.spec.space = space;
        self
    }

    /// Sets how many configurations are drawn; with grids, how often each of their points is tried. The default is 1.
    #[must_use]
    pub fn num_samples(mut self, samples: u32) -> Self {
        self.spec.num_samples = samples;
        self
    }

    /// Sets the seed from which all randomness follows. The default is 0.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.spec.seed = seed;
        self
    }

    /// Sets points of the space to try first. Each replaces a sample, and all are tried. Parameters that a point does
    /// not set are drawn, and tried at each option of a grid. An unknown parameter, or a value that the parameter never
    /// has, is an error.
    #[must_use]
    pub fn points_to_evaluate(mut self, points: impl IntoIterator<Item = Config>) -> Self {
        self.spec.points_to_evaluate = points.into_iter().collect();
        self
    }

    /// Sets the algorithm that suggests configurations. The default draws at random and tries all points of grids.
    #[must_use]
    pub fn search_alg(mut self, algorithm: impl Into<SearchAlgorithm>) -> Self {
        self.spec.search_alg = algorithm.into();
        self.searcher = None;
        self
    }

    /// A searcher of one's own suggests configurations, [`num_samples`](Self::num_samples) at most.
    #[must_use]
    pub fn searcher(mut self, searcher: impl Searcher + 'static) -> Self {
        self.spec.search_alg = SearchAlgorithm::Custom {
            searcher: searcher.config(),
        };
        self.searcher = Some(Box::new(searcher));
        self
    }

    /// Sets the scheduler that ends trials early. The default ends none.
    #[must_use]
    pub fn scheduler(mut self, scheduler: impl Into<Scheduler>) -> Self {
        self.spec.scheduler = scheduler.into();
        self
    }

    /// Sets the rules that end a trial. By default, each ends by itself.
    #[must_use]
    pub fn stop(mut self, stop: Stop) -> Self {
        self.spec.stop = stop;
        self
    }

    /// Sets the order in which reports are decided about.
    #[must_use]
    pub fn order(mut self, order: SearchOrder) -> Self {
        self.spec.order = order;
        self
    }

    /// Sets how often a failed trial is repeated. The default is never.
    #[must_use]
    pub fn max_failures(mut self, most: MaxFailures) -> Self {
        self.spec.max_failures = most;
        self
    }

    /// Configurations that are equal in their first iterations train those once. Values differ by iteration where they
    /// are written as `{"schedule": [[0, 0.1], [10, 0.01]]}`: 0.1 in the first ten iterations, then 0.01.
    #[must_use]
    pub fn share_prefixes(mut self) -> Self {
        self.spec.share_prefixes = true;
        self
    }

    /// Lets trials report without a metric that the scheduler or a stop rule looks at, as one that they measure later: Ray's
    /// `TUNE_DISABLE_STRICT_METRIC_CHECKING`.
    #[must_use]
    pub fn disable_strict_metric_checking(mut self) -> Self {
        self.spec.disable_strict_metric_checking = true;
        self
    }

    /// Sets when trials save, and which checkpoints are kept.
    #[must_use]
    pub fn checkpoints(mut self, settings: CheckpointSettings) -> Self {
        self.spec.checkpoints = settings;
        self
    }

    /// Sets the resources of each trial. The default is one core.
    #[must_use]
    pub fn resources_per_trial(mut self, resources: Resources) -> Self {
        self.spec.resources_per_trial = resources;
        self
    }

    /// Sets if a process runs several trials, one after the other.
    #[must_use]
    pub fn reuse_workers(mut self, reuse: WorkerReuse) -> Self {
        self.spec.reuse_workers = reuse;
        self
    }

    /// Sets how many trials run at the same time. The default is as many as fit the hosts.
    #[must_use]
    pub fn slots(mut self, slots: usize) -> Self {
        self.spec.slots = Some(slots);
        self
    }

    /// Sets the time after which the search pauses. Running it again resumes it.
    #[must_use]
    pub fn time_budget(mut self, budget: Duration) -> Self {
        self.spec.time_budget_s = Some(budget.as_secs_f64());
        self
    }

    /// Sets the time that a trial may take for an iteration, and its process to start. A slower one has failed.
    #[must_use]
    pub fn report_timeout(mut self, timeout: Duration) -> Self {
        self.spec.report_timeout_s = Some(timeout.as_secs_f64());
        self
    }

    /// Sets the folder for its files. The default is `tune/NAME`.
    #[must_use]
    pub fn folder(mut self, folder: impl Into<PathBuf>) -> Self {
        self.folder = Some(folder.into());
        self
    }

    /// Sets the output that is printed while it runs.
    #[must_use]
    pub fn display(mut self, display: Display) -> Self {
        self.options.display = display;
        self
    }

    /// Runs trials of a class until all have ended.
    ///
    /// # Errors
    ///
    /// [`Error::is_misuse`](crate::Error::is_misuse) for settings that cannot be;
    /// [`Error::is_conflict`](crate::Error::is_conflict) where the folder has another search, or another process carries
    /// it out; [`Error::is_io`](crate::Error::is_io) where files cannot be written or no process started. That trials
    /// fail is no error: see [`Results`].
    pub fn run<T: Trainable + 'static>(self) -> Result<Results> {
        serve_trainable::<T>();
        self.run_in_processes()
    }

    /// Runs trials of a function until all have ended. It reports after each iteration.
    ///
    /// # Errors
    ///
    /// See [`run`](Self::run).
    pub fn run_fn(
        self,
        function: impl FnMut(&mut TrialSession, &Config) -> Result<(), BoxError> + 'static,
    ) -> Result<Results> {
        serve_function(function);
        self.run_in_processes()
    }

    /// Runs a program for each trial, until all have ended: any program that prints its metrics as JSON lines.
    ///
    /// In `command`, `{lr}` stands for the parameter of that path, `{trial}` for the trial's number, `{folder}` for its folder,
    /// `{params}` for a JSON file with all parameters and `{metrics}` for a file of metrics. A line that the program prints, or
    /// writes to that file, is a report where it is a JSON object with the search's metric. It may have a `checkpoint`, the path
    /// of what the program has saved below `{folder}`, under a new name each time; the search moves that, and a trial that continues
    ///  from it finds it as `{checkpoint}`. If a trial has several processes, only rank 0 reports. An object with numbers
    /// and without the metric, before the first report of the search, is an error.
    ///
    /// # Errors
    ///
    /// See [`run`](Self::run).
    pub fn run_programs<W: Into<String>>(
        mut self,
        command: impl IntoIterator<Item = W>,
    ) -> Result<Results> {
        let command: Vec<String> = command.into_iter().map(Into::into).collect();
        let template = Template::new(command.clone(), &self.spec.space)?;
        if !matches!(self.spec.search_alg, SearchAlgorithm::Custom { .. }) {
            template.check_parameters()?;
        }
        self.spec.program = command;
        self.run_on(|hosts, spec, _folder| {
            let programs = Programs::new(
                hosts,
                template,
                &spec.metric,
                match spec.disable_strict_metric_checking {
                    true => OtherObjects::Ignored,
                    false => OtherObjects::Refused,
                },
                &spec.resources_per_trial,
                spec.slots,
            )?;
            Ok(Box::new(programs))
        })
    }

    /// Lets each trial write what [TensorBoard](accelerator_track::TensorBoard) shows, below a folder: metrics as scalars, and
    /// a row of the HParams table.
    #[must_use]
    pub fn tensorboard(mut self, folder: impl Into<PathBuf>) -> Self {
        self.spec.tensorboard = Some(folder.into());
        self
    }

    /// Counts requests to end, as signals do otherwise: at the first one trials save at their next report, and the search
    /// pauses; at the second it ends at once.
    #[must_use]
    pub fn interrupted_by(mut self, requests: Arc<AtomicU32>) -> Self {
        self.options.interrupts = Some(requests);
        self
    }

    fn run_in_processes(self) -> Result<Results> {
        self.run_on(|hosts, spec, folder| {
            let pool = Pool::new(
                hosts,
                &spec.resources_per_trial,
                spec.slots,
                spec.reuse_workers,
                folder,
            )?;
            Ok(Box::new(pool))
        })
    }

    fn run_on(
        self,
        runner: impl FnOnce(Hosts, &SearchSpec, &Path) -> Result<Box<dyn TrialRunner>>,
    ) -> Result<Results> {
        let folder = match self.folder {
            Some(folder) => folder,
            None => Path::new("tune").join(folder_of(&self.spec.name)?),
        };
        // In the other processes of the search's job it does not return.
        let hosts = Hosts::join(&folder)?;
        let runner = |spec: &SearchSpec, folder: &Path| runner(hosts, spec, folder);
        run(self.spec, self.searcher, folder, self.options, runner)
    }
}

/// Creates the search that a file describes.
impl From<SearchSpec> for Search {
    fn from(spec: SearchSpec) -> Self {
        Self {
            spec,
            searcher: None,
            folder: None,
            options: RunOptions::default(),
        }
    }
}
