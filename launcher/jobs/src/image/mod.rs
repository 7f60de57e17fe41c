//! A program as an image of containers: one layer on a base, made and pushed without Docker.
//!
//! The layer has `accel-launch` at [`LAUNCHER_PATH`], and the program and what is included in [`APP_FOLDER`]. The same files
//! on the same base give the same digest, on every machine and at every time, so a registry keeps them once.

mod archive;
mod base;
mod built;
mod contents;
mod elf;
mod layer;
mod refusal;
mod registry;

use std::collections::BTreeSet;
use std::path::PathBuf;

pub(crate) use built::{BuiltImage, PushedImage};
pub(crate) use registry::Registries;

use crate::error::{Error, Result};
use base::Base;
use elf::ElfFile;
use layer::{LayerFiles, file_name};

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

impl ImageBuild {
    /// Where the image has the program: `/app/NAME`.
    ///
    /// # Errors
    /// When the path has no name.
    pub(crate) fn program_path(&self) -> Result<String> {
        Ok(format!("{APP_FOLDER}/{}", file_name(&self.program)?))
    }

    /// Makes the layer, and checks the programs in it against the base. Of the base, only what says what it is is pulled;
    /// its layers, too, where their contents are not known yet.
    ///
    /// # Errors
    /// When a file is not there, the base is not, or the programs cannot run on it.
    pub(crate) fn build(&self, registries: &Registries) -> Result<BuiltImage> {
        let program = self.program_path()?;
        let mut files = LayerFiles::default();
        files.add_program(&self.launcher, LAUNCHER_PATH)?;
        files.add_program(&self.program, &program)?;
        for (path, destination) in &self.includes {
            files.add(path, &below_app(destination)?)?;
        }
        let mut notes = Vec::new();
        let mut programs = Vec::new();
        for path in [&self.launcher, &self.program] {
            match ElfFile::read(path)? {
                Some(program) => programs.push(program),
                None => notes.push(format!(
                    "{} is a script, so it is not known whether the base has what it needs",
                    path.display()
                )),
            }
        }
        let architecture = same_architecture(&programs)?;
        let base = Base::open(registries, &self.base, architecture)?;
        let has: BTreeSet<_> = files.names().map(str::to_owned).collect();
        notes.extend(contents::check(registries, &base, &programs, &has)?);
        BuiltImage::new(base, files.write()?, &program, &programs, notes)
    }
}

/// The processor of this machine, as images call it.
fn architecture_here() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

fn same_architecture(programs: &[ElfFile]) -> Result<&'static str> {
    match programs {
        [first, second, ..] if first.architecture != second.architecture => {
            Err(Error::usage(format!(
                "{} is for {}, and {} for {}; compile one of them for the other's processor",
                first.path.display(),
                first.architecture,
                second.path.display(),
                second.architecture
            )))
        }
        [first, ..] => Ok(first.architecture),
        [] => Ok(architecture_here()),
    }
}

/// Where an included file is in the image.
fn below_app(destination: &str) -> Result<String> {
    let below = match destination.strip_prefix(APP_FOLDER) {
        Some(below) if below.starts_with('/') => below.trim_start_matches('/'),
        _ => destination,
    };
    let names = below.split('/').filter(|name| !["", "."].contains(name));
    let names: Vec<_> = names.collect();
    match below.starts_with('/') || names.is_empty() || names.contains(&"..") {
        false => Ok(format!("{APP_FOLDER}/{}", names.join("/"))),
        true => Err(Error::usage(format!(
            "{destination:?} is no place below {APP_FOLDER} of the image, such as data/train.bin"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn included_files_are_below_the_folder_of_the_program() {
        for (destination, place) in [
            ("data", "/app/data"),
            ("./data//a/", "/app/data/a"),
            ("/app/data", "/app/data"),
        ] {
            assert_eq!(below_app(destination).unwrap(), place);
        }
        for destination in [
            "",
            ".",
            "/",
            "/etc/passwd",
            "../x",
            "a/../../x",
            "/app",
            "/app/../x",
        ] {
            let place = below_app(destination);
            assert!(place.is_err(), "{destination}: {place:?}");
        }
    }
}
