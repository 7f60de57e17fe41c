//! Finds a cargo target and builds it.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Deserialize;

use crate::error::{Error, Result};
use crate::event::Channel;
use crate::process::End;
use crate::settings::options::Options;
use crate::settings::target::{Selector, TargetKind};
use crate::supervisor::group::{Stderr, run_tool};
use crate::variables;

/// A target that was found, and the arguments with which cargo builds it.
#[derive(Clone, Debug)]
pub(crate) struct Build {
    kind: TargetKind,
    name: String,
    source: PathBuf,
    package_dir: PathBuf,
    arguments: Vec<OsString>,
}

impl Build {
    /// Looks `selector` up in the workspace of the current folder; a source file also in
    /// its own.
    ///
    /// # Errors
    /// When there is no cargo package, or no such target in it: the error lists similar ones.
    pub(crate) fn find(selector: &Selector, options: &Options, channel: &Channel) -> Result<Self> {
        let here = env::current_dir().map_err(|error| {
            Error::system("the current folder cannot be read").with_source(error)
        })?;
        let mut manifests = Vec::new();
        manifests.extend(manifest_above(&here).map(|_| None));
        if let Selector::Source(path) = selector {
            manifests.extend(path.parent().and_then(manifest_above).map(Some));
        }
        let mut known = Vec::new();
        for manifest in &manifests {
            let metadata = Metadata::read(cargo(), manifest.as_deref(), channel)?;
            match Self::choose(&metadata, manifest.as_deref(), selector, options)? {
                Some(build) => return Ok(build),
                None => known.extend(metadata.runnable()),
            }
        }
        if manifests.is_empty() {
            return Err(Error::usage(format!(
                "{selector} needs a cargo package, but there is no Cargo.toml in {} or above; start it from a folder \
                 of the package",
                here.display()
            )));
        }
        Err(not_found(
            selector,
            options.package.as_deref(),
            known,
            &here,
        ))
    }

    /// Looks up the example or binary `name` in the workspace of the current folder; `None` if there is none.
    ///
    /// # Errors
    /// When cargo cannot tell; when the name can mean several targets.
    pub(crate) fn find_named(
        name: &str,
        options: &Options,
        channel: &Channel,
    ) -> Result<Option<Self>> {
        let here = env::current_dir().ok();
        if here.as_deref().and_then(manifest_above).is_none() {
            return Ok(None);
        }
        let metadata = Metadata::read(cargo(), None, channel)?;
        let selector = Selector::AnyNamed(name.to_owned());
        Self::choose(&metadata, None, &selector, options)
    }

    /// The folder of the package that the target belongs to.
    pub(crate) fn package_dir(&self) -> &Path {
        &self.package_dir
    }

    /// The command as a user would type it.
    pub(crate) fn command_line(&self) -> String {
        let arguments: Vec<_> = self
            .arguments
            .iter()
            .map(|argument| argument.to_string_lossy())
            .collect();
        format!("cargo build {}", arguments.join(" "))
    }

    /// Builds the target and returns the path of its program.
    ///
    /// Cargo's progress and the compiler's messages go to standard error.
    ///
    /// # Errors
    /// When cargo fails, or a signal ends it.
    pub(crate) fn run(&self, options: &Options, channel: &Channel) -> Result<PathBuf> {
        let mut command = cargo();
        command
            .arg("build")
            .args(&self.arguments)
            .arg("--message-format=json-render-diagnostics");
        if options.quiet {
            command.arg("--quiet");
        }
        let finished = run_tool(command, Stderr::Show, channel)?;
        let (kind, name) = (self.kind.name(), &self.name);
        if finished.end != End::Code(0) {
            return Err(Error::build(format!(
                "cargo could not build {kind} `{name}` ({}); nothing was started",
                finished.end
            )));
        }
        finished
            .stdout
            .split(|&byte| byte == b'\n')
            .filter_map(|line| serde_json::from_slice::<Artifact>(line).ok())
            .filter(|artifact| artifact.target.is(self.kind, name) && artifact.target.src_path == self.source)
            .find_map(|artifact| artifact.executable)
            .ok_or_else(|| {
                Error::build(format!(
                    "cargo built {kind} `{name}` but named no program for it; is its crate-type a library?"
                ))
            })
    }

    /// The one target of a workspace that `selector` means.
    fn choose(
        metadata: &Metadata,
        manifest: Option<&Path>,
        selector: &Selector,
        options: &Options,
    ) -> Result<Option<Self>> {
        let found = metadata.matches(selector, options.package.as_deref());
        let defaults = found.iter().filter(|one| metadata.is_default(one.package));
        let defaults: Vec<_> = defaults.collect();
        match (found.as_slice(), defaults.as_slice()) {
            ([], _) => Ok(None),
            (&[only], _) | (_, &[&only]) => Ok(Some(Self::new(&only, metadata, manifest, options))),
            _ => Err(ambiguous(selector, &found)),
        }
    }

