//! Signals to the launcher, and the launcher's own death.

use std::fs::File;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::thread;
use std::time::Duration;

use accelerator_collective::ReduceOp;
use rustix::process::{Signal, kill_process_group};

use crate::support::{
    Folder, LONG_SLEEP, Run, join_group, test_as_program, wait_until, wait_until_dead,
};

/// The variable with the phase in which the job is stopped, set for the ranks.
const STOPPED: &str = "LAUNCHER_TEST_STOPPED";

/// Works as a rank until the file `go` exists, and then exits, if this process is a rank.
fn work_as_rank() {
    let Ok(phase) = std::env::var(STOPPED) else {
        return;
    };
    let has_pid = || {
        let line = format!("{}\n", std::process::id());
        let pids = File::options().create(true).append(true).open("pids");
        // The line is written in one piece, since other ranks write there too.
        pids.unwrap().write_all(line.as_bytes()).unwrap();
    };
    let may_go = || std::path::Path::new("go").exists();
    if phase == "meeting" {
        has_pid();
        while std::env::var("RANK").unwrap() == "2" && !may_go() {
            thread::sleep(Duration::from_millis(20));
        }
    }
    let group = join_group().unwrap();
    if phase == "working" {
        has_pid();
    }
    let mut going = [0.0_f64];
    while going == [0.0] {
        going = [f64::from(u8::from(may_go()))];
        group.all_reduce(&mut going, ReduceOp::Sum).unwrap();
        thread::sleep(Duration::from_millis(5));
    }
    group.close().unwrap();
    std::process::exit(0);
}

/// Stops the job by SIGTSTP for longer than ranks may be silent, continues it, and expects success.
fn stop_and_continue(name: &str, phase: &str, signal: impl Fn(&Run, Signal)) {
    let folder = Folder::new();
    let program = test_as_program(&format!("signals::{name}"));
    let mut command = folder.command(&format!("-n 3 {program}"));
    command
        .env(STOPPED, phase)
        .env("ACCEL_LIVENESS_TIMEOUT", "5")
        .process_group(0);
    let run = Run::start(command);
    let mut pids = folder.wait_for_lines("pids", 3);
    wait_until("two ranks to connect", || {
        let connected = pids.iter().filter(|pid| has_socket(pid));
        (connected.count() >= 2).then_some(())
    });
    pids.push(run.pid().as_raw_pid().to_string());
    signal(&run, Signal::TSTP);
    pids.iter().for_each(|pid| wait_until_stopped(pid, true));
    thread::sleep(Duration::from_secs(7));
    signal(&run, Signal::CONT);
    pids.iter().for_each(|pid| wait_until_stopped(pid, false));
    folder.write("go", "");
    let ended = run.end().expect(0);
    assert!(!ended.stderr.contains("kill -CONT"), "{ended:?}");
}

fn has_socket(pid: &str) -> bool {
    let files = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let mut targets = files.filter_map(|file| std::fs::read_link(file.ok()?.path()).ok());
    targets.any(|target| target.to_string_lossy().starts_with("socket:"))
}

/// Waits until a process is stopped, or continued.
pub(crate) fn wait_until_stopped(pid: &str, stopped: bool) {
    wait_until(&format!("process {pid} to change"), || {
        (is_stopped(pid) == stopped).then_some(())
    });
}

/// A shell that has just called `vfork` waits for its child to execute a program, and does not stop before. If the child is
/// stopped first, both are as good as stopped.
fn is_stopped(pid: &str) -> bool {
    let is_in = |pid: &str, state: char| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
        stat.is_ok_and(|stat| stat.rsplit_once(") ").unwrap().1.starts_with(state))
    };
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
    let mut children = children.iter().flat_map(|pids| pids.split_whitespace());
    is_in(pid, 'T') || (is_in(pid, 'D') && children.any(|child| is_in(child, 'T')))
}

