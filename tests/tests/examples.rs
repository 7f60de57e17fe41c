//! The example programs learn, and every rank tells the same of it.

#![allow(clippy::unwrap_used, reason = "these are tests")]

use accelerator_tests::processes::{example, run_ranks};

/// Runs an example on one process and on two. Each rank says, in its last line,
/// `rank 0: loss 2.1 in the first tenth, 0.4 in the last`: the figure falls by 30 % at least, and is the
/// same on both ranks.
fn learns(name: &str, args: &[&str]) {
    for ranks in [1, 2] {
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
    }
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
