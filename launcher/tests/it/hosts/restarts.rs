//! Restarts of a job on several hosts.

use std::time::Duration;

use super::{Hosts, end};
use crate::support::{LONG_SLEEP, wait_until_dead};
use rustix::process::Signal;

#[test]
fn a_failed_job_is_started_again_on_all_hosts() {
    let hosts = Hosts::new(2);
    hosts.folder.script(
        "job.sh",
        "echo $ACCEL_JOB >> jobs\n\
         while [ $(wc -l < jobs) -lt $((4 * (ACCEL_RESTART + 1))) ]; do sleep 0.02; done\n\
         [ $RANK = 3 ] && [ $ACCEL_RESTART -lt 2 ] && kill -KILL $$; echo life $ACCEL_RESTART",
    );
    let ended = end(
        hosts.start_all("--nproc-per-node 2 --max-restarts 2 --restart-delay 0.1 job.sh"),
        &[0, 0],
    );
    let said = &ended[0].stderr;
    assert!(
        said.contains("was killed by SIGKILL; restart 1 of 2"),
        "{said}"
    );
    assert!(
        said.contains("was killed by SIGKILL, as before; restart 2 of 2"),
        "{said}"
    );
    assert!(said.contains("succeeded after 2 restarts"), "{said}");
    let mut jobs = hosts.folder.wait_for_lines("jobs", 12);
    jobs.sort();
    jobs.dedup();
    assert_eq!(jobs.len(), 3, "every attempt is a job of its own: {jobs:?}");
    assert!(ended[0].text().contains("[3] life 2\n"), "{ended:?}");
}

#[test]
fn a_job_continues_when_a_lost_host_has_come_again() {
    let hosts = Hosts::new(2);
    hosts.folder.script(
        "job.sh",
        &format!(
            "echo $$ $RANK >> pids.$ACCEL_RESTART; [ $ACCEL_RESTART = 0 ] && exec {LONG_SLEEP}; \
             echo life $ACCEL_RESTART of $WORLD_SIZE"
        ),
    );
    let mut runs = hosts.start_all("--nproc-per-node 1 --max-restarts 1 --restart-delay 0 job.sh");
    let pids = hosts.folder.wait_for_lines("pids.0", 2);
    runs[1].signal(Signal::KILL);
    for pid in &pids {
        wait_until_dead(pid.split(' ').next().unwrap());
    }
    // The host comes back with another number of ranks.
    let again = hosts.start(1, "--nproc-per-node 2 job.sh");
    let ended = end([runs.remove(0), again], &[0, 0]);
    let said = &ended[0].stderr;
    assert!(
        said.contains("host 1 (") && said.contains("; restart 1 of 1"),
        "{said}"
    );
    assert_eq!(
        ended[0].sorted(),
        ["[0] life 1 of 3", "[1] life 1 of 3", "[2] life 1 of 3"]
    );
}

#[test]
fn a_lost_host_that_does_not_come_again_ends_the_job() {
    let hosts = Hosts::new(3);
    hosts
        .folder
        .script("job.sh", &format!("echo $$ >> pids; {LONG_SLEEP}"));
    let options = "--join-timeout 3 --max-restarts 1 --restart-delay 0";
    let mut runs = hosts.start_all(&format!("{options} --log-dir logs job.sh"));
    let pids = hosts.folder.wait_for_lines("pids", 3);
    runs[2].signal(Signal::KILL);
    drop(runs.pop());
    let ended = end(runs, &[75, 75]);
    for ended in &ended {
        assert!(ended.stderr.contains("host 2 ("), "{ended:?}");
        assert!(ended.took < Duration::from_secs(40), "{ended:?}");
    }
    assert!(
        ended[0]
            .stderr
            .contains("giving up: host 2 did not join within 3 s"),
        "{ended:?}"
    );
    let report = hosts.folder.failure();
    assert_eq!(
        (&report["ending"], &report["first"]["node"]),
        (&"failed".into(), &2.into())
    );
    pids.iter().for_each(|pid| wait_until_dead(pid));
}
