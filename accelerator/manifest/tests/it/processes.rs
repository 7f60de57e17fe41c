//! Processes die while they save, and several save at once.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};

use crate::support::{content, latest, name, numbers, save};
use accelerator_manifest::{Folder, VerifyLevel};

/// Runs as a process of the other tests, and does nothing by itself.
#[test]
fn child() {
    let Ok(path) = std::env::var("CHECKPOINT_TEST_FOLDER") else {
        return;
    };
    let folder = Folder::create(path).unwrap();
    match std::env::var("CHECKPOINT_TEST_TASK").as_deref() {
        // The disk fails once, and the second attempt has the same number.
        Ok("retry") => {
            save(&folder, 1).unwrap();
            let error = save(&folder, 2).unwrap_err();
            println!("told: {error}");
            assert!(folder.unfinished().unwrap().is_empty());
            assert_eq!(save(&folder, 2).unwrap().number(), 2);
        }
        // Saves until five have succeeded.
        Ok("compete") => {
            let mut saved = 0;
            while saved < 5 {
                match save(&folder, u64::from(std::process::id())) {
                    Ok(_) => saved += 1,
                    Err(error) => assert!(error.is_conflict(), "{error}"),
                }
            }
        }
        _ => (1..=3).for_each(|step| drop(save(&folder, step).unwrap())),
    }
}

fn start(folder: &Path, task: &str, faults: &str) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "processes::child", "--nocapture"])
        .env("CHECKPOINT_TEST_FOLDER", folder)
        .env("CHECKPOINT_TEST_TASK", task)
        .env("ACCEL_FAULTS", faults)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn run(folder: &Path, task: &str, faults: &str) -> (ExitStatus, String) {
    let output = start(folder, task, faults).wait_with_output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status, String::from_utf8_lossy(&text).into_owned())
}

#[test]
fn a_process_that_dies_at_any_stage_leaves_a_good_checkpoint() {
    // Each case has the checkpoint that is found and the one that `latest` points to.
    for (stage, found, hint) in [
        ("begin", 1, 1),
        ("data", 1, 1),
        ("written", 1, 1),
        ("renamed", 2, 1),
    ] {
        for action in ["kill", "exit 7", "segv", "panic"] {
            let temporary = tempfile::tempdir().unwrap();
            let faults = format!("rank=0 save=2 {stage} {action}");
            let (status, text) = run(temporary.path(), "", &faults);
            let expected = match action {
                "kill" => status.signal() == Some(9),
                "segv" => status.signal() == Some(11),
                "exit 7" => status.code() == Some(7),
                _ => status.code() == Some(101) && text.contains("injected fault"),
            };
            assert!(expected, "{faults}: {status}\n{text}");

            let folder = Folder::open(temporary.path()).unwrap();
            assert_eq!(latest(&folder), (Some(found), 0), "{faults}");
            assert_eq!(folder.latest_hint(), Some(hint), "{faults}");
            // A panic unwinds and removes its draft.
            let left = usize::from(action != "panic" && matches!(stage, "data" | "written"));
            let unfinished = folder.unfinished().unwrap();
            assert_eq!(unfinished.len(), left, "{faults}");
            if stage == "data" && left == 1 {
                let half = std::fs::read(unfinished[0].join("model.safetensors")).unwrap();
                let whole = content("model.safetensors", 2);
                assert!(!half.is_empty() && half.len() < whole.len() && whole.starts_with(&half));
            }

            // The next process cleans up and continues.
            assert_eq!(save(&folder, 9).unwrap().number(), found + 1);
            assert!(folder.unfinished().unwrap().is_empty(), "{faults}");
            assert_eq!(folder.latest_hint(), Some(found + 1));
        }
    }
}

/// Needs namespaces, and does nothing without them.
#[cfg(target_os = "linux")]
#[test]
fn a_restarted_container_sweeps_what_it_left() {
    // The shell is process 1 of the container, which cannot be killed from within.
    let contained = |script: &str| {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--pid", "--fork", "--uts"]);
        command.args(["sh", "-c", script]);
        command
    };
    if !contained("exit 0").status().is_ok_and(|x| x.success()) {
        eprintln!("skipped: no namespaces can be made");
        return;
    }
    let temporary = tempfile::tempdir().unwrap();
    let folder = Folder::open(temporary.path()).unwrap();
    let mut writer = contained("\"$0\" --exact processes::child --nocapture; exit 0");
    writer
        .arg(std::env::current_exe().unwrap())
        .env("CHECKPOINT_TEST_FOLDER", temporary.path())
        .env("CHECKPOINT_TEST_TASK", "")
        .env("ACCEL_FAULTS", "rank=0 save=2 data kill");
    let output = writer.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(folder.unfinished().unwrap().len(), 1, "{output:?}");
    save(&folder, 9).unwrap();
    assert!(folder.unfinished().unwrap().is_empty());
}

#[test]
fn a_disk_that_fails_is_told_and_harms_nothing() {
    for (action, words) in [
        ("disk-full", "make room"),
        ("fail-write", "the write failed"),
    ] {
        for stage in ["begin", "data", "written"] {
            let temporary = tempfile::tempdir().unwrap();
            let (status, text) = run(
                temporary.path(),
                "retry",
                &format!("rank=0 save=2 {stage} {action}"),
            );
            assert!(
                status.success() && text.contains(words),
                "{stage} {action}: {text}"
            );
            let folder = Folder::open(temporary.path()).unwrap();
            assert_eq!(numbers(&folder), [1, 2]);
            assert!(
                folder
                    .checkpoints()
                    .unwrap()
                    .iter()
                    .all(|x| x.verify(VerifyLevel::Hashes).is_good())
            );
        }
    }
}

#[test]
fn processes_that_save_at_once_never_mix() {
    let temporary = tempfile::tempdir().unwrap();
    let children: Vec<_> = (0..3)
        .map(|_| start(temporary.path(), "compete", ""))
        .collect();
    for child in children {
        let output = child.wait_with_output().unwrap();
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
    let folder = Folder::open(temporary.path()).unwrap();
    assert_eq!(numbers(&folder), (1..=15).collect::<Vec<_>>());
    for checkpoint in folder.checkpoints().unwrap() {
        let report = checkpoint.verify(VerifyLevel::Hashes);
        assert!(report.is_good(), "{report}");
        let writer = checkpoint.manifest().unwrap().metadata.step;
        let model = checkpoint.read(&name("model.safetensors")).unwrap();
        assert_eq!(model, content("model.safetensors", writer));
    }
    assert!(folder.unfinished().unwrap().is_empty());
}
