//! A real MLflow server.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::venv;

/// A real MLflow server, which ends when this is dropped.
pub(super) struct Server {
    pub(super) address: String,
    venv: PathBuf,
    folder: TempDir,
    port: u16,
    process: Child,
}

impl Server {
    /// Starts a server with an empty database. Returns `None` if MLflow is not installed.
    pub(super) fn start() -> Option<Self> {
        let venv = venv::find("mlflow")?;
        let folder = tempfile::tempdir().unwrap();
        fs::copy(venv.join("m.db"), folder.path().join("m.db")).unwrap();
        let port = crate::ports::free_port();
        let process = spawn(&venv, folder.path(), port);
        let server = Self {
            address: format!("http://127.0.0.1:{port}"),
            venv,
            folder,
            port,
            process,
        };
        server.wait();
        Some(server)
    }

    /// Kills all processes of the server at once.
    pub(super) fn kill(&mut self) {
        let group = format!("-{}", self.process.id());
        let killed = Command::new("kill").args(["-9", "--", &group]).status();
        assert!(killed.unwrap().success());
        self.process.wait().unwrap();
    }

    /// Starts the server again with the same database, without waiting until it answers.
    pub(super) fn restart_soon(&mut self) {
        self.process = spawn(&self.venv, self.folder.path(), self.port);
    }

    /// Returns the ids of all experiments.
    pub(super) fn experiments(&self) -> Vec<Value> {
        let found = self.post("experiments/search", &json!({ "max_results": 100 }));
        let found = found["experiments"].as_array().unwrap().iter();
        found.map(|found| found["experiment_id"].clone()).collect()
    }

    pub(super) fn get(&self, call: &str, query: &[(&str, &str)]) -> Value {
        let request = ureq::get(format!("{}/api/2.0/mlflow/{call}", self.address));
        let answer = request.query_pairs(query.iter().copied()).call();
        answer.unwrap().body_mut().read_json().unwrap()
    }

    pub(super) fn post(&self, call: &str, body: &Value) -> Value {
        let url = format!("{}/api/2.0/mlflow/{call}", self.address);
        let answer = ureq::post(url).send_json(body);
        answer.unwrap().body_mut().read_json().unwrap()
    }

    /// Returns an artifact of a run.
    pub(super) fn file(&self, run: &str, path: &str) -> Vec<u8> {
        let request = ureq::get(format!("{}/get-artifact", self.address));
        let answer = request.query("run_uuid", run).query("path", path).call();
        let mut answer = answer.unwrap();
        let body = answer.body_mut().with_config().limit(1 << 26);
        body.read_to_vec().unwrap()
    }

    /// Returns the step and value of each point of a metric.
    pub(super) fn points(&self, run: &str, metric: &str) -> Vec<(u64, f64)> {
        let mut points = Vec::new();
        let mut page = String::new();
        loop {
            let mut query = vec![("run_id", run), ("metric_key", metric)];
            query.push(("max_results", "7000"));
            if !page.is_empty() {
                query.push(("page_token", &page));
            }
            let answer = self.get("metrics/get-history", &query);
            points.extend(answer["metrics"].as_array().cloned().unwrap_or_default());
            match answer["next_page_token"].as_str() {
                Some(next) if !next.is_empty() => page = next.to_owned(),
                _ => break,
            }
        }
        let points = points.iter().map(|point| {
            let value = match &point["value"] {
                Value::String(text) => text.parse().unwrap(),
                value => value.as_f64().unwrap(),
            };
            (point["step"].as_u64().unwrap(), value)
        });
        let mut points: Vec<_> = points.collect();
        points.sort_by_key(|point| point.0);
        points
    }

    pub(super) fn wait(&self) {
        let url = format!("{}/health", self.address);
        let begun = Instant::now();
        while ureq::get(&url).call().is_err() {
            let log = fs::read_to_string(self.folder.path().join("log")).unwrap();
            assert!(
                begun.elapsed() < Duration::from_secs(180),
                "MLflow does not start: {log}"
            );
            thread::sleep(Duration::from_millis(200));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.process.try_wait().is_ok_and(|ended| ended.is_none()) {
            self.kill();
        }
    }
}

fn spawn(venv: &Path, folder: &Path, port: u16) -> Child {
    use std::os::unix::process::CommandExt;

    let log = File::options()
        .create(true)
        .append(true)
        .open(folder.join("log"))
        .unwrap();
    Command::new(venv.join("bin/mlflow"))
        .args(["server", "--host", "127.0.0.1", "--workers", "1", "--port"])
        .arg(port.to_string())
        .arg("--backend-store-uri")
        .arg(format!("sqlite:///{}", folder.join("m.db").display()))
        .arg("--artifacts-destination")
        .arg(folder.join("artifacts"))
        .envs([
            ("MLFLOW_DISABLE_TELEMETRY", "true"),
            ("DO_NOT_TRACK", "true"),
            // Job execution would need more processes.
            ("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false"),
        ])
        .current_dir(folder)
        .stdin(Stdio::null())
        .stdout(log.try_clone().unwrap())
        .stderr(log)
        .process_group(0)
        .spawn()
        .unwrap()
}
