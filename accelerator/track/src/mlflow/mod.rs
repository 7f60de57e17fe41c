//! The sink for an MLflow server.

use std::borrow::Cow;
use std::cell::Cell;
use std::collections::VecDeque;
use std::fs;

use serde_json::json;

use crate::artifact::{ArtifactStore, StoredArtifact};
use crate::error::{Error, Kind, Result};
use crate::record::{Entry, Record};
use crate::sink::{Delivery, Origin, RunInfo, Sink, SinkPosition};
use batch::{Batch, Content, Item, MadeArtifact, Queued, server_path};
use client::Failure;
pub use client::MlflowServer;
use convert::{Converter, tag};
use server_run::{Cursor, CursorFile, ServerRun};

mod batch;
mod client;
mod convert;
#[cfg(test)]
mod fake;
mod server_run;
#[cfg(test)]
mod tests;

/// Delivers a run to an experiment on an MLflow server.
///
/// Metrics, parameters and tags have the names of the journal, where MLflow takes them; the epoch is the metric
/// `epoch`, and what a rank's host measured is `system/rank-R/NAME`. A parameter keeps its first value there; a later
/// one is the tag `param.changed.NAME`. Texts, images, histograms and plots are artifacts, as
/// `text/train/sample/100.md`. An artifact that the run uses is a dataset; the files of one that it makes are in
/// `artifacts/NAME/vN`, with its manifest, in which references are, beside as `artifacts/NAME/vN.json`.
///
/// Nothing that a server has of a metric can be taken back. So points are delivered when a checkpoint or the end of the
/// run settles them; [`live`](Self::live) delivers them at once. What was delivered is in `mlflow.json` in the run's
/// folder. A request without an answer is sent again unchanged, which changes nothing on a server with a database; so
/// everything is there once.
///
/// ```no_run
/// use accelerator_track::{MlflowServer, MlflowSink};
///
/// let server = MlflowServer::new("http://127.0.0.1:5000")?;
/// let sink = MlflowSink::new(server, "digits");
/// # Ok::<(), accelerator_track::Error>(())
/// ```
#[derive(Debug)]
pub struct MlflowSink {
    server: MlflowServer,
    experiment: Experiment,
    delivery: Delivery,
    open: Option<OpenRun>,
}

/// The experiment of a run.
#[derive(Debug, Eq, PartialEq)]
enum Experiment {
    /// It is created if it does not exist.
    Name(String),
    Id(String),
}

#[derive(Debug)]
struct OpenRun {
    info: RunInfo,
    run: ServerRun,
    file: CursorFile,
    /// The position in the file.
    cursor: Cursor,
    /// The position of all that was written.
    written: SinkPosition,
    converter: Converter,
    queue: VecDeque<Queued>,
    has_warned: Cell<bool>,
}

enum Sent {
    /// The number of items that are done.
    Items(usize),
    /// Some are others now.
    Changed,
    /// The server takes none of so many, as they are.
    Refused { items: usize, error: Error },
}

impl MlflowSink {
    /// Delivers to an experiment, which is created if it does not exist.
    #[must_use]
    pub fn new(server: MlflowServer, experiment: impl Into<String>) -> Self {
        Self {
            server,
            experiment: Experiment::Name(experiment.into()),
            delivery: Delivery::Settled,
            open: None,
        }
    }

    /// Delivers to the server and the experiment that MLflow's own variables name: those of
    /// [`MlflowServer::from_env`], and `MLFLOW_EXPERIMENT_NAME` or, if that is not set, `MLFLOW_EXPERIMENT_ID`; without
    /// both it is `Default`.
    ///
    /// # Errors
    ///
    /// If they name no server.
    pub fn from_env() -> Result<Self> {
        Ok(Self::to(MlflowServer::from_env()?))
    }

    /// Delivers to a server, and to the experiment that MLflow's variables name, as [`from_env`](Self::from_env) does.
    #[must_use]
    pub fn to(server: MlflowServer) -> Self {
        Self {
            experiment: Experiment::by(|name| std::env::var(name).ok()),
            ..Self::new(server, "")
        }
    }

    /// Delivers at once. If the program resumes from a checkpoint, the server then shows points that a resume
    /// superseded beside those that count, since it can take none back.
    ///
    /// ```
    /// use accelerator_track::{Delivery, MlflowServer, MlflowSink, Sink};
    ///
    /// let sink = MlflowSink::new(MlflowServer::new("http://localhost:5000")?, "digits");
    /// assert_eq!(sink.delivery(), Delivery::Settled);
    /// assert_eq!(sink.live().delivery(), Delivery::Live);
    /// # Ok::<(), accelerator_track::Error>(())
    /// ```
    #[must_use]
    pub fn live(self) -> Self {
        let delivery = Delivery::Live;
        Self { delivery, ..self }
    }
}

impl Experiment {
    fn by(variable: impl Fn(&str) -> Option<String>) -> Self {
        let set = |name| variable(name).filter(|value| !value.is_empty());
        match (set("MLFLOW_EXPERIMENT_NAME"), set("MLFLOW_EXPERIMENT_ID")) {
            (Some(name), _) => Self::Name(name),
            (None, Some(id)) => Self::Id(id),
            (None, None) => Self::Name("Default".to_owned()),
        }
    }
}

