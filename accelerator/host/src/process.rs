//! Programs: finding them, and running them within limits of time and output.

use std::io::{self, ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};

#[cfg(unix)]
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::sync::Mutex;

/// The limits of a program, and its process group.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The time that it may take.
    pub time: Duration,
    /// The number of bytes that it may write to standard output, and of those that are kept of standard error.
    pub output: usize,
    /// The process group that it runs in.
    pub group: Group,
}

/// The process group of a program.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Group {
    /// One of its own, so that its children are killed with it; Ctrl-C does not reach it.
    Own,
    /// The caller's, so that Ctrl-C ends both; its children may outlive it.
    Callers,
}

/// A program's end, and its output.
#[derive(Debug)]
pub struct Output {
    /// The way in which it ended.
    pub outcome: Outcome,
    /// True if standard output was read to its end; false also if a process that has left the group keeps it open.
    pub is_complete: bool,
    /// The bytes that it wrote to standard output; the first ones if there were too many.
    pub stdout: Vec<u8>,
    /// The first bytes that it wrote to standard error.
    pub stderr: Vec<u8>,
}

/// The end of a program that [`run`] has run.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Outcome {
    /// It ended by itself.
    Ended(ExitStatus),
    /// It was killed because it had not ended in time.
    OutOfTime,
    /// It exceeded the limit of standard output, and was killed if it still ran.
    OutputTooLong,
}

impl Output {
    /// Returns `true` if the program ended by itself, in success, and all its output was read.
    pub fn is_success(&self) -> bool {
        self.is_complete && matches!(self.outcome, Outcome::Ended(status) if status.success())
    }
}

/// Runs `command`, with nothing on its standard input, until it ends; kills it when it reaches a limit.
///
/// Children of the program do not delay the return, even if they keep the pipes open: its own group, if it has one, is
/// killed when the program has ended, and a process outside that group delays the return by two seconds at most.
///
/// ```
/// use std::process::Command;
/// use std::time::Duration;
///
/// use accelerator_host::process::{Group, Limits, Outcome, run};
///
/// # #[cfg(unix)] {
/// let limits = Limits { time: Duration::from_secs(60), output: 100, group: Group::Own };
/// let output = run(Command::new("echo").arg("a"), limits)?;
/// assert!(output.is_success());
/// assert_eq!(output.stdout, b"a\n");
///
/// let output = run(&mut Command::new("yes"), limits)?;
/// assert_eq!(output.outcome, Outcome::OutputTooLong);
/// # }
/// # Ok::<(), std::io::Error>(())
/// ```
///
/// # Errors
///
/// If the program cannot be started, or its exit status cannot be read.
pub fn run(command: &mut Command, limits: Limits) -> io::Result<Output> {
    run_with(command, Stdio::null(), limits)
}

/// Runs `command` as [`run`] does, with `stdin` as its standard input.
///
/// # Errors
///
/// The errors of [`run`].
pub fn run_with(
    command: &mut Command,
    stdin: impl Into<Stdio>,
    limits: Limits,
) -> io::Result<Output> {
    let deadline = Instant::now() + limits.time;
    command
        .stdin(stdin)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    #[cfg(unix)]
    {
        crate::heed_children();
        if limits.group == Group::Own {
            std::os::unix::process::CommandExt::process_group(command, 0);
        }
    }
    let mut child = spawn(command)?;
    let pipes = pipes_of(&mut child, limits.output);
    let reached = match &pipes {
        Ok((stdout, _)) => watch(&mut child, stdout, deadline)?,
        Err(_) => None,
    };
    // Also if it has ended: it is not reaped yet, so that its number is that of its group and of no other process. If
    // the system does not know the child any more, as `watch` found, the number may be another's.
    kill(&mut child, limits.group);
    let status = reap(&mut child);
    let (stdout, stderr) = pipes?;
    let until = Instant::now() + LAST_WAIT;
    let stdout = stdout.finish(LAST_WAIT);
    let stderr = stderr.finish(until.saturating_duration_since(Instant::now()));
    let outcome = match reached {
        Some(limit) => limit,
        None if stdout.is_cut => Outcome::OutputTooLong,
        None => Outcome::Ended(status?),
    };
    Ok(Output {
        outcome,
        is_complete: stdout.is_complete,
        stdout: stdout.bytes,
        stderr: stderr.bytes,
    })
}

/// A reader of a pipe on a thread of its own, so that nobody has to wait for a process that keeps the pipe open.
#[derive(Debug)]
pub struct Drain {
    kept: Arc<Mutex<Kept>>,
    /// Receives nothing; disconnected at the end of the pipe.
    end: Receiver<()>,
}

