//! Schedules of faults against a small training program (`tests/programs/chaos_rank.rs`), under the launcher's own
//! restarts.
//!
//! After every schedule, the job has ended in time. Every failed attempt names the rank with the fault, and no attempt
//! that reached a fatal fault succeeded. The final weights are, bit for bit, those of a run without faults. No process,
//! temporary file or broken checkpoint is left.

mod attempts;
mod random;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use accelerator_fault::{Action, FaultPlan, Point};
use accelerator_manifest::VerifyLevel;

use crate::support::{Folder, Run};
use attempts::{Attempts, OPERATIONS, STEPS};
use random::{Bounds, random_plan};

const PROGRAM: &str = env!("CARGO_BIN_EXE_chaos-rank");

/// The number of ranks of a job.
const RANKS: usize = 2;

/// The number of checkpoints of a run without faults.
const SAVES: u64 = 6;

/// The maximum number of attempts of a job with a fault.
const FAULTY_ATTEMPTS: u64 = 3;

/// The schedules are divided, so that each test ends in time on a busy machine.
#[test]
fn schedules_1_to_5_pass() {
    schedules_pass(1, 5);
}

#[test]
fn schedules_6_to_10_pass() {
    schedules_pass(6, 5);
}

#[test]
fn schedules_11_to_15_pass() {
    schedules_pass(11, 5);
}

#[test]
fn schedules_16_to_20_pass() {
    schedules_pass(16, 5);
}

/// Runs `SCHEDULES` schedules, beginning with `SEED`.
#[test]
#[ignore = "takes as many schedules as SCHEDULES says"]
fn schedules_of_the_environment_pass() {
    let number = |name, default| match std::env::var(name) {
        Ok(text) => text.parse().unwrap(),
        Err(_) => default,
    };
    schedules_pass(number("SEED", 1), number("SCHEDULES", 20));
}

#[test]
fn one_wrong_bit_after_a_restart_is_noticed() {
    let undisturbed = undisturbed();
    let faults = "rank=1 step=10 kill".parse().unwrap();
    let wrong = run(&faults, &["--sabotage", "wrong"]);
    let outcome = wrong.and_then(|outcome| same_bits(outcome, &undisturbed));
    assert!(outcome.unwrap_err().contains("the weights differ"));
    let right = run(&faults, &[]);
    let outcome = right.and_then(|outcome| same_bits(outcome, &undisturbed));
    assert_eq!(outcome.unwrap().restarts(), 1);
}

#[test]
fn a_job_that_fails_is_noticed() {
    let failure = run(&FaultPlan::default(), &["--sabotage", "crash"]).unwrap_err();
    assert!(
        failure.contains("the job ended with exit code 134"),
        "{failure}"
    );
}

