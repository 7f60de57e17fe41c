use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;

use super::table::{Rows, status};
use crate::config::Config;
use crate::metrics::Metrics;
use crate::objective::{Mode, Objective};
use crate::runner::Location;
use crate::trial_id::TrialId;
use crate::view::{SearchView, Trial, TrialResult, TrialStatus};

/// A search, and what Ray Tune's own code prints of it: see tests/tune/status.py.
#[derive(Deserialize)]
struct Case {
    search: String,
    metric: String,
    mode: Mode,
    rows: Option<usize>,
    trials: Vec<CaseTrial>,
    text: String,
}

#[derive(Deserialize)]
struct CaseTrial {
    number: u32,
    status: TrialStatus,
    config: Config,
    result: Metrics,
    at: String,
    failures: u32,
}

impl Case {
    fn view(&self) -> SearchView {
        let folder = Path::new("/results").join(&self.search);
        let trials = self.trials.iter().map(|trial| {
            let name = format!("{}_358bb_{:05}", self.search, trial.number);
            let at = trial.at.split_once(':');
            let last = (trial.result != Metrics::default()).then(|| result(&trial.result));
            Trial {
                id: TrialId::new(trial.number),
                status: trial.status,
                location: at.map(|(host, pid)| Location {
                    host: host.to_owned(),
                    pid: pid.parse().unwrap(),
                }),
                config: trial.config.clone(),
                best_config: trial.config.clone(),
                best: last.clone(),
                last,
                failures: trial.failures,
                error: (trial.failures > 0).then(|| "it failed".to_owned()),
                folder: folder.join(&name),
                checkpoint: None,
                name,
            }
        });
        let paths = self.trials[0].config.as_map().keys().cloned();
        SearchView {
            name: self.search.clone(),
            folder: folder.clone(),
            objective: Objective::new(&self.metric, self.mode),
            parameters: paths.collect(),
            scheduler: Vec::new(),
            rungs: Vec::new(),
            trials: trials.collect(),
            expected: None,
            resources: None,
        }
    }

    fn status(&self, view: &SearchView) -> String {
        status(view, self.rows.map_or(Rows::All, Rows::AtMost))
    }
}

#[test]
fn tables_are_byte_for_byte_those_of_ray() {
    for (name, case) in cases() {
        let text = case.status(&case.view());
        let mut lines = text.lines();
        assert_eq!(lines.next(), Some("== Status =="));
        let memory = lines.next().unwrap();
        assert!(memory.starts_with("Memory usage on this node: "));
        let rest: Vec<_> = lines.collect();
        let rest = rest.join("\n") + "\n";
        assert_eq!(rest, case.text, "{name}:\n{rest}\nexpected:\n{}", case.text);
    }
}

#[test]
fn the_status_has_the_lines_the_widths_and_the_cells_of_the_article() {
    let article = include_str!("../../../../tests/fixtures/tune/article-status.txt");
    let case = cases().remove("article").unwrap();
    let mut view = case.view();
    view.folder = "/home/ray/ray_results/TorchTrainable_2021-05-26_11-41-09".into();
    view.scheduler = vec![
        "Using AsyncHyperBand: num_stopped=3".to_owned(),
        "Bracket: Iter 64.000: None | Iter 16.000: None | Iter 4.000: 0.1129 | Iter 1.000: 0.1129"
            .to_owned(),
    ];
    view.resources = Some(
        "20.0/112 CPUs, 16.0/16 GPUs, 0.0/689.53 GiB heap, 0.0/299.5 GiB objects (0.0/4.0 accelerator_type:V100)"
            .to_owned(),
    );
    let text = case.status(&view);
    let is_of_table = |line: &&str| line.starts_with(['|', '+']);
    // What the machine says, and what differs from run to run.
    let outside = |text: &str| -> Vec<String> {
        let lines = text.lines().filter(|line| !is_of_table(line));
        let lines = lines.map(
            |line| match line.strip_prefix("Memory usage on this node: ") {
                Some(memory) => {
                    let (used, total) = memory.split_once('/').unwrap();
                    let total = total.split_once(" GiB").unwrap().0;
                    for number in [used, total] {
                        let (_, decimals) = number.split_once('.').unwrap();
                        assert_eq!(decimals.len(), 1, "{memory}");
                    }
                    "memory".to_owned()
                }
                None => line.to_owned(),
            },
        );
        lines.collect()
    };
    assert_eq!(outside(&text), outside(article));
    assert_eq!(columns(&text), columns(article));
}

#[test]
fn what_a_trial_is_called_does_not_reach_the_terminal_as_a_command() {
    let mut view = cases().remove("odd values").unwrap().view();
    view.trials[0].name = "a\u{1b}[2J\nb".to_owned();
    view.trials[1]
        .config
        .insert("c", "a text\u{7} that is longer than others");
    let text = status(&view, Rows::All);
    assert!(!text.contains(['\u{1b}', '\u{7}']), "{text}");
    assert!(text.contains("| a [2J b "), "{text}");
    assert!(text.contains("| ...onger than others "), "{text}");
}

/// Returns for each column, by its header, its width, which the rules tell, and its cells.
fn columns(text: &str) -> BTreeMap<String, (usize, Vec<String>)> {
    let mut lines = text.lines().filter(|line| line.starts_with(['|', '+']));
    let widths: Vec<_> = lines.next().unwrap().split('+').map(str::len).collect();
    let cells = |line: &str| -> Vec<String> {
        let inside = line.trim_start_matches('|').trim_end_matches('|');
        inside
            .split('|')
            .map(|cell| cell.trim().to_owned())
            .collect()
    };
    let rows: Vec<_> = lines
        .filter(|line| line.starts_with("| "))
        .map(cells)
        .collect();
    let of_column = |(index, header): (usize, &String)| {
        let cells = rows[1..].iter().map(|row| row[index].clone());
        (header.clone(), (widths[index + 1], cells.collect()))
    };
    rows[0].iter().enumerate().map(of_column).collect()
}

fn cases() -> BTreeMap<String, Case> {
    serde_json::from_str(include_str!("../../../../tests/fixtures/tune/status.json")).unwrap()
}

/// Makes a result; the values that the search adds are not among a trial's own metrics.
fn result(reported: &Metrics) -> TrialResult {
    let own = ["training_iteration", "time_total_s"];
    TrialResult {
        training_iteration: reported.value("training_iteration").unwrap() as u64,
        time_this_iter_s: 1.0,
        time_total_s: reported.value("time_total_s").unwrap(),
        timestamp: 1,
        metrics: reported
            .iter()
            .filter(|(name, _)| !own.contains(name))
            .collect(),
    }
}
