//! Checks what `SECURITY.md` says of the launcher, and that the tests that it names exist.

use std::fs;
use std::path::Path;

use crate::support::{Folder, Run};

#[test]
fn a_token_is_in_no_environment_command_line_log_or_output() {
    let folder = Folder::new();
    let secret = "correct-horse-battery-staple";
    let token = folder.write("token", secret);
    let private = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    fs::set_permissions(&token, private).unwrap();
    let script = folder.script(
        "show",
        // The first rank to fail ends the other.
        "cat /proc/$$/environ /proc/$$/cmdline /proc/$PPID/environ /proc/$PPID/cmdline; echo x >> shown\n\
         while [ $(wc -l < shown) -lt 2 ]; do sleep 0.02; done; exit 3",
    );
    let mut outputs = Vec::new();
    let script = script.display();
    for line in [
        format!("-n 2 --log-dir logs {script}").as_str(),
        "env",
        "env --json",
        &format!("-n 2 --dry-run {script}"),
    ] {
        let mut command = folder.command(line);
        command.env("ACCEL_TOKEN_FILE", &token);
        let ended = Run::start(command).end();
        outputs.push(String::from_utf8_lossy(&ended.stdout).into_owned());
        outputs.push(ended.stderr);
    }
    for log in [
        "logs/latest/rank-0.log",
        "logs/latest/rank-1.log",
        "logs/latest/failure.json",
    ] {
        let text = folder.read(log);
        assert!(!text.is_empty(), "{log} is empty");
        outputs.push(text);
    }
    assert!(
        outputs[0].contains("ACCEL_TOKEN_FILE"),
        "the ranks know where the token is"
    );
    for output in outputs {
        assert!(!output.contains(secret), "{output}");
    }
}

#[test]
fn every_test_that_the_security_notes_name_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let notes = fs::read_to_string(root.join("SECURITY.md")).unwrap();
    let mut file = String::new();
    let mut found = 0;
    // In the tables, tests are written as `file.rs`: `name`, `name`.
    for row in notes.lines().filter(|line| line.starts_with("| ")) {
        for word in row.split('`').skip(1).step_by(2) {
            if word.ends_with(".rs") {
                word.clone_into(&mut file);
            } else if word.contains('_') && word.chars().all(|x| x == '_' || x.is_alphanumeric()) {
                if word.to_uppercase() == word {
                    continue; // a variable
                }
                let text = fs::read_to_string(root.join(&file))
                    .unwrap_or_else(|error| panic!("{file}: {error}"));
                let name = format!("fn {word}(");
                assert!(text.contains(&name), "{file} has no test {word}");
                found += 1;
            }
        }
    }
    assert!(found > 30, "only {found} tests are named");
}
