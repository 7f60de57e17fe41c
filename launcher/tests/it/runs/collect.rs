//! `gc`.

use accelerator_track::{Artifact, ArtifactStore, RunSummary};

use super::{builder, finished, lines};
use crate::support::Folder;

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

    // No selection: only what is left over.
    let text = folder.launch(["runs", "gc", "--dry-run"]).expect(0).text();
    assert_eq!(
        lines(&text),
        ["leftover runs/a/metrics.csv.new 5 B", "would free 5 B"]
    );
    folder
        .launch(["runs", "gc", "--status", "interrupted"])
        .expect(2)
        .says("add --yes");
    assert_eq!(left(&folder), all);
    folder.launch(["runs", "gc", "--yes"]).expect(0);
    assert!(!folder.path().join("runs/a/metrics.csv.new").exists());
    assert_eq!(left(&folder), all);
    let text = folder.launch(["runs", "gc", "-y"]).expect(0).text();
    assert_eq!(text, "nothing to remove\n");

    let text = folder
        .launch(["runs", "gc", "--status", "interrupted", "--yes"])
        .expect(0)
        .says("damaged is left alone")
        .text();
    assert!(
        lines(&text)[0].starts_with("run killed interrupted "),
        "{text}"
    );
    assert_eq!(left(&folder), ["a", "b", "damaged", "kept", "running"]);
    // Neither is older than that.
    folder
        .launch(["runs", "gc", "--older-than", "30d", "--yes"])
        .expect(0);
    // The newest three are kept, b among them.
    folder
        .launch(["runs", "gc", "--keep-last", "3", "--yes"])
        .expect(0);
    assert_eq!(left(&folder), ["b", "damaged", "kept", "running"]);
    folder
        .launch(["runs", "gc", "--older-than", "0s", "--yes"])
        .expect(0);
    assert_eq!(left(&folder), ["damaged", "kept", "running"]);
    running.finish().unwrap();
    folder
        .launch(["runs", "gc", "--older-than", "soon"])
        .expect(2);
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
    // Without an age, or younger: they are named.
    for arguments in [&[][..], &["--older-than", "1h"]] {
        let line = [&["runs", "gc", "--yes"], arguments].concat();
        let ended = folder.launch(line).expect(0);
        assert_eq!(ended.text(), "nothing to remove\n");
        ended
            .says("runs/started has no journal")
            .says("is of an upload that did not end")
            .says("--older-than");
        assert_eq!(left(&folder), all);
    }
    let line = ["runs", "gc", "--older-than", "0s", "--dry-run"];
    let text = folder.launch(line).expect(0).text();
    assert_eq!(lines(&text).len(), 4, "{text}");
    assert_eq!(left(&folder), all);
    let line = ["runs", "gc", "--older-than", "0s", "--yes"];
    folder.launch(line).expect(0);
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

    // The run is there: all of them are needed.
    let line = ["runs", "gc", "--artifacts", "--yes"];
    assert_eq!(folder.launch(line).expect(0).text(), "nothing to remove\n");
    let line = ["runs", "gc", "--older-than", "0s", "--yes"];
    folder.launch(line).expect(0);
    assert_eq!(versions(), [1, 2, 3, 4]);
    let line = ["runs", "gc", "--artifacts", "--yes"];
    folder.write("runs/damaged/journal.jsonl", "");
    folder
        .launch(line)
        .expect(0)
        .says("artifacts are left alone");
    std::fs::remove_dir_all(folder.path().join("runs/damaged")).unwrap();
    let text = folder.launch(line).expect(0).text();
    assert_eq!(lines(&text), ["artifact model:v1", "freed 10 B"]);
    assert_eq!(versions(), [2, 3, 4]);
}
