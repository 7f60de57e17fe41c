//! Runs and records for the tests of this crate.

use std::path::Path;

use crate::error::Error;
use crate::record::{EndStatus, Entry, Metrics, Number, PointValue, Record, RunId};
use crate::run::Run;
use crate::sink::RunInfo;

pub(crate) fn start(runs: &Path, name: &str) -> Run {
    Run::builder(name).runs_folder(runs).start().unwrap()
}

/// Returns a run that no process writes.
pub(crate) fn run_info(folder: &Path) -> RunInfo {
    RunInfo {
        id: RunId::new(),
        name: "mnist".to_owned(),
        folder: folder.to_owned(),
        created_ms: 1_700_000_000_000,
    }
}

pub(crate) fn entry(record: Record) -> Entry {
    Entry {
        n: 0,
        ms: 0,
        record,
    }
}

/// Returns values of the series 0, 1, …
pub(crate) fn metrics(
    step: u64,
    epoch: Option<f64>,
    values: impl IntoIterator<Item = f64>,
) -> Record {
    let points = (0..).zip(values).map(|(series, value)| PointValue {
        series,
        value: Number(value),
        count: None,
    });
    Record::Metrics(Metrics {
        step,
        epoch,
        points: points.collect(),
    })
}

pub(crate) fn end(status: EndStatus) -> Record {
    Record::End {
        status,
        failure: None,
    }
}

/// Asserts that the message of an error contains a text.
#[track_caller]
pub(crate) fn assert_says(error: &Error, text: &str) {
    assert!(error.to_string().contains(text), "{text:?} in: {error}");
}
