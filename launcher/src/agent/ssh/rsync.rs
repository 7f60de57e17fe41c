//! Copies the files of a program to the same paths on all hosts, by rsync over the same SSH.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::path::{Component, Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::time::Instant;

use accelerator_host::sync::Mutex;
use rustix::process::Signal;

use super::client::{AgentStderr, LAST_WORDS, Ssh, keep, may_pass, not_started};
use super::is_own;
use super::job::{MAX_STARTING, MAX_TRIES, RETRY};
use crate::agent::line::spawn;
use crate::error::{BEFORE_START, Error, Result, ended_by};
use crate::event::{Channel, Event};
use crate::process::{End, Process, RankProcess};
use crate::settings::hosts::ListedHost;
use crate::supervisor::group::watch;
use crate::supervisor::signals::asks_to_end;

/// Makes paths absolute; hosts get the same files at the same paths.
///
/// # Errors
/// When a path is not there.
pub(super) fn absolute_paths(paths: &[PathBuf]) -> Result<Vec<PathBuf>> {
    paths.iter().map(|path| absolute_path(path)).collect()
}

/// Copies files and folders at absolute paths to each of `hosts` that is not this one, to many of them at once. A host
/// whose connection is refused is tried again.
///
/// # Errors
/// When one of the hosts does not get it; when a signal arrives that asks to end.
pub(super) fn copy(
    ssh: &Ssh,
    hosts: &[ListedHost],
    paths: &[PathBuf],
    channel: &Channel,
) -> Result<()> {
    let others = hosts.iter().filter(|host| !is_own(host));
    let mut waiting: VecDeque<_> = others.map(|host| (host, 1, Instant::now())).collect();
    let mut copies: Vec<Option<Copy<'_>>> = Vec::new();
    if paths.is_empty() {
        return Ok(());
    }
    loop {
        let now = Instant::now();
        let running = copies.iter().flatten().count();
        let may_start = |(_, _, at): &(_, _, Instant)| *at <= now && running < MAX_STARTING;
        if let Some((host, tries, _)) = waiting.pop_front_if(|next| may_start(next)) {
            let copy = Copy::start(ssh, host, tries, paths)?;
            watch(copies.len(), &copy.process, &channel.sender);
            copies.push(Some(copy));
            continue;
        }
        if running == 0 && waiting.is_empty() {
            return Ok(());
        }
        let next = waiting.front().map(|(_, _, at)| *at);
        match channel.next(next.filter(|_| running < MAX_STARTING)) {
            Event::Ended { rank, end } => {
                let Some(copy) = copies.get_mut(rank).and_then(Option::take) else {
                    continue;
                };
                let (host, tries) = (copy.host, copy.tries);
                match copy.finish(end) {
                    Ok(()) => {}
                    Err(CopyError::MayPass(_)) if tries < MAX_TRIES => {
                        waiting.push_back((host, tries + 1, Instant::now() + RETRY));
                    }
                    Err(CopyError::MayPass(error) | CopyError::Final(error)) => return Err(error),
                }
            }
            Event::Signal(signal) if asks_to_end(signal) => {
                return Err(ended_by(signal, BEFORE_START));
            }
            _ => {}
        }
    }
}

/// The command that copies absolute paths to a host.
pub(super) fn command(ssh: &Ssh, host: &ListedHost, paths: &[PathBuf]) -> Command {
    let mut command = Command::new("rsync");
    // Missing parent folders are made; those that exist stay as they are.
    command.args([
        "--archive",
        "--relative",
        "--no-implied-dirs",
        "--timeout=60",
        "--rsh",
    ]);
    command
        .arg(remote_shell(&ssh.words(host)))
        .arg("--")
        .args(paths);
    command.arg(match host.name.contains(':') {
        true => format!("[{}]:/", host.name),
        false => format!("{}:/", host.name),
    });
    command
}

/// A copy to a host. Dropped before it has ended, it is killed.
struct Copy<'a> {
    host: &'a ListedHost,
    tries: u32,
    process: Process,
    stderr: Arc<Mutex<AgentStderr>>,
    /// Gives nothing; ends when all that rsync prints was read.
    printed: Receiver<()>,
}

/// The reason for which a host did not get the files.
enum CopyError {
    /// Another attempt may succeed.
    MayPass(Error),
    Final(Error),
}

