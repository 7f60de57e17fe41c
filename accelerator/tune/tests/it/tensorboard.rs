//! Checks what the real TensorBoard shows of a search.

use std::process::Command;

use accelerator_tune::SearchFolder;
use serde_json::Value;

use crate::support::{search, succeed, venv, wait_for_decisions};

#[test]
fn the_table_of_hyperparameters_has_each_trial_once_though_the_search_was_killed() {
    let Some(venv) = venv("tensorboard") else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let (out, logs) = (folder.path().join("out"), folder.path().join("logs"));
    let logs = logs.to_str().unwrap();
    let arguments = format!("--num-samples 5 --max-iterations 6 --tensorboard {logs}");
    let mut killed = search(&out, &arguments);
    let mut killed = killed.env("QUADRATIC_PAUSE_MS", "20").spawn().unwrap();
    wait_for_decisions(&out, 12);
    assert_eq!(killed.try_wait().unwrap(), None, "it is killed in time");
    killed.kill().unwrap();
    killed.wait().unwrap();
    succeed(&out, &arguments);

    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/hparams.py");
    let mut python = Command::new(venv.join("bin/python"));
    let output = python.args([script, logs, "5"]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let rows: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    let searched = SearchFolder::open(&out).unwrap();
    let trials = searched.results().trials();
    assert_eq!(rows.len(), trials.len());
    for trial in trials {
        let row = rows
            .iter()
            .find(|row| row["group"]["name"] == trial.name.as_str());
        let row = row.unwrap_or_else(|| panic!("{} is not in {rows:?}", trial.name));
        let group = &row["group"];
        assert_eq!(group["sessions"][0]["status"], "STATUS_SUCCESS");
        for parameter in ["lr", "momentum"] {
            assert_eq!(
                group["hparams"][parameter],
                *trial.config.value(parameter).unwrap()
            );
        }
        let points = row["points"].as_array().unwrap();
        let steps: Vec<_> = points
            .iter()
            .map(|point| point[1].as_u64().unwrap())
            .collect();
        assert_eq!(steps, [1, 2, 3, 4, 5, 6]);
        let last = trial.last.as_ref().unwrap().value("loss").unwrap();
        assert_eq!(points[5][2].as_f64().unwrap(), f64::from(last as f32));
    }
}
