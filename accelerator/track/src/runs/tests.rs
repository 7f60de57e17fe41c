use std::fs;
use std::path::Path;

use super::*;
use crate::history::RunStatus;
use crate::run::Run;

fn start(runs: &Path, name: &str) -> Run {
    Run::builder(name).runs_folder(runs).start().unwrap()
}

#[test]
fn runs_are_found_by_folder_id_prefix_and_name() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = temporary.path();
    let first = start(folder, "a/b");
    let second = start(folder, "a/b");
    let other = start(folder, "模型 é");
    let runs = Runs::open(folder).unwrap();
    assert_eq!(runs.find("a%2Fb-2").unwrap(), second.folder());
    // The first one's folder is called so.
    assert_eq!(runs.find("a/b").unwrap(), first.folder());
    assert_eq!(runs.find("模型 é").unwrap(), other.folder());
    for run in [&first, &second, &other] {
        let id = run.id().to_string();
        assert_eq!(runs.find(&id).unwrap(), run.folder());
        assert_eq!(runs.find(&id[..35]).unwrap(), run.folder());
    }
    // All three were made in this quarter of an hour.
    let error = runs.find(&first.id().to_string()[..4]).unwrap_err();
    assert!(
        error.is_misuse() && error.to_string().contains("a%2Fb-2"),
        "{error}"
    );
    drop(first);
    runs.remove(&folder.join("a%2Fb")).unwrap();
    assert_eq!(runs.find("a/b").unwrap(), second.folder());
    for nothing in ["", "..", ".", "/", "x", "ffffffff"] {
        assert!(runs.find(nothing).unwrap_err().is_not_found(), "{nothing}");
    }
}

#[test]
fn folders_that_are_no_runs_are_passed_over_and_damaged_ones_listed() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = temporary.path();
    fs::create_dir_all(folder.join("notes")).unwrap();
    fs::write(folder.join("file"), "").unwrap();
    let run = start(folder, "good");
    let good = run.folder().to_owned();
    drop(run);
    for (name, journal) in [("empty", ""), ("noise", "x\ny\n")] {
        fs::create_dir(folder.join(name)).unwrap();
        fs::write(folder.join(name).join(JOURNAL), journal).unwrap();
    }
    let listed = Runs::open(folder).unwrap().list().unwrap();
    let names: Vec<_> = listed
        .iter()
        .map(|x| x.folder.file_name().unwrap())
        .collect();
    assert_eq!(names, ["good", "empty", "noise"]);
    assert_eq!(listed[0].head.as_ref().unwrap().1, "good");
    assert_eq!(listed[0].folder, good);
    assert!(listed[1].head.as_ref().unwrap_err().is_corrupt());
}

#[test]
fn a_summary_is_kept_until_the_journal_changes() {
    let temporary = tempfile::tempdir().unwrap();
    let run = start(temporary.path(), "a");
    let folder = run.folder().to_owned();
    run.log("train", [("loss", 2.0), ("odd", f64::NAN)], 2, None);
    run.log("train", [("loss", 1.0), ("odd", f64::NAN)], 1, None);
    let mark = run.mark().unwrap();
    assert_eq!(
        RunSummary::read(&folder).unwrap().status,
        RunStatus::Running
    );
    assert!(!folder.join("summary.json").exists());
    drop(run);
    let summary = RunSummary::read(&folder).unwrap();
    assert_eq!(summary.status, RunStatus::Interrupted);
    let loss = summary.series("train/loss").unwrap();
    // The last value is that of the greatest step, not the one that was logged last.
    assert_eq!((loss.last.0, loss.min.0, loss.max.0), (2.0, 1.0, 2.0));
    assert!(summary.series("train/odd").unwrap().min.0.is_nan());

    let kept = fs::read_to_string(folder.join("summary.json")).unwrap();
    let marked = kept.replace("\"interrupted\"", "\"preempted\"");
    fs::write(folder.join("summary.json"), marked).unwrap();
    assert_eq!(
        RunSummary::read(&folder).unwrap().status,
        RunStatus::Preempted
    );
    let builder = Run::builder("a").runs_folder(temporary.path());
    builder.resume(&mark).start().unwrap().finish().unwrap();
    assert_eq!(
        RunSummary::read(&folder).unwrap().status,
        RunStatus::Finished
    );
    fs::write(folder.join("summary.json"), "{").unwrap();
    assert_eq!(
        RunSummary::read(&folder).unwrap().status,
        RunStatus::Finished
    );
}

#[test]
fn what_nothing_needs_is_removed_and_nothing_else() {
    let temporary = tempfile::tempdir().unwrap();
    let run = start(temporary.path(), "a");
    let folder = run.folder().to_owned();
    let image = |x: u8| {
        [
            &b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"[..],
            &[0, 0, 0, 1, 0, 0, 0, x],
        ]
        .concat()
    };
    run.log("train", [("loss", 1.0)], 1, None);
    run.log_image("x/kept", &image(1), 1).unwrap();
    let mark = run.mark().unwrap();
    run.log_image("x/superseded", &image(2), 2).unwrap();
    let run = run.resume(&mark).unwrap();
    run.log("train", [("loss", 1.0)], 2, None);
    run.flush().unwrap();
    fs::write(folder.join("metrics.csv.new"), "cut").unwrap();
    let runs = Runs::open(temporary.path()).unwrap();
    assert!(
        runs.remove_leftovers().unwrap().is_empty(),
        "the run is being written"
    );
    drop(run);
    fs::create_dir(temporary.path().join(".removed-x")).unwrap();
    fs::write(temporary.path().join(".removed-x/y"), "12345").unwrap();

    let found = runs.leftovers().unwrap();
    assert_eq!(found.len(), 3);
    assert_eq!(found.iter().map(|x| x.bytes).sum::<u64>(), 5 + 3 + 24);
    assert_eq!(runs.remove_leftovers().unwrap(), found);
    assert!(runs.leftovers().unwrap().is_empty());
    let left = RunHistory::read(&folder).unwrap().media;
    assert_eq!(left.len(), 1);
    assert_eq!(fs::read_dir(folder.join("blobs")).unwrap().count(), 1);
}
