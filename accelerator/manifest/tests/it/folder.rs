//! Contents of a folder: order, `latest`, untracked files, pruning, leftovers.

use std::fs;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use crate::support::{assert_says, latest, metadata, numbers, save};
use accelerator_manifest::{Checkpoint, CheckpointKind, Draft, Folder, Metadata, VerifyLevel};

fn prune(folder: &Folder, keep: usize, level: VerifyLevel, protected: &[u64]) -> Vec<u64> {
    let keep = NonZeroUsize::new(keep).unwrap();
    folder.prune(keep, level, protected).unwrap()
}

fn spoil(checkpoint: &Checkpoint) {
    fs::write(checkpoint.path().join("optimizer.bin"), "short").unwrap();
}

#[test]
fn an_empty_folder_has_nothing_and_starts_with_one() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = Folder::create(temporary.path().join("checkpoints/a")).unwrap();
    assert_eq!(latest(&folder), (None, 0));
    assert_eq!(folder.latest_hint(), None);
    assert_eq!(save(&folder, 1).unwrap().number(), 1);
}

#[test]
fn numbers_go_on_behind_broken_checkpoints_and_strangers_are_ignored() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = Folder::open(temporary.path()).unwrap();
    for file in [
        "checkpoint-7",
        "checkpoint-best",
        ".git",
        "checkpoint-000001.tar",
        "notes",
    ] {
        fs::create_dir(temporary.path().join(file)).unwrap();
    }
    assert_eq!(save(&folder, 1).unwrap().number(), 1);
    fs::create_dir(temporary.path().join("checkpoint-000041")).unwrap();
    fs::write(temporary.path().join("checkpoint-000042"), "a file").unwrap();
    assert_eq!(numbers(&folder), [1, 41, 42]);
    assert_eq!(latest(&folder), (Some(1), 2));
    assert_eq!(save(&folder, 2).unwrap().number(), 43);
    assert!(temporary.path().join("checkpoint-best").exists());
}

#[test]
fn numbers_of_more_than_six_digits_are_newer_than_those_of_six() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = Folder::open(temporary.path()).unwrap();
    let first = save(&folder, 1).unwrap();
    fs::rename(first.path(), temporary.path().join("checkpoint-999998")).unwrap();
    for number in [999_999, 1_000_000, 1_000_001] {
        assert_eq!(save(&folder, number).unwrap().number(), number);
        assert_eq!(latest(&folder), (Some(number), 0));
        assert_eq!(folder.latest_hint(), Some(number));
    }
    assert_eq!(numbers(&folder), [999_998, 999_999, 1_000_000, 1_000_001]);
    let removed = prune(&folder, 2, VerifyLevel::Sizes, &[]);
    assert_eq!(removed, [999_998, 999_999]);
    assert_eq!(folder.begin(0).unwrap().number(), 1_000_002);
}

#[test]
fn wrong_folders_are_told() {
    let temporary = tempfile::tempdir().unwrap();
    let file = temporary.path().join("file");
    fs::write(&file, "").unwrap();
    for result in [Folder::open(&file), Folder::create(&file)] {
        let error = result.unwrap_err();
        assert!(error.is_misuse());
        assert_says(&error, "found a file");
    }
    assert!(Folder::create(file.join("below")).is_err());
    let missing = temporary.path().join("missing");
    assert!(Folder::open(&missing).unwrap_err().is_not_found());
    assert!(Checkpoint::at(&missing).unwrap_err().is_not_found());
    // A link whose target is not mounted is not absent.
    let link = temporary.path().join("link");
    std::os::unix::fs::symlink(missing, &link).unwrap();
    let error = Folder::open(&link).unwrap_err();
    assert!(error.is_io());
    assert_says(&error, "mount");
    let gone = Folder::create(temporary.path().join("gone")).unwrap();
    fs::remove_dir(gone.path()).unwrap();
    assert!(gone.begin(0).unwrap_err().is_not_found());
}

#[test]
fn a_read_only_folder_is_told() {
    use std::os::unix::fs::PermissionsExt;

    let temporary = tempfile::tempdir().unwrap();
    let folder = Folder::open(temporary.path()).unwrap();
    save(&folder, 1).unwrap();
    let mode =
        |mode| fs::set_permissions(temporary.path(), fs::Permissions::from_mode(mode)).unwrap();
    mode(0o555);
    let may_write_all_the_same = fs::write(temporary.path().join("probe"), "").is_ok();
    if may_write_all_the_same {
        eprintln!("skipped: root may write to folders that are read-only");
    } else {
        let error = folder.begin(0).unwrap_err();
        assert!(error.is_io());
        assert_says(&error, "check the permissions");
        assert_eq!(latest(&folder), (Some(1), 0));
    }
    mode(0o755);
}

