//! Turns entries of a journal into items for the server.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;

use serde::Deserialize;
use serde_json::{Value, json};

use super::batch::{Content, Item, MadeArtifact, cut, hashed, server_name};
use super::server_run::{EPOCH, RUN_ID, ServerData};
use crate::provenance::{Commit, Provenance};
use crate::record::{ArtifactRole, EndStatus, Entry, Metrics, Record};
use crate::run_files::blob_path;
use crate::sink::Origin;

/// Turns entries into items. It knows what the server has of parameters, since their values cannot change there.
#[derive(Debug)]
pub(super) struct Converter {
    folder: PathBuf,
    /// Names on the server by the number of the series.
    series: HashMap<u32, String>,
    params: HashMap<String, String>,
    /// Tags that hold values of parameters that changed.
    changed: HashSet<String>,
    epoch_at: Option<u64>,
}

impl Converter {
    pub(super) fn new(folder: PathBuf, server: ServerData) -> Self {
        Self {
            folder,
            series: HashMap::new(),
            params: server.params,
            changed: server.tags,
            epoch_at: server.epoch_at,
        }
    }

    /// Takes notice of a series that was delivered earlier.
    pub(super) fn note(&mut self, record: &Record) {
        if let Record::Series { i, key } = record {
            self.series.insert(*i, metric_name(key));
        }
    }

    pub(super) fn items(&mut self, origin: Origin, entry: &Entry) -> Vec<Item> {
        self.note(&entry.record);
        match &entry.record {
            Record::Attempt {
                attempt,
                world,
                provenance,
                ..
            } => attempt_items(*attempt, *world, provenance),
            Record::Param { set } => set
                .iter()
                .flat_map(|(key, value)| self.param(key, value))
                .collect(),
            Record::Tag { set } => set
                .iter()
                .flat_map(|(key, value)| {
                    let name = match key == RUN_ID {
                        true => hashed(key),
                        false => server_name(key),
                    };
                    let original = original(key, &name);
                    original.into_iter().chain([tag(name, value)])
                })
                .collect(),
            Record::Series { key, .. } => original(key, &metric_name(key)).into_iter().collect(),
            Record::Metrics(metrics) => self.metrics(entry.ms, metrics),
            Record::System { values } => {
                let Origin::Rank(rank) = origin else {
                    return Vec::new();
                };
                let metrics = values.iter().map(|(name, value)| Item::Metric {
                    key: server_name(&format!("system/rank-{rank}/{name}")),
                    value: *value,
                    ms: entry.ms,
                    step: entry.n,
                });
                metrics.collect()
            }
            Record::Text { key, step, text } => {
                let content = Content::Bytes(text.clone().into_bytes());
                vec![file("text", key, *step, "md", "text/markdown", content)]
            }
            Record::Histogram { key, step, bins } => {
                vec![json_file(
                    "histograms",
                    key,
                    *step,
                    &json!({ "bins": bins }),
                )]
            }
            Record::Plot {
                key,
                step,
                x_label,
                y_label,
                points,
            } => {
                let plot = json!({ "x_label": x_label, "y_label": y_label, "points": points });
                vec![json_file("plots", key, *step, &plot)]
            }
            Record::Image {
                key,
                step,
                hash,
                mime,
                ..
            } => {
                let extension = match mime.as_str() {
                    "image/jpeg" => "jpg",
                    _ => "png",
                };
                let Some(blob) = blob_path(&self.folder, hash) else {
                    return Vec::new();
                };
                vec![file(
                    "images",
                    key,
                    *step,
                    extension,
                    mime,
                    Content::File(blob),
                )]
            }
            Record::Artifact {
                role,
                name,
                version,
                digest,
            } => artifact(*role, name, *version, digest),
            Record::End { status, failure } => {
                let failure = failure
                    .as_ref()
                    .map(|failure| tag("accel.failure", &plain(failure)));
                let status = match status {
                    EndStatus::Finished => "FINISHED",
                    EndStatus::Failed => "FAILED",
                    EndStatus::Preempted => "KILLED",
                };
                let ms = entry.ms;
                failure
                    .into_iter()
                    .chain([Item::Ended { status, ms }])
                    .collect()
            }
            _ => Vec::new(),
        }
    }

