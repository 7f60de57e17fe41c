//! The lives of a job under faults: the failed ones as the launcher reports them, the last as the
//! job tells of it.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use accelerator_fault::{FaultPlan, Point};
use serde::Deserialize;

use super::chaos::failed;
use super::rank::train;
use super::report::Trouble;
use crate::failure;

/// What is known of a job that ended well at last.
#[derive(Debug)]
pub(super) struct Lives {
    failed: Vec<Attempt>,
    last: Last,
}

/// What is read of the launcher's report.
#[derive(Debug, Deserialize)]
struct Attempt {
    first: First,
}

#[derive(Debug, Deserialize)]
struct First {
    rank: usize,
    cause: String,
}

#[derive(Debug, Deserialize)]
struct Failures {
    attempts: Vec<Attempt>,
}

/// How much of the training the life did that ended well.
#[derive(Debug, Default, PartialEq, Eq)]
struct Last {
    from: u64,
    saves: Vec<u64>,
}

impl Lives {
    /// Reads what a job left in the folder of its logs.
    ///
    /// # Errors
    /// When the report cannot be read, or does not tell of every restart.
    pub(super) fn read(logs: &Path) -> Result<Self, Trouble> {
        let path = logs.join(failure::FILE);
        let wrong = |error: &dyn std::error::Error| {
            failed(&format!("{} cannot be read", path.display()), error)
        };
        let failed = match fs::read(&path) {
            Ok(text) => {
                let failures: Failures =
                    serde_json::from_slice(&text).map_err(|error| wrong(&error))?;
                failures.attempts
            }
            Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(wrong(&error)),
        };
        // Every life has logs of its own.
        let restarts = (1..)
            .take_while(|&restart| log(logs, restart).exists())
            .count();
        if failed.len() != restarts {
            return Err(Trouble::Failed(format!(
                "the job was restarted {restarts} times, but {} tells of {} failures",
                path.display(),
                failed.len()
            )));
        }
        let path = log(logs, restarts);
        let text = fs::read_to_string(&path)
            .map_err(|error| self::failed(&format!("{} cannot be read", path.display()), &error))?;
        let last = Last::parse(&text).ok_or_else(|| {
            Trouble::Failed(format!("{} does not say where it began", path.display()))
        })?;
        Ok(Self { failed, last })
    }

    /// How often the job was started again.
    pub(super) fn restarts(&self) -> usize {
        self.failed.len()
    }

    /// Compares a job of `ranks` ranks with the `plan` that it suffered: every life that failed
    /// must name the rank that was struck in it, and the last must not have come through what is
    /// deadly.
    ///
    /// # Errors
    /// When they differ.
    pub(super) fn compare(&self, plan: &FaultPlan, ranks: usize) -> Result<(), Trouble> {
        let deadly = |life: usize| {
            let mut faults = plan.faults.iter();
            faults.find(|fault| fault.restart == life as u64 && fault.action.is_deadly())
        };
        for (life, Attempt { first }) in self.failed.iter().enumerate() {
            let First { rank, cause } = first;
            match deadly(life) {
                Some(fault) if fault.rank == *rank => {}
                Some(fault) => {
                    return Err(Trouble::Failed(format!(
                        "`{fault}` struck, but rank {rank} was named: {cause}"
                    )));
                }
                None => {
                    return Err(Trouble::Failed(format!(
                        "life {life} failed without a deadly fault: rank {rank}: {cause}"
                    )));
                }
            }
        }
        match deadly(self.failed.len()) {
            Some(fault) if self.last.has_reached(fault.point, ranks) => Err(Trouble::Failed(
                format!("the job came to the place of `{fault}`, and ended well"),
            )),
            _ => Ok(()),
        }
    }
}

impl Last {
    /// Reads what rank 0 said; see [`train::BEGINS`].
    fn parse(log: &str) -> Option<Self> {
        let numbers = |word| {
            let lines = log.lines();
            lines.filter_map(move |line| line.strip_prefix(word)?.trim().parse().ok())
        };
        Some(Self {
            from: numbers(train::BEGINS).next()?,
            saves: numbers(train::SAVES).collect(),
        })
    }

