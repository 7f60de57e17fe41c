//! Compares plans with the tables that Accelerate's own sharding classes produced.
//!
//! They are in `tests/fixtures` of the workspace, or in the folder in `ACCEL_FIXTURES`, which may be relative to the
//! root of the workspace.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use accelerator_plan::{BatchSize, PlanConfig, PlannedBatch, TailPolicy};
use serde::Deserialize;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Fixtures {
    source: String,
    cases: Vec<Case>,
}

#[derive(Debug, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
enum Case {
    Map {
        #[serde(flatten)]
        settings: Settings,
        even_batches: bool,
        ranks: Vec<Vec<Vec<u64>>>,
    },
    Iterable {
        #[serde(flatten)]
        settings: Settings,
        ranks: Vec<Vec<u64>>,
    },
}

#[derive(Debug, Deserialize)]
struct Settings {
    samples: u64,
    batch_size: usize,
    world_size: usize,
    drop_last: bool,
    split_batches: bool,
}

impl Settings {
    /// Returns every rank's batches in the plan.
    fn ranks(&self, tail: TailPolicy) -> Vec<Vec<PlannedBatch>> {
        let batch_size = match self.split_batches {
            true => BatchSize::global(self.batch_size),
            false => BatchSize::per_rank(self.batch_size),
        };
        let plan = PlanConfig::new(self.samples, batch_size.unwrap())
            .with_world_size(self.world_size)
            .with_tail(if self.drop_last {
                TailPolicy::Drop
            } else {
                tail
            })
            .init()
            .unwrap();
        let epoch = plan.epoch(0);
        (0..self.world_size)
            .map(|rank| epoch.rank(rank).collect())
            .collect()
    }
}

#[test]
fn sharding_vectors() {
    let (path, is_own) = fixture("sharding.json");
    let text =
        fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let fixtures: Fixtures =
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    assert!(!fixtures.cases.is_empty(), "{}: no cases", path.display());
    // A truncated fixture must not pass for the whole one.
    assert!(
        !is_own || fixtures.cases.len() >= 826,
        "{}: only {} cases",
        path.display(),
        fixtures.cases.len()
    );

    let (mut map, mut iterable) = (0, 0);
    for case in &fixtures.cases {
        match case {
            Case::Map {
                settings,
                even_batches,
                ranks,
            } => {
                let tail = if *even_batches {
                    TailPolicy::Pad
                } else {
                    TailPolicy::Uneven
                };
                let planned = settings.ranks(tail);
                assert_eq!(
                    planned
                        .iter()
                        .map(|batches| indices(batches))
                        .collect::<Vec<_>>(),
                    *ranks,
                    "{case:?}"
                );
                assert_each_real_once(&planned, settings);
                map += 1;
            }
            Case::Iterable { settings, ranks } => {
                let planned = settings.ranks(TailPolicy::Pad);
                assert_eq!(
                    planned
                        .iter()
                        .map(|batches| indices(batches).concat())
                        .collect::<Vec<_>>(),
                    *ranks,
                    "{case:?}"
                );
                assert_each_real_once(&planned, settings);
                iterable += 1;
            }
        }
    }
    // The test harness swallows what a passing test prints, so this goes past it.
    let _ = writeln!(
        io::stderr(),
        "checked {} sharding cases ({map} map, {iterable} iterable) of {}, from {}",
        map + iterable,
        path.display(),
        fixtures.source
    );
}

fn indices(batches: &[PlannedBatch]) -> Vec<Vec<u64>> {
    batches.iter().map(|batch| batch.indices.clone()).collect()
}

/// Asserts that padding and samples are told apart, which the tables do not show.
fn assert_each_real_once(planned: &[Vec<PlannedBatch>], settings: &Settings) {
    let mut real: Vec<u64> = planned
        .iter()
        .flatten()
        .flat_map(PlannedBatch::real_indices)
        .copied()
        .collect();
    let mut seen: Vec<u64> = planned
        .iter()
        .flatten()
        .flat_map(|batch| &batch.indices)
        .copied()
        .collect();
    real.sort_unstable();
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(real, seen, "{settings:?}");
}

/// Returns the path of a fixture, and whether it is the workspace's own.
fn fixture(name: &str) -> (PathBuf, bool) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    match std::env::var_os("ACCEL_FIXTURES") {
        Some(folder) => (root.join(folder).join(name), false),
        None => (root.join("tests/fixtures").join(name), true),
    }
}
