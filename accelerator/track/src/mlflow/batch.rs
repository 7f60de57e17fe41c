//! Requests that the server takes: their size, and the names in them.

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;

use accelerator_manifest::ContentHash;
use serde_json::{Value, json};

use crate::record::Number;
use crate::sink::Origin;

/// A part of what an entry of the journal says, for the server.
#[derive(Debug)]
pub(super) struct Queued {
    pub(super) item: Item,
    pub(super) origin: Origin,
    /// The entry's number.
    pub(super) n: u64,
    /// True for the entry's last part.
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

/// A version of an artifact, as the journal names it.
#[derive(Clone, Debug)]
pub(super) struct MadeArtifact {
    pub(super) name: String,
    pub(super) version: u32,
    pub(super) digest: String,
}

/// Metrics, parameters and tags for one request.
#[derive(Debug, Default)]
pub(super) struct Batch {
    /// The number of items that it takes from the queue.
    pub(super) taken: usize,
    metrics: Vec<Value>,
    params: Vec<Value>,
    tags: BTreeMap<String, String>,
    bytes: usize,
}

impl Batch {
    /// Takes as much of the front of the queue as one request holds, at most `most` items; nothing if another kind of
    /// request comes first.
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

/// The limit for metrics, parameters and tags together, and for metrics alone.
const MOST: usize = 1000;
const MOST_PARAMS: usize = 100;
const MOST_TAGS: usize = 100;
/// The server takes 10⁶ of a request.
const MOST_BYTES: usize = 990_000;
/// The length of a metric without its name: `{"key":"","step":,"timestamp":,"value":},` and three numbers of at most 24
/// characters.
const METRIC_BYTES: usize = 41 + 3 * 24;

/// The name of a metric, a parameter or a tag on the server: itself where MLflow takes it, otherwise what MLflow takes
/// of it with a hash of all of it. Two names never become one.
pub(super) fn server_name(name: &str) -> String {
    match is_taken(name) && !is_hashed(name) {
        true => name.to_owned(),
        false => hashed(name),
    }
}

/// The name with a hash of it.
pub(super) fn hashed(name: &str) -> String {
    let mut shown = String::new();
    for part in name.split('/').filter(|part| !part.is_empty()) {
        if !shown.is_empty() {
            shown.push('/');
        }
        // `.` and `..` are not names.
        if part.chars().all(|character| character == '.') {
            shown.push('_');
        }
        let characters = part.chars().map(|character| match is_plain(character) {
            true => character,
            false => '_',
        });
        shown.extend(characters);
    }
    if let Some((end, _)) = shown.char_indices().nth(LONGEST_HASHED) {
        shown.truncate(end);
    }
    let hash = ContentHash::of(name.as_bytes()).to_string();
    format!("{shown}{MARK}{}", &hash[..HASH])
}

/// The path of a file on the server, which decodes a path until it stays the same and cuts what URLs have behind one.
pub(super) fn server_path(path: &str) -> String {
    const SPECIAL: [char; 4] = ['%', '#', '?', ';'];
    if !path.contains(SPECIAL) {
        return path.to_owned();
    }
    let hash = ContentHash::of(path.as_bytes()).to_string();
    let plain = path.replace(SPECIAL, "_");
    let (folder, name) = plain.split_at(plain.rfind('/').map_or(0, |at| at + 1));
    // Before the name, behind which is what says what it is.
    format!("{folder}{} {name}", &hash[..HASH])
}

/// A value of at most `limit` characters.
pub(super) fn cut(value: &str, limit: usize) -> String {
    let length = value.chars().count();
    if length <= limit {
        return value.to_owned();
    }
    let marker = format!("… (cut from {length} characters)");
    let kept = limit - marker.chars().count();
    value.chars().take(kept).chain(marker.chars()).collect()
}

/// The server compares a name with what Python's `posixpath.normpath` makes of it.
fn is_taken(name: &str) -> bool {
    name.chars().count() <= LONGEST
        && name
            .chars()
            .all(|character| is_plain(character) || character == '/')
        && name
            .split('/')
            .all(|part| !part.is_empty() && part != "." && part != "..")
}

fn is_hashed(name: &str) -> bool {
    let end = name.rsplit_once(MARK).map(|(_, end)| end);
    end.is_some_and(|end| {
        end.len() == HASH
            && end
                .bytes()
                .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    })
}

/// Letters for which Rust and the server's Python agree, in any version of Unicode; without the colon, which a server
/// on Windows refuses.
fn is_plain(character: char) -> bool {
    character.is_ascii_alphanumeric()
        || matches!(character, '_' | '-' | '.' | ' ')
        // Latin, Greek, Cyrillic; kana, Chinese, Korean.
        || matches!(character, 'À'..='Ö' | 'Ø'..='ö' | 'ø'..='ɏ' | 'Α'..='Ρ' | 'Σ'..='ώ' | 'Ѐ'..='ҁ' | 'Ҋ'..='ԯ')
        || matches!(character, 'ぁ'..='ゖ' | 'ァ'..='ヺ' | '一'..='\u{9fa5}' | '가'..='힣')
}

const LONGEST: usize = 250;
/// A name with a hash may follow a prefix of a tag.
const LONGEST_HASHED: usize = 160;
const MARK: &str = " -";
const HASH: usize = 16;

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

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

    #[test]
    fn names_stay_readable_and_apart() {
        for name in ["train/loss", "a b-c.d_e", "模型/é", ".hidden", "a/..b"] {
            assert_eq!(server_name(name), name);
        }
        let long = "x".repeat(300);
        let names = [
            "",
            "/",
            ".",
            "..",
            "a//b",
            "a/b/",
            "/a/b",
            "../x",
            "a/../b",
            "é%",
            "é$",
            "a:b",
            "x\ny",
            "e\u{301}",
            "Ⓐ",
            &long,
            &long[1..],
        ];
        let mut seen = HashSet::new();
        for name in names {
            let mapped = server_name(name);
            assert!(
                is_taken(&mapped) && is_hashed(&mapped),
                "{name:?} becomes {mapped:?}"
            );
            assert!(
                seen.insert(server_name(&mapped)),
                "the name of a name: {mapped:?}"
            );
            assert!(seen.insert(mapped));
        }
        assert!(server_name("é%").starts_with("é_ -"));
    }

    #[test]
    fn paths_that_the_server_would_decode_stay_apart() {
        assert_eq!(server_path("a b/é=1.bin"), "a b/é=1.bin");
        let paths = ["x%41.bin", "x#41.bin", "d%/x.bin", "d?/x.bin"].map(server_path);
        for path in &paths {
            assert!(
                path.ends_with(".bin") && !path.contains(['%', '#', '?']),
                "{path}"
            );
        }
        assert!(paths[2].starts_with("d_/") && paths[2] != paths[3]);
        assert_ne!(paths[0], paths[1]);
    }

    #[test]
    fn values_are_cut_by_characters() {
        assert_eq!(cut("éé", 2), "éé");
        let value = cut(&"é".repeat(7000), 6000);
        assert_eq!(value.chars().count(), 6000);
        assert!(value.ends_with("é… (cut from 7000 characters)"));
    }

    proptest! {
        #[test]
        fn every_name_becomes_one_that_is_taken(name in any::<String>()) {
            prop_assert!(is_taken(&server_name(&name)));
        }
    }
}
