//! Targets that cargo builds: by name, and by source file.

use std::collections::BTreeSet;
use std::process::Command;

use crate::support::{Ended, Folder, Run, wait_until_dead};

/// Creates a workspace of two packages without dependencies.
fn workspace() -> Folder {
    let folder = Folder::new();
    folder.write("Cargo.toml", "[workspace]\nresolver = \"3\"\nmembers = [\"alpha\", \"beta\"]\ndefault-members = [\"alpha\"]\n");
    for name in ["alpha", "beta"] {
        folder.write(
            &format!("{name}/Cargo.toml"),
            &format!("[package]\nname = \"{name}\"\nversion = \"0.1.0\"\nedition = \"2024\"\n[features]\nloud = []\n"),
        );
        folder.write(&format!("{name}/src/lib.rs"), "");
        folder.write(
            &format!("{name}/src/bin/{name}-tool.rs"),
            &format!(
                "fn main() {{\n    let arguments: Vec<_> = std::env::args().skip(1).collect();\n    \
                 let dir = std::env::var(\"CARGO_MANIFEST_DIR\").unwrap_or_default();\n    \
                 println!(\"{name} loud={{}} debug={{}} {{arguments:?}} {{}}\", cfg!(feature = \"loud\"), cfg!(debug_assertions), dir.rsplit('/').next().unwrap_or_default());\n}}\n"
            ),
        );
        folder.write(
            &format!("{name}/examples/demo-{name}.rs"),
            "fn main() { println!(\"demo\"); std::process::exit(4) }\n",
        );
    }
    folder.write(
        "beta/examples/broken.rs",
        "fn main() { this does not compile }\n",
    );
    folder.write("alpha/notes.rs", "fn main() {}\n");
    folder
}

fn launch_in(folder: &Folder, place: &str, line: &str) -> Ended {
    let mut command = folder.command(&format!("--quiet -n 1 {line}"));
    command.current_dir(folder.path().join(place));
    offline(&mut command, folder);
    Run::start(command).end()
}

fn offline(command: &mut Command, folder: &Folder) {
    command
        .env("CARGO_NET_OFFLINE", "true")
        .env("CARGO_TARGET_DIR", folder.path().join("target"));
    // Settings of the build that runs this test do not apply to the package in the folder.
    for name in ["RUSTFLAGS", "CARGO_BUILD_TARGET", "CARGO_ENCODED_RUSTFLAGS"] {
        command.env_remove(name);
    }
}

#[test]
fn a_program_that_was_built_before_is_started_without_a_build() {
    let folder = workspace();
    let first = launch_in(&folder, "alpha", "--bin alpha-tool x");
    let first = first.expect(0).text();
    assert!(first.contains("alpha loud=false"), "{first}");
    folder.write("alpha/src/bin/alpha-tool.rs", "this does not compile");
    let program = folder.path().join("target/release/alpha-tool");
    let program = program.display();
    let again = format!("--prebuilt {program} -F loud --bin alpha-tool x");
    let text = launch_in(&folder, "alpha", &again).expect(0).text();
    assert!(
        text.contains("alpha loud=false debug=false [\"x\"]"),
        "{text}"
    );
    launch_in(&folder, "alpha", "--prebuilt no/such --bin alpha-tool")
        .expect(2)
        .says("no/such cannot be found");
}

#[test]
fn builds_by_name_and_by_source_file() {
    let folder = workspace();
    let release = "alpha loud=false debug=false [\"--epochs\", \"1\"] alpha\n";
    let ended = launch_in(&folder, ".", "--bin alpha-tool --epochs 1").expect(0);
    assert_eq!(ended.text(), release);
    assert!(folder.path().join("target/release/alpha-tool").exists());
    // A relative path works from any folder, and a separator is dropped.
    let ended = launch_in(
        &folder,
        "beta/src",
        "../../alpha/src/bin/alpha-tool.rs -- --epochs 1",
    )
    .expect(0);
    assert_eq!(ended.text(), release);
    // Plain `cargo build` would leave this package out here.
    assert!(
        launch_in(&folder, ".", "--bin beta-tool")
            .expect(0)
            .text()
            .starts_with("beta loud=false")
    );
    assert_eq!(
        launch_in(&folder, ".", "--example demo-beta")
            .expect(4)
            .text(),
        "demo\n"
    );
    assert_eq!(
        launch_in(&folder, ".", "beta/examples/demo-beta.rs")
            .expect(4)
            .text(),
        "demo\n"
    );

    let ended = launch_in(
        &folder,
        ".",
        "--profile dev --package beta --features loud --bin beta-tool",
    );
    assert_eq!(
        ended.expect(0).text(),
        "beta loud=true debug=true [] beta\n"
    );
}

/// The launcher's builds in this repository share all dependencies with cargo's builds of the examples' and the
/// library's packages, which take minutes to compile.
#[test]
fn an_example_of_this_repository_is_compiled_with_the_same_features_either_way() {
    let features = |selection: &[&str]| -> BTreeSet<String> {
        let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        command
            .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
            .args([
                "tree",
                "--locked",
                "--offline",
                "--prefix",
                "none",
                "--no-dedupe",
            ])
            .args(["--edges", "normal,build,dev", "--format", "{p} {f}"])
            .args(selection);
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}");
        let list = String::from_utf8(output.stdout).unwrap();
        list.lines().map(str::to_owned).collect()
    };
    let together = features(&[]);
    for package in ["burn-accelerate", "accelerator-examples"] {
        let alone = features(&["--package", package]);
        let others = alone.difference(&together);
        // The library itself has the features that the examples request.
        let again: Vec<_> = others
            .filter(|x| !x.starts_with("burn-accelerate v"))
            .collect();
        assert!(again.is_empty(), "compiled with other features: {again:#?}");
    }
}

