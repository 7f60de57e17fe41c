//! The status of a search, with the lines of Ray Tune.

use std::collections::{BTreeMap, VecDeque};

use accelerator_host::machine::Memory;
use accelerator_host::text::{columns, figure, plain, without_middle};
use serde_json::Value;

use super::trial_folder::ERROR;
use crate::stop::ITERATION;
use crate::view::{SearchView, Trial, TrialStatus};

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Rows {
    /// At most this number of rows, taken evenly from the statuses.
    AtMost(usize),
    All,
}

pub(crate) fn status(view: &SearchView, rows: Rows) -> String {
    let mut lines = vec!["== Status ==".to_owned()];
    lines.extend(memory());
    lines.extend(view.scheduler.iter().cloned());
    if let Some(resources) = &view.resources {
        lines.push(format!("Resources requested: {resources}"));
    }
    lines.extend(best_line(view));
    lines.push(format!("Result logdir: {}", view.folder.display()));
    let counts = counts(view.trials.iter());
    let expected = view.expected.unwrap_or(view.trials.len());
    lines.push(format!(
        "Number of trials: {}/{expected} ({})",
        view.trials.len(),
        counts.join(", ")
    ));
    let shown = shown_trials(&view.trials, rows);
    if !shown.is_empty() {
        lines.push(trial_table(view, &shown));
    }
    if shown.len() < view.trials.len() {
        // Unlike those of all trials, in the order of the table.
        let states = ORDER.iter().filter_map(|status| {
            let of = |trial: &&Trial| trial.status == *status;
            let all = view.trials.iter().filter(of).count();
            let hidden = all - shown.iter().copied().filter(of).count();
            (hidden > 0).then(|| format!("{hidden} {}", word(*status)))
        });
        let states: Vec<_> = states.collect();
        lines.push(format!(
            "... {} more trials not shown ({})",
            view.trials.len() - shown.len(),
            states.join(", ")
        ));
    }
    lines.extend(errors(view, rows));
    let mut text = lines.join("\n");
    text.push('\n');
    text
}

/// Returns a line such as `Current best trial: 358bb_00006 with mean_accuracy=0.1174 and parameters={"lr":0.1}`.
pub(crate) fn best_line(view: &SearchView) -> Option<String> {
    let objective = &view.objective;
    let scored = view.trials.iter().filter_map(|trial| {
        let value = trial.best.as_ref()?.value(&objective.metric)?;
        Some((trial, value))
    });
    let (trial, value) = objective.mode.best(scored)?;
    let id = trial.name.strip_prefix(&format!("{}_", view.name));
    Some(format!(
        "Current best trial: {} with {}={value:?} and parameters={}",
        id.unwrap_or(&trial.name),
        objective.metric,
        plain(&trial.best_config.to_string())
    ))
}

/// Returns counts such as `25 PENDING`, by the names of statuses.
pub(crate) fn counts<'a>(trials: impl Iterator<Item = &'a Trial>) -> Vec<String> {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for trial in trials {
        *counts.entry(word(trial.status)).or_default() += 1;
    }
    counts
        .into_iter()
        .map(|(word, count)| format!("{count} {word}"))
        .collect()
}

pub(crate) fn word(status: TrialStatus) -> &'static str {
    match status {
        TrialStatus::Pending => "PENDING",
        TrialStatus::Running => "RUNNING",
        TrialStatus::Paused => "PAUSED",
        TrialStatus::Terminated => "TERMINATED",
        TrialStatus::Error => "ERROR",
    }
}

const ORDER: [TrialStatus; 5] = [
    TrialStatus::Running,
    TrialStatus::Paused,
    TrialStatus::Pending,
    TrialStatus::Terminated,
    TrialStatus::Error,
];
/// Metrics that have a column where they are reported, and its header.
const METRICS: [(&str, &str); 6] = [
    ("mean_accuracy", "acc"),
    ("mean_loss", "loss"),
    (ITERATION, "iter"),
    ("time_total_s", "total time (s)"),
    ("timesteps_total", "ts"),
    ("episode_reward_mean", "reward"),
];
/// The number of other metrics that have one.
const INFERRED: usize = 3;
/// The number of bytes of a parameter that are shown.
const LONGEST_VALUE: usize = 20;

