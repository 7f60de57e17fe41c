//! `accel-launch test`: it passes here, and notices what is broken on purpose.

use std::net::TcpListener;
use std::time::Duration;

use crate::support::{DEADLINE, Ended, Folder, Run, wait_until, wait_until_dead};
use rustix::process::Signal;
use serde_json::Value;

const STAGES: [&str; 9] = [
    "rendezvous",
    "threads",
    "shm",
    "tcp",
    "plan",
    "training",
    "death",
    "silence",
    "checkpoint",
];

fn json(ended: &Ended) -> Value {
    serde_json::from_str(&ended.text()).unwrap()
}

fn verdict(report: &Value) -> &str {
    report["stages"][0]["verdict"].as_str().unwrap()
}

#[test]
fn every_stage_is_ok_here() {
    let ended = Folder::new().launch(["test", "--json"]).expect(0);
    let report = json(&ended);
    assert_eq!(report["ok"], true, "{report}");
    let stages = report["stages"].as_array().unwrap();
    assert_eq!(stages.len(), STAGES.len());
    for stage in stages {
        assert_eq!(stage["verdict"], "ok", "{stage}");
        assert!(stage["seconds"].as_f64().unwrap() > 0.0, "{stage}");
    }
}

#[test]
fn three_processes_can_be_tested_too() {
    let line =
        "test -n 3 --stage rendezvous --stage shm --stage tcp --stage training --stage death";
    let ended = Folder::new().launch(line.split(' ')).expect(0);
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
    let line = "ulimit -f 0; exec \"$0\" test --json --stage shm";
    let command = folder.launcher_by("sh", &["-c", line]);
    let ended = Run::start(command).end().expect(0);
    let report = json(&ended);
    assert_eq!(report["ok"], true, "{report}");
    assert_eq!(verdict(&report), "skipped", "{report}");
    let detail = report["stages"][0]["detail"].as_str().unwrap();
    assert!(
        detail.starts_with("rank 0 has no memory to share"),
        "{report}"
    );
}

#[test]
fn a_wrong_result_fails_its_stage() {
    for stage in STAGES {
        let broken = format!("{stage}:wrong");
        let ended = Folder::new()
            .launch(["test", "--json", "--stage", stage, "--break", &broken])
            .expect(1);
        let report = json(&ended);
        assert_eq!(report["ok"], false, "{stage}: {report}");
        assert_eq!(verdict(&report), "failed", "{stage}: {report}");
        assert_ne!(report["stages"][0]["detail"], "", "{stage}: {report}");
    }
}

#[test]
fn a_rank_that_dies_fails_its_stage() {
    for stage in STAGES {
        let broken = format!("{stage}:crash");
        let ended = Folder::new()
            .launch(["test", "--json", "--stage", stage, "--break", &broken])
            .expect(1);
        let report = json(&ended);
        assert_eq!(verdict(&report), "failed", "{stage}: {report}");
    }
}

#[test]
fn a_rank_that_hangs_is_given_up_in_time_and_ended() {
    for stage in STAGES {
        let broken = format!("{stage}:hang");
        let line = ["test", "--json", "--limit", "1", "--stage", stage];
        let ended = Folder::new()
            .launch(line.into_iter().chain(["--break", &broken]))
            .expect(1);
        let report = json(&ended);
        let detail = report["stages"][0]["detail"].as_str().unwrap();
        // Where the other ranks time out first, their error is reported.
        match verdict(&report) {
            "timed out" => {
                let (_, pid) = detail.split_once("rank 0 (process ").unwrap();
                wait_until_dead(pid.split_once(')').unwrap().0);
            }
            verdict => assert_eq!(verdict, "failed", "{stage}: {report}"),
        }
        let seconds = report["seconds"].as_f64().unwrap();
        assert!(seconds < 20.0, "{stage}: {report}");
    }
}

#[test]
fn a_port_that_is_taken_is_told_and_what_needs_it_is_left_out() {
    let taken = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let ended = Folder::new()
        .launch(["test", "--master-port", &port])
        .expect(1);
    let text = ended.text();
    let line = text.lines().next().unwrap();
    assert!(line.contains("FAILED"), "{text}");
    assert!(
        line.contains(&format!("port {port} of 127.0.0.1 is taken")),
        "{text}"
    );
    assert!(text.contains("1 stage FAILED, 5 skipped"), "{text}");
}

#[test]
fn a_signal_ends_it_and_its_processes() {
    let folder = Folder::new();
    let mut command = folder.launcher();
    command.args(["test", "--stage", "tcp", "--break", "tcp:hang"]);
    let run = Run::start(command);
    let parent = run.pid().as_raw_pid();
    let ranks = wait_until("two ranks", || {
        let ranks = children(parent);
        (ranks.len() == 2).then_some(ranks)
    });
    run.signal(Signal::TERM);
    let ended = run.end().expect(128 + 15);
    assert!(ended.text().contains("ended by SIGTERM"), "{ended:?}");
    for rank in ranks {
        wait_until_dead(&rank);
    }
}

#[test]
fn the_time_to_the_first_all_reduce_is_measured() {
    let ended = Folder::new()
        .launch(["test", "--timing", "--json", "--stage", "rendezvous"])
        .expect(0);
    let report = json(&ended);
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
        "test --break tcp:gently",
        "__rank nothing",
    ] {
        Folder::new().launch(line.split(' ')).expect(2);
    }
}

#[cfg(not(feature = "faults"))]
#[test]
fn faults_need_a_program_that_is_built_for_them() {
    Folder::new()
        .launch(["test", "--chaos"])
        .expect(2)
        .says("build it with the feature `faults`");
}

#[cfg(not(feature = "faults"))]
#[test]
#[ignore = "asks how this build was made"]
fn plans_of_faults_are_carried_out() {
    accelerator_fault::check().unwrap();
}

#[test]
fn a_plan_of_faults_is_refused_by_a_program_without_injection() {
    // Built with the whole workspace, whose tests inject, so does the launcher.
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
    let mut command = folder.launcher();
    command.args(["__rank", "train", "--folder", "."]);
    command.env("ACCEL_FAULTS", "rank=0 step=1 kill");
    let ended = Run::start(command).end().expect(1);
    ended.says("built without fault injection");
}

/// The processes that this one has started and not reaped.
fn children(parent: i32) -> Vec<String> {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let names = processes.filter_map(|entry| entry.file_name().into_string().ok());
    names
        .filter(|name| {
            let stat = std::fs::read_to_string(format!("/proc/{name}/stat")).unwrap_or_default();
            let mut fields = stat
                .rsplit(')')
                .next()
                .unwrap_or_default()
                .split_whitespace();
            fields.nth(1) == Some(&parent.to_string())
        })
        .collect()
}
