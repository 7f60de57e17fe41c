//! Bad input gets a message and exit code 2 before anything is started.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::copies::copy_program;
use crate::support::{Folder, Run};

#[test]
fn scripts_that_cannot_be_run() {
    let folder = Folder::new();
    folder.write("plain", "text");
    folder.write("dir/inner", "");
    for (script, says) in [
        ("missing", "the script missing cannot be found"),
        ("./sh", "the script ./sh cannot be found"),
        ("plain", "the script plain is not executable"),
        ("dir", "the script dir is a folder"),
        ("missing.rs", "the source file missing.rs cannot be found"),
    ] {
        let ended = folder
            .launch(&format!("-n 2 {script}"))
            .expect(2)
            .says("error: ")
            .says(says);
        assert!(ended.stdout.is_empty());
    }
}

#[test]
fn an_interpreter_that_is_missing() {
    let folder = Folder::new();
    let check = |text: &str, says: &str| {
        let path = folder.write("lost", text);
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        let ended = folder.launch("-n 2 lost");
        ended.expect(2).says(says).says("lost does not run on host");
    };
    check(
        "#!/no/such/interpreter\n",
        "/no/such/interpreter, which is not there",
    );
    check("#!/bin/sh\r\nexit\r\n", "ends in a carriage return");
    check("#!/usr/bin/env sh\r\nexit\r\n", "ends in a carriage return");
}

#[test]
fn options_that_make_no_sense() {
    let folder = Folder::new();
    folder.script("ran.sh", "echo ran >> ran");
    folder.write("file", "");
    for (line, says) in [
        ("-n 0 ran.sh", "--num-processes"),
        ("--num-processes two ran.sh", "whole number of at least 1"),
        ("--threads-per-process 0 ran.sh", "--threads-per-process"),
        ("--grace -1 ran.sh", "--grace"),
        ("--no-such-option ran.sh", "--no-such-option"),
        ("--master-addr no.such.host.invalid ran.sh", "--master-addr"),
        ("--log-dir file/logs ran.sh", "file/logs"),
        (
            "--features x ran.sh",
            "--features is for a target that cargo builds",
        ),
        ("--example x", "no Cargo.toml"),
        ("", "nothing to start"),
        ("plan", "--samples"),
        // Options that would have no effect.
        ("--restart-delay 1 ran.sh", "--max-restarts"),
        ("-n 1:2 --max-restarts 0 ran.sh", "--max-restarts"),
        ("-n 2 --regrow-after 1 ran.sh", "MIN:MAX"),
        ("--node-rank 1 ran.sh", "give --nnodes"),
        ("--rdzv-endpoint h ran.sh", "give --nnodes"),
        ("--join-timeout 1 ran.sh", "give --nnodes"),
        ("--no-push ran.sh", "--hosts"),
        ("--ssh-option Port=22 ran.sh", "--hosts"),
        ("--ssh-args=-v ran.sh", "--hosts"),
        // Options of several hosts.
        ("--nproc-per-node 2 -n 2 ran.sh", "cannot be used with"),
        ("--nnodes 0 ran.sh", "--nnodes"),
        ("--nnodes 2 --node-rank 0 ran.sh", "needs --rdzv-endpoint"),
        (
            "--nnodes 2:1 --node-rank 0 ran.sh",
            "MIN no greater than MAX",
        ),
        ("--nnodes 1:2 --rdzv-endpoint h ran.sh", "needs --node-rank"),
        ("--nnodes 2 --rdzv-endpoint h ran.sh", "needs --node-rank"),
        (
            "--nnodes 2 --rdzv-endpoint h:0 --node-rank 0 ran.sh",
            "0 is a free one",
        ),
        (
            "--nnodes 2 --rdzv-endpoint h --node-rank 0 -n 2 ran.sh",
            "give --nproc-per-node",
        ),
        (
            "--nnodes 2 --rdzv-endpoint h --node-rank 2 ran.sh",
            "--node-rank 2 is no host of 2",
        ),
        (
            "--nnodes 2 --rdzv-endpoint h --node-rank -1 ran.sh",
            "--node-rank",
        ),
        (
            "--nnodes 2 --rdzv-endpoint h --node-rank 1 --nproc-per-node 0 ran.sh",
            "--nproc-per-node",
        ),
        (
            "--nnodes 2 --rdzv-endpoint h --node-rank 1 --nproc-per-node none ran.sh",
            "auto, gpu or cpu",
        ),
    ] {
        folder.refuses(line, says);
    }
    assert!(!folder.path().join("ran").exists());
    // Options that depend on a feature may accompany one that turns it off.
    let one = "--nnodes 1 --node-rank 0 --rdzv-endpoint h";
    let none = "--max-restarts 0 --restart-delay 1 ran.sh";
    folder.launch(&format!("{one} {none}")).expect(0);
}

#[test]
fn an_address_of_another_machine() {
    let folder = Folder::new();
    folder.script("ran.sh", "echo ran >> ran");
    // The address is reserved for documentation, so no machine has it.
    let mut command = folder.command("-n 2 --master-addr 203.0.113.77 ran.sh");
    command.env("ACCEL_INSECURE", "1");
    Run::start(command).end().expect(1).says("--master-addr");
    assert!(!folder.path().join("ran").exists());
}

#[test]
fn help_and_version() {
    let folder = Folder::new();
    let help = folder.ok("--help");
    for word in [
        "--num-processes",
        "--log-dir",
        "--example",
        "Exit code",
        "env",
        "plan",
    ] {
        assert!(help.contains(word), "{word} is not in {help}");
    }
    assert!(folder.ok("--version").starts_with("accel-launch "));
}

#[test]
fn a_program_that_is_not_installed_is_named_with_its_installation() {
    let folder = Folder::new();
    // Nothing is beside this one.
    let launcher = folder.path().join("accel-launch");
    copy_program(Path::new(env!("CARGO_BIN_EXE_accel-launch")), &launcher);
    for line in ["submit --help", "submit --name a -- true", "jobs list"] {
        let mut command = folder.prepared(std::process::Command::new(&launcher));
        command.args(line.split(' ')).env("PATH", "/no-such");
        let ended = Run::start(command).end().expect(2);
        let repository = env!("CARGO_PKG_REPOSITORY");
        let from_git = format!("cargo install --locked --git {repository} accel-jobs");
        ended
            .says(&format!("`{from_git}`"))
            .says("in a clone by `cargo install --locked --path launcher/jobs`");
    }
}

#[test]
fn completions_and_a_manual_page_are_printed() {
    let folder = Folder::new();
    for shell in ["bash", "zsh", "fish"] {
        let text = folder.ok(&format!("completions {shell}"));
        assert!(text.contains("num-processes"), "{shell}: {text}");
    }
    let page = folder.ok("man");
    assert!(
        page.starts_with(".ie") || page.contains(".TH accel-launch"),
        "{page}"
    );
    assert!(page.contains("max\\-restarts"), "{page}");
}
