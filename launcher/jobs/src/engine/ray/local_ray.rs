//! A Ray on this host, which `accel-jobs ray start` starts and `accel-jobs ray stop` ends.
//!
//! `ray start --block` stays, and ends all that it has started when it is ended. (`ray stop` would end every Ray of the
//! machine.)

use std::fs::{self, File};
use std::io;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use rustix::io::Errno;
use rustix::process::Signal;

use crate::engine::process::ProcessIdentity;
use crate::error::{Error, Result};

/// How long Ray may take to start and to end.
const START_LIMIT: Duration = Duration::from_secs(180);
const STOP_LIMIT: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(100);
/// What Ray prints when it is there.
const STARTED: &str = "Ray runtime started.";
const LAST_LINES: usize = 10;

/// What a host is to a cluster.
pub(crate) enum RayRole {
    /// The host to which others connect.
    Head,
    /// One that connects to the head at this address.
    Worker(String),
}

impl RayRole {
    /// The command that starts it.
    pub(crate) fn command(&self, options: &[String]) -> Vec<String> {
        let role = match self {
            Self::Head => "--head".to_owned(),
            Self::Worker(address) => format!("--address={address}"),
        };
        let words = ["ray", "start", "--block", "--log-color=false", &role];
        words
            .iter()
            .map(ToString::to_string)
            .chain(options.iter().cloned())
            .collect()
    }
}

/// The Ray of this host.
pub(crate) struct LocalRay {
    folder: PathBuf,
}

impl LocalRay {
    /// Whose process and log are kept in `folder`, which several hosts may share.
    pub(crate) fn of(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// Starts it: what there is to say about it.
    ///
    /// # Errors
    /// When it runs already, or does not start.
    pub(crate) fn start(&self, words: &[String]) -> Result<String> {
        let failed = |error: io::Error| Error::system("Ray cannot be started").with_source(error);
        fs::create_dir_all(&self.folder).map_err(failed)?;
        let _lock = self.lock()?;
        if let Some(process) = self.process().filter(|process| process.is_alive()) {
            return Err(Error::refused(format!(
                "Ray runs on this host already (process {}); end it by `accel-launch jobs ray stop`",
                process.pid
            )));
        }
        let log = File::create(self.file("log")).map_err(failed)?;
        let mut command = Command::new(&words[0]);
        command
            .args(&words[1..])
            .stdin(Stdio::null())
            .stdout(log.try_clone().map_err(failed)?)
            .stderr(log)
            // Ctrl-C does not reach it.
            .process_group(0);
        let mut child = command.spawn().map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => Error::usage(
                "the program ray is not on the PATH; install it: pip install 'ray[default]'",
            ),
            _ => failed(error),
        })?;
        let process = i32::try_from(child.id()).ok().and_then(ProcessIdentity::of);
        let text = serde_json::to_vec(&process).map_err(|error| failed(error.into()))?;
        fs::write(self.file("json"), text).map_err(failed)?;
        let deadline = Instant::now() + START_LIMIT;
        loop {
            let ended = child.try_wait().map_err(failed)?;
            let said = fs::read_to_string(self.file("log")).unwrap_or_default();
            if let Some(status) = ended {
                // Its file is of no use to `stop`.
                let _ = fs::remove_file(self.file("json"));
                let lines: Vec<_> = said
                    .lines()
                    .filter(|line| !line.trim().is_empty())
                    .collect();
                return Err(Error::refused(format!(
                    "Ray has not started ({status}); it says:\n{}",
                    lines[lines.len().saturating_sub(LAST_LINES)..].join("\n")
                )));
            }
            if said.contains(STARTED) {
                return Ok(self.told(&said));
            }
            if Instant::now() > deadline {
                return Err(Error::unreachable(format!(
                    "Ray has not started in {} s; see {}, and end it by `accel-launch jobs ray stop`",
                    START_LIMIT.as_secs(),
                    self.file("log").display()
                )));
            }
            thread::sleep(POLL);
        }
    }

    /// Ends it: what there is to say about that.
    ///
    /// # Errors
    /// When none was started here, or it does not end.
    pub(crate) fn stop(&self) -> Result<String> {
        let none =
            || Error::not_found("`accel-launch jobs ray start` has started no Ray on this host");
        // Without its folder there is no place for the lock.
        if !self.folder.is_dir() {
            return Err(none());
        }
        let _lock = self.lock()?;
        let process = self.process().ok_or_else(none)?;
        let deadline = Instant::now() + STOP_LIMIT;
        process.signal(Signal::TERM);
        while process.is_alive() {
            if Instant::now() > deadline {
                return Err(Error::system(format!(
                    "Ray (process {}) does not end; see {}",
                    process.pid,
                    self.file("log").display()
                )));
            }
            thread::sleep(POLL);
        }
        fs::remove_file(self.file("json")).map_err(|error| {
            Error::system("the record of Ray cannot be removed").with_source(error)
        })?;
        Ok("Ray stopped\n".to_owned())
    }

    /// Locks Ray while a command starts or stops it, so that no command loses track of a process that another has
    /// recorded.
    fn lock(&self) -> Result<RayLock> {
        let failed = |error: io::Error| Error::system("Ray cannot be locked").with_source(error);
        let path = self.file("lock");
        let options = File::options().create(true).append(true).open(path);
        let file = options.map_err(failed)?;
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(RayLock(file)),
            Err(Errno::WOULDBLOCK) => Err(Error::refused(
                "another command is starting or stopping Ray on this host; try again when it has finished",
            )),
            Err(error) => Err(failed(error.into())),
        }
    }

    /// The process that holds it, where one was started.
    fn process(&self) -> Option<ProcessIdentity> {
        serde_json::from_slice(&fs::read(self.file("json")).ok()?).ok()
    }

    fn file(&self, kind: &str) -> PathBuf {
        let system = rustix::system::uname();
        let host = system.nodename().to_string_lossy();
        self.folder.join(format!("{host}.{kind}"))
    }

    /// What Ray has said that others need.
    fn told(&self, said: &str) -> String {
        let mut text = format!(
            "Ray runs on this host; its log is {}\n",
            self.file("log").display()
        );
        if let Some(address) = between(said, "ray start --address='", "'") {
            text += &format!("on other hosts: accel-launch jobs ray start --address {address}\n");
        }
        if let Some(address) = between(said, "RAY_API_SERVER_ADDRESS='", "'") {
            text += &format!("for jobs: --ray-address {address}\n");
        }
        text
    }
}

