//! `accel-launch checkpoint`.

use std::fs;
use std::num::NonZeroUsize;

use crate::support::Folder;
use accelerator_manifest::{Checkpoint, CheckpointKind, LoaderState, Metadata, Role};

/// Makes `checkpoints/a` with three checkpoints, the last one an emergency save.
fn runs(folder: &Folder) -> Vec<Checkpoint> {
    let checkpoints =
        accelerator_manifest::Folder::create(folder.path().join("checkpoints/a")).unwrap();
    let save = |step: u64| {
        let mut draft = checkpoints.begin(0).unwrap();
        draft
            .write_bytes(
                &"model.safetensors".parse().unwrap(),
                Role::Model,
                &[7; 3000],
            )
            .unwrap();
        draft
            .write_bytes(&"ranks/00000.json".parse().unwrap(), Role::Ranks, b"{}")
            .unwrap();
        let mut metadata = Metadata {
            step: step * 100,
            epoch: step,
            seed: Some(42),
            ..Metadata::new(NonZeroUsize::new(2).unwrap())
        };
        metadata.loaders.push(LoaderState {
            samples: 1000,
            order: "shuffled".to_owned(),
            tail: "exact".to_owned(),
            global_batch: 32,
            epoch: step,
            consumed: 64,
            step: 2,
            finished: false,
            extra: Default::default(),
        });
        if step == 3 {
            metadata.kind = CheckpointKind::Emergency;
        }
        draft.commit(metadata).unwrap()
    };
    (1..=3).map(save).collect()
}

