//! Tests of `export`, `report`, `upload` and `sync`.

use std::fs;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::Path;
use std::process::Command;

use super::{builder, finished, json_of, resumed};
use crate::support::{Folder, Run};

#[test]
fn export_writes_what_counts() {
    let folder = Folder::new();
    resumed(&folder, "a");
    let table = folder.ok("runs export a");
    let rows: Vec<_> = table.lines().collect();
    assert_eq!(rows[0], "n,ms,step,epoch,key,value,count");
    assert_eq!(rows.len(), 4);
    assert!(rows[3].ends_with(",3,,train/loss,0.25,"), "{table}");
    folder.launch("runs export a --output a.csv").expect(0);
    assert_eq!(folder.read("a.csv"), table);
    assert!(!folder.path().join("a.csv.new").exists());

    folder
        .launch("runs export a --format jsonl -o a.jsonl")
        .expect(0);
    let text = folder.read("a.jsonl");
    let points: Vec<_> = text.lines().map(json_of).collect();
    assert_eq!(points.len(), 3);
    assert_eq!(points[2]["key"], "train/loss");
    assert_eq!(
        (&points[2]["step"], &points[2]["value"]),
        (&3.into(), &0.25.into())
    );

    let run = folder.json("runs export a --format json");
    assert_eq!(run["status"], "failed");
    assert_eq!(run["series"][0]["points"].as_array().unwrap().len(), 3);
    assert_eq!(run["checkpoints"][0], 2);

    folder
        .launch("runs export a --format tensorboard -o events")
        .expect(0);
    assert!(has_events(&folder, "events"));
    folder.refuses("runs export a --format tensorboard", "--output");
    folder.refuses("runs export a -o no/such/a.csv", "no/such/a.csv");
}

#[test]
fn what_is_no_number_is_valid_json() {
    let folder = Folder::new();
    finished(&folder, "a", 0.1);
    for format in ["json", "jsonl"] {
        let text = folder.ok(&format!("runs export a --format {format}"));
        assert_eq!(text.matches("\"value\":\"NaN\"").count(), 3, "{text}");
        text.lines().for_each(|line| drop(json_of(line)));
    }
}

#[test]
fn sync_delivers_what_is_missing() {
    let folder = Folder::new();
    finished(&folder, "a", 0.1);
    resumed(&folder, "b");
    let text = folder.ok("runs sync --all --to csv --dry-run");
    assert_eq!(
        text,
        "a: would be delivered to metrics.csv\nb: would be delivered to metrics.csv\n"
    );
    assert!(!folder.path().join("runs/a/metrics.csv").exists());
    folder.launch("runs sync --all --to csv").expect(0);
    assert_eq!(folder.read("runs/a/metrics.csv").lines().count(), 8);
    assert_eq!(folder.read("runs/b/metrics.csv").lines().count(), 4);
    folder.launch("runs sync b --to tensorboard").expect(0);
    folder.launch("runs sync a --to tensorboard:logs").expect(0);
    assert!(has_events(&folder, "runs/b/tensorboard") && has_events(&folder, "logs/a"));

    // A run that cannot be delivered does not block the others.
    folder.write("runs/empty/journal.jsonl", "");
    fs::remove_file(folder.path().join("runs/b/metrics.csv")).unwrap();
    folder
        .launch("runs sync --all --to csv")
        .expect(1)
        .says("empty: not delivered to metrics.csv")
        .says("not all runs were delivered");
    assert!(folder.path().join("runs/b/metrics.csv").exists());

    for line in [
        "runs sync a",
        "runs sync --to csv",
        "runs sync a --all --to csv",
        "runs sync a --to somewhere",
    ] {
        folder.launch(line).expect(2);
    }
}

#[test]
fn a_folder_that_cannot_be_written_can_be_read() {
    let folder = Folder::new();
    let path = finished(&folder, "a", 0.1);
    let run = builder(&folder, "b").start().unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o555)).unwrap();
    let is_root = fs::write(path.join("probe"), "").is_ok();
    folder.launch("runs list").expect(0);
    folder.launch("runs show a").expect(0);
    let synced = folder.launch("runs sync a --to csv");
    // Nothing is read-only for root.
    if !is_root {
        synced.expect(1).says("runs/a");
    }
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    drop(run);
}