impl<'a> Copy<'a> {
    fn start(ssh: &Ssh, host: &'a ListedHost, tries: u32, paths: &[PathBuf]) -> Result<Self> {
        let mut command = command(ssh, host, paths);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        let mut process = Process::spawn(&mut command).map_err(|error| {
            Error::system("--rsync: rsync could not be started; install it here and on all hosts")
                .with_source(error)
        })?;
        let stderr = Arc::new(Mutex::new(AgentStderr::default()));
        let (printing, printed) = mpsc::channel();
        if let Some(pipe) = process.take_stderr() {
            let stderr = Arc::clone(&stderr);
            spawn("rsync-stderr", move || {
                keep(pipe, &stderr);
                drop(printing);
            })?;
        }
        Ok(Self {
            host,
            tries,
            process,
            stderr,
            printed,
        })
    }

    fn finish(mut self, end: End) -> std::result::Result<(), CopyError> {
        // A process that it has started may hold its pipe.
        self.process.signal_group(Signal::KILL);
        self.process.reap();
        if end.is_success() {
            return Ok(());
        }
        let _ = self.printed.recv_timeout(LAST_WORDS);
        let stderr = self.stderr.lock();
        let said = stderr.tail();
        if end == End::Code(255) {
            let error = Error::system(not_started(self.host, end, &said));
            return Err(match may_pass(end, &said) {
                true => CopyError::MayPass(error),
                false => CopyError::Final(error),
            });
        }
        let why = match end == End::Code(127) || said.contains("rsync: command not found") {
            true => "install rsync there".to_owned(),
            false => format!("rsync ended with {end}"),
        };
        Err(CopyError::Final(Error::system(format!(
            "host {} did not get what --rsync names: {why}\n  {}",
            self.host,
            said.replace('\n', "\n  ")
        ))))
    }
}

/// A link stays one: only the folders above it are followed, if `..` leads to them.
fn absolute_path(path: &Path) -> Result<PathBuf> {
    let found = path.symlink_metadata();
    found.map_err(|error| Error::usage(format!("--rsync {}: {error}", path.display())))?;
    let has_parent = path.components().any(|part| part == Component::ParentDir);
    let absolute = match (has_parent, path.parent(), path.file_name()) {
        (true, Some(parent), Some(name)) => parent.canonicalize().map(|parent| parent.join(name)),
        (true, _, _) => path.canonicalize(),
        (false, _, _) => std::path::absolute(path),
    };
    absolute
        .map_err(|error| Error::system(format!("--rsync {}", path.display())).with_source(error))
}

/// Words as rsync splits them: quotes keep blanks, and a quote within them is written twice.
fn remote_shell(words: &[OsString]) -> String {
    let quoted = words.iter().map(|word| {
        let word = word.to_string_lossy();
        match word.contains([' ', '\'', '"']) {
            true => format!("'{}'", word.replace('\'', "''")),
            false => word.into_owned(),
        }
    });
    quoted.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::super::client::Delivery;
    use super::*;
    use crate::settings::hosts::HostList;

    #[test]
    fn absolute_paths_are_copied_over_the_ssh_of_the_job() {
        let ssh = Ssh {
            arguments: vec!["-F".into(), "my config".into()],
            delivery: Delivery::Present(String::new()),
        };
        let words = |host: &str| -> Vec<String> {
            let hosts: HostList = host.parse().unwrap();
            let command = command(&ssh, &hosts.hosts()[0], &["/a b".into(), "/c".into()]);
            command
                .get_args()
                .map(|word| word.to_str().unwrap().to_owned())
                .collect()
        };
        let found = words("ann@a");
        let shell = &found[found.iter().position(|word| word == "--rsh").unwrap() + 1];
        assert!(shell.starts_with("ssh -F 'my config' -T "), "{shell}");
        assert!(shell.ends_with(" -l ann"), "{shell}");
        assert_eq!(found[found.len() - 4..], ["--", "/a b", "/c", "a:/"]);
        assert_eq!(words("[fd77::1]").last().unwrap(), "[fd77::1]:/");
    }

    #[test]
    fn a_path_is_made_absolute_and_has_to_be_there() {
        let here = std::env::current_dir().unwrap();
        assert_eq!(
            absolute_path(Path::new("./Cargo.toml")).unwrap(),
            here.join("Cargo.toml")
        );
        assert_eq!(
            absolute_path(Path::new("src/../Cargo.toml")).unwrap(),
            here.join("Cargo.toml")
        );
        let folder = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/etc", folder.path().join("link")).unwrap();
        let link = folder.path().join("x/../link");
        std::fs::create_dir(folder.path().join("x")).unwrap();
        let whole = folder.path().canonicalize().unwrap().join("link");
        assert_eq!(absolute_path(&link).unwrap(), whole);
        assert!(
            absolute_path(Path::new("no/such"))
                .unwrap_err()
                .to_string()
                .starts_with("--rsync no/such: ")
        );
    }
}
