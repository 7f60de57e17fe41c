//! A search from its folder to its results.

use std::hash::BuildHasher;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime};
use std::{env, fs};

use accelerator_host::machine::unix_time;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::{Handle, Signals};

use super::driver::{Driver, Limits};
use super::files::TrialFiles;
use super::lock::SearchLock;
use super::replay::{DecisionLog, replay};
use super::spec::{SearchAlgorithm, SearchSpec};
use crate::config::TrialId;
use crate::core::{CheckpointKey, Core, Event, Rules, SearchOrder, TrialState};
use crate::error::{Error, Result};
use crate::journal::{self, Asking, Head, Journal, VERSION};
use crate::output::{Console, Display, Results};
use crate::runner::{Location, TrialRunner};
use crate::searcher::{Searcher, VariantGenerator};
use crate::view::{SearchEnd, SearchView, Trial};

#[derive(Clone, Debug, Default)]
pub(crate) struct RunOptions {
    pub(crate) display: Display,
    /// Counts requests to end; if it is absent, signals are counted instead.
    pub(crate) interrupts: Option<Arc<AtomicU32>>,
}

/// Begins a search or resumes it, and waits until it ends.
pub(crate) fn run(
    spec: SearchSpec,
    searcher: Option<Box<dyn Searcher>>,
    folder: PathBuf,
    options: RunOptions,
    runner: impl FnOnce(&SearchSpec, &Path) -> Result<Box<dyn TrialRunner>>,
) -> Result<Results> {
    let (mut searcher, asks, expected) = set_up(&spec, searcher)?;
    let mut core = new_core(&spec, asks)?;
    let limits = limits(&spec)?;
    fs::create_dir_all(&folder).map_err(|error| Error::io("make", &folder, error))?;
    let _lock = SearchLock::acquire(&folder)?;
    let ended = journal::written(&folder);
    let (head, journal, events) = open_journal(&spec, &*searcher, asks, &folder)?;
    let replayed = replay(&mut core, &mut *searcher, head.searcher.as_deref(), events)?;
    let was_finished = core.is_finished();
    let decisions = DecisionLog::open(&folder, &replayed.decisions)?;
    let mut files = TrialFiles::new(
        &folder,
        &spec.name,
        &head.id,
        spec.space.parameters(),
        replayed.results,
        spec.tensorboard.clone(),
    );
    files.restore(core.trials())?;
    files.remove_partial_checkpoints(core.trials());
    let mut console = Console::new(options.display);
    let shown = |core: &Core,
                 files: &TrialFiles,
                 requested: Option<String>,
                 at: &dyn Fn(TrialId) -> Option<Location>| {
        view(&spec, &folder, core, files, expected, requested, at)
    };
    if was_finished {
        let view = shown(&core, &files, None, &|_| None);
        console.finish(&view);
        console.note(&format!(
            "This search ended at {}, so nothing was run: for another search, choose another folder (`--folder`), or remove {}.",
            humantime::format_rfc3339_seconds(ended.unwrap_or(SystemTime::UNIX_EPOCH)),
            folder.display()
        ));
        let results = Results::new(view, SearchEnd::Finished);
        // The search may have been killed before it wrote them.
        let is_missing = |name: &&str| !folder.join(name).exists();
        if [RESULTS, REPORT].iter().any(is_missing) {
            write(&results, &folder)?;
        }
        return Ok(results);
    }
    let counts_signals = options.interrupts.is_none();
    let interrupts = options.interrupts.unwrap_or_default();
    let _signals = match counts_signals {
        true => Some(CountedSignals::count_by(Arc::clone(&interrupts))?),
        false => None,
    };
    let mut runner = runner(&spec, &folder)?;
    if let SearchOrder::Ordered { workers } = spec.order
        && workers > runner.slots()
        && !runner.takes_turns()
    {
        return Err(Error::misuse(format!(
            "`order.ordered.workers` is {workers}, but there are only {} slots: programs do not wait for one another, so each of \
             the workers needs a slot; see `slots`",
            runner.slots()
        )));
    }
    let (view, ending) = {
        let mut driver = Driver {
            core,
            journal,
            decisions,
            runner: &mut *runner,
            searcher: &mut *searcher,
            files: &mut files,
            checkpoints: spec.checkpoints.clone(),
            limits,
            attempts: Default::default(),
            blocked: Default::default(),
            backoff: Default::default(),
            closing: None,
        };
        let mut refresh = |driver: &Driver<'_>| {
            if !console.is_due() {
                return Ok(());
            }
            let at = |trial| driver.location(trial);
            let requested = driver.runner.requested();
            console.show(&shown(&driver.core, driver.files, requested, &at));
            Ok(())
        };
        let ending = driver.run(&|| interrupts.load(Ordering::Relaxed), &mut refresh);
        driver.runner.close();
        driver
            .files
            .remove_partial_checkpoints(driver.core.trials());
        let ending = ending?;
        (shown(&driver.core, driver.files, None, &|_| None), ending)
    };
    console.finish(&view);
    let results = Results::new(view, ending);
    write(&results, &folder)?;
    Ok(results)
}

