//! The Python environments of `tests/track/install`.

use std::env;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Finds the environment `name`. If it is not installed, prints a line and returns `None`, or fails if
/// `TRACK_TESTS_REQUIRE` is 1.
pub(crate) fn find(name: &str) -> Option<PathBuf> {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let folder = env::var_os("TRACK_TESTS_VENVS").map_or_else(
        || workspace.join("target/track-venvs"),
        // The script that installs them runs in the workspace's folder too.
        |folder| workspace.join(folder),
    );
    let venv = folder.join(name);
    if venv.join("installed").is_file() {
        return Some(venv);
    }
    let required = env::var("TRACK_TESTS_REQUIRE").is_ok_and(|value| value == "1");
    let advice = format!(
        "{} is not there; tests/track/install {name} makes it",
        venv.display()
    );
    assert!(!required, "{advice}");
    // The test harness captures `eprintln`, and shows nothing if a test passes.
    let _ = writeln!(io::stderr(), "SKIPPED: {advice}");
    None
}
