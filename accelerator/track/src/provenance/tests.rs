//! Against the git that is installed.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use super::facts::{Commit, Provenance, SourceState};
use super::git::Repository;
use super::{diff, diff_with_git};

struct Work(tempfile::TempDir);

impl Work {
    /// A repository with one commit of two sources.
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
        let user = [
            "-c",
            "user.name=n",
            "-c",
            "user.email=e@x",
            "-c",
            "commit.gpgsign=false",
        ];
        let mut command = Command::new("git");
        for name in ["GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"] {
            command.env_remove(name);
        }
        let command = command
            .current_dir(self.root())
            .args(user)
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

    /// What a run here would record.
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

    fn differing(&self, a: &Provenance, b: &Provenance) -> Vec<String> {
        diff_with_git(a, b, self.root())
            .into_iter()
            .map(|found| found.what)
            .collect()
    }
}

fn commit_of(run: &Provenance) -> &Commit {
    run.commit.as_ref().unwrap()
}

#[test]
fn a_clean_repository_has_a_commit_a_branch_and_a_remote_without_a_password() {
    let work = Work::new();
    work.git(&["remote", "add", "other", "https://x/other"]);
    work.git(&["remote", "add", "origin", "https://me:hidden@host/a.git"]);
    let index = fs::metadata(work.root().join(".git/index"))
        .unwrap()
        .modified()
        .unwrap();
    let run = work.run();
    let commit = commit_of(&run);
    assert_eq!(commit.hash.as_ref().unwrap().len(), 40);
    assert_eq!(commit.branch.as_deref(), Some("main"));
    assert_eq!(commit.remote.as_deref(), Some("https://host/a.git"));
    assert!(!commit.is_dirty() && commit.untracked.is_empty() && commit.diff.is_none());
    let later = fs::metadata(work.root().join(".git/index"))
        .unwrap()
        .modified()
        .unwrap();
    assert_eq!(index, later);
    work.git(&["checkout", "-q", "--detach"]);
    assert_eq!(commit_of(&work.run()).branch, None);
}

#[test]
fn a_changed_line_names_its_file() {
    let work = Work::new();
    let clean = work.run();
    work.write("src/main.rs", "fn main() { }\n");
    work.write("src/new.rs", "new\n");
    work.write("runs/a/journal.jsonl", "{}\n");
    work.write("target/x.rs", "x\n");
    let dirty = work.run();
    let hash = |text: &str| SourceState::Hash(blake3::hash(text.as_bytes()).to_string());
    let commit = commit_of(&dirty);
    assert!(commit.is_dirty() && commit.diff.is_some());
    assert_eq!(
        commit.changed,
        [("src/main.rs".to_owned(), hash("fn main() { }\n"))].into()
    );
    assert_eq!(
        commit.untracked,
        [("src/new.rs".to_owned(), hash("new\n"))].into()
    );
    assert_eq!(
        work.differing(&clean, &dirty),
        ["source src/main.rs", "source src/new.rs"]
    );
    // The two need no repository for that.
    assert_eq!(
        diff(&clean, &dirty),
        diff_with_git(&clean, &dirty, work.root())
    );
    assert_eq!(work.differing(&dirty, &work.run()), Vec::<String>::new());
    work.write("src/main.rs", "fn main() {  }\n");
    assert_eq!(work.differing(&dirty, &work.run()), ["source src/main.rs"]);
}

#[test]
fn files_that_differ_between_commits_are_named_and_what_was_committed_since_is_not() {
    let work = Work::new();
    let first = work.run();
    work.write("src/main.rs", "changed\n");
    fs::remove_file(work.root().join("src/é lib.rs")).unwrap();
    work.write("src/new.rs", "new\n");
    let dirty = work.run();
    assert_eq!(
        commit_of(&dirty).changed["src/é lib.rs"],
        SourceState::Deleted
    );
    work.commit();
    let second = work.run();
    assert_eq!(work.differing(&dirty, &second), ["commit"]);
    assert_eq!(work.differing(&second, &dirty), ["commit"]);
    let all = [
        "source src/main.rs",
        "source src/new.rs",
        "source src/é lib.rs",
        "commit",
    ];
    assert_eq!(work.differing(&first, &second), all);
    work.write("src/new.rs", "newer\n");
    assert_eq!(
        work.differing(&dirty, &work.run()),
        ["source src/new.rs", "commit"]
    );
    // Elsewhere, the commits are not known.
    let elsewhere = tempfile::tempdir().unwrap();
    let found = diff_with_git(&first, &second, elsewhere.path());
    assert_eq!(found, diff(&first, &second));
}

#[test]
fn what_is_too_much_is_noted_and_what_is_no_repository_is_absent() {
    let work = Work::new();
    work.write("data.bin", "0\n");
    work.commit();
    let lines = (0..1 << 17).map(|at| format!("{at:064}\n"));
    work.write("data.bin", &lines.collect::<String>());
    let state = Repository::around(work.root()).unwrap().state().unwrap();
    assert_eq!((state.diff, state.commit.diff), (None, None));
    assert!(
        state.notes[0].starts_with("git diff HEAD "),
        "{:?}",
        state.notes
    );
    assert!(matches!(
        state.commit.changed["data.bin"],
        SourceState::Hash(_)
    ));

    let empty = Work(tempfile::tempdir().unwrap());
    assert!(Repository::around(empty.root()).is_none());
    fs::create_dir(empty.root().join(".git")).unwrap();
    assert!(Repository::around(empty.root()).unwrap().state().is_none());
    empty.git(&["init", "-q", "-b", "main"]);
    empty.write("a.rs", "");
    let run = empty.run();
    assert_eq!(
        (
            commit_of(&run).hash.as_ref(),
            commit_of(&run).untracked.len()
        ),
        (None, 1)
    );
}
