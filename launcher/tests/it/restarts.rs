//! Restarts of a failed job, with as many processes or fewer.

use std::time::Duration;

use crate::support::{Folder, LONG_SLEEP, wait_until};
use rustix::process::Signal;
use serde_json::Value;

/// Appends to `seen`, once per attempt: its number, the maximum number of restarts, and the world size.
const NOTE: &str = "[ $RANK = 0 ] && echo $ACCEL_RESTART $ACCEL_MAX_RESTARTS $WORLD_SIZE >> seen; ";

/// Makes rank 1 wait until rank 0 has written its note.
const WAIT_FOR_NOTE: &str =
    "while [ $(cat seen 2> /dev/null | wc -l) -le $ACCEL_RESTART ]; do sleep 0.02; done; ";

/// Returns the log of a rank that failed, with `RUN` instead of the name of its run's folder.
fn log_of(first: &Value) -> String {
    let log = std::path::Path::new(first["log"].as_str().unwrap());
    let [logs, _run, file] = log.iter().collect::<Vec<_>>()[..] else {
        panic!("{first:#}");
    };
    let [logs, file] = [logs, file].map(|part| part.to_str().unwrap());
    format!("{logs}/RUN/{file}")
}

#[test]
fn a_job_is_restarted_until_it_ends_well() {
    let folder = Folder::new();
    folder.script(
        "job.sh",
        &format!(
            "{NOTE}echo $ACCEL_JOB >> jobs; {WAIT_FOR_NOTE}\n\
             [ $RANK = 1 ] && [ $ACCEL_RESTART -lt 2 ] && kill -KILL $$; echo life $ACCEL_RESTART"
        ),
    );
    let ended = folder
        .launch("-n 2 --max-restarts 3 --restart-delay 0.1 --log-dir logs job.sh")
        .expect(0)
        .says("rank 1 was killed by SIGKILL; restart 1 of 3 in 0.1 s\n")
        .says("rank 1 was killed by SIGKILL, as before; restart 2 of 3 in 0.2 s\n")
        .says("succeeded after 2 restarts");
    assert!(!ended.stderr.contains("giving up"), "{ended:?}");
    assert_eq!(folder.read("seen"), "0 3 2\n1 3 2\n2 3 2\n");
    let mut jobs: Vec<String> = folder.read("jobs").lines().map(str::to_owned).collect();
    jobs.sort();
    jobs.dedup();
    assert_eq!(jobs.len(), 3, "every attempt is a job of its own: {jobs:?}");
    // Each attempt has its own logs.
    assert_eq!(folder.read("logs/latest/rank-1.log"), "");
    assert_eq!(folder.read("logs/latest/rank-1.restart-2.log"), "life 2\n");
    let report = folder.failure();
    assert_eq!(report["version"], 1);
    assert_eq!(report["ending"], "recovered");
    assert_eq!(report["attempts"].as_array().unwrap().len(), 2);
    assert_eq!(
        log_of(&report["attempts"][0]["first"]),
        "logs/RUN/rank-1.log"
    );
    assert_eq!(report["attempts"][1]["restarts"], 1);
    assert_eq!(report["first"]["rank"], 1);
}

#[test]
fn an_error_that_repeats_is_shown_when_it_is_new_and_at_the_end() {
    let folder = Folder::new();
    folder.script("job.sh", "echo why >&2; exit 7");
    let ended = folder
        .launch("--max-restarts 2 --restart-delay 0 job.sh")
        .expect(7)
        .says("as before; restart 2 of 2");
    assert_eq!(ended.stderr.matches("    | why").count(), 2, "{ended:?}");
}

#[test]
fn c21_three_restarts_are_enough_for_what_succeeds_the_fourth_time() {
    let folder = Folder::new();
    // Another rank fails each time, so no slot fails twice in a row.
    folder.script(
        "job.sh",
        "[ $RANK = $((ACCEL_RESTART % 2)) ] && [ $ACCEL_RESTART -lt 3 ] && exit 1; echo life $ACCEL_RESTART",
    );
    let launch = |restarts: &str| {
        folder.launch(&format!(
            "--max-restarts {restarts} --restart-delay 0.1 -n 2 --log-dir logs job.sh"
        ))
    };
    launch("3").expect(0).says("succeeded after 3 restarts");
    launch("2").expect(1).says("giving up");
}

#[test]
fn a_job_that_fails_on_is_given_up_with_the_culprits_code() {
    let folder = Folder::new();
    folder.script(
        "job.sh",
        &format!("{NOTE}{WAIT_FOR_NOTE}[ $RANK = 1 ] && {{ echo why >&2; exit 7; }}; {LONG_SLEEP}"),
    );
    let ended = folder
        .launch("-n 2 --max-restarts 1 --restart-delay 0 --log-dir logs job.sh")
        .expect(7)
        .says("rank 1 ended with exit code 7; restart 1 of 1\n")
        .says("failed first: exit code 7")
        .says("giving up: it was restarted once, as --max-restarts allows");
    assert_eq!(ended.stderr.matches("failed first").count(), 1, "{ended:?}");
    assert_eq!(folder.read("seen"), "0 1 2\n1 1 2\n");
    let report = folder.failure();
    assert_eq!(report["ending"], "failed");
    assert_eq!(report["exit_code"], 7);
    assert_eq!(report["restarts"], 1);
    assert_eq!(log_of(&report["first"]), "logs/RUN/rank-1.restart-1.log");
}

