//! Any damage to a file of a checkpoint is found, and the file is named.

use std::fs;
use std::path::Path;

use crate::support::{
    FILES, assert_says, folder_in_memory, latest, name, save, set_mode, without_privileges,
};
use accelerator_manifest::{Checkpoint, Folder, VerifyLevel, internal::Place};
use proptest::prelude::*;

#[derive(Clone, Copy, Debug)]
enum Damage {
    Truncate(u64),
    Flip(u64),
    Append,
    Delete,
    Folder,
    Link,
}

impl Damage {
    /// Returns `false` if the file has nothing to damage in this way.
    fn strike(self, path: &Path) -> bool {
        let mut bytes = fs::read(path).unwrap();
        let len = bytes.len() as u64;
        match self {
            Self::Truncate(_) | Self::Flip(_) if len == 0 => return false,
            Self::Truncate(at) => bytes.truncate((at % len) as usize),
            Self::Flip(bit) => {
                let bit = bit % (len * 8);
                bytes[(bit / 8) as usize] ^= 1 << (bit % 8);
            }
            Self::Append => bytes.push(b'\n'),
            Self::Delete => {
                fs::remove_file(path).unwrap();
                return true;
            }
            Self::Folder => {
                fs::remove_file(path).unwrap();
                fs::create_dir(path).unwrap();
                return true;
            }
            // The content is right, but is elsewhere.
            Self::Link => {
                let away = path.ancestors().nth(3).unwrap().join("elsewhere");
                fs::rename(path, &away).unwrap();
                std::os::unix::fs::symlink(&away, path).unwrap();
                return true;
            }
        }
        fs::write(path, bytes).unwrap();
        true
    }
}

fn damage() -> impl Strategy<Value = Damage> {
    prop_oneof![
        any::<u64>().prop_map(Damage::Truncate),
        any::<u64>().prop_map(Damage::Flip),
        Just(Damage::Append),
        Just(Damage::Delete),
        Just(Damage::Folder),
        Just(Damage::Link),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn damage_is_found_and_the_file_is_named(file in 0..FILES.len() + 1, damage in damage()) {
        let temporary = folder_in_memory();
        let folder = Folder::create(temporary.path().join("a")).unwrap();
        save(&folder, 1).unwrap();
        let newest = save(&folder, 2).unwrap();
        let file = FILES.get(file).copied().unwrap_or("manifest.json");
        prop_assume!(damage.strike(&newest.path().join(file)));

        let report = newest.verify(VerifyLevel::Hashes);
        let named: Vec<_> = report.defects.iter().map(|x| x.file.as_str()).collect();
        prop_assert_eq!(&named, &[file]);
        prop_assert!(report.defects[0].error.is_corrupt(), "{}", report);
        prop_assert!(report.to_string().contains(file));

        // Only damage that keeps the length of a data file requires reading its content.
        let quick = newest.verify(VerifyLevel::Sizes);
        let hidden = matches!(damage, Damage::Flip(_)) && file != "manifest.json";
        prop_assert_eq!(quick.is_good(), hidden);

        // A reader that does not verify first gets an error too.
        let fresh = Checkpoint::at(newest.path()).unwrap();
        if file == "manifest.json" {
            prop_assert!(fresh.manifest().unwrap_err().is_corrupt());
        } else {
            prop_assert!(fresh.read(&name(file)).unwrap_err().is_corrupt());
        }

        prop_assert_eq!(latest(&folder), (Some(1), 1));
        prop_assert!(newest.path().exists(), "nothing is deleted");
        prop_assert_eq!(save(&folder, 3).unwrap().number(), 3);
        prop_assert_eq!(latest(&folder), (Some(3), 0));
    }
}

#[test]
fn all_defects_are_listed() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = Folder::open(temporary.path()).unwrap();
    let checkpoint = save(&folder, 1).unwrap();
    fs::remove_file(checkpoint.path().join("empty")).unwrap();
    Damage::Flip(77).strike(&checkpoint.path().join("model.safetensors"));
    fs::remove_dir_all(checkpoint.path().join("ranks")).unwrap();
    fs::write(checkpoint.path().join("notes.txt"), "mine").unwrap();

    let report = checkpoint.verify(VerifyLevel::Hashes);
    let text: Vec<_> = report.defects.iter().map(ToString::to_string).collect();
    assert_eq!(text.len(), 3, "{text:?}");
    assert!(text[0].starts_with("empty is missing"), "{text:?}");
    assert!(
        text[1].starts_with("model.safetensors has changed since it was written"),
        "{text:?}"
    );
    assert!(
        text[2].starts_with("ranks/00000.json: ranks is missing"),
        "{text:?}"
    );
    assert!(report.unreadable().is_none());
    assert_eq!(report.untracked, ["notes.txt"]);
}

