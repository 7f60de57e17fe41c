//! The attempts of a job under faults: the failed ones from the launcher's report, the last one from the job's log.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use accelerator_fault::{Action, FaultPlan, Point};
use serde::Deserialize;

/// The steps of a run without faults.
pub(super) const STEPS: u64 = 24;

/// The collectives of a step.
pub(super) const OPERATIONS: u64 = 3;

/// Rank 0 prints this before the number of its first step.
const BEGINS: &str = "begins with step";

/// Rank 0 prints this before the number of each checkpoint that it writes.
const SAVES: &str = "saves checkpoint";

/// The report of the failed attempts, beside the logs.
const REPORT: &str = "failure.json";

/// The attempts of a job that succeeded in the end.
#[derive(Debug)]
pub(super) struct Attempts {
    failed: Vec<ReportedAttempt>,
    last: LastAttempt,
}

/// The part of the launcher's report that the tests read.
#[derive(Debug, Deserialize)]
struct ReportedAttempt {
    first: ReportedFirst,
}

#[derive(Debug, Deserialize)]
struct ReportedFirst {
    rank: usize,
    cause: String,
}

#[derive(Debug, Deserialize)]
struct AttemptsFile {
    attempts: Vec<ReportedAttempt>,
}

/// The part of the training that the successful attempt did.
#[derive(Debug, PartialEq, Eq)]
struct LastAttempt {
    from: u64,
    saves: Vec<u64>,
    end: String,
}

impl Attempts {
    /// Reads what a job left in the folder of its logs. Fails if the report misses a restart.
    pub(super) fn read(logs: &Path) -> Result<Self, String> {
        let path = logs.join(REPORT);
        let shown = path.display();
        let failed = match fs::read(&path) {
            Ok(text) => {
                let file: AttemptsFile = serde_json::from_slice(&text)
                    .map_err(|error| format!("{shown} cannot be read: {error}"))?;
                file.attempts
            }
            Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(format!("{shown} cannot be read: {error}")),
        };
        // Every attempt has its own logs.
        let restarts = (1..)
            .take_while(|&restart| log(logs, restart).exists())
            .count();
        if failed.len() != restarts {
            let failures = failed.len();
            return Err(format!(
                "the job was restarted {restarts} times, but {shown} tells of {failures} failures"
            ));
        }
        let path = log(logs, restarts);
        let text = fs::read_to_string(&path)
            .map_err(|error| format!("{} cannot be read: {error}", path.display()))?;
        let last = LastAttempt::parse(&text)
            .ok_or_else(|| format!("{} does not say where it began", path.display()))?;
        Ok(Self { failed, last })
    }

    /// Returns how often the job was started again.
    pub(super) fn restarts(&self) -> usize {
        self.failed.len()
    }

    /// Asserts that the only attempt did all that this module expects of the program.
    pub(super) fn expect_whole(&self, saves: u64) {
        let end = format!("after step {STEPS} of {STEPS}");
        let whole = LastAttempt {
            from: 0,
            saves: (1..=saves).collect(),
            end,
        };
        assert_eq!(self.last, whole);
    }

    /// Compares a job of `ranks` ranks with its fault `plan`. Every failed attempt must name the rank with the fault,
    /// and the last attempt must not have reached a fatal fault.
    pub(super) fn compare(&self, plan: &FaultPlan, ranks: usize) -> Result<(), String> {
        let fatal_fault = |attempt: usize| {
            let mut faults = plan.faults.iter();
            faults.find(|fault| fault.restart == attempt as u64 && is_deadly(fault.action))
        };
        for (attempt, ReportedAttempt { first }) in self.failed.iter().enumerate() {
            let ReportedFirst { rank, cause } = first;
            match fatal_fault(attempt) {
                Some(fault) if fault.rank == *rank => {}
                Some(fault) => {
                    return Err(format!(
                        "`{fault}` was injected, but rank {rank} was named: {cause}"
                    ));
                }
                None => {
                    return Err(format!(
                        "attempt {attempt} failed without a fatal fault: rank {rank}: {cause}"
                    ));
                }
            }
        }
        match fatal_fault(self.failed.len()) {
            Some(fault) if self.last.has_reached(fault.point, ranks) => {
                Err(format!("the job reached `{fault}` and succeeded"))
            }
            _ => Ok(()),
        }
    }
}

impl LastAttempt {
    /// Parses the output of rank 0.
    fn parse(log: &str) -> Option<Self> {
        let numbers = |word| {
            let lines = log.lines();
            lines.filter_map(move |line| line.strip_prefix(word)?.trim().parse().ok())
        };
        Some(Self {
            from: numbers(BEGINS).next()?,
            saves: numbers(SAVES).collect(),
            end: log
                .lines()
                .find_map(|line| line.strip_prefix("ends "))?
                .to_owned(),
        })
    }