#[test]
fn a_job_stopped_from_its_terminal_continues() {
    work_as_rank();
    let name = "a_job_stopped_from_its_terminal_continues";
    // A terminal signals the whole foreground group.
    stop_and_continue(name, "working", |run, signal| {
        kill_process_group(run.pid(), signal).unwrap();
    });
}

#[test]
fn a_job_stopped_while_its_ranks_meet_continues() {
    work_as_rank();
    let name = "a_job_stopped_while_its_ranks_meet_continues";
    stop_and_continue(name, "meeting", Run::signal);
}

/// A rank that appends a line to `got` for each SIGUSR1 and ends when the file has four.
const COUNT_SIGNALS: &str = "trap 'echo usr >> got' USR1; echo $$ >> pids; \
    while [ ! -e got ] || [ $(wc -l < got) -lt 4 ]; do sleep 0.02; done; exit 0";

#[test]
fn ranks_that_start_while_the_job_is_stopped_are_stopped_too() {
    let folder = Folder::new();
    let body = "echo $$ >> pids; [ $ACCEL_RESTART = 0 ] && exit 1; while [ ! -e go ]; do sleep 0.02; done; exit 0";
    folder.script("job.sh", body);
    let mut command = folder.command("--max-restarts 1 --restart-delay 3 job.sh");
    command.process_group(0);
    let run = Run::start(command);
    let first = folder.wait_for_lines("pids", 1);
    wait_until_dead(&first[0]);
    run.signal(Signal::TSTP);
    let path = folder.path().canonicalize().unwrap();
    // The rank is stopped before it writes its process id.
    wait_until("the second rank to be stopped", || {
        let mut pids = std::fs::read_dir("/proc").unwrap().filter_map(|entry| {
            let process = entry.ok()?.path();
            let is_here = std::fs::read_link(process.join("cwd")).ok()? == path;
            let environment = std::fs::read(process.join("environ")).ok()?;
            let mut variables = environment.split(|byte| *byte == 0);
            (is_here && variables.any(|variable| variable == b"ACCEL_RESTART=1"))
                .then(|| process.file_name()?.to_str().map(str::to_owned))?
        });
        pids.any(|pid| is_stopped(&pid)).then_some(())
    });
    run.signal(Signal::CONT);
    folder.write("go", "");
    run.end().expect(0);
}

#[test]
fn a_job_that_nobody_would_continue_does_not_stop() {
    for (program, argument) in [("setsid", "--wait"), ("env", "--ignore-signal=TSTP")] {
        let folder = Folder::new();
        folder.script("job.sh", COUNT_SIGNALS);
        let mut command = folder.launcher_by(program, &[argument]);
        command.args(["-n", "2", "job.sh"]);
        if program == "env" {
            command.process_group(0);
        }
        let run = Run::start(command);
        folder.wait_for_lines("pids", 2);
        run.signal(Signal::TSTP);
        // The first signal may overtake it, but the second does not.
        run.signal(Signal::USR1);
        folder.wait_for_lines("got", 2);
        run.signal(Signal::USR1);
        run.end().expect(0);
    }
}

#[test]
fn a_job_that_is_continued_at_once_does_not_stay_stopped() {
    let folder = Folder::new();
    folder.script("job.sh", COUNT_SIGNALS);
    let mut command = folder.command("-n 2 job.sh");
    command.process_group(0);
    let run = Run::start(command);
    folder.wait_for_lines("pids", 2);
    for _ in 0..100 {
        run.signal(Signal::TSTP);
        run.signal(Signal::CONT);
        thread::sleep(Duration::from_millis(10));
    }
    run.signal(Signal::USR1);
    folder.wait_for_lines("got", 2);
    run.signal(Signal::USR1);
    run.end().expect(0);
}

fn start(folder: &Folder, body: &str, options: &[&str]) -> (Run, Vec<String>) {
    folder.script("job.sh", body);
    let mut command = folder.launcher_that_hears_hangups();
    command.args(["-n", "2"]).args(options).arg("job.sh");
    let run = Run::start(command);
    let pids = folder.wait_for_lines("pids", 2);
    (run, pids)
}

