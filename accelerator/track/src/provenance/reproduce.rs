//! Starts a run again.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::capture::Repository;
use super::diff::diff_provenance;
use super::mask::MASK;
use super::{HashedFile, HostFacts, Provenance, digest_folder, hash_file, is_input, is_world_size};
use crate::error::{Error, Kind, Result};

/// The command that starts a run again, with warnings of what changed since.
///
/// ```no_run
/// # fn start(provenance: &accelerator_track::internal::Provenance) -> Result<(), Box<dyn std::error::Error>> {
/// let again = accelerator_track::internal::Reproduction::of(provenance)?;
/// for warning in again.warnings() {
///     eprintln!("{warning}");
/// }
/// let status = again.command().status()?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Reproduction {
    /// The launcher or the program, and its arguments.
    words: Vec<String>,
    is_launched: bool,
    directory: PathBuf,
    set: BTreeMap<String, String>,
    /// Variables that hold what was not recorded.
    inherited: Vec<String>,
    warnings: Vec<String>,
}

impl Reproduction {
    /// Plans to start a run again: its program, or `accel-launch` with the same options, which starts the program as it
    /// is, without building it again.
    ///
    /// This reads the program and the folders of data.
    ///
    /// # Errors
    /// If the command line is not recorded, or held secrets; if the program or the working directory is gone; or if
    /// another launcher than `accel-launch` started the ranks.
    pub fn of(provenance: &Provenance) -> Result<Self> {
        let [_, arguments @ ..] = provenance.arguments.as_slice() else {
            return Err(misuse(
                "the command line of the run is not recorded: start the program by hand",
            ));
        };
        let masked = provenance.arguments.iter().chain(&provenance.launched_by);
        if let Some(masked) = masked.into_iter().find(|word| word.contains(MASK)) {
            return Err(misuse(format!(
                "the argument {masked:?} of the run was a secret, which is not recorded: start it by hand as {:?}, with \
                 the secret in its place",
                provenance.arguments.join(" ")
            )));
        }
        let Some(binary) = &provenance.binary else {
            return Err(misuse(
                "which program the run was is not recorded: start it by hand",
            ));
        };
        let (program, rebuilt) = check_program(binary, provenance)?;
        let mut warnings = Vec::from_iter(rebuilt);
        let directory = provenance
            .directory
            .clone()
            .unwrap_or_else(|| ".".to_owned());
        let directory = PathBuf::from(directory);
        if !directory.is_dir() {
            let message = format!(
                "the run's working directory {} is gone: make it, with what the run read there",
                directory.display()
            );
            return Err(Error::new(Kind::NotFound, message));
        }
        let words = match provenance.launched_by.as_slice() {
            [] if ranks_of_others(provenance) => {
                return Err(misuse(
                    "another launcher than accel-launch started the ranks of the run: start them by that one again",
                ));
            }
            [] => std::iter::once(program)
                .chain(arguments.iter().cloned())
                .collect(),
            launch => launched(launch, arguments, program, &mut warnings),
        };
        let (set, inherited) = variables(provenance, &mut warnings);
        warn_of_inputs(provenance, &mut warnings);
        Ok(Self {
            words,
            is_launched: provenance.is_launched(),
            directory,
            set,
            inherited,
            warnings,
        })
    }

    /// Uses the `accel-launch` at this path instead of the one that started the run, by the name that it had then. A
    /// run that was started without one needs none.
    #[must_use]
    pub fn with_launcher(mut self, path: impl AsRef<Path>) -> Self {
        if let Some(launcher) = self.words.first_mut().filter(|_| self.is_launched) {
            *launcher = path.as_ref().to_string_lossy().into_owned();
        }
        self
    }

    /// Returns the command. Of the variables that are recorded it has those of the run, and no others.
    #[must_use]
    pub fn command(&self) -> Command {
        let (program, arguments) = self
            .words
            .split_first()
            .map_or(("", [].as_slice()), |(program, rest)| {
                (program.as_str(), rest)
            });
        let mut command = Command::new(program);
        command.args(arguments).current_dir(&self.directory);
        for (name, _) in std::env::vars_os() {
            let name = name.to_string_lossy();
            if is_input(&name) && !self.inherited.iter().any(|inherited| *inherited == name) {
                command.env_remove(&*name);
            }
        }
        command.envs(&self.set);
        command
    }

    /// Returns what changed since, so that the result may differ.
    #[must_use]
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }
}

