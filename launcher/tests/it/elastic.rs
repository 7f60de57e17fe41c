//! Jobs whose number of ranks changes while they run.

use std::path::Path;
use std::time::Duration;

use accelerator_collective::internal::NextPlace;
use accelerator_collective::{GroupOptions, Launch, ProcessGroup, ReduceOp};
use rustix::process::Signal;

use crate::hosts::Hosts;
use crate::support::{
    Folder, LONG_SLEEP, Run, signal, test_as_program, wait_until, wait_until_dead,
};

/// Runs as a rank that takes steps until the file `stop` exists. For each group that it joins, it writes process, rank,
/// number of ranks and step to `groups`. If `$WAY` is `save`, it ends for another start instead of regrouping.
#[test]
#[ignore = "a program that the tests here start"]
fn rank() {
    let exit = |code: i32| -> ! { std::process::exit(code) };
    let connect = |launch: &Launch| {
        ProcessGroup::connect(launch, &GroupOptions::new()).unwrap_or_else(|error| {
            eprintln!("{error}");
            exit(1)
        })
    };
    let launch = Launch::from_env().unwrap();
    if launch.topology.rank() == 2 && Path::new("broken").exists() {
        exit(7);
    }
    let mut group = connect(&launch);
    let mut step = 0.0;
    loop {
        let mut agreed = [step];
        if let Err(error) = group.broadcast(&mut agreed, 0) {
            group = recovered(&group, &error);
            continue;
        }
        step = agreed[0];
        let line = format!(
            "{} {} {} {step}\n",
            std::process::id(),
            group.rank(),
            group.world_size()
        );
        append("groups", &line);
        if group.rank() == 2 && Path::new("crash").exists() {
            exit(9);
        }
        // The flags count whether rank 0 ends the job, and how many ranks know of another group.
        let turn = loop {
            let is_over = group.rank() == 0 && Path::new("stop").exists();
            let mut flags =
                [is_over, group.has_next_place()].map(|is_so| f64::from(u8::from(is_so)));
            std::thread::sleep(Duration::from_millis(5));
            if let Err(error) = group.all_reduce(&mut flags, ReduceOp::Sum) {
                group = recovered(&group, &error);
                break Turn::Recovered;
            }
            step += 1.0;
            if flags[0] > 0.0 {
                break Turn::Ended;
            } else if flags[1] > 0.0 {
                break Turn::Regroups;
            }
        };
        if turn == Turn::Recovered {
            continue;
        }
        group.close().unwrap();
        if turn == Turn::Ended {
            exit(0);
        }
        if std::env::var("WAY").is_ok_and(|way| way == "save") {
            exit(75);
        }
        match group.next_place(Duration::from_secs(20)).unwrap() {
            NextPlace::Join(launch) => group = connect(&launch),
            NextPlace::Leave => std::process::exit(0),
        }
    }
}

/// The reason why a rank's steps in a group end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    Ended,
    Recovered,
    Regroups,
}

/// Returns the group of the survivors of a loss, or prints the error and ends the process.
fn recovered(group: &ProcessGroup, lost: &accelerator_collective::Error) -> ProcessGroup {
    let next = || {
        let ends = std::env::var("WAY").is_ok_and(|way| way == "end");
        if !lost.is_peer_lost() || !group.continues_on_loss() || ends {
            return Err(lost.clone());
        }
        let launch = group.survivors_place(Duration::from_secs(20))?;
        ProcessGroup::connect(&launch, &GroupOptions::new())
    };
    next().unwrap_or_else(|error| {
        eprintln!("{error}");
        std::process::exit(1)
    })
}

fn append(path: &str, line: &str) {
    use std::io::Write;
    let mut file = std::fs::OpenOptions::new();
    let mut file = file.create(true).append(true).open(path).unwrap();
    file.write_all(line.as_bytes()).unwrap();
}

/// Returns the command line of a rank.
fn program() -> String {
    test_as_program("elastic::rank")
}

