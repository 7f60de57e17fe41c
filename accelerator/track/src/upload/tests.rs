use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use super::place::Place;
use crate::artifact::{Artifact, ArtifactStore, OnConflict, Retention, source};
use crate::error::Result;
use crate::history::RunHistory;
use crate::journal::{JOURNAL, JournalWriter, RunLock, now_ms};
use crate::record::{ArtifactRole, EndStatus, Record};
use crate::run_id::RunId;
use crate::{MakeFolder, UploadOutcome, UploadReport, upload};

/// A folder of runs, with some that made an artifact.
struct Fixture {
    temporary: tempfile::TempDir,
}

impl Fixture {
    fn new() -> Self {
        let temporary = tempfile::tempdir().unwrap();
        Self { temporary }
    }

    fn at(&self, path: &str) -> PathBuf {
        self.temporary.path().join(path)
    }

    fn store(&self, runs: &str) -> ArtifactStore {
        ArtifactStore::of_runs(self.at(runs))
    }

    /// Makes a run with 20 files and an artifact, in a folder of runs.
    fn run(&self, runs: &str, name: &str) -> PathBuf {
        let folder = self.at(runs).join(name);
        fs::create_dir_all(folder.join("tensorboard")).unwrap();
        let id = RunId::new();
        for file in 0..20_u32 {
            let content = format!("{id} {file}").repeat(500);
            let name = format!("tensorboard/events.out.tfevents.{file:010}.1.{id}");
            fs::write(folder.join(name), content).unwrap();
        }
        fs::write(folder.join("lock"), "process 1").unwrap();
        let file = self.at("model");
        fs::write(&file, id.to_string()).unwrap();
        let model = Artifact::create("model")
            .produced_by(id)
            .alias("best")
            .add_file(&file)
            .unwrap();
        let stored = self.store(runs).commit(&model).unwrap();
        let mut journal = JournalWriter::create(&folder.join(JOURNAL)).unwrap();
        let (version, run) = (1, id);
        journal.append(
            now_ms(),
            Record::Head {
                version,
                run,
                name: name.to_owned(),
            },
        );
        journal.append(
            now_ms(),
            Record::Artifact {
                role: ArtifactRole::Output,
                name: stored.name().to_owned(),
                version: stored.version(),
                digest: stored.digest().to_string(),
            },
        );
        journal.flush().unwrap();
        self.end(&folder);
        folder
    }

    fn end(&self, folder: &Path) {
        let mut journal = JournalWriter::open(&folder.join(JOURNAL), |_| {}).unwrap();
        let (status, failure) = (EndStatus::Finished, None);
        journal.append(now_ms(), Record::End { status, failure });
        journal.flush().unwrap();
    }

    fn upload(&self, run: &Path, on_conflict: OnConflict) -> Result<UploadReport> {
        upload(run, self.at("shared"), MakeFolder::Yes, on_conflict)
    }
}

/// The files of a run, but those that belong to where it lies.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let files = source::files_below(folder).unwrap().into_iter();
    let files = files.filter(|(name, _)| !super::is_kept_back(name));
    files
        .map(|(name, path)| (name, fs::read(path).unwrap()))
        .collect()
}

fn names_in(folder: &Path) -> Vec<String> {
    let names = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.collect();
    names.sort();
    names
}

#[test]
fn a_run_comes_with_its_artifacts_and_once() {
    let fixture = Fixture::new();
    let run = fixture.run("runs", "mnist");
    let report = fixture.upload(&run, OnConflict::Error).unwrap();
    assert_eq!((report.copied_files, report.present_files), (21, 0));
    assert_eq!(files(&report.folder), files(&run));
    assert_eq!(names_in(&fixture.at("shared")), [".artifacts", "mnist"]);
    assert_eq!(report.artifacts[0].stored_as, "model:v1");
    let model = fixture.store("shared").open("model:best").unwrap();
    model.verify().unwrap();
    assert_eq!(model.run(), Some(RunHistory::read(&run).unwrap().id));

    let again = fixture.upload(&run, OnConflict::Error).unwrap();
    assert_eq!(
        (again.copied_files, again.present_files, again.copied_bytes),
        (0, 21, 0)
    );

    // Damage is mended, files that the run does not have any more go, and what others put there stays.
    let events = names_in(&run.join("tensorboard"));
    let [third, fourth] = [3, 4].map(|at| format!("tensorboard/{}", events[at]));
    fs::write(report.folder.join(third), "damaged").unwrap();
    fs::write(report.folder.join("notes.txt"), "good").unwrap();
    fs::remove_file(run.join(fourth)).unwrap();
    fixture.end(&run);
    let third = fixture.upload(&run, OnConflict::Error).unwrap();
    assert_eq!((third.copied_files, third.present_files), (2, 18));
    let mut there = files(&report.folder);
    assert!(there.remove("notes.txt").is_some());
    assert_eq!(there, files(&run));
}

