//! The sink that sends a run's progress to Kubeflow Trainer.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, UNIX_EPOCH};

use accelerator_host::variable;
use serde_json::{Value, json};
use ureq::Agent;
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};

use crate::error::{Error, Kind, Result};
use crate::record::{EndStatus, Entry, Record};
use crate::sink::{Origin, RunInfo, Sink, SinkPosition, http_config};

#[cfg(test)]
mod tests;

/// Tells Kubeflow Trainer how far a run is: the `trainerStatus` of the TrainJob whose pod this process runs in.
///
/// Its server gets the greatest step and epoch and the last value of each series (254 of them, with names of up to 64
/// characters), and the percentage and the seconds that are left where hyperparameters say how long the run is:
/// `max_steps`, or `num_train_epochs` or `epochs` with epochs logged. It gets this every 5 seconds at most, and at the
/// end. Training continues if it cannot be reached. Of several runs in one TrainJob, the one that wrote last is shown.
///
/// The protocol is that of Kubeflow Trainer 2.2 (KEP-2779), whose controller needs the feature gate `TrainJobStatus`.
///
/// ```no_run
/// use accelerator_track::{KubeflowSink, Run};
///
/// let mut run = Run::builder("mnist");
/// if let Some(sink) = KubeflowSink::from_env()? {
///     run = run.sink(sink);
/// }
/// # Ok::<(), accelerator_track::Error>(())
/// ```
pub struct KubeflowSink {
    url: String,
    ca_cert: PathBuf,
    token: PathBuf,
    agent: Agent,
    progress: Progress,
    changed: Changed,
    sent: Option<Instant>,
}

impl KubeflowSink {
    /// Delivers to the server that Kubeflow Trainer's variables name: `KUBEFLOW_TRAINER_SERVER_URL`, with the files
    /// `KUBEFLOW_TRAINER_SERVER_CA_CERT` and `KUBEFLOW_TRAINER_SERVER_TOKEN`. `None` if the first is not set.
    ///
    /// # Errors
    ///
    /// If one of the others is not set, or the certificate cannot be read.
    pub fn from_env() -> Result<Option<Self>> {
        let Some(url) = variable(URL) else {
            return Ok(None);
        };
        let Some(url) = url.to_str() else {
            let message = format!("expected the address of a server in {URL}, found {url:?}");
            return Err(Error::new(Kind::Misuse, message));
        };
        let path = |name: &str| {
            variable(name).map(PathBuf::from).ok_or_else(|| {
                let message = format!(
                    "expected the path of a file in {name}, since {URL} is set, found nothing"
                );
                Error::new(Kind::Misuse, message)
            })
        };
        Self::new(url, path(CA_CERT)?, path(TOKEN)?).map(Some)
    }

    /// Delivers to the server at a URL, with the files of the certificate that signs its own, and of the token that it
    /// asks for.
    fn new(url: &str, ca_cert: PathBuf, token: PathBuf) -> Result<Self> {
        Ok(Self {
            url: url.to_owned(),
            agent: agent(&ca_cert)?,
            ca_cert,
            token,
            progress: Progress::default(),
            changed: Changed::No,
            sent: None,
        })
    }

    fn send(&self) -> Result<()> {
        // It is another one every hour.
        let token = std::fs::read_to_string(&self.token);
        let token = token.map_err(|error| Error::io("read", &self.token, error))?;
        let lost = |error: ureq::Error| {
            let message = format!("{} cannot be told of the run: {error}", self.name());
            Error::new(Kind::Remote, message).with_source(error)
        };
        let mut answer = self
            .agent
            .post(&self.url)
            .header("authorization", format!("Bearer {}", token.trim()))
            .header("content-type", "application/json")
            .send(self.progress.status().to_string())
            .map_err(lost)?;
        let status = answer.status();
        if status.is_success() {
            return Ok(());
        }
        let said = answer.body_mut().with_config().limit(LONGEST_ANSWER);
        let said = said.read_to_string().unwrap_or_default();
        // The same would be refused again.
        let is_final = status.is_client_error() && !AGAIN.contains(&status.as_u16());
        let kind = if is_final { Kind::Denied } else { Kind::Remote };
        let message = serde_json::from_str::<Value>(&said);
        let message = message
            .ok()
            .and_then(|status| Some(status["message"].as_str()?.to_owned()));
        let said = message.unwrap_or(said);
        let message = format!(
            "{} answers with {}: {}",
            self.name(),
            status.as_u16(),
            said.trim()
        );
        Err(Error::new(kind, message))
    }
}

