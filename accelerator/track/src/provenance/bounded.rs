//! Runs a command that neither hangs nor fills the memory.

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// Why there is no output.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Stopped {
    /// It could not be started, or said that it failed.
    Failed,
    /// It took too long.
    TooLate,
    /// It wrote too much.
    TooLong,
}

/// What `command` writes to standard output: at most `limit` bytes, within `time`.
pub(super) fn output(
    command: &mut Command,
    limit: usize,
    time: Duration,
) -> Result<Vec<u8>, Stopped> {
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

/// Ends it and what it started, where it has not ended.
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
