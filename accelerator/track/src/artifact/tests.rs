use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::objects::SourceFile;
use super::*;
use crate::error::Result;
use crate::tests::assert_says;

/// A temporary folder with a store in it.
struct Fixture {
    temporary: tempfile::TempDir,
    store: ArtifactStore,
}

impl Fixture {
    fn new() -> Self {
        let temporary = tempfile::tempdir().unwrap();
        let store = ArtifactStore::of_runs(temporary.path().join("runs"));
        fs::create_dir(temporary.path().join("in")).unwrap();
        Self { temporary, store }
    }

    fn at(&self, path: &str) -> PathBuf {
        self.temporary.path().join(path)
    }

    /// Returns an artifact with one file, `file`.
    fn artifact(&self, content: &str) -> Artifact {
        let thread = std::thread::current().id();
        let path = self.at(&format!("in/{content}-{thread:?}"));
        fs::write(&path, content).unwrap();
        Artifact::create("a").add_file_as(path, "file").unwrap()
    }

    fn commit(&self, content: &str) -> StoredArtifact {
        self.store.commit(&self.artifact(content)).unwrap()
    }

    /// Returns the numbers of the versions of `a`.
    fn versions(&self) -> Vec<u32> {
        let versions = self.store.versions("a").unwrap();
        versions.iter().map(StoredArtifact::version).collect()
    }

    fn objects(&self) -> Vec<PathBuf> {
        let objects = objects::Objects::new(self.store.folder()).list().unwrap();
        objects.into_iter().map(|(path, ..)| path).collect()
    }
}

/// Returns the files below a folder with their contents.
fn tree(root: &Path) -> BTreeMap<String, Vec<u8>> {
    let files = objects::files_below(root).unwrap();
    files
        .into_iter()
        .map(|(name, path)| (name, fs::read(path).unwrap()))
        .collect()
}

fn write_tree(root: &Path, files: &BTreeMap<String, Vec<u8>>) {
    fs::create_dir_all(root).unwrap();
    for (name, content) in files {
        let path = root.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
}

/// Asserts that a process that was killed, or failed, has left nothing broken or superfluous.
fn assert_whole(store: &ArtifactStore) {
    for name in store.names().unwrap() {
        for version in store.versions(&name).unwrap() {
            version.verify().unwrap();
        }
    }
    let left = fs::read_dir(store.folder())
        .unwrap()
        .map(|entry| entry.unwrap().file_name());
    let left: Vec<_> = left
        .filter(|name| name.to_str().unwrap().starts_with('.'))
        .collect();
    assert!(left.is_empty(), "{left:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn trees_come_back(files in prop::collection::btree_map(
        "[a-cé ]{1,2}(/[a-c.]{1}x){0,3}",
        prop::collection::vec(any::<u8>(), 0..300),
        0..12,
    )) {
        let mut files = files;
        // A file cannot also be a folder.
        let names: Vec<_> = files.keys().cloned().collect();
        files.retain(|name, _| !names.iter().any(|other| other.starts_with(&format!("{name}/"))));
        let fixture = Fixture::new();
        write_tree(&fixture.at("in"), &files);
        let stored = fixture.store.commit(&Artifact::create("a").add_dir(fixture.at("in")).unwrap()).unwrap();
        stored.checkout(fixture.at("out")).unwrap();
        prop_assert_eq!(tree(&fixture.at("out")), files.clone());
        stored.verify().unwrap();
        stored.checkout(fixture.at("out")).unwrap();

        // The files are added one by one, in another order.
        let mut again = Artifact::create("a");
        for name in files.keys().rev() {
            again = again.add_file_as(fixture.at("in").join(name), name).unwrap();
        }
        prop_assert_eq!(fixture.store.commit(&again).unwrap().reference(), "a:v1");
    }
}

#[test]
fn only_other_contents_are_another_version() {
    let fixture = Fixture::new();
    let versions = ["x", "x", "y", "x"].map(|content| fixture.commit(content).version());
    assert_eq!(versions, [1, 1, 2, 3]);
    assert_eq!(fixture.objects().len(), 2, "contents are there once");
    let noted = fixture
        .artifact("x")
        .metadata(BTreeMap::from([("loss", 0.1)]))
        .unwrap();
    let noted = fixture.store.commit(&noted.alias("best")).unwrap();
    assert_eq!(noted.version(), 4);
    assert_eq!(noted.metadata()["loss"], 0.1);
    assert_eq!(noted.digest(), fixture.store.open("a:v1").unwrap().digest());
    assert_eq!(noted.aliases().unwrap(), ["best"]);
    assert_eq!(fixture.store.open("a:best").unwrap().version(), 4);
    let error = fixture.store.open("a:good").unwrap_err();
    assert!(error.is_not_found());
    assert_says(&error, "v1, v2, v3, v4, best");
}