/// Asks servers whose certificates one of a file has signed.
fn agent(ca_cert: &Path) -> Result<Agent> {
    let pem = std::fs::read(ca_cert).map_err(|error| Error::io("read", ca_cert, error))?;
    let wrong = |found: &str| {
        let path = ca_cert.display();
        let message = format!(
            "expected a certificate as PEM in {path}, found {found}; Kubeflow Trainer mounts it"
        );
        Error::new(Kind::Misuse, message)
    };
    let mut roots = Vec::new();
    for item in parse_pem(&pem) {
        if let PemItem::Certificate(certificate) =
            item.map_err(|error| wrong("a broken one").with_source(error))?
        {
            roots.push(certificate);
        }
    }
    if roots.is_empty() {
        return Err(wrong("none"));
    }
    let tls = TlsConfig::builder()
        .root_certs(RootCerts::from(roots))
        .build();
    Ok(http_config()
        .tls_config(tls)
        // The server is in this cluster.
        .proxy(None)
        .timeout_global(Some(REQUEST_TIMEOUT))
        .build()
        .new_agent())
}

impl Sink for KubeflowSink {
    fn name(&self) -> String {
        format!("Kubeflow Trainer at {}", self.url)
    }

    fn open(&mut self, _: &RunInfo) -> Result<SinkPosition> {
        // The server's certificates also change.
        self.agent = agent(&self.ca_cert)?;
        self.progress = Progress::default();
        self.changed = Changed::No;
        // A replay of the journal does not send again what was sent.
        self.sent = Some(Instant::now());
        Ok(SinkPosition::default())
    }

    fn write(&mut self, origin: Origin, entry: &Entry) -> Result<()> {
        if origin == Origin::Run {
            let changed = self.progress.take(entry);
            if changed != Changed::No {
                self.changed = changed;
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        let is_early = self.sent.is_some_and(|sent| sent.elapsed() < INTERVAL);
        if self.changed == Changed::No || is_early && self.changed != Changed::Ended {
            return Ok(());
        }
        self.send()?;
        self.changed = Changed::No;
        self.sent = Some(Instant::now());
        Ok(())
    }
}

impl fmt::Debug for KubeflowSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KubeflowSink")
            .field("url", &self.url)
            .field("token", &self.token)
            .finish_non_exhaustive()
    }
}

const URL: &str = "KUBEFLOW_TRAINER_SERVER_URL";
const CA_CERT: &str = "KUBEFLOW_TRAINER_SERVER_CA_CERT";
const TOKEN: &str = "KUBEFLOW_TRAINER_SERVER_TOKEN";
/// The time between two requests, so that the server of a cluster is not overrun.
const INTERVAL: Duration = Duration::from_secs(5);
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
const LONGEST_ANSWER: u64 = 4096;
/// Answers of a server that may take the same later.
const AGAIN: [u16; 3] = [408, 425, 429];

/// The progress of a run so far.
#[derive(Debug, Default)]
struct Progress {
    keys: HashMap<u32, String>,
    /// The last value of each series.
    values: BTreeMap<String, f64>,
    step: Option<u64>,
    epoch: Option<f64>,
    max_steps: Option<f64>,
    epochs: Option<f64>,
    /// The first metrics of this attempt: when, and how much was done.
    first: Option<(u64, f64)>,
    last_ms: u64,
    has_finished: bool,
}