fn spoil(checkpoint: &Checkpoint) {
    let path = checkpoint.path().join("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    bytes[1234] ^= 1;
    fs::write(path, bytes).unwrap();
}

#[test]
fn list_shows_what_is_there_and_what_is_cut_off() {
    let folder = Folder::new();
    let saved = runs(&folder);
    fs::write(saved[1].path().join("model.safetensors"), "short").unwrap();
    fs::remove_file(saved[0].path().join("manifest.json")).unwrap();
    let draft = folder.write(
        "checkpoints/a/.checkpoint-000004.partial-00000000-1-0123456789abcdef/x",
        "",
    );

    let shown = folder.launch("checkpoint list checkpoints/a").expect(0);
    let shown = shown.lines();
    assert_eq!(shown[0], "number step epoch ranks size age kind state");
    assert!(
        shown[1].starts_with("1 - - - - - - broken: manifest.json is missing"),
        "{shown:?}"
    );
    assert!(
        shown[2].starts_with("2 200 2 2 2.9 KiB ")
            && shown[2].contains(" full broken: model.safetensors is cut off"),
        "{shown:?}"
    );
    assert!(
        shown[3].starts_with("3 300 3 2 2.9 KiB ")
            && shown[3].ends_with("emergency latest, sizes ok"),
        "{shown:?}"
    );
    let draft = draft
        .parent()
        .unwrap()
        .file_name()
        .unwrap()
        .to_str()
        .unwrap();
    assert!(
        shown[4].starts_with("unfinished: ") && shown[4].ends_with(draft),
        "{shown:?}"
    );

    let list = folder.json("checkpoint list checkpoints/a --json");
    assert_eq!(list["latest"], 3);
    assert_eq!(list["checkpoints"][2]["kind"], "emergency");
    assert_eq!(list["checkpoints"][2]["bytes"], 3002);
    let whole: Vec<_> = (0..3)
        .map(|x| list["checkpoints"][x]["whole"].as_bool().unwrap())
        .collect();
    assert_eq!(whole, [false, false, true]);
    assert_eq!(list["unfinished"].as_array().unwrap().len(), 1);

    // A single checkpoint is listed as well.
    let one = folder.launch("checkpoint list checkpoints/a/checkpoint-000003");
    assert_eq!(one.expect(0).lines().len(), 2);
}

#[test]
fn show_tells_what_a_checkpoint_says() {
    let folder = Folder::new();
    let saved = runs(&folder);
    for (place, step) in [
        ("checkpoints/a", 300),
        ("checkpoints/a latest", 300),
        ("checkpoints/a 2", 200),
        ("checkpoints/a checkpoint-000002", 200),
        ("checkpoints/a/checkpoint-000001", 100),
    ] {
        let line = format!("checkpoint show {place}");
        let ended = folder.launch(&line).expect(0);
        let ended = ended
            .shows(&format!("step {step}"))
            .shows("ranks 2")
            .shows("seed 42")
            .prints("64 of 1000 samples in 2 batches of 32, shuffled, tail exact");
        let is_file = |line: &String| line.starts_with("model.safetensors 2.9 KiB model ");
        assert!(ended.lines().iter().any(is_file), "{ended:?}");

        let manifest = folder.json(&format!("{line} --json"));
        assert_eq!(manifest["step"], step);
        assert_eq!(manifest["files"]["ranks/00000.json"]["bytes"], 2);
    }

    // `show` picks the newest complete checkpoint, and shows what it can of a broken one.
    fs::write(saved[2].path().join("model.safetensors"), "short").unwrap();
    let shown = folder.launch("checkpoint show checkpoints/a");
    shown.expect(0).shows("number 2");
    fs::write(saved[2].path().join("manifest.json"), "{}").unwrap();
    folder
        .launch("checkpoint show checkpoints/a 3")
        .expect(1)
        .says("seal");
    folder.refuses("checkpoint show checkpoints/a 9", "no checkpoint 9");
}

#[test]
fn verify_names_every_defect() {
    let folder = Folder::new();
    let saved = runs(&folder);
    let text = folder.ok("checkpoint verify checkpoints/a");
    assert_eq!(
        text.matches(": good (2 files, 2.9 KiB)").count(),
        3,
        "{text}"
    );

    spoil(&saved[1]);
    fs::remove_dir_all(saved[1].path().join("ranks")).unwrap();
    fs::write(saved[0].path().join("notes"), "").unwrap();
    // `list` cannot see this damage.
    folder
        .launch("checkpoint list checkpoints/a/checkpoint-000003")
        .expect(0)
        .prints("sizes ok");

    let ended = folder.launch("checkpoint verify checkpoints/a").expect(1);
    assert_eq!(ended.text().matches(": good").count(), 2, "{ended:?}");
    ended
        .prints("checkpoint-000002: BROKEN")
        .prints("  model.safetensors has changed since")
        .prints("  ranks/00000.json: ranks is missing")
        .prints("  notes: not in the manifest (is not read)");

    let report = folder.launch("checkpoint verify checkpoints/a --json");
    let report = report.expect(1).json();
    assert_eq!(report["good"], false);
    assert_eq!(
        report["checkpoints"][1]["defects"][0]["file"],
        "model.safetensors"
    );
    assert_eq!(report["checkpoints"][2]["good"], true);

    folder
        .launch("checkpoint verify checkpoints/a/checkpoint-000003")
        .expect(0);
    folder
        .launch("checkpoint verify checkpoints/a/checkpoint-000002")
        .expect(1);
}

/// Damage and an unreachable disk need different remedies.
#[test]
fn what_cannot_be_read_is_not_called_broken() {
    use std::os::unix::fs::PermissionsExt;

    let folder = Folder::new();
    let saved = runs(&folder);
    let newest = saved[2].path().join("model.safetensors");
    fs::set_permissions(&newest, fs::Permissions::from_mode(0o000)).unwrap();
    without_privileges(|| {
        let run = |action| folder.launch(&format!("checkpoint {action} checkpoints/a"));
        run("list")
            .expect(0)
            .prints("unreadable: cannot read")
            .prints("Permission denied");
        let ended = run("verify")
            .expect(1)
            .prints("checkpoint-000003: UNREADABLE")
            .prints("Permission denied");
        assert_eq!(ended.text().matches(": good").count(), 2, "{ended:?}");
        // The checkpoint before it is not the newest complete one.
        run("show").expect(1).says("Permission denied");
        folder.launch("checkpoint show checkpoints/a 3").expect(0);
    });
}

/// Runs programs without the privileges of root, so that file permissions apply: a thread gives up the capabilities
/// that it could pass on.
fn without_privileges(work: impl FnOnce() + Send) {
    use rustix::thread::{CapabilitySet, remove_capability_from_bounding_set};

    let unprivileged = || {
        for capability in [CapabilitySet::DAC_OVERRIDE, CapabilitySet::DAC_READ_SEARCH] {
            // A user other than root has none, and cannot remove any.
            let _ = remove_capability_from_bounding_set(capability);
        }
        work();
    };
    std::thread::scope(|scope| scope.spawn(unprivileged).join().unwrap());
}

/// The inner checkpoint is a failed copy or was put there. The manifest identifies a checkpoint.
#[test]
fn a_checkpoint_in_a_checkpoint_is_not_taken_for_it() {
    let folder = Folder::new();
    let saved = runs(&folder);
    let inner = saved[2].path().join("checkpoint-000002");
    fs::create_dir(&inner).unwrap();
    for file in ["manifest.json", "model.safetensors"] {
        fs::copy(saved[1].path().join(file), inner.join(file)).unwrap();
    }
    spoil(&saved[2]);
    let place = "checkpoints/a/checkpoint-000003";
    folder
        .launch(&format!("checkpoint verify {place}"))
        .expect(1)
        .prints("checkpoint-000003: BROKEN");
    let shown = folder.launch(&format!("checkpoint show {place}"));
    shown.expect(0).shows("step 300");
}

#[test]
fn wrong_places_are_told() {
    let folder = Folder::new();
    folder.write("file", "");
    folder.write("empty/notes", "");
    for action in ["list", "show", "verify"] {
        for place in ["missing", "file"] {
            folder
                .launch(&format!("checkpoint {action} {place}"))
                .expect(2)
                .says("expected a folder of checkpoints")
                .says(place);
        }
    }
    folder.refuses("checkpoint show empty", "no checkpoints");
    // The manifest belongs to no checkpoint, and the folder's name merely looks like a checkpoint's.
    folder.write("odd/manifest.json", "{}");
    folder.refuses("checkpoint verify odd", "seal");
    runs(&folder);
    fs::rename(
        folder.path().join("checkpoints/a"),
        folder.path().join("checkpoint-000009"),
    )
    .unwrap();
    let text = folder.ok("checkpoint list checkpoint-000009");
    assert_eq!(text.matches("sizes ok").count(), 3, "{text}");
    // No checkpoint is not success, since a script that asks must not continue.
    folder.launch("checkpoint verify empty").expect(1);
    folder
        .launch("checkpoint list empty")
        .expect(0)
        .prints("no checkpoints");
    folder.launch("checkpoint").expect(2);
}

#[test]
fn a_program_called_checkpoint_can_be_run() {
    let folder = Folder::new();
    folder.script("checkpoint", "echo \"ran $1\"");
    let text = folder.ok("--no-prefix ./checkpoint list");
    assert_eq!(text, "ran list\n");
}