/// Waits until the last group of this size in `folder` has all its ranks. Returns its process ids by rank, and the
/// step.
fn group_of(folder: &Folder, ranks: usize, after: f64) -> (Vec<String>, f64) {
    wait_until(&format!("a group of {ranks}"), || {
        let text = folder.read("groups");
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split(' ').collect()).collect();
        let step = |line: &[&str]| line[3].parse::<f64>().unwrap();
        let mut group: Vec<_> = lines
            .iter()
            .filter(|line| line.len() == 4 && line[2] == ranks.to_string() && step(line) >= after)
            .collect();
        let last = group.last().map(|line| line[3])?;
        group.retain(|line| line[3] == last);
        group.sort_by_key(|line| line[1].parse::<usize>().unwrap());
        let pids = group.iter().map(|line| line[0].to_owned()).collect();
        (group.len() == ranks).then(|| (pids, last.parse().unwrap()))
    })
}

fn elastic_hosts(least: usize, most: usize) -> Hosts {
    let mut hosts = Hosts::new(most);
    hosts.least = Some(least);
    hosts
}

const ONE: &str = "--nproc-per-node 1";

fn start(hosts: &Hosts, host: usize, options: &str) -> Run {
    hosts.start(host, &format!("{options} {}", program()))
}

#[test]
fn hosts_come_and_leave_while_ranks_run() {
    let hosts = elastic_hosts(2, 4);
    let folder = &hosts.folder;
    let head = start(&hosts, 0, ONE);
    let second = start(&hosts, 1, ONE);
    let (two, _) = group_of(folder, 2, 0.0);
    let third = start(&hosts, 2, ONE);
    let fourth = start(&hosts, 3, ONE);
    let (four, step) = group_of(folder, 4, 1.0);
    assert_eq!(four[..2], two[..], "the same processes run on");
    second.signal(Signal::TERM);
    let (three, _) = group_of(folder, 3, step + 1.0);
    assert_eq!(three, [0, 2, 3].map(|rank: usize| four[rank].clone()));
    second
        .end()
        .expect(75)
        .says("this host has left the job, which continues without it");
    // The host comes back.
    let again = start(&hosts, 1, ONE);
    let (last, _) = group_of(folder, 4, step + 2.0);
    assert_eq!(last[..3], three[..]);
    folder.write("stop", "");
    for run in [third, fourth, again] {
        run.end().expect(0);
    }
    let ended = head.end().expect(0);
    assert!(!ended.stderr.contains("restart"), "{ended:?}");
    assert!(
        ended.stderr.contains("the job continues with 3 ranks"),
        "{ended:?}"
    );
    for pid in four.iter().chain(&last) {
        wait_until_dead(pid);
    }
}

#[test]
fn a_job_continues_without_a_lost_host_and_takes_it_in_again() {
    let hosts = elastic_hosts(1, 2);
    let folder = &hosts.folder;
    let options = "--nproc-per-node 1 --restart-delay 0";
    let head = start(&hosts, 0, options);
    let second = start(&hosts, 1, options);
    let (two, _) = group_of(folder, 2, 0.0);
    second.signal(Signal::KILL);
    let (one, _) = group_of(folder, 1, 0.0);
    assert_ne!(one[0], two[0], "what fails is started again");
    let again = start(&hosts, 1, options);
    let (both, _) = group_of(folder, 2, 1.0);
    assert_eq!(both[0], one[0]);
    folder.write("stop", "");
    again.end().expect(0);
    head.end().expect(0).says("restart 1 of 3");
}

#[test]
fn a_host_that_the_job_needs_ends_it() {
    let hosts = elastic_hosts(2, 3);
    let head = start(&hosts, 0, ONE);
    let second = start(&hosts, 1, ONE);
    group_of(&hosts.folder, 2, 0.0);
    second.signal(Signal::TERM);
    let code = 128 + 15;
    second.end().expect(code);
    head.end().expect(code);
}

