//! No process outlives its job, whichever of the launcher's two processes is killed.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::process::Command;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use crate::support::{
    DEADLINE, Folder, LONG_SLEEP, Run, child_of, is_alive, signal, wait_until, wait_until_dead,
};
use crate::terminal::{open_terminal, shown};
use rustix::process::{Pid, Signal, kill_process};

/// A rank with a child, a daemon in a session of its own, and a daemon that ignores SIGTERM. All write their process
/// ids to `pids`, the rank itself last.
const FAMILY: &str = "sh -c 'echo $$ >> pids; exec sleep 300' &\n\
    setsid sh -c 'echo $$ >> pids; exec sleep 300' &\n\
    setsid sh -c \"trap '' TERM; echo \\$\\$ >> pids; for i in \\$(seq 1500); do sleep 0.2; done\" &\n\
    while [ $(wc -l < pids) -lt $((3 * WORLD_SIZE)) ]; do sleep 0.02; done; echo $$ >> pids\n\
    while [ $(wc -l < pids) -lt $((4 * WORLD_SIZE)) ]; do sleep 0.02; done\n";

/// Starts two such ranks, and returns the ids of all their processes.
fn start(folder: &Folder, options: &str, rest: &str) -> (Run, Vec<String>) {
    folder.write("pids", "");
    folder.script("job.sh", &format!("{FAMILY}{rest}"));
    let run = folder.start(&format!("-n 2 {options} job.sh"));
    let pids = folder.wait_for_lines("pids", 8);
    (run, pids)
}

/// Waits until the processes are dead, for much less than they would sleep and the launcher would wait.
fn all_dead(pids: &[String]) {
    pids.iter().for_each(|pid| wait_until_dead(pid));
}

#[test]
fn nothing_outlives_a_killed_shim() {
    let folder = Folder::new();
    let (run, pids) = start(&folder, "--grace 1000", LONG_SLEEP);
    let name = |pid: Pid| {
        let path = format!("/proc/{}/comm", pid.as_raw_pid());
        std::fs::read_to_string(path).unwrap().trim().to_owned()
    };
    // `pkill -9 accel-launch` hits the shim alone.
    let names = [run.pid(), run.proper()].map(name);
    assert_eq!(names, ["accel-launch", "accel-job"]);
    run.signal(Signal::KILL);
    all_dead(&pids);
}

#[test]
fn nothing_outlives_a_killed_launcher_proper() {
    let folder = Folder::new();
    let (run, pids) = start(&folder, "--grace 1000", LONG_SLEEP);
    kill_process(run.proper(), Signal::KILL).unwrap();
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
        let run = folder.start("-n 4 job.sh");
        let pids = folder.wait_for_lines("pids", 3);
        kill_process(run.proper(), Signal::KILL).unwrap();
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
    let run = folder.start("-n 2 job.sh");
    let pids = folder.wait_for_lines("pids", 2);
    // Stopped, neither can react to the other's death.
    let proper = run.proper();
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
    let options = "--max-restarts 1000 --restart-delay 0 --grace 1000";
    let (run, pids) = start(&folder, options, LONG_SLEEP);
    run.signal(Signal::KILL);
    all_dead(&pids);
    // The launcher proper holds the ends of these streams until it ends too.
    let ended = run.close();
    assert!(!ended.contains("restart"), "{ended}");
    assert!(ended.contains("the launcher was killed"), "{ended}");
    assert_eq!(folder.read("pids").lines().count(), pids.len());
}

#[test]
fn daemons_end_with_the_job_however_it_ends() {
    for (rest, request, code, says) in [
        ("[ $RANK = 1 ] && exit 3; sleep 300", None, 3, "exit code 3"),
        (LONG_SLEEP, Some(Signal::TERM), 143, "ended by SIGTERM"),
        (
            "exit 0",
            None,
            0,
            "ended processes that ranks 0, 1 had left behind",
        ),
    ] {
        let folder = Folder::new();
        let (run, pids) = start(&folder, "--grace 0.5", rest);
        request.into_iter().for_each(|signal| run.signal(signal));
        run.end().expect(code).says(says);
        // The launcher waited for the daemons, also for those that ignore SIGTERM.
        pids.iter().for_each(|pid| assert!(!is_alive(pid), "{pid}"));
    }
}

#[test]
fn stopped_ranks_end_too() {
    let folder = Folder::new();
    folder.script(
        "job.sh",
        "trap 'echo term >> got; exit 0' TERM; echo $$ >> pids; kill -STOP $$; sleep 300 & wait",
    );
    let run = folder.start("-n 2 --grace 60 job.sh");
    let pids = folder.wait_for_lines("pids", 2);
    run.signal(Signal::TERM);
    let ended = run.end().expect(143);
    // The ranks were continued and received the signal, so the grace period did not have to pass.
    assert!(ended.took < Duration::from_secs(50), "{ended:?}");
    pids.iter().for_each(|pid| wait_until_dead(pid));
}

#[test]
fn ranks_that_are_all_stopped_are_named_and_the_job_continues() {
    let folder = Folder::new();
    folder.script("job.sh", "echo $$ >> pids; kill -STOP $$; echo continued");
    let mut command = folder.command("-n 2 --no-prefix job.sh");
    command.env("ACCEL_LIVENESS_TIMEOUT", "0.5");
    let run = Run::start(command);
    let pids = folder.wait_for_lines("pids", 2);
    run.wait_until_it_says("ranks 0, 1 are stopped, as by SIGSTOP");
    pids.iter().for_each(|pid| signal(pid, Signal::CONT));
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
    let mut command = folder.command("-n 2 job.sh");
    command.env("ACCEL_LIVENESS_TIMEOUT", "0.25");
    let run = Run::start(command);
    let pid = folder.wait_for_lines("pid", 1);
    std::thread::sleep(Duration::from_secs(1));
    signal(&pid[0], Signal::CONT);
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
    let ended = folder.launch("-n 1 job.sh").expect(0);
    assert_eq!(ended.text(), "cleared\n");
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
    let (mut controller, terminal) = open_terminal();
    // `setsid` gives the launcher the terminal, whose foreground group it then is.
    let mut command = folder.launcher_by("setsid", &["--ctty", "--wait"]);
    command
        .args(["-n", "2", "--grace", "100", "job.sh"])
        .stdin(terminal.try_clone().unwrap())
        .stdout(terminal.try_clone().unwrap())
        .stderr(terminal);
    let mut child = command.spawn().unwrap();
    drop(command);
    let shown = shown(controller.try_clone().unwrap());
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
