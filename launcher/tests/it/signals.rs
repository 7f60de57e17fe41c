//! Signals to the launcher, and its own death.

use crate::support::{Folder, LONG_SLEEP, Run, wait_until_dead};
use rustix::process::Signal;

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
    // The shell ignores the signal; it ends because its child does.
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
    // The same one so soon would be taken for one that came twice.
    run.signal(Signal::TERM);
    run.end().expect(130);
    pids.iter().for_each(|pid| wait_until_dead(pid));
}

#[test]
fn user_signals_are_forwarded_and_the_job_continues() {
    let folder = Folder::new();
    let body = "trap 'echo usr >> got' USR1; echo $$ >> pids; while [ ! -e got ] || [ $(wc -l < got) -lt 2 ]; do sleep 0.02; done; exit 0";
    let (run, _) = start(&folder, body, &[]);
    run.signal(Signal::USR1);
    run.end().expect(0);
}

#[test]
fn ranks_die_with_a_killed_launcher() {
    let folder = Folder::new();
    let (run, pids) = start(&folder, "echo $$ >> pids; while :; do sleep 0.1; done", &[]);
    run.signal(Signal::KILL);
    pids.iter().for_each(|pid| wait_until_dead(pid));
    drop(run);
}

#[test]
fn a_hangup_is_ignored_under_nohup() {
    let folder = Folder::new();
    folder.script(
        "job.sh",
        "echo $$ >> pids; while [ ! -e go ]; do sleep 0.02; done",
    );
    let launcher = folder.launcher();
    let mut command = std::process::Command::new("nohup");
    command
        .arg(launcher.get_program())
        .args(["-n", "2", "job.sh"])
        .current_dir(folder.path());
    let run = Run::start(command);
    folder.wait_for_lines("pids", 2);
    run.signal(Signal::HUP);
    folder.write("go", "");
    run.end().expect(0);
}

#[test]
fn nothing_stays_in_the_temporary_folder() {
    let folder = Folder::new();
    let temporary = tempfile::tempdir().unwrap();
    folder.script("job.sh", "[ $RANK = 0 ] && exit 1; sleep 0.2");
    let mut command = folder.launcher();
    command
        .args(["-n", "2", "job.sh"])
        .env("TMPDIR", temporary.path());
    Run::start(command).end().expect(1);
    assert_eq!(std::fs::read_dir(temporary.path()).unwrap().count(), 0);
}