/// Writes the results into the folder of the search.
fn write(results: &Results, folder: &Path) -> Result<()> {
    results.dataframe().to_csv(folder.join(RESULTS))?;
    results.write_report(folder.join(REPORT))
}

const RESULTS: &str = "results.csv";
const REPORT: &str = "report.html";

/// The folder of a search, relative to the folder of all searches.
pub(super) fn folder_of(name: &str) -> Result<&str> {
    let mut parts = Path::new(name).components();
    match (parts.next(), parts.next()) {
        (Some(Component::Normal(part)), None) if part == name => Ok(name),
        _ => Err(Error::misuse(format!(
            "the search's `name` is {name:?}; it names a folder in `tune`, so it must not be empty or contain `/`; or choose a folder"
        ))),
    }
}

fn set_up(
    spec: &SearchSpec,
    searcher: Option<Box<dyn Searcher>>,
) -> Result<(Box<dyn Searcher>, Asking, Option<usize>)> {
    spec.space.check()?;
    spec.stop.check()?;
    if spec.num_samples == 0 {
        return Err(Error::misuse("`num_samples` is 0; it is at least 1"));
    }
    if !spec.points_to_evaluate.is_empty() && !matches!(spec.search_alg, SearchAlgorithm::Variants)
    {
        return Err(Error::misuse(
            "`points_to_evaluate` works only with the search algorithm `variants`; leave it out for others",
        ));
    }
    // The suggestions of a user's searcher cannot be known in advance.
    if !matches!(spec.search_alg, SearchAlgorithm::Custom { .. }) {
        spec.scheduler.check_parameters(&spec.space.keys())?;
    }
    let (searcher, expected): (Box<dyn Searcher>, _) = match (searcher, &spec.search_alg) {
        (Some(searcher), _) => (searcher, Some(spec.num_samples as usize)),
        (None, SearchAlgorithm::Custom { searcher }) => {
            return Err(Error::misuse(format!(
                "`search_alg` is {searcher}, which came from the program that began the search: start that program again, or \
                 pass it by `Search::searcher`"
            )));
        }
        (None, SearchAlgorithm::Variants) => {
            let variants = VariantGenerator::new(&spec.space, spec.num_samples, spec.seed)?
                .with_points(&spec.points_to_evaluate)?;
            let expected = variants.len();
            (Box::new(variants), Some(expected))
        }
        (None, SearchAlgorithm::Optuna(optuna)) => {
            let optuna = optuna.start(&spec.space, &spec.objective(), spec.seed)?;
            (Box::new(optuna), Some(spec.num_samples as usize))
        }
    };
    let asking = match searcher.is_adaptive() {
        true => Asking::InTime,
        false => Asking::Ahead,
    };
    Ok((searcher, asking, expected))
}

/// Opens the journal of a search, or creates a new one if there is none; returns its head, the journal and its events.
fn open_journal(
    spec: &SearchSpec,
    searcher: &dyn Searcher,
    asks: Asking,
    folder: &Path,
) -> Result<(Head, Journal, Vec<Event>)> {
    let (id, created) = match journal::read(folder)? {
        Some(before) if before.has_results() => {
            spec.check_same(&before.head.spec, folder)?;
            let journal = Journal::reopen(folder, &before)?;
            return Ok((before.head, journal, before.events));
        }
        // The earlier command could not start and was then corrected, so nothing is lost.
        Some(before) => (before.head.id, before.head.created),
        None => (new_id(), unix_time().as_secs()),
    };
    let head = Head {
        version: VERSION,
        id,
        created,
        asks,
        searcher: searcher.version(),
        directory: env::current_dir().ok(),
        spec: spec.to_json()?,
    };
    let journal = Journal::create(folder, &head)?;
    Ok((head, journal, Vec::new()))
}

