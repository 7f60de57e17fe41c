//! Failures while a checkpoint is written.

use std::fs;
use std::io;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::support::{assert_says, latest, metadata, name, numbers, save};
use accelerator_manifest::{Checkpoint, Folder, Role, VerifyLevel};

#[test]
fn large_files_are_streamed() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = Folder::open(temporary.path()).unwrap();
    let mut draft = folder.begin(0).unwrap();
    // The draft is inside the folder, so no rename crosses file systems.
    assert_eq!(draft.path().parent(), Some(folder.path()));
    let block: Vec<u8> = (0..70_001_u32).map(|x| x as u8).collect();
    let entry = draft.write(&name("model.bin"), Role::Model, |file| {
        (0..50).try_for_each(|_| file.write_all(&block))
    });
    assert_eq!(entry.unwrap().bytes, 50 * 70_001);
    let checkpoint = draft.commit(metadata(1)).unwrap();
    assert_eq!(
        checkpoint.read(&name("model.bin")).unwrap(),
        block.repeat(50)
    );
    assert_eq!(latest(&folder), (Some(1), 0));
}

/// Each MiB of work reports progress.
#[test]
fn all_work_on_a_large_file_shows_that_it_continues() {
    const MIB: usize = 1 << 20;
    let temporary = tempfile::tempdir().unwrap();
    let shown = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&shown);
    let progress = move || {
        count.fetch_add(1, Ordering::Relaxed);
    };
    let since = |what: &str| {
        let shown = shown.swap(0, Ordering::Relaxed);
        assert!(shown >= 8, "{what} of 8 MiB showed progress {shown} times");
    };
    let folder = Folder::open(temporary.path()).unwrap();
    let folder = folder.with_progress(progress.clone());
    let mut draft = folder.begin(0).unwrap();
    let (own, adopted) = (name("model.bin"), name("vocabulary.bin"));
    draft
        .write_bytes(&own, Role::Model, &vec![1; 8 * MIB])
        .unwrap();
    since("a write");
    fs::write(draft.path().join("vocabulary.bin"), vec![2; 8 * MIB]).unwrap();
    draft.adopt(Role::Other).unwrap();
    since("an adoption");
    let checkpoint = draft.commit(metadata(1)).unwrap();
    assert!(folder.latest_good().unwrap().rejected.is_empty());
    since("a search");
    let found = &folder.checkpoints().unwrap()[0];
    assert!(found.verify(VerifyLevel::Hashes).is_good());
    since("a verification");
    checkpoint.read(&own).unwrap();
    since("a read");
    let named = Checkpoint::at(checkpoint.path()).unwrap();
    let named = named.with_progress(progress);
    named.read(&adopted).unwrap();
    since("a read by path");
    folder.begin(0).unwrap().commit(metadata(2)).unwrap();
    folder
        .prune(NonZeroUsize::MIN, VerifyLevel::Sizes, &[])
        .unwrap();
    since("a removal");
}

#[test]
fn an_abandoned_draft_leaves_nothing() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = Folder::open(temporary.path()).unwrap();
    let begin = || {
        let mut draft = folder.begin(0).unwrap();
        draft.write_bytes(&name("a/b"), Role::Other, b"x").unwrap();
        draft
    };
    drop(begin());
    let panicked = std::panic::catch_unwind(|| {
        let mut draft = begin();
        let _ = draft.write(&name("c"), Role::Other, |file| -> io::Result<()> {
            file.write_all(b"half")?;
            panic!("in the middle")
        });
    });
    assert!(panicked.is_err());
    assert_eq!(fs::read_dir(temporary.path()).unwrap().count(), 0);
}

#[test]
fn a_content_that_fails_leaves_no_file_and_the_draft_continues() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = Folder::open(temporary.path()).unwrap();
    let mut draft = folder.begin(0).unwrap();
    let error = draft.write(&name("a"), Role::Other, |file| {
        file.write_all(&[0; 100]).unwrap();
        Err("the tensor has no data")
    });
    assert_says(&error.unwrap_err(), "the tensor has no data");
    let mut write =
        |at: &str, bytes: &[u8]| draft.write_bytes(&name(at), Role::Other, bytes).map(drop);
    write("a", b"second").unwrap();
    assert!(write("a", b"third").unwrap_err().is_misuse());
    // A file cannot also be a folder.
    assert!(write("a/b", b"x").is_err());
    let checkpoint = draft.commit(metadata(1)).unwrap();
    assert_eq!(checkpoint.read(&name("a")).unwrap(), b"second");
}

#[test]
fn files_of_others_are_adopted_or_refused() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = Folder::open(temporary.path()).unwrap();
    let mut draft = folder.begin(0).unwrap();
    let model = name("model.bin");
    draft.write_bytes(&model, Role::Model, b"weights").unwrap();
    fs::create_dir(draft.path().join("hook")).unwrap();
    fs::write(draft.path().join("hook/vocabulary.txt"), "a b c").unwrap();
    let vocabulary = name("hook/vocabulary.txt");
    assert_eq!(
        draft.adopt(Role::Other).unwrap(),
        std::slice::from_ref(&vocabulary)
    );
    assert_eq!(draft.adopt(Role::Other).unwrap(), []);
    let checkpoint = draft.commit(metadata(1)).unwrap();
    assert_eq!(checkpoint.read(&vocabulary).unwrap(), b"a b c");
    assert!(latest(&folder).0.is_some());

    let draft = folder.begin(0).unwrap();
    fs::write(draft.path().join("forgotten"), "x").unwrap();
    let error = draft.commit(metadata(2)).unwrap_err();
    assert!(error.is_misuse());
    assert_says(&error, "forgotten");

    let mut draft = folder.begin(0).unwrap();
    std::os::unix::fs::symlink("/etc/passwd", draft.path().join("link")).unwrap();
    assert!(draft.adopt(Role::Other).unwrap_err().is_misuse());
    drop(draft);
    let mut draft = folder.begin(0).unwrap();
    fs::create_dir_all(draft.path().join("a/b")).unwrap();
    assert!(draft.adopt(Role::Other).unwrap_err().is_misuse());
    drop(draft);
    assert_eq!(numbers(&folder), [1]);
}

#[test]
fn of_two_writers_one_is_told() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = Folder::open(temporary.path()).unwrap();
    let mut first = folder.begin(0).unwrap();
    let mut second = folder.begin(0).unwrap();
    assert_eq!((first.number(), second.number()), (1, 1));
    let who = name("who");
    first.write_bytes(&who, Role::Other, b"first").unwrap();
    second.write_bytes(&who, Role::Other, b"second").unwrap();
    second.commit(metadata(2)).unwrap();
    let error = first.commit(metadata(1)).unwrap_err();
    assert!(error.is_conflict());
    assert_says(&error, "checkpoint-000001");
    let found = folder.latest_good().unwrap().found.unwrap();
    assert_eq!(found.read(&who).unwrap(), b"second");
    assert!(folder.unfinished().unwrap().is_empty());
    assert_eq!(save(&folder, 3).unwrap().number(), 2);
}