#[test]
fn a_dropped_slot_is_tried_again() {
    let folder = Folder::new();
    folder.write("broken", "");
    let options = "-n 2:3 --restart-delay 0 --regrow-after 0.5";
    let run = folder.start(&format!("{options} {}", program()));
    let (two, _) = group_of(&folder, 2, 0.0);
    // The rank is tried while it is still broken.
    run.wait_until_it_says("rank 2 was to join, and it ended with exit code 7");
    std::fs::remove_file(folder.path().join("broken")).unwrap();
    let (three, _) = group_of(&folder, 3, 1.0);
    assert_eq!(three[..2], two[..]);
    folder.write("stop", "");
    let ended = run.end().expect(0);
    for text in [
        "restart 2 of 3, with 2 of 3 processes: slot 2 is taken as gone for good",
        "rank 2 was to join, and it ended with exit code 7; the job continues as it is",
        "the job continues with 3 ranks",
    ] {
        assert!(ended.stderr.contains(text), "{text:?}: {ended:?}");
    }
}

#[test]
fn ranks_that_save_and_end_are_started_again_in_the_new_number() {
    let hosts = elastic_hosts(1, 2);
    let folder = &hosts.folder;
    let start = |host| {
        let mut command = hosts.command(host, &format!("{ONE} {}", program()));
        command.env("WAY", "save");
        Run::start(command)
    };
    let head = start(0);
    let (one, _) = group_of(folder, 1, 0.0);
    let second = start(1);
    let (two, _) = group_of(folder, 2, 0.0);
    assert_ne!(one[0], two[0]);
    folder.write("stop", "");
    second.end().expect(0);
    head.end().expect(0).says(
        "all ranks have saved, to continue with another number of ranks; restart 1 of 4, which does not count",
    );
}

#[test]
fn a_host_leaves_while_another_one_does_not_join() {
    let hosts = elastic_hosts(1, 3);
    let folder = &hosts.folder;
    let head = start(&hosts, 0, ONE);
    let second = start(&hosts, 1, ONE);
    let (two, _) = group_of(folder, 2, 0.0);
    // The ranks of this host never meet the others.
    folder.script("idle.sh", &format!("echo $RANK >> idle; exec {LONG_SLEEP}"));
    let third = hosts.start(2, "--nproc-per-node 1 idle.sh");
    folder.wait_for_lines("idle", 1);
    second.signal(Signal::TERM);
    let (one, _) = group_of(folder, 1, 1.0);
    assert_eq!(one[0], two[0]);
    second.end().expect(75);
    third.signal(Signal::TERM);
    third.end().expect(75);
    folder.write("stop", "");
    head.end().expect(0);
}

#[test]
fn a_host_that_fails_to_join_keeps_no_other_one_out() {
    let hosts = elastic_hosts(1, 3);
    let folder = &hosts.folder;
    let options = "--nproc-per-node 1 --restart-delay 0";
    let head = start(&hosts, 0, options);
    group_of(folder, 1, 0.0);
    folder.script("broken.sh", "echo no disk >&2; exit 3");
    let broken = hosts.start(1, &format!("{options} broken.sh"));
    head.wait_until_it_says("rank 1 was to join, and it ended with exit code 3");
    let good = start(&hosts, 2, options);
    let (two, step) = group_of(folder, 2, 1.0);
    // A restart does without it, too.
    signal(&two[0], Signal::KILL);
    wait_until("a group that was started again", || {
        let (again, _) = group_of(folder, 2, 0.0);
        (again[0] != two[0] && step > 0.0).then_some(())
    });
    folder.write("stop", "");
    good.end().expect(0);
    broken.end().expect(0);
    let ended = head.end().expect(0);
    let says = "rank 1 was to join, and it ended with exit code 3";
    assert!(ended.stderr.contains(says), "{ended:?}");
    assert!(
        ended.stderr.contains("; the job continues without\n"),
        "{ended:?}"
    );
    assert_eq!(ended.stderr.matches("; restart").count(), 1, "{ended:?}");
}

