//! The output of `cargo metadata`.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Deserialize;

use super::suggest::Suggestion;
use crate::error::{Error, Result};
use crate::event::Channel;
use crate::process::End;
use crate::settings::target::{Selector, TargetKind};
use crate::supervisor::tool::{self, Stderr};

/// The answer of `cargo metadata`, as far as it is needed.
#[derive(Debug, Deserialize)]
pub(crate) struct Metadata {
    packages: Vec<Package>,
    #[serde(default)]
    workspace_default_members: Vec<String>,
    workspace_root: PathBuf,
}

/// A package of the workspace.
#[derive(Debug, Deserialize)]
pub(crate) struct Package {
    id: String,
    pub(crate) name: String,
    pub(crate) manifest_path: PathBuf,
    targets: Vec<CargoTarget>,
}

/// A target of a package: a library, a binary, an example, a test.
#[derive(Debug, Deserialize)]
pub(crate) struct CargoTarget {
    pub(crate) name: String,
    kind: Vec<String>,
    pub(crate) src_path: PathBuf,
}

/// What `cargo build` reports when it has made something.
#[derive(Debug, Deserialize)]
pub(crate) struct Artifact {
    pub(crate) target: CargoTarget,
    pub(crate) executable: Option<PathBuf>,
}

/// A target that can be run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Found<'a> {
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
        let finished = tool::run(cargo, Stderr::Keep, channel)?;
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

    /// Whether plain `cargo build` in this place would build `package`.
    pub(crate) fn is_default(&self, package: &Package) -> bool {
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
    /// Whether `wanted` names this package: `name`, or `name@version`; other forms of
    /// cargo's package ids are left for cargo to judge.
    fn is(&self, wanted: &str) -> bool {
        wanted.contains("://") || wanted.split('@').next() == Some(self.name.as_str())
    }
}

impl CargoTarget {
    fn has(&self, kind: TargetKind) -> bool {
        self.kind.iter().any(|name| name == kind.name())
    }

    /// Whether it is the target of this kind and name.
    pub(crate) fn is(&self, kind: TargetKind, name: &str) -> bool {
        self.has(kind) && self.name == name
    }
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
}
