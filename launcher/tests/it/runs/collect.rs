//! Tests of `gc`.

use std::io::{Read, Write};

use accelerator_track::{Artifact, ArtifactStore, Run, RunSummary};

use super::{builder, finished};
use crate::support::{Folder, wait_until};
use crate::terminal::open_terminal;

fn left(folder: &Folder) -> Vec<String> {
    let entries = std::fs::read_dir(folder.path().join("runs")).unwrap();
    let mut names: Vec<_> = entries
        .map(|x| x.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn gc_removes_what_was_selected_and_nothing_else() {
    let folder = Folder::new();
    finished(&folder, "a", 0.1);
    finished(&folder, "b", 0.1);
    drop(builder(&folder, "killed").start().unwrap());
    drop(builder(&folder, "kept").tag("keep", "").start().unwrap());
    let running = builder(&folder, "running").start().unwrap();
    folder.write("runs/damaged/journal.jsonl", "");
    folder.write("runs/a/metrics.csv.new", "12345");
    let all = left(&folder);

    // Without a selection, only leftovers are removed.
    assert_eq!(
        folder.launch("runs gc --dry-run").expect(0).lines(),
        ["leftover runs/a/metrics.csv.new 5 B", "would free 5 B"]
    );
    folder.refuses("runs gc --status interrupted", "add --yes");
    assert_eq!(left(&folder), all);
    folder.launch("runs gc --yes").expect(0);
    assert!(!folder.path().join("runs/a/metrics.csv.new").exists());
    assert_eq!(left(&folder), all);
    let text = folder.ok("runs gc -y");
    assert_eq!(text, "nothing to remove\n");

    let text = folder
        .launch("runs gc --status interrupted --yes")
        .expect(0)
        .says("damaged is left alone")
        .lines();
    assert!(text[0].starts_with("run killed interrupted "), "{text:?}");
    assert_eq!(left(&folder), ["a", "b", "damaged", "kept", "running"]);
    // Neither run is that old.
    folder.launch("runs gc --older-than 30d --yes").expect(0);
    // The newest three are kept, b among them.
    folder.launch("runs gc --keep-last 3 --yes").expect(0);
    assert_eq!(left(&folder), ["b", "damaged", "kept", "running"]);
    folder.launch("runs gc --older-than 0s --yes").expect(0);
    assert_eq!(left(&folder), ["damaged", "kept", "running"]);
    running.finish().unwrap();
    folder.launch("runs gc --older-than soon").expect(2);
}

#[test]
fn gc_removes_what_a_start_or_an_upload_left_where_it_is_old() {
    let folder = Folder::new();
    let notes = folder.write("runs/notes/readme", "of somebody");
    folder.write("runs/started/lock", "");
    let upload = "runs/.a.uploading-019a0000-0000-7000-8000-000000000000";
    folder.write(&format!("{upload}/journal.jsonl"), "12345");
    std::fs::create_dir(folder.path().join("runs/empty")).unwrap();
    let all = left(&folder);
    // Without an age, or if they are younger, the folders are only named.
    for line in ["runs gc --yes", "runs gc --yes --older-than 1h"] {
        let ended = folder.launch(line).expect(0);
        assert_eq!(ended.text(), "nothing to remove\n");
        ended
            .says("runs/started has no journal")
            .says("is of an upload that did not end")
            .says("--older-than");
        assert_eq!(left(&folder), all);
    }
    let ended = folder.launch("runs gc --older-than 0s --dry-run").expect(0);
    assert_eq!(ended.lines().len(), 4, "{ended:?}");
    assert_eq!(left(&folder), all);
    folder.launch("runs gc --older-than 0s --yes").expect(0);
    assert_eq!(left(&folder), ["notes"]);
    assert!(notes.exists(), "it is no run's");
}

#[test]
fn gc_removes_artifacts_that_nothing_needs() {
    let folder = Folder::new();
    let first = RunSummary::read(finished(&folder, "a", 0.1)).unwrap();
    let store = ArtifactStore::of_runs(folder.path().join("runs"));
    let commit = |content: &str, by: Option<&RunSummary>| {
        let path = folder.write("model.bin", content);
        let artifact = Artifact::create("model").add_file(path).unwrap();
        let artifact = match by {
            Some(run) => artifact.produced_by(run.id),
            None => artifact,
        };
        store.commit(&artifact).unwrap();
    };
    commit("by the run", Some(&first));
    commit("aliased", Some(&first));
    store.set_alias("model:v2", "best").unwrap();
    commit("by hand", None);
    commit("latest", Some(&first));
    let versions = || {
        let versions = store.versions("model").unwrap();
        versions.iter().map(|x| x.version()).collect::<Vec<_>>()
    };

    // The run exists, so all versions are needed.
    let nothing = folder.launch("runs gc --artifacts --yes").expect(0);
    assert_eq!(nothing.text(), "nothing to remove\n");
    folder.launch("runs gc --older-than 0s --yes").expect(0);
    assert_eq!(versions(), [1, 2, 3, 4]);
    let line = "runs gc --artifacts --yes";
    folder.write("runs/damaged/journal.jsonl", "");
    folder
        .launch(line)
        .expect(0)
        .says("artifacts are left alone");
    std::fs::remove_dir_all(folder.path().join("runs/damaged")).unwrap();
    let removed = folder.launch(line).expect(0).lines();
    assert_eq!(removed, ["artifact model:v1", "freed 10 B"]);
    assert_eq!(versions(), [2, 3, 4]);
}

#[test]
fn gc_keeps_and_names_what_the_run_did_not_write() {
    let folder = Folder::new();
    finished(&folder, "a", 0.1);
    folder.write("runs/a/checkpoint-000001/model.bin", "weights");
    folder.write("runs/a/notes.new", "mine");
    let nothing = folder.launch("runs gc --yes").expect(0);
    assert_eq!(nothing.text(), "nothing to remove\n");
    folder
        .launch("runs gc --keep-last 0 --yes")
        .expect(0)
        .says("runs/a/checkpoint-000001 stays: the run did not write it")
        .says("runs/a/notes.new stays");
    assert_eq!(folder.read("runs/a/checkpoint-000001/model.bin"), "weights");
    assert_eq!(folder.read("runs/a/notes.new"), "mine");
    assert!(!folder.path().join("runs/a/journal.jsonl").exists());
    let list = folder.ok("runs list");
    assert!(list.starts_with("there are no runs in the folder `runs`"));
}

/// The test answers like a user, after other events.
#[test]
fn gc_removes_what_it_has_shown_and_nothing_that_came_to_be_needed() {
    let folder = Folder::new();
    let builder = |name: &str| builder(&folder, name);
    let output = |run: &Run, content: &str| {
        let path = folder.write("model.bin", content);
        let model = Artifact::create("model").add_file(path).unwrap();
        run.mark_output(model).unwrap();
    };
    let old = builder("old").start().unwrap();
    ["1", "2"].iter().for_each(|x| output(&old, x));
    let path = old.folder().to_owned();
    drop(old);
    std::fs::remove_dir_all(path).unwrap();
    drop(builder("goes-on").launch("1").start().unwrap());
    drop(builder("ended").start().unwrap());
    let live = builder("live").start().unwrap();
    output(&live, "3");

    let mut command = folder.command("runs gc --artifacts --status interrupted");
    let (mut user, terminal) = open_terminal();
    command
        .stdin(terminal.try_clone().unwrap())
        .stdout(terminal.try_clone().unwrap())
        .stderr(terminal);
    let mut gc = command.spawn().unwrap();
    drop(command);
    let (mut shown, mut chunk) = (String::new(), [0; 4096]);
    // Reading ends with an error when no process has the terminal open any more.
    while let Ok(count @ 1..) = user.read(&mut chunk) {
        shown.push_str(std::str::from_utf8(&chunk[..count]).unwrap());
        if shown.ends_with("[y/N] ") {
            ["4", "5"].iter().for_each(|x| output(&live, x));
            drop(builder("goes-on").launch("1").start().unwrap());
            user.write_all(b"y\n").unwrap();
        }
    }
    let status = wait_until("gc to end", || gc.try_wait().unwrap());
    assert_eq!(status.code(), Some(1), "{shown}");
    assert!(shown.contains("goes-on is not removed"), "{shown}");
    assert_eq!(left(&folder), [".artifacts", "goes-on", "live"]);
    let versions = ArtifactStore::of_runs(folder.path().join("runs"));
    let versions = versions.versions("model").unwrap();
    let versions: Vec<_> = versions.iter().map(|x| x.version()).collect();
    assert_eq!(versions, [3, 4, 5]);
}