    fn metrics(&mut self, ms: u64, metrics: &Metrics) -> Vec<Item> {
        let step = metrics.step;
        let points = metrics.points.iter().filter_map(|point| {
            Some(Item::Metric {
                key: self.series.get(&point.series)?.clone(),
                value: point.value,
                ms,
                step,
            })
        });
        // MLflow has no place for it beside a step. Several calls may log one step, each with the epoch.
        let epoch = metrics
            .epoch
            .filter(|_| self.epoch_at.is_none_or(|at| at < step));
        let epoch = epoch.map(|epoch| Item::Metric {
            key: EPOCH.to_owned(),
            value: crate::record::Number(epoch),
            ms,
            step,
        });
        let items = points.chain(epoch).collect();
        if metrics.epoch.is_some() {
            self.epoch_at = self.epoch_at.max(Some(step));
        }
        items
    }

    fn param(&mut self, key: &str, value: &Value) -> Vec<Item> {
        let name = server_name(key);
        let changed = server_name(&format!("param.changed.{key}"));
        let text = plain(value);
        let value = cut(&text, LONGEST_PARAM);
        match self.params.get(&name) {
            None => {
                let original = original(key, &name);
                self.params.insert(name.clone(), value.clone());
                let param = Item::Param {
                    key: name,
                    value,
                    changed,
                };
                original.into_iter().chain([param]).collect()
            }
            Some(first) if *first == value && !self.changed.contains(&changed) => Vec::new(),
            Some(_) => {
                self.changed.insert(changed.clone());
                vec![tag(changed, &text)]
            }
        }
    }
}

/// Makes a tag, and cuts a value that is too long.
pub(super) fn tag(key: impl Into<String>, value: &str) -> Item {
    Item::Tag {
        key: key.into(),
        value: cut(value, LONGEST_TAG),
    }
}

fn attempt_items(attempt: u32, world: usize, provenance: &Value) -> Vec<Item> {
    // Another version's may be of another kind.
    let facts = Provenance::deserialize(provenance).unwrap_or_default();
    let binary = facts.binary.as_ref().map(|binary| &binary.path);
    let commit = facts.commit.as_ref();
    let dirty = commit.map(|commit| commit.is_dirty().to_string());
    let commit_text =
        |text: fn(&Commit) -> &Option<String>| commit.and_then(|commit| text(commit).as_ref());
    let tags = [
        ("mlflow.source.name", binary.or(facts.arguments.first())),
        ("mlflow.user", facts.host.user.as_ref()),
        (
            "mlflow.source.git.commit",
            commit_text(|commit| &commit.hash),
        ),
        (
            "mlflow.source.git.branch",
            commit_text(|commit| &commit.branch),
        ),
        (
            "mlflow.source.git.repoURL",
            commit_text(|commit| &commit.remote),
        ),
        ("mlflow.source.git.dirty", dirty.as_ref()),
        ("accel.host", facts.host.name.as_ref()),
    ];
    let tags = tags
        .into_iter()
        .filter_map(|(key, value)| Some(tag(key, value?)));
    let mut items: Vec<_> = tags.collect();
    if !facts.arguments.is_empty() {
        items.push(tag("accel.command", &facts.arguments.join(" ")));
    }
    items.push(tag("accel.world_size", &world.to_string()));
    items.push(tag("accel.attempts", &(u64::from(attempt) + 1).to_string()));
    let data = facts.data.iter();
    items.extend(data.map(|(name, folder)| {
        dataset(name, &folder.hash, "local", &json!({ "uri": folder.path }))
    }));
    if !provenance.is_null() {
        items.push(Item::File {
            path: format!("provenance/attempt-{attempt}.json"),
            mime: "application/json".to_owned(),
            content: Content::Bytes(provenance.to_string().into_bytes()),
        });
    }
    // The end of the attempt before may have ended the run on the server.
    items.push(Item::Started);
    items
}

fn artifact(role: ArtifactRole, name: &str, version: u32, digest: &str) -> Vec<Item> {
    match role {
        ArtifactRole::Output => vec![
            Item::Artifact(MadeArtifact {
                name: name.to_owned(),
                version,
                digest: digest.to_owned(),
            }),
            tag(
                server_name(&format!("accel.output.{name}")),
                &format!("v{version} {digest}"),
            ),
        ],
        ArtifactRole::Input => {
            let source = json!({ "artifact": name, "version": version, "digest": digest });
            vec![dataset(name, digest, "accel-artifact", &source)]
        }
    }
}