/// Returns the command line of a launcher that starts `program` in place of what it built.
fn launched(
    launch: &[String],
    arguments: &[String],
    program: String,
    warnings: &mut Vec<String>,
) -> Vec<String> {
    let Some(options) = launch.strip_suffix(arguments) else {
        warnings.push(
            "what accel-launch was called with does not end with the program's arguments: it is started as it was, and \
             may build the program again"
                .to_owned(),
        );
        return launch.to_vec();
    };
    // It ends the options of cargo's targets, and is not the program's.
    let options = match options {
        [options @ .., dashes] if dashes == "--" => options,
        options => options,
    };
    let of_a_host = [
        "--node-rank",
        "--node_rank",
        "--machine-rank",
        "--machine_rank",
    ];
    let is_of_a_host = |word: &&String| of_a_host.iter().any(|option| word.starts_with(option));
    if let Some(word) = options.iter().find(is_of_a_host) {
        warnings.push(format!(
            "the run had several hosts ({word}): start accel-launch on the others, too"
        ));
    }
    let (launcher, options) = options
        .split_first()
        .map_or((&[][..], &[][..]), |(first, rest)| {
            (std::slice::from_ref(first), rest)
        });
    let prebuilt = ["--prebuilt".to_owned(), program];
    [launcher, &prebuilt, options, arguments].concat()
}

/// Returns true if the process was one of several ranks that `accel-launch` did not start.
fn ranks_of_others(provenance: &Provenance) -> bool {
    let mut recorded = provenance.environment.iter();
    recorded
        .any(|(name, size)| is_world_size(name) && size.parse::<usize>().is_ok_and(|size| size > 1))
}

/// Returns the variables to set, and those whose values are not recorded.
fn variables(
    provenance: &Provenance,
    warnings: &mut Vec<String>,
) -> (BTreeMap<String, String>, Vec<String>) {
    let recorded = &provenance.environment;
    let from_options: Vec<&str> = provenance.set_by_launcher().collect();
    // The launcher sets the devices that ranks see, which its option counts by.
    let is_launchers = |name: &str| {
        provenance.is_launched() && (from_options.contains(&name) || name == "CUDA_VISIBLE_DEVICES")
    };
    let mut set = BTreeMap::new();
    let mut inherited = Vec::new();
    for (name, value) in recorded {
        if !is_input(name) {
            continue;
        }
        if is_launchers(name) {
            inherited.push(name.clone());
        } else if value.contains(MASK) {
            warnings.push(format!(
                "{name} held a secret, which is not recorded: it is as it is set now"
            ));
            inherited.push(name.clone());
        } else {
            set.insert(name.clone(), value.clone());
        }
    }
    (set, inherited)
}

/// Returns the program's path, and a warning if it is another one now.
fn check_program(binary: &HashedFile, provenance: &Provenance) -> Result<(String, Option<String>)> {
    let path = &binary.path;
    let now = hash_file(Path::new(path)).map_err(|error| {
        let commit = provenance
            .commit
            .as_ref()
            .and_then(|commit| commit.hash.as_deref());
        let of = commit.map_or(String::new(), |commit| format!(" from commit {commit}"));
        let what = Error::io("read the program", Path::new(path), error);
        let kind = if what.is_not_found() {
            Kind::NotFound
        } else {
            Kind::Io
        };
        Error::new(kind, format!("{what}: build it again{of}"))
    })?;
    let (was, is) = match (&binary.hash, now.hash) {
        (Some(was), Some(is)) if *was == is => return Ok((path.clone(), None)),
        (Some(was), Some(is)) => (was, is),
        _ => {
            let warning = format!(
                "the hash of the program {path} was not recorded, so nobody knows whether it is the same: it had {} \
                 bytes, and has {}",
                binary.bytes, now.bytes
            );
            return Ok((path.clone(), Some(warning)));
        }
    };
    let changed = changed_since(provenance);
    let why = match changed.is_empty() {
        true => String::new(),
        false => format!("; since then these changed: {}", changed.join(", ")),
    };
    let warning =
        format!("the program {path} was built again: its BLAKE3 sum was {was}, and is {is}{why}");
    Ok((path.clone(), Some(warning)))
}

/// Warns if data or the machine are not what they were.
fn warn_of_inputs(provenance: &Provenance, warnings: &mut Vec<String>) {
    for (name, was) in &provenance.data {
        match digest_folder(&was.path) {
            Ok(now) if now.hash == was.hash => {}
            Ok(now) => warnings.push(format!(
                "the data {name} in {} is not what it was: {} files of {} bytes then, {} of {} now",
                was.path, was.files, was.bytes, now.files, now.bytes
            )),
            Err(error) => warnings.push(format!("the data {name} cannot be compared: {error}")),
        }
    }
    let now = HostFacts::of_this_machine();
    let was = &provenance.host;
    for (what, was, now) in [
        ("host", &was.name, &now.name),
        ("processor", &was.cpu, &now.cpu),
        ("operating system", &was.os, &now.os),
        ("kernel", &was.kernel, &now.kernel),
    ] {
        if let (Some(was), Some(now)) = (was, now)
            && was != now
        {
            warnings.push(format!("the {what} was {was}, and is {now}"));
        }
    }
    if let (Some(was), Some(now)) = (was.cores, now.cores)
        && was != now
    {
        warnings.push(format!("the process had {was} cores, and has {now}"));
    }
}

