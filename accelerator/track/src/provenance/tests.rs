//! Tests with the installed git.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use super::capture::Repository;
use super::diff::diff_provenance;
use super::{Capture, Commit, Provenance, Reproduction};

struct Work(tempfile::TempDir);

impl Work {
    /// Creates a repository with one commit of two sources.
    fn new() -> Self {
        let work = Self(tempfile::tempdir().unwrap());
        work.git(&["init", "-q", "-b", "main"]);
        work.write("src/main.rs", "fn main() {}\n");
        work.write("src/é lib.rs", "one\n");
        work.write(".gitignore", "target\n");
        work.commit();
        work
    }

    fn root(&self) -> &Path {
        self.0.path()
    }

    fn git(&self, arguments: &[&str]) {
        let user = "-c user.name=n -c user.email=e@x -c commit.gpgsign=false";
        let mut command = Command::new("git");
        for name in ["GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"] {
            command.env_remove(name);
        }
        let command = command
            .current_dir(self.root())
            .args(user.split(' '))
            .args(arguments)
            .stdout(Stdio::null());
        assert!(command.status().unwrap().success(), "git {arguments:?}");
    }

    fn commit(&self) {
        self.git(&["add", "-A"]);
        self.git(&["commit", "-q", "--allow-empty", "-m", "m"]);
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.root().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// Returns what a run here would record.
    fn run(&self) -> Provenance {
        let state = Repository::around(&self.root().join("src"))
            .unwrap()
            .state()
            .unwrap();
        assert_eq!(state.notes, Vec::<String>::new());
        let hash = state.diff.map(|diff| blake3::hash(&diff).to_string());
        assert_eq!(state.commit.diff, hash);
        Provenance {
            commit: Some(state.commit),
            ..Provenance::default()
        }
    }
}

fn differing(a: &Provenance, b: &Provenance) -> Vec<String> {
    let found = diff_provenance(a, b).into_iter();
    found.map(|found| found.what).collect()
}

fn commit_of(run: &Provenance) -> &Commit {
    run.commit.as_ref().unwrap()
}

#[test]
fn a_clean_repository_has_a_commit_a_branch_and_a_remote_without_a_password() {
    let work = Work::new();
    work.git(&["remote", "add", "other", "https://x/other"]);
    work.git(&["remote", "add", "origin", "https://me:hidden@host/a.git"]);
    let modified = || {
        let index = fs::metadata(work.root().join(".git/index")).unwrap();
        index.modified().unwrap()
    };
    let before = modified();
    let run = work.run();
    let commit = commit_of(&run);
    assert_eq!(commit.hash.as_ref().unwrap().len(), 40);
    assert_eq!(commit.branch.as_deref(), Some("main"));
    assert_eq!(commit.remote.as_deref(), Some("https://host/a.git"));
    assert!(!commit.is_dirty() && commit.diff.is_none());
    assert_eq!(before, modified());
    work.git(&["checkout", "-q", "--detach"]);
    assert_eq!(commit_of(&work.run()).branch, None);
}

#[test]
fn changes_that_are_not_committed_differ() {
    let work = Work::new();
    let clean = work.run();
    work.write("src/main.rs", "fn main() { }\n");
    work.write("runs/a/journal.jsonl", "{}\n");
    let dirty = work.run();
    let commit = commit_of(&dirty);
    assert!(commit.dirty && commit.diff.is_some());
    assert_eq!(differing(&clean, &dirty), ["uncommitted changes"]);
    assert_eq!(differing(&dirty, &work.run()), [""; 0]);
    work.write("src/main.rs", "fn main() {  }\n");
    assert_eq!(differing(&dirty, &work.run()), ["uncommitted changes"]);
    work.commit();
    assert_eq!(differing(&clean, &work.run()), ["commit"]);
}

#[test]
fn what_is_too_much_is_noted_and_what_is_no_repository_is_absent() {
    let work = Work::new();
    work.write("data.bin", "0\n");
    work.commit();
    let lines = (0..1 << 17).map(|at| format!("{at:064}\n"));
    work.write("data.bin", &lines.collect::<String>());
    let state = Repository::around(work.root()).unwrap().state().unwrap();
    assert!(state.commit.is_dirty());
    assert_eq!((state.diff, state.commit.diff), (None, None));
    assert!(
        state.notes[0].starts_with("git diff HEAD "),
        "{:?}",
        state.notes
    );

    let empty = Work(tempfile::tempdir().unwrap());
    assert!(Repository::around(empty.root()).is_none());
    fs::create_dir(empty.root().join(".git")).unwrap();
    assert!(Repository::around(empty.root()).unwrap().state().is_none());
    empty.git(&["init", "-q", "-b", "main"]);
    empty.write("a.rs", "");
    let run = empty.run();
    assert_eq!(commit_of(&run).hash, None);
    assert_eq!(commit_of(&run).branch.as_deref(), Some("main"));
}

/// The variable with the file into which the process of the next test writes what it captured.
const CAPTURED: &str = "TRACK_TEST_CAPTURED";

#[test]
#[ignore = "is the process that the test below starts"]
fn captures() {
    let path = std::env::var(CAPTURED).unwrap();
    let folder = Path::new(&path).parent().unwrap();
    let provenance = Capture::new().seed("model", 42).take(folder);
    fs::write(path, serde_json::to_vec(&provenance).unwrap()).unwrap();
}

/// Starts a process and returns what it captured.
fn captured(command: &mut Command, folder: &Path) -> Provenance {
    let path = folder.join("captured.json");
    let command = command.env(CAPTURED, &path).stdout(Stdio::null());
    assert!(command.status().unwrap().success());
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn process() -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "provenance::tests::captures"]);
    command.env_remove("CARGO_MANIFEST_DIR");
    command
}

