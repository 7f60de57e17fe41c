//! What git knows of the sources. It is asked by its program, for a short while, and writes nothing.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use super::bounded::{self, Stopped};
use super::facts::{Commit, SourceState};
use super::files::hash_file;
use super::mask::{MASK, mask_text};

/// For how long one question may take. Tests may run on a busy machine.
const PATIENCE: Duration = Duration::from_secs(if cfg!(test) { 60 } else { 2 });

/// The longest answer but a diff.
const LONGEST_ANSWER: usize = 32 << 20;

/// The longest diff that is recorded.
const LONGEST_DIFF: usize = 8 << 20;

/// How many bytes of files that are not as in the commit are read.
const MOST_BYTES: u64 = 64 << 20;

/// How many source files that are not tracked are recorded.
const MOST_UNTRACKED: usize = 1000;

/// A repository with a work tree.
#[derive(Clone, Debug)]
pub(super) struct Repository {
    root: PathBuf,
}

/// The state of a repository.
#[derive(Clone, Debug, Default)]
pub(super) struct State {
    pub(super) commit: Commit,
    /// What `commit.diff` is the hash of.
    pub(super) diff: Option<Vec<u8>>,
    pub(super) notes: Vec<String>,
}

impl Repository {
    /// The one that has `folder`.
    pub(super) fn around(folder: &Path) -> Option<Self> {
        let root = folder
            .ancestors()
            .find(|folder| folder.join(".git").exists())?;
        Some(Self {
            root: root.to_path_buf(),
        })
    }

    /// What is there now; nothing where git cannot tell.
    pub(super) fn state(&self) -> Option<State> {
        let (status, diff, remote) = thread::scope(|scope| {
            let diff = scope.spawn(|| self.diff());
            let remote = scope.spawn(|| self.remote());
            let status = self.status();
            // A thread that panics has no answer.
            (
                status,
                diff.join().unwrap_or(Err(Stopped::Failed)),
                remote.join().unwrap_or_default(),
            )
        });
        let mut notes = Vec::new();
        let status = match status {
            Ok(status) => Some(status),
            Err(Stopped::Failed) => None,
            Err(_) => {
                notes.push(format!(
                    "git status takes longer than {} s or lists too much: which files differ from the commit is not \
                     recorded",
                    PATIENCE.as_secs()
                ));
                None
            }
        };
        let mut commit = match status {
            Some(status) => self.read_status(&status, &mut notes),
            None => Commit {
                hash: Some(self.line(&["rev-parse", "--verify", "HEAD"])?),
                ..Commit::default()
            },
        };
        commit.root = self.root.to_string_lossy().into_owned();
        commit.remote = remote;
        let diff = match diff {
            Ok(diff) => Some(diff).filter(|diff| !diff.is_empty()),
            // Before the first commit there is none.
            Err(Stopped::Failed) => None,
            Err(why) => {
                let why = match why {
                    Stopped::TooLong => format!("is larger than {} MiB", LONGEST_DIFF >> 20),
                    _ => format!("takes longer than {} s", PATIENCE.as_secs()),
                };
                notes.push(format!("git diff HEAD {why}: it is not recorded"));
                None
            }
        };
        commit.diff = diff.as_ref().map(|diff| blake3::hash(diff).to_string());
        Some(State {
            commit,
            diff,
            notes,
        })
    }

    /// The files that differ between two commits, where it has both.
    pub(super) fn differing(&self, a: &str, b: &str) -> Option<Vec<String>> {
        let names = self.ask(
            &["diff", "--name-only", "--no-renames", "-z", a, b, "--"],
            LONGEST_ANSWER,
        );
        Some(records(&names.ok()?).collect())
    }

    /// The BLAKE3 sum of a file in a commit; none where it has no such file.
    pub(super) fn hash_at(&self, commit: &str, path: &str) -> Option<String> {
        let contents = self.ask(
            &["cat-file", "blob", &format!("{commit}:{path}")],
            LONGEST_ANSWER,
        );
        Some(blake3::hash(&contents.ok()?).to_string())
    }

    fn status(&self) -> Result<Vec<u8>, Stopped> {
        let ask = |untracked| {
            let status = [
                "status",
                "--porcelain=v2",
                "--branch",
                "-z",
                "--no-renames",
                untracked,
            ];
            self.ask(&status, LONGEST_ANSWER)
        };
        match ask("--untracked-files=all") {
            // There may be a data set among them.
            Err(Stopped::TooLate | Stopped::TooLong) => ask("--untracked-files=no"),
            answer => answer,
        }
    }