#[test]
fn builds_from_outside_of_the_workspace() {
    let folder = workspace();
    let elsewhere = tempfile::tempdir().unwrap();
    let script = folder.path().join("alpha/src/bin/alpha-tool.rs");
    let place = elsewhere.path().to_str().unwrap();
    let ended = launch_in(&folder, place, script.to_str().unwrap()).expect(0);
    assert!(ended.text().starts_with("alpha "), "{ended:?}");
}

#[test]
fn a_source_file_that_is_no_target_lists_those_near_it() {
    let folder = workspace();
    let ended = launch_in(&folder, "alpha", "notes.rs")
        .expect(2)
        .says("is not the source file of a binary or an example");
    ended.says("examples/demo-alpha.rs (--example demo-alpha, package alpha)");
    launch_in(&folder, ".", "--example demo-alpa")
        .expect(2)
        .says("near it are:\n  alpha/examples/demo-alpha.rs");
    launch_in(&folder, ".", "--package alpha --bin beta-tool")
        .expect(2)
        .says("package alpha");
}

#[test]
fn a_name_is_a_file_here_or_a_target_or_a_program_of_the_path() {
    let folder = workspace();
    let ended = launch_in(&folder, ".", "alpha-tool x").expect(0);
    assert_eq!(ended.text(), "alpha loud=false debug=false [\"x\"] alpha\n");
    folder.write("x.sh", "echo $RANK \"$1\"");
    let ended = launch_in(&folder, ".", "sh x.sh word").expect(0);
    assert_eq!(ended.text(), "0 word\n");
    folder.script("alpha-tool", "echo a file");
    let ended = launch_in(&folder, ".", "alpha-tool").expect(0);
    assert_eq!(ended.text(), "a file\n");

    launch_in(&folder, ".", "no-such-tool")
        .expect(2)
        .says("no example or binary of a cargo package here, and no program of the PATH");
    launch_in(&folder, ".", "--features loud sh")
        .expect(2)
        .says("--features is for a target that cargo builds");
    folder.write("alpha/src/bin/demo-alpha.rs", "fn main() {}\n");
    launch_in(&folder, ".", "demo-alpha")
        .expect(2)
        .says("demo-alpha can mean several targets; say which: --package alpha --");
    folder.write("Cargo.toml", "not a manifest");
    let ended = launch_in(&folder, ".", "sh x.sh").expect(0);
    assert_eq!(ended.text(), "0 \n");
}

#[test]
fn a_failing_build_starts_nothing() {
    let folder = workspace();
    let ended = launch_in(&folder, ".", "--example broken").expect(101);
    assert!(ended.stdout.is_empty());
    ended
        .says("error: cargo could not build example `broken` (exit code 101); nothing was started");
}

#[test]
fn variables_of_cargo_are_removed() {
    let folder = workspace();
    let mut command = folder.command("--quiet -n 1 --bin alpha-tool");
    command.envs([
        ("CARGO_MANIFEST_DIR", "/no/such/launcher"),
        ("CARGO_PKG_NAME", "accel-launch"),
        ("OUT_DIR", "/no/such/out"),
    ]);
    offline(&mut command, &folder);
    assert!(
        Run::start(command)
            .end()
            .expect(0)
            .text()
            .ends_with(" alpha\n")
    );

    folder.script("show.sh", "echo ${CARGO_MANIFEST_DIR-none}");
    let mut command = folder.command("-n 1 show.sh");
    command
        .env("CARGO_MANIFEST_DIR", "/no/such/launcher")
        .env("CARGO_PKG_NAME", "accel-launch");
    assert_eq!(Run::start(command).end().expect(0).text(), "none\n");
}

#[test]
fn a_dry_run_shows_the_build() {
    let folder = workspace();
    let text = launch_in(&folder, ".", "--dry-run --example demo-beta x")
        .expect(0)
        .text();
    assert!(
        text.contains("cargo build --release --package beta --example demo-beta\n"),
        "{text}"
    );
    assert!(!folder.path().join("target").exists());
}

#[test]
fn a_signal_during_the_build_ends_cargo() {
    let folder = workspace();
    // A build script that waits acts as a long build.
    folder.write(
        "alpha/build.rs",
        "fn main() {\n    std::fs::write(std::env::var(\"PID_FILE\").unwrap(), format!(\"{}\\n\", std::process::id())).unwrap();\n    \
         std::thread::sleep(std::time::Duration::from_secs(300));\n}\n",
    );
    let mut command = folder.command("--quiet -n 1 --bin alpha-tool");
    command.env("PID_FILE", folder.path().join("pid"));
    offline(&mut command, &folder);
    let run = Run::start(command);
    let pid = folder.wait_for_lines("pid", 1);
    run.signal(rustix::process::Signal::TERM);
    run.end()
        .expect(143)
        .says("ended by SIGTERM before the ranks had started");
    wait_until_dead(&pid[0]);
}
