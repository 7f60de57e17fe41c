//! Records that tests deliver.

use accelerator_track::{EndStatus, Metrics, Number, PointValue, Record};

pub(crate) fn series(i: u32, key: &str) -> Record {
    let key = key.to_owned();
    Record::Series { i, key }
}

pub(crate) fn metrics(
    step: u64,
    epoch: Option<f64>,
    values: impl IntoIterator<Item = (u32, f64)>,
) -> Record {
    let point = |(series, value)| PointValue {
        series,
        value: Number(value),
        count: None,
    };
    let points = values.into_iter().map(point).collect();
    Record::Metrics(Metrics {
        step,
        epoch,
        points,
    })
}

pub(crate) fn end(status: EndStatus) -> Record {
    Record::End {
        status,
        failure: None,
    }
}