/// The bytes that were read from a pipe.
#[derive(Debug, Default)]
pub struct Kept {
    /// The first bytes, up to the limit.
    pub bytes: Vec<u8>,
    /// `true` if there were more.
    pub is_cut: bool,
    /// True once the pipe has ended.
    pub is_complete: bool,
    /// True once nobody wants more.
    is_closed: bool,
}

impl Drain {
    /// Reads `pipe` to its end, and keeps its first `limit` bytes.
    ///
    /// # Errors
    ///
    /// If the thread cannot be started.
    pub fn start(mut pipe: impl Read + Send + 'static, limit: usize) -> io::Result<Self> {
        let kept = Arc::new(Mutex::new(Kept::default()));
        let (reading, end) = mpsc::channel();
        let shared = Arc::clone(&kept);
        let read = move || {
            // Dropped when this thread ends.
            let _reading: Sender<()> = reading;
            let mut chunk = [0; CHUNK];
            loop {
                let read = match pipe.read(&mut chunk) {
                    Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                    Ok(0) => {
                        shared.lock().is_complete = true;
                        return;
                    }
                    // The bytes read before it are the output.
                    Err(_) => return,
                    Ok(read) => read,
                };
                let mut kept = shared.lock();
                if kept.is_closed {
                    continue;
                }
                let room = read.min(limit - kept.bytes.len());
                kept.bytes.extend_from_slice(&chunk[..room]);
                kept.is_cut |= room < read;
            }
        };
        thread::Builder::new().name("drain".into()).spawn(read)?;
        Ok(Self { kept, end })
    }

    /// Returns `true` once the pipe had more bytes than are kept.
    pub fn is_cut(&self) -> bool {
        self.kept.lock().is_cut
    }

    /// Waits for the end of the pipe, but no longer than `time`, and returns the bytes that were read.
    pub fn finish(self, time: Duration) -> Kept {
        // Either way, what was read is all there is. A pipe that is still open is read on, so that nobody who writes to
        // it has to wait.
        let _ = self.end.recv_timeout(time);
        let mut kept = self.kept.lock();
        kept.is_closed = true;
        Kept {
            bytes: std::mem::take(&mut kept.bytes),
            ..*kept
        }
    }
}

/// Lets this process, and those that it starts, have `needed` files and sockets open, if the system allows that many;
/// otherwise as many as it allows. The soft limit, which is often 1,024, is raised only if it does not suffice.
///
/// # Errors
/// The number that the system allows, if that is less than `needed`.
#[cfg(unix)]
pub fn allow_descriptors(needed: u64) -> Result<(), u64> {
    let limit = getrlimit(Resource::Nofile);
    let reaches = |limit: Option<u64>| limit.is_none_or(|limit| limit >= needed);
    if reaches(limit.current) {
        return Ok(());
    }
    let allowed = limit.maximum.map_or(needed, |maximum| maximum.min(needed));
    let raised = Rlimit {
        current: Some(allowed),
        ..limit
    };
    let in_force = match setrlimit(Resource::Nofile, raised) {
        Ok(()) => allowed,
        Err(_) => limit.current.unwrap_or(allowed),
    };
    match in_force >= needed {
        true => Ok(()),
        false => Err(in_force),
    }
}

/// Returns the absolute path of the program that a shell finds under this name.
pub fn on_path(name: impl AsRef<Path>) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let found = std::env::split_paths(&path)
        .map(|folder| folder.join(&name))
        .find(|program| is_executable(program))?;
    // The PATH may contain relative folders.
    std::path::absolute(found).ok()
}

/// Finds a program that was installed with this one: beside it, in the folder above if cargo has built this one as an
/// example or a test, or else on the PATH.
pub fn find_installed(name: &str) -> Option<PathBuf> {
    let own = std::env::current_exe().ok();
    let folder = own.as_deref().and_then(Path::parent);
    let above = folder
        .filter(|folder| folder.ends_with("examples") || folder.ends_with("deps"))
        .and_then(Path::parent);
    let mut beside = folder
        .into_iter()
        .chain(above)
        .map(|folder| folder.join(name));
    beside
        .find(|program| is_executable(program))
        .or_else(|| on_path(name))
}

/// Returns `true` if this is a file that this process may execute.
pub fn is_executable(path: &Path) -> bool {
    #[cfg(unix)]
    if rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_err() {
        return false;
    }
    path.is_file()
}

/// The time after which a program's file that is still open for writing is an error: a child of another thread, between
/// fork and exec, keeps open a file that was just written. Tests may run on a busy machine.
const BUSY: Duration = Duration::from_secs(if cfg!(test) { 60 } else { 2 });

/// The longest time between two looks at a program.
const LONGEST_PAUSE: Duration = Duration::from_millis(16);

/// The longest wait for a killed program to end, and then for its pipes: a program that waits for a device may never
/// end.
const LAST_WAIT: Duration = Duration::from_secs(2);