    /// Returns whether a job that trained to its end has reached `point`.
    fn has_reached(&self, point: Point, ranks: usize) -> bool {
        let operations = 1 + OPERATIONS * (STEPS - self.from);
        match point {
            Point::Rendezvous | Point::Connect => ranks > 1,
            Point::Step(step) => (self.from..STEPS).contains(&step),
            Point::Operation(operation) => ranks > 1 && operation < operations,
            // A short collective has no such point.
            Point::Within(_) => false,
            Point::Save(number, _) => self.saves.contains(&number),
        }
    }
}

/// Returns the path of rank 0's log in an attempt.
fn log(logs: &Path, restart: usize) -> PathBuf {
    logs.join(match restart {
        0 => "rank-0.log".to_owned(),
        _ => format!("rank-0.restart-{restart}.log"),
    })
}

/// Writes the logs of a job whose last attempt began at `from`, after `restarts`.
fn logs(restarts: usize, from: u64) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for restart in 0..=restarts {
        let text = format!("{BEGINS} {from}\n{SAVES} 4\n{SAVES} 5\nends well\n");
        fs::write(log(folder.path(), restart), text).unwrap();
    }
    folder
}

fn report(logs: &tempfile::TempDir, text: &str) {
    fs::write(logs.path().join(REPORT), text).unwrap();
}

#[track_caller]
fn failure<T: std::fmt::Debug>(result: Result<T, String>, words: &str) {
    let text = result.unwrap_err();
    assert!(text.contains(words), "{text}");
}

const ONE_FAILURE: &str = r#"{"attempts": [{"first": {"rank": 1, "cause": "it died"}}]}"#;

#[test]
fn a_report_that_cannot_be_read_is_an_error() {
    let undisturbed = logs(0, 0);
    assert_eq!(Attempts::read(undisturbed.path()).unwrap().restarts(), 0);
    report(&undisturbed, "{");
    failure(Attempts::read(undisturbed.path()), "cannot be read");
    fs::remove_file(undisturbed.path().join(REPORT)).unwrap();
    fs::create_dir(undisturbed.path().join(REPORT)).unwrap();
    failure(Attempts::read(undisturbed.path()), "cannot be read");
}

#[test]
fn every_restart_is_in_the_report() {
    let logs = logs(1, 0);
    failure(Attempts::read(logs.path()), "tells of 0 failures");
    report(&logs, ONE_FAILURE);
    assert_eq!(Attempts::read(logs.path()).unwrap().restarts(), 1);
    fs::write(log(logs.path(), 2), "").unwrap();
    failure(Attempts::read(logs.path()), "restarted 2 times");
}

#[test]
fn the_rank_with_the_fault_is_named() {
    let logs = logs(1, 0);
    report(&logs, ONE_FAILURE);
    let attempts = Attempts::read(logs.path()).unwrap();
    let compare = |plan: &str| attempts.compare(&plan.parse().unwrap(), 2);
    compare("rank=1 step=3 kill").unwrap();
    failure(compare("rank=0 step=3 kill"), "rank 1 was named");
    failure(compare("rank=1 step=3 slow 1ms"), "without a fatal fault");
}

#[test]
fn success_after_reaching_a_fatal_fault_is_an_error() {
    let logs = logs(0, 12);
    let attempts = Attempts::read(logs.path()).unwrap();
    let last = 3 * (STEPS - 12);
    for (place, is_reached) in [
        ("rendezvous".to_owned(), true),
        ("connect".to_owned(), true),
        ("step=11".to_owned(), false),
        ("step=12".to_owned(), true),
        (format!("step={}", STEPS), false),
        ("op=0".to_owned(), true),
        (format!("op={last}"), true),
        (format!("op={}", last + 1), false),
        ("save=3 begin".to_owned(), false),
        ("save=4 begin".to_owned(), true),
    ] {
        let compare = |fault: &str| attempts.compare(&fault.parse().unwrap(), 2);
        let found = compare(&format!("rank=0 {place} kill"));
        if is_reached {
            failure(found, "and succeeded");
        } else {
            found.unwrap();
        }
        compare(&format!("rank=0 {place} slow 1ms")).unwrap();
        compare(&format!("rank=0 restart=1 {place} kill")).unwrap();
    }
}

/// Returns `true` if the rank or its process is gone, or is taken for gone, once the fault is triggered.
fn is_deadly(action: Action) -> bool {
    !matches!(
        action,
        Action::Slow(_) | Action::DiskFull | Action::FailWrite
    )
}