#[test]
fn another_run_of_the_name_is_resolved() {
    let fixture = Fixture::new();
    let (first, second) = (fixture.run("runs", "mnist"), fixture.run("others", "mnist"));
    fixture.upload(&first, OnConflict::Error).unwrap();
    assert!(
        fixture
            .upload(&second, OnConflict::Error)
            .unwrap_err()
            .is_conflict()
    );
    let skipped = fixture.upload(&second, OnConflict::Skip).unwrap();
    assert_eq!(
        (skipped.outcome, skipped.copied_files),
        (UploadOutcome::Skipped, 0)
    );
    assert_eq!(files(&skipped.folder), files(&first));

    for copied in [21, 0] {
        let kept = fixture.upload(&second, OnConflict::NewVersion).unwrap();
        assert_eq!(
            (kept.folder.file_name().unwrap().to_str(), kept.copied_files),
            (Some("mnist-2"), copied)
        );
        assert_eq!(kept.artifacts[0].stored_as, "model:v2");
        assert_eq!(files(&kept.folder), files(&second));
    }
    let third = fixture.run("thirds", "mnist");
    let lock = RunLock::take(&fixture.at("shared/mnist")).unwrap();
    assert!(
        fixture
            .upload(&third, OnConflict::Replace)
            .unwrap_err()
            .is_conflict()
    );
    drop(lock);
    let notes = fixture.at("shared/mnist/notes.txt");
    fs::write(&notes, "mine").unwrap();
    let error = fixture.upload(&third, OnConflict::Replace).unwrap_err();
    assert!(
        error.is_conflict() && error.to_string().contains("notes.txt"),
        "{error}"
    );
    assert_eq!(files(&fixture.at("shared/mnist")).len(), 22);
    fs::remove_file(&notes).unwrap();
    let replaced = fixture.upload(&third, OnConflict::Replace).unwrap();
    assert_eq!(replaced.folder, fixture.at("shared/mnist"));
    assert_eq!(files(&replaced.folder), files(&third));
    let model = fixture.store("shared").open("model:v1").unwrap();
    assert_eq!(model.run(), Some(RunHistory::read(&third).unwrap().id));
    assert_eq!(
        names_in(&fixture.at("shared")),
        [".artifacts", "mnist", "mnist-2"]
    );
}

#[test]
fn what_an_upload_brought_is_replaced_with_its_run() {
    let fixture = Fixture::new();
    let first = fixture.run("runs", "mnist");
    fs::create_dir(first.join("plots")).unwrap();
    for name in ["notes.txt", "plots/loss.svg"] {
        fs::write(first.join(name), "mine").unwrap();
    }
    fixture.upload(&first, OnConflict::Error).unwrap();
    let second = fixture.run("others", "mnist");
    let late = fixture.at("shared/mnist/plots/late.svg");
    fs::write(&late, "another's").unwrap();
    let error = fixture.upload(&second, OnConflict::Replace).unwrap_err();
    assert!(error.is_conflict() && late.exists(), "{error}");
    fs::remove_file(late).unwrap();
    let replaced = fixture.upload(&second, OnConflict::Replace).unwrap();
    assert_eq!(replaced.folder, fixture.at("shared/mnist"));
    assert_eq!(files(&replaced.folder), files(&second));
}

#[test]
fn the_number_of_a_version_that_was_removed_gets_nothing_else() {
    let fixture = Fixture::new();
    let (first, second) = (fixture.run("runs", "a"), fixture.run("others", "b"));
    fixture.upload(&first, OnConflict::Error).unwrap();
    let store = fixture.store("shared");
    store.remove_alias("model", "best").unwrap();
    store.prune(&Retention::keep_last(0)).unwrap();
    assert!(store.open("model:v1").unwrap_err().is_not_found());

    let error = fixture.upload(&second, OnConflict::Error).unwrap_err();
    assert!(error.is_conflict(), "{error}");
    let stored = |run: &Path| {
        let report = fixture.upload(run, OnConflict::NewVersion).unwrap();
        report.artifacts[0].stored_as.clone()
    };
    assert_eq!(stored(&second), "model:v2");
    assert_eq!(stored(&second), "model:v2", "it is there already");
    // The same version as before may come back.
    assert_eq!(stored(&first), "model:v1");
}

