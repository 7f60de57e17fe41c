//! No process outlives its job, whichever of the launcher's two processes is killed.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use crate::support::{DEADLINE, Folder, LONG_SLEEP, Run, is_alive, wait_until, wait_until_dead};
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

/// A rank with a child, a daemon in a session of its own, and a daemon that ignores SIGTERM. All write their process
/// ids to `pids`, the rank itself last.
const FAMILY: &str = "sh -c 'echo $$ >> pids; exec sleep 300' &\n\
    setsid sh -c 'echo $$ >> pids; exec sleep 300' &\n\
    setsid sh -c \"trap '' TERM; echo \\$\\$ >> pids; for i in \\$(seq 1500); do sleep 0.2; done\" &\n\
    while [ $(wc -l < pids) -lt $((3 * WORLD_SIZE)) ]; do sleep 0.02; done; echo $$ >> pids\n\
    while [ $(wc -l < pids) -lt $((4 * WORLD_SIZE)) ]; do sleep 0.02; done\n";

/// Starts two such ranks, and returns the ids of all their processes.
fn start(folder: &Folder, options: &[&str], rest: &str) -> (Run, Vec<String>) {
    folder.write("pids", "");
    folder.script("job.sh", &format!("{FAMILY}{rest}"));
    let mut command = folder.launcher();
    command.args(["-n", "2"]).args(options).arg("job.sh");
    let run = Run::start(command);
    let pids = folder.wait_for_lines("pids", 8);
    (run, pids)
}

/// Waits until the processes are dead, for much less than they would sleep and the launcher would wait.
fn all_dead(pids: &[String]) {
    pids.iter().for_each(|pid| wait_until_dead(pid));
}

/// Returns the launcher proper, which the shim of `run` started.
fn proper(run: &Run) -> Pid {
    child_of(run.pid())
}

/// Returns the only child of that process.
fn child_of(parent: Pid) -> Pid {
    let parent = parent.as_raw_nonzero();
    let path = format!("/proc/{parent}/task/{parent}/children");
    let children = std::fs::read_to_string(path).unwrap();
    Pid::from_raw(children.trim().parse().unwrap()).unwrap()
}

#[test]
fn nothing_outlives_a_killed_shim() {
    let folder = Folder::new();
    let (run, pids) = start(&folder, &["--grace", "1000"], LONG_SLEEP);
    run.signal(Signal::KILL);
    all_dead(&pids);
}

#[test]
fn nothing_outlives_a_killed_launcher_proper() {
    let folder = Folder::new();
    let (run, pids) = start(&folder, &["--grace", "1000"], LONG_SLEEP);
    kill_process(proper(&run), Signal::KILL).unwrap();
    all_dead(&pids);
    run.end().expect(137).says("was killed by SIGKILL; ended ");
}

#[test]
fn ranks_that_the_kernel_kills_with_the_launcher_proper_are_counted() {
    for _ in 0..5 {
        let folder = Folder::new();
        folder.script(
            "job.sh",
            &format!("[ $RANK = 0 ] && exit 0; echo $$ >> pids; exec {LONG_SLEEP}"),
        );
        let mut command = folder.launcher();
        command.args(["-n", "4", "job.sh"]);
        let run = Run::start(command);
        let pids = folder.wait_for_lines("pids", 3);
        kill_process(proper(&run), Signal::KILL).unwrap();
        run.end()
            .expect(137)
            .says("was killed by SIGKILL; ended 3 processes of the job");
        pids.iter().for_each(|pid| wait_until_dead(pid));
    }
}

#[test]
fn ranks_die_where_both_are_killed_at_once() {
    let folder = Folder::new();
    folder.script("job.sh", &format!("echo $$ >> pids; exec {LONG_SLEEP}"));
    let mut command = folder.launcher();
    command.args(["-n", "2", "job.sh"]);
    let run = Run::start(command);
    let pids = folder.wait_for_lines("pids", 2);
    // Stopped, neither can react to the other's death.
    let proper = proper(&run);
    kill_process(proper, Signal::STOP).unwrap();
    run.signal(Signal::KILL);
    kill_process(proper, Signal::KILL).unwrap();
    all_dead(&pids);
}