#[test]
fn a_slot_that_fails_again_costs_the_job_no_restarts() {
    let folder = Folder::new();
    folder.write("crash", "");
    let options = "-n 2:3 --max-restarts 2 --restart-delay 0 --regrow-after 0.2";
    let run = folder.start(&format!("{options} {}", program()));
    // The slot is dropped twice.
    let crashes = || folder.read("groups").matches(" 2 3 ").count();
    wait_until("four crashes", || (crashes() >= 4).then_some(()));
    std::fs::remove_file(folder.path().join("crash")).unwrap();
    wait_until("three ranks that run", || {
        let before = crashes();
        std::thread::sleep(Duration::from_millis(500));
        (folder.read("groups").lines().last()?.contains(" 3 ") && crashes() == before).then_some(())
    });
    folder.write("stop", "");
    run.end().expect(0);
}

#[test]
fn a_job_that_ends_does_not_wait_for_who_was_to_join() {
    let hosts = elastic_hosts(1, 2);
    hosts.folder.script(
        "job.sh",
        "echo $$ $RANK >> pids; while [ ! -e stop ]; do sleep 0.05; done",
    );
    let head = hosts.start(0, "--nproc-per-node 1 job.sh");
    hosts.folder.wait_for_lines("pids", 1);
    let second = hosts.start(1, "--nproc-per-node 1 job.sh");
    hosts.folder.wait_for_lines("pids", 2);
    hosts.folder.write("stop", "");
    second.end().expect(0);
    head.end().expect(0);
}

#[test]
fn survivors_continue_in_their_processes_until_one_is_left() {
    let folder = Folder::new();
    let options = "-n 3 --on-loss continue --regrow-after 600 --max-restarts 0 --log-dir logs";
    let run = folder.start(&format!("{options} {}", program()));
    let (three, _) = group_of(&folder, 3, 0.0);
    signal(&three[0], Signal::KILL);
    let (two, _) = group_of(&folder, 2, 0.0);
    assert_eq!(two[..], three[1..]);
    signal(&two[1], Signal::KILL);
    let (one, _) = group_of(&folder, 1, 0.0);
    assert_eq!(one[..], two[..1]);
    folder.write("stop", "");
    let ended = run.end().expect(0);
    assert!(
        ended.stderr.contains("the job continues with ranks 1, 2"),
        "{ended:?}"
    );
    for pid in &three {
        wait_until_dead(pid);
    }
    let report: serde_json::Value =
        serde_json::from_str(&folder.read("logs/latest/failure.json")).unwrap();
    assert_eq!(report["ending"], "recovered");
    assert_eq!(report["attempts"], serde_json::json!([]));
    let losses = report["losses"].as_array().unwrap();
    // The second one was rank 1 of the two that were left.
    for (loss, (before, rank, pid)) in losses.iter().zip([(3, 0, &three[0]), (2, 1, &two[1])]) {
        assert_eq!(loss["world_size"], before);
        assert_eq!(loss["survivors"], before - 1);
        let lost = loss["lost"].as_array().unwrap();
        assert_eq!(lost.len(), 1);
        assert_eq!(lost[0]["rank"], rank);
        assert_eq!(lost[0]["pid"].to_string(), pid.to_string());
        assert_eq!(lost[0]["cause"], "it was killed by SIGKILL");
        assert_eq!(lost[0]["signal_name"], "SIGKILL");
    }
    assert_eq!(losses.len(), 2);
}

#[test]
fn a_new_process_replaces_a_lost_rank() {
    let folder = Folder::new();
    let run = folder.start(&format!("-n 3 --on-loss continue:2 {}", program()));
    let (three, _) = group_of(&folder, 3, 0.0);
    signal(&three[1], Signal::KILL);
    let (two, step) = group_of(&folder, 2, 0.0);
    assert_eq!(two, [three[0].clone(), three[2].clone()]);
    let (again, _) = group_of(&folder, 3, step + 1.0);
    assert_eq!(again[..2], two[..]);
    folder.write("stop", "");
    let ended = run.end().expect(0);
    assert!(!ended.stderr.contains("restart"), "{ended:?}");
}

