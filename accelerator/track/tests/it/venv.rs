//! The Python environments of `tests/track/install`.

use std::env;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// The environment `name`. Where it is not installed, the test that asks has nothing to do, unless `TRACK_TESTS_REQUIRE`
/// is 1.
pub(crate) fn find(name: &str) -> Option<PathBuf> {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let folder = env::var_os("TRACK_TESTS_VENVS").map_or_else(
        || workspace.join("target/track-venvs"),
        // As the script that installs them, which runs in the workspace's folder.
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
    // Not `eprintln`, of which nothing is seen where a test passes.
    let _ = writeln!(io::stderr(), "SKIPPED: {advice}");
    None
}