fn dataset(name: &str, digest: &str, source_type: &str, source: &Value) -> Item {
    let digest: String = digest.chars().take(LONGEST_DIGEST).collect();
    Item::Dataset(json!({
        "tags": [{ "key": "mlflow.data.context", "value": "training" }],
        "dataset": {
            "name": cut(name, LONGEST_DATASET),
            "digest": digest,
            "source_type": source_type,
            "source": source.to_string(),
        },
    }))
}

fn json_file(folder: &str, key: &str, step: u64, value: &Value) -> Item {
    let content = Content::Bytes(value.to_string().into_bytes());
    file(folder, key, step, "json", "application/json", content)
}

fn file(folder: &str, key: &str, step: u64, extension: &str, mime: &str, content: Content) -> Item {
    let key = server_name(key);
    Item::File {
        path: format!("{folder}/{key}/{step}.{extension}"),
        mime: mime.to_owned(),
        content,
    }
}

/// The name of a series; that of the epoch's is not free.
fn metric_name(key: &str) -> String {
    match key == EPOCH {
        true => hashed(key),
        false => server_name(key),
    }
}

/// Records the original name if the server has another.
fn original(key: &str, name: &str) -> Option<Item> {
    (key != name).then(|| tag(format!("accel.name.{name}"), key))
}

/// A string without quotes, all else as JSON.
fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        value => value.to_string(),
    }
}

const LONGEST_PARAM: usize = 6000;
/// Newer versions take 8000.
const LONGEST_TAG: usize = 5000;
const LONGEST_DATASET: usize = 500;
/// MLflow takes 36.
const LONGEST_DIGEST: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(items: Vec<Item>) -> Vec<String> {
        let items = items.into_iter().map(|item| match item {
            Item::Param { key, value, .. } => format!("param {key}={value}"),
            Item::Tag { key, value } => format!("tag {key}={value}"),
            other => format!("{other:?}"),
        });
        items.collect()
    }

    #[test]
    fn a_parameter_that_changes_becomes_a_tag() {
        let mut converter = Converter::new(PathBuf::new(), ServerData::default());
        let mut set = |value: Value| shown(converter.param("lr", &value));
        assert_eq!(set(json!(0.1)), ["param lr=0.1"]);
        assert!(set(json!(0.1)).is_empty());
        assert_eq!(set(json!("a")), ["tag param.changed.lr=a"]);
        // The tag holds the last value, even if that is the first again.
        assert_eq!(set(json!(0.1)), ["tag param.changed.lr=0.1"]);

        // After a start over it is the same, by what the server has.
        let server = ServerData {
            params: [("lr".to_owned(), "0.1".to_owned())].into(),
            tags: ["param.changed.lr".to_owned()].into(),
            epoch_at: None,
        };
        let mut converter = Converter::new(PathBuf::new(), server);
        assert_eq!(
            shown(converter.param("lr", &json!(0.1))),
            ["tag param.changed.lr=0.1"]
        );
    }

    #[test]
    fn each_step_has_one_epoch() {
        let epochs = |server: ServerData, steps: &[u64]| {
            let mut converter = Converter::new(PathBuf::new(), server);
            let items = steps.iter().zip(0..).flat_map(|(step, ms)| {
                let metrics = Metrics {
                    step: *step,
                    epoch: Some(*step as f64),
                    points: Vec::new(),
                };
                converter.metrics(ms, &metrics)
            });
            items.count()
        };
        // An evaluation may come after later steps.
        assert_eq!(epochs(ServerData::default(), &[1, 1, 2, 3, 2, 3]), 3);
        let known = ServerData {
            epoch_at: Some(2),
            ..ServerData::default()
        };
        assert_eq!(epochs(known, &[1, 2, 3]), 1);
    }

    #[test]
    fn a_users_names_do_not_replace_ours() {
        let mut converter = Converter::new(PathBuf::new(), ServerData::default());
        let set = [(RUN_ID.to_owned(), "mine".to_owned())].into();
        let entry = Entry {
            n: 0,
            ms: 0,
            record: Record::Tag { set },
        };
        let tags = shown(converter.items(Origin::Run, &entry));
        assert!(
            tags.iter().all(|tag| !tag.starts_with("tag accel.run_id=")),
            "{tags:?}"
        );
        assert_eq!(tags.len(), 2);
        assert_ne!(metric_name("epoch"), "epoch");
    }
}
