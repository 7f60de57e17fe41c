//! The differences between the inputs of two runs.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::Serialize;
use serde_json::Value;

use super::{HashedFile, Provenance, is_input};
use crate::history::RunHistory;
use crate::record::ArtifactRole;

/// An input that differs between two runs.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
pub struct Difference {
    /// The input that differs, as `commit`, `binary`, `argument --lr` or `environment RAYON_NUM_THREADS`.
    pub what: String,
    /// The value of the first run; `None` if it had none.
    pub a: Option<String>,
    /// The value of the second run.
    pub b: Option<String>,
}

/// Lists the differences between the inputs of the last attempts of two runs, the most important first: commit,
/// uncommitted changes, lock file, features, binary, arguments, data, seeds, plan, environment, devices and host; then
/// hyperparameters, and the artifacts that they used.
///
/// ```
/// use accelerator_track::{Run, RunHistory, internal::diff};
///
/// # let temporary = tempfile::tempdir().unwrap();
/// # let folder = temporary.path();
/// let trained = |lr: f64| {
///     let run = Run::builder("mnist").runs_folder(folder).hyperparameters(&serde_json::json!({ "lr": lr }))?.start()?;
///     RunHistory::read(run.folder())
/// };
/// let found = diff(&trained(0.1)?, &trained(0.2)?);
/// assert_eq!(found[0].to_string(), "hyperparameter lr: 0.1, 0.2");
/// # Ok::<(), accelerator_track::Error>(())
/// ```
#[must_use]
pub fn diff(a: &RunHistory, b: &RunHistory) -> Vec<Difference> {
    let [of_a, of_b] = [a, b].map(Provenance::of);
    let mut found = Differences(diff_provenance(&of_a, &of_b));
    let [a_given, b_given] = [a, b].map(hyperparameters);
    found.maps("hyperparameter", &a_given, &b_given);
    let [a_used, b_used] = [a, b].map(used_artifacts);
    found.maps("artifact", &a_used, &b_used);
    found.0
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let or_none = |side: &Option<String>| side.clone().unwrap_or_else(|| "none".to_owned());
        write!(
            f,
            "{}: {}, {}",
            self.what,
            or_none(&self.a),
            or_none(&self.b)
        )
    }
}

/// Lists the differences between what is recorded of two runs.
pub(super) fn diff_provenance(a: &Provenance, b: &Provenance) -> Vec<Difference> {
    let mut found = Differences(Vec::new());
    let commits = [a, b].map(|side| side.commit.as_ref());
    let [of_a, of_b] = commits.map(|commit| commit?.hash.clone());
    found.compare("commit", of_a, of_b);
    let [of_a, of_b] = commits.map(|commit| match commit?.diff.clone() {
        None if commit?.is_dirty() => Some("not recorded".to_owned()),
        diff => diff,
    });
    found.compare("uncommitted changes", of_a, of_b);
    let hash = |file: &Option<HashedFile>| file.as_ref().and_then(|file| file.hash.clone());
    found.compare("lock file", hash(&a.lock_file), hash(&b.lock_file));
    let list = |words: &[String]| (!words.is_empty()).then(|| words.join(", "));
    found.compare("features", list(&a.features), list(&b.features));
    if let [Some(a), Some(b)] = [a, b].map(|side| hash(&side.binary)) {
        found.compare("binary", Some(a), Some(b));
    }
    let [of_a, of_b] = [a, b].map(|side| by_option(side.arguments.iter().skip(1)));
    found.maps("argument", &of_a, &of_b);
    let [of_a, of_b] = [a, b].map(|side| by_option(launcher_words(side)));
    found.maps("argument of accel-launch", &of_a, &of_b);
    let data = |side: &Provenance| -> BTreeMap<String, String> {
        side.data
            .iter()
            .map(|(name, digest)| (name.clone(), digest.hash.clone()))
            .collect()
    };
    found.maps("data", &data(a), &data(b));
    found.maps("seed", &a.seeds, &b.seeds);
    found.values("plan", a.plan.as_ref(), b.plan.as_ref());
    found.compare("world", a.world, b.world);
    let inputs = |side: &Provenance| -> BTreeMap<String, String> {
        let pairs = side.environment.clone().into_iter();
        pairs.filter(|(name, _)| is_input(name)).collect()
    };
    found.maps("environment", &inputs(a), &inputs(b));
    found.compare("devices", list(&a.devices), list(&b.devices));
    let hosts = [&a.host, &b.host];
    for (what, fact) in [
        ("host", hosts.map(|host| host.name.clone())),
        ("processor", hosts.map(|host| host.cpu.clone())),
        ("architecture", hosts.map(|host| host.arch.clone())),
        (
            "cores",
            hosts.map(|host| host.cores.map(|cores| cores.to_string())),
        ),
        (
            "memory",
            hosts.map(|host| host.memory.map(|bytes| bytes.to_string())),
        ),
        ("operating system", hosts.map(|host| host.os.clone())),
        ("kernel", hosts.map(|host| host.kernel.clone())),
    ] {
        let [a, b] = fact;
        found.compare(what, a, b);
    }
    found.compare(
        "working directory",
        a.directory.as_ref(),
        b.directory.as_ref(),
    );
    found.0
}

struct Differences(Vec<Difference>);

impl Differences {
    fn compare<T: fmt::Display>(&mut self, what: impl Into<String>, a: Option<T>, b: Option<T>) {
        let [a, b] = [a, b].map(|side| side.map(|side| side.to_string()));
        if a != b {
            self.0.push(Difference {
                what: what.into(),
                a,
                b,
            });
        }
    }