/// Takes a trial of each status in turn, until there are enough; those with the lowest numbers.
fn shown_trials(trials: &[Trial], rows: Rows) -> Vec<&Trial> {
    let most = match rows {
        Rows::AtMost(most) => most.min(trials.len()),
        Rows::All => trials.len(),
    };
    let mut left: BTreeMap<&str, VecDeque<&Trial>> = BTreeMap::new();
    for trial in trials {
        left.entry(word(trial.status)).or_default().push_back(trial);
    }
    let mut shown = Vec::new();
    while shown.len() < most {
        let next = left.values_mut().filter_map(VecDeque::pop_front);
        shown.extend(next.take(most - shown.len()));
    }
    let place = |trial: &&Trial| ORDER.iter().position(|status| *status == trial.status);
    shown.sort_by_key(|trial| (place(trial), trial.id));
    shown
}

fn trial_table(view: &SearchView, shown: &[&Trial]) -> String {
    let metrics = metric_columns(view);
    let mut header = ["Trial name", "status", "loc"].map(str::to_owned).to_vec();
    header.extend(view.parameters.iter().cloned());
    header.extend(metrics.iter().map(|(_, header)| plain(header)));
    let mut rows = vec![header];
    rows.extend(shown.iter().map(|trial| {
        let is_running = trial.status == TrialStatus::Running;
        let location = trial.location.as_ref().filter(|_| is_running);
        let location = location.map(|at| format!("{}:{}", at.host, at.pid));
        let mut cells = vec![
            plain(&trial.name),
            word(trial.status).to_owned(),
            plain(&location.unwrap_or_default()),
        ];
        let parameters = view.parameters.iter();
        cells.extend(parameters.map(|path| parameter(trial.config.value(path))));
        cells.extend(metrics.iter().map(|(name, _)| {
            let value = trial.last.as_ref().and_then(|last| last.value(name));
            value.map_or_else(String::new, figure)
        }));
        cells
    }));
    columns(&rows).trim_end().to_owned()
}

fn parameter(value: Option<&Value>) -> String {
    match value {
        None | Some(Value::Null) => String::new(),
        Some(Value::Number(number)) if number.is_f64() => {
            figure(number.as_f64().unwrap_or(f64::NAN))
        }
        Some(Value::String(text)) => without_middle(&plain(text), LONGEST_VALUE),
        Some(other) => without_middle(&other.to_string(), LONGEST_VALUE),
    }
}

/// Metrics with their headers: Ray's own, the objective, and a few others.
fn metric_columns(view: &SearchView) -> Vec<(String, String)> {
    let lasts = || view.trials.iter().filter_map(|trial| trial.last.as_ref());
    let is_there = |name: &str| lasts().any(|last| last.value(name).is_some());
    let known = METRICS.iter().filter(|(name, _)| is_there(name));
    let mut columns: Vec<_> = known
        .map(|(name, header)| ((*name).to_owned(), (*header).to_owned()))
        .collect();
    let objective = &view.objective.metric;
    let add = |columns: &mut Vec<(String, String)>, name: &str| {
        if !columns.iter().any(|(known, _)| known == name) {
            columns.push((name.to_owned(), name.to_owned()));
        }
    };
    if is_there(objective) {
        add(&mut columns, objective);
    }
    let before = columns.len();
    for name in lasts()
        .flat_map(|last| last.metrics.iter())
        .map(|(name, _)| name)
    {
        if columns.len() == before + INFERRED {
            break;
        }
        add(&mut columns, name);
    }
    columns
}

/// Returns a line such as `Memory usage on this node: 19.0/250.9 GiB`; `None` if the system does not say.
fn memory() -> Option<String> {
    let memory = Memory::of_this_machine()?;
    let (total, available) = (memory.total as f64, memory.available as f64);
    let used = total - available;
    let gib = f64::from(1 << 30);
    let warning = match used > 0.9 * total {
        true => ": ***LOW MEMORY*** less than 10% of the memory on this node is available for use",
        false => "",
    };
    Some(format!(
        "Memory usage on this node: {:.1}/{:.1} GiB{warning}",
        used / gib,
        total / gib
    ))
}