#[test]
fn a_signal_ends_the_wait_before_a_restart() {
    let folder = Folder::new();
    folder.script("job.sh", &format!("{NOTE}exit 3"));
    let run = folder.start("-n 1 --max-restarts 3 --restart-delay 300 --log-dir logs job.sh");
    wait_until("the failure to be recorded", || {
        folder
            .read("logs/latest/failure.json")
            .contains("restarting")
            .then_some(())
    });
    run.signal(Signal::TERM);
    let ended = run
        .end()
        .expect(143)
        .says("ended by SIGTERM before the restart");
    assert!(ended.took < Duration::from_secs(60), "{ended:?}");
    assert_eq!(folder.read("seen"), "0 3 1\n");
    assert_eq!(folder.failure()["ending"], "interrupted");
}

#[test]
fn a_job_that_was_told_to_end_is_not_restarted() {
    let folder = Folder::new();
    folder.script(
        "job.sh",
        &format!("trap 'exit 9' TERM; {NOTE}echo $$ >> pids; {LONG_SLEEP} & wait"),
    );
    let run = folder.start("-n 2 --max-restarts 3 --restart-delay 0 job.sh");
    folder.wait_for_lines("pids", 2);
    folder.wait_for_lines("seen", 1);
    run.signal(Signal::TERM);
    run.end().expect(143);
    assert_eq!(folder.read("seen"), "0 3 2\n");
}

#[test]
fn a_job_is_given_up_rather_than_run_with_too_few() {
    let folder = Folder::new();
    folder.script(
        "job.sh",
        &format!("{NOTE}{WAIT_FOR_NOTE}[ $RANK = $((WORLD_SIZE - 1)) ] && exit 5; {LONG_SLEEP}"),
    );
    folder
        .launch("-n 2:3 --max-restarts 9 --restart-delay 0 job.sh")
        .expect(5)
        .says("giving up: the place of rank 1 is gone for good")
        .says("no fewer than 2");
    assert_eq!(folder.read("seen"), "0 9 3\n1 9 3\n2 9 2\n3 9 2\n");
}

#[test]
fn a_fixed_port_is_free_again_for_the_restart() {
    let folder = Folder::new();
    let port = crate::ports::free_port().to_string();
    folder.script(
        "job.sh",
        "echo $MASTER_PORT >> ports; [ $ACCEL_RESTART = 2 ]",
    );
    folder
        .launch(&format!(
            "-n 1 --master-port {port} --max-restarts 2 --restart-delay 0 job.sh"
        ))
        .expect(0);
    assert_eq!(folder.read("ports"), format!("{port}\n{port}\n{port}\n"));
}

#[test]
fn a_restart_that_fails_says_so_beside_the_failure() {
    for (harm, max_restarts, reason) in [
        ("chmod -x \"$0\"", 1, "could not be started"),
        // With restarts left, each is tried.
        ("chmod -x \"$0\"", 2, "Permission denied"),
        ("rm -f \"$0\"", 3, "job.sh is gone"),
        // A folder is in the way of the restart's log.
        (
            "mkdir logs/latest/rank-0.restart-1.log",
            3,
            "rank-0.restart-1.log",
        ),
    ] {
        check_that_a_restart_fails(harm, max_restarts, reason);
    }
}

#[track_caller]
fn check_that_a_restart_fails(harm: &str, max_restarts: u64, reason: &str) {
    let folder = Folder::new();
    // Both ranks have been started when rank 1 does harm.
    folder.script(
        "job.sh",
        &format!(
            "[ $RANK = 0 ] && {{ touch ready; {LONG_SLEEP}; }}\n\
             while [ ! -e ready ]; do sleep 0.02; done; {harm}; exit 3"
        ),
    );
    let ended = folder
        .launch(&format!(
            "-n 2 --max-restarts {max_restarts} --restart-delay 0 --log-dir logs job.sh"
        ))
        .expect(3)
        .says("ended with exit code 3; restart 1 of")
        .says("giving up: ")
        .says(reason);
    assert_eq!(ended.stderr.matches("failed first").count(), 1, "{ended:?}");
    let report = folder.failure();
    assert_eq!(report["ending"], "failed", "{report:#}");
    assert_eq!(report["exit_code"], 3);
    assert_eq!(report["attempts"].as_array().unwrap().len(), 1);
    let recorded = report["reason"].as_str().unwrap();
    assert!(recorded.contains(reason), "{report:#}");
}

#[test]
fn a_launch_that_cannot_be_prepared_leaves_no_report_of_another() {
    let folder = Folder::new();
    folder.script("job.sh", "exit 3");
    folder.launch("-n 1 --log-dir logs job.sh").expect(3);
    assert_eq!(folder.failure()["ending"], "failed");
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    folder
        .launch(&format!("-n 1 --master-port {port} --log-dir logs job.sh"))
        .expect(1)
        .says("is taken");
    assert_eq!(folder.read("logs/latest/failure.json"), "");
}
