//! Ranks that were told to leave, have saved, and request another start with exit code 75.

use crate::support::{Folder, LONG_SLEEP};
use rustix::process::Signal;

const NOTE: &str = "[ $RANK = 0 ] && echo $ACCEL_RESTART $ACCEL_MAX_RESTARTS >> seen; ";

#[test]
fn a_signal_to_the_launcher_ends_the_job_with_the_code_of_its_ranks() {
    for (signal, name) in [
        (Signal::TERM, "TERM"),
        (Signal::INT, "INT"),
        (Signal::USR1, "USR1"),
        (Signal::USR2, "USR2"),
    ] {
        let folder = Folder::new();
        let body =
            format!("{NOTE}trap 'sleep 0.1; exit 75' {name}; echo $$ >> pids; {LONG_SLEEP} & wait");
        folder.script("job.sh", &body);
        let run = folder.start("-n 2 --max-restarts 3 --log-dir logs job.sh");
        folder.wait_for_lines("pids", 2);
        folder.wait_for_lines("seen", 1);
        run.signal(signal);
        run.end().expect(75).says("preempted: all ranks have saved");
        assert_eq!(folder.read("seen"), "0 3\n", "{name}");
        let report = folder.failure();
        assert_eq!(report["ending"], "preempted", "{name}: {report:#}");
        assert_eq!(report["attempts"].as_array().unwrap().len(), 0);
    }
}

#[test]
fn ranks_that_are_preempted_by_themselves_are_restarted_at_once() {
    let folder = Folder::new();
    let body = format!("{NOTE}[ $ACCEL_RESTART = 0 ] && exit 75; exit 0");
    folder.script("job.sh", &body);
    folder
        .launch("-n 2 --max-restarts 1 --restart-delay 300 job.sh")
        .expect(0)
        .says("all ranks were preempted, and have saved; restart 1 of 2, which does not count\n");
    assert_eq!(folder.read("seen"), "0 1\n1 2\n");
}

#[test]
fn without_restarts_the_code_is_left_to_who_started_the_job() {
    let folder = Folder::new();
    folder.script("job.sh", &format!("{NOTE}exit 75"));
    folder
        .launch("-n 2 --log-dir logs job.sh")
        .expect(75)
        .says("start the job again to continue");
    assert_eq!(folder.read("seen"), "0 0\n");
    assert_eq!(folder.failure()["ending"], "preempted");
}

#[test]
fn a_notice_that_stands_is_not_met_for_ever() {
    let folder = Folder::new();
    folder.script("job.sh", &format!("{NOTE}exit 75"));
    folder
        .launch("-n 1 --max-restarts 9 --log-dir logs job.sh")
        .expect(75)
        .says("it was preempted again within 10 minutes of its restart");
    assert_eq!(folder.read("seen"), "0 9\n1 10\n");
    let reason = folder.failure()["reason"].as_str().unwrap().to_owned();
    assert!(reason.contains("again within"), "{reason}");
}

#[test]
fn a_job_of_which_one_rank_fails_has_failed() {
    for (how, code) in [("kill -KILL $$", 137), ("exit 3", 3)] {
        let folder = Folder::new();
        let wait = "while [ ! -e ready ]; do sleep 0.02; done";
        let body =
            format!("[ $RANK = 0 ] && {{ {wait}; exit 75; }}; touch ready; sleep 0.1; {how}");
        folder.script("job.sh", &body);
        folder
            .launch("-n 2 --log-dir logs job.sh")
            .expect(code)
            .says("rank 1 (pid ");
        let report = folder.failure();
        assert_eq!(report["ending"], "failed", "{report:#}");
        assert_eq!(report["first"]["rank"], 1, "{report:#}");
    }
}
