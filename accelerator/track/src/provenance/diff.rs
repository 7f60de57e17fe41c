//! How two runs differ in what they were given.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;

use serde::Serialize;
use serde_json::Value;

use super::environment::Meaning;
use super::facts::{Commit, HashedFile, Provenance, SourceState};
use super::git::Repository;

/// Something that two runs were given differently.
///
/// ```
/// use accelerator_track::{Difference, Provenance, diff};
///
/// let seeded = |seed| Provenance { seeds: [("model".into(), seed)].into(), ..Provenance::default() };
/// let found: Vec<Difference> = diff(&seeded(1), &seeded(2));
/// assert_eq!((found[0].what.as_str(), found[0].b.as_deref()), ("seed model", Some("2")));
/// assert_eq!(found[0].to_string(), "seed model: 1, 2");
/// ```
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
pub struct Difference {
    /// What differs, as `source src/main.rs`, `binary`, `argument 3` or `environment RAYON_NUM_THREADS`.
    pub what: String,
    /// What the first run had; none where it had no such thing.
    pub a: Option<String>,
    /// What the second run had.
    pub b: Option<String>,
}

/// How two runs differ in what they were given, from what is recorded alone; the most important first: sources,
/// commit, lock file, features, binary, arguments, data, seeds, plan, environment, devices and host.
///
/// Where the commits differ, only those source files can be named that differ from their commit;
/// [`diff_with_git`] names them all.
///
/// ```
/// use accelerator_track::{Commit, Provenance, SourceState, diff};
///
/// let changed = [("src/main.rs".to_owned(), SourceState::Hash("1a2b".into()))];
/// let commit = Commit { hash: Some("3c4d".into()), ..Commit::default() };
/// let clean = Provenance { commit: Some(commit.clone()), ..Provenance::default() };
/// let dirty = Provenance { commit: Some(Commit { changed: changed.into(), ..commit }), ..Provenance::default() };
/// assert!(diff(&clean, &clean).is_empty());
/// assert_eq!(diff(&clean, &dirty)[0].what, "source src/main.rs");
/// ```
#[must_use]
pub fn diff(a: &Provenance, b: &Provenance) -> Vec<Difference> {
    all(a, b, None)
}

/// The same, with the git repository that has `folder`: it knows which files differ between commits. Where it is not
/// there or has not got the commits, this is [`diff`].
///
/// ```
/// use accelerator_track::{Provenance, diff_with_git};
///
/// let a = Provenance { world: Some(2), ..Provenance::default() };
/// let b = Provenance { world: Some(4), ..Provenance::default() };
/// assert_eq!(diff_with_git(&a, &b, ".")[0].to_string(), "world: 2, 4");
/// ```
#[must_use]
pub fn diff_with_git(a: &Provenance, b: &Provenance, folder: impl AsRef<Path>) -> Vec<Difference> {
    let folder = folder.as_ref().canonicalize().ok();
    all(
        a,
        b,
        folder
            .and_then(|folder| Repository::around(&folder))
            .as_ref(),
    )
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
    found.words("argument", &a.arguments, &b.arguments);
    found.words("argument of accel-launch", &a.launched_by, &b.launched_by);
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

    /// Arguments by their position; the program's name is not one.
    fn words(&mut self, kind: &str, a: &[String], b: &[String]) {
        for at in 1..a.len().max(b.len()) {
            self.compare(format!("{kind} {at}"), a.get(at), b.get(at));
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
            "argument 2",
            "argument 3",
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
