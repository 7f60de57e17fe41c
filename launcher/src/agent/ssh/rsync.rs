//! Copies what a program needs to the same paths on all hosts, by rsync over the same SSH.

use std::ffi::OsString;
use std::io::Read;
use std::path::{Component, Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::{self, JoinHandle};

use super::client::{Ssh, not_started};
use super::is_own;
use crate::error::{Error, Result};
use crate::event::{Channel, Event};
use crate::process::{End, Process, RankProcess};
use crate::settings::hosts::ListedHost;
use crate::supervisor::group::watch;
use crate::supervisor::signals::asks_to_end;

/// Paths from the root, at which the hosts get what is there.
///
/// # Errors
/// When a path is not there.
pub(super) fn whole(paths: &[PathBuf]) -> Result<Vec<PathBuf>> {
    paths.iter().map(|path| whole_path(path)).collect()
}

/// Copies what is at whole paths to each of `hosts` that is not this one, to all of them at once.
///
/// # Errors
/// When one of the hosts does not get it; when a signal arrives that asks to end.
pub(super) fn copy(
    ssh: &Ssh,
    hosts: &[ListedHost],
    paths: &[PathBuf],
    channel: &Channel,
) -> Result<()> {
    if paths.is_empty() {
        return Ok(());
    }
    let others = hosts.iter().filter(|host| !is_own(host));
    let mut copies = Vec::new();
    for host in others {
        let copy = Copy::start(ssh, host, paths)?;
        watch(copies.len(), &copy.process, &channel.sender);
        copies.push(Some(copy));
    }
    while copies.iter().any(Option::is_some) {
        match channel.next(None) {
            Event::Ended { rank, end } => {
                if let Some(copy) = copies.get_mut(rank).and_then(Option::take) {
                    copy.finish(end)?;
                }
            }
            Event::Signal(signal) if asks_to_end(signal) => return Err(Error::interrupted(signal)),
            _ => {}
        }
    }
    Ok(())
}

/// The command that copies whole paths to a host.
pub(super) fn command(ssh: &Ssh, host: &ListedHost, paths: &[PathBuf]) -> Command {
    let mut command = Command::new("rsync");
    // Folders above what is copied are made where they are not there, and stay as they are elsewhere.
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
    process: Process,
    stderr: Option<JoinHandle<String>>,
}

impl<'a> Copy<'a> {
    fn start(ssh: &Ssh, host: &'a ListedHost, paths: &[PathBuf]) -> Result<Self> {
        let mut command = command(ssh, host, paths);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        let mut process = Process::spawn(&mut command).map_err(|error| {
            Error::system("--rsync: rsync could not be started; install it here and on all hosts")
                .with_source(error)
        })?;
        let pipe = process.take_stderr();
        let stderr = pipe.map(|mut pipe| {
            thread::spawn(move || {
                let mut said = Vec::new();
                // What cannot be read is not shown.
                let _ = pipe.read_to_end(&mut said);
                String::from_utf8_lossy(&said).trim().to_owned()
            })
        });
        Ok(Self {
            host,
            process,
            stderr,
        })
    }

    fn finish(mut self, end: End) -> Result<()> {
        self.process.reap();
        if end.is_success() {
            return Ok(());
        }
        let said = self
            .stderr
            .and_then(|stderr| stderr.join().ok())
            .unwrap_or_default();
        Err(Error::system(match end {
            // That of ssh itself.
            End::Code(255) => not_started(self.host, end, &said),
            _ => {
                let why = match said.contains("rsync: command not found")
                    || said.contains("rsync: not found")
                {
                    true => "install rsync there".to_owned(),
                    false => format!("rsync ended with {end}"),
                };
                format!(
                    "host {} did not get what --rsync names: {why}\n  {}",
                    self.host,
                    said.replace('\n', "\n  ")
                )
            }
        }))
    }
}

fn whole_path(path: &Path) -> Result<PathBuf> {
    let there = path.symlink_metadata();
    there.map_err(|error| Error::usage(format!("--rsync {}: {error}", path.display())))?;
    let has_parent = path.components().any(|part| part == Component::ParentDir);
    let whole = match has_parent {
        true => path.canonicalize(),
        false => std::path::absolute(path),
    };
    whole.map_err(|error| Error::system(format!("--rsync {}", path.display())).with_source(error))
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
    fn whole_paths_are_copied_over_the_ssh_of_the_job() {
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
    fn a_path_is_made_whole_and_has_to_be_there() {
        let here = std::env::current_dir().unwrap();
        assert_eq!(
            whole_path(Path::new("./Cargo.toml")).unwrap(),
            here.join("Cargo.toml")
        );
        assert_eq!(
            whole_path(Path::new("src/../Cargo.toml")).unwrap(),
            here.join("Cargo.toml")
        );
        assert!(
            whole_path(Path::new("no/such"))
                .unwrap_err()
                .to_string()
                .starts_with("--rsync no/such: ")
        );
    }
}