    fn new(
        found: &Found<'_>,
        metadata: &Metadata,
        manifest: Option<&Path>,
        options: &Options,
    ) -> Self {
        let mut arguments: Vec<OsString> = Vec::new();
        let mut push = |items: &[&str]| arguments.extend(items.iter().map(OsString::from));
        match options.profile.as_deref() {
            None | Some("release") => push(&["--release"]),
            Some(profile) => push(&["--profile", profile]),
        }
        if let Some(manifest) = manifest {
            push(&["--manifest-path", &manifest.to_string_lossy()]);
        }
        // The same packages that plain `cargo build` would choose, where these have the
        // target: another choice could build the dependencies again with other features.
        match options.package.as_deref() {
            Some(package) => push(&["--package", package]),
            None if !metadata.is_default(found.package) => {
                push(&["--package", &found.package.name])
            }
            None => {}
        }
        for features in &options.features {
            push(&["--features", features]);
        }
        if options.no_default_features {
            push(&["--no-default-features"]);
        }
        push(&[&format!("--{}", found.kind.name()), &found.target.name]);
        Self {
            kind: found.kind,
            name: found.target.name.clone(),
            source: found.target.src_path.clone(),
            package_dir: found
                .package
                .manifest_path
                .parent()
                .map(Path::to_path_buf)
                .unwrap_or_default(),
            arguments,
        }
    }
}

/// Cargo, the same one that started the launcher if one did.
pub(crate) fn cargo() -> Command {
    let mut command =
        Command::new(accelerator_host::variable("CARGO").unwrap_or_else(|| "cargo".into()));
    for name in variables::of_cargo() {
        command.env_remove(name);
    }
    command
}

fn manifest_above(folder: &Path) -> Option<PathBuf> {
    folder
        .ancestors()
        .map(|ancestor| ancestor.join("Cargo.toml"))
        .find(|manifest| manifest.is_file())
}

fn ambiguous(selector: &Selector, found: &[Found<'_>]) -> Error {
    let listed: Vec<_> = found
        .iter()
        .map(|found| {
            format!(
                "--package {} --{} {}",
                found.package.name,
                found.kind.name(),
                found.target.name
            )
        })
        .collect();
    Error::usage(format!(
        "{selector} can mean several targets; say which: {}",
        listed.join(", or ")
    ))
}

fn not_found(
    selector: &Selector,
    package: Option<&str>,
    known: Vec<Suggestion>,
    here: &Path,
) -> Error {
    let place = match package {
        Some(package) => format!("package {package}"),
        None => format!("the cargo workspace of {}", here.display()),
    };
    let wanted = match selector {
        Selector::Named(_, name) | Selector::AnyNamed(name) => name.clone(),
        Selector::Source(path) => path
            .file_stem()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned(),
    };
    let near = nearest(&wanted, known);
    let what = match selector {
        Selector::Named(..) | Selector::AnyNamed(_) => {
            format!("{selector}: there is no such target in {place}")
        }
        Selector::Source(_) => {
            format!("{selector} is not the source file of a binary or an example in {place}")
        }
    };
    Error::usage(if near.is_empty() {
        format!("{what}, which has none that can be run; add one, or give a program's path")
    } else {
        format!("{what}; near it are:\n  {}", near.join("\n  "))
    })
}

/// The answer of `cargo metadata`, as far as it is needed.
#[derive(Debug, Deserialize)]
struct Metadata {
    packages: Vec<Package>,
    #[serde(default)]
    workspace_default_members: Vec<String>,
    workspace_root: PathBuf,
}

#[derive(Debug, Deserialize)]
struct Package {
    id: String,
    pub(crate) name: String,
    pub(crate) manifest_path: PathBuf,
    targets: Vec<CargoTarget>,
}

/// A target of a package: a library, a binary, an example, a test.
#[derive(Debug, Deserialize)]
struct CargoTarget {
    pub(crate) name: String,
    kind: Vec<String>,
    pub(crate) src_path: PathBuf,
}

/// The report of `cargo build` about something that it has made.
#[derive(Debug, Deserialize)]
struct Artifact {
    pub(crate) target: CargoTarget,
    pub(crate) executable: Option<PathBuf>,
}

/// A target that can be run.
#[derive(Clone, Copy, Debug)]
struct Found<'a> {
    pub(crate) package: &'a Package,
    pub(crate) target: &'a CargoTarget,
    pub(crate) kind: TargetKind,
}

