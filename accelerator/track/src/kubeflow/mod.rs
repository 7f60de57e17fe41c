//! The sink that tells Kubeflow Trainer how far a run is.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use accelerator_env::variable;
use serde_json::Value;
use ureq::Agent;
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};

use crate::error::{Error, Kind, Result};
use crate::http;
use crate::record::Entry;
use crate::sink::{Origin, RunInfo, Sink, SinkPosition};
use progress::{Changed, Progress};

mod progress;
#[cfg(test)]
mod tests;

/// Tells Kubeflow Trainer how far a run is: the `trainerStatus` of the TrainJob whose pod this process runs in.
///
/// Its server gets the greatest step and epoch and the last value of each series (254 of them, with names of up to 64
/// characters), and the percentage and the seconds that are left where hyperparameters say how long the run is:
/// `max_steps`, or `num_train_epochs` or `epochs` with epochs logged. It gets this every 5 seconds at most, and at the end.
/// Where it cannot be reached, training goes on. Of several runs in one TrainJob, the one that wrote last is shown.
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
    /// To the server that Kubeflow Trainer's variables name: `KUBEFLOW_TRAINER_SERVER_URL`, with the files
    /// `KUBEFLOW_TRAINER_SERVER_CA_CERT` and `KUBEFLOW_TRAINER_SERVER_TOKEN`. None where the first is not set.
    ///
    /// # Errors
    ///
    /// If one of the others is not set, or the certificate cannot be read.
    ///
    /// ```
    /// // This is no pod of a TrainJob.
    /// assert!(accelerator_track::KubeflowSink::from_env()?.is_none());
    /// # Ok::<(), accelerator_track::Error>(())
    /// ```
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
        Self::new(url, &path(CA_CERT)?, path(TOKEN)?).map(Some)
    }

    /// To the server at a URL, with the files of the certificate that signs its own, and of the token that it asks for.
    ///
    /// # Errors
    ///
    /// If the certificate cannot be read.
    ///
    /// ```
    /// use accelerator_track::KubeflowSink;
    ///
    /// let error = KubeflowSink::new("https://trainer/status", "no/ca.crt".as_ref(), "no/token").unwrap_err();
    /// assert!(error.is_not_found());
    /// ```
    pub fn new(url: &str, ca_cert: &Path, token: impl Into<PathBuf>) -> Result<Self> {
        Ok(Self {
            url: url.to_owned(),
            ca_cert: ca_cert.to_owned(),
            token: token.into(),
            agent: agent(ca_cert)?,
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
    Ok(http::config()
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
        // The server's certificates change, too.
        self.agent = agent(&self.ca_cert)?;
        self.progress = Progress::default();
        self.changed = Changed::No;
        // What was told before is not told again while the journal is replayed.
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
/// Between two requests, so that the server of a cluster is not overrun.
const INTERVAL: Duration = Duration::from_secs(5);
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
const LONGEST_ANSWER: u64 = 4096;
/// Answers of a server that may take the same later.
const AGAIN: [u16; 3] = [408, 425, 429];
