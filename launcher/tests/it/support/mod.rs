//! Helpers of the launcher's tests: a folder of scripts, and runs with a deadline.

use std::fs;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use accelerator_collective::{GroupOptions, Launch, ProcessGroup};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// The time after which a run fails its test, far above what any run needs even on a busy machine.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

/// A sleep so long that a test that waits for its end has failed.
pub(crate) const LONG_SLEEP: &str = "sleep 300";

const LAUNCHER: &str = env!("CARGO_BIN_EXE_accel-launch");

/// A temporary folder with the scripts of a test.
pub(crate) struct Folder {
    folder: tempfile::TempDir,
}

impl Folder {
    pub(crate) fn new() -> Self {
        Self {
            folder: tempfile::tempdir().unwrap(),
        }
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Writes an executable `/bin/sh` script.
    pub(crate) fn script(&self, name: &str, body: &str) -> PathBuf {
        let path = self.write(name, &format!("#!/bin/sh\n{body}\n"));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    pub(crate) fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        path
    }

    pub(crate) fn read(&self, name: &str) -> String {
        String::from_utf8(fs::read(self.path().join(name)).unwrap_or_default()).unwrap()
    }

    /// Returns the launcher, to be started in this folder, without variables that change its behavior.
    pub(crate) fn launcher(&self) -> Command {
        self.prepared(Command::new(LAUNCHER))
    }

    /// Returns the launcher with the words of `line` as its arguments.
    pub(crate) fn command(&self, line: &str) -> Command {
        let mut command = self.launcher();
        command.args(line.split_whitespace());
        command
    }

    /// Starts the launcher with the words of `line`.
    pub(crate) fn start(&self, line: &str) -> Run {
        Run::start(self.command(line))
    }

    /// Runs the launcher with the words of `line` to its end.
    pub(crate) fn launch(&self, line: &str) -> Ended {
        self.start(line).end()
    }

    /// Runs the launcher, which must succeed, and returns its standard output.
    #[track_caller]
    pub(crate) fn ok(&self, line: &str) -> String {
        self.launch(line).expect(0).text()
    }

    /// Does the same, and reads the output as JSON.
    #[track_caller]
    pub(crate) fn json(&self, line: &str) -> Value {
        self.launch(line).expect(0).json()
    }

    /// Runs the launcher, which must refuse the words of `line` with exit code 2 and this text.
    #[track_caller]
    pub(crate) fn refuses(&self, line: &str, text: &str) {
        self.launch(line).expect(2).says(text);
    }

    /// Does the same as [`launch`](Self::launch) with these variables in addition.
    pub(crate) fn launch_with<'a>(
        &self,
        line: &str,
        variables: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Ended {
        let mut command = self.command(line);
        command.envs(variables);
        Run::start(command).end()
    }

    /// Returns the launcher, started by a program with these arguments.
    pub(crate) fn launcher_by(&self, program: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(program);
        command.args(arguments).arg(LAUNCHER);
        self.prepared(command)
    }

    /// Returns the launcher, which receives SIGHUP even if this process ignores it, as under `nohup`. A process that
    /// inherits an ignored SIGHUP never receives it.
    pub(crate) fn launcher_that_hears_hangups(&self) -> Command {
        match hangup_is_ignored() {
            true => self.launcher_by("env", &["--default-signal=HUP"]),
            false => self.launcher(),
        }
    }

    /// Prepares `command` to start in this folder, with the variables that programs need and none of a launch.
    pub(crate) fn prepared(&self, mut command: Command) -> Command {
        // Programs and libraries are found through the first of these, and cargo through the last.
        let kept = [
            "PATH",
            "LD_LIBRARY_PATH",
            "TMPDIR",
            "LLVM_PROFILE_FILE",
            "HOME",
            "CARGO",
            "CARGO_HOME",
            "CARGO_NET_OFFLINE",
            "RUSTC",
            "RUSTUP_HOME",
            "RUSTUP_TOOLCHAIN",
        ];
        let kept = kept.map(|name| Some((name, std::env::var_os(name)?)));
        command
            .current_dir(self.path())
            .env_clear()
            .envs(kept.into_iter().flatten());
        command
    }

    /// Reads the report of the last failed job with `--log-dir logs`.
    pub(crate) fn failure(&self) -> Value {
        self.failure_in("logs")
    }

    /// Reads the report in a folder of logs.
    pub(crate) fn failure_in(&self, logs: &str) -> Value {
        let text = self.read(&format!("{logs}/latest/failure.json"));
        serde_json::from_str(&text).unwrap_or_else(|_| panic!("{logs}: {text}"))
    }

    /// Waits until `name` has `lines` lines, and returns them.
    pub(crate) fn wait_for_lines(&self, name: &str, lines: usize) -> Vec<String> {
        wait_until(&format!("{lines} lines in {name}"), || {
            let text = self.read(name);
            let found: Vec<String> = text
                .split_inclusive('\n')
                .filter(|line| line.ends_with('\n'))
                .map(|line| line.trim().to_owned())
                .collect();
            (found.len() >= lines).then_some(found)
        })
    }
}

/// A running launcher, which is killed when dropped.
pub(crate) struct Run {
    child: Child,
    started: Instant,
    stdout: Option<Output>,
    stderr: Option<Output>,
}

/// A launcher that has ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) status: ExitStatus,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: String,
    pub(crate) took: Duration,
}

