//! Jobs of the local engine, from submission to end.

use std::process::Command;

use crate::support::{JOBS, Jobs, launcher};

fn submit(jobs: &Jobs, name: &str, options: &str, script: &str) -> String {
    launcher();
    let line = format!("submit --name {name} {options} -- sh -c");
    let words: Vec<_> = line.split_whitespace().chain([script]).collect();
    jobs.run_by(&mut Command::new(JOBS), &words).ok()
}

#[test]
fn a_job_runs_on_two_nodes_and_is_shown() {
    let jobs = Jobs::new();
    let shown = submit(
        &jobs,
        "a",
        "--nodes 2 --nproc-per-node 2 --env WORD=it's",
        "echo \"$RANK $WORD\"",
    );
    assert!(shown.contains("The job a has been submitted"), "{shown}");
    jobs.ok("wait a --timeout 60s");
    let logs = jobs.ok("logs a");
    for rank in 0..4 {
        assert!(logs.contains(&format!("[{rank}] {rank} it's")), "{logs}");
    }
    assert_eq!(jobs.ok("logs a -t 1").lines().count(), 1);
    let shown = jobs.ok("get a");
    assert!(
        shown.starts_with("STATUS: SUCCEEDED\nNAMESPACE: N/A\nPRIORITY: N/A\nTRAINING DURATION: "),
        "{shown}"
    );
    assert!(
        shown.contains("a-master-0") && shown.contains("a-worker-0"),
        "{shown}"
    );
    let list = jobs.ok("list");
    assert!(
        list.starts_with("NAME  STATUS     TRAINER  AGE")
            && list.contains("a     SUCCEEDED  LOCAL"),
        "{list}"
    );
    let list: serde_json::Value = serde_json::from_str(&jobs.ok("list --json")).unwrap();
    assert_eq!(
        (&list[0]["name"], &list[0]["status"]),
        (&"a".into(), &"SUCCEEDED".into())
    );
    jobs.refused("logs a -i b", 2, "it has a-master-0, a-worker-0");
}

#[test]
fn what_the_submission_has_inherited_of_signals_does_not_hide_how_the_job_ends() {
    launcher();
    let jobs = Jobs::new();
    let mut command = Command::new("env");
    command.args(["--ignore-signal=CHLD", "--block-signal", JOBS]);
    let words = [
        "submit",
        "--name",
        "a",
        "--",
        "sh",
        "-c",
        "kill -TERM $$; exit 0",
    ];
    let printed = jobs.run_by(&mut command, &words);
    assert_eq!(printed.code, Some(0), "{printed:?}");
    jobs.refused("wait a --timeout 60s", 1, "job a has ended as FAILED");
    jobs.shows("get a", "killed by SIGTERM");
}

#[test]
fn a_failure_is_shown_with_its_rank_and_last_lines() {
    let jobs = Jobs::new();
    submit(
        &jobs,
        "a",
        "--nodes 2",
        "echo before >&2; [ $RANK = 0 ] && sleep 30; exit 7",
    );
    jobs.refused("wait a", 1, "job a has ended as FAILED");
    jobs.shows(
        "get a",
        "FAILURE: a-worker-0: rank 1: it ended with exit code 7\n  before",
    );
}