#[test]
fn a_report_is_one_file() {
    let folder = Folder::new();
    finished(&folder, "a", 0.1);
    resumed(&folder, "b");
    let text = folder.ok("runs report a b -o both.html");
    assert_eq!(text, "both.html: the report of 2 runs\n");
    let page = folder.read("both.html");
    assert!(page.contains("train/loss") && page.contains("model.layers"));
    assert!(!page.contains("src=\"http") && !page.contains("href=\"http"));
    folder.refuses("runs report a -o no/such/a.html", "no/such/a.html");
}

#[test]
fn a_report_that_cannot_be_written_leaves_what_was_there() {
    let folder = Folder::new();
    finished(&folder, "a", 0.1);
    folder.write("old.html", "old");
    for file in ["old.html", "new.html"] {
        // A file cannot be longer than a block.
        let line = "trap '' XFSZ; ulimit -f 1; exec \"$0\" \"$@\"";
        let mut command = folder.launcher_by("sh", &["-c", line]);
        command.args(["runs", "report", "a", "-o", file]);
        Run::start(command).end().expect(1).says(file);
    }
    assert_eq!(folder.read("old.html"), "old");
    let files = fs::read_dir(folder.path()).unwrap();
    let mut names: Vec<_> = files.map(|x| x.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["old.html", "runs"]);
}

#[test]
fn what_is_no_file_is_written_to_and_files_are_as_others() {
    let folder = Folder::new();
    finished(&folder, "a", 0.1);
    let pipe = folder.path().join("pipe");
    let made = Command::new("mkfifo").arg(&pipe).status().unwrap();
    assert!(made.success());
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode();
    let usual = mode(&folder.write("usual", ""));
    for (line, beginning) in [
        ("runs report a -o", "<!DOCTYPE"),
        ("runs export a --format json -o", "{"),
    ] {
        let mut reader = Command::new("sh");
        reader.args(["-c", "exec cat pipe > copy"]);
        let mut reader = reader.current_dir(folder.path()).spawn().unwrap();
        folder.launch(&format!("{line} pipe")).expect(0);
        let is_pipe = fs::metadata(&pipe).unwrap().file_type().is_fifo();
        if !is_pipe {
            reader.kill().unwrap();
        }
        assert!(reader.wait().unwrap().success() && is_pipe, "{line:?}");
        assert!(folder.read("copy").starts_with(beginning), "{line:?}");
        folder.launch(&format!("{line} file")).expect(0);
        assert_eq!(mode(&folder.path().join("file")), usual, "{line:?}");
    }
}

#[test]
fn an_upload_is_a_run_of_the_other_folder() {
    let folder = Folder::new();
    finished(&folder, "a", 0.1);
    folder.refuses("runs upload a archive/runs", "archive/runs");
    fs::create_dir_all(folder.path().join("archive/runs")).unwrap();
    folder.launch("runs upload a archive/runs").expect(0);
    folder
        .launch("runs upload a archive/runs")
        .expect(0)
        .prints("archive/runs/a, 0 B copied");
    folder.launch("runs show a --runs archive/runs").expect(0);
}

#[test]
fn a_server_that_is_not_there_is_told() {
    let folder = Folder::new();
    finished(&folder, "a", 0.1);
    let nobody = crate::ports::RefusingAddress::take();
    let place = format!("mlflow:http://{}", nobody.address());
    folder
        .launch(&format!("runs sync a --to {place}"))
        .expect(1)
        .says("a: not delivered to MLflow at http://127.0.0.1:");
    finished(&folder, "b", 0.1);
    finished(&folder, "c", 0.1);
    let ended = folder
        .launch(&format!("runs sync --all --to {place}"))
        .expect(1)
        .says("a: not delivered to MLflow")
        .says("2 more runs were not tried: give the same command again when the server answers");
    assert_eq!(ended.text().matches("MLflow at").count(), 0);
    folder.refuses(
        "runs sync a --to mlflow:somewhere",
        "expected the address of an MLflow server",
    );
    // The launcher of tests has no such variable.
    folder.refuses("runs sync a --to mlflow", "MLFLOW_TRACKING_URI");
}

fn has_events(folder: &Folder, path: &str) -> bool {
    let files = fs::read_dir(folder.path().join(path)).unwrap();
    let mut names = files.map(|file| file.unwrap().file_name().into_string().unwrap());
    names.any(|name| name.contains("tfevents"))
}