fn schedules_pass(first: u64, count: u64) {
    let undisturbed = undisturbed();
    let (mut restarts, mut failures) = (0, Vec::new());
    for seed in first..first + count {
        let faults = drawn(seed);
        // The line is also shown if the job does not end.
        println!("seed {seed}: {faults}");
        let outcome = run(&faults, &[]);
        match outcome.and_then(|outcome| same_bits(outcome, &undisturbed)) {
            Ok(attempts) => restarts += attempts.restarts(),
            Err(what) => failures.push(format!("{what}\n    {faults}\n    {}", replay(seed))),
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert!(restarts > 0, "no fault struck");
}

/// Returns the final weights of a run without faults.
fn undisturbed() -> Vec<u8> {
    let (attempts, weights) = run(&FaultPlan::default(), &[]).unwrap();
    assert_eq!(attempts.restarts(), 0);
    attempts.expect_whole(SAVES);
    weights
}

/// Returns the command that runs one schedule again.
fn replay(seed: u64) -> String {
    format!(
        "SEED={seed} SCHEDULES=1 cargo test --release -p accel-launch --features faults --test it \
         chaos::schedules_of_the_environment -- --ignored"
    )
}

fn drawn(seed: u64) -> FaultPlan {
    let bounds = Bounds {
        ranks: RANKS,
        steps: STEPS,
        saves: SAVES,
        restarts: FAULTY_ATTEMPTS,
    };
    let mut plan = random_plan(seed, bounds);
    for fault in &mut plan.faults {
        // Faults of connections need an operation, so they strike the first one of that step.
        if let (Point::Step(step), Action::DropConnection | Action::CorruptFrame) =
            (fault.point, fault.action)
        {
            fault.point = Point::Operation(1 + OPERATIONS * step);
        }
    }
    plan
}

fn same_bits(outcome: (Attempts, Vec<u8>), undisturbed: &[u8]) -> Result<Attempts, String> {
    match outcome {
        (attempts, weights) if weights == undisturbed => Ok(attempts),
        _ => Err("the weights differ from those of the undisturbed run".to_owned()),
    }
}

/// Runs a job to its end, and returns its attempts, which are as planned, and its final weights.
fn run(faults: &FaultPlan, sabotage: &[&str]) -> Result<(Attempts, Vec<u8>), String> {
    let folder = Folder::new();
    let root = folder.path();
    let temporary = root.join("tmp");
    fs::create_dir(&temporary).unwrap();
    let shared = shared_memory();
    let mut command = folder.command("--quiet --restart-delay 0 --grace 0.2");
    command
        .args(["--num-processes", &RANKS.to_string()])
        .args(["--max-restarts", &(FAULTY_ATTEMPTS + 1).to_string()])
        .args(["--log-dir", "logs", PROGRAM, "--limit", "5"])
        .arg(root)
        .args(sabotage)
        .env("ACCEL_LIVENESS_TIMEOUT", "1")
        .env("TMPDIR", &temporary);
    if !faults.faults.is_empty() {
        command.env(accelerator_fault::VARIABLE, faults.to_string());
    }
    let ended = Run::start(command).end();
    nothing_is_left("processes of the job", || processes_of(root))?;
    if ended.code() != 0 {
        let (code, said) = (ended.code(), &ended.stderr);
        return Err(format!("the job ended with exit code {code}: {said}"));
    }
    nothing_is_left("files in shared memory", || {
        shared_memory().difference(&shared).cloned().collect()
    })?;
    nothing_is_left("temporary files", || entries(&temporary))?;
    check_checkpoints(&root.join("checkpoints"))?;
    let weights =
        fs::read(root.join("final.bin")).map_err(|error| format!("no weights: {error}"))?;
    let attempts = Attempts::read(&root.join("logs/latest"))?;
    attempts.compare(faults, RANKS)?;
    Ok((attempts, weights))
}

/// Checks that nothing is left, after a moment for what ends by itself.
fn nothing_is_left(what: &str, left: impl Fn() -> Vec<PathBuf>) -> Result<(), String> {
    let until = Instant::now() + Duration::from_secs(1);
    loop {
        let left = left();
        if left.is_empty() {
            return Ok(());
        }
        if Instant::now() >= until {
            return Err(format!("{what} are left: {left:?}"));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Checks that every checkpoint verifies and none is unfinished.
fn check_checkpoints(path: &Path) -> Result<(), String> {
    let folder = accelerator_manifest::Folder::open(path).map_err(|error| error.to_string())?;
    for checkpoint in folder.checkpoints().map_err(|error| error.to_string())? {
        let report = checkpoint.verify(VerifyLevel::Hashes);
        if !report.is_good() {
            return Err(format!("a broken checkpoint: {report}"));
        }
    }
    let left = folder.unfinished().map_err(|error| error.to_string())?;
    match left.first() {
        None => Ok(()),
        Some(left) => Err(format!("an unfinished checkpoint is left: {left:?}")),
    }
}

/// Returns the processes that have the folder in their command line or environment.
fn processes_of(root: &Path) -> Vec<PathBuf> {
    let root = root.as_os_str().as_encoded_bytes();
    let mut processes = entries(Path::new("/proc"));
    processes.retain(|process| {
        ["cmdline", "environ"].iter().any(|file| {
            let bytes = fs::read(process.join(file)).unwrap_or_default();
            bytes.windows(root.len()).any(|window| window == root)
        })
    });
    processes
}

/// Returns the files of this project in shared memory.
fn shared_memory() -> BTreeSet<PathBuf> {
    let files = entries(Path::new("/dev/shm")).into_iter();
    files
        .filter(|path| path.to_string_lossy().contains("accel"))
        .collect()
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).collect()
}