const CHUNK: usize = 16 << 10;

fn spawn(command: &mut Command) -> io::Result<Child> {
    let busy_until = Instant::now() + BUSY;
    loop {
        match command.spawn() {
            Err(error)
                if error.kind() == ErrorKind::ExecutableFileBusy && Instant::now() < busy_until =>
            {
                thread::sleep(Duration::from_millis(10));
            }
            spawned => return spawned,
        }
    }
}

/// Begins to read standard output and standard error of `child`.
fn pipes_of(child: &mut Child, limit: usize) -> io::Result<(Drain, Drain)> {
    let (Some(stdout), Some(stderr)) = (child.stdout.take(), child.stderr.take()) else {
        return Err(io::Error::other("the program has no pipes"));
    };
    Ok((Drain::start(stdout, limit)?, Drain::start(stderr, limit)?))
}

/// Waits until `child` has ended, which is left to be reaped, or has reached a limit.
fn watch(child: &mut Child, stdout: &Drain, deadline: Instant) -> io::Result<Option<Outcome>> {
    let mut pause = Duration::from_millis(1);
    loop {
        if has_ended(child)? {
            return Ok(None);
        }
        if stdout.is_cut() {
            return Ok(Some(Outcome::OutputTooLong));
        }
        if Instant::now() >= deadline {
            return Ok(Some(Outcome::OutOfTime));
        }
        thread::sleep(pause);
        pause = (2 * pause).min(LONGEST_PAUSE);
    }
}

/// Kills the child, and its group if that is its own.
fn kill(child: &mut Child, group: Group) {
    // It is no error if nothing is left to kill.
    let _ = child.kill();
    #[cfg(unix)]
    if group == Group::Own {
        use rustix::process::{Pid, Signal, kill_process_group};
        let _ = kill_process_group(Pid::from_child(child), Signal::KILL);
    }
    #[cfg(not(unix))]
    let _ = group;
}

/// Takes the exit status of a child that was killed or has ended.
fn reap(child: &mut Child) -> io::Result<ExitStatus> {
    let until = Instant::now() + LAST_WAIT;
    while !has_ended(child)? {
        if Instant::now() > until {
            return Err(ErrorKind::TimedOut.into());
        }
        thread::sleep(Duration::from_millis(1));
    }
    child.wait()
}

/// Returns `true` if the child has ended, without reaping it.
#[cfg(unix)]
fn has_ended(child: &mut Child) -> io::Result<bool> {
    use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    Ok(waitid(WaitId::Pid(Pid::from_child(child)), options)?.is_some())
}

#[cfg(not(unix))]
fn has_ended(child: &mut Child) -> io::Result<bool> {
    Ok(child.try_wait()?.is_some())
}

#[cfg(test)]
#[cfg(unix)]
mod tests {
    use std::io::{Seek, Write};
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// A time longer than a test takes on a busy machine.
    const LONG: Duration = Duration::from_secs(60);

    fn limits(time: Duration, output: usize) -> Limits {
        Limits {
            time,
            output,
            group: Group::Own,
        }
    }

    fn shell(script: &str, limits: Limits) -> Output {
        run(Command::new("sh").args(["-c", script]), limits).unwrap()
    }