    /// Whether a job that trained to its end has come to `point`.
    fn has_reached(&self, point: Point, ranks: usize) -> bool {
        let operations = 1 + train::OPERATIONS * (train::STEPS - self.from);
        match point {
            Point::Rendezvous | Point::Connect => ranks > 1,
            Point::Step(step) => (self.from..train::STEPS).contains(&step),
            Point::Operation(operation) => ranks > 1 && operation < operations,
            // A short collective has no such place.
            Point::Within(_) => false,
            Point::Save(number, _) => self.saves.contains(&number),
        }
    }
}

/// The log of rank 0 in a life.
fn log(logs: &Path, restart: usize) -> PathBuf {
    logs.join(match restart {
        0 => "rank-0.log".to_owned(),
        _ => format!("rank-0.restart-{restart}.log"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The logs of a job whose last life began at `from`, after `restarts`.
    fn logs(restarts: usize, from: u64) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for restart in 0..=restarts {
            let text = format!(
                "{} {from}\n{} 4\n{} 5\n",
                train::BEGINS,
                train::SAVES,
                train::SAVES
            );
            fs::write(log(folder.path(), restart), text).unwrap();
        }
        folder
    }

    fn report(logs: &tempfile::TempDir, text: &str) {
        fs::write(logs.path().join(failure::FILE), text).unwrap();
    }

    #[track_caller]
    fn trouble<T: std::fmt::Debug>(result: Result<T, Trouble>, words: &str) {
        match result {
            Err(Trouble::Failed(text)) => assert!(text.contains(words), "{text}"),
            other => panic!("{other:?}"),
        }
    }

    const ONE: &str = r#"{"attempts": [{"first": {"rank": 1, "cause": "it died"}}]}"#;

    #[test]
    fn a_report_that_cannot_be_read_is_no_sign_of_peace() {
        let undisturbed = logs(0, 0);
        assert_eq!(Lives::read(undisturbed.path()).unwrap().restarts(), 0);
        report(&undisturbed, "{");
        trouble(Lives::read(undisturbed.path()), "cannot be read");
        fs::remove_file(undisturbed.path().join(failure::FILE)).unwrap();
        fs::create_dir(undisturbed.path().join(failure::FILE)).unwrap();
        trouble(Lives::read(undisturbed.path()), "cannot be read");
    }

    #[test]
    fn every_restart_is_in_the_report() {
        let logs = logs(1, 0);
        trouble(Lives::read(logs.path()), "tells of 0 failures");
        report(&logs, ONE);
        assert_eq!(Lives::read(logs.path()).unwrap().restarts(), 1);
        fs::write(log(logs.path(), 2), "").unwrap();
        trouble(Lives::read(logs.path()), "restarted 2 times");
    }

    #[test]
    fn the_struck_rank_is_named() {
        let logs = logs(1, 0);
        report(&logs, ONE);
        let lives = Lives::read(logs.path()).unwrap();
        let compare = |plan: &str| lives.compare(&plan.parse().unwrap(), 2);
        compare("rank=1 step=3 kill").unwrap();
        trouble(compare("rank=0 step=3 kill"), "rank 1 was named");
        trouble(compare("rank=1 step=3 slow 1ms"), "without a deadly fault");
    }

    #[test]
    fn nobody_comes_through_a_deadly_fault() {
        let logs = logs(0, 12);
        let lives = Lives::read(logs.path()).unwrap();
        let last = 3 * (train::STEPS - 12);
        for (place, is_reached) in [
            ("rendezvous".to_owned(), true),
            ("connect".to_owned(), true),
            ("step=11".to_owned(), false),
            ("step=12".to_owned(), true),
            (format!("step={}", train::STEPS), false),
            ("op=0".to_owned(), true),
            (format!("op={last}"), true),
            (format!("op={}", last + 1), false),
            ("save=3 begin".to_owned(), false),
            ("save=4 begin".to_owned(), true),
        ] {
            let compare = |fault: &str| lives.compare(&fault.parse().unwrap(), 2);
            let found = compare(&format!("rank=0 {place} kill"));
            if is_reached {
                trouble(found, "and ended well");
            } else {
                found.unwrap();
            }
            compare(&format!("rank=0 {place} slow 1ms")).unwrap();
            compare(&format!("rank=0 restart=1 {place} kill")).unwrap();
        }
    }
}