impl Progress {
    /// Takes an entry, and returns what it changes.
    fn take(&mut self, entry: &Entry) -> Changed {
        match &entry.record {
            Record::Series { i, key } => {
                self.keys.insert(*i, key.clone());
                return Changed::No;
            }
            Record::Attempt { .. } => {
                self.first = None;
                self.has_finished = false;
            }
            Record::Param { set } => self.read_length(set),
            Record::Metrics(metrics) => {
                // A value for an earlier step, such as a test's mean at step 1, does not turn it back.
                self.step = self.step.max(Some(metrics.step));
                self.epoch = match (self.epoch, metrics.epoch) {
                    (Some(known), Some(epoch)) => Some(known.max(epoch)),
                    (known, epoch) => epoch.or(known),
                };
                for point in &metrics.points {
                    if let Some(key) = self.keys.get(&point.series) {
                        self.values.insert(key.clone(), point.value.0);
                    }
                }
                if let (None, Some(done)) = (self.first, self.done()) {
                    self.first = Some((entry.ms, done));
                }
            }
            Record::End { status, .. } => {
                self.has_finished = *status == EndStatus::Finished;
                self.last_ms = entry.ms;
                return Changed::Ended;
            }
            _ => return Changed::No,
        }
        self.last_ms = entry.ms;
        Changed::Yes
    }

    /// Returns the status for Kubeflow Trainer. A run that has not finished is at most 99 percent done.
    fn status(&self) -> Value {
        let mut status = json!({});
        let done = self.done().map(|done| (done * 100.0) as u64);
        let percent = match (self.has_finished, done) {
            (true, _) => Some(100),
            (false, done) => done.map(|percent| percent.min(99)),
        };
        if let Some(percent) = percent {
            status["progressPercentage"] = json!(percent);
        }
        if let Some(seconds) = self.remaining_seconds() {
            status["estimatedRemainingSeconds"] = json!(seconds);
        }
        let metric = |name: &str, value: String| json!({"name": name, "value": value});
        let step = self.step.map(|step| metric("step", step.to_string()));
        let epoch = self.epoch.map(|epoch| metric("epoch", epoch.to_string()));
        // With an exponent, every number is short enough.
        let values = self
            .values
            .iter()
            .filter(|(name, _)| name.chars().count() <= LONGEST_NAME);
        let values = values.map(|(name, value)| metric(name, format!("{value:?}")));
        let metrics: Vec<_> = step
            .into_iter()
            .chain(epoch)
            .chain(values)
            .take(MOST_METRICS)
            .collect();
        status["metrics"] = json!(metrics);
        let time = UNIX_EPOCH + Duration::from_millis(self.last_ms);
        status["lastUpdatedTime"] = json!(humantime::format_rfc3339_seconds(time).to_string());
        json!({ "trainerStatus": status })
    }

    /// The share that is done, from 0 to 1: of `max_steps`, else of the epochs, where hyperparameters name either.
    fn done(&self) -> Option<f64> {
        let step = self.step.map(|step| step as f64);
        let of_steps = step.zip(self.max_steps);
        let (at, whole) = of_steps.or(self.epoch.zip(self.epochs))?;
        Some((at / whole).clamp(0.0, 1.0))
    }

    fn remaining_seconds(&self) -> Option<u64> {
        if self.has_finished {
            return Some(0);
        }
        let (begun, before) = self.first?;
        let done = self.done().filter(|&done| done > before)?;
        let seconds = self.last_ms.saturating_sub(begun) as f64 / 1e3;
        // The field has 32 bits.
        let left = seconds * (1.0 - done) / (done - before);
        Some((left as u64).min(i32::MAX as u64))
    }

    fn read_length(&mut self, set: &BTreeMap<String, Value>) {
        let positive = |name: &str| {
            let value = set.get(name).and_then(Value::as_f64);
            value.filter(|value| *value > 0.0 && value.is_finite())
        };
        self.max_steps = positive("max_steps").or(self.max_steps);
        let epochs = positive("num_train_epochs").or_else(|| positive("epochs"));
        self.epochs = epochs.or(self.epochs);
    }
}

/// The number of metrics that the TrainJob's resource accepts; it refuses a status that has more.
const MOST_METRICS: usize = 256;
const LONGEST_NAME: usize = 64;

/// The effect of an entry.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Changed {
    No,
    Yes,
    /// The status has changed, and the attempt has ended.
    Ended,
}
