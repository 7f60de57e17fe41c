//! Searches whose trials are groups of ranks, or trainers.

use std::fs;
use std::path::Path;
use std::process::Command;

use accelerator_tests::processes::{example, launcher, run_alone};

/// Returns the last accuracy and loss of each trial, and its iterations.
fn search(folder: &Path, args: &[&str]) -> Vec<Vec<String>> {
    // The search starts trials of several ranks with it.
    let path = launcher().parent().unwrap().display().to_string();
    let path = format!("{path}:{}", std::env::var("PATH").unwrap_or_default());
    let mut command = Command::new(example("tune_mnist"));
    command
        .args([
            "--num-samples",
            "4",
            "--max-iterations",
            "4",
            "--limit",
            "128",
        ])
        .args(["--reduction-factor", "2", "--out"])
        .arg(folder)
        .args(args)
        .env("PATH", path);
    let ended = run_alone(command);
    assert!(!ended.succeeded().contains("ERROR"), "{}", ended.stdout);
    let csv = fs::read_to_string(folder.join("result.csv")).unwrap();
    let mut lines = csv
        .lines()
        .map(|line| line.split(',').map(str::to_owned).collect::<Vec<_>>());
    let header = lines.next().unwrap();
    let wanted = ["mean_accuracy", "mean_loss", "training_iteration"];
    let places = wanted.map(|name| header.iter().position(|column| column == name).unwrap());
    lines
        .map(|row| places.map(|place| row[place].clone()).to_vec())
        .collect()
}

#[test]
fn trials_of_two_ranks_are_paused_and_promoted_and_come_to_the_bits_of_undisturbed_ones() {
    let folder = tempfile::tempdir().unwrap();
    let undisturbed = search(
        &folder.path().join("fifo"),
        &["--processes", "2", "--scheduler", "fifo", "--slots", "2"],
    );
    let promoted: Vec<_> = ["1", "2"]
        .into_iter()
        .map(|slots| {
            let folder = folder.path().join(format!("promotion {slots}"));
            let args = [
                "--processes",
                "2",
                "--scheduler",
                "asha-promotion",
                "--ordered",
                "2",
                "--slots",
                slots,
            ];
            let ends = search(&folder, &args);
            (ends, fs::read(folder.join("decisions.jsonl")).unwrap())
        })
        .collect();
    assert_eq!(promoted[0], promoted[1]);
    let (ends, decisions) = &promoted[0];
    let decisions = String::from_utf8_lossy(decisions);
    assert!(decisions.contains("\"decision\":\"resume\""), "{decisions}");
    let finished: Vec<_> = ends
        .iter()
        .zip(&undisturbed)
        .filter(|(end, _)| end[2] == "4")
        .collect();
    assert!(!finished.is_empty());
    for (end, undisturbed) in finished {
        assert_eq!(end, undisturbed);
    }
}

#[test]
fn trainers_and_operators_are_trials_that_pause_and_go_on_with_the_same_bits() {
    for trials in ["operators", "trainers"] {
        let folder = tempfile::tempdir().unwrap();
        let ends = |scheduler: &str| {
            let folder = folder.path().join(scheduler);
            let mut command = Command::new(env!("CARGO_BIN_EXE_rank"));
            command.args(["search", trials, scheduler]).arg(&folder);
            run_alone(command).succeeded();
            let decisions = fs::read_to_string(folder.join("decisions.jsonl")).unwrap();
            (last_metrics(&folder.join("ends.csv")), decisions)
        };
        let ((undisturbed, _), (promoted, decisions)) = (ends("fifo"), ends("promotion"));
        assert_eq!(undisturbed.len(), 4, "{trials}");
        assert!(decisions.contains("\"decision\":\"resume\""), "{decisions}");
        assert!(
            !promoted.is_empty() && promoted.len() < 4,
            "{trials}: {promoted:?}"
        );
        for end in promoted {
            let epoch = end.iter().find(|(name, _)| name == "epoch");
            let epoch = epoch.map(|(_, epoch)| epoch.parse());
            assert_eq!(epoch, Some(Ok(4.0)), "{trials}");
            assert!(
                undisturbed.contains(&end),
                "{trials}: {end:?} of {undisturbed:?}"
            );
        }
    }
}

/// Returns the metrics of the trials that trained to the end, without times.
fn last_metrics(csv: &Path) -> Vec<Vec<(String, String)>> {
    let text = fs::read_to_string(csv).unwrap();
    let mut lines = text
        .lines()
        .map(|line| line.split(',').map(str::to_owned).collect::<Vec<_>>());
    let header = lines.next().unwrap();
    let wanted = |name: &str| {
        ["config/lr", "epoch", "training_iteration"].contains(&name)
            || name.ends_with("loss")
            || name.ends_with("accuracy")
    };
    let row = |row: Vec<String>| -> Vec<_> {
        let fields = header.iter().cloned().zip(row);
        fields.filter(|(name, _)| wanted(name)).collect()
    };
    let ended = |row: &Vec<(String, String)>| {
        row.contains(&("training_iteration".to_owned(), "4".to_owned()))
    };
    lines.map(row).filter(ended).collect()
}