#[test]
fn a_run_can_be_done_again_and_then_differs_in_nothing() {
    let (work, out) = (Work::new(), tempfile::tempdir().unwrap());
    let mut command = process();
    command
        .current_dir(work.root())
        .env("RAYON_NUM_THREADS", "3")
        .env("ACCEL_OVERLAP", "off");
    for (name, value) in [
        ("ACCEL_TOKEN_FILE", "/hidden"),
        ("NCCL_PASSWORD", "hidden"),
        ("HF_TOKEN", "hidden"),
        ("MLFLOW_TRACKING_URI", "http://me:hidden@host"),
    ] {
        command.env(name, value);
    }
    let first = captured(&mut command, out.path());
    assert!(
        !serde_json::to_string(&first).unwrap().contains("hidden"),
        "{first:?}"
    );
    assert_eq!(first.environment["MLFLOW_TRACKING_URI"], "http://***@host");
    assert_eq!(commit_of(&first).branch.as_deref(), Some("main"));
    assert_eq!(Path::new(&commit_of(&first).root), work.root());

    let again = Reproduction::of(&first).unwrap();
    assert_eq!(again.warnings().len(), 1, "{:?}", again.warnings());
    let mut command = again.command();
    let second = captured(
        command.env("MLFLOW_TRACKING_URI", "http://me:other@host"),
        out.path(),
    );
    assert_eq!(differing(&first, &second), [""; 0]);
    assert_ne!(first.pid, second.pid);

    work.write("src/main.rs", "fn main() { 2 }\n");
    let third = captured(command.env("RAYON_NUM_THREADS", "4"), out.path());
    let diff = commit_of(&third).diff.clone().unwrap();
    let diff = fs::read_to_string(out.path().join("blobs").join(diff)).unwrap();
    assert!(diff.contains("+fn main() { 2 }\n"), "{diff}");
    assert_eq!(
        differing(&first, &third),
        ["uncommitted changes", "environment RAYON_NUM_THREADS"]
    );
}

#[test]
fn what_accel_launch_was_called_with_is_recorded_and_done_again() {
    let out = tempfile::tempdir().unwrap();
    let arguments = ["--ignored", "--exact", "provenance::tests::captures"];
    let launch = [
        &["accel-launch", "-n", "1", "--example", "mnist", "--"],
        &arguments[..],
    ]
    .concat();
    let launch = serde_json::to_string(&launch).unwrap();
    let mut command = process();
    command.envs([
        ("ACCEL_LAUNCH_COMMAND", launch.as_str()),
        ("ACCEL_SET_BY_LAUNCHER", "ACCEL_NETWORK_INTERFACE"),
        ("ACCEL_NETWORK_INTERFACE", "lo"),
        ("CUDA_VISIBLE_DEVICES", "0"),
        ("WORLD_SIZE", "2"),
    ]);
    let run = captured(&mut command, out.path());
    assert!(run.is_launched());
    let again = Reproduction::of(&run)
        .unwrap()
        .with_launcher("/opt/accel-launch");
    let command = again.command();
    let words: Vec<_> = std::iter::once(command.get_program())
        .chain(command.get_args())
        .collect();
    let binary = std::env::current_exe().unwrap();
    let expected = [
        "/opt/accel-launch",
        "--prebuilt",
        binary.to_str().unwrap(),
        "-n",
        "1",
        "--example",
        "mnist",
    ];
    assert_eq!(words[..7], expected);
    let of_launcher = [
        "ACCEL_NETWORK_INTERFACE",
        "CUDA_VISIBLE_DEVICES",
        "WORLD_SIZE",
    ];
    let mut set = command.get_envs().filter(|(_, value)| value.is_some());
    assert!(set.all(|(name, _)| !of_launcher.iter().any(|of| name == *of)));
}

#[test]
fn a_bare_environment_without_git_is_enough() {
    let out = tempfile::tempdir().unwrap();
    let mut command = process();
    let run = captured(
        command.env_clear().env("PATH", "/nowhere").current_dir("/"),
        out.path(),
    );
    assert_eq!((run.commit, run.directory.as_deref()), (None, Some("/")));
    assert!(run.environment.is_empty() && run.binary.is_some() && run.host.user.is_some());
}

#[test]
fn arguments_are_compared_by_option_and_those_of_the_launcher_without_the_programs() {
    let side = |launcher: &str, program: &str| {
        let words = |line: &str| line.split(' ').map(str::to_owned).collect::<Vec<_>>();
        Provenance {
            arguments: words(program),
            launched_by: words(&format!("{launcher} {program}")),
            ..Provenance::default()
        }
    };
    let differing = |a: &Provenance, b: &Provenance| -> Vec<String> {
        let found = diff_provenance(a, b);
        found.iter().map(ToString::to_string).collect()
    };
    let line = "train data --lr 1 --tag a --tag b -n -1 out";
    let a = side("accel-launch -n 2", line);
    assert_eq!(differing(&a, &a), [""; 0]);
    let same = "/x/train data --tag=a --lr=1 --tag b -n -1 out";
    assert_eq!(differing(&a, &side("accel-launch -n 2", same)), [""; 0]);
    let b = side(
        "/bin/accel-launch --log-dir logs -n 4",
        "train --quiet --epochs 2 data --lr 2 --tag a --tag c -n -1 out",
    );
    let expected = [
        "argument --epochs: none, 2",
        "argument --lr: 1, 2",
        "argument --quiet: none, --quiet",
        "argument --tag (2): b, c",
        "argument of accel-launch --log-dir: none, logs",
        "argument of accel-launch -n: 2, 4",
    ];
    assert_eq!(differing(&a, &b), expected);
}