#[test]
fn a_rank_that_hangs_is_killed_and_the_others_continue() {
    let folder = Folder::new();
    let options = "-n 2 --on-loss continue --regrow-after 600 --log-dir logs";
    let mut command = folder.command(&format!("{options} {}", program()));
    command.env("ACCEL_LIVENESS_TIMEOUT", "1");
    let run = Run::start(command);
    let (two, _) = group_of(&folder, 2, 0.0);
    signal(&two[0], Signal::STOP);
    let (one, _) = group_of(&folder, 1, 0.0);
    assert_eq!(one[..], two[1..]);
    wait_until_dead(&two[0]);
    folder.write("stop", "");
    run.end().expect(0);
    let report: serde_json::Value =
        serde_json::from_str(&folder.read("logs/latest/failure.json")).unwrap();
    let lost = &report["losses"][0]["lost"][0];
    let cause = "it stopped responding, and the launcher killed it";
    assert_eq!((&lost["rank"], &lost["cause"]), (&0.into(), &cause.into()));
    assert!(lost["signal"].is_null(), "{report}");
}

#[test]
fn too_few_survivors_end_and_are_restarted() {
    let folder = Folder::new();
    let options = "-n 2 --on-loss continue:2 --restart-delay 0 --grace 60";
    let run = folder.start(&format!("{options} {}", program()));
    let (two, _) = group_of(&folder, 2, 0.0);
    signal(&two[1], Signal::KILL);
    // It does not wait for its place until the grace period is over.
    run.wait_until_it_says("the launcher does not let the ranks continue that are left");
    run.wait_until_it_says("restart 1 of 3");
    folder.write("stop", "");
    run.end().expect(0).says("restart 1 of 3");
}

#[test]
fn a_program_that_does_not_continue_ends_with_the_loss() {
    let folder = Folder::new();
    let options = "-n 3 --on-loss continue --max-restarts 0 --grace 60";
    let mut command = folder.command(&format!("{options} {}", program()));
    command.env("WAY", "end");
    let run = Run::start(command);
    let (three, _) = group_of(&folder, 3, 0.0);
    signal(&three[2], Signal::KILL);
    run.end().expect(137);
    for pid in &three {
        wait_until_dead(pid);
    }
}

#[test]
fn a_job_continues_without_a_lost_host_and_without_ranks_of_host_0() {
    let hosts = Hosts::new(3);
    let folder = &hosts.folder;
    let options = "--nproc-per-node 1 --on-loss continue --max-restarts 0";
    let head = start(&hosts, 0, options);
    let second = start(&hosts, 1, options);
    let third = start(&hosts, 2, options);
    let (three, _) = group_of(folder, 3, 0.0);
    second.signal(Signal::KILL);
    let (two, step) = group_of(folder, 2, 0.0);
    assert_eq!(two, [three[0].clone(), three[2].clone()]);
    // The host comes back.
    let again = start(&hosts, 1, options);
    let (all, step) = group_of(folder, 3, step + 1.0);
    assert_eq!(all[..2], two[..]);
    // No rank of host 0 is left, but its launcher still serves the others.
    signal(&all[0], Signal::KILL);
    let (rest, _) = group_of(folder, 2, step);
    assert_eq!(rest[..], all[1..]);
    folder.write("stop", "");
    third.end().expect(0);
    again.end().expect(0);
    let ended = head.end().expect(0);
    assert!(!ended.stderr.contains("restart"), "{ended:?}");
}

/// The launcher of a host that has lost all its ranks starts others.
#[test]
fn a_host_whose_rank_was_lost_is_taken_in_again() {
    let hosts = Hosts::new(2);
    let folder = &hosts.folder;
    let options = "--nproc-per-node 1 --on-loss continue --max-restarts 0";
    let head = start(&hosts, 0, options);
    let second = start(&hosts, 1, options);
    let (two, _) = group_of(folder, 2, 0.0);
    signal(&two[1], Signal::KILL);
    let (one, step) = group_of(folder, 1, 0.0);
    assert_eq!(one[..], two[..1]);
    let (again, _) = group_of(folder, 2, step + 1.0);
    assert_eq!(again[..1], one[..]);
    folder.write("stop", "");
    second.end().expect(0);
    head.end().expect(0);
}
