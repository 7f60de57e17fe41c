//! A run's record of the failure of its job.

use accelerator_track::Run;
use serde_json::Value;

use crate::support::{Folder, test_as_program};

/// Runs as the program of the other test: rank 0 writes a run, and rank 1 ends when it exists.
#[test]
#[ignore = "the program of another test"]
fn a_rank() {
    if std::env::var("RANK").unwrap() == "0" {
        let launch = std::env::var("ACCEL_LAUNCH_ID").unwrap();
        let run = Run::builder("a").launch(launch).start().unwrap();
        run.flush().unwrap();
        std::fs::write("begun", "").unwrap();
        std::thread::sleep(std::time::Duration::from_secs(60));
    }
    for _ in 0..6000 {
        if std::path::Path::new("begun").exists() {
            eprintln!("no data at http://me:abc@host/x");
            std::process::exit(3);
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}

#[test]
fn a_run_names_the_rank_that_failed_first() {
    let folder = Folder::new();
    let program = test_as_program("runs::failure::a_rank");
    folder.launch(&format!("-n 2 {program}")).expect(3);
    let shown = folder.ok("runs show a");
    assert!(
        shown.contains("failed") && !shown.contains("killed"),
        "{shown}"
    );
    let failure = shown
        .lines()
        .find(|line| line.starts_with("failure"))
        .unwrap();
    assert!(
        failure.contains("rank 1 (pid") && failure.contains("exit code 3"),
        "{shown}"
    );
    let report = folder.read("runs/a/failure.json");
    assert!(report.contains("http://***@host/x"), "{report}");
    let report: Value = serde_json::from_str(&report).unwrap();
    assert_eq!(
        (&report["first"]["rank"], &report["exit_code"]),
        (&1.into(), &3.into())
    );
    assert_eq!(report["ending"], "failed");
}
