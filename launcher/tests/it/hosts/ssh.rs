//! Launchers started over SSH, with a program instead of `ssh` that runs the command on this machine.

use std::os::unix::process::CommandExt;
use std::process::Command;
use std::thread;
use std::time::Duration;

use accelerator_collective::internal::Token;
use rustix::process::Signal;

use crate::signals::wait_until_stopped;
use crate::support::{Folder, LONG_SLEEP, Run, wait_until_dead};

/// Returns the launcher for these hosts, with more arguments, in a folder with a program `ssh`. The host `down` is
/// unreachable, the launcher does not run on `old`, a start-up file hangs on `stuck`, and `poor` lacks a folder of
/// libraries that the others have.
fn launcher(folder: &Folder, hosts: &str, line: &str) -> Command {
    folder.script(
        "bin/ssh",
        "while [ \"$1\" != -- ]; do shift; done
        [ \"$2\" = down ] && { echo 'ssh: connect to host down: Permission denied (publickey)' >&2; exit 255; }
        [ \"$2\" = stuck ] && exec sleep 300
        [ \"$2\" = old ] && { echo 'version `GLIBC_9.9 not found' >&2; exit 1; }
        echo 'Welcome to a host that greets everyone'
        mkdir -p \"$ROOT/tmp\"
        [ \"$2\" = poor ] || libraries=$ROOT/lib
        exec env -i LD_LIBRARY_PATH=\"$libraries\" PATH=\"$PATH\" TMPDIR=\"$ROOT/tmp\" SSH_CONNECTION='127.0.0.1 1 127.0.0.1 22' sh -c \"$3\"",
    );
    let mut command = folder.command(&format!("--hosts {hosts} --quiet {line}"));
    let path = std::env::var("PATH").unwrap();
    let bin = folder.path().join("bin");
    command
        .env("PATH", format!("{}:{path}", bin.display()))
        .env("ROOT", folder.path());
    command
}

fn temporary_files(folder: &Folder) -> usize {
    std::fs::read_dir(folder.path().join("tmp")).map_or(0, Iterator::count)
}

#[test]
fn one_command_runs_a_job_on_every_host_of_a_list() {
    let folder = Folder::new();
    let script = folder.script(
        "train.sh",
        "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK $WORD $(pwd) \"$@\"
        cat \"$ACCEL_TOKEN_FILE\" >> $RANK.token",
    );
    let line = format!("{} --lr", script.display());
    let mut command = launcher(&folder, "u@a:2,u@b", &line);
    command.env("WORD", "passed-on").arg("two words");
    let ended = Run::start(command).end().expect(0);
    let here = folder.path().display();
    let expected = ["0/3 0/2 0", "1/3 1/2 0", "2/3 0/1 1"].iter().enumerate();
    let expected =
        expected.map(|(rank, place)| format!("[{rank}] {place} passed-on {here} --lr two words"));
    assert_eq!(ended.sorted(), expected.collect::<Vec<_>>());
    let tokens = ["0.token", "1.token", "2.token"].map(|name| folder.read(name));
    assert!(tokens[0].len() == 64 && tokens.iter().all(|token| *token == tokens[0]));
    assert_eq!(temporary_files(&folder), 0);
}

/// The list has this machine's address in one network, and other hosts reach it in another one.
#[test]
fn a_host_0_that_is_this_one_is_reached_in_every_network() {
    for hosts in [
        "127.0.0.2,u@b",
        "127.0.0.2,127.0.0.3",
        "127.0.0.2,u@b,127.0.0.3",
    ] {
        let folder = Folder::new();
        let script = folder.script("train.sh", "echo $RANK/$WORLD_SIZE");
        let line = format!("--join-timeout 20 {}", script.display());
        let ended = Run::start(launcher(&folder, hosts, &line)).end().expect(0);
        let count = hosts.split(',').count();
        let expected = (0..count).map(|rank| format!("[{rank}] {rank}/{count}"));
        assert_eq!(ended.sorted(), expected.collect::<Vec<_>>());
    }
}

#[test]
fn the_exit_code_is_that_of_the_job_and_a_program_that_is_missing_is_named() {
    let folder = Folder::new();
    let script = folder.script("train.sh", "[ $RANK = 1 ] && exit 7; exec sleep 300");
    let run = |line: &str| Run::start(launcher(&folder, "u@a,u@b", line)).end();
    run(script.to_str().unwrap())
        .expect(7)
        .says("rank 1 (pid")
        .says("failed first: exit code 7");
    run("none.sh")
        .expect(2)
        .says("the script none.sh cannot be found");
}

#[test]
fn hosts_that_cannot_be_used_are_named() {
    let folder = Folder::new();
    let script = folder.script("train.sh", "true");
    for (hosts, says) in [
        (
            "u@a,down",
            "host down was not started: ssh may not log in there",
        ),
        (
            "u@a,old",
            "host old was not started: its C library is older than GLIBC_9.9",
        ),
    ] {
        let command = launcher(&folder, hosts, script.to_str().unwrap());
        Run::start(command).end().expect(1).says(says);
    }
    let file = folder.write("hosts", "u@a slots=2\nu@b slots=two\n");
    let (file, script) = (file.display(), script.display());
    folder.refuses(
        &format!("--hostfile {file} {script}"),
        "hosts:2: expected a number of ranks",
    );
}

#[test]
fn a_host_that_never_starts_the_launcher_is_named_and_nothing_is_left() {
    let folder = Folder::new();
    let script = folder.script("train.sh", "echo up >> up");
    // The other host has the same time to start its launcher, on a busy machine too.
    let line = format!("--join-timeout 6.5 {}", script.display());
    let command = launcher(&folder, "u@a,stuck", &line);
    let ended = Run::start(command).end().expect(1);
    ended.says("host stuck was not started: `ssh` did not start accel-launch there within 6.5 s");
    assert_eq!(
        (folder.read("up"), temporary_files(&folder)),
        (String::new(), 0)
    );
}

/// Returns a program that needs `libx.so.6`.
fn needs_library(folder: &Folder) -> std::path::PathBuf {
    let (known, missing) = (b"libc.so.6", b"libx.so.6");
    let mut program = std::fs::read("/bin/cat").unwrap();
    let found = |program: &[u8]| program.windows(known.len()).position(|name| name == known);
    while let Some(at) = found(&program) {
        program[at..at + known.len()].copy_from_slice(missing);
    }
    let path = folder.script("train", "");
    std::fs::write(&path, program).unwrap();
    path
}

#[test]
#[cfg(target_env = "gnu")]
fn a_program_that_does_not_run_on_a_host_is_refused_before_ranks_start() {
    let folder = Folder::new();
    let program = needs_library(&folder);
    let listed = Command::new("ldd").arg("/bin/cat").output().unwrap();
    let listed = String::from_utf8(listed.stdout).unwrap();
    let libc = listed
        .split_whitespace()
        .find(|word| word.ends_with("/libc.so.6"));
    folder.write("lib/of", "hosts");
    let library = folder.path().join("lib/libx.so.6");
    std::os::unix::fs::symlink(libc.unwrap(), library).unwrap();
    // Either host 1 itself or host 0 reports it first, and both name the host.
    for hosts in ["poor,u@a", "u@a,poor"] {
        let command = launcher(&folder, hosts, program.to_str().unwrap());
        let ended = Run::start(command).end();
        let refused = "train does not run on host ";
        let ended = ended.expect(2).says("error: ").says(refused);
        let ended = ended.says("libx.so.6: cannot open shared object file");
        let ended = ended.says("; install it there");
        assert!(ended.stdout.is_empty(), "{ended:?}");
        assert_eq!(temporary_files(&folder), 0);
    }
}

#[test]
fn the_report_shows_the_command_of_the_user() {
    let folder = Folder::new();
    let script = folder.script("train.sh", "exit 7");
    let line = format!("--log-dir logs {} --lr", script.display());
    let mut command = launcher(&folder, "u@a:2,u@b", &line);
    let token = folder.path().join("token");
    Token::generate().unwrap().write_file(&token).unwrap();
    command.env("ACCEL_TOKEN_FILE", &token).arg("two words");
    let ended = Run::start(command).end().expect(7);
    let report = folder.failure();
    let shown = report["command_line"].as_str().unwrap();
    assert!(
        shown.ends_with(&format!(
            "accel-launch --hosts u@a:2,u@b --quiet --log-dir logs {} --lr 'two words'",
            script.display()
        )),
        "{shown}"
    );
    assert!(!shown.contains("/proc/"), "{shown}");
    assert_eq!(report["command"][1], "--hosts");
    ended.says(&format!("to run it again: {shown}"));
}

#[test]
fn a_killed_client_takes_the_job_along_and_leaves_no_file() {
    let folder = Folder::new();
    let script = folder.script(
        "train.sh",
        &format!("setsid {LONG_SLEEP} & echo $! >> pids; echo $$ >> pids; {LONG_SLEEP}"),
    );
    let command = launcher(&folder, "u@a,u@b", script.to_str().unwrap());
    let run = Run::start(command);
    let pids = folder.wait_for_lines("pids", 4);
    run.signal(Signal::KILL);
    pids.iter().for_each(|pid| wait_until_dead(pid));
    assert_eq!(temporary_files(&folder), 0);
}

#[test]
fn a_job_that_its_client_stops_is_stopped_on_purpose() {
    let folder = Folder::new();
    let script = folder.script(
        "train.sh",
        "echo $$ >> pids; while [ ! -e go ]; do sleep 0.02; done; exit 0",
    );
    let mut command = launcher(&folder, "u@a,u@b", script.to_str().unwrap());
    command.env("ACCEL_LIVENESS_TIMEOUT", "2").process_group(0);
    let run = Run::start(command);
    let mut pids = folder.wait_for_lines("pids", 2);
    pids.push(run.pid().as_raw_pid().to_string());
    run.signal(Signal::TSTP);
    pids.iter().for_each(|pid| wait_until_stopped(pid, true));
    thread::sleep(Duration::from_secs(4));
    run.signal(Signal::CONT);
    folder.write("go", "");
    let ended = run.end().expect(0);
    assert!(!ended.stderr.contains("kill -CONT"), "{ended:?}");
}

#[test]
fn a_signal_to_the_client_ends_the_job_on_all_hosts() {
    let folder = Folder::new();
    let script = folder.script(
        "train.sh",
        "trap 'echo asked >> asked; exit 0' TERM; echo up >> up; sleep 300 & wait",
    );
    let command = launcher(&folder, "u@a,u@b", script.to_str().unwrap());
    let run = Run::start(command);
    folder.wait_for_lines("up", 2);
    run.signal(Signal::TERM);
    assert_eq!(run.end().code(), 143);
    assert_eq!(folder.read("asked").lines().count(), 2);
}