#[test]
fn an_agent_that_is_killed_is_started_again() {
    let jobs = Jobs::new();
    let script = format!(
        "[ -e {0}/seen ] && exit 0; [ $RANK = 1 ] && touch {0}/run; sleep 60",
        jobs.folder().display()
    );
    submit(&jobs, "a", "--nodes 2 --max-restarts 2", &script);
    while !jobs.folder().join("run").exists() {
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    std::fs::write(jobs.folder().join("seen"), "").unwrap();
    let agent = jobs.state("a")["nodes"][1]["agent"]["pid"].to_string();
    assert!(
        Command::new("kill")
            .args(["-9", &agent])
            .status()
            .unwrap()
            .success()
    );
    jobs.ok("logs a -f");
    jobs.ok("wait a --timeout 60s");
    jobs.shows("get a", "RESTARTS: 1\n");
}

#[test]
fn stop_ends_all_of_a_job() {
    let jobs = Jobs::new();
    submit(&jobs, "a", "--nodes 2", "sleep 600");
    jobs.until("get a", "RUNNING");
    jobs.refused("submit --name a -- true", 1, "there is a job a already");
    jobs.ok("stop a");
    jobs.shows("get a", "STATUS: STOPPED");
    let agents = jobs.state("a");
    for node in 0..2 {
        let pid = &agents["nodes"][node]["agent"]["pid"];
        assert!(
            !std::path::Path::new(&format!("/proc/{pid}")).exists(),
            "agent {pid} is left"
        );
    }
    jobs.ok("stop --forget a");
    jobs.refused("get a", 1, "there is no job");
}

#[test]
fn a_job_whose_supervisor_is_killed_has_failed_and_can_be_stopped() {
    let jobs = Jobs::new();
    submit(&jobs, "a", "", "sleep 600");
    let state = jobs.state("a");
    let supervisor = jobs.supervisor("a")["pid"].to_string();
    let kill = Command::new("kill").args(["-9", &supervisor]).status();
    assert!(kill.unwrap().success());
    jobs.until("get a", "REASON: its supervisor was killed");
    jobs.ok("stop a");
    let agent = &state["nodes"][0]["agent"]["pid"];
    assert!(
        !std::path::Path::new(&format!("/proc/{agent}")).exists(),
        "agent {agent} is left"
    );
}

#[test]
fn logs_end_where_nobody_reads_them() {
    let jobs = Jobs::new();
    submit(&jobs, "a", "", "seq 100000");
    jobs.ok("wait a");
    let program = env!("CARGO_BIN_EXE_accel-jobs");
    let line = format!(
        "set -o pipefail; {program} --jobs-dir {} logs a | head -n 1",
        jobs.folder().display()
    );
    let output = Command::new("bash").args(["-c", &line]).output().unwrap();
    assert!(
        output.status.success() && output.stderr.is_empty(),
        "{output:?}"
    );
}

#[test]
fn a_job_ends_at_its_time_limit() {
    let jobs = Jobs::new();
    submit(&jobs, "a", "--time 1s", "sleep 600");
    jobs.refused("wait a", 1, "FAILED");
    jobs.shows("get a", "REASON: its time limit is over");
}

/// The lock names the supervisor.
#[test]
fn a_job_whose_state_cannot_be_read_is_stopped() {
    let jobs = Jobs::new();
    submit(&jobs, "a", "", "sleep 600");
    let agent = jobs.state("a")["nodes"][0]["agent"]["pid"].clone();
    std::fs::write(jobs.folder().join("a/state.json"), "{").unwrap();
    jobs.ok("stop a");
    assert!(
        !std::path::Path::new(&format!("/proc/{agent}")).exists(),
        "agent {agent} is left"
    );
}

#[test]
fn a_name_without_a_record_can_be_freed() {
    let jobs = Jobs::new();
    for (name, record) in [("a", None), ("b", Some("{"))] {
        std::fs::create_dir(jobs.folder().join(name)).unwrap();
        if let Some(record) = record {
            std::fs::write(jobs.folder().join(name).join("job.json"), record).unwrap();
        }
        jobs.refused(&format!("submit --name {name} -- true"), 1, "stop");
        assert_eq!(
            jobs.ok(&format!("stop --forget {name}")),
            format!("job {name} forgotten\n")
        );
        jobs.refused(
            &format!("stop --forget {name}"),
            1,
            &format!("there is no job {name} in"),
        );
    }
}

/// A word before the program that begins with `-` is not the program, so a `--dry-run` after it counts as an option.
#[test]
fn a_misspelt_option_is_refused() {
    let jobs = Jobs::new();
    for dry_run in ["--dry-run", ""] {
        let line = format!("submit --name a --node 2 {dry_run} -- true");
        jobs.refused(&line, 2, "a similar argument exists: '--nodes'");
    }
    jobs.refused("get a", 1, "there is no job");
}

#[test]
fn a_job_that_was_stopped_has_no_instance_that_runs() {
    let jobs = Jobs::new();
    submit(&jobs, "a", "", "sleep 600");
    jobs.ok("stop a");
    let text = jobs.ok("get a --json");
    let details: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(details["reason"], "stopped by its user");
    for instance in details["instances"].as_array().unwrap() {
        assert_eq!(instance["status"], "STOPPED", "{text}");
        assert!(instance["ended"].is_u64(), "{text}");
    }
    jobs.shows("stop a", "had ended as STOPPED before");
}

#[test]
fn all_jobs_that_can_be_stopped_are() {
    let jobs = Jobs::new();
    submit(&jobs, "a", "", "sleep 600");
    let printed = jobs.run("stop no-such a");
    assert_eq!(
        (printed.code, printed.stdout.as_str()),
        (Some(1), "job a stopped\n")
    );
    assert!(
        printed.stderr.contains("there is no job no-such in"),
        "{printed:?}"
    );
}

#[test]
fn a_failure_after_restarts_shows_them_and_what_was_printed() {
    let jobs = Jobs::new();
    submit(&jobs, "a", "--max-restarts 2", "echo almost; exit 3");
    jobs.refused("wait a", 1, "FAILED");
    jobs.shows("get a", "RESTARTS: 2");
    jobs.shows("get a", "almost");
}
