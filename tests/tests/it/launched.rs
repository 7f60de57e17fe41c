//! A program starts its own ranks as processes.

#![allow(clippy::unwrap_used, reason = "these are tests")]

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use accelerator_tests::processes::{self, Ended};

fn program(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rank"));
    command.args(args).env("RAYON_NUM_THREADS", "1");
    command
}

fn run(args: &[&str]) -> Ended {
    processes::run(program(args))
}

/// Returns the numbers of ranks that report to have run, and of programs that report what follows.
fn told(ended: &Ended) -> (usize, usize) {
    let lines = ended.succeeded().lines();
    let behind = lines.clone().filter(|line| *line == "behind").count();
    (
        lines.filter(|line| line.starts_with("rank in ")).count(),
        behind,
    )
}

#[test]
fn ranks_are_processes_and_what_follows_runs_once() {
    let ended = run(&["launch-processes", "2", "work"]);
    assert_eq!(told(&ended), (2, 1), "{}", ended.stdout);
    let pids = ended.stdout.lines();
    let mut pids = pids.filter_map(|line| line.strip_prefix("rank in "));
    assert_ne!(pids.next(), pids.next());
}

/// The program that a rank starts inherits the rank's variables.
#[test]
fn a_program_that_a_rank_starts_has_ranks_of_its_own() {
    let ended = run(&["launch-processes", "2", "nest"]);
    assert_eq!(told(&ended), (4, 2), "{}", ended.stdout);
}

#[test]
fn a_rank_that_fails_is_named_and_ends_the_others() {
    let begun = Instant::now();
    let Ended { status, stderr, .. } = run(&["launch-processes", "3", "fail"]);
    assert!(!status.success());
    assert!(stderr.contains("rank 1 of 3 failed"), "{stderr}");
    assert!(stderr.contains("no labels here"), "{stderr}");
    assert!(begun.elapsed() < Duration::from_secs(60), "{stderr}");
}

#[test]
fn a_rank_that_others_lose_is_named_though_it_ends_after_them() {
    let Ended { stderr, .. } = run(&["launch-processes", "3", "linger"]);
    assert!(stderr.contains("rank 2 of 3 failed"), "{stderr}");
    assert!(stderr.contains("slow to say"), "{stderr}");
}

/// Four copies of the base would be 512 MiB.
#[cfg(target_os = "linux")]
#[test]
fn ranks_of_a_host_share_the_memory_of_a_frozen_base() {
    let ended = run(&["frozen-base", "4"]);
    let sizes = ended.stdout.lines();
    let sizes: Vec<u64> = sizes.map(|size| size.parse().unwrap()).collect();
    assert_eq!(sizes.len(), 4, "{}", ended.stderr);
    let all: u64 = sizes.iter().sum();
    assert!((128..300).contains(&all), "{sizes:?}");
}

#[test]
fn ranks_that_were_preempted_have_not_finished() {
    let ended = run(&["launch-processes", "2", "preempt"]);
    let (stdout, stderr) = (ended.stdout, ended.stderr);
    assert!(!ended.status.success());
    assert!(stderr.contains("the ranks were preempted"), "{stderr}");
    assert!(!stdout.contains("behind"), "{stdout}");
}

#[test]
fn a_program_that_is_a_rank_already_starts_none() {
    let mut command = program(&["launch-processes", "2", "work"]);
    command.envs([("RANK", "0"), ("WORLD_SIZE", "1")]);
    assert_eq!(told(&processes::run(command)).0, 1);
}

#[test]
fn a_token_for_jobs_on_several_hosts_is_in_no_way() {
    let folder = tempfile::tempdir().unwrap();
    let token = folder.path().join("token");
    accelerator_collective::internal::Token::generate()
        .unwrap()
        .write_file(&token)
        .unwrap();
    let mut command = program(&["launch-processes", "2", "work"]);
    command.env("ACCEL_TOKEN_FILE", token);
    assert_eq!(told(&processes::run(command)).0, 2);
}

#[test]
fn processes_that_mpirun_has_started_are_the_ranks() {
    let port = accelerator_tests::ports::free_port().to_string();
    let commands = ["0", "1"].map(|rank| {
        let place = [
            ("OMPI_COMM_WORLD_RANK", rank),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", rank),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", &port),
        ];
        let mut command = program(&["launch-processes", "3", "work"]);
        command.envs(place);
        command
    });
    for ended in processes::run_all(commands.into_iter()) {
        assert_eq!(told(&ended).0, 1);
    }
}

#[test]
fn a_process_that_is_alone_in_a_step_starts_ranks() {
    let place = [
        ("SLURM_JOB_ID", "7"),
        ("SLURM_STEP_ID", "0"),
        ("SLURM_PROCID", "0"),
        ("SLURM_LOCALID", "0"),
        ("SLURM_NODEID", "0"),
        ("SLURM_NTASKS", "1"),
        ("SLURM_STEP_NUM_TASKS", "1"),
        ("SLURM_STEP_TASKS_PER_NODE", "1"),
        ("SLURM_STEP_NODELIST", "localhost"),
    ];
    let mut command = program(&["launch-processes", "2", "work"]);
    command.envs(place);
    assert_eq!(told(&processes::run(command)).0, 2);
}

#[test]
fn ranks_end_with_a_program_that_is_killed() {
    let mut parent = program(&["launch-processes", "2", "sleep"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(parent.stdout.take().unwrap()).lines();
    let pids: Vec<String> = lines
        .take(2)
        .map(|line| line.unwrap().strip_prefix("rank in ").unwrap().to_owned())
        .collect();
    parent.kill().unwrap();
    parent.wait().unwrap();
    let deadline = Instant::now() + Duration::from_secs(30);
    for pid in pids {
        while Path::new(&format!("/proc/{pid}")).exists() {
            assert!(Instant::now() < deadline, "rank {pid} outlives its parent");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