impl Run {
    pub(crate) fn start(command: Command) -> Self {
        Self::start_into(command, Stdio::piped())
    }

    /// Starts the launcher with another standard output, of which [`end`](Self::end) then returns nothing.
    pub(crate) fn start_into(mut command: Command, stdout: Stdio) -> Self {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(stdout)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let stdout = child.stdout.take().map(Output::collect);
        let stderr = child.stderr.take().map(Output::collect);
        Self {
            child,
            started: Instant::now(),
            stdout,
            stderr,
        }
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Returns the launcher proper, which is the child of the shim.
    pub(crate) fn proper(&self) -> Pid {
        child_of(self.pid())
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).unwrap();
    }

    /// Waits until the launcher has printed `text` to standard error.
    #[track_caller]
    pub(crate) fn wait_until_it_says(&self, text: &str) {
        let said = &self.stderr.as_ref().unwrap().so_far;
        wait_until(&format!("the launcher to say {text:?}"), || {
            let said = said.lock().unwrap();
            String::from_utf8_lossy(&said).contains(text).then_some(())
        });
    }

    /// Waits until the launcher handles `signal`, which ends a process that has just been started.
    #[track_caller]
    pub(crate) fn wait_until_it_handles(&self, signal: Signal) {
        let status = format!("/proc/{}/status", self.pid().as_raw_nonzero());
        wait_until("the launcher to handle signals", || {
            let status = std::fs::read_to_string(&status).unwrap();
            let handled = status
                .lines()
                .find_map(|line| line.strip_prefix("SigCgt:"))?;
            let handled = u64::from_str_radix(handled.trim(), 16).unwrap();
            (handled >> (signal.as_raw() - 1) & 1 == 1).then_some(())
        });
    }

    pub(crate) fn end(mut self) -> Ended {
        let status = wait_until("the launcher to end", || self.child.try_wait().unwrap());
        let took = self.started.elapsed();
        let read = |output: Option<Output>| output.map_or_else(Vec::new, Output::whole);
        let stdout = read(self.stdout.take());
        let stderr = String::from_utf8_lossy(&read(self.stderr.take())).into_owned();
        Ended {
            status,
            stdout,
            stderr,
            took,
        }
    }

    /// Waits until no process holds the launcher's standard error any more, and returns its text.
    pub(crate) fn close(mut self) -> String {
        let stderr = self.stderr.take().unwrap().whole();
        String::from_utf8_lossy(&stderr).into_owned()
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            // A launcher that is asked first also ends its ranks.
            let _ = kill_process(self.pid(), Signal::TERM);
            let until = Instant::now() + Duration::from_secs(8);
            while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < until {
                thread::sleep(Duration::from_millis(20));
            }
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

impl Ended {
    pub(crate) fn code(&self) -> i32 {
        self.status
            .code()
            .unwrap_or_else(|| panic!("no exit code: {self:?}"))
    }

    #[track_caller]
    pub(crate) fn expect(self, code: i32) -> Self {
        assert_eq!(self.code(), code, "{self:?}");
        self
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.stdout.clone()).unwrap()
    }

    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.text()).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// Returns the lines of standard output with single blanks between words.
    pub(crate) fn lines(&self) -> Vec<String> {
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        self.text().lines().map(words).collect()
    }

