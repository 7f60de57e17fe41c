//! The target of a launch: a program, or something that cargo builds.

use std::fmt;
use std::path::{Path, PathBuf};

use accelerator_host::process::{self, is_executable};

use crate::error::{Error, Result};
use crate::settings::options::Options;

/// The target that the user asked to run. Paths have been checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// An executable file, by its absolute path.
    Program(PathBuf),
    /// A target of a cargo package, still to be found and built.
    Cargo(Selector),
    /// A name that is no file of the current folder: a cargo target, else a program of the PATH.
    Name(String),
}

/// The way in which a cargo target was named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Selector {
    /// Its source file, as a canonical path.
    Source(PathBuf),
    /// Its kind and name.
    Named(TargetKind, String),
    /// Its name, whatever its kind.
    AnyNamed(String),
}

/// The kinds of cargo targets that can be run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TargetKind {
    Example,
    Bin,
}

impl TargetKind {
    /// The kind as cargo writes it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Example => "example",
            Self::Bin => "bin",
        }
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Source(path) => write!(formatter, "{}", path.display()),
            Self::Named(kind, name) => write!(formatter, "--{} {name}", kind.name()),
            Self::AnyNamed(name) => formatter.write_str(name),
        }
    }
}

impl Target {
    /// Reads the target from the options.
    ///
    /// # Errors
    /// When none is named; when the script does not exist or cannot be run; when options for
    /// cargo come with a program that cargo does not build.
    pub(crate) fn parse(options: &Options) -> Result<Self> {
        if let Some(path) = &options.prebuilt {
            return program(path).map(Self::Program);
        }
        if let Some(name) = &options.example {
            return Ok(Self::Cargo(Selector::Named(
                TargetKind::Example,
                name.clone(),
            )));
        }
        if let Some(name) = &options.bin {
            return Ok(Self::Cargo(Selector::Named(TargetKind::Bin, name.clone())));
        }
        let Some(script) = &options.script else {
            return Err(Error::usage(
                "nothing to start: give a program, a source file such as examples/mnist.rs, `--example NAME` or \
                 `--bin NAME`; `accel-launch --help` shows more",
            ));
        };
        if script
            .extension()
            .is_some_and(|extension| extension == "rs")
        {
            return source(script).map(|path| Self::Cargo(Selector::Source(path)));
        }
        let is_name = !script.as_os_str().as_encoded_bytes().contains(&b'/');
        match script.to_str() {
            Some(name) if is_name && !script.is_file() => Ok(Self::Name(name.to_owned())),
            _ => run_as_it_is(program(script)?, options).map(Self::Program),
        }
    }

    /// The program of the PATH that a name means which is no cargo target.
    ///
    /// # Errors
    /// When there is none; when options for cargo come with it.
    pub(crate) fn on_path(name: &str, options: &Options) -> Result<PathBuf> {
        let script = Path::new(name);
        match process::on_path(script) {
            // A folder, say, which is rather meant than a program elsewhere.
            _ if script.exists() => run_as_it_is(program(script)?, options),
            Some(found) => run_as_it_is(found, options),
            None if name == "launch" => Err(Error::usage(
                "leave `launch` out: `accel-launch [OPTIONS] SCRIPT` starts a program",
            )),
            None => Err(Error::usage(format!(
                "the script {name} cannot be found: it is no file of the current folder, no example or binary of a \
                 cargo package here, and no program of the PATH"
            ))),
        }
    }
}

fn run_as_it_is(program: PathBuf, options: &Options) -> Result<PathBuf> {
    match cargo_option(options) {
        Some(option) => Err(Error::usage(format!(
            "{option} is for a target that cargo builds, but {} is a program that is run as it is; leave the \
             option out, or name the target by its source file, `--example` or `--bin`",
            program.display()
        ))),
        None => Ok(program),
    }
}

fn program(script: &Path) -> Result<PathBuf> {
    let shown = script.display();
    let metadata = std::fs::metadata(script).map_err(|error| {
        Error::usage(format!("the script {shown} cannot be found")).with_source(error)
    })?;
    if metadata.is_dir() {
        return Err(Error::usage(format!(
            "the script {shown} is a folder; give the program in it, or the source file of a cargo target"
        )));
    }
    if !is_executable(script) {
        if script.extension().is_some_and(|end| end == "py") {
            return Err(Error::usage(format!(
                "the script {shown} is Python, which python runs: write `accel-launch [OPTIONS] python {shown}`"
            )));
        }
        return Err(Error::usage(format!(
            "the script {shown} is not executable; make it so with `chmod +x {shown}`, or give a program that runs it"
        )));
    }
    std::path::absolute(script).map_err(|error| {
        Error::usage(format!("the path {shown} cannot be made absolute")).with_source(error)
    })
}

fn source(script: &Path) -> Result<PathBuf> {
    let shown = script.display();
    let path = std::fs::canonicalize(script).map_err(|error| {
        Error::usage(format!(
            "the source file {shown} cannot be found from the current folder"
        ))
        .with_source(error)
    })?;
    if path.is_dir() {
        return Err(Error::usage(format!(
            "the script {shown} is a folder; give the source file of a cargo target"
        )));
    }
    Ok(path)
}

/// The first option given that only makes sense for cargo.
fn cargo_option(options: &Options) -> Option<&'static str> {
    [
        (options.package.is_some(), "--package"),
        (!options.features.is_empty(), "--features"),
        (options.no_default_features, "--no-default-features"),
        (options.profile.is_some(), "--profile"),
        (options.release, "--release"),
    ]
    .into_iter()
    .find_map(|(given, name)| given.then_some(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(script: &str, change: impl FnOnce(&mut Options)) -> Result<Target> {
        let mut options = Options {
            script: Some(script.into()),
            ..Options::default()
        };
        change(&mut options);
        Target::parse(&options)
    }

    fn message<T: fmt::Debug>(result: Result<T>) -> String {
        result.unwrap_err().to_string()
    }

    #[test]
    fn tells_programs_from_sources() {
        assert_eq!(
            parse("/bin/sh", |_| {}).unwrap(),
            Target::Program("/bin/sh".into())
        );
        let here = std::fs::canonicalize("src/settings/target.rs").unwrap();
        assert_eq!(
            parse("src/settings/target.rs", |_| {}).unwrap(),
            Target::Cargo(Selector::Source(here))
        );
    }

    #[test]
    fn names_are_those_of_files_here_and_then_of_targets_and_the_path() {
        for name in ["sh", "src", "no-such-program"] {
            assert_eq!(parse(name, |_| {}).unwrap(), Target::Name(name.to_owned()));
        }
        assert!(message(parse("./sh", |_| {})).contains("cannot be found"));
        let sh = Target::on_path("sh", &Options::default()).unwrap();
        assert!(sh.is_absolute() && sh.ends_with("sh"));
    }

    #[test]
    fn says_what_is_wrong() {
        assert!(message(parse("/no/such/script", |_| {})).contains("cannot be found"));
        let none = Target::on_path("no-such-program", &Options::default());
        assert!(message(none).contains("no program of the PATH"));
        let none = Target::on_path("src", &Options::default());
        assert!(message(none).contains("is a folder"));
        assert!(message(parse("/", |_| {})).contains("is a folder"));
        assert!(message(parse("Cargo.toml", |_| {})).contains("chmod +x"));
        assert!(message(parse("no/such.rs", |_| {})).contains("source file no/such.rs"));
        assert!(
            message(parse("/bin/sh", |options| options.release = true))
                .contains("--release is for a target")
        );
        assert!(message(Target::parse(&Options::default())).contains("nothing to start"));
    }
}
