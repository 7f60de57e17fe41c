//! The files of a trial: its folder, and its events for TensorBoard.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

use accelerator_host::fs::{Durability, Replace};
use accelerator_host::text::csv_cell;
use accelerator_track::{
    EndStatus, Entry, Number, Origin, PointValue, Record, RunId, RunInfo, Sink, TensorBoard,
};
use serde_json::{Map, Value, json};

use crate::config::{Config, TrialId};
use crate::error::{Error, Kind, Result};
use crate::value::{Metrics, json_number};
use crate::view::TrialResult;

/// Returns a name such as `MnistTrainable_358bb_00006`.
pub(crate) fn trial_name(search: &str, id: &str, trial: TrialId) -> String {
    format!("{search}_{id}_{trial}")
}

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
    results: File,
    progress: File,
    /// It has none before the first result.
    header: Option<ProgressHeader>,
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
        write(&path.join("params.json"), format!("{config}\n").as_bytes())?;
        let rows = before
            .iter()
            .map(|(result, config)| row(name, result, config));
        let rows: Vec<_> = rows.collect();
        let mut folder = Self {
            results: rewrite(&path.join(RESULTS), &lines(&rows)?)?,
            progress: rewrite(&path.join(PROGRESS), b"")?,
            path: path.to_owned(),
            name: name.to_owned(),
            header: None,
        };
        if !before.is_empty() {
            folder.rewrite_progress(before)?;
        }
        Ok(folder)
    }

    pub(crate) fn append(&mut self, result: &TrialResult, config: &Config) -> Result<()> {
        let path = self.path.join(RESULTS);
        let line = lines(&[row(&self.name, result, config)])?;
        let written = self.results.write_all(&line);
        written.map_err(|error| Error::io("write", &path, error))?;
        match &self.header {
            Some(header) if header.has_all(result, config) => {
                let written = self
                    .progress
                    .write_all(header.row(result, config).as_bytes());
                written.map_err(|error| Error::io("write", &self.path.join(PROGRESS), error))
            }
            _ => self.rewrite_progress(&read_rows(&self.path)?),
        }
    }

    /// Writes why the newest attempt has failed.
    pub(crate) fn fail(&self, error: &str) -> Result<()> {
        write(&self.path.join(ERROR), format!("{error}\n").as_bytes())
    }

    /// Writes all lines again, with a column for each metric and parameter.
    fn rewrite_progress(&mut self, rows: &[(TrialResult, Config)]) -> Result<()> {
        let header = ProgressHeader::of(rows);
        let mut text = header.line();
        for (result, config) in rows {
            text.push_str(&header.row(result, config));
        }
        self.progress = rewrite(&self.path.join(PROGRESS), text.as_bytes())?;
        self.header = Some(header);
        Ok(())
    }
}

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