    fn maps<T: fmt::Display>(
        &mut self,
        kind: &str,
        a: &BTreeMap<String, T>,
        b: &BTreeMap<String, T>,
    ) {
        let names: BTreeSet<&String> = a.keys().chain(b.keys()).collect();
        for name in names {
            self.compare(format!("{kind} {name}"), a.get(name), b.get(name));
        }
    }

    /// The leaves of nested objects.
    fn values(&mut self, what: &str, a: Option<&Value>, b: Option<&Value>) {
        if let (Some(Value::Object(a)), Some(Value::Object(b))) = (a, b) {
            let names: BTreeSet<&String> = a.keys().chain(b.keys()).collect();
            for name in names {
                self.values(&format!("{what} {name}"), a.get(name), b.get(name));
            }
        } else {
            self.compare(what, a, b);
        }
    }
}

fn hyperparameters(run: &RunHistory) -> BTreeMap<String, String> {
    let text = |value: &Value| match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    let parameters = run.hyperparameters.iter();
    let texts = parameters.map(|(key, parameter)| (key.clone(), text(&parameter.value)));
    texts.collect()
}

/// Returns the version and digest of each artifact that the run used, by name.
fn used_artifacts(run: &RunHistory) -> BTreeMap<String, String> {
    let used = run.artifacts.iter();
    let used = used.filter(|x| x.role == ArtifactRole::Input);
    used.map(|x| (x.name.clone(), format!("v{} {}", x.version, x.digest)))
        .collect()
}

/// Maps arguments by option, a repeated one with its number, and the others by their place among themselves. An option
/// without a value is its own value.
fn by_option<'a>(words: impl Iterator<Item = &'a String>) -> BTreeMap<String, &'a str> {
    let is_option = |word: &str| {
        let rest = word.strip_prefix('-');
        rest.is_some_and(|rest| rest.starts_with(|c: char| c == '-' || c.is_alphabetic()))
    };
    let mut found = BTreeMap::new();
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    let mut words = words.map(String::as_str).peekable();
    while let Some(word) = words.next() {
        let (name, value) = match word.split_once('=') {
            _ if !is_option(word) => ("", word),
            Some(pair) => pair,
            None if word == "--" => (word, word),
            None => (word, words.next_if(|next| !is_option(next)).unwrap_or(word)),
        };
        let count = counts.entry(name).or_default();
        *count += 1;
        let key = match (name, *count) {
            ("", place) => place.to_string(),
            (name, 1) => name.to_owned(),
            (name, place) => format!("{name} ({place})"),
        };
        found.insert(key, value);
    }
    found
}

/// Returns the arguments of `accel-launch`, without the program and its arguments if they end with those.
fn launcher_words(side: &Provenance) -> impl Iterator<Item = &String> {
    let (program, arguments) = side.arguments.split_at(side.arguments.len().min(1));
    let words = side.launched_by.as_slice();
    let options = match words.strip_suffix(arguments) {
        Some(options) => options.strip_suffix(program).unwrap_or(options),
        None => words,
    };
    options.iter().skip(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::provenance::Commit;

    fn whats(a: &Provenance, b: &Provenance) -> Vec<String> {
        diff_provenance(a, b)
            .into_iter()
            .map(|difference| difference.what)
            .collect()
    }

    #[test]
    fn inputs_are_named_in_the_order_of_their_importance() {
        let text = |words: &[&str]| {
            words
                .iter()
                .map(|&word| word.to_owned())
                .collect::<Vec<_>>()
        };
        let file = |hash: &str| {
            Some(HashedFile {
                hash: Some(hash.into()),
                ..HashedFile::default()
            })
        };
        let a = Provenance {
            arguments: text(&["/x/mnist", "--lr", "1"]),
            binary: file("1"),
            lock_file: file("1"),
            seeds: [("model".to_owned(), 1)].into(),
            plan: Some(serde_json::json!({"batch": {"size": 8, "drop": true}})),
            environment: [
                ("RAYON_NUM_THREADS", "2"),
                ("RANK", "0"),
                ("ACCEL_PORT", "1"),
            ]
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into(),
            world: Some(2),
            pid: Some(1),
            ..Provenance::default()
        };
        let mut b = a.clone();
        b.pid = Some(2);
        b.arguments[0] = "/y/mnist".into();
        b.environment.insert("ACCEL_PORT".into(), "2".into());
        assert_eq!(whats(&a, &b), [""; 0]);
        b.arguments = text(&["/y/mnist", "--lr", "2", "--x"]);
        b.binary = file("2");
        b.lock_file = None;
        b.seeds.insert("model".into(), 2);
        b.plan = Some(serde_json::json!({"batch": {"size": 9, "drop": true}}));
        b.environment.remove("RAYON_NUM_THREADS");
        b.world = Some(3);
        b.commit = Some(Commit {
            hash: Some("1".into()),
            dirty: true,
            ..Commit::default()
        });
        let expected = [
            "commit",
            "uncommitted changes",
            "lock file",
            "binary",
            "argument --lr",
            "argument --x",
            "seed model",
            "plan batch size",
            "world",
            "environment RAYON_NUM_THREADS",
        ];
        assert_eq!(whats(&a, &b), expected);
        let threads = diff_provenance(&a, &b).pop().unwrap();
        assert_eq!(
            threads.to_string(),
            "environment RAYON_NUM_THREADS: 2, none"
        );
    }
}
