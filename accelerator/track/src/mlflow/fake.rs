//! A small MLflow server that fails on command.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

/// It serves until the process ends.
#[derive(Clone)]
pub(super) struct FakeServer {
    pub(super) address: String,
    state: Arc<Mutex<FakeState>>,
}

/// The fate of a request.
#[derive(Clone, Copy, Debug)]
pub(super) enum Fault {
    /// It acts, and closes without an answer.
    LostAnswer,
    /// It closes without acting.
    LostRequest,
    /// It acts, and answers later.
    SlowAnswer(Duration),
    /// It acts later, after the client has left.
    SlowAct(Duration),
    /// It does not act, and answers with a status and a text.
    Says(u16, &'static str),
}

#[derive(Default)]
pub(super) struct FakeState {
    pub(super) experiments: BTreeMap<String, bool>,
    pub(super) runs: Vec<FakeRun>,
    pub(super) files: BTreeMap<String, Vec<u8>>,
    /// `METHOD path`, without what comes before it in each address.
    pub(super) asked: Vec<String>,
    pub(super) authorization: Option<String>,
    faults: VecDeque<(&'static str, Fault)>,
    pub(super) longest_tag: usize,
    created: usize,
}

#[derive(Default)]
pub(super) struct FakeRun {
    pub(super) id: String,
    pub(super) deleted: bool,
    pub(super) status: String,
    pub(super) tags: BTreeMap<String, String>,
    pub(super) params: BTreeMap<String, String>,
    /// Name, timestamp, step, value.
    pub(super) metrics: BTreeSet<(String, u64, u64, String)>,
}

impl FakeServer {
    pub(super) fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let server = Self {
            address: format!("http://{}", listener.local_addr().unwrap()),
            state: Arc::default(),
        };
        server.state().longest_tag = 8000;
        let state = server.state.clone();
        thread::spawn(move || {
            for stream in listener.incoming() {
                let state = state.clone();
                thread::spawn(move || serve(&stream.unwrap(), &state));
            }
        });
        server
    }

    pub(super) fn state(&self) -> MutexGuard<'_, FakeState> {
        self.state.lock().unwrap()
    }

    /// The next request to this path meets the fault.
    pub(super) fn fail(&self, path: &'static str, fault: Fault) {
        self.state().faults.push_back((path, fault));
    }
}

impl FakeState {
    pub(super) fn active(&self) -> Vec<&FakeRun> {
        self.runs.iter().filter(|run| !run.deleted).collect()
    }

    pub(super) fn count(&self, path: &str) -> usize {
        self.asked
            .iter()
            .filter(|asked| asked.ends_with(path))
            .count()
    }
}

fn serve(stream: &TcpStream, state: &Mutex<FakeState>) {
    let mut reader = BufReader::new(stream);
    let mut head = Vec::new();
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).unwrap_or(0) == 0 {
            return;
        }
        if line.trim().is_empty() {
            break;
        }
        head.push(line.trim().to_owned());
    }
    let header = |name: &str| {
        let mut fields = head.iter().filter_map(|line| line.split_once(": "));
        fields
            .find(|(key, _)| key.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.to_owned())
    };
    let length = header("content-length").map_or(0, |length| length.parse().unwrap());
    let mut body = vec![0; length];
    if reader.read_exact(&mut body).is_err() {
        return;
    }
    let mut words = head[0].split(' ');
    let (method, url) = (words.next().unwrap(), words.next().unwrap());
    let (path, query) = url.split_once('?').unwrap_or((url, ""));
    let path = path.strip_prefix("/api/2.0/").unwrap_or(path);
    let path = path.strip_prefix("mlflow/").unwrap_or(path);
    let fault = {
        let mut state = state.lock().unwrap();
        state.asked.push(format!("{method} {path}"));
        state.authorization = header("authorization");
        let at = state.faults.iter().position(|(at, _)| path.starts_with(at));
        at.and_then(|at| state.faults.remove(at))
            .map(|(_, fault)| fault)
    };
    let act = || state.lock().unwrap().act(method, path, query, &body);
    let (status, text) = match fault {
        Some(Fault::LostRequest) => return,
        Some(Fault::LostAnswer) => {
            act();
            return;
        }
        Some(Fault::SlowAnswer(pause)) => {
            let answer = act();
            thread::sleep(pause);
            answer
        }
        Some(Fault::SlowAct(pause)) => {
            thread::sleep(pause);
            act()
        }
        Some(Fault::Says(status, text)) => (status, text.to_owned()),
        None => act(),
    };
    let mut stream = stream;
    // The client may have left.
    let _ = write!(
        stream,
        "HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{text}",
        text.len()
    );
}

impl FakeState {
    fn act(&mut self, method: &str, path: &str, query: &str, body: &[u8]) -> (u16, String) {
        if let Some(file) = path.strip_prefix("mlflow-artifacts/artifacts/") {
            assert_eq!(method, "PUT");
            self.files.insert(file.to_owned(), body.to_vec());
            return (200, String::new());
        }
        let body: Value = serde_json::from_slice(body).unwrap_or_default();
        match self.call(path, query, &body) {
            Ok(answer) => (200, answer.to_string()),
            Err((status, code, message)) => (
                status,
                json!({ "error_code": code, "message": message }).to_string(),
            ),
        }
    }

