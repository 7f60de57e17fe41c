//! What is to be sent, in requests that the server takes.

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;

use serde_json::{Value, json};

use super::artifacts::MadeArtifact;
use crate::record::Number;
use crate::sink::Origin;

/// A part of what an entry of the journal says, for the server.
#[derive(Debug)]
pub(super) struct Queued {
    pub(super) item: Item,
    pub(super) origin: Origin,
    /// The entry's number.
    pub(super) n: u64,
    /// Whether it is the entry's last part.
    pub(super) is_last: bool,
}

#[derive(Debug)]
pub(super) enum Item {
    Metric {
        key: String,
        value: Number,
        ms: u64,
        step: u64,
    },
    Param {
        key: String,
        value: String,
        /// The tag that takes a value which differs from the server's.
        changed: String,
    },
    Tag {
        key: String,
        value: String,
    },
    File {
        path: String,
        mime: String,
        content: Content,
    },
    Dataset(Value),
    Artifact(MadeArtifact),
    Started,
    Ended {
        status: &'static str,
        ms: u64,
    },
}

#[derive(Debug)]
pub(super) enum Content {
    Bytes(Vec<u8>),
    File(PathBuf),
}

/// Metrics, parameters and tags for one request.
#[derive(Debug, Default)]
pub(super) struct Batch {
    /// How many items of the queue are in it.
    pub(super) taken: usize,
    metrics: Vec<Value>,
    params: Vec<Value>,
    tags: BTreeMap<String, String>,
    bytes: usize,
}

impl Batch {
    /// As much of the front of the queue as one request takes, and at most so many; nothing where another kind of request
    /// comes first.
    pub(super) fn of_front(queue: &VecDeque<Queued>, most: usize) -> Self {
        let mut batch = Self::default();
        for queued in queue.iter().take(most) {
            if !batch.add(&queued.item) {
                break;
            }
            batch.taken += 1;
        }
        batch
    }

    pub(super) fn into_body(self) -> Value {
        let tags = self.tags.iter().map(|(key, value)| pair(key, value));
        let tags: Vec<_> = tags.collect();
        json!({ "metrics": self.metrics, "params": self.params, "tags": tags })
    }

    fn add(&mut self, item: &Item) -> bool {
        let bytes = match item {
            // Names need no escapes.
            Item::Metric { key, .. } => key.len() + METRIC_BYTES,
            Item::Param { key, value, .. } | Item::Tag { key, value } => {
                pair(key, value).to_string().len() + 1
            }
            _ => return false,
        };
        let together = self.metrics.len() + self.params.len() + self.tags.len();
        if together == MOST || self.bytes + bytes > MOST_BYTES {
            return false;
        }
        match item {
            Item::Metric {
                key,
                value,
                ms,
                step,
            } => {
                let value = match value.0 {
                    value if value.is_finite() => json!(value),
                    value if value.is_nan() => json!("NaN"),
                    value if value > 0.0 => json!("Infinity"),
                    _ => json!("-Infinity"),
                };
                // MLflow counts steps with a sign.
                let step = i64::try_from(*step).unwrap_or(i64::MAX);
                self.metrics
                    .push(json!({ "key": key, "value": value, "timestamp": ms, "step": step }));
            }
            Item::Param { key, value, .. } => {
                if self.params.len() == MOST_PARAMS {
                    return false;
                }
                self.params.push(pair(key, value));
            }
            Item::Tag { key, value } => {
                if self.tags.len() == MOST_TAGS && !self.tags.contains_key(key) {
                    return false;
                }
                self.tags.insert(key.clone(), value.clone());
            }
            _ => return false,
        }
        self.bytes += bytes;
        true
    }
}

fn pair(key: &str, value: &str) -> Value {
    json!({ "key": key, "value": value })
}

/// Metrics, parameters and tags together; that many metrics are allowed alone, too.
const MOST: usize = 1000;
const MOST_PARAMS: usize = 100;
const MOST_TAGS: usize = 100;
/// The server takes 10⁶ of a request.
const MOST_BYTES: usize = 990_000;
/// Of a metric, without its name: `{"key":"","step":,"timestamp":,"value":},` and three numbers of at most 24 characters.
const METRIC_BYTES: usize = 41 + 3 * 24;

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(items: Vec<Item>) -> VecDeque<Queued> {
        let queued = items.into_iter().map(|item| Queued {
            item,
            origin: Origin::Run,
            n: 0,
            is_last: true,
        });
        queued.collect()
    }

    fn metric(at: usize) -> Item {
        Item::Metric {
            key: format!("k{at}"),
            value: Number(1.0),
            ms: 1,
            step: 0,
        }
    }

    fn tag(at: usize, value: &str) -> Item {
        Item::Tag {
            key: format!("t{at}"),
            value: value.to_owned(),
        }
    }

    fn param(at: usize) -> Item {
        Item::Param {
            key: format!("p{at}"),
            value: "é".repeat(6000),
            changed: String::new(),
        }
    }

    #[test]
    fn a_batch_keeps_within_each_limit() {
        let taken = |items| Batch::of_front(&queue(items), usize::MAX).taken;
        assert_eq!(taken((0..1001).map(metric).collect()), 1000);
        let mut items: Vec<_> = (0..1000).map(metric).collect();
        items.push(tag(0, ""));
        assert_eq!(taken(items), 1000);
        assert_eq!(taken((0..101).map(|at| tag(at, "")).collect()), 100);
        // A tag that is set again takes no room.
        assert_eq!(taken((0..300).map(|at| tag(at % 100, "")).collect()), 300);
        assert_eq!(taken(vec![metric(0), Item::Started, metric(1)]), 1);
        assert_eq!(taken(vec![Item::Started]), 0);
    }

    #[test]
    fn a_batch_keeps_within_the_bytes_of_a_request() {
        let quotes = "\"".repeat(5000);
        let mut items: Vec<_> = (0..90).map(|at| tag(at, &quotes)).collect();
        items.extend((0..101).map(param));
        let queue = queue(items);
        let batch = Batch::of_front(&queue, usize::MAX);
        assert!(batch.taken < 101, "{}", batch.taken);
        let length = batch.into_body().to_string().len();
        assert!((950_000..1_000_000).contains(&length), "{length}");
        let longest = Item::Metric {
            key: "é".repeat(250),
            value: Number(-f64::MIN_POSITIVE),
            ms: u64::MAX,
            step: u64::MAX,
        };
        let mut batch = Batch::default();
        batch.add(&longest);
        let counted = batch.bytes;
        assert!(batch.metrics[0].to_string().len() < counted);
    }

    #[test]
    fn the_last_value_of_a_tag_counts() {
        let body = Batch::of_front(&queue(vec![tag(0, "a"), tag(0, "b")]), usize::MAX).into_body();
        assert_eq!(body["tags"], json!([{ "key": "t0", "value": "b" }]));
    }
}
