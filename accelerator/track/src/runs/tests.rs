use std::fs;

use super::leftovers::{leftovers, remove_artifacts, remove_leftovers, unneeded_artifacts};
use super::*;
use crate::artifact::{Artifact, ArtifactStore};
use crate::history::{MediaContent, RunStatus};
use crate::run::Run;
use crate::tests::{assert_says, start};

fn listed(runs: &Runs, name: &str) -> ListedRun {
    let mut listed = runs.list().unwrap().into_iter();
    listed.find(|run| run.folder.ends_with(name)).unwrap()
}

/// Returns a PNG that ends after its header.
fn image(x: u8) -> Vec<u8> {
    [
        &b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"[..],
        &[0, 0, 0, 1, 0, 0, 0, x],
    ]
    .concat()
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
    assert_eq!(second.folder(), folder.join("a%2Fb-2"));
    // The name is also that of the first run's folder.
    assert_eq!(runs.find("a/b").unwrap(), first.folder());
    assert_eq!(runs.find("模型 é").unwrap(), other.folder());
    for run in [&first, &second, &other] {
        let id = run.id().to_string();
        assert_eq!(runs.find(&id).unwrap(), run.folder());
        assert_eq!(runs.find(&id[..35]).unwrap(), run.folder());
    }
    // All three ids begin with the same time.
    let error = runs.find(&first.id().to_string()[..4]).unwrap_err();
    assert!(error.is_misuse());
    assert_says(&error, "a%2Fb-2");
    drop(first);
    runs.remove(&listed(&runs, "a%2Fb")).unwrap();
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
    let summary = || RunSummary::read(&folder).unwrap();
    assert_eq!(summary().status, RunStatus::Running);
    assert!(!folder.join("summary.json").exists());
    drop(run);
    let interrupted = summary();
    assert_eq!(interrupted.status, RunStatus::Interrupted);
    let loss = interrupted.series("train/loss").unwrap();
    // The last value is that of the greatest step, not the one that was logged last.
    assert_eq!((loss.last.0, loss.min.0, loss.max.0), (2.0, 1.0, 2.0));
    assert!(interrupted.series("train/odd").unwrap().min.0.is_nan());

    let kept = fs::read_to_string(folder.join("summary.json")).unwrap();
    let marked = kept.replace("\"interrupted\"", "\"preempted\"");
    fs::write(folder.join("summary.json"), marked).unwrap();
    assert_eq!(summary().status, RunStatus::Preempted);
    let builder = Run::builder("a").runs_folder(temporary.path());
    builder.resume(&mark).start().unwrap().finish().unwrap();
    assert_eq!(summary().status, RunStatus::Finished);
    fs::write(folder.join("summary.json"), "{").unwrap();
    assert_eq!(summary().status, RunStatus::Finished);
}

#[test]
fn what_nothing_needs_is_removed_and_nothing_else() {
    let temporary = tempfile::tempdir().unwrap();
    let run = start(temporary.path(), "a");
    let folder = run.folder().to_owned();
    run.log("train", [("loss", 1.0)], 1, None);
    run.log_image("x/kept", &image(1), 1).unwrap();
    let mark = run.mark().unwrap();
    run.log_image("x/superseded", &image(2), 2).unwrap();
    let run = run.resume(&mark).unwrap();
    run.log("train", [("loss", 1.0)], 2, None);
    run.flush().unwrap();
    fs::write(folder.join("metrics.csv.new"), "cut").unwrap();
    // These files belong to other programs.
    let foreign = ["notes.new", ".tmpnotes", "poetry.lock", "blobs/readme"];
    for name in foreign {
        fs::write(folder.join(name), "mine").unwrap();
    }
    let runs = Runs::open(temporary.path()).unwrap();
    assert_eq!(leftovers(&runs).unwrap(), [], "the run is being written");
    drop(run);
    let cut_off = temporary.path().join("removed");
    fs::create_dir(&cut_off).unwrap();
    fs::write(cut_off.join(".accel-removed"), "12345").unwrap();

    let found = leftovers(&runs).unwrap();
    assert_eq!(found.len(), 3, "{found:?}");
    assert_eq!(found.iter().map(|x| x.bytes).sum::<u64>(), 5 + 3 + 24);
    // A leftover that was not listed stays.
    fs::write(folder.join(".accel-later"), "").unwrap();
    let mut removed = remove_leftovers(&runs, &found).unwrap();
    removed.sort_by_key(|x| x.path.clone());
    assert_eq!(removed.len(), 3, "{removed:?}");
    assert!(!cut_off.exists());
    let later = leftovers(&runs).unwrap();
    assert!(later.len() == 1 && later[0].path.ends_with(".accel-later"));
    let left = RunHistory::read(&folder).unwrap().media;
    assert_eq!(left.len(), 1);
    assert_eq!(fs::read_dir(folder.join("blobs")).unwrap().count(), 2);
    for name in foreign {
        assert!(folder.join(name).exists(), "{name}");
    }
}