fn errors(view: &SearchView, rows: Rows) -> Option<String> {
    let failed = view.trials.iter().filter(|trial| trial.failures > 0);
    let failed: Vec<_> = failed.collect();
    if failed.is_empty() {
        return None;
    }
    let shown = match rows {
        Rows::AtMost(most) => &failed[..most.min(failed.len())],
        Rows::All => &failed,
    };
    let mut lines = vec![format!("Number of errored trials: {}", failed.len())];
    if shown.len() < failed.len() {
        lines.push(format!(
            "Table truncated to {} rows ({} overflow)",
            shown.len(),
            failed.len() - shown.len()
        ));
    }
    let mut rows = vec![["Trial name", "# failures", "error file"].map(str::to_owned)];
    rows.extend(shown.iter().map(|trial| {
        let mark = match trial.status {
            TrialStatus::Error => "",
            _ => "*",
        };
        [
            plain(&trial.name),
            format!("{}{mark}", trial.failures),
            plain(&trial.folder.join(ERROR).display().to_string()),
        ]
    }));
    lines.push(columns(&rows).trim_end().to_owned());
    if shown
        .iter()
        .any(|trial| trial.status == TrialStatus::Terminated)
    {
        lines.push("* The trial terminated successfully after retrying.".to_owned());
    }
    Some(lines.join("\n"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::output::tests::{result, search, trial};
    use crate::runner::Location;

    #[test]
    fn a_status_has_the_best_trial_counts_values_and_failures() {
        use TrialStatus::{Error, Pending, Running, Terminated};
        let result = |metrics: &[_]| Some(result(1, metrics));
        let trials = vec![
            trial(
                0,
                Terminated,
                json!({"a": 12345678, "b": [1, 2]}),
                result(&[("loss", 1e-7)]),
            ),
            trial(
                1,
                Running,
                json!({"a": 0.000_123_456_78, "b": null}),
                result(&[("loss", f64::NAN), ("n", 1200.0)]),
            ),
            trial(
                2,
                Error,
                json!({"a": 5, "b": "a\u{7}text that is longer"}),
                None,
            ),
            trial(3, Pending, json!({"a": true, "b": "it's"}), None),
        ];
        let mut view = search(["a", "b"], trials);
        view.trials[1].location = Some(Location {
            host: "10.0.0.2".to_owned(),
            pid: 7,
        });
        view.trials[0].failures = 1;
        view.trials[2].failures = 2;
        let text = status(&view, Rows::All);
        let (first, rest) = text.split_once('\n').unwrap();
        let (memory, rest) = rest.split_once('\n').unwrap();
        assert_eq!(first, "== Status ==");
        assert!(
            memory.starts_with("Memory usage on this node: "),
            "{memory}"
        );
        assert_eq!(rest, "\
Using FIFO scheduling algorithm.
Current best trial: 358bb_00000 with loss=1e-7 and parameters={\"a\":12345678,\"b\":[1,2]}
Result logdir: /results
Number of trials: 4/4 (1 ERROR, 1 PENDING, 1 RUNNING, 1 TERMINATED)
Trial name        status      loc         a            b                      iter  total time (s)  loss  n
line_358bb_00001  RUNNING     10.0.0.2:7  0.000123457                         1     0.5             NaN   1200
line_358bb_00003  PENDING                 true         it's
line_358bb_00000  TERMINATED              12345678     [1,2]                  1     0.5             1e-7
line_358bb_00002  ERROR                   5            a\\u{7}text… is longer
Number of errored trials: 2
Trial name        # failures  error file
line_358bb_00000  1*          /results/line_358bb_00000/error.txt
line_358bb_00002  2           /results/line_358bb_00002/error.txt
* The trial terminated successfully after retrying.
");
    }

    #[test]
    fn rows_are_taken_evenly_from_the_statuses() {
        let statuses = [
            (TrialStatus::Terminated, 6),
            (TrialStatus::Error, 10),
            (TrialStatus::Running, 2),
            (TrialStatus::Pending, 5),
        ];
        let statuses = statuses.map(|(status, count)| vec![status; count]).concat();
        let trials = (0..).zip(statuses);
        let trials = trials.map(|(number, status)| trial(number, status, json!({}), None));
        let view = search(["a", "b"], trials.collect());
        let text = status(&view, Rows::AtMost(8));
        let end = "... 15 more trials not shown (3 PENDING, 4 TERMINATED, 8 ERROR)\n";
        assert!(text.ends_with(end), "{text}");
        assert_eq!(text.matches("line_358bb_").count(), 8);
    }

    #[test]
    fn what_a_trial_is_called_does_not_reach_the_terminal_as_a_command() {
        let of = |text: &str| trial(0, TrialStatus::Running, json!({"a": text}), None);
        let trials = vec![of("x"), of("a text\u{7} that is longer than others")];
        let mut view = search(["a", "b"], trials);
        view.trials[0].name = "a\u{1b}[2J\nb".to_owned();
        let text = status(&view, Rows::All);
        assert!(!text.contains(['\u{1b}', '\u{7}']), "{text}");
        assert!(text.contains("a\\u{1b}[2J\\nb "), "{text}");
        assert!(text.contains("…"), "{text}");
    }
}