    /// Runs this test again in a process with limits of its own.
    #[test]
    fn the_soft_limit_of_open_files_is_raised_as_far_as_allowed() {
        const CHILD: &str = "HOST_TEST_LIMITED";
        if std::env::var_os(CHILD).is_some() {
            assert_eq!(allow_descriptors(40), Ok(()));
            assert_eq!(getrlimit(Resource::Nofile).current, Some(64));
            assert_eq!(allow_descriptors(150), Ok(()));
            assert_eq!(getrlimit(Resource::Nofile).current, Some(150));
            assert_eq!(allow_descriptors(300), Err(200));
            assert_eq!(getrlimit(Resource::Nofile).current, Some(200));
            return;
        }
        let test = "process::tests::the_soft_limit_of_open_files_is_raised_as_far_as_allowed";
        let program = std::env::current_exe().unwrap();
        let output = Command::new("sh")
            .args([
                "-c",
                "ulimit -Sn 64; ulimit -Hn 200; exec \"$0\" --exact \"$1\"",
            ])
            .arg(program)
            .arg(test)
            .env(CHILD, "1")
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success() && text.contains("1 passed"),
            "{text}"
        );
    }

    /// Waits until the process with this number has ended; a zombie has.
    fn expect_end(pid: &str) {
        let until = Instant::now() + LONG;
        loop {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.trim()));
            let state = stat.map(|stat| stat.rsplit_once(") ").map(|(_, rest)| rest.as_bytes()[0]));
            if matches!(state, Err(_) | Ok(Some(b'Z' | b'X'))) {
                return;
            }
            assert!(Instant::now() < until, "process {pid} still runs");
            thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn output_and_status_are_returned() {
        let output = shell("echo a; echo b >&2; exit 3", limits(LONG, 2));
        assert!(matches!(output.outcome, Outcome::Ended(status) if status.code() == Some(3)));
        assert!(!output.is_success());
        assert_eq!(
            (&*output.stdout, &*output.stderr),
            (&b"a\n"[..], &b"b\n"[..])
        );
        let input = shell("cat", limits(LONG, 0));
        assert!(input.is_success(), "{input:?}");
    }

    #[test]
    fn a_program_that_ignores_signals_is_killed_with_what_it_has_started() {
        let script = "trap '' TERM INT HUP; sleep 600 & echo $!; exec sleep 600";
        for group in [Group::Own, Group::Callers] {
            let start = Instant::now();
            let limits = Limits {
                group,
                ..limits(Duration::from_millis(500), 100)
            };
            let output = shell(script, limits);
            assert_eq!(output.outcome, Outcome::OutOfTime);
            assert!(start.elapsed() < LONG);
            let started = String::from_utf8(output.stdout).unwrap();
            match group {
                Group::Own => expect_end(&started),
                Group::Callers => drop(Command::new("kill").arg(started.trim()).status()),
            }
        }
    }

    #[test]
    fn a_flood_is_cut() {
        let output = shell("exec yes", limits(LONG, 1001));
        assert_eq!(output.outcome, Outcome::OutputTooLong);
        assert_eq!(output.stdout.len(), 1001);
        // It may have ended before the first look at it.
        let output = shell("echo ab", limits(LONG, 2));
        assert_eq!(
            (output.outcome, &*output.stdout),
            (Outcome::OutputTooLong, &b"ab"[..])
        );
        // Messages are no reason to end a program.
        let output = shell("yes | head -c 300000 >&2; echo a", limits(LONG, 2));
        assert!(output.is_success());
        assert_eq!(
            (&*output.stdout, &*output.stderr),
            (&b"a\n"[..], &b"y\n"[..])
        );
    }

    #[test]
    fn a_process_that_keeps_the_pipe_is_not_waited_for() {
        let start = Instant::now();
        let output = shell("sleep 600 & echo $!", limits(LONG, 100));
        assert!(output.is_success());
        expect_end(std::str::from_utf8(&output.stdout).unwrap());
        // In a group of its own, which it has entered before the program ends.
        let left = "setsid sleep 600 & until [ \"$(cut -d' ' -f6 /proc/$!/stat)\" = $! ]; do :; done; echo $!";
        let output = shell(left, limits(LONG, 100));
        assert!(matches!(output.outcome, Outcome::Ended(status) if status.success()));
        assert!(!output.is_complete && !output.is_success());
        let pid = String::from_utf8(output.stdout).unwrap();
        assert!(Command::new("kill").arg(pid.trim()).status().is_ok());
        assert!(start.elapsed() < LONG);
    }

    #[test]
    fn a_program_that_is_not_there_is_an_error() {
        let missing = run(&mut Command::new("no-such-program"), limits(LONG, 1));
        assert_eq!(missing.unwrap_err().kind(), ErrorKind::NotFound);
    }

    #[test]
    fn a_file_can_be_the_input() {
        let text = "x".repeat(1 << 20);
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file.rewind().unwrap();
        let output = run_with(&mut Command::new("cat"), file, limits(LONG, 1 << 20)).unwrap();
        assert!(output.is_success());
        assert!(output.stdout == text.as_bytes());
    }

    #[test]
    fn a_program_that_was_just_written_is_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("program");
        std::fs::write(&path, "#!/bin/sh\necho a\n").unwrap();
        assert!(!is_executable(&path));
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        assert!(is_executable(&path));
        let writing = std::fs::File::options().append(true).open(&path).unwrap();
        let closing = thread::spawn(move || {
            thread::sleep(Duration::from_millis(100));
            drop(writing);
        });
        let output = run(&mut Command::new(&path), limits(LONG, 10)).unwrap();
        assert_eq!(output.stdout, b"a\n");
        closing.join().unwrap();
    }

    #[test]
    fn programs_are_found() {
        let sh = on_path("sh").unwrap();
        assert!(sh.is_absolute() && sh.ends_with("sh"));
        assert_eq!(on_path("no-such-program"), None);
        assert_eq!(find_installed("sh"), Some(sh));
        // Beside this one, which is in `deps`.
        let own = std::env::current_exe().unwrap();
        let name = own.file_name().unwrap().to_str().unwrap();
        assert_eq!(find_installed(name), Some(own));
    }
}
