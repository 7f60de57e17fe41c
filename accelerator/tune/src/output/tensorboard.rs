use std::collections::BTreeMap;
use std::path::Path;

use accelerator_track::{
    EndStatus, Entry, Metrics, Number, Origin, PointValue, Record, RunId, RunInfo, Sink,
    TensorBoard,
};

use crate::config::Config;
use crate::error::{Error, Kind, Result};
use crate::view::TrialResult;

/// The events of a trial for TensorBoard: its metrics as scalars, and its configuration and end under HParams.
#[derive(Debug)]
pub(crate) struct TrialEvents {
    sink: TensorBoard,
    /// The number of entries that were written.
    written: u64,
    series: BTreeMap<String, u32>,
    config: Config,
}

impl TrialEvents {
    /// Writes below a folder, in place of what was written of a trial of that name.
    pub(crate) fn begin(logs: &Path, trial: &str, config: &Config, created: u64) -> Result<Self> {
        let folder = logs.join(trial);
        // The same each time, by which what was written before is known.
        let id = &blake3::hash(trial.as_bytes()).to_hex()[..32];
        let run = RunInfo {
            id: id.parse::<RunId>().map_err(of_track)?,
            name: trial.to_owned(),
            folder: folder.clone(),
            created_ms: created * 1000,
        };
        let mut events = Self {
            sink: TensorBoard::new(folder),
            written: 0,
            series: BTreeMap::new(),
            config: config.clone(),
        };
        events.sink.open(&run).map_err(of_track)?;
        events.write_config(created)?;
        Ok(events)
    }

    /// Writes a result, with the configuration that it is of.
    pub(crate) fn report(&mut self, result: &TrialResult, config: &Config) -> Result<()> {
        if *config != self.config {
            self.config = config.clone();
            self.write_config(result.timestamp)?;
        }
        let mut points = Vec::new();
        for (name, value) in result.metrics.iter() {
            let next = u32::try_from(self.series.len()).unwrap_or(u32::MAX);
            let series = *self.series.entry(name.to_owned()).or_insert(next);
            if series == next {
                let key = name.to_owned();
                self.write(result.timestamp, Record::Series { i: series, key })?;
            }
            points.push(PointValue {
                series,
                value: Number(value),
                count: None,
            });
        }
        let metrics = Metrics {
            step: result.training_iteration,
            epoch: None,
            points,
        };
        self.write(result.timestamp, Record::Metrics(metrics))
    }

    pub(crate) fn end(&mut self, status: EndStatus, at: u64) -> Result<()> {
        let end = Record::End {
            status,
            failure: None,
        };
        self.write(at, end)?;
        self.flush()
    }

    /// Lets readers see what was written.
    pub(crate) fn flush(&mut self) -> Result<()> {
        self.sink.flush().map_err(of_track)
    }

    fn write_config(&mut self, at: u64) -> Result<()> {
        let leaves = self.config.leaves().into_iter();
        let set = leaves.map(|(path, value)| (path, value.clone())).collect();
        self.write(at, Record::Param { set })
    }

    fn write(&mut self, at: u64, record: Record) -> Result<()> {
        let entry = Entry {
            n: self.written,
            ms: at * 1000,
            record,
        };
        self.written += 1;
        self.sink.write(Origin::Run, &entry).map_err(of_track)
    }
}

fn of_track(error: accelerator_track::Error) -> Error {
    Error::new(Kind::Io, error.to_string()).with_source(error)
}