impl Metadata {
    /// Asks cargo about the workspace of `manifest`, or of the current folder.
    ///
    /// # Errors
    /// When cargo fails or a signal ends it.
    pub(crate) fn read(
        mut cargo: Command,
        manifest: Option<&Path>,
        channel: &Channel,
    ) -> Result<Self> {
        cargo.args(["metadata", "--no-deps", "--format-version", "1"]);
        if let Some(manifest) = manifest {
            cargo.arg("--manifest-path").arg(manifest);
        }
        let finished = run_tool(cargo, Stderr::Keep, channel)?;
        if finished.end != End::Code(0) {
            let said = String::from_utf8_lossy(&finished.stderr);
            return Err(Error::build(format!(
                "`cargo metadata` failed ({}):\n{}",
                finished.end,
                said.trim_end()
            )));
        }
        serde_json::from_slice(&finished.stdout).map_err(|error| {
            Error::build(
                "`cargo metadata` gave an answer that cannot be read; is cargo older than 1.71?",
            )
            .with_source(error)
        })
    }

    fn targets(&self) -> impl Iterator<Item = Found<'_>> {
        self.packages.iter().flat_map(|package| {
            package.targets.iter().filter_map(move |target| {
                let kind = [TargetKind::Example, TargetKind::Bin]
                    .into_iter()
                    .find(|kind| target.has(*kind))?;
                Some(Found {
                    package,
                    target,
                    kind,
                })
            })
        })
    }

    /// The targets that `selector` can mean, in `package` if one is named.
    pub(crate) fn matches(&self, selector: &Selector, package: Option<&str>) -> Vec<Found<'_>> {
        self.targets()
            .filter(|found| package.is_none_or(|wanted| found.package.is(wanted)))
            .filter(|found| match selector {
                Selector::Named(kind, name) => found.target.is(*kind, name),
                Selector::AnyNamed(name) => found.target.name == *name,
                // The path in the manifest can lead over links.
                Selector::Source(path) => {
                    found.target.src_path == *path
                        || std::fs::canonicalize(&found.target.src_path)
                            .is_ok_and(|source| source == *path)
                }
            })
            .collect()
    }

    /// Returns `true` if plain `cargo build` in this place would build `package`.
    fn is_default(&self, package: &Package) -> bool {
        self.workspace_default_members.contains(&package.id)
    }

    /// All targets that can be run, as suggestions.
    pub(crate) fn runnable(&self) -> Vec<Suggestion> {
        self.targets()
            .map(|found| Suggestion {
                name: found.target.name.clone(),
                shown: format!(
                    "{} (--{} {}, package {})",
                    found
                        .target
                        .src_path
                        .strip_prefix(&self.workspace_root)
                        .unwrap_or(&found.target.src_path)
                        .display(),
                    found.kind.name(),
                    found.target.name,
                    found.package.name
                ),
            })
            .collect()
    }
}

impl Package {
    /// Returns `true` if `wanted` names this package: `name`, or `name@version`; other forms of
    /// cargo's package ids are left for cargo to judge.
    fn is(&self, wanted: &str) -> bool {
        wanted.contains("://") || wanted.split('@').next() == Some(self.name.as_str())
    }
}

impl CargoTarget {
    fn has(&self, kind: TargetKind) -> bool {
        self.kind.iter().any(|name| name == kind.name())
    }

    /// Returns `true` if it is the target of this kind and name.
    pub(crate) fn is(&self, kind: TargetKind, name: &str) -> bool {
        self.has(kind) && self.name == name
    }
}

/// The number of targets that an error lists.
const SUGGESTIONS: usize = 8;

/// A target that an error can offer instead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Suggestion {
    pub(crate) name: String,
    /// The form in which the error shows it.
    pub(crate) shown: String,
}

/// The targets whose names are most like `wanted`, the most alike first.
fn nearest(wanted: &str, mut known: Vec<Suggestion>) -> Vec<String> {
    known.sort_by(|one, other| {
        let nearness = |suggestion: &Suggestion| strsim::levenshtein(wanted, &suggestion.name);
        nearness(one)
            .cmp(&nearness(other))
            .then_with(|| one.shown.cmp(&other.shown))
    });
    known.dedup_by(|one, other| one.shown == other.shown);
    known
        .into_iter()
        .take(SUGGESTIONS)
        .map(|suggestion| suggestion.shown)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_by_name_and_version() {
        let package = Package {
            id: String::new(),
            name: "a".into(),
            manifest_path: "/".into(),
            targets: Vec::new(),
        };
        assert!(package.is("a"));
        assert!(package.is("a@1.0"));
        assert!(package.is("path+file:///x#a@1.0"));
        assert!(!package.is("b"));
    }

    #[test]
    fn the_nearest_comes_first() {
        let known = [
            "train",
            "mnist_plain",
            "mnist",
            "mnist",
            "regression",
            "u",
            "v",
            "w",
            "x",
            "y",
            "z",
        ];
        let known = known.map(|name| Suggestion {
            name: name.into(),
            shown: name.into(),
        });
        let near = nearest("mnits", known.to_vec());
        assert_ne!(near[1], "mnist", "each is listed once");
        assert_eq!(near[0], "mnist");
        assert_eq!(near.len(), SUGGESTIONS);
    }
}
