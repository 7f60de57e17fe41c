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

    /// Runs `accel-jobs` with these words.
    pub(crate) fn run(&self, words: &[&str]) -> Printed {
        self.run_with_path(words, &std::env::var("PATH").unwrap())
    }

    /// Runs `accel-jobs` with another PATH.
    pub(crate) fn run_with_path(&self, words: &[&str], path: &str) -> Printed {
        self.run_with(words, &[("PATH", path)])
    }

    /// Runs `accel-jobs` with these variables.
    pub(crate) fn run_with(&self, words: &[&str], variables: &[(&str, &str)]) -> Printed {
        self.run_by(Command::new(JOBS).envs(variables.iter().copied()), words)
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
    pub(crate) fn ok(&self, words: &[&str]) -> String {
        let printed = self.run(words);
        assert_eq!(printed.code, Some(0), "{words:?}: {printed:?}");
        printed.stdout
    }

    /// Runs `accel-jobs`, which must fail with this code and show this text.
    pub(crate) fn refused(&self, words: &[&str], code: i32, text: &str) {
        let printed = self.run(words);
        assert_eq!(printed.code, Some(code), "{words:?}: {printed:?}");
        assert!(printed.stderr.contains(text), "{words:?}: {printed:?}");
    }

    /// Returns the state that the supervisor of a job has written.
    pub(crate) fn state(&self, job: &str) -> serde_json::Value {
        self.json(job, "state.json")
    }

    /// Returns the process that supervises a job.
    pub(crate) fn supervisor(&self, job: &str) -> serde_json::Value {
        self.json(job, "supervisor.lock")
    }

    fn json(&self, job: &str, file: &str) -> serde_json::Value {
        let text = std::fs::read(self.folder().join(job).join(file)).unwrap();
        serde_json::from_slice(&text).unwrap()
    }

    /// Waits until a command shows this text.
    pub(crate) fn until(&self, words: &[&str], text: &str) -> String {
        let deadline = Instant::now() + LIMIT;
        loop {
            let printed = self.run(words);
            if printed.stdout.contains(text) {
                return printed.stdout;
            }
            assert!(
                Instant::now() < deadline,
                "{words:?} does not show {text:?}: {printed:?}"
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Jobs {
    fn drop(&mut self) {
        let entries = std::fs::read_dir(self.folder()).unwrap().flatten();
        let names: Vec<_> = entries
            .filter_map(|entry| entry.file_name().into_string().ok())
            .collect();
        for name in names {
            self.run(&["stop", "--forget", &name]);
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