#[test]
fn what_cannot_be_uploaded_is_told() {
    let fixture = Fixture::new();
    let run = fixture.run("runs", "mnist");
    let to = |destination: &str| {
        upload(
            &run,
            fixture.at(destination),
            MakeFolder::No,
            OnConflict::Error,
        )
    };
    assert!(to("missing").unwrap_err().is_not_found() && !fixture.at("missing").exists());
    assert!(to("runs").unwrap_err().is_misuse());
    assert!(
        fixture
            .upload(&fixture.at("runs/none"), OnConflict::Error)
            .unwrap_err()
            .is_not_found()
    );
    let lock = RunLock::take(&run).unwrap();
    assert!(
        fixture
            .upload(&run, OnConflict::Error)
            .unwrap_err()
            .is_conflict()
    );
    drop(lock);
    let uploading = super::lock(&run).unwrap();
    assert!(
        fixture
            .upload(&run, OnConflict::Error)
            .unwrap_err()
            .is_conflict()
    );
    drop(uploading);
    fixture
        .store("runs")
        .prune(&Retention::keep_last(0))
        .unwrap();
    let report = fixture.upload(&run, OnConflict::Error).unwrap();
    assert_eq!(
        (
            report.artifacts.len(),
            report.missing[0].to_string().as_str()
        ),
        (0, "model:v1")
    );
    fs::create_dir(fixture.at("notes")).unwrap();
    fs::write(fixture.at("notes/mnist"), "").unwrap();
    assert!(to("notes").unwrap_err().is_conflict());
    fs::create_dir_all(fixture.at("shared/other/data")).unwrap();
    let other = fixture.run("runs", "other");
    let error = fixture.upload(&other, OnConflict::Replace).unwrap_err();
    assert!(error.is_conflict() && fixture.at("shared/other/data").exists());
}

#[test]
fn a_run_that_came_meanwhile_stays() {
    let fixture = Fixture::new();
    let shared = fixture.at("shared");
    let place = Place::choose(&shared, "mnist", RunId::new(), OnConflict::NewVersion)
        .unwrap()
        .unwrap();
    fs::create_dir_all(&place.work).unwrap();
    let run = fixture.run("runs", "mnist");
    fixture.upload(&run, OnConflict::Error).unwrap();
    assert!(place.publish().unwrap_err().is_conflict());
    assert_eq!(files(&place.target), files(&run));
}

/// Not a test of its own: what the process of the next test runs.
#[test]
fn child() {
    if let Ok(root) = std::env::var("TRACK_TEST_UPLOAD") {
        let root = Path::new(&root);
        upload(
            root.join("runs/mnist"),
            root.join("shared"),
            MakeFolder::Yes,
            OnConflict::Replace,
        )
        .unwrap();
    }
}

#[test]
fn an_upload_that_is_killed_goes_on() {
    let fixture = Fixture::new();
    let run = fixture.run("runs", "mnist");
    let other = files(&fixture.run("others", "mnist"));
    let mine = files(&run);
    let mut interrupted = 0;
    for round in 0_u64..25 {
        let _ = fs::remove_dir_all(fixture.at("shared"));
        // Every other time in the place of another run.
        let is_replaced = round % 2 == 1;
        if is_replaced {
            fixture
                .upload(&fixture.at("others/mnist"), OnConflict::Error)
                .unwrap();
        }
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "upload::tests::child", "--nocapture"])
            .env("TRACK_TEST_UPLOAD", fixture.temporary.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(4 + round * 3));
        child.kill().unwrap();
        child.wait().unwrap();

        let there = fixture.at("shared/mnist");
        if there.exists() {
            let there = files(&there);
            assert!(
                there == mine || (is_replaced && there == other),
                "round {round}"
            );
        }
        let report = fixture.upload(&run, OnConflict::Replace).unwrap();
        assert_eq!(files(&report.folder), mine);
        assert_eq!(report.copied_files + report.present_files, mine.len());
        interrupted += usize::from((1..mine.len()).contains(&report.copied_files));
        assert_eq!(names_in(&fixture.at("shared")), [".artifacts", "mnist"]);
        assert!(
            !names_in(&report.folder)
                .iter()
                .any(|name| name.starts_with('.'))
        );
        fixture
            .store("shared")
            .open("model:v1")
            .unwrap()
            .verify()
            .unwrap();
    }
    eprintln!("{interrupted} uploads were killed amid their files");
}

#[test]
fn what_belongs_to_a_place_is_not_uploaded() {
    let fixture = Fixture::new();
    let run = fixture.run("runs", "mnist");
    for name in ["TensorBoard.lock", "summary.json"] {
        fs::write(run.join(name), "{}").unwrap();
    }
    fs::write(run.join("tensorboard/summary.json"), "{}").unwrap();
    let report = fixture.upload(&run, OnConflict::Error).unwrap();
    let there = names_in(&report.folder);
    assert!(
        !there
            .iter()
            .any(|name| name.ends_with("lock") || name == "summary.json"),
        "{there:?}"
    );
    assert!(report.folder.join("tensorboard/summary.json").exists());
}