/// Returns a line of comma-separated values.
pub(super) fn csv_line<'a>(fields: impl IntoIterator<Item = &'a Value>) -> String {
    let fields = fields.into_iter().map(|field| match field {
        Value::Null => String::new(),
        Value::String(text) => csv_cell(text),
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

/// The file for a trial's failure.
pub(crate) const ERROR: &str = "error.txt";
const RESULTS: &str = "result.jsonl";
const PROGRESS: &str = "progress.csv";
/// Ray's bound.
const LONGEST_NAME: usize = 130;
/// Ray's auto-filled metrics.
const AUTO_FILLED: [&str; 4] = [
    "training_iteration",
    "time_this_iter_s",
    "time_total_s",
    "timestamp",
];

/// The columns of `progress.csv`, after those that are auto-filled.
#[derive(Debug)]
struct ProgressHeader {
    metrics: BTreeSet<String>,
    /// Paths of configurations.
    parameters: BTreeSet<String>,
}

impl ProgressHeader {
    fn of(rows: &[(TrialResult, Config)]) -> Self {
        let metrics = rows.iter().flat_map(|(result, _)| result.metrics.iter());
        let parameters = rows.iter().flat_map(|(_, config)| config.leaves());
        Self {
            metrics: metrics.map(|(name, _)| name.to_owned()).collect(),
            parameters: parameters.map(|(path, _)| path).collect(),
        }
    }

    fn has_all(&self, result: &TrialResult, config: &Config) -> bool {
        let mut metrics = result.metrics.iter();
        let mut parameters = config.leaves().into_iter();
        metrics.all(|(name, _)| self.metrics.contains(name))
            && parameters.all(|(path, _)| self.parameters.contains(&path))
    }

    fn line(&self) -> String {
        let auto_filled = AUTO_FILLED.iter().map(|name| Value::from(*name));
        let metrics = self.metrics.iter().map(|name| name.as_str().into());
        let parameters = self.parameters.iter();
        let parameters = parameters.map(|path| format!("config/{path}").into());
        csv_line(
            &auto_filled
                .chain(metrics)
                .chain(parameters)
                .collect::<Vec<_>>(),
        )
    }

    fn row(&self, result: &TrialResult, config: &Config) -> String {
        let auto_filled = AUTO_FILLED.iter().map(|name| auto_filled(result, name));
        let metrics = self.metrics.iter().map(|name| {
            let value = result.metrics.value(name);
            value.map_or(Value::Null, json_number)
        });
        let parameters = self.parameters.iter();
        let parameters = parameters.map(|path| config.value(path).cloned().unwrap_or(Value::Null));
        csv_line(
            &auto_filled
                .chain(metrics)
                .chain(parameters)
                .collect::<Vec<_>>(),
        )
    }
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
        let Ok(Value::Object(mut row)) = serde_json::from_str(&line) else {
            break;
        };
        let whole = |value: Option<Value>| value.and_then(|value| value.as_u64()).unwrap_or(0);
        let number = |value: Option<Value>| value.and_then(|value| value.as_f64()).unwrap_or(0.0);
        let mut result = TrialResult {
            training_iteration: whole(row.remove("training_iteration")),
            time_this_iter_s: number(row.remove("time_this_iter_s")),
            time_total_s: number(row.remove("time_total_s")),
            timestamp: whole(row.remove("timestamp")),
            metrics: Metrics::default(),
        };
        row.remove("trial_id");
        let config = match row.remove("config") {
            Some(Value::Object(config)) => Config::from(config),
            _ => Config::default(),
        };
        if let Ok(metrics) = serde_json::from_value(Value::Object(row)) {
            result.metrics = metrics;
        }
        rows.push((result, config));
    }
    Ok(rows)
}

fn auto_filled(result: &TrialResult, name: &str) -> Value {
    match name {
        "training_iteration" => result.training_iteration.into(),
        "time_this_iter_s" => result.time_this_iter_s.into(),
        "time_total_s" => result.time_total_s.into(),
        _ => result.timestamp.into(),
    }
}

/// A line of `result.jsonl`: what the trial reported, what is auto-filled, and the configuration.
fn row(name: &str, result: &TrialResult, config: &Config) -> Value {
    let mut row = match serde_json::to_value(&result.metrics) {
        Ok(Value::Object(metrics)) => metrics,
        _ => Map::new(),
    };
    for field in AUTO_FILLED {
        row.insert(field.to_owned(), auto_filled(result, field));
    }
    row.insert("trial_id".to_owned(), name.into());
    row.insert("config".to_owned(), json!(config));
    Value::Object(row)
}

fn lines(rows: &[Value]) -> Result<Vec<u8>> {
    let mut text = Vec::new();
    for row in rows {
        serde_json::to_writer(&mut text, row)
            .map_err(|error| Error::misuse(error.to_string()).with_source(error))?;
        text.push(b'\n');
    }
    Ok(text)
}

/// Writes a file whole, and opens it to append to it.
fn rewrite(path: &Path, text: &[u8]) -> Result<File> {
    write(path, text)?;
    let file = OpenOptions::new().append(true).open(path);
    file.map_err(|error| Error::io("write", path, error))
}

/// Writes a file as a whole or not at all.
pub(super) fn write(path: &Path, text: &[u8]) -> Result<()> {
    Replace::new(path, Durability::Cached)
        .draft(path.with_added_extension("new"))
        .write(|file| file.write_all(text))
        .map_err(|error| Error::io("write", path, error))
}

fn of_track(error: accelerator_track::Error) -> Error {
    Error::new(Kind::Io, error.to_string()).with_source(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn result(iteration: u64, metrics: &[(&str, f64)]) -> TrialResult {
        TrialResult {
            training_iteration: iteration,
            time_this_iter_s: 0.5,
            time_total_s: 0.5 * iteration as f64,
            timestamp: 9,
            metrics: metrics.iter().copied().collect(),
        }
    }

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
        let file = OpenOptions::new()
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
        let fields = [
            json!(0.5),
            json!("a,b"),
            json!("say \"x\""),
            json!([1, 2]),
            json!(null),
        ];
        assert_eq!(
            csv_line(&fields),
            "0.5,\"a,b\",\"say \"\"x\"\"\",\"[1,2]\",\n"
        );
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
