//! Runs ranks as processes: starts them with plain variables, watches them, and kills them at a deadline.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{PoisonError, RwLock};
use std::time::{Duration, Instant};

use crate::ports::free_port;

/// The time limit of a test's job, after which its processes are killed. It is generous: the machine may be busy, and
/// the limit is there to end a hang, not to measure.
pub const DEADLINE: Duration = Duration::from_secs(240);

/// The exit status and output of a rank.
#[derive(Debug)]
pub struct Ended {
    pub status: ExitStatus,
    pub stderr: String,
    pub stdout: String,
}

impl Ended {
    /// Returns its standard output.
    ///
    /// # Panics
    ///
    /// If it has failed.
    #[track_caller]
    pub fn succeeded(&self) -> &str {
        assert!(self.status.success(), "{}\n{}", self.stdout, self.stderr);
        &self.stdout
    }
}

/// Runs `program args` as ranks 0 to `world_size - 1`, each with the variables of a launcher and those that `change`
/// adds, and waits for all of them.
///
/// # Panics
///
/// If a process cannot be started or the deadline passes.
pub fn run_ranks(
    program: &Path,
    args: &[&str],
    world_size: usize,
    change: impl Fn(usize, &mut Command),
) -> Vec<Ended> {
    let port = free_port().to_string();
    let ranks = (0..world_size).map(|rank| {
        let mut command = Command::new(program);
        command
            .args(args)
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", world_size.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("LOCAL_WORLD_SIZE", world_size.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", &port)
            .env("RAYON_NUM_THREADS", "1");
        change(rank, &mut command);
        command
    });
    run_all(ranks)
}

/// Runs a command and waits for it.
///
/// # Panics
///
/// If it cannot be started or the deadline passes.
pub fn run(command: Command) -> Ended {
    run_all(std::iter::once(command)).remove(0)
}

/// Runs commands in parallel and waits for all of them.
///
/// # Panics
///
/// If one cannot be started or the deadline passes.
pub fn run_all(commands: impl Iterator<Item = Command>) -> Vec<Ended> {
    let _others = JOBS.read().unwrap_or_else(PoisonError::into_inner);
    wait_for_all(commands)
}

/// Runs a command with short deadlines of its own, while no other job of this process runs.
///
/// # Panics
///
/// If it cannot be started or the deadline passes.
pub fn run_alone(command: Command) -> Ended {
    let _alone = JOBS.write().unwrap_or_else(PoisonError::into_inner);
    wait_for_all(std::iter::once(command)).remove(0)
}

/// Runs a command, calls `meanwhile` with its process id, and waits for it.
///
/// # Panics
///
/// If it cannot be started or the deadline passes.
pub fn run_with(command: Command, meanwhile: impl FnOnce(u32)) -> Ended {
    let _others = JOBS.read().unwrap_or_else(PoisonError::into_inner);
    let running = Running::start(command);
    meanwhile(running.child.id());
    wait_for(vec![running]).remove(0)
}

/// Waits until `question` has an answer.
///
/// # Panics
///
/// If the deadline passes.
pub fn wait_until<T>(what: &str, mut question: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + DEADLINE;
    loop {
        if let Some(answer) = question() {
            return answer;
        }
        assert!(Instant::now() < deadline, "waited {DEADLINE:?} for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Held for reading by jobs that may run beside others.
static JOBS: RwLock<()> = RwLock::new(());

fn wait_for_all(commands: impl Iterator<Item = Command>) -> Vec<Ended> {
    wait_for(commands.map(Running::start).collect())
}

fn wait_for(mut running: Vec<Running>) -> Vec<Ended> {
    let deadline = Instant::now() + DEADLINE;
    while running.iter_mut().any(|rank| !rank.has_ended()) {
        if Instant::now() >= deadline {
            let ended: Vec<_> = running.iter_mut().map(Running::has_ended).collect();
            let outputs = running.into_iter().map(|mut rank| {
                // Its children end with it, and then its output does.
                let _ = rank.child.kill();
                rank.end().stderr
            });
            let outputs: Vec<_> = outputs.collect();
            panic!(
                "after {DEADLINE:?}, these have ended: {ended:?}; {}",
                outputs.join("\n")
            );
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    running.into_iter().map(Running::end).collect()
}

/// Returns the launcher that was built with the tests, or that of `LAUNCHER_UNDER_TEST`.
///
/// # Panics
///
/// If there is none.
pub fn launcher() -> PathBuf {
    let built = || {
        let own = std::env::current_exe().expect("the path of this program");
        // Tests are one folder deeper than programs.
        let beside = own.ancestors().skip(1).take(2);
        beside
            .map(|folder| folder.join("accel-launch"))
            .find(|path| path.is_file())
            .expect("accel-launch beside this program: cargo build --release -p accel-launch")
    };
    std::env::var_os("LAUNCHER_UNDER_TEST").map_or_else(built, PathBuf::from)
}

/// Returns an example program that was built with the tests.
///
/// # Panics
///
/// If it was not built.
pub fn example(name: &str) -> PathBuf {
    let own = std::env::current_exe().expect("the path of this program");
    let folders = own.ancestors().skip(1).take(2);
    folders
        .map(|folder| folder.join("examples").join(name))
        .find(|path| path.is_file())
        .unwrap_or_else(|| panic!("no example `{name}`: cargo build --release --examples"))
}

/// A process whose output is read as it comes, and which is killed on drop.
struct Running {
    child: Child,
    readers: Vec<std::thread::JoinHandle<String>>,
}

impl Running {
    fn start(mut command: Command) -> Self {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("cannot start {command:?}: {error}"));
        let stdout = child.stdout.take().map(reader);
        let stderr = child.stderr.take().map(reader);
        Self {
            child,
            readers: [stdout, stderr].into_iter().flatten().collect(),
        }
    }

    fn has_ended(&mut self) -> bool {
        self.child.try_wait().is_ok_and(|status| status.is_some())
    }

    fn end(mut self) -> Ended {
        let status = self.child.wait().expect("a child of this process");
        let mut texts = std::mem::take(&mut self.readers)
            .into_iter()
            .map(|reader| reader.join().unwrap_or_default());
        let stdout = texts.next().unwrap_or_default();
        let stderr = texts.next().unwrap_or_default();
        Ended {
            status,
            stderr,
            stdout,
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Has no effect if the process has ended and was waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn reader(mut from: impl Read + Send + 'static) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        // The output before an error is still worth showing.
        let _ = from.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    })
}