#[test]
fn numbers_are_never_used_again() {
    let fixture = Fixture::new();
    for (content, version) in [("x", 1), ("y", 2)] {
        assert_eq!(fixture.commit(content).version(), version);
    }
    let report = fixture.store.keep_last(0);
    assert_eq!(
        (report.versions.len(), report.objects, report.bytes),
        (2, 2, 2)
    );
    assert!(fixture.store.names().unwrap().is_empty());
    assert_eq!(fixture.commit("x").version(), 3);
}

#[test]
fn what_is_kept_is_kept() {
    let fixture = Fixture::new();
    for content in ["1", "2", "3", "4", "5"] {
        fixture.commit(content);
    }
    fixture.store.set_alias("a:v1", "first").unwrap();
    let retention = Retention {
        last: 1,
        is_aliased_kept: true,
        kept: [("a".to_owned(), 3)].into(),
        among: None,
    };
    let planned = fixture.store.plan_prune(&retention).unwrap();
    assert_eq!(fixture.objects().len(), 5);
    let prune = || fixture.store.prune_with(|| Ok(retention.clone()));
    assert_eq!(prune().unwrap(), planned);
    let left = fixture.versions();
    assert_eq!((left, fixture.objects().len()), (vec![1, 3, 5], 3));
    // Nothing is removed while a version is unreadable.
    fs::write(fixture.store.folder().join("names/a/v3.json"), "{}").unwrap();
    assert!(prune().unwrap_err().is_corrupt());
    assert_eq!(fixture.objects().len(), 3);
    fs::remove_file(fixture.store.folder().join("names/a/v3.json")).unwrap();
    assert_whole(&fixture.store);
}

#[test]
fn a_file_that_changes_while_it_is_read_is_not_stored() {
    let fixture = Fixture::new();
    let path = fixture.at("in/x");
    fs::write(&path, "one").unwrap();
    let read = SourceFile::read(&path).unwrap();
    // The new content has the same length and the same time.
    let time = fs::metadata(&path).unwrap().modified().unwrap();
    fs::write(&path, "two").unwrap();
    fs::File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_modified(time)
        .unwrap();
    assert!(read.copy(&fixture.at("out")).unwrap_err().is_conflict());
    fs::write(&path, "longer").unwrap();
    assert!(read.check_unchanged().unwrap_err().is_conflict());

    // A file is refused while it is written, or stored as it was at one moment.
    let artifact = Artifact::create("a").add_file(&path).unwrap();
    let is_over = std::sync::atomic::AtomicBool::new(false);
    let is_over = &is_over;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for byte in (0..=u8::MAX).cycle() {
                if is_over.load(std::sync::atomic::Ordering::Relaxed) {
                    break;
                }
                fs::write(&path, vec![byte; 1 << 20]).unwrap();
            }
        });
        for _ in 0..20 {
            if let Err(error) = fixture.store.commit(&artifact) {
                assert!(error.is_conflict());
                assert_says(&error, "changed");
            }
        }
        is_over.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    fixture.store.commit(&artifact).unwrap();
    assert_whole(&fixture.store);
}

#[cfg(unix)]
#[test]
fn links_to_files_are_followed_and_what_is_no_file_is_refused() {
    use std::os::unix::fs::symlink;
    let fixture = Fixture::new();
    let root = fixture.at("in");
    fs::write(fixture.at("elsewhere"), "content").unwrap();
    symlink(fixture.at("elsewhere"), root.join("link")).unwrap();
    let add = || Artifact::create("a").add_dir(&root);
    let stored = fixture.store.commit(&add().unwrap()).unwrap();
    assert_eq!(stored.read("link").unwrap(), b"content");

    symlink(&root, root.join("circle")).unwrap();
    let error = add().unwrap_err();
    assert!(error.is_misuse());
    assert_says(&error, "link to a folder");
    fs::remove_file(root.join("circle")).unwrap();
    symlink("nowhere", root.join("dangling")).unwrap();
    assert!(add().unwrap_err().is_not_found());
    fs::remove_file(root.join("dangling")).unwrap();

    let pipe = root.join("pipe");
    let make_pipe = || {
        let made = Command::new("mkfifo").arg(&pipe).status().unwrap();
        assert!(made.success());
    };
    make_pipe();
    assert!(add().unwrap_err().is_misuse());
    let file = |path: &Path| Artifact::create("a").add_file(path).unwrap_err();
    assert!(file(&pipe).is_misuse() && file(&root).is_misuse());
    assert!(file(&root.join("none")).is_not_found());
    // It became a pipe after it was added.
    fs::remove_file(&pipe).unwrap();
    fs::write(&pipe, "file").unwrap();
    let artifact = add().unwrap();
    fs::remove_file(&pipe).unwrap();
    make_pipe();
    assert!(fixture.store.commit(&artifact).unwrap_err().is_misuse());
    fs::remove_file(&pipe).unwrap();

    let name = <std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(b"\xff");
    fs::write(root.join(name), "").unwrap();
    assert!(add().unwrap_err().is_misuse());
}

