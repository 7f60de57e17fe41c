use std::ffi::OsStr;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use accelerator_tune::SearchFolder;

/// The time that a short search may take on a busy machine.
const DEADLINE: Duration = Duration::from_secs(120);

/// Returns the example that cargo builds beside the tests.
pub(crate) fn quadratic() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let built = test.ancestors().nth(2).unwrap().join("examples/quadratic");
    assert!(
        built.is_file(),
        "{} is missing: cargo test -p burn-accelerate-tune builds it",
        built.display()
    );
    built
}

/// Returns the command of a search in a folder, with arguments that are separated by spaces.
pub(crate) fn search(folder: &Path, arguments: &str) -> Command {
    let mut command = Command::new(quadratic());
    command
        .args(["--quiet", "--out"])
        .arg(folder)
        .args(arguments.split_whitespace())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Runs a search to its end.
pub(crate) fn run(folder: &Path, arguments: &str) -> Output {
    ended(search(folder, arguments).spawn().unwrap())
}

/// Runs a search that must succeed.
pub(crate) fn succeed(folder: &Path, arguments: &str) {
    let output = run(folder, arguments);
    assert!(output.status.success(), "{arguments:?}: {output:?}");
}

/// Runs a search that must fail, and returns what it said.
pub(crate) fn refused(folder: &Path, arguments: &str) -> String {
    let output = run(folder, arguments);
    assert!(!output.status.success(), "{output:?}");
    String::from_utf8(output.stderr)
        .unwrap()
        .replace("\\\"", "\"")
}

/// Waits until `has_come` returns true.
pub(crate) fn wait_until(what: &str, mut has_come: impl FnMut() -> bool) {
    let until = Instant::now() + DEADLINE;
    while !has_come() {
        assert!(Instant::now() < until, "{what} does not come");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits for a search until the deadline.
pub(crate) fn ended(mut child: Child) -> Output {
    let until = Instant::now() + DEADLINE;
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > until {
            child.kill().unwrap();
            panic!(
                "the search does not end: {:?}",
                child.wait_with_output().unwrap()
            );
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().unwrap()
}

/// Reads the decision log.
pub(crate) fn decisions(folder: &Path) -> String {
    fs::read_to_string(folder.join("decisions.jsonl")).unwrap()
}

/// Waits until a search has come to so many decisions.
pub(crate) fn wait_for_decisions(folder: &Path, count: usize) {
    wait_until("a decision", || {
        let log = fs::read_to_string(folder.join("decisions.jsonl"));
        log.is_ok_and(|log| log.lines().count() >= count)
    });
}

/// Returns the folder of the only trial of a search.
pub(crate) fn trial_folder(search: &Path) -> PathBuf {
    let trials = SearchFolder::open(search).unwrap();
    let [trial] = trials.results().trials() else {
        panic!("there are {} trials", trials.results().trials().len());
    };
    trial.folder.clone()
}

/// Returns the processes whose command line names the folder.
pub(crate) fn processes(folder: &Path) -> Vec<i32> {
    let folder = folder.display().to_string();
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let of_search = pids.filter(|pid| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(&folder)
    });
    of_search.collect()
}

/// Returns a command that runs a program in its own PID namespace, in which everything is killed when the command is.
/// Prints a line and returns `None` if this user may not make such a namespace.
pub(crate) fn in_namespaces(program: impl AsRef<OsStr>) -> Option<Command> {
    let unshare = || {
        let mut command = Command::new("unshare");
        command.args([
            "--user",
            "--map-root-user",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
        ]);
        command
    };
    let made = unshare().arg("true").stderr(Stdio::null()).status();
    if !made.is_ok_and(|status| status.success()) {
        // The test harness captures `eprintln`, and shows nothing if a test passes.
        let _ = writeln!(
            io::stderr(),
            "SKIPPED: this user may not make PID namespaces"
        );
        return None;
    }
    let mut command = unshare();
    command.arg(program.as_ref());
    Some(command)
}

/// Waits until no process of a search is left.
pub(crate) fn assert_nothing_left(folder: &Path) {
    wait_until("the end of all processes", || processes(folder).is_empty());
}

/// Finds a virtual environment made by `tests/track/install`. If it is not installed, prints a line and returns `None`,
/// or fails if `TRACK_TESTS_REQUIRE` is 1.
pub(crate) fn venv(name: &str) -> Option<PathBuf> {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let venvs = std::env::var_os("TRACK_TESTS_VENVS");
    let venvs = venvs.map_or("target/track-venvs".into(), PathBuf::from);
    // The script that installs them runs in the workspace's folder too.
    let venv = workspace.join(venvs).join(name);
    if venv.join("installed").is_file() {
        return Some(venv);
    }
    let advice = format!(
        "{} is not there; tests/track/install {name} makes it",
        venv.display()
    );
    let is_required = std::env::var("TRACK_TESTS_REQUIRE").is_ok_and(|value| value == "1");
    assert!(!is_required, "{advice}");
    // The test harness captures `eprintln`, and shows nothing if a test passes.
    let _ = writeln!(io::stderr(), "SKIPPED: {advice}");
    None
}
