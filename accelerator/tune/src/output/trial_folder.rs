use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::csv;
use super::number::json_number;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::metrics::Metrics;
use crate::trial_id::TrialId;
use crate::view::TrialResult;

/// Such as `MnistTrainable_358bb_00006`.
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
    /// The metrics that `progress.csv` has columns for.
    metrics: Vec<String>,
    has_header: bool,
    config: Config,
}

impl TrialFolder {
    /// Opens the folder of a trial that has these results so far. Its files hold them afterwards, whatever they held before.
    pub(crate) fn open(
        path: &Path,
        name: &str,
        config: &Config,
        before: &[TrialResult],
    ) -> Result<Self> {
        let made = fs::create_dir_all(path);
        made.map_err(|error| Error::io("make", path, error))?;
        let params = path.join("params.json");
        write(&params, format!("{config}\n").as_bytes())?;
        let rows: Vec<_> = before
            .iter()
            .map(|result| row(name, result, config))
            .collect();
        let mut folder = Self {
            results: rewrite(&path.join(RESULTS), &lines(&rows)?)?,
            progress: rewrite(&path.join(PROGRESS), b"")?,
            path: path.to_owned(),
            name: name.to_owned(),
            metrics: Vec::new(),
            has_header: false,
            config: config.clone(),
        };
        if !rows.is_empty() {
            folder.rewrite_progress(before)?;
        }
        Ok(folder)
    }

    pub(crate) fn append(&mut self, result: &TrialResult, config: &Config) -> Result<()> {
        self.config = config.clone();
        let path = self.path.join(RESULTS);
        let line = lines(&[row(&self.name, result, config)])?;
        let written = self.results.write_all(&line);
        written.map_err(|error| Error::io("write", &path, error))?;
        let is_new = |name: &str| !self.metrics.iter().any(|known| known == name);
        if !self.has_header || result.metrics.iter().any(|(name, _)| is_new(name)) {
            let all = read_results(&self.path)?;
            return self.rewrite_progress(&all);
        }
        let line = self.progress_line(result);
        let written = self.progress.write_all(line.as_bytes());
        written.map_err(|error| Error::io("write", &self.path.join(PROGRESS), error))
    }

    /// Writes why the newest attempt has failed.
    pub(crate) fn fail(&self, error: &str) -> Result<()> {
        write(&self.path.join(ERROR), format!("{error}\n").as_bytes())
    }

    /// Writes all lines again, with a column for each metric.
    fn rewrite_progress(&mut self, results: &[TrialResult]) -> Result<()> {
        let names = results.iter().flat_map(|result| result.metrics.iter());
        let names: BTreeSet<_> = names.map(|(name, _)| name.to_owned()).collect();
        self.metrics = names.into_iter().collect();
        let fixed = COUNTED.iter().map(|name| Value::from(*name));
        let metrics = self.metrics.iter().map(|name| Value::from(name.as_str()));
        let config = self.config.leaves().into_iter();
        let config = config.map(|(path, _)| Value::from(format!("config/{path}")));
        let header: Vec<_> = fixed.chain(metrics).chain(config).collect();
        let mut text = csv::line(&header);
        for result in results {
            text.push_str(&self.progress_line(result));
        }
        self.progress = rewrite(&self.path.join(PROGRESS), text.as_bytes())?;
        self.has_header = true;
        Ok(())
    }

    fn progress_line(&self, result: &TrialResult) -> String {
        let fixed = COUNTED.iter().map(|name| counted(result, name));
        let metrics = self.metrics.iter().map(|name| {
            let value = result.metrics.value(name);
            value.map_or(Value::Null, json_number)
        });
        let config = self
            .config
            .leaves()
            .into_iter()
            .map(|(_, value)| value.clone());
        let fields: Vec<_> = fixed.chain(metrics).chain(config).collect();
        csv::line(&fields)
    }
}

/// The results that a trial's folder holds; none where it has none.
pub(crate) fn read_results(folder: &Path) -> Result<Vec<TrialResult>> {
    let path = folder.join(RESULTS);
    let file = match File::open(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(Error::io("read", &path, error)),
    };
    let mut results = Vec::new();
    for line in BufReader::new(file).lines() {
        let line = line.map_err(|error| Error::io("read", &path, error))?;
        // The last line may be incomplete while the search writes it.
        let Ok(Value::Object(mut row)) = serde_json::from_str(&line) else {
            break;
        };
        let number = |value: Option<Value>| value.and_then(|value| value.as_f64());
        let mut result = TrialResult {
            training_iteration: row
                .remove("training_iteration")
                .and_then(|value| value.as_u64())
                .unwrap_or(0),
            time_this_iter_s: number(row.remove("time_this_iter_s")).unwrap_or(0.0),
            time_total_s: number(row.remove("time_total_s")).unwrap_or(0.0),
            timestamp: row
                .remove("timestamp")
                .and_then(|value| value.as_u64())
                .unwrap_or(0),
            metrics: Metrics::default(),
        };
        row.remove("trial_id");
        row.remove("config");
        if let Ok(metrics) = serde_json::from_value(Value::Object(row)) {
            result.metrics = metrics;
        }
        results.push(result);
    }
    Ok(results)
}

/// Where a trial's failure is written.
pub(crate) const ERROR: &str = "error.txt";
const RESULTS: &str = "result.jsonl";
const PROGRESS: &str = "progress.csv";
/// Ray's bound.
const LONGEST_NAME: usize = 130;
const COUNTED: [&str; 4] = [
    "training_iteration",
    "time_this_iter_s",
    "time_total_s",
    "timestamp",
];

fn counted(result: &TrialResult, name: &str) -> Value {
    match name {
        "training_iteration" => result.training_iteration.into(),
        "time_this_iter_s" => result.time_this_iter_s.into(),
        "time_total_s" => result.time_total_s.into(),
        _ => result.timestamp.into(),
    }
}

/// A line of `result.jsonl`: what was measured, what was counted, and the configuration.
fn row(name: &str, result: &TrialResult, config: &Config) -> Value {
    let mut row = match serde_json::to_value(&result.metrics) {
        Ok(Value::Object(metrics)) => metrics,
        _ => Map::new(),
    };
    for counter in COUNTED {
        row.insert(counter.to_owned(), counted(result, counter));
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
    let draft = path.with_added_extension("new");
    let write = || {
        fs::write(&draft, text)?;
        fs::rename(&draft, path)
    };
    write().map_err(|error| Error::io("write", path, error))
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
        TrialFolder::open(&path, "t_00000", &config, &[first.clone(), second.clone()]).unwrap();
        assert_eq!(read_results(&path).unwrap(), [first, second]);
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
