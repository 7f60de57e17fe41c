//! A program as an image of containers: one layer on a base, made and pushed without Docker.
//!
//! The layer has `accel-launch` at [`LAUNCHER_PATH`], and the program and what is included in [`APP_FOLDER`]. The same files
//! give the same digest, on every machine and at every time, so a registry keeps them once.

use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::error::{Error, Result};

/// Where the image has the launcher.
pub(crate) const LAUNCHER_PATH: &str = "/usr/local/bin/accel-launch";

/// The folder of the image that has the program and what is included.
pub(crate) const APP_FOLDER: &str = "/app";

/// What an image is made of.
#[derive(Clone, Debug)]
pub(crate) struct ImageBuild {
    /// The program, a file of this machine.
    pub(crate) program: PathBuf,
    /// `accel-launch`, a file of this machine.
    pub(crate) launcher: PathBuf,
    /// Files and folders of this machine, and where the image has them: a path below [`APP_FOLDER`].
    pub(crate) includes: Vec<(PathBuf, String)>,
    /// The image that the layer is put on: a reference, `oci-archive:FILE`, or `scratch`.
    pub(crate) base: String,
}

/// The registries, as this machine reaches them and is known there.
#[derive(Debug, Default)]
pub(crate) struct Registries {
    /// Those that are reached without TLS, `HOST:PORT`, besides those of this machine.
    _insecure: Vec<String>,
}

/// An image that is made, and is nowhere yet.
#[derive(Debug)]
pub(crate) struct BuiltImage {
    digest: String,
    notes: Vec<String>,
}

/// An image that a registry has.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct PushedImage {
    /// As it was asked for: `registry.example/team/mnist:1`.
    pub(crate) reference: String,
    /// What names this very image forever: `registry.example/team/mnist@sha256:…`.
    pub(crate) reference_by_digest: String,
}

impl ImageBuild {
    /// Where the image has the program: `/app/NAME`.
    ///
    /// # Errors
    /// When the path has no name.
    pub(crate) fn program_path(&self) -> Result<String> {
        Err(Error::usage("not built yet"))
    }

    /// Makes the layer, and checks the programs in it against the base. Of the base, only what says what it is is pulled;
    /// its layers, too, where their contents are not known yet.
    ///
    /// # Errors
    /// When a file is not there, the base is not, or the programs cannot run on it.
    pub(crate) fn build(&self, _registries: &Registries) -> Result<BuiltImage> {
        Err(Error::usage("not built yet"))
    }
}

impl Registries {
    /// Registries of which those in `insecure`, `HOST:PORT`, are reached without TLS, as those of this machine are.
    pub(crate) fn new(insecure: &[String]) -> Self {
        Self {
            _insecure: insecure.to_vec(),
        }
    }
}

impl BuiltImage {
    /// The digest of its manifest.
    pub(crate) fn digest(&self) -> &str {
        &self.digest
    }

    /// What could not be checked, a sentence each.
    pub(crate) fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Pushes what the registry lacks of it.
    ///
    /// # Errors
    /// When the registry is not reached, or refuses it.
    pub(crate) fn push(&self, _registries: &Registries, _reference: &str) -> Result<PushedImage> {
        Err(Error::usage("not built yet"))
    }

    /// Writes it as an archive, which `ctr images import` and `docker load` take. `name` is its reference there.
    ///
    /// # Errors
    /// When a layer of the base cannot be pulled, or the archive not written.
    pub(crate) fn save(
        &self,
        _registries: &Registries,
        _archive: &Path,
        _name: &str,
    ) -> Result<()> {
        Err(Error::usage("not built yet"))
    }
}
