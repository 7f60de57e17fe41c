//! Lost hosts are named, and nothing is left of the job.

use std::time::{Duration, Instant};

use super::{Hosts, end};
use crate::support::{
    Ended, LONG_SLEEP, Run, join_group, signal, test_as_program, wait_until_dead,
};
use accelerator_collective::ReduceOp;
use rustix::process::{Signal, kill_process};

/// The variable with the folder into which each rank writes its process id.
const RANK_FOLDER: &str = "LAUNCHER_TEST_LOSSES";

/// Works as a rank until another one is lost, if this process is a rank.
fn work_as_rank() {
    let Some(folder) = std::env::var_os(RANK_FOLDER) else {
        return;
    };
    let work = || -> accelerator_collective::Result<()> {
        let group = join_group()?;
        let file = std::path::Path::new(&folder).join(format!("up.{}", group.rank()));
        std::fs::write(file, format!("{}\n", std::process::id())).ok();
        loop {
            group.all_reduce(&mut [1.0_f64], ReduceOp::Sum)?;
            std::thread::sleep(Duration::from_millis(2));
        }
    };
    if let Err(error) = work() {
        eprintln!("lost: {error}");
    }
    std::process::exit(4);
}

/// Starts two hosts with two ranks each, which run only the test `name`. Returns the launchers and the process ids once
/// all ranks work together.
fn start(hosts: &Hosts, name: &str, options: &str) -> (Vec<Run>, Vec<String>) {
    let program = test_as_program(&format!("hosts::losses::{name}"));
    let runs = (0..2).map(|host| {
        let own = format!("--nproc-per-node 2 --log-dir logs.{host}");
        let mut command = hosts.command(host, &format!("{own} {options} {program}"));
        command.env(RANK_FOLDER, hosts.folder.path());
        Run::start(command)
    });
    let runs = runs.collect();
    let pids = (0..4).map(|rank| hosts.folder.wait_for_lines(&format!("up.{rank}"), 1));
    let pids = pids.flatten().collect();
    (runs, pids)
}

/// Asserts that the report blames host 1 and one of its ranks.
#[track_caller]
fn check_host_1(hosts: &Hosts, head: &Ended, why: &str) {
    assert_eq!(head.code(), 75, "{head:?}");
    let report = hosts.folder.failure_in("logs.0");
    let first = &report["first"];
    assert_eq!(first["node"], 1, "{report:#}");
    assert!(
        [2, 3].map(Into::into).contains(&first["rank"]),
        "{report:#}"
    );
    let cause = first["cause"].as_str().unwrap();
    assert!(cause.starts_with("host 1 ("), "{cause}");
    assert!(cause.contains(", ranks 2 and 3) was lost at "), "{cause}");
    assert!(cause.contains(why), "{cause}");
    assert!(head.stderr.contains(cause), "{head:?}");
}

#[test]
fn a_launcher_that_is_killed_is_a_lost_host() {
    work_as_rank();
    for is_shim in [true, false] {
        let hosts = Hosts::new(2);
        let name = "a_launcher_that_is_killed_is_a_lost_host";
        let (mut runs, pids) = start(&hosts, name, "");
        let victim = match is_shim {
            true => runs[1].pid(),
            false => runs[1].proper(),
        };
        kill_process(victim, Signal::KILL).unwrap();
        let killed = Instant::now();
        let head = runs.remove(0).end();
        assert!(killed.elapsed() < Duration::from_secs(20), "{head:?}");
        check_host_1(&hosts, &head, "its connection");
        pids.iter().for_each(|pid| wait_until_dead(pid));
        let log = hosts.folder.read("logs.0/latest/rank-0.log");
        assert!(log.contains("lost: "), "its ranks learn of it: {log}");
    }
}

#[test]
fn a_launcher_that_is_stopped_is_a_lost_host_after_the_timeout() {
    work_as_rank();
    let hosts = Hosts::new(2);
    let name = "a_launcher_that_is_stopped_is_a_lost_host_after_the_timeout";
    let (mut runs, pids) = start(&hosts, name, "--grace 1");
    let victim = runs[1].proper();
    kill_process(victim, Signal::STOP).unwrap();
    let stopped = Instant::now();
    let head = runs.remove(0).end();
    // The timeout is 2 s, and the grace period of ranks that cannot end is short.
    assert!(stopped.elapsed() < Duration::from_secs(15), "{head:?}");
    check_host_1(&hosts, &head, "nothing came from it for ");
    kill_process(victim, Signal::CONT).unwrap();
    let other = runs.remove(0).end().expect(75);
    other.says("host 0 (").says("start this launcher again");
    pids.iter().for_each(|pid| wait_until_dead(pid));
}