    fn read_status(&self, status: &[u8], notes: &mut Vec<String>) -> Commit {
        let mut commit = Commit::default();
        let mut budget = MOST_BYTES;
        let mut untracked = Vec::new();
        for record in records(status) {
            let (kind, rest) = record.split_once(' ').unwrap_or_default();
            let fields_before_path = match kind {
                "#" => {
                    match rest.split_once(' ') {
                        Some(("branch.oid", "(initial)")) | Some(("branch.head", "(detached)")) => {
                        }
                        Some(("branch.oid", hash)) => commit.hash = Some(hash.to_owned()),
                        Some(("branch.head", branch)) => commit.branch = Some(branch.to_owned()),
                        _ => {}
                    }
                    continue;
                }
                "?" => {
                    untracked.push(rest.to_owned());
                    continue;
                }
                "1" => 7,
                "u" => 9,
                _ => continue,
            };
            if let Some(path) = rest
                .splitn(fields_before_path + 1, ' ')
                .nth(fields_before_path)
            {
                commit
                    .changed
                    .insert(path.to_owned(), self.state_of(path, &mut budget));
            }
        }
        untracked.retain(|path| is_source(path));
        if untracked.len() > MOST_UNTRACKED {
            notes.push(format!(
                "{} source files are not tracked by git: the first {MOST_UNTRACKED} are recorded",
                untracked.len()
            ));
            untracked.truncate(MOST_UNTRACKED);
        }
        let states = untracked.into_iter().map(|path| {
            let state = self.state_of(&path, &mut budget);
            (path, state)
        });
        commit.untracked = states.collect::<BTreeMap<_, _>>();
        commit
    }

    fn state_of(&self, path: &str, budget: &mut u64) -> SourceState {
        let path = self.root.join(path);
        match path.symlink_metadata() {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => SourceState::Deleted,
            Ok(metadata) if metadata.is_file() && metadata.len() <= *budget => {
                *budget -= metadata.len();
                let hash = hash_file(&path).ok().and_then(|file| file.hash);
                hash.map_or(SourceState::Unread, SourceState::Hash)
            }
            _ => SourceState::Unread,
        }
    }

    fn diff(&self) -> Result<Vec<u8>, Stopped> {
        let arguments = [
            "diff",
            "--binary",
            "--no-color",
            "--no-ext-diff",
            "--no-textconv",
            "--no-renames",
            "--src-prefix=a/",
            "--dst-prefix=b/",
            "HEAD",
            "--",
        ];
        self.ask(&arguments, LONGEST_DIFF)
    }

    fn remote(&self) -> Option<String> {
        let answer = self
            .ask(
                &["config", "--get-regexp", r"^remote\..*\.url$"],
                LONGEST_ANSWER,
            )
            .ok()?;
        let answer = String::from_utf8_lossy(&answer);
        let mut remotes = answer.lines().filter_map(|line| line.split_once(' '));
        let is_origin = |(key, _): &(&str, &str)| *key == "remote.origin.url";
        let (_, url) = remotes.clone().find(is_origin).or_else(|| remotes.next())?;
        Some(mask_text(url).replace(&format!("{MASK}@"), ""))
    }

    fn line(&self, arguments: &[&str]) -> Option<String> {
        let answer = String::from_utf8(self.ask(arguments, LONGEST_ANSWER).ok()?).ok()?;
        Some(answer.trim_end().to_owned())
    }

    fn ask(&self, arguments: &[&str], limit: usize) -> Result<Vec<u8>, Stopped> {
        let mut command = Command::new("git");
        command
            .current_dir(&self.root)
            // Neither a daemon nor a prompt, and no write to the index.
            .args([
                "-c",
                "core.fsmonitor=false",
                "-c",
                "core.quotePath=false",
                "--no-pager",
            ])
            .args(arguments)
            .env("GIT_OPTIONAL_LOCKS", "0")
            .env("GIT_TERMINAL_PROMPT", "0")
            .env("LC_ALL", "C");
        // The folder says which repository, not a hook in which this runs.
        for name in ["GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX"] {
            command.env_remove(name);
        }
        bounded::output(&mut command, limit, PATIENCE)
    }
}

/// What stands between zeros.
fn records(answer: &[u8]) -> impl Iterator<Item = String> {
    let records = answer
        .split(|&byte| byte == 0)
        .filter(|record| !record.is_empty());
    records.map(|record| String::from_utf8_lossy(record).into_owned())
}

/// Whether a file that git does not track is part of a program, or sets it up. What runs write, JSON among it, is not.
fn is_source(path: &str) -> bool {
    const ENDINGS: [&str; 19] = [
        "c", "cc", "cpp", "cu", "cuh", "h", "hpp", "lock", "metal", "proto", "py", "ron", "rs",
        "sh", "slang", "toml", "wgsl", "yaml", "yml",
    ];
    let ending = Path::new(path)
        .extension()
        .and_then(|ending| ending.to_str());
    ending.is_some_and(|ending| ENDINGS.contains(&ending))
}
