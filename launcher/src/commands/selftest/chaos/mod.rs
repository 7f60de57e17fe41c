//! Schedules of faults against a small training program (`rank/training.rs`), under the launcher's
//! own restarts.
//!
//! After every schedule this holds: the job ends in time; every failed attempt names the rank with the fault; no
//! attempt succeeds that reached a fatal fault; the final weights are, bit for bit, those of a run without faults; no
//! process, temporary file or broken checkpoint is left.

mod attempts;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use accelerator_fault::{Action, Bounds, FaultPlan, Point};
use accelerator_manifest::{Folder, VerifyLevel};

use super::args::{Task, TestArgs};
use super::context::Context;
use super::rank::training;
use super::ranks::{RankEvent, command, listen};
use super::results::{StageFailure, StageResult, TestReport, failed};
use crate::error::{Error, Result};
use crate::output::logs;
use crate::process::{End, Process, RankProcess};
use attempts::Attempts;

/// Runs schedules until as many are done, or so much time has passed, as was asked for. `false`
/// where a signal ended it.
///
/// # Errors
/// Where no fault can be injected.
pub(super) fn run(context: &Context, report: &mut TestReport) -> Result<bool> {
    if !cfg!(feature = "faults") {
        return Err(Error::usage(
            "--chaos injects faults, which this program is built without; build it with the \
             feature `faults`: cargo build --release -p accel-launch --features faults",
        ));
    }
    let arguments = &context.arguments;
    let started = Instant::now();
    let undisturbed = Schedule::undisturbed(context).run();
    let undisturbed = match undisturbed {
        Ok((_, weights)) => {
            context.show(report.add("undisturbed", Ok(String::new()), started.elapsed()))?;
            weights
        }
        Err(failure) => {
            context.show(report.add("undisturbed", Err(failure), started.elapsed()))?;
            return Ok(context.interrupt.signal().is_none());
        }
    };
    for number in 0.. {
        let enough = match (arguments.schedules, arguments.minutes) {
            (Some(schedules), _) => number >= schedules,
            (None, Some(minutes)) => started.elapsed() >= minutes,
            (None, None) => number >= SCHEDULES,
        };
        if enough {
            break;
        }
        let began = Instant::now();
        let seed = arguments.seed.wrapping_add(number);
        let schedule = Schedule::drawn(context, seed);
        let outcome = schedule.judge(&undisturbed);
        if context.interrupt.signal().is_some() {
            return Ok(false);
        }
        context.show(report.add(&format!("seed {seed}"), outcome, began.elapsed()))?;
    }
    Ok(true)
}

/// How many schedules there are where nothing else was asked for.
const SCHEDULES: u64 = 20;

/// In how many attempts of a job faults occur at most.
const FAULTY_ATTEMPTS: u64 = 3;

/// One job with its fault plan.
struct Schedule<'a> {
    context: &'a Context,
    seed: u64,
    plan: FaultPlan,
}

impl<'a> Schedule<'a> {
    fn undisturbed(context: &'a Context) -> Self {
        Self {
            context,
            seed: 0,
            plan: FaultPlan::default(),
        }
    }

    fn drawn(context: &'a Context, seed: u64) -> Self {
        let bounds = Bounds {
            ranks: context.arguments.num_processes.get(),
            steps: training::STEPS,
            saves: training::STEPS / training::SAVE_EVERY,
            restarts: FAULTY_ATTEMPTS,
        };
        let mut plan = FaultPlan::random(seed, bounds);
        for fault in &mut plan.faults {
            // Faults of connections need an operation: the first one of that step.
            if let (Point::Step(step), Action::DropConnection | Action::CorruptFrame) =
                (fault.point, fault.action)
            {
                fault.point = Point::Operation(1 + training::OPERATIONS * step);
            }
        }
        Self {
            context,
            seed,
            plan,
        }
    }

    /// Runs the schedule and compares what is left of it.
    fn judge(&self, undisturbed: &[u8]) -> StageResult {
        let wrong = |what: String| {
            StageFailure::Failed(format!(
                "{what}\n    faults: {}\n    replay: {}",
                self.plan,
                replay(&self.context.arguments, self.seed)
            ))
        };
        let outcome = self.run().and_then(|(attempts, weights)| {
            if weights != undisturbed {
                return Err(StageFailure::Failed(
                    "the weights differ from those of the undisturbed run".into(),
                ));
            }
            Ok(attempts.restarts())
        });
        match outcome {
            Ok(restarts) => Ok(format!("{}; {restarts} restarts", self.plan)),
            Err(StageFailure::Failed(what) | StageFailure::TimedOut(what)) => Err(wrong(what)),
            Err(other) => Err(other),
        }
    }