#[test]
fn one_path_is_one_file() {
    let fixture = Fixture::new();
    let artifact = fixture.artifact("x");
    fs::write(fixture.at("other"), "").unwrap();
    let add = |name: &str| artifact.clone().add_file_as(fixture.at("other"), name);
    for name in ["file", "file/below", "file/below/it"] {
        assert!(add(name).unwrap_err().is_misuse(), "{name}");
    }
    let nested = add("b/c").unwrap().add_file_as(fixture.at("other"), "b");
    assert!(nested.unwrap_err().is_misuse());
    assert!(add("file-2").is_ok());
    let twice = add("again")
        .unwrap()
        .add_file_as(fixture.at("other"), "again");
    assert_eq!(twice.unwrap().files.len(), 2);
    let secret = Artifact::create("a")
        .add_reference("https://me:secret@host/x")
        .unwrap_err();
    assert!(
        secret.is_misuse() && !secret.to_string().contains("secret@"),
        "{secret}"
    );
}

#[test]
fn damage_is_found_and_mended() {
    let fixture = Fixture::new();
    let stored = fixture.commit("content");
    let object = fixture.objects().remove(0);
    for damage in [Some("contenu"), Some("cont"), None] {
        fs::remove_file(&object).unwrap();
        if let Some(damage) = damage {
            fs::write(&object, damage).unwrap();
        }
        assert!(stored.read("file").unwrap_err().is_corrupt());
        let error = stored.verify().unwrap_err();
        assert!(error.is_corrupt());
        assert_says(&error, "\"file\" of a:v1");
        assert!(stored.checkout(fixture.at("out")).unwrap_err().is_corrupt());
        assert!(!fixture.at("out").exists());
        assert_eq!(fixture.commit("content").version(), 1);
        stored.verify().unwrap();
    }
    assert!(stored.read("other").unwrap_err().is_not_found());
}

#[test]
fn a_checkout_spares_what_is_there() {
    let fixture = Fixture::new();
    let stored = fixture.commit("content");
    let out = fixture.at("out/put");
    fs::create_dir_all(&out).unwrap();
    // The ranks of a host check it out at the same time.
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| stored.checkout(&out).unwrap());
        }
    });
    fs::write(out.join("cache"), "").unwrap();
    stored.checkout(&out).unwrap();
    fs::write(out.join("file"), "mine").unwrap();
    assert!(stored.checkout(&out).unwrap_err().is_conflict());
    assert_eq!(fs::read(out.join("file")).unwrap(), b"mine");
    assert_eq!(fs::read_dir(fixture.at("out")).unwrap().count(), 1);
}

#[test]
fn commits_and_prunes_at_once_lose_nothing() {
    let fixture = Fixture::new();
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let fixture = &fixture;
            scope.spawn(move || {
                for at in 0..15 {
                    fixture
                        .commit(&format!("{}", thread * at % 7))
                        .verify()
                        .or_else(only_pruned)
                        .unwrap();
                }
            });
        }
        scope.spawn(|| {
            for _ in 0..10 {
                fixture.store.keep_last(2);
            }
        });
    });
    assert_whole(&fixture.store);
    let numbers = fixture.versions();
    assert!(!numbers.is_empty() && numbers.is_sorted_by(|a, b| a < b));
}

/// Accepts only the error of a version that was removed before its maker read it.
fn only_pruned(error: crate::Error) -> Result<()> {
    if error.to_string().contains("is not there") {
        Ok(())
    } else {
        Err(error)
    }
}

