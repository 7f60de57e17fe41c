//! The effect of a failing rank on the others and on the exit code.

use std::time::Duration;

use crate::support::{Folder, LONG_SLEEP, is_alive};

/// A time far below the sleep of the others.
const SOON: Duration = Duration::from_secs(30);

#[test]
fn one_failure_ends_the_others_and_gives_the_code() {
    let folder = Folder::new();
    folder.script(
        "fail.sh",
        &format!("echo $$ >> pids; if [ $RANK = 1 ]; then while [ $(wc -l < pids) -lt 3 ]; do sleep 0.05; done; echo first >&2; echo the reason >&2; exit 7; fi; {LONG_SLEEP}"),
    );
    let ended = folder.launch("-n 3 --log-dir logs fail.sh").expect(7);
    assert!(ended.took < SOON, "{ended:?}");
    let ended = ended
        .says("accel-launch: rank 1 (pid ")
        .says("failed first: exit code 7")
        .says("    | the reason")
        .says("its log: logs/")
        .says("/rank-1.log")
        .says("ranks 0, 2 had to be ended (killed by SIGTERM)");
    assert_eq!(ended.stderr.matches("failed first").count(), 1);
    assert!(!ended.stderr.contains("restart"), "none is asked for");
    folder
        .wait_for_lines("pids", 3)
        .iter()
        .for_each(|pid| assert!(!is_alive(pid)));
}

#[test]
fn a_report_holds_no_secret_of_the_command_line() {
    let folder = Folder::new();
    folder.script("fail.sh", "exit 7");
    let secret = "correct-horse-battery-staple";
    let line = format!("-n 1 --log-dir logs fail.sh --api-token {secret}");
    let ended = folder
        .launch(&line)
        .expect(7)
        .says("fail.sh --api-token '***'");
    let report = folder.read("logs/latest/failure.json");
    assert!(report.contains("--api-token"), "{report}");
    assert!(!report.contains(secret) && !ended.stderr.contains(secret));
}

#[test]
fn a_report_that_cannot_be_written_is_not_named_as_written() {
    let folder = Folder::new();
    folder.script("fail.sh", "mkdir -p logs/latest/failure.json; exit 7");
    let ended = folder
        .launch("-n 1 --log-dir logs fail.sh")
        .expect(7)
        .says("failure.json cannot be written");
    assert!(!ended.stderr.contains("this report"), "{ended:?}");
    let partial = folder.path().join("logs/latest/failure.json.partial");
    assert!(!partial.exists());
}

#[test]
fn c21_ranks_that_sleep_end_with_those_that_fail() {
    let folder = Folder::new();
    folder.script(
        "even.sh",
        &format!(
            "echo $$ >> pids; if [ $((RANK % 2)) = 0 ]; then \
             while [ $(wc -l < pids) -lt 4 ]; do sleep 0.05; done; \
             echo \"sorry from $RANK\" >&2; exit 3; fi; {LONG_SLEEP}"
        ),
    );
    let ended = folder.launch("-n 4 even.sh").expect(3);
    assert!(ended.took < SOON, "{ended:?}");
    let ended = ended.says("failed first: exit code 3").says("sorry from ");
    assert_eq!(ended.stderr.matches("failed first").count(), 1);
    for pid in folder.wait_for_lines("pids", 4) {
        assert!(!is_alive(&pid));
    }
}

#[test]
fn a_rank_that_ignores_sigterm_is_killed_after_the_grace() {
    let folder = Folder::new();
    folder.script(
        "stay.sh",
        "[ $RANK = 1 ] && { while [ ! -e ready ]; do sleep 0.02; done; exit 9; }\n\
         trap '' TERM; touch ready; i=0; while [ $i -lt 3000 ]; do sleep 0.1; i=$((i + 1)); done",
    );
    let ended = folder.launch("-n 2 --grace 1.5 stay.sh").expect(9);
    assert!(
        ended.took >= Duration::from_millis(1500) && ended.took < SOON,
        "{ended:?}"
    );
    ended
        .says("waiting for rank 0 to end")
        .says("rank 0 had to be ended (killed by SIGKILL)");
}

#[test]
fn the_last_lines_are_bounded() {
    let folder = Folder::new();
    folder.script(
        "fail.sh",
        "i=0; while [ $i -lt 100 ]; do echo line $i >&2; i=$((i + 1)); done; exit 1",
    );
    let ended = folder.launch("-n 1 fail.sh").expect(1);
    assert_eq!(ended.stderr.matches("    | ").count(), 5);
    ended
        .says("    | line 95\n")
        .says("    | line 99\n")
        .says("rank 0 (pid ")
        .says("failed: exit code 1");
}