/// Holds the lock until it is dropped.
struct RayLock(File);

impl Drop for RayLock {
    fn drop(&mut self) {
        // A process that another thread starts holds the file, too, until it has become its program.
        let _ = rustix::fs::flock(&self.0, FlockOperation::Unlock);
    }
}

fn between<'a>(text: &'a str, before: &str, after: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(before)?;
    Some(rest.split_once(after)?.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_those_of_ray() {
        let command = |role: RayRole| role.command(&["--num-cpus=2".to_owned()]).join(" ");
        assert_eq!(
            command(RayRole::Head),
            "ray start --block --log-color=false --head --num-cpus=2"
        );
        let worker = command(RayRole::Worker("h:6379".to_owned()));
        assert_eq!(
            worker,
            "ray start --block --log-color=false --address=h:6379 --num-cpus=2"
        );
    }

    #[test]
    fn one_command_at_a_time_starts_or_stops_it() {
        let folder = tempfile::tempdir().unwrap();
        let ray = LocalRay::of(folder.path().to_owned());
        let start = || ray.start(&["false".to_owned()]).unwrap_err().to_string();
        let lock = ray.lock().unwrap();
        let stop = || ray.stop().unwrap_err();
        assert!(
            start().contains("another command is starting"),
            "{}",
            start()
        );
        assert!(stop().to_string().contains("another command is starting"));
        drop(lock);
        assert!(start().contains("has not started"), "{}", start());
        let nothing = stop();
        assert!(nothing.is_not_found(), "{nothing}");
        drop(folder);
        let nothing = stop();
        assert!(nothing.is_not_found(), "{nothing}");
    }

    #[test]
    fn what_others_need_is_told() {
        // Of Ray 2.60, shortened.
        let said = "Local node IP: 10.77.0.1\n\nRay runtime started.\n\nNext steps\n  To add another node to this Ray \
            cluster, run\n    ray start --address='10.77.0.1:6379'\n  \n  To submit a Ray job using the Ray Jobs CLI:\n    \
            RAY_API_SERVER_ADDRESS='http://10.77.0.1:8265' ray job submit --working-dir . -- python my_script.py\n";
        let told = LocalRay::of(PathBuf::from("/jobs/_ray")).told(said);
        assert!(told.contains("start --address 10.77.0.1:6379\n"), "{told}");
        assert!(
            told.ends_with("--ray-address http://10.77.0.1:8265\n"),
            "{told}"
        );
    }
}