    fn call(&mut self, path: &str, query: &str, body: &Value) -> Answer {
        let text = |key: &str| body[key].as_str().unwrap_or_default().to_owned();
        match path {
            "experiments/get-by-name" => {
                let name = query.split_once('=').unwrap().1;
                let Some(deleted) = self.experiments.get(name) else {
                    return Err((404, "RESOURCE_DOES_NOT_EXIST", "no such experiment"));
                };
                let stage = if *deleted { "deleted" } else { "active" };
                Ok(json!({ "experiment": { "experiment_id": "1", "lifecycle_stage": stage } }))
            }
            "experiments/get" => match self.experiments.keys().next() {
                Some(name) if query == "experiment_id=1" => {
                    Ok(json!({ "experiment": { "experiment_id": "1", "name": name } }))
                }
                _ => Err((404, "RESOURCE_DOES_NOT_EXIST", "no such experiment")),
            },
            "experiments/create" => match self.experiments.contains_key(&text("name")) {
                true => Err((400, "RESOURCE_ALREADY_EXISTS", "it is there")),
                false => {
                    self.experiments.insert(text("name"), false);
                    Ok(json!({ "experiment_id": "1" }))
                }
            },
            "runs/create" => {
                let mut run = FakeRun {
                    id: format!("r{}", self.created),
                    status: "RUNNING".to_owned(),
                    ..FakeRun::default()
                };
                run.set_tags(body);
                self.created += 1;
                self.runs.push(run);
                Ok(json!({ "run": self.runs.last().unwrap().shown() }))
            }
            "runs/search" => {
                let filter = text("filter");
                let found = self.runs.iter().filter(|run| {
                    let id = &run.tags["accel.run_id"];
                    filter == format!("tags.`accel.run_id` = '{id}'")
                });
                Ok(json!({ "runs": found.map(FakeRun::shown).collect::<Vec<_>>() }))
            }
            "runs/get" => {
                let id = query.split_once('=').unwrap().1;
                let run = self.runs.iter().find(|run| run.id == id).unwrap();
                Ok(json!({ "run": run.shown() }))
            }
            "runs/log-batch" | "runs/update" | "runs/delete" | "runs/log-inputs" => {
                let longest_tag = self.longest_tag;
                let run = self.runs.iter_mut().find(|run| run.id == body["run_id"]);
                let run = run.unwrap();
                if run.deleted {
                    return Err((400, INVALID, "the run must be in the 'active' state"));
                }
                match path {
                    "runs/delete" => run.deleted = true,
                    "runs/update" => run.status = text("status"),
                    "runs/log-batch" => run.log(body, longest_tag)?,
                    _ => {}
                }
                Ok(json!({}))
            }
            "artifacts/list" => {
                let folder = query.split_once("path=").map_or("", |(_, path)| path);
                let folder = folder.replace("%2F", "/");
                let files = self.files.iter().filter_map(|(path, bytes)| {
                    let (_, path) = path.split_once("/artifacts/")?;
                    let (found, _) = path.rsplit_once('/').unwrap_or(("", path));
                    (found == folder)
                        .then(|| json!({ "path": path, "is_dir": false, "file_size": bytes.len() }))
                });
                Ok(json!({ "files": files.collect::<Vec<_>>() }))
            }
            _ => Err((404, "ENDPOINT_NOT_FOUND", "no such endpoint")),
        }
    }
}

impl FakeRun {
    fn shown(&self) -> Value {
        let pairs = |pairs: &BTreeMap<String, String>| -> Value {
            pairs
                .iter()
                .map(|(key, value)| json!({ "key": key, "value": value }))
                .collect()
        };
        let stage = if self.deleted { "deleted" } else { "active" };
        let metrics: Value = self
            .metrics
            .iter()
            .map(|metric| json!({ "key": metric.0, "step": metric.2 }))
            .collect();
        json!({
            "info": {
                "run_id": self.id, "experiment_id": "1", "lifecycle_stage": stage,
                "artifact_uri": format!("mlflow-artifacts:/1/{}/artifacts", self.id),
            },
            "data": { "tags": pairs(&self.tags), "params": pairs(&self.params), "metrics": metrics },
        })
    }

    fn set_tags(&mut self, body: &Value) {
        for tag in body["tags"].as_array().unwrap() {
            let text = |key: &str| tag[key].as_str().unwrap().to_owned();
            self.tags.insert(text("key"), text("value"));
        }
    }

    /// Logs a batch in the order and within the limits of MLflow.
    fn log(
        &mut self,
        body: &Value,
        longest_tag: usize,
    ) -> Result<(), (u16, &'static str, &'static str)> {
        let list = |key: &str| body[key].as_array().unwrap();
        let (metrics, params, tags) = (list("metrics"), list("params"), list("tags"));
        if metrics.len() > 1000
            || params.len() > 100
            || tags.len() > 100
            || metrics.len() + params.len() + tags.len() > 1000
        {
            return Err((400, INVALID, "too many"));
        }
        if tags
            .iter()
            .any(|tag| tag["value"].as_str().unwrap().len() > longest_tag)
        {
            return Err((400, INVALID, "a tag is too long"));
        }
        for param in params {
            let text = |key: &str| param[key].as_str().unwrap().to_owned();
            let first = self
                .params
                .entry(text("key"))
                .or_insert_with(|| text("value"));
            if *first != text("value") {
                return Err((400, INVALID, "changing param values is not allowed"));
            }
        }
        for metric in metrics {
            self.metrics.insert((
                metric["key"].as_str().unwrap().to_owned(),
                metric["timestamp"].as_u64().unwrap(),
                metric["step"].as_u64().unwrap(),
                metric["value"].to_string(),
            ));
        }
        self.set_tags(body);
        Ok(())
    }
}

type Answer = Result<Value, (u16, &'static str, &'static str)>;

const INVALID: &str = "INVALID_PARAMETER_VALUE";
