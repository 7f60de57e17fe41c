//! Asks the program `git` for the state of the sources. It gets a short time, and writes nothing.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use super::facts::Commit;
use super::mask::{MASK, mask_text};

/// The time that one question may take. Tests may run on a busy machine.
const PATIENCE: Duration = Duration::from_secs(if cfg!(test) { 60 } else { 2 });

/// The longest answer but a diff.
const LONGEST_ANSWER: usize = 32 << 20;

/// The longest diff that is recorded.
const LONGEST_DIFF: usize = 8 << 20;

/// A repository with a work tree.
#[derive(Clone, Debug)]
pub(super) struct Repository {
    root: PathBuf,
}

/// The state of a repository.
#[derive(Clone, Debug, Default)]
pub(super) struct State {
    pub(super) commit: Commit,
    /// The contents of which `commit.diff` is the hash.
    pub(super) diff: Option<Vec<u8>>,
    pub(super) notes: Vec<String>,
}

impl Repository {
    /// Finds the repository that contains `folder`.
    pub(super) fn around(folder: &Path) -> Option<Self> {
        let root = folder
            .ancestors()
            .find(|folder| folder.join(".git").exists())?;
        Some(Self {
            root: root.to_path_buf(),
        })
    }

    /// Returns the present state; `None` if git cannot tell.
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
                    "git status takes longer than {} s: whether files differ from the commit is not recorded",
                    PATIENCE.as_secs()
                ));
                None
            }
        };
        let mut commit = match status {
            Some(status) => commit_of(&status),
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

    fn status(&self) -> Result<Vec<u8>, Stopped> {
        let status = [
            "status",
            "--porcelain=v2",
            "--branch",
            "-z",
            "--untracked-files=no",
        ];
        self.ask(&status, LONGEST_ANSWER)
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
        output(&mut command, limit, PATIENCE)
    }
}

/// Reads the answer of `git status`.
fn commit_of(status: &[u8]) -> Commit {
    let mut commit = Commit::default();
    for record in status.split(|&byte| byte == 0) {
        let record = String::from_utf8_lossy(record);
        match record.split(' ').collect::<Vec<_>>()[..] {
            ["#", "branch.oid", "(initial)"] | ["#", "branch.head", "(detached)"] => {}
            ["#", "branch.oid", hash] => commit.hash = Some(hash.to_owned()),
            ["#", "branch.head", branch] => commit.branch = Some(branch.to_owned()),
            ["1" | "2" | "u", ..] => commit.dirty = true,
            _ => {}
        }
    }
    commit
}

/// Why there is no output.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Stopped {
    /// It could not be started, or said that it failed.
    Failed,
    /// It took too long.
    TooLate,
    /// It wrote too much.
    TooLong,
}

/// Returns what `command` writes to standard output: at most `limit` bytes, within `time`.
fn output(command: &mut Command, limit: usize, time: Duration) -> Result<Vec<u8>, Stopped> {
    let end = Instant::now() + time;
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    // Of its own group, so that what it starts ends with it.
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(command, 0);
    #[cfg(unix)]
    accelerator_env::heed_children();
    let mut child = command.spawn().map_err(|_| Stopped::Failed)?;
    let found = read(&mut child, limit, end);
    if found.is_err() {
        kill(&mut child);
    }
    found
}

fn read(child: &mut Child, limit: usize, end: Instant) -> Result<Vec<u8>, Stopped> {
    let stdout = child.stdout.take().ok_or(Stopped::Failed)?;
    let (sender, receiver) = mpsc::sync_channel(1);
    // A thread, since a process that the command started may hold the pipe open for ever.
    let reader = move || {
        let mut bytes = Vec::new();
        let read = stdout.take(limit as u64 + 1).read_to_end(&mut bytes);
        // Nobody waits after the deadline.
        let _ = sender.send(read.map(|_| bytes));
    };
    let spawned = thread::Builder::new()
        .name("track-read".into())
        .spawn(reader);
    spawned.map_err(|_| Stopped::Failed)?;
    let left = end.saturating_duration_since(Instant::now());
    let bytes = match receiver.recv_timeout(left) {
        Ok(Ok(bytes)) if bytes.len() > limit => return Err(Stopped::TooLong),
        Ok(Ok(bytes)) => bytes,
        Ok(Err(_)) | Err(mpsc::RecvTimeoutError::Disconnected) => return Err(Stopped::Failed),
        Err(mpsc::RecvTimeoutError::Timeout) => return Err(Stopped::TooLate),
    };
    loop {
        match child.try_wait() {
            Ok(Some(status)) if status.success() => return Ok(bytes),
            Ok(None) if Instant::now() < end => thread::sleep(Duration::from_millis(1)),
            Ok(None) => return Err(Stopped::TooLate),
            Ok(Some(_)) | Err(_) => return Err(Stopped::Failed),
        }
    }
}

/// Kills the command and what it started, unless it has ended.
fn kill(child: &mut Child) {
    if !matches!(child.try_wait(), Ok(None)) {
        return;
    }
    #[cfg(unix)]
    if let Some(group) = i32::try_from(child.id())
        .ok()
        .and_then(rustix::process::Pid::from_raw)
    {
        // It may just have ended.
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
    }
    let _ = child.kill();
    let _ = child.wait();
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    fn shell(script: &str, limit: usize) -> Result<Vec<u8>, Stopped> {
        let mut command = Command::new("sh");
        output(
            command.args(["-c", script]),
            limit,
            Duration::from_millis(400),
        )
    }

    #[test]
    fn what_hangs_floods_or_fails_is_given_up() {
        let start = Instant::now();
        assert_eq!(shell("echo a", 2), Ok(b"a\n".to_vec()));
        assert_eq!(shell("echo ab", 2), Err(Stopped::TooLong));
        assert_eq!(shell("yes", 1000), Err(Stopped::TooLong));
        assert_eq!(shell("echo a; exit 3", 10), Err(Stopped::Failed));
        assert_eq!(shell("sleep 20", 10), Err(Stopped::TooLate));
        // The pipe stays open after the command itself.
        assert_eq!(shell("sleep 20 & echo a", 10), Err(Stopped::TooLate));
        let mut missing = Command::new("no-such-program");
        assert_eq!(
            output(&mut missing, 1, Duration::from_secs(1)),
            Err(Stopped::Failed)
        );
        assert!(start.elapsed() < Duration::from_secs(10));
    }
}