/// Runs as a process of the other tests, and does nothing by itself.
#[test]
fn child() {
    let Ok(root) = std::env::var("TRACK_TEST_ARTIFACTS") else {
        return;
    };
    let root = Path::new(&root);
    let store = ArtifactStore::of_runs(root.join("runs"));
    let input = root.join(format!("in-{}", std::process::id()));
    fs::create_dir_all(&input).unwrap();
    for step in 0_u32..std::env::var("TRACK_TEST_STEPS").unwrap().parse().unwrap() {
        for file in 0..4_u32 {
            let content = format!("{}-{step}-{file}", std::process::id()).repeat(1000);
            fs::write(input.join(file.to_string()), content).unwrap();
        }
        let artifact = Artifact::create("a").alias("best").add_dir(&input).unwrap();
        store.commit(&artifact).unwrap();
        if step % 5 == 4 {
            let retention = Retention {
                last: 3,
                is_aliased_kept: true,
                ..Retention::default()
            };
            store.prune_with(|| Ok(retention)).unwrap();
        }
    }
}

fn start(root: &Path, steps: u32) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "artifact::tests::child", "--nocapture"])
        .env("TRACK_TEST_ARTIFACTS", root)
        .env("TRACK_TEST_STEPS", steps.to_string())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

#[test]
fn processes_that_commit_at_once_get_versions_of_their_own() {
    let fixture = Fixture::new();
    let children: Vec<_> = (0..3).map(|_| start(fixture.temporary.path(), 4)).collect();
    for child in children {
        let output = child.wait_with_output().unwrap();
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
    assert_eq!(fixture.versions(), Vec::from_iter(1..=12));
    assert_eq!(fixture.store.open("a:best").unwrap().version(), 12);
    assert_whole(&fixture.store);
}

#[test]
fn a_store_is_whole_whenever_its_writer_is_killed() {
    let fixture = Fixture::new();
    let mut last = 0;
    for round in 0_u64..25 {
        let mut child = start(fixture.temporary.path(), 1_000_000);
        // Every other process has stored something, however slow the machine is.
        let deadline = Instant::now() + Duration::from_secs(60);
        let latest = || fixture.store.open("a").map_or(0, |latest| latest.version());
        while round % 2 == 1 && latest() <= last {
            assert!(Instant::now() < deadline, "nothing is stored");
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_millis(10 + round * 37 % 90));
        child.kill().unwrap();
        child.wait().unwrap();
        // A commit cleans up, and its content is new.
        let version = fixture.commit(&format!("round {round}")).version();
        assert!(version > last);
        last = version;
        assert_whole(&fixture.store);
        assert!(
            fixture
                .store
                .open("a:best")
                .map_or_else(|error| error.is_not_found(), |best| best.version() < last)
        );
    }
    assert!(last >= 25 + 12, "{last}");
    assert!(fixture.store.keep_last(1).objects > 0);
    assert_eq!(fixture.objects().len(), 1);
}

/// Fills the disk that the test below has made, and does nothing by itself.
#[test]
fn full_child() {
    let Ok(disk) = std::env::var("TRACK_TEST_FULL_DISK") else {
        return;
    };
    let fixture = Fixture::new();
    let store = ArtifactStore::of_runs(&disk);
    let small = fixture.artifact("small");
    store.commit(&small).unwrap();
    fs::write(fixture.at("in/large"), vec![7; 1 << 20]).unwrap();
    let large = Artifact::create("a").add_dir(fixture.at("in")).unwrap();
    let error = store.commit(&large).unwrap_err();
    assert!(error.is_io());
    assert_says(&error, "No space");
    assert_eq!(store.open("a").unwrap().version(), 1);
    assert_whole(&store);
    // There is room again.
    fs::write(fixture.at("in/large"), "larger").unwrap();
    assert_eq!(store.commit(&large).unwrap().version(), 2);
    assert_whole(&store);
}

/// Needs namespaces, and is skipped without them.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_told_and_harms_nothing() {
    let disk = tempfile::tempdir().unwrap();
    let contained = |script: &str| {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--mount", "sh", "-c", script]);
        command
            .env("TRACK_TEST_FULL_DISK", disk.path())
            .arg(std::env::current_exe().unwrap());
        command
    };
    let mount = "mount -t tmpfs -o size=256k none \"$TRACK_TEST_FULL_DISK\"";
    if !contained(mount)
        .status()
        .is_ok_and(|status| status.success())
    {
        eprintln!("skipped: no file systems can be mounted");
        return;
    }
    let test = format!("{mount} && \"$0\" --exact artifact::tests::full_child --nocapture");
    let output = contained(&test).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(
        String::from_utf8_lossy(&output.stdout).contains("1 passed"),
        "{output:?}"
    );
}