#[test]
fn signals_reach_every_rank_and_give_the_code() {
    for (signal, name, code) in [
        (Signal::INT, "INT", 130),
        (Signal::TERM, "TERM", 143),
        (Signal::HUP, "HUP", 129),
    ] {
        let folder = Folder::new();
        let body = format!(
            "trap 'echo {name} >> got; exit 0' {name}; echo $$ >> pids; {LONG_SLEEP} & wait"
        );
        let (run, pids) = start(&folder, &body, &[]);
        run.signal(signal);
        run.end().expect(code).says(&format!("ended by SIG{name}"));
        assert_eq!(folder.read("got"), format!("{name}\n{name}\n"));
        pids.iter().for_each(|pid| wait_until_dead(pid));
    }
}

#[test]
fn grandchildren_are_signalled_too() {
    let folder = Folder::new();
    let body = format!(
        "trap '' TERM; (trap - TERM; touch ready.$RANK; exec {LONG_SLEEP}) &\n\
         while [ ! -e ready.$RANK ]; do sleep 0.02; done; echo $! >> pids; wait"
    );
    // The shell ignores the signal, and ends because its child does.
    let (run, pids) = start(&folder, &body, &["--grace", "60"]);
    run.signal(Signal::TERM);
    run.end().expect(143);
    pids.iter().for_each(|pid| wait_until_dead(pid));
}

#[test]
fn a_second_signal_kills() {
    let folder = Folder::new();
    let body = "trap 'echo x >> got' INT; echo $$ >> pids; i=0; while [ $i -lt 3000 ]; do sleep 0.1; i=$((i + 1)); done";
    let (run, pids) = start(&folder, body, &["--grace", "1000"]);
    run.signal(Signal::INT);
    folder.wait_for_lines("got", 2);
    // The same signal so soon would count as a duplicate.
    run.signal(Signal::TERM);
    run.end().expect(130);
    pids.iter().for_each(|pid| wait_until_dead(pid));
}

#[test]
fn a_hangup_is_ignored_under_nohup() {
    let folder = Folder::new();
    folder.script(
        "job.sh",
        "echo $$ >> pids; while [ ! -e go ]; do sleep 0.02; done",
    );
    let mut command = folder.launcher_by("nohup", &[]);
    command.args(["-n", "2", "job.sh"]);
    let run = Run::start(command);
    folder.wait_for_lines("pids", 2);
    run.signal(Signal::HUP);
    folder.write("go", "");
    run.end().expect(0);
}

#[test]
fn what_the_launcher_has_inherited_of_signals_is_undone() {
    let start = |body: &str| {
        let folder = Folder::new();
        folder.script("job.sh", body);
        let inherited = [
            "--ignore-signal=CHLD",
            "--ignore-signal=PIPE",
            "--block-signal",
        ];
        let mut command = folder.launcher_by("env", &inherited);
        command.args(["-n", "2", "job.sh"]);
        (Run::start(command), folder)
    };
    for code in [0, 7] {
        start(&format!("exit {code}")).0.end().expect(code);
    }
    let body = "grep -E 'Sig(Blk|Ign)' /proc/self/status > masks.$RANK; echo $$ >> pids; while :; do sleep 0.1; done";
    let (run, folder) = start(body);
    let pids = folder.wait_for_lines("pids", 2);
    for rank in 0..2 {
        let masks = folder.read(&format!("masks.{rank}"));
        let masks = masks.lines().map(|line| line.rsplit_once('\t').unwrap().1);
        let masks: Vec<u64> = masks
            .map(|mask| u64::from_str_radix(mask, 16).unwrap())
            .collect();
        let bit = |signal: Signal| 1 << (signal.as_raw() - 1);
        let ignored = bit(Signal::CHILD) | bit(Signal::PIPE);
        assert_eq!((masks[0], masks[1] & ignored), (0, 0));
    }
    run.signal(Signal::TERM);
    run.end().expect(143);
    pids.iter().for_each(|pid| wait_until_dead(pid));
}
