use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::*;
use crate::history::{RunHistory, RunStatus};
use crate::record::Entry;
use crate::sink::csv::CsvFile;
use crate::sink::{Origin, RunInfo, Sink, SinkPosition};

fn start(runs: &Path, name: &str) -> Run {
    Run::builder(name).runs_folder(runs).start().unwrap()
}

fn losses(folder: &Path) -> Vec<(u64, f64)> {
    let history = RunHistory::read(folder).unwrap();
    let series = history.series("train/loss").unwrap();
    series.points.iter().map(|x| (x.step, x.value)).collect()
}

#[test]
fn what_was_logged_comes_back() {
    let runs = tempfile::tempdir().unwrap();
    let run = Run::builder("mnist")
        .runs_folder(runs.path())
        .hyperparameters(&serde_json::json!({ "lr": 0.1, "model": { "width": 3 } }))
        .unwrap()
        .tag("a", "b")
        .start()
        .unwrap();
    run.log(
        "train",
        [("loss", 0.1 + 0.2), ("accuracy", f64::NAN)],
        1,
        0.5,
    );
    run.log_means("test", [("loss", f64::NEG_INFINITY, 7)], 1, None);
    run.log_text("note/a", "text", 1);
    run.set_hyperparameters(&serde_json::json!({ "lr": 0.2 }))
        .unwrap();
    let folder = run.folder().to_owned();
    assert_eq!(
        RunHistory::read(&folder).unwrap().status(),
        RunStatus::Running
    );
    run.finish().unwrap();

    let history = RunHistory::read(&folder).unwrap();
    assert_eq!(history.status(), RunStatus::Finished);
    assert_eq!(history.name, "mnist");
    let keys: Vec<_> = history.series.iter().map(|x| x.key.as_str()).collect();
    assert_eq!(keys, ["train/loss", "train/accuracy", "test/loss"]);
    let point = history.series[0].points[0];
    assert_eq!(
        (point.value, point.step, point.epoch),
        (0.1 + 0.2, 1, Some(0.5))
    );
    assert!(history.series[1].points[0].value.is_nan());
    let point = history.series[2].points[0];
    assert_eq!((point.value, point.count), (f64::NEG_INFINITY, Some(7)));
    assert_eq!(history.tags["a"], "b");
    assert_eq!(history.hyperparameters["model.width"].value, 3);
    let lr = &history.hyperparameters["lr"];
    assert_eq!(
        (&lr.value, &lr.earlier[..]),
        (&0.2.into(), &[0.1.into()][..])
    );
}

#[test]
fn a_second_run_of_a_name_gets_a_folder_of_its_own() {
    let runs = tempfile::tempdir().unwrap();
    let first = start(runs.path(), "a/b");
    let second = start(runs.path(), "a/b");
    assert_eq!(first.folder(), runs.path().join("a%2Fb"));
    assert_eq!(second.folder(), runs.path().join("a%2Fb-2"));
    assert_ne!(first.id(), second.id());
}

#[test]
fn one_process_writes_a_run() {
    let runs = tempfile::tempdir().unwrap();
    let run = start(runs.path(), "a");
    let mark = run.mark().unwrap();
    let error = Run::builder("a")
        .runs_folder(runs.path())
        .resume(&mark)
        .start()
        .unwrap_err();
    assert!(error.is_conflict());
    assert!(
        error
            .to_string()
            .contains(&format!("process {} ", std::process::id())),
        "{error}"
    );
}

#[test]
fn a_run_goes_on_where_its_checkpoint_was() {
    let runs = tempfile::tempdir().unwrap();
    let run = start(runs.path(), "a");
    let (id, folder) = (run.id(), run.folder().to_owned());
    for step in 1..=3 {
        run.log("train", [("loss", 1.0)], step, None);
    }
    let mark = run.mark().unwrap();
    assert_eq!(mark.step, Some(3));
    run.checkpoint_saved(&mark);
    for step in 4..=6 {
        run.log("train", [("loss", 1.0)], step, None);
    }
    drop(run);
    assert_eq!(
        RunHistory::read(&folder).unwrap().status(),
        RunStatus::Interrupted
    );

    let run = Run::builder("a")
        .runs_folder(runs.path())
        .resume(&mark)
        .start()
        .unwrap();
    assert_eq!((run.id(), run.attempt()), (id, 1));
    for step in 4..=5 {
        run.log("train", [("loss", 2.0)], step, None);
    }
    run.finish().unwrap();
    assert_eq!(
        losses(&folder),
        [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0)]
    );
    let history = RunHistory::read(&folder).unwrap();
    assert_eq!(history.attempts.len(), 2);
    assert_eq!(history.attempts[1].resumed, Some(Some(3)));
}