/// Checks the README: the kernel ends everything in a process namespace with its first process.
#[test]
fn nothing_outlives_both_in_a_namespace_of_processes() {
    const NAMESPACE: [&str; 6] = [
        "--user",
        "--map-current-user",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
    ];
    let tried = Command::new("unshare").args(NAMESPACE).arg("true").output();
    if !tried.is_ok_and(|tried| tried.status.success()) {
        eprintln!("skipped: process namespaces cannot be made here");
        return;
    }
    let folder = Folder::new();
    // Process ids differ in the namespace, so daemons hold a pipe instead, which closes with the last of them.
    folder.script(
        "job.sh",
        "setsid sh -c 'exec 9> held; echo up >&9; exec sleep 300' &\n exec sleep 300",
    );
    let held = folder.path().join("held");
    let made = Command::new("mkfifo").arg(&held).status().unwrap();
    assert!(made.success());
    let (say, said) = mpsc::channel();
    std::thread::spawn(move || {
        let lines = BufReader::new(File::open(held).unwrap()).lines();
        lines.for_each(|line| say.send(line.unwrap()).unwrap());
    });
    let mut command = folder.launcher_by("unshare", &NAMESPACE);
    command.args(["-n", "2", "job.sh"]);
    let run = Run::start(command);
    for _ in 0..2 {
        assert_eq!(said.recv_timeout(DEADLINE).unwrap(), "up");
    }
    let shim = child_of(run.pid());
    let proper = child_of(shim);
    // Stopped, neither can react to the other's death.
    kill_process(proper, Signal::STOP).unwrap();
    kill_process(shim, Signal::KILL).unwrap();
    assert_eq!(
        said.recv_timeout(DEADLINE),
        Err(RecvTimeoutError::Disconnected)
    );
}

#[test]
fn nothing_is_restarted_once_the_shim_is_killed() {
    let folder = Folder::new();
    let options = [
        "--max-restarts",
        "1000",
        "--restart-delay",
        "0",
        "--grace",
        "1000",
    ];
    let (run, pids) = start(&folder, &options, LONG_SLEEP);
    run.signal(Signal::KILL);
    all_dead(&pids);
    // The launcher proper holds the ends of these streams until it ends too.
    let ended = run.close();
    assert!(!ended.contains("restart"), "{ended}");
    assert!(ended.contains("the launcher was killed"), "{ended}");
    assert_eq!(folder.read("pids").lines().count(), pids.len());
}

#[test]
fn daemons_that_ignore_sigterm_end_with_a_failure_after_the_grace() {
    let folder = Folder::new();
    let (run, pids) = start(
        &folder,
        &["--grace", "0.5"],
        "[ $RANK = 1 ] && exit 3; sleep 300",
    );
    run.end().expect(3);
    // The launcher waited for the daemons.
    pids.iter().for_each(|pid| assert!(!is_alive(pid), "{pid}"));
}

#[test]
fn daemons_end_with_a_signal_to_the_launcher() {
    let folder = Folder::new();
    let (run, pids) = start(&folder, &["--grace", "0.5"], LONG_SLEEP);
    run.signal(Signal::TERM);
    run.end().expect(143);
    pids.iter().for_each(|pid| assert!(!is_alive(pid), "{pid}"));
}

#[test]
fn leftovers_of_a_successful_job_are_ended_and_reported() {
    let folder = Folder::new();
    let (run, pids) = start(&folder, &["--grace", "0.5"], "exit 0");
    run.end()
        .expect(0)
        .says("ended processes that ranks 0, 1 had left behind");
    pids.iter().for_each(|pid| assert!(!is_alive(pid), "{pid}"));
}

#[test]
fn stopped_ranks_end_too() {
    let folder = Folder::new();
    folder.script(
        "job.sh",
        "trap 'echo term >> got; exit 0' TERM; echo $$ >> pids; kill -STOP $$; sleep 300 & wait",
    );
    let mut command = folder.launcher();
    command.args(["-n", "2", "--grace", "60", "job.sh"]);
    let run = Run::start(command);
    let pids = folder.wait_for_lines("pids", 2);
    run.signal(Signal::TERM);
    let ended = run.end().expect(143);
    // The ranks were continued and received the signal, so the grace period did not have to pass.
    assert!(ended.took < Duration::from_secs(50), "{ended:?}");
    pids.iter().for_each(|pid| wait_until_dead(pid));
}

#[test]
fn ranks_that_are_all_stopped_are_named_and_the_job_goes_on() {
    let folder = Folder::new();
    folder.script("job.sh", "echo $$ >> pids; kill -STOP $$; echo continued");
    let mut command = folder.launcher();
    command
        .args(["-n", "2", "--no-prefix", "job.sh"])
        .env("ACCEL_LIVENESS_TIMEOUT", "0.5");
    let run = Run::start(command);
    let pids = folder.wait_for_lines("pids", 2);
    run.wait_until_it_says("ranks 0, 1 are stopped, as by SIGSTOP");
    for pid in &pids {
        let pid = Pid::from_raw(pid.parse().unwrap()).unwrap();
        kill_process(pid, Signal::CONT).unwrap();
    }
    let ended = run.end().expect(0);
    assert_eq!(ended.stderr.matches("stopped").count(), 1, "{ended:?}");
    assert_eq!(ended.text(), "continued\ncontinued\n");
}