pub(super) fn new_core(spec: &SearchSpec, asks: Asking) -> Result<Core> {
    let objective = spec.objective();
    let scheduler = spec.scheduler.build(&objective, spec.seed)?;
    let (lookahead, max_trials) = match asks {
        // Ask for all trials, so that the points where they diverge are known.
        Asking::Ahead if spec.share_prefixes => (usize::MAX, None),
        Asking::Ahead => (LOOKAHEAD, None),
        Asking::InTime => (0, Some(spec.num_samples)),
    };
    if spec.order == (SearchOrder::Ordered { workers: 0 }) {
        return Err(Error::misuse(
            "`order.ordered.workers` is 0; it is at least 1",
        ));
    }
    let rules = Rules {
        scheduler_metric: spec.scheduler.metric(&objective).to_owned(),
        scheduler_time: spec.scheduler.time_attr().to_owned(),
        objective,
        stop: spec.stop.clone(),
        order: spec.order,
        max_failures: spec.max_failures.most(),
        checkpoint_frequency: spec.checkpoints.frequency.filter(|every| *every > 0),
        checkpoint_at_end: spec.checkpoints.at_end,
        max_trials,
        lookahead,
        shares_prefixes: spec.share_prefixes,
        are_metrics_strict: !spec.disable_strict_metric_checking,
    };
    Ok(Core::new(rules, scheduler))
}

fn limits(spec: &SearchSpec) -> Result<Limits> {
    let duration = |name: &str, seconds: Option<f64>| {
        let seconds = seconds.map(|seconds| {
            Duration::try_from_secs_f64(seconds)
                .map_err(|error| Error::misuse(format!("`{name}` is {seconds}: {error}")))
        });
        seconds.transpose()
    };
    let budget = duration("time_budget_s", spec.time_budget_s)?;
    Ok(Limits {
        // A budget too long to add to the clock is no limit.
        deadline: budget.and_then(|budget| Instant::now().checked_add(budget)),
        report_timeout: duration("report_timeout_s", spec.report_timeout_s)?,
    })
}

pub(super) fn view(
    spec: &SearchSpec,
    folder: &Path,
    core: &Core,
    files: &TrialFiles,
    expected: Option<usize>,
    resources: Option<String>,
    location: &dyn Fn(TrialId) -> Option<Location>,
) -> SearchView {
    let trial = |state: &TrialState| {
        let folder = files.path(state);
        let of_trial = |key: &&CheckpointKey| key.branch.trial == state.id;
        let newest = core.checkpoints().keys().rev().find(of_trial);
        let saved = |key: CheckpointKey| folder.join(key.folder_name());
        let best_saved = state.best_saved.as_ref();
        Trial {
            id: state.id,
            name: files.name(state.id),
            status: state.status,
            location: location(state.id),
            config: state.config().clone(),
            last: state.last.clone(),
            best: state.best.clone(),
            best_config: state.config_of(state.best_branch).clone(),
            failures: state.failures,
            error: state.error.clone(),
            checkpoint: newest.map(|key| saved(*key)),
            best_checkpoint: best_saved.map(|(key, result)| (saved(*key), result.clone())),
            folder,
        }
    };
    SearchView {
        name: spec.name.clone(),
        runs_programs: !spec.program.is_empty(),
        folder: folder.to_owned(),
        objective: spec.objective(),
        parameters: spec.space.parameters(),
        scheduler: core.scheduler().status(),
        rungs: core.scheduler().rungs(),
        trials: core.trials().iter().map(trial).collect(),
        expected: core.expected().or(expected),
        resources,
    }
}

/// The number of trials that a searcher that ignores results creates ahead of time; the same as in Ray.
const LOOKAHEAD: usize = 200;

fn new_id() -> String {
    let random = std::hash::RandomState::new().hash_one(std::process::id());
    format!("{:05x}", random & 0xf_ffff)
}

/// Counts signals that ask this process to end, instead of ending it, until it is dropped.
struct CountedSignals {
    handle: Handle,
    thread: Option<JoinHandle<()>>,
}

impl CountedSignals {
    fn count_by(count: Arc<AtomicU32>) -> Result<Self> {
        let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])?;
        let handle = signals.handle();
        let count = move || {
            for _ in signals.forever() {
                count.fetch_add(1, Ordering::Relaxed);
            }
        };
        let thread = thread::Builder::new().name("signals".to_owned());
        let thread = Some(thread.spawn(count)?);
        Ok(Self { handle, thread })
    }
}

impl Drop for CountedSignals {
    fn drop(&mut self) {
        self.handle.close();
        // The thread only counts, and cannot fail.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}