#[test]
fn images_stay_while_a_later_start_may_resume_behind_them() {
    let temporary = tempfile::tempdir().unwrap();
    let builder = || {
        let builder = Run::builder("a").runs_folder(temporary.path());
        builder.launch("1")
    };
    let run = builder().start().unwrap();
    for step in 1..=3 {
        run.log_image("eval/sample", &image(step), step.into())
            .unwrap();
    }
    let mark = run.mark().unwrap();
    run.checkpoint_saved(&mark);
    run.log_image("eval/sample", &image(4), 4).unwrap();
    drop(run);
    // This program dies before it has found its checkpoint.
    drop(builder().start().unwrap());

    let runs = Runs::open(temporary.path()).unwrap();
    assert_eq!(leftovers(&runs).unwrap(), []);
    let run = builder().start().unwrap().resume(&mark).unwrap();
    run.log_image("eval/sample", &image(5), 5).unwrap();
    let folder = run.folder().to_owned();
    run.finish().unwrap();
    let found = leftovers(&runs).unwrap();
    assert_eq!(remove_leftovers(&runs, &found).unwrap().len(), 1);
    let media = RunHistory::read(folder).unwrap().media;
    let steps: Vec<_> = media.iter().map(|medium| medium.step).collect();
    assert_eq!(steps, [1, 2, 3, 5]);
    for medium in media {
        let MediaContent::Image { file, .. } = medium.content else {
            panic!("only images were logged");
        };
        assert!(file.exists(), "{}", medium.step);
    }
}

#[test]
fn a_run_without_its_journal_is_not_removed() {
    let temporary = tempfile::tempdir().unwrap();
    drop(start(temporary.path(), "a"));
    let runs = Runs::open(temporary.path()).unwrap();
    let mut run = listed(&runs, "a");
    run.journal = None;
    fs::remove_file(run.folder.join("journal.jsonl")).unwrap();
    assert!(runs.remove(&run).unwrap_err().is_conflict());
    assert!(run.folder.exists());
}

#[test]
fn a_run_is_removed_with_its_own_files_alone() {
    let temporary = tempfile::tempdir().unwrap();
    let builder = Run::builder("a")
        .runs_folder(temporary.path())
        .sink(crate::CsvFile::in_run())
        .sink(crate::TensorBoard::in_run());
    let run = builder.start().unwrap();
    run.log_image("x", &image(1), 1).unwrap();
    let folder = run.folder().to_owned();
    crate::internal::SystemSampler::start(&folder, 0, std::time::Duration::from_secs(60)).unwrap();
    run.finish().unwrap();
    RunSummary::read(&folder).unwrap();
    crate::internal::deliver(&folder, &mut crate::CsvFile::in_run()).unwrap();
    // A process was killed while it took the lock of a sink.
    fs::write(folder.join("standard output.lock"), "").unwrap();
    let runs = Runs::open(temporary.path()).unwrap();
    let run = listed(&runs, "a");
    assert_eq!(
        run_files::RunFiles::list(&folder).unwrap().foreign,
        [""; 0].map(PathBuf::from)
    );

    let foreign = ["checkpoint-000001/model.bin", "tensorboard/notes", "z.txt"];
    fs::create_dir(folder.join("checkpoint-000001")).unwrap();
    for name in foreign {
        fs::write(folder.join(name), "mine").unwrap();
    }
    let kept = ["checkpoint-000001", "tensorboard/notes", "z.txt"];
    assert_eq!(
        runs.remove(&run).unwrap(),
        kept.map(|name| folder.join(name))
    );
    for name in foreign {
        assert!(folder.join(name).exists(), "{name}");
    }
    let mut left: Vec<_> = fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    left.sort();
    assert_eq!(left, ["checkpoint-000001", "tensorboard", "z.txt"]);
    assert!(runs.list().unwrap().is_empty() && leftovers(&runs).unwrap().is_empty());

    // Without files of others, the folder goes as well.
    drop(start(temporary.path(), "b"));
    assert!(runs.remove(&listed(&runs, "b")).unwrap().is_empty());
    assert!(!temporary.path().join("b").exists());
}