#[test]
fn a_stranger_in_a_checkpoint_does_no_harm() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = Folder::open(temporary.path()).unwrap();
    let checkpoint = save(&folder, 1).unwrap();
    fs::write(checkpoint.path().join("notes.txt"), "mine").unwrap();
    std::os::unix::fs::symlink("/etc", checkpoint.path().join("link")).unwrap();
    let report = checkpoint.verify(VerifyLevel::Hashes);
    assert!(report.is_good(), "{report}");
    assert_eq!(report.untracked, ["link", "notes.txt"]);
    let missing = checkpoint.read(&name("notes.txt"));
    assert!(missing.unwrap_err().is_not_found());
    assert_eq!(latest(&folder), (Some(1), 0));
}

#[test]
fn links_in_the_place_of_folders_are_refused() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = Folder::create(temporary.path().join("a")).unwrap();
    save(&folder, 1).unwrap();
    let checkpoint = save(&folder, 2).unwrap();
    let away = temporary.path().join("away");
    fs::rename(checkpoint.path().join("ranks"), &away).unwrap();
    std::os::unix::fs::symlink(&away, checkpoint.path().join("ranks")).unwrap();
    let report = checkpoint.verify(VerifyLevel::Sizes);
    assert_eq!(report.defects.len(), 1);
    assert!(report.to_string().contains("a symbolic link"), "{report}");

    // The same holds for the whole checkpoint.
    let (first, away) = (
        folder.path().join("checkpoint-000001"),
        temporary.path().join("b"),
    );
    fs::rename(&first, &away).unwrap();
    std::os::unix::fs::symlink(&away, &first).unwrap();
    assert_eq!(latest(&folder), (None, 2));
}

#[test]
fn a_size_that_cannot_be_is_refused_before_memory_is_taken() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = Folder::open(temporary.path()).unwrap();
    let checkpoint = save(&folder, 1).unwrap();
    // The files are sparse, so the disk has none of these bytes.
    let grow = |file: &str, bytes| {
        let file = fs::File::options()
            .write(true)
            .open(checkpoint.path().join(file))
            .unwrap();
        file.set_len(bytes).unwrap();
    };
    grow("optimizer.bin", 1 << 40);
    let fresh = || Checkpoint::at(checkpoint.path()).unwrap();
    let read = fresh().read(&name("optimizer.bin"));
    assert_says(&read.unwrap_err(), "is too long");
    grow("manifest.json", 1 << 40);
    assert_says(&fresh().manifest().unwrap_err(), "expected at most");
}

/// An unreadable checkpoint may be good, and returning to an older one would repeat or lose training steps.
#[test]
fn a_checkpoint_that_cannot_be_read_is_not_damaged() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = Folder::open(temporary.path()).unwrap();
    let older = save(&folder, 1).unwrap();
    let newest = save(&folder, 2).unwrap();
    for locked in ["model.safetensors", "manifest.json", "ranks", "."] {
        let path = newest.path().join(locked);
        let before = fs::metadata(&path).unwrap().permissions();
        set_mode(&path, 0);
        without_privileges(|| {
            let error = folder.latest_good().unwrap_err();
            assert!(error.is_io() && !error.is_corrupt(), "{locked}: {error}");
            let path = newest.path().display().to_string();
            for text in [&path, "Permission denied", "move it away"] {
                assert_says(&error, text);
            }
            let report = newest.verify(VerifyLevel::Hashes);
            assert!(
                report.unreadable().is_some() && !report.is_good(),
                "{report}"
            );
            // A user who decides to go back finds the previous one.
            let found = folder.latest_good_before(2).unwrap().found.unwrap();
            assert_eq!(found.number(), older.number());
        });
        fs::set_permissions(&path, before).unwrap();
    }
    assert_eq!(latest(&folder), (Some(2), 0));
}

/// The manifest identifies a checkpoint that a program names, whatever else is in the folder.
#[test]
fn what_lies_in_a_checkpoint_is_not_taken_for_it() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = Folder::create(temporary.path().join("a")).unwrap();
    save(&folder, 1).unwrap();
    let newest = save(&folder, 2).unwrap();
    let is_checkpoint = |path: &Path| matches!(Place::open(path), Ok(Place::Checkpoint(_)));
    let inner = Folder::open(newest.path()).unwrap();
    save(&inner, 9).unwrap();
    assert!(is_checkpoint(newest.path()));
    assert!(!is_checkpoint(folder.path()));

    // A link to it is followed, since the caller names it.
    let link = temporary.path().join("best");
    std::os::unix::fs::symlink(newest.path(), &link).unwrap();
    let linked = Checkpoint::at(&link).unwrap();
    assert_eq!(linked.number(), 2);
    assert!(linked.verify(VerifyLevel::Hashes).is_good());

    // Without a manifest it is a broken checkpoint, unless it holds checkpoints and merely has such a name.
    let bare = folder.path().join("checkpoint-000001");
    fs::remove_file(bare.join("manifest.json")).unwrap();
    assert!(is_checkpoint(&bare));
    assert!(Checkpoint::find(&bare).unwrap().is_none());
    save(&Folder::open(&bare).unwrap(), 1).unwrap();
    assert!(!is_checkpoint(&bare));

    without_privileges(|| {
        set_mode(newest.path(), 0);
        assert!(Checkpoint::find(newest.path()).unwrap_err().is_io());
        assert!(Place::open(newest.path()).unwrap_err().is_io());
        set_mode(newest.path(), 0o755);
    });
}
