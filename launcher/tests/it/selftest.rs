//! `accel-launch test` passes here, and ends in time with all of its processes.

use std::net::TcpListener;
use std::time::Duration;

use crate::support::{DEADLINE, Folder, Run, wait_until, wait_until_dead};
use rustix::process::Signal;
use serde_json::Value;

/// The number of stages.
const STAGES: usize = 5;

fn verdict(report: &Value) -> &str {
    report["stages"][0]["verdict"].as_str().unwrap()
}

#[test]
fn every_stage_is_ok_here() {
    let ended = Folder::new().launch("test --json").expect(0);
    let report = ended.json();
    assert_eq!(report["ok"], true, "{report}");
    let stages = report["stages"].as_array().unwrap();
    assert_eq!(stages.len(), STAGES);
    for stage in stages {
        assert_eq!(stage["verdict"], "ok", "{stage}");
        assert!(stage["seconds"].as_f64().unwrap() > 0.0, "{stage}");
    }
}

#[test]
fn three_processes_can_be_tested_too() {
    let ended = Folder::new().launch("test -n 3").expect(0);
    let text = ended.text();
    assert!(text.contains("3 processes met"), "{text}");
    assert!(text.contains("on 3 ranks over shm"), "{text}");
    assert!(text.contains("on 3 ranks over tcp"), "{text}");
    assert!(text.contains("all is well: 5 stages ok"), "{text}");
}

#[test]
#[cfg(target_os = "linux")]
fn memory_that_cannot_be_shared_is_no_failure() {
    let folder = Folder::new();
    // The limit leaves room for the job's token alone.
    let line = "ulimit -f 1; exec \"$0\" test --json --stage shm";
    let command = folder.launcher_by("sh", &["-c", line]);
    let ended = Run::start(command).end().expect(0);
    let report = ended.json();
    assert_eq!(report["ok"], true, "{report}");
    assert_eq!(verdict(&report), "skipped", "{report}");
    let detail = report["stages"][0]["detail"].as_str().unwrap();
    assert!(
        detail.starts_with("rank 0 has no memory to share"),
        "{report}"
    );
}

#[test]
fn a_stage_that_takes_too_long_is_ended() {
    // Ten launches take longer.
    let line = "test --json --limit 0.1 --stage death --timing";
    let folder = Folder::new();
    let ended = folder.launch(line);
    let report = ended.json();
    for stage in report["stages"].as_array().unwrap() {
        let verdict = stage["verdict"].as_str().unwrap();
        assert!(["ok", "failed", "timed out"].contains(&verdict), "{report}");
    }
    assert!(report["seconds"].as_f64().unwrap() < 30.0, "{report}");
}

#[test]
fn a_port_that_is_taken_is_told_and_what_needs_it_is_left_out() {
    let taken = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let ended = Folder::new()
        .launch(&format!("test --master-port {port}"))
        .expect(1);
    let text = ended.text();
    let line = text.lines().next().unwrap();
    assert!(line.contains("FAILED"), "{text}");
    assert!(
        line.contains(&format!("port {port} of 127.0.0.1 is taken")),
        "{text}"
    );
    assert!(text.contains("1 stage FAILED, 3 skipped"), "{text}");
}

#[test]
fn a_signal_ends_it_and_its_processes() {
    let folder = Folder::new();
    let run = folder.start("test --stage tcp --timing");
    // The processes are the shim of a job's launcher, the launcher proper, and two ranks.
    let processes = wait_until("a job", || {
        let found = descendants(run.pid().as_raw_pid());
        (found.len() == 4).then_some(found)
    });
    run.signal(Signal::TERM);
    let ended = run.end().expect(128 + 15);
    assert!(ended.text().contains("ended by SIGTERM"), "{ended:?}");
    for process in processes {
        wait_until_dead(&process.to_string());
    }
}

#[test]
fn the_time_to_the_first_all_reduce_is_measured() {
    let ended = Folder::new()
        .launch("test --timing --json --stage rendezvous")
        .expect(0);
    let report = ended.json();
    let seconds = |name: &str| {
        let number = report[name].as_f64();
        number.unwrap_or_else(|| panic!("no {name} in {report}"))
    };
    let median = seconds("first_all_reduce_seconds");
    assert!(median > 0.0);
    assert!(seconds("first_all_reduce_seconds_min") <= median);
    assert!(seconds("first_all_reduce_seconds_max") >= median);
    assert!(Duration::from_secs_f64(median) < DEADLINE);
}

#[test]
fn nonsense_is_refused() {
    for line in [
        "test -n 1",
        "test -n 17",
        "test --limit 0",
        "test --stage nothing",
        "test --chaos",
        "__rank nothing",
    ] {
        Folder::new().launch(line).expect(2);
    }
}

#[cfg(not(feature = "faults"))]
#[test]
#[ignore = "asks how this build was made"]
fn plans_of_faults_are_carried_out() {
    accelerator_fault::check().unwrap();
}

#[test]
fn a_plan_of_faults_is_refused_by_a_program_without_injection() {
    // If the whole workspace is built, its tests inject faults, and so does the launcher.
    let probe = std::process::Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "--ignored",
            "selftest::plans_of_faults_are_carried_out",
        ])
        .env("ACCEL_FAULTS", "rank=0 step=1 kill")
        .status()
        .unwrap();
    if probe.success() {
        eprintln!("skipped: this build injects faults");
        return;
    }
    let folder = Folder::new();
    let variables = [("ACCEL_FAULTS", "rank=0 step=1 kill")];
    let ended = folder.launch_with("__rank threads", variables);
    ended.expect(1).says("built without fault injection");
}

/// Returns the children of a process and their descendants.
fn descendants(parent: i32) -> Vec<i32> {
    let tasks = std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children"));
    let children = tasks.unwrap_or_default();
    let children = children.split_whitespace().map(|pid| pid.parse().unwrap());
    children
        .flat_map(|child| std::iter::once(child).chain(descendants(child)))
        .collect()
}
