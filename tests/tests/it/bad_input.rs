//! Mistakes of users get an immediate error that names them.

use std::path::Path;
use std::process::Command;

use accelerator_tests::processes::{Ended, run_ranks};

fn ranks(world_size: usize, args: &[&str], change: impl Fn(usize, &mut Command)) -> Vec<Ended> {
    run_ranks(
        Path::new(env!("CARGO_BIN_EXE_rank")),
        args,
        world_size,
        change,
    )
}

/// Runs one process, with these variables in place of those that it would get.
fn alone(variables: &[(&str, &str)]) -> Ended {
    ranks(1, &["connect", "2"], |_, command| {
        for (name, value) in variables {
            command.env(name, value);
        }
    })
    .remove(0)
}

fn fails_with(ended: &Ended, words: &[&str]) {
    assert!(
        !ended.status.success(),
        "it should have failed: {}",
        ended.stdout
    );
    for word in words {
        assert!(
            ended.stderr.contains(word),
            "`{word}` is missing in: {}",
            ended.stderr
        );
    }
    assert!(!ended.stderr.contains("panicked"), "{}", ended.stderr);
}

#[test]
fn variables_that_cannot_be() {
    let size = |size| [("WORLD_SIZE", size), ("LOCAL_WORLD_SIZE", size)];
    let [none, some, many] = ["18446744073709551615", "99999999999", "1000000"].map(size);
    for (variables, words) in [
        (&[("RANK", "banana")][..], &["RANK", "banana"][..]),
        (
            &[("RANK", "2"), ("WORLD_SIZE", "2")],
            &["RANK", "WORLD_SIZE", "2"],
        ),
        (
            &[("ACCEL_DEVICE", "cuda")],
            &["cuda", "not compiled in", "flex"],
        ),
        (
            &[("ACCEL_DEVICE", "banana")],
            &["ACCEL_DEVICE", "banana", "flex"],
        ),
        (
            &[("ACCEL_TRASNPORT", "tcp")],
            &["ACCEL_TRASNPORT", "ACCEL_TRANSPORT"],
        ),
        // A rank that never comes is named after the deadline.
        (&size("2"), &["1 of 2", "rank 1"]),
        (&none, &["18446744073709551615", "at most"]),
        (&some, &["99999999999", "at most"]),
        (&many, &["1000000", "at most"]),
    ] {
        fails_with(&alone(variables), words);
    }
}

#[test]
fn a_wrong_job_token_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = |rank: usize| folder.path().join(format!("token-{rank}"));
    for rank in 0..2 {
        let token = format!("{:064x}", 77 + rank);
        std::fs::write(file(rank), token).unwrap();
        let private = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(file(rank), private).unwrap();
    }
    let ended = ranks(2, &["connect", "5"], |rank, command| {
        command.env("ACCEL_TOKEN_FILE", file(rank));
    });
    fails_with(&ended[1], &["token"]);
    fails_with(&ended[0], &["rank 1"]);
}

#[test]
fn a_port_that_is_taken_is_named() {
    let holder = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = holder.local_addr().unwrap().port().to_string();
    let ended = ranks(2, &["connect", "5"], |_, command| {
        command.env("MASTER_PORT", &port);
    });
    fails_with(&ended[0], &[&port, "in use"]);
    assert!(!ended[1].status.success());
}

#[test]
fn collectives_that_ranks_call_differently() {
    let ended = ranks(2, &["different-calls"], |_, _| {});
    for rank in &ended {
        fails_with(
            rank,
            &["rank 0", "barrier", "rank 1", "all_reduce", "rank.rs"],
        );
    }
}

#[test]
fn settings_that_differ_between_ranks() {
    let setting = r#"{"net":"Mlp","optimizer":"Sgd","samples":8,"global_batch":4,"epochs":1,"seed":0,"dropout":0.0}"#;
    let ended = ranks(2, &["train-accumulating-by-rank", setting], |_, _| {});
    for rank in &ended {
        fails_with(
            rank,
            &[
                "the number of accumulation steps (set by ACCEL_ACCUMULATION_STEPS, `accumulation_steps` or \
                 `global_batch`) differs between ranks: \
                 rank 0 has 1, and rank 1 has 2; every rank must have the same values",
            ],
        );
    }
}
