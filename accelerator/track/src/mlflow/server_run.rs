//! A run on an MLflow server, and the position of its delivery.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use accelerator_host::fs::{Durability, Replace};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::client::{Failure, MlflowServer, member};
use crate::error::{Error, Kind, Result};
use crate::record::RunId;
use crate::run_files::{MLFLOW, new_of};
use crate::sink::{RunInfo, SinkPosition};

/// A run on an MLflow server.
#[derive(Debug)]
pub(super) struct ServerRun {
    pub(super) server: MlflowServer,
    id: String,
    experiment_id: String,
    artifact_uri: String,
    /// Sizes of the server's files by name, of each folder that was listed.
    listed: HashMap<String, HashMap<String, u64>>,
}

/// Parameters and tags that the server has.
#[derive(Debug, Default)]
pub(super) struct ServerData {
    pub(super) params: HashMap<String, String>,
    pub(super) tags: HashSet<String>,
    /// The greatest step with an epoch.
    pub(super) epoch_at: Option<u64>,
}

impl MlflowServer {
    /// Opens a run in an experiment, and creates what does not exist. It is found by its tag `accel.run_id`, so there
    /// is one, however often the program or the connection ends in the middle.
    ///
    /// `known` is the run's id on the server, from an earlier time.
    pub(super) fn open_run(
        &self,
        experiment: &str,
        run: &RunInfo,
        known: Option<&str>,
    ) -> Result<ServerRun> {
        let experiment_id = self.open_experiment(experiment)?;
        let body = json!({
            "experiment_id": experiment_id,
            "start_time": run.created_ms,
            "run_name": run.name,
            "tags": [
                { "key": RUN_ID, "value": run.id.to_string() },
                { "key": "mlflow.runName", "value": run.name },
                { "key": "mlflow.source.type", "value": "LOCAL" },
            ],
        });
        self.create_once(
            || self.find_run(&experiment_id, run.id, known),
            "runs/create",
            &body,
            |answer| self.read_run(answer.get("run").unwrap_or(answer)),
        )
    }

    fn open_experiment(&self, name: &str) -> Result<String> {
        let body = json!({ "name": name });
        self.create_once(
            || self.find_experiment(name),
            "experiments/create",
            &body,
            |answer| member(answer, "/experiment_id").map(str::to_owned),
        )
        // Another program made it in between.
        .or_else(|error| self.find_experiment(name)?.ok_or(error))
    }

    /// The name of the experiment with that id.
    pub(super) fn experiment_name(&self, id: &str) -> Result<String> {
        match self.get("experiments/get", &[("experiment_id", id)]) {
            Ok(answer) => Ok(member(&answer, "/experiment/name")?.to_owned()),
            Err(failure) if failure.is(DOES_NOT_EXIST) => Err(Error::new(
                Kind::Remote,
                format!(
                    "MLflow at {} has no experiment {id}, which MLFLOW_EXPERIMENT_ID names: choose one that is there, or \
                     set MLFLOW_EXPERIMENT_NAME, and it is made",
                    self.address()
                ),
            )),
            Err(failure) => Err(failure.into()),
        }
    }

    fn find_experiment(&self, name: &str) -> Result<Option<String>> {
        let answer = match self.get("experiments/get-by-name", &[("experiment_name", name)]) {
            Ok(answer) => answer,
            Err(failure) if failure.is(DOES_NOT_EXIST) => return Ok(None),
            Err(failure) => return Err(failure.into()),
        };
        let id = member(&answer, "/experiment/experiment_id")?;
        if member(&answer, "/experiment/lifecycle_stage")? == DELETED {
            let address = self.address();
            return Err(Error::new(
                Kind::Remote,
                format!(
                    "the experiment {name:?} was deleted from MLflow at {address}; restore it there with `mlflow experiments \
                     restore --experiment-id {id}`, or choose another"
                ),
            ));
        }
        Ok(Some(id.to_owned()))
    }