    /// Runs the job to its end; gives its attempts, which are as planned, and the weights.
    fn run(&self) -> std::result::Result<(Attempts, Vec<u8>), StageFailure> {
        let folder = tempfile::Builder::new()
            .prefix("accel-launch-chaos-")
            .tempdir()
            .map_err(|error| failed("no temporary folder can be made", &error))?;
        let root = folder.path();
        let temporary = root.join("tmp");
        fs::create_dir(&temporary).map_err(|error| failed("no folder can be made", &error))?;
        let shared = shared_memory();

        let end = self.launch(root, &temporary);
        // In any case: nothing else reports processes that are left.
        let left = processes_of(root);
        let (end, words) = end?;
        if !left.is_empty() {
            return Err(StageFailure::Failed(format!(
                "processes of the job are left: {}",
                left.join(", ")
            )));
        }
        if end != End::Code(0) {
            return Err(StageFailure::Failed(format!(
                "the job ended with {end}: {words}"
            )));
        }
        let left: Vec<String> = shared_memory().difference(&shared).cloned().collect();
        if !left.is_empty() {
            return Err(StageFailure::Failed(format!(
                "left in {SHARED}: {}",
                left.join(", ")
            )));
        }
        if let Some(left) = entries(&temporary).into_iter().next() {
            return Err(StageFailure::Failed(format!(
                "a temporary file is left: {}",
                left.display()
            )));
        }
        check_checkpoints(&root.join(training::CHECKPOINTS))?;
        let weights = fs::read(root.join(training::FINAL))
            .map_err(|error| failed("there are no final weights", &error))?;
        let attempts = Attempts::read(&root.join("logs").join(logs::LATEST))?;
        attempts.compare(&self.plan, self.context.arguments.num_processes.get())?;
        Ok((attempts, weights))
    }

    fn launch(
        &self,
        root: &Path,
        temporary: &Path,
    ) -> std::result::Result<(End, String), StageFailure> {
        let context = self.context;
        let mut command = command(&context.program);
        command
            .args(["--quiet", "--restart-delay", "0", "--grace", "0.2"])
            .arg("--num-processes")
            .arg(context.arguments.num_processes.to_string())
            .args(["--max-restarts", &(FAULTY_ATTEMPTS + 1).to_string()])
            .arg("--log-dir")
            .arg(root.join("logs"))
            .arg(&context.program)
            .args(["__rank", Task::Train.name(), "--limit", RANK_LIMIT])
            .arg("--folder")
            .arg(root)
            .env("ACCEL_LIVENESS_TIMEOUT", "1")
            .env("TMPDIR", temporary);
        if let Some(sabotage) = context.arguments.break_chaos {
            command.args(["--sabotage", sabotage.name()]);
        }
        if !self.plan.faults.is_empty() {
            command.env(accelerator_fault::VARIABLE, self.plan.to_string());
        }
        let (sender, events) = mpsc::channel();
        let mut process = Process::spawn(&mut command)
            .map_err(|error| failed("the launcher cannot be started", &error))?;
        listen(0, &mut process, sender)
            .map_err(|error| failed("the launcher's output cannot be read", &error))?;
        let limit = 2 * context.arguments.limit;
        let started = Instant::now();
        loop {
            if context.interrupt.signal().is_some() {
                return Err(StageFailure::TimedOut("interrupted".into()));
            }
            match events.recv_timeout(Duration::from_millis(50)) {
                Ok(RankEvent::Line { .. }) => {}
                Ok(RankEvent::Ended { end, words, .. }) => {
                    process.reap();
                    return Ok((end, words));
                }
                Err(_) if started.elapsed() < limit => {}
                Err(_) => {
                    return Err(StageFailure::TimedOut(format!(
                        "the job did not end within {} s",
                        limit.as_secs_f64()
                    )));
                }
            }
        }
    }
}

/// How long a rank waits for running ranks, in seconds.
const RANK_LIMIT: &str = "5";

/// Every checkpoint must verify, and none be unfinished.
fn check_checkpoints(path: &Path) -> std::result::Result<(), StageFailure> {
    let wrong = |error: &dyn std::error::Error| failed("the checkpoints cannot be read", error);
    let folder = Folder::open(path).map_err(|error| wrong(&error))?;
    for checkpoint in folder.checkpoints().map_err(|error| wrong(&error))? {
        let report = checkpoint.verify(VerifyLevel::Hashes);
        if !report.is_good() {
            return Err(StageFailure::Failed(format!(
                "a broken checkpoint: {report}"
            )));
        }
    }
    let left = folder.unfinished().map_err(|error| wrong(&error))?;
    match left.first() {
        None => Ok(()),
        Some(left) => Err(StageFailure::Failed(format!(
            "an unfinished checkpoint is left: {}",
            left.display()
        ))),
    }
}

/// Processes that have the folder in their command line or environment; they get a moment to end.
fn processes_of(root: &Path) -> Vec<String> {
    let root = root.as_os_str().as_encoded_bytes();
    let until = Instant::now() + Duration::from_secs(1);
    loop {
        let mut found = Vec::new();
        for process in entries(Path::new("/proc")) {
            let mentions = ["cmdline", "environ"].iter().any(|file| {
                let bytes = fs::read(process.join(file)).unwrap_or_default();
                bytes.windows(root.len()).any(|window| window == root)
            });
            if mentions {
                let pid = process.file_name().unwrap_or_default();
                found.push(format!("process {}", pid.to_string_lossy()));
            }
        }
        if found.is_empty() || Instant::now() >= until {
            return found;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

const SHARED: &str = "/dev/shm";

/// The files of this project in shared memory.
fn shared_memory() -> BTreeSet<String> {
    let names = entries(Path::new(SHARED)).into_iter();
    let names = names.filter_map(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
    names.filter(|name| name.contains("accel")).collect()
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).collect()
}

/// The command that runs one schedule again.
fn replay(arguments: &TestArgs, seed: u64) -> String {
    format!(
        "accel-launch test --chaos --seed {seed} --schedules 1 --num-processes {}",
        arguments.num_processes
    )
}