/// Names what changed of the sources and the lock file.
fn changed_since(provenance: &Provenance) -> Vec<String> {
    let Some(commit) = &provenance.commit else {
        return Vec::new();
    };
    let now = Repository::around(Path::new(&commit.root)).and_then(|repository| repository.state());
    let Some(now) = now else {
        return Vec::new();
    };
    let lock_file = provenance.lock_file.as_ref();
    let now = Provenance {
        commit: Some(now.commit),
        lock_file: lock_file.and_then(|file| hash_file(Path::new(&file.path)).ok()),
        ..Provenance::default()
    };
    let then = Provenance {
        commit: provenance.commit.clone(),
        lock_file: provenance.lock_file.clone(),
        ..Provenance::default()
    };
    let found = diff_provenance(&then, &now).into_iter();
    found.map(|found| found.what).collect()
}

fn misuse(message: impl Into<String>) -> Error {
    Error::new(Kind::Misuse, message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::assert_says;

    fn words(line: &str) -> Vec<String> {
        line.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn a_launch_is_done_again_with_the_program_that_was_built() {
        for (launch, arguments, expected) in [
            (
                "accel-launch -n 2 examples/mnist.rs --epochs 1",
                "--epochs 1",
                "accel-launch --prebuilt /b -n 2 examples/mnist.rs --epochs 1",
            ),
            (
                "accel-launch --example mnist -F cuda -- -x",
                "-x",
                "accel-launch --prebuilt /b --example mnist -F cuda -x",
            ),
            (
                "accel-launch a.sh -- x",
                "-- x",
                "accel-launch --prebuilt /b a.sh -- x",
            ),
            ("accel-launch a.sh", "", "accel-launch --prebuilt /b a.sh"),
        ] {
            let mut warnings = Vec::new();
            let (launch, arguments) = (words(launch), words(arguments));
            let again = launched(&launch, &arguments, "/b".into(), &mut warnings);
            assert_eq!(again.join(" "), expected);
            assert!(warnings.is_empty(), "{warnings:?}");
        }
        let mut warnings = Vec::new();
        let launch = words("accel-launch a.sh");
        let again = launched(&launch, &words("x"), "/b".into(), &mut warnings);
        assert_eq!(again, launch);
        launched(&words("l --node-rank 1 a"), &[], "/b".into(), &mut warnings);
        assert_eq!(warnings.len(), 2);
    }

    #[test]
    fn what_is_gone_or_secret_is_said() {
        let temporary = tempfile::tempdir().unwrap();
        let path = temporary.path().join("program");
        std::fs::write(&path, "1").unwrap();
        let mut run = Provenance {
            arguments: words("program --lr 1"),
            binary: hash_file(&path).ok(),
            directory: Some(temporary.path().to_string_lossy().into_owned()),
            ..Provenance::default()
        };
        run.data
            .insert("train".into(), digest_folder(temporary.path()).unwrap());
        run.environment
            .insert("MLFLOW_TRACKING_URI".into(), "http://***@host".into());
        run.environment.insert("NCCL_DEBUG".into(), "INFO".into());
        run.environment.insert("SLURM_JOB_ID".into(), "7".into());
        let again = Reproduction::of(&run).unwrap();
        assert!(
            again.warnings()[0].contains("MLFLOW_TRACKING_URI"),
            "{:?}",
            again.warnings()
        );
        assert_eq!(again.warnings().len(), 1);
        let command = again.command();
        assert_eq!(command.get_program(), path.as_os_str());
        assert_eq!(command.get_args().collect::<Vec<_>>(), ["--lr", "1"]);
        let set: Vec<_> = command
            .get_envs()
            .filter_map(|(name, value)| value.map(|_| name))
            .collect();
        assert_eq!(set, ["NCCL_DEBUG"]);

        std::fs::write(&path, "2").unwrap();
        run.host.kernel = Some("0.1".into());
        let again = Reproduction::of(&run).unwrap();
        for (warning, expected) in
            again
                .warnings()
                .iter()
                .zip(["was built again", "MLFLOW", "the data train", "kernel"])
        {
            assert!(warning.contains(expected), "{warning}");
        }
        assert_eq!(again.warnings().len(), 4);

        let error = |run: &Provenance| Reproduction::of(run).unwrap_err();
        let with = |change: fn(&mut Provenance)| {
            let mut run = run.clone();
            change(&mut run);
            error(&run)
        };
        let ranks = with(|run| run.environment = [("WORLD_SIZE".into(), "2".into())].into());
        assert!(ranks.is_misuse());
        let masked = with(|run| run.arguments = words("program --token ***"));
        assert_says(&masked, "secret");
        let moved = with(|run| run.directory = Some("/no/such".into()));
        assert!(moved.is_not_found());
        std::fs::remove_file(&path).unwrap();
        let gone = error(&run);
        assert!(gone.is_not_found());
        assert_says(&gone, "build it again");
        assert!(error(&Provenance::default()).is_misuse());
    }
}
