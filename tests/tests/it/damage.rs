//! A checkpoint with a truncated, changed or missing file is detected, named and kept; the one before it is used.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use accelerator_tests::processes::{Ended, launcher, run, run_ranks};
use accelerator_tests::resumable::{OptimizerKind, TrainingJob, TrainingResult};

#[derive(Clone, Copy, Debug)]
enum Damage {
    Cut,
    Deleted,
    Flipped,
}

#[test]
fn every_file_of_a_checkpoint_is_missed_when_damaged_and_the_one_before_is_used() {
    let folder = tempfile::tempdir().unwrap();
    let whole = folder.path().join("whole");
    let job = |checkpoints: &Path| TrainingJob {
        checkpoints: checkpoints.to_owned(),
        result: folder.path().join("result.json"),
        epochs: 1,
        samples: 64,
        batch_size: 8,
        save_every: 1,
        dropout: 0.2,
        optimizer: OptimizerKind::AdamW,
        pause_ms: 0,
        ..TrainingJob::default()
    };
    train(&job(&whole)).succeeded();
    let first: TrainingResult =
        serde_json::from_slice(&fs::read(folder.path().join("result.json")).unwrap()).unwrap();
    let newest = newest(&whole);
    let name = newest.file_name().unwrap().to_str().unwrap().to_owned();
    let files = files(&newest);
    assert!(files.len() >= 4, "{files:?}");

    for (number, file) in files.iter().enumerate() {
        for damage in [Damage::Cut, Damage::Deleted, Damage::Flipped] {
            let copy = folder.path().join(format!("copy-{number}-{damage:?}"));
            copy_all(&whole, &copy);
            let target = copy.join(&name).join(file);
            harm(&target, damage, number as u64);
            let before = listing(&copy);

            let verdict = verify(&copy);
            let shown = format!("{}{}", verdict.stdout, verdict.stderr);
            let file = file.to_str().unwrap();
            assert_eq!(verdict.status.code(), Some(1), "{file} {damage:?}: {shown}");
            assert!(
                shown.contains(file) && shown.contains(&name),
                "{file} {damage:?}: {shown}"
            );
            assert_eq!(listing(&copy), before, "verifying changed the folder");

            // The resume uses the checkpoint before, and reaches the same result.
            let ended = train(&job(&copy));
            ended.succeeded();
            let shown = format!("{}{}", ended.stdout, ended.stderr);
            assert!(
                shown.contains(file),
                "{file} {damage:?} was not named: {shown}"
            );
            assert!(copy.join(&name).is_dir(), "{file} {damage:?}: deleted");
            let result = fs::read(folder.path().join("result.json")).unwrap();
            let result: TrainingResult = serde_json::from_slice(&result).unwrap();
            assert_eq!(result.parameters, first.parameters, "{file} {damage:?}");
            fs::remove_dir_all(&copy).unwrap();
        }
    }
}

/// Trains on a single rank; warnings go to its standard error.
fn train(job: &TrainingJob) -> Ended {
    let args = ["train-resumable", &serde_json::to_string(job).unwrap()];
    run_ranks(Path::new(env!("CARGO_BIN_EXE_rank")), &args, 1, |_, _| {}).remove(0)
}

fn verify(folder: &Path) -> Ended {
    let mut command = Command::new(launcher());
    command.args(["checkpoint", "verify"]).arg(folder);
    run(command)
}

fn harm(file: &Path, damage: Damage, seed: u64) {
    let mut bytes = fs::read(file).unwrap();
    let at = (accelerator::plan::mix(&[seed, bytes.len() as u64]) % bytes.len() as u64) as usize;
    match damage {
        Damage::Deleted => return fs::remove_file(file).unwrap(),
        Damage::Cut => bytes.truncate(at),
        Damage::Flipped => bytes[at] ^= 1 << (seed % 8),
    }
    fs::write(file, bytes).unwrap();
}

fn newest(folder: &Path) -> PathBuf {
    let entries = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    entries.filter(|path| path.is_dir()).max().unwrap()
}

/// Returns the files below a folder, by their paths in it.
fn files(folder: &Path) -> Vec<PathBuf> {
    listing(folder).into_iter().map(|(path, _)| path).collect()
}

fn listing(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => folders.push(path),
                false => {
                    let bytes = fs::read(&path).unwrap();
                    found.push((path.strip_prefix(folder).unwrap().to_owned(), bytes));
                }
            }
        }
    }
    found.sort();
    found
}

fn copy_all(from: &Path, to: &Path) {
    for (path, bytes) in listing(from) {
        let target = to.join(path);
        fs::create_dir_all(target.parent().unwrap()).unwrap();
        fs::write(target, bytes).unwrap();
    }
}
