//! The real TensorBoard.

use std::fmt::Debug;
use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::NamedTempFile;
use ureq::Agent;

/// The program of TensorBoard that reads the files.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Loader {
    /// The data server, which is the default.
    Default,
    /// Python, which serves where there is no data server.
    Python,
}

impl Loader {
    pub(crate) const ALL: [Self; 2] = [Self::Default, Self::Python];
}

/// A TensorBoard that serves on a free port of loopback until it is dropped.
#[derive(Debug)]
pub(crate) struct Server {
    child: Child,
    agent: Agent,
    address: String,
    log: NamedTempFile,
}

const LIMIT: Duration = Duration::from_secs(90);

impl Server {
    pub(crate) fn start(venv: &Path, logs: &Path, loader: Loader) -> Self {
        let log = NamedTempFile::new().unwrap();
        let mut command = Command::new(venv.join("bin/python"));
        command.args(["-m", "tensorboard.main", "--host=127.0.0.1", "--port=0"]);
        command.args(["--reload_interval=1", "--logdir"]).arg(logs);
        // All points are shown instead of a sample.
        command.arg("--samples_per_plugin=scalars=1000000");
        if loader == Loader::Python {
            command.arg("--load_fast=false");
        }
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(log.path()).unwrap())
            .spawn()
            .unwrap();
        let agent = Agent::config_builder()
            .timeout_global(Some(Duration::from_secs(20)))
            .proxy(None)
            .build()
            .into();
        let mut server = Self {
            child,
            agent,
            address: String::new(),
            log,
        };
        server.address = until("TensorBoard says where it is", || {
            let ended = server.child.try_wait().unwrap();
            let log = fs::read_to_string(server.log.path()).unwrap();
            assert!(ended.is_none(), "TensorBoard ended:\n{log}");
            let start = log.find("http://127.0.0.1:")?;
            let (address, _) = log[start..].split_once("/ ")?;
            Some(address.to_owned())
        });
        server
    }

    /// Returns `None` if there is no such run or tag.
    pub(crate) fn try_ask(&self, path: &str, query: &[(&str, &str)]) -> Option<Value> {
        let request = self.agent.get(format!("{}/data/{path}", self.address));
        let answer = request.query_pairs(query.iter().copied()).call();
        match answer {
            Err(ureq::Error::StatusCode(404)) => None,
            answer => Some(answer.unwrap().body_mut().read_json().unwrap()),
        }
    }

    pub(crate) fn ask(&self, path: &str, query: &[(&str, &str)]) -> Value {
        self.try_ask(path, query)
            .unwrap_or_else(|| panic!("{path} has no {query:?}"))
    }

    pub(crate) fn scalars(&self, run: &str, tag: &str) -> Option<Value> {
        self.try_ask("plugin/scalars/scalars", &[("run", run), ("tag", tag)])
    }

    /// Returns the tags of a plugin in a run.
    pub(crate) fn tags(&self, plugin: &str, run: &str) -> Vec<String> {
        let tags = self.ask(&format!("plugin/{plugin}/tags"), &[]);
        match &tags[run] {
            Value::Object(tags) => tags.keys().cloned().collect(),
            Value::Array(tags) => tags
                .iter()
                .map(|tag| tag.as_str().unwrap().to_owned())
                .collect(),
            _ => Vec::new(),
        }
    }

    /// Returns the bytes of an image and its media type.
    pub(crate) fn image(&self, query: &str) -> (Vec<u8>, String) {
        let address = &self.address;
        let address = format!("{address}/data/plugin/images/individualImage?{query}");
        let mut answer = self.agent.get(address).call().unwrap();
        let media_type = answer.headers()["content-type"]
            .to_str()
            .unwrap()
            .to_owned();
        (answer.body_mut().read_to_vec().unwrap(), media_type)
    }

    /// Returns the hyperparameters, ends and last metrics of the run `name`.
    pub(crate) fn session(&self, name: &str) -> Option<Value> {
        let address = format!("{}/data/plugin/hparams/session_groups", self.address);
        let question = json!({
            "experimentName": "",
            "allowedStatuses": ["STATUS_UNKNOWN", "STATUS_SUCCESS", "STATUS_FAILURE", "STATUS_RUNNING"],
            "colParams": [],
            "startIndex": 0,
            "sliceSize": 100,
        });
        let answer = self.agent.post(address).send_json(question);
        let answer: Value = answer.unwrap().body_mut().read_json().unwrap();
        let groups = answer["sessionGroups"].as_array()?;
        groups.iter().find(|group| group["name"] == name).cloned()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The data server ends with it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Asks until there is an answer.
pub(crate) fn until<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(start.elapsed() < LIMIT, "waited for: {what}");
        thread::sleep(Duration::from_millis(100));
    }
}

/// Asks until the answer is as expected, and panics with the last answer if that takes too long.
pub(crate) fn until_equal<T: Debug + PartialEq>(expected: &T, mut ask: impl FnMut() -> T) {
    let start = Instant::now();
    loop {
        let found = ask();
        if found == *expected {
            return;
        }
        let [expected, found] = [expected, &found].map(|answer| {
            let answer = format!("{answer:?}");
            answer.chars().take(1000).collect::<String>()
        });
        assert!(
            start.elapsed() < LIMIT,
            "expected {expected}, found {found}"
        );
        thread::sleep(Duration::from_millis(100));
    }
}