#[test]
fn one_rank_that_is_stopped_is_left_to_the_others() {
    let folder = Folder::new();
    folder.script(
        "job.sh",
        "[ $RANK = 0 ] && exec sleep 2; echo $$ > pid; kill -STOP $$",
    );
    let mut command = folder.launcher();
    command
        .args(["-n", "2", "job.sh"])
        .env("ACCEL_LIVENESS_TIMEOUT", "0.25");
    let run = Run::start(command);
    let pid = folder.wait_for_lines("pid", 1);
    std::thread::sleep(Duration::from_secs(1));
    let pid = Pid::from_raw(pid[0].parse().unwrap()).unwrap();
    kill_process(pid, Signal::CONT).unwrap();
    let ended = run.end().expect(0);
    assert!(!ended.stderr.contains("stopped"), "{ended:?}");
}

#[test]
fn orphans_are_cleared_away_while_the_job_runs() {
    let folder = Folder::new();
    // An orphan that ends stays a zombie until its new parent reaps it.
    folder.script(
        "job.sh",
        "(sh -c 'echo $$ > orphan; sleep 0.1' &)\n\
         while [ ! -s orphan ]; do sleep 0.02; done\n\
         while [ -e /proc/$(cat orphan) ]; do sleep 0.02; done; echo cleared",
    );
    let ended = folder.launch(["-n", "1", "job.sh"]).expect(0);
    assert_eq!(ended.text(), "cleared\n");
}

#[test]
fn killing_the_launcher_by_name_leaves_the_launcher_proper() {
    let folder = Folder::new();
    let (run, pids) = start(&folder, &["--grace", "1000"], LONG_SLEEP);
    let name = |pid: Pid| {
        let path = format!("/proc/{}/comm", pid.as_raw_nonzero());
        std::fs::read_to_string(path).unwrap().trim().to_owned()
    };
    assert_eq!(name(run.pid()), "accel-launch");
    assert_eq!(name(proper(&run)), "accel-job");
    run.signal(Signal::KILL);
    all_dead(&pids);
}

#[test]
fn the_job_has_the_shims_exit_code_and_streams() {
    let folder = Folder::new();
    folder.script("job.sh", "cat; exit 42");
    let mut command = folder.launcher();
    command.args(["-n", "1", "job.sh"]);
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"through\n").unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(42));
    assert_eq!(output.stdout, b"through\n");
}

#[test]
fn control_c_on_a_terminal_counts_once() {
    let folder = Folder::new();
    // A signal that counted twice would kill the ranks before they are done.
    folder.script(
        "job.sh",
        "trap 'echo caught >> got; sleep 1; echo done >> got; exit 0' INT\n\
         echo $$ >> pids; while :; do sleep 0.1; done",
    );
    let controller = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&controller).unwrap();
    unlockpt(&controller).unwrap();
    let name = ptsname(&controller, Vec::new()).unwrap();
    let terminal = OpenOptions::new()
        .read(true)
        .write(true)
        .open(std::ffi::OsStr::from_bytes(name.as_bytes()))
        .unwrap();
    // `setsid` gives the launcher the terminal, whose foreground group it then is.
    let mut command = folder.launcher_by("setsid", &["--ctty", "--wait"]);
    command
        .args(["-n", "2", "--grace", "100", "job.sh"])
        .stdin(terminal.try_clone().unwrap())
        .stdout(terminal.try_clone().unwrap())
        .stderr(terminal);
    let mut child = command.spawn().unwrap();
    drop(command);
    let mut controller = File::from(controller);
    let mut reader = controller.try_clone().unwrap();
    let shown = std::thread::spawn(move || {
        let (mut shown, mut chunk) = (Vec::new(), [0; 4096]);
        while let Ok(count @ 1..) = reader.read(&mut chunk) {
            shown.extend_from_slice(&chunk[..count]);
        }
        String::from_utf8_lossy(&shown).into_owned()
    });
    folder.wait_for_lines("pids", 2);
    controller.write_all(b"\x03").unwrap();
    let status = wait_until("the launcher to end", || child.try_wait().unwrap());
    let shown = shown.join().unwrap();
    assert_eq!(status.code(), Some(130), "{shown}");
    assert_eq!(
        folder.read("got"),
        "caught\ncaught\ndone\ndone\n",
        "{shown}"
    );
}
