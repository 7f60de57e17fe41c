use std::fs::OpenOptions;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::Sender;
use std::thread;

use serde_json::{Map, Value};

use super::{Metrics, ProgramEvent};
use crate::error::{Error, Result};

/// A report that a program has printed.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct MetricsLine {
    pub(super) metrics: Metrics,
    /// What the program has saved.
    pub(super) checkpoint: Option<PathBuf>,
}

/// Passes on the reports in what a program prints, on a thread, and copies all of it to a file.
pub(super) fn follow(
    output: impl Read + Send + 'static,
    log: &Path,
    metric: &str,
    attempt: u32,
    events: Sender<ProgramEvent>,
) -> Result<()> {
    let copy = OpenOptions::new().create(true).append(true).open(log);
    let mut copy = copy.map_err(|error| Error::io("write", log, error))?;
    let metric = metric.to_owned();
    let follow = move || {
        let mut lines = BufReader::new(output);
        let mut line = Vec::new();
        while lines
            .read_until(b'\n', &mut line)
            .is_ok_and(|read| read > 0)
        {
            // A full disk costs the log, and not the trial.
            let _ = copy.write_all(&line);
            let text = String::from_utf8_lossy(&line);
            if let Some(report) = parse(&text, &metric)
                && events.send(ProgramEvent::Line(attempt, report)).is_err()
            {
                return;
            }
            line.clear();
        }
        // Nobody listens once the search has ended.
        let _ = events.send(ProgramEvent::Closed(attempt));
    };
    thread::Builder::new()
        .name("output".to_owned())
        .spawn(follow)?;
    Ok(())
}

/// A line is a report where it ends in a JSON object with the metric. A prefix, as launchers write before the lines of
/// ranks, does not matter.
fn parse(line: &str, metric: &str) -> Option<MetricsLine> {
    let object = &line[line.find('{')?..];
    let mut map: Map<String, Value> = serde_json::from_str(object.trim_end()).ok()?;
    if !map.contains_key(metric) {
        return None;
    }
    let checkpoint = map.remove("checkpoint");
    let checkpoint = checkpoint.and_then(|path| Some(PathBuf::from(path.as_str()?)));
    let numbers = map.iter().filter_map(|(name, value)| {
        let number = match value {
            Value::Bool(flag) => Some(f64::from(u8::from(*flag))),
            // Programs whose JSON cannot hold NaN write null, or the word.
            Value::Null => Some(f64::NAN),
            Value::String(word) => word.parse().ok(),
            value => value.as_f64(),
        };
        Some((name.as_str(), number?))
    });
    Some(MetricsLine {
        metrics: numbers.collect(),
        checkpoint,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_with_the_metric_is_a_report() {
        let report = parse(
            "[rank 0] {\"loss\": 0.5, \"epoch\": 3, \"note\": \"x\", \"checkpoint\": \"c/1\"}\n",
            "loss",
        )
        .unwrap();
        assert_eq!(
            report.metrics,
            Metrics::from([("loss", 0.5), ("epoch", 3.0)])
        );
        assert_eq!(report.checkpoint, Some(PathBuf::from("c/1")));
        for line in ["loss: 0.5", "{\"accuracy\": 1}", "{\"loss\": ", "", "{}"] {
            assert_eq!(parse(line, "loss"), None, "{line}");
        }
        let nan = parse("{\"loss\": \"NaN\"}", "loss").unwrap();
        assert!(nan.metrics.value("loss").unwrap().is_nan());
        let null = parse("{\"loss\": null}", "loss").unwrap();
        assert!(null.metrics.value("loss").unwrap().is_nan());
    }
}