impl Sink for MlflowSink {
    fn name(&self) -> String {
        format!("MLflow at {}", self.server.address())
    }

    fn sync_options(&self) -> Vec<String> {
        let place = format!("mlflow:{}", self.server.address());
        let mut options = vec!["--to".to_owned(), place];
        // An id comes from the environment.
        if let Experiment::Name(name) = &self.experiment {
            options.extend(["--experiment".to_owned(), name.clone()]);
        }
        if self.delivery == Delivery::Live {
            options.push("--live".to_owned());
        }
        options
    }

    fn delivery(&self) -> Delivery {
        self.delivery
    }

    fn open(&mut self, run: &RunInfo) -> Result<SinkPosition> {
        self.open = None;
        let file = CursorFile::in_folder(&run.folder);
        let server = self.server.address();
        let experiment = match &self.experiment {
            Experiment::Name(name) => name.clone(),
            Experiment::Id(id) => self.server.experiment_name(id)?,
        };
        let known = file
            .read()
            .filter(|cursor| cursor.server == server && cursor.experiment == experiment);
        let known_id = known.as_ref().map(|cursor| cursor.run_id.as_str());
        let server_run = self.server.open_run(&experiment, run, known_id)?;
        let known = known.filter(|cursor| cursor.run_id == server_run.id());
        let cursor = known.unwrap_or_else(|| Cursor {
            server: server.to_owned(),
            experiment,
            run_id: server_run.id().to_owned(),
            position: SinkPosition::default(),
        });
        file.write(&cursor)?;
        let position = cursor.position.clone();
        self.open = Some(OpenRun {
            info: run.clone(),
            converter: Converter::new(run.folder.clone(), server_run.data()?),
            run: server_run,
            file,
            cursor,
            written: position.clone(),
            queue: VecDeque::new(),
            has_warned: Cell::new(false),
        });
        Ok(position)
    }

    fn write(&mut self, origin: Origin, entry: &Entry) -> Result<()> {
        let open = self.open.as_mut().ok_or_else(not_open)?;
        open.write(origin, entry);
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        self.open.as_mut().ok_or_else(not_open)?.flush()
    }
}

impl OpenRun {
    fn write(&mut self, origin: Origin, entry: &Entry) {
        let is_known = entry.n < next_of(&self.written, origin);
        if is_known && matches!(entry.record, Record::Series { .. }) {
            self.converter.note(&entry.record);
            return;
        }
        let items = self.converter.items(origin, entry);
        let last = items.len();
        // The end of a run that may continue arrives before the entries that it follows.
        let is_ahead = matches!(entry.record, Record::End { status, .. } if !status.is_final());
        for (at, item) in (1..).zip(items) {
            self.queue.push_back(Queued {
                item,
                origin,
                n: entry.n,
                is_last: at == last && !is_ahead,
            });
        }
        if !is_ahead {
            advance(&mut self.written, origin, entry.n + 1);
        }
    }

    fn flush(&mut self) -> Result<()> {
        let mut most = usize::MAX;
        while !self.queue.is_empty() {
            match self.send_front(most)? {
                Sent::Items(sent) => {
                    self.deliver(sent)?;
                    most = most.saturating_mul(2);
                }
                Sent::Changed => {}
                // One of them is to blame.
                Sent::Refused { items, .. } if items > 1 => most = items / 2,
                Sent::Refused { error, .. } => {
                    self.warn(&error);
                    self.deliver(1)?;
                }
            }
        }
        // Entries that have no place on the server were not in the queue.
        if self.cursor.position != self.written {
            self.cursor.position = self.written.clone();
            self.file.write(&self.cursor)?;
        }
        Ok(())
    }

    /// The first items of the queue are done with.
    fn deliver(&mut self, items: usize) -> Result<()> {
        for queued in self.queue.drain(..items) {
            if queued.is_last {
                advance(&mut self.cursor.position, queued.origin, queued.n + 1);
            }
        }
        self.file.write(&self.cursor)
    }

    /// Sends what is first: at most so many metrics, parameters and tags.
    fn send_front(&mut self, most: usize) -> Result<Sent> {
        let batch = Batch::of_front(&self.queue, most);
        let taken = batch.taken;
        if taken > 0 {
            return match self.run.update("runs/log-batch", batch.into_body()) {
                Ok(()) => Ok(Sent::Items(taken)),
                Err(failure) if failure.is_of_content() => match self.turn_changed_params(taken)? {
                    true => Ok(Sent::Changed),
                    false => Ok(Sent::Refused {
                        items: taken,
                        error: failure.into(),
                    }),
                },
                Err(failure) => Err(failure.into()),
            };
        }
        let sent = match self.queue.front().map(|queued| &queued.item) {
            Some(Item::File {
                path,
                mime,
                content,
            }) => self.send_content(path, mime, content),
            Some(Item::Artifact(made)) => {
                let made = made.clone();
                self.send_artifact(&made)
            }
            Some(Item::Dataset(dataset)) => {
                let body = json!({ "datasets": [dataset] });
                self.run.update("runs/log-inputs", body)
            }
            Some(Item::Started) => self
                .run
                .update("runs/update", json!({ "status": "RUNNING" })),
            Some(Item::Ended { status, ms }) => {
                self.run.delete_doubles(self.info.id)?;
                let body = json!({ "status": status, "end_time": ms });
                self.run.update("runs/update", body)
            }
            // They are in the batch.
            Some(Item::Metric { .. } | Item::Param { .. } | Item::Tag { .. }) | None => Ok(()),
        };
        match sent {
            Ok(()) => Ok(Sent::Items(1)),
            Err(failure) if failure.is_of_content() => {
                // The server also answers this for a deleted run.
                self.run.data()?;
                let error = failure.into();
                Ok(Sent::Refused { items: 1, error })
            }
            Err(failure) => Err(failure.into()),
        }
    }

