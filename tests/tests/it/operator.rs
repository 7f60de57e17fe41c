//! A training operator whose trainer starts its workers as processes.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use accelerator_tests::operator::Outcome;
use accelerator_tests::processes::{run, run_ranks, wait_until};

fn program(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rank"));
    command.args(args).env("RAYON_NUM_THREADS", "1");
    command
}

fn ranks(args: &[&str], world_size: usize) -> Vec<String> {
    let ended = run_ranks(
        env!("CARGO_BIN_EXE_rank").as_ref(),
        args,
        world_size,
        |_, _| (),
    );
    ended
        .iter()
        .map(|ended| ended.succeeded().to_owned())
        .collect()
}

fn outcome(stdout: &str) -> Outcome {
    serde_json::from_str(stdout.lines().last().unwrap()).unwrap()
}

#[test]
fn workers_train_as_ranks_of_a_launcher_and_as_a_loop_by_hand() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_string_lossy().into_owned();
    for world_size in [1, 2] {
        let number = world_size.to_string();
        let args = ["operator", &number, &path(&format!("own-{number}"))];
        let ended = run(program(&args));
        let lines = ended.succeeded().lines();
        let started = lines.filter(|line| line.starts_with("set up "));
        assert_eq!(started.count(), 2 * world_size, "two trainers");
        let own = outcome(&ended.stdout);

        // As ranks of a launcher, the trainer ignores the number of workers.
        let args = ["operator", "7", &path(&format!("placed-{number}"))];
        for placed in ranks(&args, world_size) {
            assert_eq!(outcome(&placed), own);
        }
        for by_hand in ranks(&["operator-by-hand"], world_size) {
            let weights: Vec<u32> = serde_json::from_str(by_hand.trim()).unwrap();
            assert_eq!(weights, own.weights);
        }

        let samples = |at: usize| own.train[at].value("num_samples").unwrap();
        assert_eq!(samples(0) + samples(1) + samples(2), 22.0);
        assert_eq!(samples(3), 22.0);
        assert_eq!(own.train[3].value("epoch"), Some(2.0));
        // Each sample of the validation counts once, even if workers have unequal numbers of them.
        assert_eq!(own.val.value("num_samples"), Some(7.0));
    }
}

#[test]
fn a_worker_that_fails_is_named_with_its_error() {
    for (mishap, expected) in [
        ("Error", "rank 1 failed to train: no labels here"),
        ("Panic", "rank 1 of 2 failed: exit status: 101"),
    ] {
        let begun = Instant::now();
        let ended = run(program(&["operator-fails", mishap]));
        let last = ended.succeeded().lines().last().unwrap();
        assert_eq!(last, format!("failed: {expected}"));
        assert!(begun.elapsed() < Duration::from_secs(60));
    }
}

/// Starts a trainer with two workers that train for long; returns their process ids by rank.
fn slow() -> (Child, BufReader<ChildStdout>, [String; 2]) {
    let mut parent = program(&["operator-fails", "Slow"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdout = BufReader::new(parent.stdout.take().unwrap());
    let mut pids = [String::new(), String::new()];
    while pids.iter().any(String::is_empty) {
        let mut line = String::new();
        assert_ne!(stdout.read_line(&mut line).unwrap(), 0, "it has ended");
        if let ["training", rank, "in", pid] = line.split_whitespace().collect::<Vec<_>>()[..] {
            pids[rank.parse::<usize>().unwrap()] = pid.to_owned();
        }
    }
    (parent, stdout, pids)
}

fn wait_for_end(pids: &[String]) {
    for pid in pids {
        let process = format!("/proc/{pid}");
        wait_until("a worker to end", || {
            (!Path::new(&process).exists()).then_some(())
        });
    }
}

#[test]
fn a_worker_that_is_killed_is_named() {
    let (mut parent, stdout, pids) = slow();
    let killed = Instant::now();
    let status = Command::new("kill").args(["-9", &pids[1]]).status();
    assert!(status.unwrap().success());
    let last = stdout.lines().last().unwrap().unwrap();
    assert!(parent.wait().unwrap().success());
    assert_eq!(last, "failed: rank 1 of 2 failed: signal: 9 (SIGKILL)");
    assert!(killed.elapsed() < Duration::from_secs(30));
    wait_for_end(&pids);
}

#[test]
fn workers_end_with_a_trainer_that_is_killed() {
    let (mut parent, _, pids) = slow();
    parent.kill().unwrap();
    parent.wait().unwrap();
    wait_for_end(&pids);
}
