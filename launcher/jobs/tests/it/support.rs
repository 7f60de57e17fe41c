//! Runs `accel-jobs` with a folder of records of its own.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// A folder of records, whose jobs end with it.
pub(crate) struct Jobs {
    folder: TempDir,
}

/// The exit code and output of a command.
#[derive(Debug)]
pub(crate) struct Printed {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

pub(crate) const JOBS: &str = env!("CARGO_BIN_EXE_accel-jobs");

/// The time that anything may take.
const LIMIT: Duration = Duration::from_secs(60);

impl Jobs {
    pub(crate) fn new() -> Self {
        Self::in_folder_named("jobs")
    }

    /// Creates records in a folder whose name has this prefix.
    pub(crate) fn in_folder_named(prefix: &str) -> Self {
        let folder = tempfile::Builder::new().prefix(prefix).tempdir();
        Self {
            folder: folder.unwrap(),
        }
    }

    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Runs `accel-jobs` with the words of this line.
    pub(crate) fn run(&self, line: &str) -> Printed {
        self.run_with(line, &[])
    }

    /// Runs `accel-jobs` with these variables.
    pub(crate) fn run_with(&self, line: &str, variables: &[(&str, &str)]) -> Printed {
        let words: Vec<_> = line.split_whitespace().collect();
        self.run_by(Command::new(JOBS).envs(variables.iter().copied()), &words)
    }

    /// Runs `accel-jobs` through this command.
    pub(crate) fn run_by(&self, command: &mut Command, words: &[&str]) -> Printed {
        command.arg("--jobs-dir").arg(self.folder()).args(words);
        let output = command.output().unwrap();
        Printed {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }

    /// Runs `accel-jobs`, which must succeed.
    #[track_caller]
    pub(crate) fn ok(&self, line: &str) -> String {
        self.run(line).ok()
    }

    /// Runs `accel-jobs`, which must succeed and show this text.
    #[track_caller]
    pub(crate) fn shows(&self, line: &str, text: &str) {
        let shown = self.ok(line);
        assert!(
            shown.contains(text),
            "{line} does not show {text:?}: {shown}"
        );
    }

    /// Runs `accel-jobs`, which must fail with this code and show this text.
    #[track_caller]
    pub(crate) fn refused(&self, line: &str, code: i32, text: &str) {
        let printed = self.run(line);
        assert_eq!(printed.code, Some(code), "{line}: {printed:?}");
        assert!(printed.stderr.contains(text), "{line}: {printed:?}");
    }

    /// Returns the state that the supervisor of a job has written.
    pub(crate) fn state(&self, job: &str) -> serde_json::Value {
        self.json(job, "state.json")
    }

    /// Returns the process that supervises a job.
    pub(crate) fn supervisor(&self, job: &str) -> serde_json::Value {
        self.json(job, "supervisor.lock")
    }

    /// Returns a file in the folder of a job.
    pub(crate) fn json(&self, job: &str, file: &str) -> serde_json::Value {
        let text = std::fs::read(self.folder().join(job).join(file)).unwrap();
        serde_json::from_slice(&text).unwrap()
    }

    /// Waits until a command shows this text.
    pub(crate) fn until(&self, line: &str, text: &str) -> String {
        let deadline = Instant::now() + LIMIT;
        loop {
            let printed = self.run(line);
            if printed.stdout.contains(text) {
                return printed.stdout;
            }
            assert!(
                Instant::now() < deadline,
                "{line} does not show {text:?}: {printed:?}"
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Printed {
    /// Asserts success; returns standard output.
    #[track_caller]
    pub(crate) fn ok(self) -> String {
        assert_eq!(self.code, Some(0), "{self:?}");
        self.stdout
    }
}

impl Drop for Jobs {
    fn drop(&mut self) {
        let entries = std::fs::read_dir(self.folder()).unwrap().flatten();
        let names: Vec<_> = entries
            .filter_map(|entry| entry.file_name().into_string().ok())
            .collect();
        for name in names {
            self.run(&format!("stop --forget {name}"));
        }
    }
}

/// Returns the launcher, which `cargo build -p accel-launch` makes beside `accel-jobs`.
pub(crate) fn launcher() -> PathBuf {
    let launcher = Path::new(env!("CARGO_BIN_EXE_accel-jobs")).with_file_name("accel-launch");
    assert!(
        launcher.is_file(),
        "{} is not built: cargo build -p accel-launch, in the same profile",
        launcher.display()
    );
    launcher
}