#[test]
fn texts_count_as_steps_too() {
    let runs = tempfile::tempdir().unwrap();
    let run = start(runs.path(), "a");
    run.log_text("note/a", "kept", 3);
    let mark = run.mark().unwrap();
    assert_eq!(mark.step, Some(3));
    run.log_text("note/a", "superseded", 4);
    let folder = run.folder().to_owned();
    run.resume(&mark).unwrap().finish().unwrap();
    let media = RunHistory::read(folder).unwrap().media;
    assert_eq!(media.iter().map(|x| x.step).collect::<Vec<_>>(), [3]);
}

#[test]
fn the_mark_of_a_run_that_is_gone_starts_a_new_one() {
    let runs = tempfile::tempdir().unwrap();
    let run = start(runs.path(), "a");
    let mark = run.mark().unwrap();
    let (id, folder) = (run.id(), run.folder().to_owned());
    drop(run);
    fs::remove_dir_all(folder).unwrap();
    let run = Run::builder("a")
        .runs_folder(runs.path())
        .resume(&mark)
        .start()
        .unwrap();
    assert_ne!(run.id(), id);
}

#[test]
fn a_run_that_learns_of_its_checkpoint_late_goes_on_with_its_sinks() {
    let runs = tempfile::tempdir().unwrap();
    let first = start(runs.path(), "a");
    first.log("train", [("loss", 1.0)], 1, None);
    let (id, mark) = (first.id(), first.mark().unwrap());
    drop(first);
    let run = Run::builder("a")
        .runs_folder(runs.path())
        .sink(CsvFile::in_run())
        .start()
        .unwrap();
    let fresh = run.folder().to_owned();
    let run = run.resume(&mark).unwrap();
    assert_eq!(run.id(), id);
    assert!(!fresh.exists());
    run.log("train", [("loss", 2.0)], 2, None);
    let folder = run.folder().to_owned();
    run.finish().unwrap();
    assert_eq!(losses(&folder), [(1, 1.0), (2, 2.0)]);
    assert_eq!(
        fs::read_to_string(folder.join("metrics.csv"))
            .unwrap()
            .lines()
            .count(),
        3
    );

    // One that has metrics stays.
    let run = start(runs.path(), "b");
    run.log("train", [("loss", 1.0)], 1, None);
    let id = run.id();
    assert_eq!(run.resume(&mark).unwrap().id(), id);
}

#[test]
fn a_restart_of_the_same_launch_starts_the_run_over() {
    let runs = tempfile::tempdir().unwrap();
    let start = |launch: &str| {
        Run::builder("a")
            .runs_folder(runs.path())
            .launch(launch)
            .start()
            .unwrap()
    };
    let run = start("x");
    run.log("train", [("loss", 1.0)], 1, None);
    let id = run.id();
    drop(run);
    let run = start("x");
    assert_eq!((run.id(), run.attempt()), (id, 1));
    run.log("train", [("loss", 2.0)], 1, None);
    let folder = run.folder().to_owned();
    drop(run);
    assert_eq!(losses(&folder), [(1, 2.0)]);
    assert_ne!(start("y").id(), id);

    // A run that finished is not started over by the next one of that name, and one that cannot be read stops none.
    start("z").finish().unwrap();
    fs::write(runs.path().join("a/journal.jsonl"), "?\n?\n").unwrap();
    assert_eq!(start("z").attempt(), 0);
}

#[test]
fn threads_share_a_run() {
    fn shared<T: Send + Sync>() {}
    shared::<Run>();
}

#[test]
fn a_restart_that_finds_its_checkpoint_late_keeps_what_was_logged_before() {
    let runs = tempfile::tempdir().unwrap();
    let start = || {
        let builder = Run::builder("a").runs_folder(runs.path()).launch("x");
        builder.sink(CsvFile::in_run()).start().unwrap()
    };
    let run = start();
    run.log("train", [("loss", 1.0)], 1, None);
    let mark = run.mark().unwrap();
    run.log("train", [("loss", 2.0)], 2, None);
    let folder = run.folder().to_owned();
    drop(run);
    for value in [3.0, 4.0] {
        let run = start().resume(&mark).unwrap();
        run.log("train", [("loss", value)], 2, None);
        drop(run);
        assert_eq!(losses(&folder), [(1, 1.0), (2, value)]);
    }
    let table = fs::read_to_string(folder.join("metrics.csv")).unwrap();
    assert_eq!(table.lines().count(), 3, "{table}");
    drop(start());
    assert!(RunHistory::read(&folder).unwrap().last_step().is_none());
}