    fn send_content(&self, path: &str, mime: &str, content: &Content) -> Result<(), Failure> {
        let (root, bytes) = match (self.run.artifact_root(), content) {
            (Ok(root), Content::Bytes(bytes)) => (root, Cow::Borrowed(bytes)),
            (Ok(root), Content::File(file)) => match fs::read(file) {
                Ok(bytes) => (root, Cow::Owned(bytes)),
                Err(error) => {
                    self.warn(&Error::io("read", file, error));
                    return Ok(());
                }
            },
            (Err(error), _) => {
                self.warn(&error);
                return Ok(());
            }
        };
        let path = format!("{root}/{path}");
        self.run.server.put_bytes(&path, mime, &bytes)
    }

    /// Warns once that the server will not have everything; the rest is worth delivering.
    fn warn(&self, error: &Error) {
        if !self.has_warned.replace(true) {
            tracing::warn!(
                %error, run = self.info.name,
                "a part of the run is not delivered to MLflow, the rest is; once the cause is gone, delete mlflow.json in \
                 the run's folder and deliver it again"
            );
        }
    }

    /// Turns our value into a tag if somebody else set the parameter on the server meanwhile.
    fn turn_changed_params(&mut self, among: usize) -> Result<bool> {
        let server = self.run.data()?;
        let mut has_turned = false;
        for queued in self.queue.iter_mut().take(among) {
            if let Item::Param {
                key,
                value,
                changed,
            } = &queued.item
                && server.params.get(key).is_some_and(|found| found != value)
            {
                queued.item = tag(changed.clone(), value);
                has_turned = true;
            }
        }
        Ok(has_turned)
    }

    /// Sends the files that the server does not have yet, and then the manifest. Warns of what is no longer in the
    /// store, and sends the rest.
    pub(super) fn send_artifact(&mut self, made: &MadeArtifact) -> Result<(), Failure> {
        let (root, stored) = match (self.run.artifact_root(), self.stored(made)) {
            (Ok(root), Ok(stored)) => (root, stored),
            (Err(error), _) | (_, Err(error)) => {
                self.warn(&error);
                return Ok(());
            }
        };
        let folder = format!("artifacts/{}/v{}", made.name, made.version);
        for file in stored.files() {
            let object = match stored.verified_path(file) {
                Ok(object) => object,
                Err(error) => {
                    self.warn(&error);
                    continue;
                }
            };
            let sent = self
                .run
                .send_file(&format!("{folder}/{}", server_path(&file.path)), &object);
            match sent {
                Err(failure) if failure.is_here() || failure.is_of_content() => {
                    self.warn(&failure.into());
                }
                sent => sent?,
            }
        }
        let manifest = stored.manifest()?;
        let path = format!("{root}/{folder}.json");
        self.run
            .server
            .put_bytes(&path, "application/json", &manifest)
    }

    fn stored(&self, made: &MadeArtifact) -> Result<StoredArtifact> {
        let folder = &self.info.folder;
        let absolute =
            std::path::absolute(folder).map_err(|error| Error::io("find", folder, error))?;
        let store = ArtifactStore::of_runs(absolute.parent().unwrap_or(&absolute));
        let stored = store.open(&format!("{}:v{}", made.name, made.version))?;
        if stored.digest().to_string() == made.digest {
            return Ok(stored);
        }
        Err(Error::new(
            Kind::NotFound,
            format!(
                "expected {} with the digest {} in {}, as the run made it, found {}",
                stored.reference(),
                made.digest,
                store.folder().display(),
                stored.digest()
            ),
        ))
    }
}

fn next_of(position: &SinkPosition, origin: Origin) -> u64 {
    match origin {
        Origin::Run => position.next,
        Origin::Rank(rank) => position.ranks.get(&rank).copied().unwrap_or(0),
    }
}

fn advance(position: &mut SinkPosition, origin: Origin, next: u64) {
    match origin {
        Origin::Run => position.next = next,
        Origin::Rank(rank) => {
            position.ranks.insert(rank, next);
        }
    }
}

fn not_open() -> Error {
    let message = "the sink for MLflow is not open; its `open` comes first";
    Error::new(Kind::Misuse, message)
}