#[test]
fn a_run_that_continues_after_it_was_listed_is_not_removed() {
    let temporary = tempfile::tempdir().unwrap();
    let run = start(temporary.path(), "a");
    let mark = run.mark().unwrap();
    drop(run);
    let runs = Runs::open(temporary.path()).unwrap();
    let run = listed(&runs, "a");
    let builder = Run::builder("a").runs_folder(temporary.path());
    drop(builder.resume(&mark).start().unwrap());
    assert!(runs.remove(&run).unwrap_err().is_conflict());
    assert_eq!(runs.list().unwrap().len(), 1);
}

#[test]
fn artifacts_that_a_run_comes_to_need_after_they_were_found_stay() {
    let temporary = tempfile::tempdir().unwrap();
    let store = ArtifactStore::of_runs(temporary.path());
    let output = |run: &Run, content: &str| {
        let path = temporary.path().join("weights");
        fs::write(&path, content).unwrap();
        let model = Artifact::create("model").add_file(path).unwrap();
        run.mark_output(model).unwrap().version()
    };
    let runs = Runs::open(temporary.path()).unwrap();
    let old = start(temporary.path(), "old");
    assert_eq!(["1", "2", "3"].map(|x| output(&old, x)), [1, 2, 3]);
    drop(old);
    runs.remove(&listed(&runs, "old")).unwrap();
    let live = start(temporary.path(), "live");
    assert_eq!(output(&live, "4"), 4);

    let found = unneeded_artifacts(&runs, &[]).unwrap();
    let numbers: Vec<_> = found.versions.iter().map(|x| x.version).collect();
    assert_eq!(numbers, [1, 2, 3]);
    // All this happens before the user confirms.
    live.use_input("model:v2").unwrap();
    assert_eq!(["5", "6"].map(|x| output(&live, x)), [5, 6]);
    let removed = remove_artifacts(&runs, &found).unwrap();
    let numbers: Vec<_> = removed.versions.iter().map(|x| x.version).collect();
    assert_eq!(numbers, [1, 3]);
    let left = store.versions("model").unwrap();
    let left: Vec<_> = left.iter().map(|x| x.version()).collect();
    assert_eq!(left, [2, 4, 5, 6]);
    store.open("model:v2").unwrap().verify().unwrap();
    // The reference is on disk before the version can be removed.
    let used = RunHistory::read(live.folder()).unwrap().artifacts;
    assert_eq!(used.len(), 4);
}

#[test]
fn a_run_does_not_begin_among_checkpoints() {
    let temporary = tempfile::tempdir().unwrap();
    let run = start(temporary.path(), "a");
    let (folder, mark) = (run.folder().to_owned(), run.mark().unwrap());
    drop(run);
    fs::create_dir_all(temporary.path().join("b/checkpoint-000001")).unwrap();
    let begun = Run::builder("b").runs_folder(temporary.path()).start();
    let error = begun.unwrap_err();
    assert!(error.is_misuse());
    assert_says(&error, "`checkpoints/NAME`");
    fs::create_dir(folder.join("checkpoint-000001")).unwrap();
    let resumed = Run::builder("a")
        .runs_folder(temporary.path())
        .resume(&mark);
    assert!(resumed.start().unwrap_err().is_misuse());
}