#[test]
fn files_are_made_as_other_files_are() {
    use std::os::unix::fs::PermissionsExt;

    let temporary = tempfile::tempdir().unwrap();
    let folder = Folder::create(temporary.path().join("a")).unwrap();
    fs::write(temporary.path().join("file"), "").unwrap();
    fs::create_dir(temporary.path().join("folder")).unwrap();
    let mode = |path: &str| {
        fs::metadata(temporary.path().join(path))
            .unwrap()
            .permissions()
            .mode()
    };
    save(&folder, 1).unwrap();
    for file in ["model.safetensors", "manifest.json", "ranks/00000.json"] {
        assert_eq!(mode(&format!("a/checkpoint-000001/{file}")), mode("file"));
    }
    assert_eq!(mode("a/latest"), mode("file"));
    assert_eq!(mode("a/checkpoint-000001"), mode("folder"));
    assert_eq!(mode("a/checkpoint-000001/ranks"), mode("folder"));
}

#[test]
fn latest_is_a_hint_that_nothing_depends_on() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = Folder::open(temporary.path()).unwrap();
    save(&folder, 1).unwrap();
    save(&folder, 2).unwrap();
    let path = temporary.path().join("latest");
    assert_eq!(fs::read_to_string(&path).unwrap(), "checkpoint-000002\n");
    assert_eq!(folder.latest_hint(), Some(2));

    for (text, hint) in [
        ("", None),
        ("checkpoint-000001\n", Some(1)),
        ("checkpoint-000099\n", Some(99)),
        ("../../etc/passwd\n", None),
        ("\u{0}\u{1}", None),
    ] {
        fs::write(&path, text).unwrap();
        assert_eq!(folder.latest_hint(), hint, "{text:?}");
        assert_eq!(latest(&folder), (Some(2), 0), "{text:?}");
    }
    fs::remove_file(&path).unwrap();
    assert_eq!(latest(&folder), (Some(2), 0));

    // A link is replaced, and its target stays as it is.
    let target = temporary.path().join("target");
    fs::write(&target, "mine").unwrap();
    std::os::unix::fs::symlink(&target, &path).unwrap();
    assert_eq!(folder.latest_hint(), None);
    save(&folder, 3).unwrap();
    assert_eq!(folder.latest_hint(), Some(3));
    assert_eq!(fs::read_to_string(&target).unwrap(), "mine");

    // The hint cannot replace a folder, but the checkpoint is complete without it.
    fs::remove_file(&path).unwrap();
    fs::create_dir_all(path.join("full")).unwrap();
    assert_eq!(save(&folder, 4).unwrap().number(), 4);
    assert_eq!(latest(&folder), (Some(4), 0));
    assert!(folder.unfinished().unwrap().is_empty());
}

#[test]
fn pruning_removes_the_oldest_good_ones() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = Folder::open(temporary.path()).unwrap();
    for step in 1..=6 {
        save(&folder, step).unwrap();
    }
    assert_eq!(prune(&folder, 4, VerifyLevel::Sizes, &[]), [1, 2]);
    assert_eq!(numbers(&folder), [3, 4, 5, 6]);
    // A protected checkpoint counts, and stays.
    assert_eq!(prune(&folder, 2, VerifyLevel::Sizes, &[3]), [4, 5]);
    assert_eq!(numbers(&folder), [3, 6]);
    assert_eq!(prune(&folder, 1, VerifyLevel::Sizes, &[3, 6]), [0_u64; 0]);
    assert_eq!(prune(&folder, 9, VerifyLevel::Sizes, &[]), [0_u64; 0]);
    assert!(folder.unfinished().unwrap().is_empty());
}

/// Emergency checkpoints may lack parts, so training may be unable to resume from any of them.
#[test]
fn emergency_checkpoints_take_the_place_of_no_full_one() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = Folder::open(temporary.path()).unwrap();
    let emergency = |step| {
        let kind = CheckpointKind::Emergency;
        let draft = folder.begin(0).unwrap();
        draft
            .commit(Metadata {
                kind,
                ..metadata(step)
            })
            .unwrap();
    };
    emergency(1);
    save(&folder, 2).unwrap();
    emergency(3);
    emergency(4);
    let prune = |count| prune(&folder, count, VerifyLevel::Sizes, &[]);
    // The only full checkpoint is not the newest, and all others are emergency ones.
    assert_eq!(prune(2), [0_u64; 0]);
    assert_eq!(prune(1), [1]);
    save(&folder, 5).unwrap();
    assert_eq!(prune(2), [0_u64; 0]);
    save(&folder, 6).unwrap();
    assert_eq!(prune(2), [2, 3, 4]);
    assert_eq!(numbers(&folder), [5, 6]);
}