#[test]
fn sinks_get_what_counts_though_they_fail_at_first() {
    let runs = tempfile::tempdir().unwrap();
    let failures = Arc::new(AtomicUsize::new(2));
    let taken = Arc::new(Mutex::new(Vec::new()));
    let run = Run::builder("a")
        .runs_folder(runs.path())
        .sink(CsvFile::in_run())
        .sink(Flaky {
            failures,
            taken: Arc::clone(&taken),
        })
        .start()
        .unwrap();
    let folder = run.folder().to_owned();
    run.log("train", [("loss", 1.0)], 1, None);
    let mark = run.mark().unwrap();
    run.log("train", [("loss", 1.0)], 2, None);
    wait_until(|| {
        fs::read_to_string(folder.join("metrics.csv")).is_ok_and(|x| x.lines().count() == 3)
    });
    let run = run.resume(&mark).unwrap();
    run.log("train", [("loss", 2.0)], 2, None);
    run.finish().unwrap();
    let table = fs::read_to_string(folder.join("metrics.csv")).unwrap();
    let rows: Vec<_> = table
        .lines()
        .skip(1)
        .map(|row| row.splitn(3, ',').nth(2).unwrap())
        .collect();
    assert_eq!(rows, ["1,,train/loss,1,", "2,,train/loss,2,"]);
    let taken = taken.lock().unwrap();
    assert_eq!(*taken, [1, 2]);
}

#[test]
fn a_million_points_wait_for_no_one() {
    let runs = tempfile::tempdir().unwrap();
    let run = start(runs.path(), "a");
    let names: Vec<_> = (0..20).map(|x| format!("m{x}")).collect();
    for step in 0..50_000 {
        run.log(
            "train",
            names.iter().map(|name| (name.as_str(), step as f64)),
            step,
            None,
        );
    }
    let folder = run.folder().to_owned();
    run.finish().unwrap();
    let history = RunHistory::read(folder).unwrap();
    let points: usize = history.series.iter().map(|x| x.points.len()).sum();
    // What the queue had no room for is told.
    assert_eq!(points as u64 + 20 * history.lost_entries, 1_000_000);
}

/// Fails some times, and notes the steps that it got since it was opened last.
struct Flaky {
    failures: Arc<AtomicUsize>,
    taken: Arc<Mutex<Vec<u64>>>,
}

impl Sink for Flaky {
    fn name(&self) -> String {
        "flaky".to_owned()
    }

    fn open(&mut self, _: &RunInfo) -> crate::Result<SinkPosition> {
        self.taken.lock().unwrap().clear();
        let left = self
            .failures
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |x| x.checked_sub(1));
        match left {
            Ok(_) => Err(crate::Error::new(crate::error::Kind::Remote, "not now")),
            Err(_) => Ok(SinkPosition::default()),
        }
    }

    fn write(&mut self, _: Origin, entry: &Entry) -> crate::Result<()> {
        if let Record::Metrics(metrics) = &entry.record {
            self.taken.lock().unwrap().push(metrics.step);
        }
        Ok(())
    }

    fn flush(&mut self) -> crate::Result<()> {
        Ok(())
    }
}

fn wait_until(condition: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !condition() {
        assert!(Instant::now() < deadline, "it does not happen");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_run_that_cannot_be_begun_says_why_and_leaves_no_folder() {
    let temporary = tempfile::tempdir().unwrap();
    let file = temporary.path().join("runs");
    std::fs::write(&file, "no folder").unwrap();
    let error = Run::builder("a").runs_folder(&file).start().unwrap_err();
    assert!(error.is_io(), "{error}");
    let told = error.to_string();
    assert!(told.contains(file.to_str().unwrap()), "{told}");
    assert!(
        told.contains("it is a file") && told.contains("`runs_folder`"),
        "{told}"
    );
}

/// A path has 4095 bytes at most: that of the run's folder is short enough, and that of its journal is not.
#[test]
#[cfg(target_os = "linux")]
fn a_run_whose_journal_cannot_be_written_leaves_no_folder() {
    let temporary = tempfile::tempdir().unwrap();
    let mut runs = temporary.path().to_owned();
    while let left = 4084 - runs.as_os_str().len()
        && left > 1
    {
        // What is left after it is none, or a separator and a name.
        let name = match left - 1 {
            all @ ..=200 => all,
            _ => 100,
        };
        runs.push("d".repeat(name));
    }
    let error = Run::builder("a").runs_folder(&runs).start().unwrap_err();
    assert!(error.is_io(), "{error}");
    assert!(error.to_string().contains("journal.jsonl"), "{error}");
    assert_eq!(runs.read_dir().unwrap().count(), 0);
}
