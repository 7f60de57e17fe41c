//! How two runs differ in what they were given.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;

use serde::Serialize;
use serde_json::Value;

use super::arguments::{by_option, launcher_words};
use super::environment::Meaning;
use super::facts::{Commit, HashedFile, Provenance, SourceState};
use super::git::Repository;
use crate::history::RunHistory;
use crate::record::ArtifactRole;

/// Something that two runs were given differently.
///
/// ```
/// use accelerator_track::Difference;
///
/// let seed = Difference { what: "seed model".into(), a: Some("1".into()), b: None };
/// assert_eq!(seed.to_string(), "seed model: 1, none");
/// ```
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
pub struct Difference {
    /// What differs, as `source src/main.rs`, `binary`, `argument --lr` or `environment RAYON_NUM_THREADS`.
    pub what: String,
    /// What the first run had; none where it had no such thing.
    pub a: Option<String>,
    /// What the second run had.
    pub b: Option<String>,
}

/// How two runs differ in what their last attempts were given, the most important first: sources, commit, lock file,
/// features, binary, arguments, data, seeds, plan, environment, devices and host; then hyperparameters, and the artifacts
/// that they used.
///
/// Where the commits differ, the git repository that had the sources of one run, or the one around the working directory,
/// knows which files do. Without it, only those files are named that a run had changed.
///
/// ```
/// use accelerator_track::{Run, RunHistory, diff};
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
    let roots = [&of_b, &of_a].map(|x| x.commit.as_ref().map(|x| Path::new(&x.root)));
    let mut roots = roots.into_iter().flatten();
    let repository = roots.find(|x| x.is_dir()).unwrap_or(Path::new("."));
    let mut found = Differences(diff_provenance(&of_a, &of_b, repository));
    let [a_given, b_given] = [a, b].map(hyperparameters);
    found.maps("hyperparameter", &a_given, &b_given);
    let [a_used, b_used] = [a, b].map(used_artifacts);
    found.maps("artifact", &a_used, &b_used);
    found.0
}

/// How what is recorded of two runs differs. The git repository that has `folder` knows which files differ between commits.
pub(super) fn diff_provenance(a: &Provenance, b: &Provenance, folder: &Path) -> Vec<Difference> {
    let folder = folder.canonicalize().ok();
    let repository = folder.and_then(|folder| Repository::around(&folder));
    all(a, b, repository.as_ref())
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

fn all(a: &Provenance, b: &Provenance, repository: Option<&Repository>) -> Vec<Difference> {
    let mut found = Differences(Vec::new());
    let none = Commit::default();
    let commits = [a, b].map(|side| side.commit.as_ref().unwrap_or(&none));
    found.sources(commits, repository);
    found.compare("commit", commits[0].hash.as_ref(), commits[1].hash.as_ref());
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
        pairs
            .filter(|(name, _)| Meaning::of(name) == Some(Meaning::Input))
            .collect()
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

    fn sources(&mut self, sides: [&Commit; 2], repository: Option<&Repository>) {
        let hashes = sides.map(|side| side.hash.as_deref());
        let between = match hashes {
            [a, b] if a == b => Some(BTreeSet::new()),
            [Some(a), Some(b)] => repository
                .and_then(|repository| repository.differing(a, b))
                .map(BTreeSet::from_iter),
            _ => None,
        };
        let differ = |path: &String| match sides.map(|side| state(side, path)) {
            [Some(a), Some(b)] => a != b,
            [None, None] => true,
            [Some(own), None] => differs(own, hashes[1], path, between.as_ref(), repository),
            [None, Some(own)] => differs(own, hashes[0], path, between.as_ref(), repository),
        };
        let paths = sides
            .into_iter()
            .flat_map(|side| side.changed.keys().chain(side.untracked.keys()));
        let paths: BTreeSet<&String> = paths.chain(between.iter().flatten()).collect();
        for path in paths.into_iter().filter(|path| differ(path)) {
            let [a, b] = sides.map(|side| match (state(side, path), &side.hash) {
                (Some(state), _) => Some(state.to_string()),
                (None, Some(hash)) => Some(format!("as in {hash}")),
                (None, None) => None,
            });
            self.0.push(Difference {
                what: format!("source {path}"),
                a,
                b,
            });
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

/// By name.
fn used_artifacts(run: &RunHistory) -> BTreeMap<String, String> {
    let used = run.artifacts.iter();
    let used = used.filter(|x| x.role == ArtifactRole::Input);
    used.map(|x| (x.name.clone(), format!("v{} {}", x.version, x.digest)))
        .collect()
}

fn state<'a>(commit: &'a Commit, path: &str) -> Option<&'a SourceState> {
    commit
        .changed
        .get(path)
        .or_else(|| commit.untracked.get(path))
}

/// Whether a file that one side has changed is another than in the commit of the other side. `between` are the files
/// that differ between the commits, where that is known.
fn differs(
    own: &SourceState,
    commit: Option<&str>,
    path: &String,
    between: Option<&BTreeSet<String>>,
    repository: Option<&Repository>,
) -> bool {
    match (between, commit, repository) {
        // What was changed may have been committed since.
        (Some(between), Some(commit), Some(repository)) if between.contains(path) => {
            match (own, repository.hash_at(commit, path)) {
                (SourceState::Hash(own), Some(other)) => *own != other,
                (SourceState::Deleted, None) => false,
                _ => true,
            }
        }
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn diff(a: &Provenance, b: &Provenance) -> Vec<Difference> {
        all(a, b, None)
    }

    fn whats(a: &Provenance, b: &Provenance) -> Vec<String> {
        diff(a, b)
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
        assert_eq!(diff(&a, &b), []);
        b.arguments = text(&["/y/mnist", "--lr", "2", "--x"]);
        b.binary = file("2");
        b.lock_file = None;
        b.seeds.insert("model".into(), 2);
        b.plan = Some(serde_json::json!({"batch": {"size": 9, "drop": true}}));
        b.environment.remove("RAYON_NUM_THREADS");
        b.world = Some(3);
        b.commit = Some(Commit {
            hash: Some("1".into()),
            ..Commit::default()
        });
        let expected = [
            "commit",
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
        let threads = diff(&a, &b).pop().unwrap();
        assert_eq!(
            threads.to_string(),
            "environment RAYON_NUM_THREADS: 2, none"
        );
    }

    #[test]
    fn without_a_repository_files_are_named_by_their_hashes() {
        let side = |commit: &str, changed: &[(&str, &str)]| {
            let state = |hash: &str| SourceState::Hash(hash.to_owned());
            let changed = changed
                .iter()
                .map(|(path, hash)| ((*path).to_owned(), state(hash)));
            let commit = Commit {
                hash: Some(commit.into()),
                changed: changed.collect(),
                ..Commit::default()
            };
            Provenance {
                commit: Some(commit),
                ..Provenance::default()
            }
        };
        let same = side("c", &[("x.rs", "1"), ("y.rs", "1")]);
        assert_eq!(
            whats(&same, &side("c", &[("x.rs", "1"), ("y.rs", "2")])),
            ["source y.rs"]
        );
        assert_eq!(whats(&same, &side("c", &[("x.rs", "1")])), ["source y.rs"]);
        assert_eq!(
            whats(&same, &side("d", &[("x.rs", "1"), ("y.rs", "1")])),
            ["commit"]
        );
        let found = diff(&same, &side("d", &[("x.rs", "1")]));
        assert_eq!(found[0].to_string(), "source y.rs: 1, as in d");
    }
}
