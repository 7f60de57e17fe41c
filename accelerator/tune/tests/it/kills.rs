use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal};

use crate::copies::copy_program;
use crate::support::{
    assert_nothing_left, decisions, ended, in_namespaces, processes, quadratic, search, succeed,
    trial_folder, wait_for_decisions,
};

/// The process that is killed.
#[derive(Clone, Copy, Debug)]
enum Victim {
    Search,
    Trial,
    /// A PID namespace with everything in it.
    Machine,
}

const PAUSE: (&str, &str) = ("QUADRATIC_PAUSE_MS", "30");

#[test]
fn a_search_removes_checkpoints_that_are_not_complete() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = "--num-samples 1 --checkpoint-every 3";
    succeed(folder.path(), arguments);
    let partial = trial_folder(folder.path()).join("checkpoint_000099.partial");
    fs::create_dir_all(partial.join("half")).unwrap();
    succeed(folder.path(), arguments);
    assert!(!partial.exists());
}

#[test]
fn a_function_saves_with_each_report_and_keeps_the_newest_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    for (api, expected) in [("--function", &["checkpoint_000016"][..]), ("--class", &[])] {
        let search = folder.path().join(api);
        succeed(&search, &format!("--num-samples 1 {api}"));
        let names = fs::read_dir(trial_folder(&search)).unwrap().flatten();
        let names = names.map(|entry| entry.file_name().into_string().unwrap());
        let kept: Vec<_> = names
            .filter(|name| name.starts_with("checkpoint"))
            .collect();
        assert_eq!(kept, expected, "{api}");
    }
}

#[test]
fn ten_kills_change_no_decision_at_one_two_and_four_slots() {
    let folder = tempfile::tempdir().unwrap();
    for (scheduler, slots, more) in [
        ("asha", "1", "--cold"),
        ("asha-promotion", "2", "--warm"),
        ("pbt", "4", "--function"),
    ] {
        let arguments = format!(
            "--num-samples 12 --ordered 4 --scheduler {scheduler} --checkpoint-every 3 --max-failures -1 {more}"
        );
        let undisturbed = folder.path().join(format!("{scheduler} undisturbed"));
        succeed(&undisturbed, &arguments);
        let killed = folder.path().join(format!("{scheduler} killed"));
        let arguments = format!("{arguments} --slots {slots}");
        let mut seed = 7 + slots.len() as u64;
        for kill in 0..10 {
            let victims = match in_namespaces(quadratic()).is_some() {
                true => [Victim::Search, Victim::Trial, Victim::Machine],
                false => [Victim::Search, Victim::Trial, Victim::Search],
            };
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let wait = Duration::from_millis(60 + (seed >> 33) % 200);
            let victim = victims[kill % victims.len()];
            kill_after(&killed, &arguments, victim, wait);
        }
        succeed(&killed, &arguments);
        assert_eq!(decisions(&killed), decisions(&undisturbed), "{scheduler}");
        let rows = |folder: &Path| {
            let csv = fs::read_to_string(folder.join("results.csv")).unwrap();
            // The columns are losses and counts, since times differ.
            let column = |line: &str| {
                line.split(',')
                    .take(4)
                    .map(str::to_owned)
                    .collect::<Vec<_>>()
            };
            csv.lines().map(column).collect::<Vec<_>>()
        };
        assert_eq!(rows(&killed), rows(&undisturbed), "{scheduler}");
    }
    assert_nothing_left(folder.path());
}

/// Runs a search for a while and kills something. If a trial was killed, the search continues and is killed a moment
/// later.
fn kill_after(folder: &Path, arguments: &str, victim: Victim, wait: Duration) {
    let mut command = match victim {
        Victim::Machine => {
            let mut command = in_namespaces(quadratic()).unwrap();
            command
                .args(["--quiet", "--out"])
                .arg(folder)
                .args(arguments.split_whitespace())
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null());
            command
        }
        Victim::Search | Victim::Trial => search(folder, arguments),
    };
    let mut child = command.env(PAUSE.0, PAUSE.1).spawn().unwrap();
    thread::sleep(wait);
    if let Victim::Trial = victim {
        let own = child.id().cast_signed();
        let trials = processes(folder).into_iter().filter(|pid| *pid != own);
        if let Some(trial) = trials.min().and_then(Pid::from_raw) {
            // The trial may have ended in the meantime.
            let _ = rustix::process::kill_process(trial, Signal::KILL);
        }
        thread::sleep(wait);
    }
    child.kill().unwrap();
    ended(child);
    assert_nothing_left(folder);
}

#[test]
fn a_search_that_is_killed_before_it_writes_its_results_writes_them_later() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let arguments = "--num-samples 2 --ordered 1 --slots 1";
    succeed(&out, arguments);
    for name in ["results.csv", "report.html"] {
        fs::remove_file(out.join(name)).unwrap();
        succeed(&out, arguments);
        assert!(out.join(name).exists(), "{name}");
    }
}

#[test]
fn a_search_whose_program_is_built_anew_continues_with_the_one_it_began_with() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("program");
    copy_program(&quadratic(), &program);
    let out = folder.path().join("out");
    let child = Command::new(&program)
        .args(["--quiet", "--num-samples", "3", "--slots", "1", "--out"])
        .arg(&out)
        .env(PAUSE.0, PAUSE.1)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    wait_for_decisions(&out, 1);
    fs::remove_file(&program).unwrap();
    fs::write(&program, "another").unwrap();
    let output = ended(child);
    assert!(output.status.success(), "{output:?}");
}
