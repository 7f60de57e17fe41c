//! The files of a trial: its folder, and its events for TensorBoard.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};

use accelerator_host::fs::Durability;
use accelerator_host::text::csv_cell;
use accelerator_track::{
    EndStatus, Entry, Number, Origin, PointValue, Record, RunId, RunInfo, Sink, TensorBoard,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::appended::{AppendedFile, json_lines, replace};
use crate::config::{Config, TrialId};
use crate::error::{Error, Kind, Result};
use crate::value::{Metrics, json_number};
use crate::view::TrialResult;

/// The name of a trial's folder, with the values of its parameters.
pub(crate) fn folder_name(
    name: &str,
    trial: TrialId,
    parameters: &[String],
    config: &Config,
) -> String {
    let shown = parameters.iter().filter_map(|path| {
        let value = match config.value(path)? {
            Value::Number(number) if number.is_f64() => {
                format!("{:.4}", number.as_f64().unwrap_or(f64::NAN))
            }
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        Some(format!("{path}={value}"))
    });
    let shown: Vec<_> = shown.collect();
    let whole = format!("{name}_{}_{}", trial.number() + 1, shown.join(","));
    // File systems count bytes.
    let kept = &whole[..whole.floor_char_boundary(LONGEST_NAME)];
    let is_forbidden =
        |character: char| character.is_control() || "/\\()<>:\"|?*".contains(character);
    kept.replace(is_forbidden, "_")
}

/// The files of a trial, while it is written: `params.json`, `result.jsonl`, `progress.csv` and `error.txt`.
#[derive(Debug)]
pub(crate) struct TrialFolder {
    path: PathBuf,
    name: String,
    results: AppendedFile,
    progress: AppendedFile,
    columns: Columns,
}

impl TrialFolder {
    /// Opens the folder of a trial that has these results so far, each with the configuration that it is of. Its files hold
    /// them afterwards, whatever they held before.
    pub(crate) fn open(
        path: &Path,
        name: &str,
        config: &Config,
        before: &[(TrialResult, Config)],
    ) -> Result<Self> {
        let made = fs::create_dir_all(path);
        made.map_err(|error| Error::io("make", path, error))?;
        let params = format!("{config}\n");
        replace(
            &path.join("params.json"),
            params.as_bytes(),
            Durability::Cached,
        )?;
        let rows = before
            .iter()
            .map(|(result, config)| row(name, result, config));
        let rows = json_lines("the results of a trial", rows)?;
        let columns = Columns::of(before);
        Ok(Self {
            results: AppendedFile::replace(path.join(RESULTS), &rows, Durability::Cached)?,
            progress: columns.write(path, before)?,
            path: path.to_owned(),
            name: name.to_owned(),
            columns,
        })
    }

    pub(crate) fn append(&mut self, result: &TrialResult, config: &Config) -> Result<()> {
        let line = json_lines("the result of a trial", [row(&self.name, result, config)])?;
        self.results.append(&line)?;
        if self.columns.have_all(result, config) {
            let line = self.columns.row(result, config);
            return self.progress.append(line.as_bytes());
        }
        // Every line is written again, with a column for each metric and parameter.
        let rows = read_rows(&self.path)?;
        self.columns = Columns::of(&rows);
        self.progress = self.columns.write(&self.path, &rows)?;
        Ok(())
    }

    pub(crate) fn fail(&self, error: &str) -> Result<()> {
        let text = format!("{error}\n");
        replace(&self.path.join(ERROR), text.as_bytes(), Durability::Cached)
    }
}

/// The events of a trial for TensorBoard: its metrics as scalars, and its configuration and end under HParams.
#[derive(Debug)]
pub(crate) struct TrialEvents {
    sink: TensorBoard,
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
        let metrics = accelerator_track::Metrics {
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

pub(super) fn csv_line(fields: impl IntoIterator<Item = Value>) -> String {
    let fields = fields.into_iter().map(|field| match field {
        Value::Null => String::new(),
        Value::String(text) => csv_cell(&text),
        Value::Array(_) | Value::Object(_) => csv_cell(&field.to_string()),
        other => other.to_string(),
    });
    let mut line = fields.collect::<Vec<_>>().join(",");
    line.push('\n');
    line
}

/// The results that a trial's folder holds; none where it has none.
pub(crate) fn read_results(folder: &Path) -> Result<Vec<TrialResult>> {
    let rows = read_rows(folder)?.into_iter();
    Ok(rows.map(|(result, _)| result).collect())
}

pub(crate) const ERROR: &str = "error.txt";
const RESULTS: &str = "result.jsonl";
const PROGRESS: &str = "progress.csv";
/// Ray's bound.
const LONGEST_NAME: usize = 130;

/// The columns of `progress.csv` behind those that the search fills.
#[derive(Debug)]
struct Columns {
    /// There are no lines, not even that of the columns, before the first result.
    are_written: bool,
    metrics: BTreeSet<String>,
    /// Paths of configurations.
    parameters: BTreeSet<String>,
}

impl Columns {
    fn of(rows: &[(TrialResult, Config)]) -> Self {
        let metrics = rows.iter().flat_map(|(result, _)| result.metrics.iter());
        let parameters = rows.iter().flat_map(|(_, config)| config.leaves());
        Self {
            are_written: !rows.is_empty(),
            metrics: metrics.map(|(name, _)| name.to_owned()).collect(),
            parameters: parameters.map(|(path, _)| path).collect(),
        }
    }

    fn have_all(&self, result: &TrialResult, config: &Config) -> bool {
        let mut metrics = result.metrics.iter();
        let mut parameters = config.leaves().into_iter();
        self.are_written
            && metrics.all(|(name, _)| self.metrics.contains(name))
            && parameters.all(|(path, _)| self.parameters.contains(&path))
    }

    fn write(&self, folder: &Path, rows: &[(TrialResult, Config)]) -> Result<AppendedFile> {
        let mut text = String::new();
        if self.are_written {
            let filled = TrialResult::FILLED.map(str::to_owned).into_iter();
            let parameters = self.parameters.iter().map(|path| format!("config/{path}"));
            let names = filled.chain(self.metrics.iter().cloned()).chain(parameters);
            text = csv_line(names.map(Value::from));
        }
        let rows = rows.iter().map(|(result, config)| self.row(result, config));
        text.extend(rows);
        AppendedFile::replace(folder.join(PROGRESS), text.as_bytes(), Durability::Cached)
    }

    fn row(&self, result: &TrialResult, config: &Config) -> String {
        let metrics = self.metrics.iter().map(|name| {
            let value = result.metrics.value(name);
            value.map_or(Value::Null, json_number)
        });
        let parameters = self.parameters.iter();
        let parameters = parameters.map(|path| config.value(path).cloned().unwrap_or(Value::Null));
        csv_line(result.filled().into_iter().chain(metrics).chain(parameters))
    }
}

/// A line of `result.jsonl`.
#[derive(Deserialize, Serialize)]
struct Row {
    #[serde(flatten)]
    metrics: Metrics,
    training_iteration: u64,
    #[serde(default)]
    time_this_iter_s: f64,
    #[serde(default)]
    time_total_s: f64,
    #[serde(default)]
    timestamp: u64,
    trial_id: String,
    config: Config,
}

/// Returns a line, whose fields are sorted by name.
fn row(name: &str, result: &TrialResult, config: &Config) -> Value {
    let result = result.clone();
    let row = Row {
        metrics: result.metrics,
        training_iteration: result.training_iteration,
        time_this_iter_s: result.time_this_iter_s,
        time_total_s: result.time_total_s,
        timestamp: result.timestamp,
        trial_id: name.to_owned(),
        config: config.clone(),
    };
    serde_json::to_value(row).unwrap_or_default()
}

/// The same, each with the configuration that it is of.
pub(crate) fn read_rows(folder: &Path) -> Result<Vec<(TrialResult, Config)>> {
    let path = folder.join(RESULTS);
    let file = match File::open(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(Error::io("read", &path, error)),
    };
    let mut rows = Vec::new();
    for line in BufReader::new(file).lines() {
        let line = line.map_err(|error| Error::io("read", &path, error))?;
        // The last line may be incomplete while the search writes it.
        let Ok(row) = serde_json::from_str::<Row>(&line) else {
            break;
        };
        let result = TrialResult {
            training_iteration: row.training_iteration,
            time_this_iter_s: row.time_this_iter_s,
            time_total_s: row.time_total_s,
            timestamp: row.timestamp,
            metrics: row.metrics,
        };
        rows.push((result, row.config));
    }
    Ok(rows)
}

fn of_track(error: accelerator_track::Error) -> Error {
    Error::of(Kind::Io, error)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::output::tests::result;

    #[test]
    fn files_hold_the_results_that_they_are_opened_with() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trial");
        let config: Config = serde_json::from_str(r#"{"lr": 0.5, "name": "a,b"}"#).unwrap();
        let first = result(1, &[("loss", f64::NAN)]);
        let second = result(2, &[("loss", 0.25), ("acc", 1.0)]);
        let mut open = TrialFolder::open(&path, "t_00000", &config, &[]).unwrap();
        open.append(&first, &config).unwrap();
        open.append(&second, &config).unwrap();
        assert_eq!(
            read_results(&path).unwrap(),
            [first.clone(), second.clone()]
        );
        let progress = fs::read_to_string(path.join(PROGRESS)).unwrap();
        let expected = "training_iteration,time_this_iter_s,time_total_s,timestamp,acc,loss,config/lr,config/name\n\
                        1,0.5,0.5,9,,NaN,0.5,\"a,b\"\n2,0.5,1.0,9,1.0,0.25,0.5,\"a,b\"\n";
        assert_eq!(progress, expected);
        // Cut within a line, as by a kill.
        let file = File::options()
            .write(true)
            .open(path.join(RESULTS))
            .unwrap();
        file.set_len(file.metadata().unwrap().len() - 7).unwrap();
        assert_eq!(read_results(&path).unwrap(), std::slice::from_ref(&first));
        let before = [
            (first.clone(), config.clone()),
            (second.clone(), config.clone()),
        ];
        TrialFolder::open(&path, "t_00000", &config, &before).unwrap();
        assert_eq!(read_results(&path).unwrap(), [first, second]);
        assert_eq!(fs::read_to_string(path.join(PROGRESS)).unwrap(), expected);
    }

    #[test]
    fn fields_are_quoted_where_they_need_it() {
        let fields = json!([0.5, "a,b", "say \"x\"", [1, 2], null]);
        let line = csv_line(fields.as_array().unwrap().iter().cloned());
        assert_eq!(line, "0.5,\"a,b\",\"say \"\"x\"\"\",\"[1,2]\",\n");
    }

    #[test]
    fn each_result_keeps_the_configuration_that_it_is_of() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trial");
        let config = |text| serde_json::from_str::<Config>(text).unwrap();
        let (before, after) = (
            config(r#"{"lr": 0.5}"#),
            config(r#"{"lr": 0.25, "wide": true}"#),
        );
        let results = [1, 2].map(|iteration| result(iteration, &[]));
        let mut open = TrialFolder::open(&path, "t_00000", &before, &[]).unwrap();
        open.append(&results[0], &before).unwrap();
        open.append(&results[1], &after).unwrap();
        let expected = "training_iteration,time_this_iter_s,time_total_s,timestamp,config/lr,config/wide\n\
                        1,0.5,0.5,9,0.5,\n2,0.5,1.0,9,0.25,true\n";
        assert_eq!(fs::read_to_string(path.join(PROGRESS)).unwrap(), expected);
        let lines = fs::read(path.join(RESULTS)).unwrap();
        let [first, second] = results;
        let rows = [(first, before), (second, after.clone())];
        assert_eq!(read_rows(&path).unwrap(), rows);
        TrialFolder::open(&path, "t_00000", &after, &rows).unwrap();
        assert_eq!(fs::read(path.join(RESULTS)).unwrap(), lines);
        assert_eq!(fs::read_to_string(path.join(PROGRESS)).unwrap(), expected);
    }

    #[test]
    fn a_folder_is_named_by_what_was_drawn() {
        let config: Config =
            serde_json::from_str(r#"{"opt": {"lr": 0.000323}, "kind": "a/b", "n": 3}"#).unwrap();
        let parameters = ["kind".to_owned(), "n".to_owned(), "opt/lr".to_owned()];
        let name = folder_name("m_358bb_00006", TrialId::new(6), &parameters, &config);
        assert_eq!(name, "m_358bb_00006_7_kind=a_b,n=3,opt_lr=0.0003");
    }
}
