//! Ranks as processes: started with plain variables, watched, and ended by a deadline.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{PoisonError, RwLock};
use std::time::{Duration, Instant};

use crate::ports::free_port;

/// How long a job of a test may take before its processes are killed. Generous: the machine may
/// be busy, and a deadline is there to end a hang, not to measure.
pub const DEADLINE: Duration = Duration::from_secs(240);

/// How a rank ended.
#[derive(Debug)]
pub struct Ended {
    pub status: ExitStatus,
    pub stderr: String,
    pub stdout: String,
}

/// Runs `program args` as ranks 0 to `world_size - 1`, each with the variables of a launcher and
/// those that `change` adds, and waits for all.
///
/// # Panics
///
/// When a process cannot be started or the deadline passes.
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

/// Runs commands side by side and waits for all.
///
/// # Panics
///
/// When one cannot be started or the deadline passes.
pub fn run_all(commands: impl Iterator<Item = Command>) -> Vec<Ended> {
    let _others = JOBS.read().unwrap_or_else(PoisonError::into_inner);
    wait_for_all(commands)
}

/// Runs a command that keeps short deadlines, while no other job of this process runs.
///
/// # Panics
///
/// When it cannot be started or the deadline passes.
pub fn run_alone(command: Command) -> Ended {
    let _alone = JOBS.write().unwrap_or_else(PoisonError::into_inner);
    wait_for_all(std::iter::once(command)).remove(0)
}

/// Runs a command, does meanwhile what is told its process id, and waits for it.
///
/// # Panics
///
/// When it cannot be started or the deadline passes.
pub fn run_with(command: Command, meanwhile: impl FnOnce(u32)) -> Ended {
    let _others = JOBS.read().unwrap_or_else(PoisonError::into_inner);
    let running = Running::start(command);
    meanwhile(running.child.id());
    wait_for(vec![running]).remove(0)
}

/// Waits until there is an answer.
///
/// # Panics
///
/// When the deadline passes.
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

/// Read by jobs that may run beside others.
static JOBS: RwLock<()> = RwLock::new(());

fn wait_for_all(commands: impl Iterator<Item = Command>) -> Vec<Ended> {
    wait_for(commands.map(Running::start).collect())
}

fn wait_for(mut running: Vec<Running>) -> Vec<Ended> {
    let deadline = Instant::now() + DEADLINE;
    while running.iter_mut().any(|rank| !rank.has_ended()) {
        assert!(
            Instant::now() < deadline,
            "still running after {DEADLINE:?}: {:?}",
            running
                .iter_mut()
                .map(Running::has_ended)
                .collect::<Vec<_>>()
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    running.into_iter().map(Running::end).collect()
}

/// The launcher that was built beside the tests, or that of `LAUNCHER_UNDER_TEST`.
///
/// # Panics
///
/// When there is none.
pub fn launcher() -> PathBuf {
    let built = || {
        let own = std::env::current_exe().expect("the path of this program");
        // Tests lie one folder deeper than programs.
        let beside = own.ancestors().skip(1).take(2);
        beside
            .map(|folder| folder.join("accel-launch"))
            .find(|path| path.is_file())
            .expect("accel-launch beside this program: cargo build --release -p accel-launch")
    };
    std::env::var_os("LAUNCHER_UNDER_TEST").map_or_else(built, PathBuf::from)
}

/// An example program that was built beside the tests.
///
/// # Panics
///
/// When it was not built.
pub fn example(name: &str) -> PathBuf {
    let own = std::env::current_exe().expect("the path of this program");
    let folders = own.ancestors().skip(1).take(2);
    folders
        .map(|folder| folder.join("examples").join(name))
        .find(|path| path.is_file())
        .unwrap_or_else(|| panic!("no example `{name}`: cargo build --release --examples"))
}

/// A process whose output is read as it comes, and which is killed when it is forgotten.
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
        // No effect on one that has ended and was waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn reader(mut from: impl Read + Send + 'static) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        // What came before an error is still worth showing.
        let _ = from.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    })
}
