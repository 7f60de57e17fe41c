//! A program starts its own ranks as processes.

#![allow(clippy::unwrap_used, reason = "these are tests")]

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

fn program(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rank"));
    command.args(args).env("RAYON_NUM_THREADS", "1");
    command
}

fn run(args: &[&str]) -> Output {
    program(args).output().unwrap()
}

#[test]
fn ranks_are_processes_and_what_follows_runs_once() {
    let ended = run(&["launch-processes", "2", "work"]);
    let stdout = String::from_utf8(ended.stdout).unwrap();
    assert!(ended.status.success(), "{stdout}");
    let pids: Vec<&str> = stdout
        .lines()
        .filter_map(|line| line.strip_prefix("rank in "))
        .collect();
    assert_eq!(pids.len(), 2, "{stdout}");
    assert_ne!(pids[0], pids[1]);
    assert_eq!(
        stdout.lines().filter(|line| *line == "behind").count(),
        1,
        "{stdout}"
    );
}

/// The program that a rank starts inherits the rank's variables.
#[test]
fn a_program_that_a_rank_starts_has_ranks_of_its_own() {
    let ended = run(&["launch-processes", "2", "nest"]);
    let stdout = String::from_utf8(ended.stdout).unwrap();
    let stderr = String::from_utf8(ended.stderr).unwrap();
    assert!(ended.status.success(), "{stdout}{stderr}");
    let count = |start: &str| {
        stdout
            .lines()
            .filter(|line| line.starts_with(start))
            .count()
    };
    assert_eq!((count("rank in "), count("behind")), (4, 2), "{stdout}");
}

#[test]
fn a_rank_that_fails_is_named_and_ends_the_others() {
    let begun = Instant::now();
    let ended = run(&["launch-processes", "3", "fail"]);
    let stderr = String::from_utf8(ended.stderr).unwrap();
    assert!(!ended.status.success());
    assert!(stderr.contains("rank 1 of 3 failed"), "{stderr}");
    assert!(stderr.contains("no labels here"), "{stderr}");
    assert!(begun.elapsed() < Duration::from_secs(60), "{stderr}");
}

#[test]
fn ranks_that_were_preempted_have_not_finished() {
    let ended = run(&["launch-processes", "2", "preempt"]);
    let stderr = String::from_utf8(ended.stderr).unwrap();
    let stdout = String::from_utf8(ended.stdout).unwrap();
    assert!(!ended.status.success());
    assert!(stderr.contains("the ranks were preempted"), "{stderr}");
    assert!(!stdout.contains("behind"), "{stdout}");
}

#[test]
fn a_program_that_is_a_rank_already_starts_none() {
    let ended = program(&["launch-processes", "2", "work"])
        .envs([("RANK", "0"), ("WORLD_SIZE", "1")])
        .output()
        .unwrap();
    let stdout = String::from_utf8(ended.stdout).unwrap();
    assert!(ended.status.success(), "{stdout}");
    assert_eq!(
        stdout
            .lines()
            .filter(|line| line.starts_with("rank in "))
            .count(),
        1,
        "{stdout}"
    );
}

#[test]
fn a_token_for_jobs_on_several_hosts_is_in_no_way() {
    let folder = tempfile::tempdir().unwrap();
    let token = folder.path().join("token");
    accelerator_collective::launcher::Token::generate()
        .unwrap()
        .write_file(&token)
        .unwrap();
    let ended = program(&["launch-processes", "2", "work"])
        .env("ACCEL_TOKEN_FILE", token)
        .output();
    assert_eq!(ranks(&ended.unwrap()), 2);
}

/// Returns how many ranks a program reports to have run.
fn ranks(ended: &Output) -> usize {
    let stdout = String::from_utf8_lossy(&ended.stdout);
    assert!(ended.status.success(), "{ended:?}");
    let lines = stdout.lines().filter(|line| line.starts_with("rank in "));
    lines.count()
}

#[test]
fn processes_that_mpirun_has_started_are_the_ranks() {
    let port = accelerator_tests::ports::free_port().to_string();
    let processes = ["0", "1"].map(|rank| {
        let place = [
            ("OMPI_COMM_WORLD_RANK", rank),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", rank),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", &port),
        ];
        program(&["launch-processes", "3", "work"])
            .envs(place)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    });
    let ended = processes.map(|process| process.wait_with_output().unwrap());
    assert_eq!(ended.each_ref().map(ranks), [1, 1]);
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
    let ended = program(&["launch-processes", "2", "work"])
        .envs(place)
        .output();
    assert_eq!(ranks(&ended.unwrap()), 2);
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
