//! The program of a launch: finds it, and makes it ready to run on this host.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use super::runnable;
use crate::cargo::Build;
use crate::error::Result;
use crate::event::Channel;
use crate::output::Output;
use crate::settings::options::Options;
use crate::settings::target::{Selector, Target};
use crate::supervisor::spawner::{LocalSpawner, Program};

/// A program that has been found, and not yet been built.
#[derive(Debug)]
pub(super) struct FoundProgram<'a> {
    source: ProgramSource,
    options: &'a Options,
    pub(super) arguments: &'a [OsString],
}

#[derive(Debug)]
enum ProgramSource {
    /// A file that is run as it is.
    File(PathBuf),
    /// A target that cargo builds.
    Cargo(Selector, Build),
}

impl<'a> FoundProgram<'a> {
    /// Finds the program that `options` name; `arguments` are its own.
    ///
    /// # Errors
    /// When there is none, or cargo cannot tell; when a signal ends cargo.
    pub(super) fn find(
        options: &'a Options,
        arguments: &'a [OsString],
        channel: &Channel,
    ) -> Result<Self> {
        let source = ProgramSource::of(Target::parse(options)?, options, channel)?;
        let arguments = match (&source, arguments) {
            (ProgramSource::Cargo(..), [dashes, rest @ ..]) if dashes == "--" => rest,
            _ => arguments,
        };
        Ok(Self {
            source,
            options,
            arguments,
        })
    }

    /// Builds the program, or checks that this host can run the file.
    ///
    /// # Errors
    /// When it cannot be built or run; when a signal arrives.
    pub(super) fn make_ready(&self, channel: &Channel) -> Result<Program> {
        let program = match &self.source {
            ProgramSource::File(path) => {
                runnable::check_first_line(path)?;
                if self.options.hosts() > 1 {
                    // Hosts may differ, and a rank that cannot start ends those of all.
                    runnable::check(path, channel)?;
                }
                path.clone()
            }
            ProgramSource::Cargo(_, build) => build.run(self.options, channel)?,
        };
        Ok(Program {
            spawner: LocalSpawner {
                program,
                arguments: self.arguments.to_vec(),
            },
            package_dir: self.package_dir().map(Path::to_path_buf),
        })
    }

    /// Returns the path of the program, or a description of one that is not built yet.
    pub(super) fn path(&self) -> PathBuf {
        match &self.source {
            ProgramSource::File(path) => path.clone(),
            ProgramSource::Cargo(selector, _) => {
                format!("<the program built from {selector}>").into()
            }
        }
    }

    /// Returns the folder of its package, if cargo builds it.
    pub(super) fn package_dir(&self) -> Option<&Path> {
        self.build().map(Build::package_dir)
    }

    /// Returns its build, if cargo builds it.
    pub(super) fn build(&self) -> Option<&Build> {
        match &self.source {
            ProgramSource::File(_) => None,
            ProgramSource::Cargo(_, build) => Some(build),
        }
    }

    /// Warns if an option of the launcher comes after the target, so that it is passed to the program.
    pub(super) fn warn_of_misplaced(&self, output: &Output) {
        let target = match (self.build(), &self.options.example, &self.options.bin) {
            (Some(_), Some(name), _) => format!("--example {name}"),
            (Some(_), None, Some(name)) => format!("--bin {name}"),
            _ => return,
        };
        let launcher_options = [
            "--num-processes",
            "--gpu-ids",
            "--log-dir",
            "--features",
            "--package",
            "--profile",
            "--release",
        ];
        if let Some(option) = self.argument(&launcher_options) {
            output.note(&format!(
                "{option} comes after `{target}` and is passed to the program; put the launcher's options before it"
            ));
        }
    }

    /// Returns the option for a number of processes that is among the program's arguments, if any.
    pub(super) fn number_of_processes(&self) -> Option<&'static str> {
        self.argument(&[
            "-n",
            "-np",
            "--num-processes",
            "--num_processes",
            "--nproc-per-node",
        ])
    }

    /// Returns the first of `options` that is among the program's arguments.
    fn argument(&self, options: &[&'static str]) -> Option<&'static str> {
        let given = |option: &&str| self.arguments.iter().any(|argument| argument == option);
        options.iter().copied().find(given)
    }
}

impl ProgramSource {
    /// Finds the build of a cargo target. A name is that of a target, else of a program of the PATH.
    fn of(target: Target, options: &Options, channel: &Channel) -> Result<Self> {
        let name = match target {
            Target::Program(path) => return Ok(Self::File(path)),
            Target::Cargo(selector) => {
                let build = Build::find(&selector, options, channel)?;
                return Ok(Self::Cargo(selector, build));
            }
            Target::Name(name) => name,
        };
        match Build::find_named(&name, options, channel) {
            Ok(Some(build)) => Ok(Self::Cargo(Selector::AnyNamed(name), build)),
            Ok(None) => Target::on_path(&name, options).map(Self::File),
            Err(error) if error.is_usage() || error.is_interrupted() => Err(error),
            // A package that cargo cannot read is in no way of a program of the PATH.
            Err(error) => Target::on_path(&name, options)
                .map(Self::File)
                .map_err(|_| error),
        }
    }
}
