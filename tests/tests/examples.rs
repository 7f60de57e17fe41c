//! The example programs learn, and every rank tells the same of it.

#![allow(clippy::unwrap_used, reason = "these are tests")]

use accelerator_tests::processes::{Ended, example, run_ranks};

/// Runs an example on one process and on two. Each rank says, in its last line,
/// `rank 0: loss 2.1 in the first tenth, 0.4 in the last`: the figure falls by 30 % at least, and is the
/// same on both ranks. Gives what rank 0 printed, alone and as one of two.
fn learns(name: &str, args: &[&str]) -> [String; 2] {
    [1, 2].map(|ranks| {
        let ended = run_ranks(&example(name), args, ranks, |_, command| {
            // Ranks share the cores with other tests.
            command.env("RAYON_NUM_THREADS", "1");
        });
        let mut told = Vec::new();
        for (rank, ended) in ended.iter().enumerate() {
            assert!(ended.status.success(), "{}\n{}", ended.stdout, ended.stderr);
            let last = ended.stdout.lines().last().unwrap();
            let figures = last.strip_prefix(&format!("rank {rank}: ")).unwrap();
            told.push(figures.to_owned());
        }
        assert!(told.iter().all(|figures| *figures == told[0]), "{told:?}");
        let figures = told[0]
            .split([' ', ','])
            .filter_map(|word| word.parse::<f64>().ok());
        let [first, last] = figures.collect::<Vec<_>>().try_into().unwrap();
        assert!(last <= 0.7 * first, "{name} on {ranks} ranks: {}", told[0]);
        ended.into_iter().next().unwrap().stdout
    })
}

const SMALL: [&str; 6] = [
    "--limit",
    "320",
    "--batch-size",
    "8",
    "--global-batch",
    "16",
];

#[test]
fn accumulation() {
    learns("accumulation", &SMALL);
}

#[test]
fn accumulation_in_half_precision() {
    let args = [&SMALL[..], &["--precision", "bf16"]].concat();
    learns("accumulation", &args);
}

/// Rounds that do not fill an epoch, and one that is short in the end.
#[test]
fn local_sgd() {
    let args = ["--limit", "320", "--batch-size", "8", "--period", "3"];
    learns("local_sgd", &args);
    let args = [&args[..], &["--epochs", "6", "--diloco"]].concat();
    learns("local_sgd", &args);
}

#[test]
fn gan() {
    learns("gan", &[]);
}

/// The last step is short, on one rank and on two.
#[test]
fn streaming() {
    for sharing in ["dispatched", "sharded"] {
        let args = ["--limit", "326", "--batch-size", "8", "--sharing", sharing];
        learns("streaming", &args);
    }
}

#[test]
fn metrics() {
    for stdout in learns("metrics", &["--limit", "320", "--batch-size", "8"]) {
        assert!(stdout.contains("best three"), "{stdout}");
    }
}

/// The first rank's clock stops both.
#[test]
fn metrics_within_a_time_limit() {
    let args = ["--limit", "320", "--time-limit", "0"];
    let ended = run_ranks(&example("metrics"), &args, 2, |_, _| ());
    let last = |rank: usize| {
        let Ended { status, stdout, .. } = &ended[rank];
        assert!(status.success(), "{}", ended[rank].stderr);
        let last = stdout.lines().last().unwrap();
        last.strip_prefix(&format!("rank {rank}: ")).unwrap()
    };
    assert!(
        ended[0].stdout.contains("time is up"),
        "{}",
        ended[0].stdout
    );
    assert_eq!(last(0), last(1));
}

#[test]
fn cross_validation() {
    let args = ["--limit", "320", "--batch-size", "8", "--folds", "2"];
    for stdout in learns("cross_validation", &args) {
        // Each one was left out and asked about once.
        assert!(stdout.contains("all 320 of 320 samples"), "{stdout}");
    }
}

#[test]
fn big_batch() {
    let args = [
        "--limit",
        "480",
        "--batch-size",
        "12",
        "--holds",
        "8",
        "--global-batch",
        "32",
        "--lr",
        "0.002",
    ];
    let [one, two] = learns("big_batch", &args);
    assert!(
        one.contains("memory holds 8 samples: 4 × 8 in a step"),
        "{one}"
    );
    assert!(
        two.contains("memory holds 8 samples: 2 × 8 in a step"),
        "{two}"
    );
}

#[test]
fn nlp_transformer() {
    learns(
        "nlp_transformer",
        &["--epochs", "12", "--length", "32", "--width", "32"],
    );
}