    fn find_run(
        &self,
        experiment_id: &str,
        id: RunId,
        known: Option<&str>,
    ) -> Result<Option<ServerRun>> {
        let body = json!({
            "experiment_ids": [experiment_id],
            "filter": format!("tags.`{RUN_ID}` = '{id}'"),
            "run_view_type": "ALL",
            "max_results": 100,
            "order_by": ["attributes.start_time ASC"],
        });
        let answer = self.post("runs/search", &body)?;
        let runs = answer.get("runs").and_then(Value::as_array);
        let (mut active, mut deleted) = (Vec::new(), Vec::new());
        for run in runs.into_iter().flatten() {
            match member(run, "/info/lifecycle_stage")? {
                DELETED => deleted.push(member(run, "/info/run_id")?),
                _ => active.push(run),
            }
        }
        let Some(first) = active.first() else {
            let Some(id) = deleted.first() else {
                return Ok(None);
            };
            return Err(self.deleted_run(id));
        };
        let is_known = |run: &Value| {
            known.is_some_and(|known| member(run, "/info/run_id").is_ok_and(|id| id == known))
        };
        let kept = active.iter().find(|run| is_known(run));
        let kept = kept.or_else(|| active.iter().find(|run| has_data(run)));
        let kept = self.read_run(kept.unwrap_or(first))?;
        for run in active {
            let double = member(run, "/info/run_id")?;
            if double == kept.id || has_data(run) {
                continue;
            }
            // A request to create it took longer than its answer was waited for.
            tracing::info!(
                kept = kept.id,
                double,
                "MLflow has a run twice; the empty one is deleted"
            );
            self.post("runs/delete", &json!({ "run_id": double }))?;
        }
        Ok(Some(kept))
    }

    fn deleted_run(&self, id: &str) -> Error {
        let address = self.address();
        Error::new(
            Kind::Remote,
            format!(
                "the run {id} was deleted from MLflow at {address}; restore it there with `mlflow runs restore --run-id {id}`, \
                 or choose another experiment"
            ),
        )
    }

    fn read_run(&self, run: &Value) -> Result<ServerRun> {
        Ok(ServerRun {
            server: self.clone(),
            id: member(run, "/info/run_id")?.to_owned(),
            experiment_id: member(run, "/info/experiment_id")?.to_owned(),
            artifact_uri: member(run, "/info/artifact_uri")?.to_owned(),
            listed: HashMap::new(),
        })
    }
}

impl ServerRun {
    /// The run's id on the server.
    pub(super) fn id(&self) -> &str {
        &self.id
    }

    /// Sends a file to the run's artifacts, as `path`, which has `/` between folders. The server keeps a file that has
    /// this name and size.
    pub(super) fn send_file(&mut self, path: &str, file: &Path) -> Result<(), Failure> {
        let root = self.artifact_root()?;
        let read = file.metadata();
        let size = read.map_err(|error| Error::io("read", file, error))?.len();
        let (folder, name) = path.rsplit_once('/').unwrap_or(("", path));
        if !self.listed.contains_key(folder) {
            let files = self.list(folder)?;
            self.listed.insert(folder.to_owned(), files);
        }
        let files = self.listed.entry(folder.to_owned()).or_default();
        if files.get(name) == Some(&size) {
            return Ok(());
        }
        self.server.put_file(&format!("{root}/{path}"), file)?;
        files.insert(name.to_owned(), size);
        Ok(())
    }

    /// Returns the folder of its artifacts among the server's artifacts.
    pub(super) fn artifact_root(&self) -> Result<String> {
        // With three slashes or one; two and a host are those of another server.
        let path = self.artifact_uri.strip_prefix("mlflow-artifacts:");
        let path = path.map(|path| path.strip_prefix("//").unwrap_or(path));
        match path.and_then(|path| path.strip_prefix('/')) {
            Some(path) => Ok(path.trim_end_matches('/').to_owned()),
            None => Err(Error::new(
                Kind::Remote,
                format!(
                    "MLflow at {} does not take files: artifacts of run {} are at {}; start it with --serve-artifacts and \
                     --artifacts-destination, and use a new experiment",
                    self.server.address(),
                    self.id,
                    self.artifact_uri
                ),
            )),
        }
    }

    /// A call about this run that changes nothing when it is made twice.
    pub(super) fn update(&self, call: &str, mut body: Value) -> Result<(), Failure> {
        body["run_id"] = self.id.as_str().into();
        self.server.post(call, &body).map(|_| ())
    }