#[test]
fn pruning_reads_contents_only_where_they_decide() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = Folder::open(temporary.path()).unwrap();
    let saved: Vec<_> = (1..=5).map(|step| save(&folder, step).unwrap()).collect();
    // The damage keeps the size.
    let files = fs::read_dir(saved[1].path()).unwrap();
    let mut files = files.map(|entry| entry.unwrap().path());
    // The order of the folder is unspecified, and one of the files is empty.
    let data = files.find(|x| {
        x.metadata().unwrap().len() > 0 && x.is_file() && !x.to_string_lossy().contains("manifest")
    });
    let data = data.unwrap();
    let mut bytes = fs::read(&data).unwrap();
    bytes[0] ^= 1;
    fs::write(&data, bytes).unwrap();
    assert!(saved[1].verify(VerifyLevel::Sizes).is_good());
    // The damaged checkpoint does not count, and stays.
    assert_eq!(prune(&folder, 3, VerifyLevel::Hashes, &[]), [1]);
    assert_eq!(numbers(&folder), [2, 3, 4, 5]);
    // If contents are not read, it is as good as the others, and the oldest of them.
    assert_eq!(prune(&folder, 2, VerifyLevel::Sizes, &[]), [2, 3]);
    assert_eq!(numbers(&folder), [4, 5]);
}

#[test]
fn broken_checkpoints_do_not_count_and_are_left_alone() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = Folder::open(temporary.path()).unwrap();
    let saved: Vec<_> = (1..=6).map(|step| save(&folder, step).unwrap()).collect();
    for broken in [0, 3, 5] {
        spoil(&saved[broken]);
    }
    // Checkpoints 2, 3 and 5 are good.
    assert_eq!(prune(&folder, 2, VerifyLevel::Sizes, &[]), [2]);
    assert_eq!(numbers(&folder), [1, 3, 4, 5, 6]);
    // The newest good checkpoint stays, however few are kept and although broken ones are newer.
    assert_eq!(prune(&folder, 1, VerifyLevel::Hashes, &[]), [3]);
    assert_eq!(latest(&folder), (Some(5), 1));
}

/// Returns the path that another process of this host would give the draft.
fn name_and_process(draft: &Draft, process: u32) -> PathBuf {
    let name = draft.path().file_name().unwrap().to_str().unwrap();
    let [mine, theirs] = [std::process::id(), process].map(|process| format!("-{process}-"));
    draft.path().with_file_name(name.replace(&mine, &theirs))
}

/// A number that no process has.
const NOBODY: u32 = 999_999_999;

#[test]
fn leftovers_of_dead_writers_are_swept() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = Folder::open(temporary.path()).unwrap();
    let mine = folder.begin(0).unwrap();
    // A process that has the number of a dead writer is not that writer.
    let dead = name_and_process(&mine, std::os::unix::process::parent_id());
    let with = |from: &str, to: &str| {
        let name = dead.file_name().unwrap().to_str().unwrap();
        dead.with_file_name(name.replace(from, to))
    };
    let removed = with("partial", "removed");
    let hint = with("checkpoint-000001", "latest");
    let foreign = ".checkpoint-000001.partial-00000000-999999999-0123456789abcdef";
    let foreign = temporary.path().join(foreign);
    let file = temporary.path().join(".checkpoint-000001.partial");
    for path in [&dead, &foreign, &file, &removed] {
        fs::create_dir(path).unwrap();
        fs::write(path.join("half"), "x").unwrap();
    }
    fs::write(&hint, "x").unwrap();

    save(&folder, 1).unwrap();
    for (path, stays) in [
        (&dead, false),
        (&removed, false),
        (&hint, false),
        (&foreign, true),
        (&file, true),
    ] {
        assert_eq!(path.exists(), stays, "{}", path.display());
    }
    assert!(mine.path().exists());
    assert_eq!(folder.unfinished().unwrap().len(), 2);
}

/// Process numbers mean nothing on another host of the same name or in another container.
#[test]
fn a_draft_stays_as_long_as_its_writer_lives() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = Folder::open(temporary.path()).unwrap();
    let draft = folder.begin(0).unwrap();
    let path = name_and_process(&draft, NOBODY);
    fs::rename(draft.path(), &path).unwrap();
    save(&folder, 1).unwrap();
    assert!(path.exists());
    drop(draft);
    save(&folder, 2).unwrap();
    assert!(!path.exists());
}

/// The state of a writer on another host, or from before this host's start, cannot be known.
#[test]
fn a_draft_of_elsewhere_goes_when_nothing_in_it_has_changed_for_a_day() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = Folder::open(temporary.path()).unwrap();
    let now = fs::metadata(temporary.path()).unwrap().modified().unwrap();
    let draft = |random: char, folder_hours: u64, file_hours: u64| {
        let random = random.to_string().repeat(16);
        let name = format!(".checkpoint-000001.partial-00000000-7-{random}");
        let path = temporary.path().join(name);
        fs::create_dir_all(path.join("ranks")).unwrap();
        let file = path.join("ranks/0.json");
        fs::write(&file, "half").unwrap();
        for (path, hours) in [
            (&file, file_hours),
            (&path.join("ranks"), folder_hours),
            (&path, folder_hours),
        ] {
            let time = now - Duration::from_secs(hours * 3600);
            fs::File::open(path).unwrap().set_modified(time).unwrap();
        }
        path
    };
    let abandoned = draft('a', 25, 26);
    let younger = draft('b', 23, 23);
    let written_to = draft('c', 25, 1);
    save(&folder, 1).unwrap();
    assert!(!abandoned.exists());
    assert!(younger.exists());
    assert!(written_to.exists());
}