    /// Returns the lines of standard output in alphabetical order.
    pub(crate) fn sorted(&self) -> Vec<String> {
        let mut lines: Vec<String> = self.text().lines().map(str::to_owned).collect();
        lines.sort();
        lines
    }

    /// Asserts that standard output has this text.
    #[track_caller]
    pub(crate) fn prints(self, text: &str) -> Self {
        assert!(self.text().contains(text), "{text:?} is not in {self:?}");
        self
    }

    /// Asserts that this is one of the [`lines`](Self::lines).
    #[track_caller]
    pub(crate) fn shows(self, line: &str) -> Self {
        let lines = self.lines();
        assert!(
            lines.iter().any(|shown| shown == line),
            "{line:?} is not in {lines:#?}"
        );
        self
    }

    /// Asserts that standard error has this text.
    #[track_caller]
    pub(crate) fn says(self, text: &str) -> Self {
        assert!(self.stderr.contains(text), "{text:?} is not in {self:?}");
        self
    }
}

/// Repeats `question` until it has an answer.
#[track_caller]
pub(crate) fn wait_until<T>(what: &str, mut question: impl FnMut() -> Option<T>) -> T {
    let until = Instant::now() + DEADLINE;
    loop {
        if let Some(answer) = question() {
            return answer;
        }
        assert!(Instant::now() < until, "waited {DEADLINE:?} for {what}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Returns the command line of a program that runs only the test `name` of this executable, as a rank.
pub(crate) fn test_as_program(name: &str) -> String {
    let tests = std::env::current_exe().unwrap();
    let options = "--include-ignored --test-threads 1 --nocapture";
    format!("{} --exact {name} {options}", tests.display())
}

/// Joins the group of the ranks that the launcher has started.
pub(crate) fn join_group() -> accelerator_collective::Result<ProcessGroup> {
    let options = GroupOptions::new().with_connect_timeout(DEADLINE / 2);
    ProcessGroup::connect(&Launch::from_env()?, &options)
}

/// Waits until that process has a child, and returns the first.
pub(crate) fn child_of(parent: Pid) -> Pid {
    let path = format!("/proc/{0}/task/{0}/children", parent.as_raw_pid());
    wait_until("a child", || {
        let children = fs::read_to_string(&path).ok()?;
        Pid::from_raw(children.split_whitespace().next()?.parse().ok()?)
    })
}

/// Sends a signal to the process with this id.
pub(crate) fn signal(pid: &str, signal: Signal) {
    kill_process(Pid::from_raw(pid.parse().unwrap()).unwrap(), signal).unwrap();
}

/// Waits until the process with this id is gone, or a zombie that only its parent can clear.
#[track_caller]
pub(crate) fn wait_until_dead(pid: &str) {
    wait_until(&format!("process {pid} to be dead"), || {
        (!is_alive(pid)).then_some(())
    });
}

pub(crate) fn is_alive(pid: &str) -> bool {
    let pid: i32 = pid.parse().unwrap();
    if let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) {
        // The state follows the name, which is in parentheses.
        let state = stat
            .rsplit(')')
            .next()
            .and_then(|rest| rest.split_whitespace().next());
        return !matches!(state, Some("Z" | "X"));
    }
    Pid::from_raw(pid).is_some_and(|pid| rustix::process::test_kill_process(pid).is_ok())
}

fn hangup_is_ignored() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    // Bit 0 is signal 1, which is SIGHUP.
    mask.is_some_and(|mask| u64::from_str_radix(mask.trim(), 16).unwrap() & 1 != 0)
}

/// The output of a launcher to a pipe, read as it arrives.
struct Output {
    so_far: Arc<Mutex<Vec<u8>>>,
    reader: JoinHandle<()>,
}

impl Output {
    fn collect(mut pipe: impl Read + Send + 'static) -> Self {
        let so_far = Arc::new(Mutex::new(Vec::new()));
        let bytes = Arc::clone(&so_far);
        let reader = thread::spawn(move || {
            let mut chunk = [0; 1 << 16];
            while let Ok(count @ 1..) = pipe.read(&mut chunk) {
                bytes.lock().unwrap().extend(&chunk[..count]);
            }
        });
        Self { so_far, reader }
    }

    /// Waits for the end of the pipe.
    fn whole(self) -> Vec<u8> {
        self.reader.join().unwrap();
        std::mem::take(&mut self.so_far.lock().unwrap())
    }
}