    pub(super) fn data(&self) -> Result<ServerData> {
        let answer = self.server.get("runs/get", &[("run_id", &self.id)])?;
        if member(&answer, "/run/info/lifecycle_stage")? == DELETED {
            return Err(self.server.deleted_run(&self.id));
        }
        let mut data = ServerData::default();
        for param in entries(&answer, "/run/data/params") {
            let (key, value) = (member(param, "/key")?, member(param, "/value")?);
            data.params.insert(key.to_owned(), value.to_owned());
        }
        for tag in entries(&answer, "/run/data/tags") {
            data.tags.insert(member(tag, "/key")?.to_owned());
        }
        for metric in entries(&answer, "/run/data/metrics") {
            if member(metric, "/key")? == EPOCH {
                data.epoch_at = metric.get("step").and_then(integer);
            }
        }
        Ok(data)
    }

    /// Deletes the empty doubles that requests without an answer made late.
    pub(super) fn delete_doubles(&self, id: RunId) -> Result<()> {
        let found = self
            .server
            .find_run(&self.experiment_id, id, Some(&self.id));
        found.map(|_| ())
    }

    fn list(&self, folder: &str) -> Result<HashMap<String, u64>> {
        let mut files = HashMap::new();
        let mut page = String::new();
        loop {
            let mut query = vec![("run_id", self.id.as_str())];
            if !folder.is_empty() {
                query.push(("path", folder));
            }
            if !page.is_empty() {
                query.push(("page_token", &page));
            }
            let answer = self.server.get("artifacts/list", &query)?;
            for file in entries(&answer, "/files") {
                let path = member(file, "/path")?;
                let name = path.rsplit('/').next().unwrap_or(path);
                if let Some(size) = file.get("file_size").and_then(integer) {
                    files.insert(name.to_owned(), size);
                }
            }
            match answer.get("next_page_token").and_then(Value::as_str) {
                Some(next) if !next.is_empty() && next != page => page = next.to_owned(),
                _ => return Ok(files),
            }
        }
    }
}

/// Parses an integer; some versions write one of 64 bits as a string in JSON.
fn integer(value: &Value) -> Option<u64> {
    match value {
        Value::String(text) => text.parse().ok(),
        value => value.as_u64(),
    }
}

fn entries<'a>(answer: &'a Value, pointer: &str) -> impl Iterator<Item = &'a Value> + use<'a> {
    let entries = answer.pointer(pointer).and_then(Value::as_array);
    entries.into_iter().flatten()
}

fn has_data(run: &Value) -> bool {
    entries(run, "/data/metrics").next().is_some() || entries(run, "/data/params").next().is_some()
}

/// The metric with the epoch of each step.
pub(super) const EPOCH: &str = "epoch";
pub(super) const RUN_ID: &str = "accel.run_id";
const DOES_NOT_EXIST: &str = "RESOURCE_DOES_NOT_EXIST";
const DELETED: &str = "deleted";

/// The contents of `mlflow.json`. Without it everything is sent again, which changes nothing on the server.
#[derive(Debug, Eq, PartialEq, Serialize, Deserialize)]
pub(super) struct Cursor {
    pub(super) server: String,
    pub(super) experiment: String,
    /// The server's.
    pub(super) run_id: String,
    pub(super) position: SinkPosition,
}

/// The file of a [`Cursor`].
#[derive(Debug)]
pub(super) struct CursorFile(PathBuf);

impl CursorFile {
    pub(super) fn in_folder(folder: &Path) -> Self {
        Self(folder.join(MLFLOW))
    }

    /// Reads it; `None` if it does not exist, or is incomplete.
    pub(super) fn read(&self) -> Option<Cursor> {
        serde_json::from_slice(&fs::read(&self.0).ok()?).ok()
    }

    pub(super) fn write(&self, cursor: &Cursor) -> Result<()> {
        let file = Replace::new(&self.0, Durability::Cached).draft(new_of(&self.0));
        serde_json::to_vec(cursor)
            .map_err(io::Error::from)
            .and_then(|text| file.write(|file| file.write_all(&text)))
            .map_err(|error| Error::io("write", &self.0, error))
    }
}