#[test]
fn a_host_whose_processes_are_all_stopped_is_named_and_not_its_ranks() {
    work_as_rank();
    let hosts = Hosts::new(2);
    let name = "a_host_whose_processes_are_all_stopped_is_named_and_not_its_ranks";
    let (mut runs, pids) = start(&hosts, name, "--grace 1");
    // The host behaves as if it were switched off. Ranks and launchers detect it by silence, in any order.
    let launcher = runs[1].proper().as_raw_pid().to_string();
    let all = [&pids[2], &pids[3], &launcher];
    all.iter().for_each(|pid| signal(pid, Signal::STOP));
    let head = runs.remove(0).end();
    check_host_1(&hosts, &head, "nothing came from it for ");
    all.iter().for_each(|pid| signal(pid, Signal::CONT));
    runs.remove(0).end().expect(75);
    pids.iter().for_each(|pid| wait_until_dead(pid));
}

#[test]
fn a_head_that_is_killed_ends_the_job_on_the_others() {
    work_as_rank();
    for is_shim in [true, false] {
        let hosts = Hosts::new(2);
        let name = "a_head_that_is_killed_ends_the_job_on_the_others";
        let (mut runs, pids) = start(&hosts, name, "");
        let victim = match is_shim {
            true => runs[0].pid(),
            false => runs[0].proper(),
        };
        kill_process(victim, Signal::KILL).unwrap();
        let other = runs.remove(1).end().expect(75);
        let other = other
            .says("host 0 (")
            .says("was lost at ")
            .says("its connection");
        let report = hosts.folder.failure_in("logs.1");
        assert_eq!(
            (&report["exit_code"], &report["first"]["node"]),
            (&75.into(), &0.into())
        );
        assert_eq!(
            (&report["world_size"], &report["ending"]),
            (&4.into(), &"failed".into())
        );
        let ranks: Vec<_> = report["collateral"].as_array().unwrap().iter().collect();
        assert_eq!(ranks.len(), 2, "{report:#}");
        assert_eq!(ranks[0]["rank"], 2, "{report:#}");
        other.says("failure.json");
        pids.iter().for_each(|pid| wait_until_dead(pid));
    }
}

#[test]
fn a_head_that_is_stopped_is_lost_after_the_timeout() {
    let hosts = Hosts::new(2);
    hosts
        .folder
        .script("job.sh", &format!("echo $$ >> pids; {LONG_SLEEP}"));
    let mut runs = hosts.start_all("job.sh");
    let pids = hosts.folder.wait_for_lines("pids", 2);
    let head = runs[0].proper();
    kill_process(head, Signal::STOP).unwrap();
    let other = runs.remove(1).end().expect(75);
    other.says("host 0 (").says("nothing came from it for ");
    kill_process(head, Signal::CONT).unwrap();
    let head = runs.remove(0).end().expect(75);
    head.says("host 1 (")
        .says("this launcher was suspended for ");
    pids.iter().for_each(|pid| wait_until_dead(pid));
}

#[test]
fn a_host_that_is_lost_before_the_job_begins_is_waited_for() {
    let hosts = Hosts::new(3);
    hosts.folder.script("show.sh", "echo $RANK");
    let head = hosts.start(0, "show.sh");
    let first = hosts.start(1, "show.sh");
    let first = joined(first);
    // The launcher proper has the connection; it ends when it notices that its shim is gone. A job that begins before
    // that has a host that is lost within it.
    let launcher = first.proper().as_raw_pid().to_string();
    kill_process(first.pid(), Signal::KILL).unwrap();
    wait_until_dead(&launcher);
    drop(first);
    let others = [1, 2].map(|host| hosts.start(host, "show.sh"));
    let ended = end([head].into_iter().chain(others), &[0, 0, 0]);
    assert_eq!(ended[0].sorted(), ["[0] 0", "[1] 1", "[2] 2"]);
}

/// Waits until the head listens and the host has had time to join.
fn joined(run: Run) -> Run {
    std::thread::sleep(Duration::from_secs(1));
    run
}
